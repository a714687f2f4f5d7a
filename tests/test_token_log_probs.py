"""Log-probabilities and entropy from one lm_head: spellings, casts, shifts, and what must not match."""

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.testing import run, run_oracle, worst_excess
from tests.helpers import reasons, rewritten

B, S, H, V = 2, 7, 16, 301


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    return {
        "x": torch.randn(B, S, H).to(dtype), "w": torch.randn(V, H).to(dtype), "t": torch.randint(0, V, (B, S)),
    }  # fmt: skip


def chosen(log_p, t):
    return log_p.gather(-1, t.unsqueeze(-1)).squeeze(-1)


def exp_of_log(logits, t):
    log_p = logits.log_softmax(-1)
    return chosen(log_p, t), -(log_p.exp() * log_p).sum(-1)


def softmax_times_log(logits, t):
    log_p = F.log_softmax(logits, dim=-1)
    return chosen(log_p, t), -torch.sum(log_p * F.softmax(logits, dim=-1), dim=-1)


def difference(logits, t):
    """logsumexp - sum(p · l), and the log-probabilities by logsumexp too."""
    log_p = logits.gather(-1, t.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    return log_p, torch.logsumexp(logits, dim=-1) - torch.sum(torch.softmax(logits, dim=-1) * logits, dim=-1)


def negative(logits, t):
    """The sum itself, without a sign, and a bonus made of it."""
    log_p = logits.log_softmax(-1)
    return chosen(log_p, t) * 2, 0.01 * (torch.exp(log_p) * log_p).sum(dim=-1).mean()


def divided_twice(logits, t):
    log_p = (logits / 0.7).log_softmax(-1)
    return chosen((logits / 0.7).log_softmax(-1), t), -(log_p.exp() * log_p).sum(-1)


def gathered_flat(logits, t):
    flat = logits.reshape(-1, logits.shape[-1])
    log_p = chosen(flat.log_softmax(-1), t.reshape(-1)).view(t.shape)
    return log_p, -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def entropy_of_flat(logits, t):
    flat = logits.view(-1, logits.shape[-1])
    return chosen(logits.log_softmax(-1), t), torch.logsumexp(flat, -1) - (flat.softmax(-1) * flat).sum(-1)


SPELLINGS = {
    f.__name__: f
    for f in (exp_of_log, softmax_times_log, difference, negative, divided_twice, gathered_flat, entropy_of_flat)
}
HEADS = {
    "plain": lambda x, w: F.linear(x, w),
    "float": lambda x, w: F.linear(x, w).float(),
    "temperature": lambda x, w: F.linear(x, w).float() / 0.7,
    "softcap": lambda x, w: 30 * torch.tanh(F.linear(x, w).float() / 30),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("fusion", ["token_log_probs", "log_probs_entropy"])
def test_spellings(fusion, name, head, dtype):
    """With the lm_head, or of logits that exist."""
    options = {"fusions": [fusion], "select": "always"}

    def function(x, w, t):
        return SPELLINGS[name](HEADS[head](x, w), t)

    inputs = tensors(dtype)
    fused = run(lambda **named: rewritten(function, options=options, **named)[0], inputs)
    _, report = rewritten(function, options=options, **inputs)
    if (fusion, name, head) == ("token_log_probs", "divided_twice", "softcap"):  # a temperature above a softcap
        assert "expected linear, found tanh" in reasons(report, fusion)
        return
    assert report.count(fusion) == 1, str(report)
    assert "softmax" not in report.graphs[-1].after
    used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), dtype)
    assert used[1] <= 1, used


def test_the_shift_and_logits_that_are_returned():
    def function(x, w, t):
        logits = F.linear(x, w)
        log_p, entropy = exp_of_log(logits[:, :-1].float(), t[:, 1:])
        return log_p, entropy, logits

    inputs = tensors(torch.bfloat16)
    (log_p, entropy, logits), report = rewritten(function, **inputs)
    assert report.count("token_log_probs") == 1, str(report)
    assert report.graphs[0].deferred == ("logits",), str(report)
    expected = function(**inputs)
    torch.testing.assert_close(log_p, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected[2])


