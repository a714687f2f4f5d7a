"""Losses as people write them: one meaning, one reader."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical

import fx_fusion
from fx_fusion.ops.on_cpu import interpreting, kernels_on_cpu
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.testing import rewriting_backend
from tests.helpers import reasons, rewritten
from tests.losses import compare

B, S, H, V = 2, 6, 8, 33
generator = torch.Generator().manual_seed(0)
x, w = torch.randn(B, S, H, generator=generator), torch.randn(V, H, generator=generator)
y = torch.randint(0, V, (B, S), generator=generator)


def log_p(x, w):
    return F.log_softmax(F.linear(x, w), -1)


ONE_LOSS = {
    "mT": lambda x, w, y: F.cross_entropy(F.linear(x, w).mT, y),
    "one_row": lambda x, w, y: F.cross_entropy(F.linear(x[0, 0], w), y[0, 0]),
    "lse_minus_gathered": lambda x, w, y: (
        lambda z: (z.logsumexp(-1) - z.gather(-1, y[..., None]).squeeze(-1)).mean()
    )(F.linear(x, w)),
    "lse_minus_gathered_index": lambda x, w, y: (
        lambda z: (z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]).mean()
    )(F.linear(x, w)),
    "lse_minus_gathered_column": lambda x, w, y: (
        lambda z: (z.logsumexp(-1) - z.gather(-1, y.view(-1, 1))[:, 0]).mean()
    )(F.linear(x, w).flatten(0, 1)),
    "lse_minus_gathered_view": lambda x, w, y: (
        lambda z: (z.logsumexp(-1) - z.gather(-1, y.view(-1, 1)).view(-1)).mean()
    )(F.linear(x, w).flatten(0, 1)),
    "minus_lse_keepdim": lambda x, w, y: (
        lambda z: -(z - z.logsumexp(-1, keepdim=True)).gather(-1, y[..., None]).mean()
    )(F.linear(x, w)),
    "take_along_dim": lambda x, w, y: -torch.take_along_dim(log_p(x, w), y[..., None], -1).mean(),
    "take_along_dim_by_name": lambda x, w, y: torch.take_along_dim(log_p(x, w), indices=y[..., None], dim=2).sum(),
    "one_hot": lambda x, w, y: -(F.one_hot(y, V) * log_p(x, w)).sum(-1).mean(),
    "one_hot_float_behind": lambda x, w, y: -(log_p(x, w) * F.one_hot(y, V).float()).sum(dim=2).sum(),
    "one_hot_of_all": lambda x, w, y: -(F.one_hot(y, V) * log_p(x, w)).sum(),
    "one_hot_as_target": lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, V), F.one_hot(y.view(-1), V).float()),
    "one_hot_smoothed": lambda x, w, y: F.cross_entropy(
        F.linear(x, w).view(-1, V), F.one_hot(y.view(-1), V).to(x.dtype), label_smoothing=0.1, reduction="sum"
    ),
    "shifted_index": lambda x, w, y: -F.log_softmax(F.linear(x, w)[:, :-1], -1).gather(-1, y[:, 1:, None]).mean(),
    "shifted_index_squeezed": lambda x, w, y: (
        F.log_softmax(F.linear(x, w)[:, :-1], -1).gather(-1, y[..., 1:, None]).squeeze(-1).exp().sum()
    ),
    "einsum_dots": lambda x, w, y: F.cross_entropy(torch.einsum("...d,vd->...v", x, w).view(-1, V), y.view(-1)),
    "view_of_index": lambda x, w, y: -log_p(x, w).view(-1, V).gather(1, y.view(-1, 1)).mean(),
    "reshape_of_index": lambda x, w, y: -log_p(x, w).gather(-1, y.reshape(B, S, 1)).squeeze(-1).sum(),
    "nll_of_view": lambda x, w, y: F.nll_loss(log_p(x, w).view(-1, V), y.view(-1)),
    "nll_module": lambda x, w, y: torch.nn.NLLLoss(reduction="sum")(
        torch.nn.LogSoftmax(dim=-1)(F.linear(x, w)).flatten(0, 1), y.flatten()
    ),
    "categorical": lambda x, w, y: -Categorical(logits=F.linear(x, w), validate_args=False).log_prob(y).mean(),
    "matmul_t": lambda x, w, y: F.cross_entropy((x @ w.t()).view(-1, V), y.view(-1)),
    "matmul_T": lambda x, w, y: F.cross_entropy((x @ w.T).view(-1, V), y.view(-1)),
    "matmul_transposed": lambda x, w, y: F.cross_entropy(torch.matmul(x, w.transpose(0, 1)).view(-1, V), y.view(-1)),
    "mm": lambda x, w, y: F.cross_entropy(torch.mm(x.view(-1, H), w.t()), y.view(-1)),
    "addmm": lambda x, w, y: F.cross_entropy(torch.addmm(torch.ones(V), x.view(-1, H), w.t()), y.view(-1)),
    "last_token": lambda x, w, y: F.cross_entropy(F.linear(x, w)[:, -1], y[:, -1]),
    "first_row": lambda x, w, y: F.cross_entropy(F.linear(x, w)[0], y[0]),
    "sliced_twice": lambda x, w, y: F.cross_entropy(F.linear(x, w)[:, 1:][:, 2], y[:, 3]),
    "narrow": lambda x, w, y: F.cross_entropy(F.linear(x, w).narrow(1, 0, 5).flatten(0, 1), y[:, :5].flatten()),
    "squeezed": lambda x, w, y: F.cross_entropy(F.linear(x[:, :1], w).squeeze(1), y[:, 0]),
    "length_first": lambda x, w, y: F.cross_entropy(
        F.linear(x, w).transpose(0, 1).contiguous().view(-1, V), y.t().reshape(-1)
    ),
    "length_first_by_permute": lambda x, w, y: F.cross_entropy(
        torch.permute(F.linear(x, w), (1, 0, 2)).reshape(-1, V), y.t().reshape(-1)
    ),
    "einsum": lambda x, w, y: F.cross_entropy(torch.einsum("bsd,vd->bsv", x, w).reshape(-1, V), y.view(-1)),
    "indexed": lambda x, w, y: -log_p(x, w).view(-1, V)[torch.arange(B * S), y.view(-1)].mean(),
    "indexed_from_the_end": lambda x, w, y: -log_p(x, w).view(-1, V)[torch.arange(0, B * S), y.view(-1) - V].sum(),
    "lse_minus_indexed": lambda x, w, y: (
        lambda z: (z.logsumexp(-1) - z[torch.arange(z.shape[0], device=z.device), y.view(-1)]).mean()
    )(F.linear(x, w).view(-1, V)),
    "some_rows": lambda x, w, y: F.cross_entropy(
        *(lambda rows: (F.linear(x, w).view(-1, V)[rows], y.view(-1)[rows]))(torch.tensor([3, 1, 1, -1]))
    ),
    "some_tokens": lambda x, w, y: F.cross_entropy(F.linear(x, w)[:, torch.arange(5)].reshape(-1, V), y[:, 1:].reshape(-1)),
}


PADDED = V - 5  # classes, in a head that has more
PADDED_VOCABULARY = {
    "cut": lambda x, w, b, y: F.cross_entropy(F.linear(x, w)[..., :PADDED].reshape(-1, PADDED), y.view(-1)),
    "cut_from_the_end": lambda x, w, b, y: F.cross_entropy(F.linear(x, w, b)[:, :, :-5].flatten(0, 1), y.flatten()),
    "cut_twice": lambda x, w, b, y: F.cross_entropy(F.linear(x, w, b)[..., :-2][..., :PADDED].mT, y),
    "cut_behind_a_bias": lambda x, w, b, y: F.cross_entropy((F.linear(x, w) + b)[..., :PADDED].flatten(0, 1), y.flatten()),
    "cut_behind_a_softcap": lambda x, w, b, y: F.cross_entropy(
        (5 * torch.tanh(F.linear(x, w, b) / 5))[..., :PADDED].flatten(0, 1), y.flatten(), label_smoothing=0.1
    ),
    "cut_and_shifted": lambda x, w, b, y: F.cross_entropy(
        F.linear(x, w)[..., :PADDED][:, :-1].reshape(-1, PADDED), y[:, 1:].reshape(-1)
    ),
}


@pytest.mark.parametrize("name", PADDED_VOCABULARY)
def test_the_first_classes_of_a_head(name):
    compare(PADDED_VOCABULARY[name], x, w, torch.linspace(-1, 1, V), y % PADDED)


@pytest.mark.parametrize("cut", [slice(2, 30), slice(None, None, 2), slice(0, 0)])
def test_other_classes_of_a_head(cut):
    """Not the first ones: no vocabulary that was padded."""

    def function(x, w, y):
        z = F.linear(x, w)[..., cut].flatten(0, 1)
        return F.cross_entropy(z, y.flatten() % max(z.shape[-1], 1)) if z.shape[-1] else z.sum()

    result, report = rewritten(function, x, w, y)
    assert report.count("linear_cross_entropy") == 0, str(report)
    torch.testing.assert_close(result, function(x, w, y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("returned", ["all", "cut"])
def test_logits_of_a_padded_vocabulary_wait(returned):
    def function(x, w, y):
        z = F.linear(x, w)
        cut = z[..., :PADDED]
        return F.cross_entropy(cut.flatten(0, 1), y.flatten()), z if returned == "all" else cut

    (loss, logits), report = rewritten(function, x, w, y % PADDED)
    report.assert_fused(linear_cross_entropy=1)
    assert isinstance(logits, DeferredTensor)
    torch.testing.assert_close((loss, logits + 0), function(x, w, y % PADDED), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ONE_LOSS)
def test_a_loss_behind_a_head(name):
    compare(ONE_LOSS[name], x, w, y)


@pytest.mark.parametrize("name", ["lse_minus_gathered", "view_of_index", "one_hot", "einsum", "mT", "last_token", "length_first"])
def test_a_loss_of_symbolic_sizes(name):
    def function(x, w, y):
        return ONE_LOSS[name](x, w, y) if name not in ("einsum",) else F.cross_entropy(
            torch.einsum("bsd,vd->bsv", x, w).flatten(0, 1), y.flatten()
        )  # fmt: skip

    result, report = rewritten(function, x, w, y, dynamic=True)
    assert report.count("linear_cross_entropy") == 1, str(report)
    torch.testing.assert_close(result, function(x, w, y), rtol=1e-5, atol=1e-5)


def before_a_write(x, w, y):
    rows = torch.tensor([3, 1, 1, 0])
    logits = F.linear(x, w).view(-1, V)[rows]
    rows.add_(1)
    return F.cross_entropy(logits, y.view(-1)[rows])


def behind_a_write(x, w, y):
    rows = torch.arange(B * S)
    rows.copy_(torch.arange(B * S - 1, -1, -1))
    return -log_p(x, w).view(-1, V)[rows, y.view(-1)].mean()


@pytest.mark.parametrize("function", [before_a_write, behind_a_write])
def test_row_numbers_that_are_written(function):
    """They are what they were where the logits were indexed."""
    result, report = rewritten(function, x, w, y)
    assert report.count("linear_cross_entropy") == 0, str(report)
    torch.testing.assert_close(result, function(x, w, y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [V, -V - 1])
def test_a_class_out_of_range_is_not_another_class(wrong):
    """As in eager, an error; on a GPU NaN."""
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        rewritten(ONE_LOSS["indexed"], x, w, y.clone().fill_(wrong))


WITH_ENTROPY = {
    "indexed": lambda z, y: (lambda lp: (
        lp[torch.arange(B * S), y.view(-1)], -(lp.exp() * lp).sum(-1)
    ))(z.view(-1, V).log_softmax(-1)),
    "einsum": lambda z, y: (lambda lp: (
        lp.gather(-1, y[..., None]).squeeze(-1), -torch.einsum("bsv,bsv->bs", lp.exp(), lp)
    ))(z.log_softmax(-1)),
    "negated_inside": lambda z, y: (lambda lp: (
        lp.gather(-1, y[..., None]).squeeze(-1), (lp.exp() * -lp).sum(-1)
    ))(z.log_softmax(-1)),
    "negated_before": lambda z, y: (lambda lp: (
        lp.gather(-1, y[..., None]).squeeze(-1), (-lp * z.softmax(-1)).sum(-1)
    ))(z.log_softmax(-1)),
    "categorical": lambda z, y: (lambda d: (d.log_prob(y), d.entropy()))(Categorical(logits=z, validate_args=False)),
    "reduced": lambda z, y: (lambda lp: (
        -lp.gather(-1, y[..., None]).squeeze(-1).mean(), -(lp.exp() * lp).sum(-1).mean()
    ))(z.log_softmax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_ENTROPY)
def test_log_probabilities_and_entropy(name):
    def function(x, w, y):
        return WITH_ENTROPY[name](F.linear(x, w), y)

    leaves = [[t.clone().requires_grad_() for t in (x, w)] for _ in range(2)]
    ours, report = rewritten(function, *leaves[0], y)
    report.assert_fused(token_log_probs=1, linear_cross_entropy=0)
    theirs = function(*leaves[1], y)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    found, expected = (
        torch.autograd.grad(log_p.sum() + (entropy * 0.3).square().sum(), given)
        for (log_p, entropy), given in zip((ours, theirs), leaves, strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


TABLES = {
    "shifted_rows": lambda lp, y: lp[torch.arange(1, B * S), y[1:]],
    "rows_and_classes_swapped": lambda lp, y: lp[y % (B * S), torch.arange(B * S)],
    "another_order": lambda lp, y: lp[torch.arange(B * S - 1, -1, -1), y],
    "every_class_of_some_rows": lambda lp, y: lp[y % (B * S)],
    "gathered_rows": lambda lp, y: lp.gather(0, y[None, :V].expand(1, B * S)[:, :1] % (B * S)),
    "two_classes_a_row": lambda lp, y: lp.gather(-1, torch.stack([y, y.flip(0)], -1)),
    "one_hot_of_rows": lambda lp, y: (F.one_hot(y, V) * lp).sum(0),
    "one_hot_twice": lambda lp, y: (F.one_hot(y, V) * 2 * lp).sum(-1),
    "soft": lambda lp, y: (torch.softmax(lp.detach() * 2, -1) * lp).sum(-1),
    "of_another_dim": lambda lp, y: lp.t().log_softmax(-1)[:, :1].gather(-1, torch.zeros(V, 1, dtype=torch.long)),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_picks_no_class_of_every_row(name):
    def function(x, w, y):
        return TABLES[name](log_p(x, w).view(-1, V), y.view(-1)).sum()

    result, report = rewritten(function, x, w, y)
    assert report.count("linear_cross_entropy") + report.count("cross_entropy") <= (name == "of_another_dim"), str(report)
    torch.testing.assert_close(result, function(x, w, y), rtol=1e-5, atol=1e-5)


UNREAD = {
    "in_pairs": (
        lambda z, y: -z.view(-1, V).log_softmax(-1)[torch.arange(B * S - 1, -1, -1), y.view(-1)].mean(), "picked in pairs",
    ),
    "soft_targets": (lambda z, y: F.cross_entropy(z, z.detach().softmax(-1)), "targets that are probabilities"),
    "kl": (lambda z, y: F.kl_div(z.log_softmax(-1), z.detach().softmax(-1), reduction="batchmean"), "divergence"),
    "log_of_softmax": (lambda z, y: -z.softmax(-1).log().gather(-1, y[..., None]).mean(), "write log_softmax"),
    "images": (lambda z, y: F.cross_entropy(z.view(B, 3, S, 11), y[:, :1, None].expand(B, S, 11) % 3), "read as (rows"),
    "nll_of_logits": (lambda z, y: F.nll_loss(z.view(-1, V), y.view(-1)), "no log_softmax"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_loss_that_is_not_read_is_named(name):
    function, reason = UNREAD[name]
    result, report = rewritten(lambda x, w, y: function(F.linear(x, w), y), x, w, y)
    assert report.count("linear_cross_entropy") + report.count("cross_entropy") == 0
    assert reason in reasons(report, "cross_entropy"), str(report)
    torch.testing.assert_close(result, function(F.linear(x, w), y), rtol=1e-5, atol=1e-5)


MASKED = torch.zeros(V).index_fill_(0, torch.tensor([7]), -torch.inf)
LEFT_ALONE = {
    "float64": lambda z, y: F.nll_loss(z.log_softmax(-1, dtype=torch.float64).view(-1, V), y.view(-1)),
    "gathered_float64": lambda z, y: F.log_softmax(z, -1, dtype=torch.float64).gather(-1, y[..., None]).sum(),
}


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_entropy_beside_a_masked_class(kernels):
    """Categorical's: p · log p is 0 where a logit is -inf."""

    def function(z):
        policy = Categorical(logits=z + MASKED, validate_args=False)
        return policy.log_prob(y % 7).sum() + (policy.entropy() * 0.3).square().sum()

    leaves = [torch.randn(B, S, V, generator=torch.Generator().manual_seed(3)).requires_grad_()]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    with kernels_on_cpu(kernels and interpreting()):
        ours, report = rewritten(function, leaves[0])
        found = torch.autograd.grad(ours, leaves[0])[0]
    report.assert_fused(log_probs_entropy=1)
    theirs = function(leaves[1])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, torch.autograd.grad(theirs, leaves[1])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_kernels_would_compute_otherwise_is_eagers_to_the_bit(name):
    z = torch.randn(B, S, V, generator=generator)
    leaves = [z.clone().requires_grad_() for _ in range(2)]
    ours, report = rewritten(lambda z: LEFT_ALONE[name](z, y), leaves[0])
    theirs = LEFT_ALONE[name](leaves[1], y)
    torch.testing.assert_close(ours, theirs, rtol=1e-12 if ours.dtype == torch.float64 else 1e-6, atol=0)
    assert ours.isfinite()
    found, expected = (torch.autograd.grad(t, leaf)[0] for t, leaf in zip((ours, theirs), leaves, strict=True))
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_head_transposed_without_gradients_has_none():
    """The output projection is frozen; its table is trained elsewhere."""
    def function(x, w):
        with torch.no_grad():
            turned = w.t()
        return F.cross_entropy(x @ turned, target)

    x, w, target = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True), torch.arange(6)
    loss, report = rewritten(function, x, w)
    assert report.count("linear_cross_entropy") == 0, str(report)
    found = torch.autograd.grad(loss, (x, w), allow_unused=True)
    expected = torch.autograd.grad(function(x, w), (x, w), allow_unused=True)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] is expected[1] is None