NOT_ENTROPY = {
    "of other logits": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.sin().softmax(-1) * l.log_softmax(-1)).sum(-1)),
    "at another temperature": lambda l, t: (chosen((l / 0.7).log_softmax(-1), t), exp_of_log(l / 0.8, t)[1]),
    "rows in another order": lambda l, t: (
        chosen(l.reshape(-1, V).log_softmax(-1), t.reshape(-1)), exp_of_log(l.transpose(0, 1).reshape(-1, V), t.reshape(-1))[1],
    ),
    "written between": lambda l, t: (chosen((l / 0.7).log_softmax(-1), t), exp_of_log(l.mul_(2) / 0.7, t)[1]),
    "over rows": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.softmax(-1) * l.log_softmax(-1)).sum(1)),
    "softmax over rows": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.softmax(1) * l.log_softmax(-1)).sum(-1)),
    "squared": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.log_softmax(-1) * l.log_softmax(-1)).sum(-1)),
    "energy": lambda l, t: (chosen(l.log_softmax(-1), t), (l.softmax(-1) * l).sum(-1)),
    "dim kept": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.softmax(-1) * l.log_softmax(-1)).sum(-1, keepdim=True)),
    "in float64": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.softmax(-1) * l.log_softmax(-1)).sum(-1, dtype=torch.float64)),
    "probabilities too": lambda l, t: (chosen(l.log_softmax(-1), t), softmax_times_log(l, t)[1] * l.softmax(-1)[..., 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ENTROPY)
def test_what_is_no_entropy(name):
    def function(x, w, t):
        return NOT_ENTROPY[name](F.linear(x, w), t)

    inputs = tensors()
    found, report = rewritten(function, **inputs)
    assert report.count("token_log_probs") == 0, str(report)
    for ours, expected in zip(found, function(**inputs), strict=True):
        torch.testing.assert_close(ours, expected)


def after_the_entropy(x, w, t):
    """The logits that are gathered from are a copy, made behind the entropy and used elsewhere."""
    logits = F.linear(x, w)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    copy = logits.clone()
    return chosen(copy.log_softmax(-1), t), entropy, copy * 2


def one_row(x, w, t):
    return exp_of_log(F.linear(x[0, 0], w), t[0, 0])


def by_keywords(x, w, t):
    logits = F.linear(x, w)
    log_p = torch.squeeze(input=logits.gather(-1, t.unsqueeze(-1)), dim=-1) - torch.logsumexp(input=logits, dim=-1)
    return log_p, torch.logsumexp(input=logits, dim=-1) - torch.sum(torch.softmax(logits, dim=-1) * logits, dim=-1)


@pytest.mark.parametrize("fusion", ["token_log_probs", "log_probs_entropy"])
@pytest.mark.parametrize("function", [after_the_entropy, one_row, by_keywords], ids=lambda f: f.__name__)
def test_what_is_fused_or_declined_but_never_breaks(function, fusion):
    inputs = tensors()
    found, report = rewritten(function, **inputs, options={"fusions": [fusion], "select": "always"})
    assert report.graphs, "the graph fell back"
    for ours, expected in zip(found, function(**inputs), strict=True):
        torch.testing.assert_close(ours, expected)
    if function is not after_the_entropy:
        assert report.count(fusion) == 1, str(report)


def test_slices_of_logits_stay_where_they_lie():
    def function(x, w, t):
        return exp_of_log(F.linear(x, w)[:, :-1].float() / 0.7, t[:, 1:])

    _, report = rewritten(
        function, **tensors(torch.bfloat16), options={"fusions": ["log_probs_entropy"], "select": "always"}
    )
    assert report.count("log_probs_entropy") == 0
    assert "slice" in reasons(report, "log_probs_entropy")


@pytest.mark.parametrize("fusion", ["token_log_probs", "log_probs_entropy"])
def test_results_are_no_views(fusion):
    def function(x, w, t):
        log_p, entropy = exp_of_log(F.linear(x, w), t)
        log_p += 1
        return log_p, entropy

    inputs = tensors()
    inputs["w"].requires_grad_()
    found, report = rewritten(function, **inputs, options={"fusions": [fusion], "select": "always"})
    assert report.count(fusion) == 1, str(report)
    for ours, expected in zip(found, function(**inputs), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("fusion", ["token_log_probs", "log_probs_entropy"])
@pytest.mark.parametrize("wanted", [0, 1], ids=["log_probs", "entropy"])
def test_only_one_of_both_has_a_gradient(wanted, fusion):
    """The entropy for the log only, or the entropy alone."""

    def function(x, w, t):
        results = list(exp_of_log(F.linear(x, w), t))
        results[1 - wanted] = results[1 - wanted].detach()
        return tuple(results)

    inputs = tensors()
    ours, theirs = (inputs["x"].clone().requires_grad_() for _ in range(2))
    found, report = rewritten(function, ours, inputs["w"], inputs["t"], options={"fusions": [fusion], "select": "always"})
    assert report.count(fusion) == 1, str(report)
    found[wanted].sum().backward()
    function(theirs, inputs["w"], inputs["t"])[wanted].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_entropy_without_a_gradient_stays_beside_the_loss():
    def function(x, w, t):
        logits = F.linear(x, w)
        with torch.no_grad():
            entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return chosen(logits.log_softmax(-1), t), entropy

    inputs = tensors()
    inputs["w"].requires_grad_()
    found, report = rewritten(function, **inputs)
    assert report.count("token_log_probs") == 0
    for ours, expected in zip(found, function(**inputs), strict=True):
        torch.testing.assert_close(ours, expected)
    assert not found[1].requires_grad