def test_another_tensor_in_the_shape_of_the_log_probabilities():
    def function(x, w):
        logp = F.linear(x, w).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
        return x[:, 0].view_as(logp).mean()

    x, w, target = torch.randn(6, 8), torch.randn(20, 8), torch.arange(6)
    torch.testing.assert_close(rewritten(function, x, w)[0], function(x, w))


def test_rows_from_a_changing_one_on():
    """``logits[:, -n:]`` of as many as there are targets: a bound of a slice is a node."""

    def function(x, w, y):
        z = F.linear(x, w)[:, :-1]
        return F.cross_entropy(z[:, -y.size(1) :].flatten(0, 1), y.flatten())

    compiled = torch.compile(function, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for n in (3, 4, 2):
            x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
            found, expected = (f(x_, w_, y[:, :n]) for f in (compiled, function))
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(*(torch.autograd.grad(loss, (x_, w_)) for loss in (found, expected)))
    assert report.count("linear_cross_entropy") == len(report.graphs) == 1, str(report)


REASONS = {
    "smoothing changes between calls": lambda x, w, y, s: F.cross_entropy(x @ w.t(), y, label_smoothing=s),
    "not read; hand over the classes": lambda x, w, y, s: F.cross_entropy(x @ w.t(), F.one_hot(y, V).float(), w[:, 0].exp()) * s,
}


@pytest.mark.parametrize("why", REASONS)
def test_the_reason_is_the_reason(why):
    given = x[0], w, y[0]
    compiled = torch.compile(REASONS[why], backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for s in (0.1, 0.2):
            torch.testing.assert_close(compiled(*given, s), REASONS[why](*given, s))
    assert why in reasons(report, "cross_entropy"), str(report)


@pytest.mark.parametrize("clamp", ["clamp(min=1)", "clamp_min(1)"])
def test_a_z_loss_over_at_least_one_row(clamp):
    def function(x, w, y):
        z = F.linear(x, w).flatten(0, 1)
        counts = y.flatten() != -100
        rows = counts.sum().clamp(min=1) if "(min" in clamp else counts.sum().clamp_min(1)
        return F.cross_entropy(z, y.flatten()) + 1e-4 * ((z.logsumexp(-1).square() * counts).sum() / rows)

    compare(function, x, w, y.masked_fill(y < 9, -100))
