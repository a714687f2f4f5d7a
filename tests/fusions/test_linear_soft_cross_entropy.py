"""lm_head and a loss against distributions: distillation and soft targets as people write them, alone and beside the usual
cross-entropy; what is left alone and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_fusion
from fx_fusion.kernels import linear_soft_cross_entropy as module
from tests.helpers import reasons, rewriting_backend, rewritten, tiny_llama, tokens
from tests.losses import H, M, V, head, ignoring, target, x

B, T = 3, 2.0
generator = torch.Generator().manual_seed(9)
teacher = torch.randn(M, V, generator=generator) * 2
mask = (torch.rand(M, generator=generator) > 0.4).float()


def kl(z, t, **options):
    return F.kl_div(F.log_softmax(z, -1), F.softmax(t, -1), **options)


def by_hand(z, t):
    p = t.softmax(-1)
    return (p * (p.log() - z.log_softmax(-1))).sum(-1).mean()


def as_trl(z, t):
    """Generalized distillation at its forward end: log-targets, a sum over those that count."""
    student, log_q = F.log_softmax(z / T, dim=-1), F.log_softmax(t / T, dim=-1)
    each = F.kl_div(student, log_q, reduction="none", log_target=True)
    counts = mask != 0
    return (each * counts[:, None]).sum() / counts.sum()


def of_sequences(z, t):
    z, t = z.view(B, -1, V), t.view(B, -1, V)
    each = -(t.softmax(-1) * z.log_softmax(-1)).sum(-1)
    return ((each * mask.view(B, -1)).sum(1) / mask.view(B, -1).sum(1)).mean()


SPELLINGS = {  # and what the kernel reads
    "batchmean": (lambda z, t: kl(z / T, t / T, reduction="batchmean") * (T * T), "logits"),
    "sum": (lambda z, t: kl(z, t, reduction="sum") / 7, "logits"),
    "mean": (lambda z, t: kl(z, t, reduction="mean"), "logits"),
    "rows": (lambda z, t: (kl(z, t, reduction="none").sum(-1) * mask).sum() / mask.sum(), "logits"),
    "mean of rows": (lambda z, t: kl(z, t, reduction="none").sum(dim=1).mean(), "logits"),
    "rows, kept dim": (lambda z, t: (kl(z, t, reduction="none").sum(-1, keepdim=True) * mask[:, None]).sum(), "logits"),
    "mean of classes": (lambda z, t: (kl(z, t, reduction="none").mean(-1) * mask).mean(), "logits"),
    "module": (lambda z, t: nn.KLDivLoss(reduction="batchmean")(z.log_softmax(-1), t.softmax(-1)), "logits"),
    "float": (lambda z, t: kl(z.float(), t.float() / 3, reduction="batchmean"), "logits"),
    "log target": (
        lambda z, t: F.kl_div(z.log_softmax(-1), t.log_softmax(-1), reduction="batchmean", log_target=True), "logits"
    ),
    "TRL": (as_trl, "logits"),
    "product": (lambda z, t: -(t.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(), "logits"),
    "product of minus": (lambda z, t: (-z.log_softmax(-1) * t.softmax(-1)).sum() / M, "logits"),
    "sequences": (of_sequences, "logits"),
    "by hand": (by_hand, "probabilities"),
    "by hand, both": (lambda z, t: (t.softmax(-1) * (t.log_softmax(-1) - z.log_softmax(-1))).sum(-1).mean(), "logits"),
    "by hand, exp": (lambda z, t: (lambda q: (q.exp() * (q - z.log_softmax(-1))).sum(-1).mean())(t.log_softmax(-1)), "logits"),
    "by hand, minus": (lambda z, t: -(t.softmax(-1) * (z.log_softmax(-1) - t.log_softmax(-1))).sum(-1).mean(), "logits"),
    "cross_entropy": (lambda z, t: F.cross_entropy(z, t.softmax(-1)), "logits"),
    "cross_entropy, sum": (lambda z, t: F.cross_entropy(z / T, t.softmax(-1), reduction="sum") * 0.1, "logits"),
    "cross_entropy, rows": (lambda z, t: (F.cross_entropy(z, t.softmax(-1), reduction="none") * mask).mean(), "logits"),
    "probabilities": (lambda z, t: F.kl_div(z.log_softmax(-1), t.abs() / 9, reduction="batchmean"), "probabilities"),
    "log-probabilities": (
        lambda z, t: F.kl_div(z.log_softmax(-1), -t.abs(), reduction="sum", log_target=True), "log_probabilities"
    ),
    "any coefficients": (lambda z, t: (t * z.log_softmax(-1)).sum(), "probabilities"),
    "a softmax that is read": (lambda z, t: (lambda q: F.cross_entropy(z, q) + q.max())(t.softmax(-1)), "probabilities"),
    "a capped teacher": (lambda z, t: kl(z, 5 * torch.tanh(t / 5), reduction="batchmean"), "logits"),
}  # fmt: skip

BESIDE_CLASSES = {
    "weighed": lambda z, t, y: 0.3 * F.cross_entropy(z, y) + 0.7 * kl(z / T, t / T, reduction="batchmean") * T**2,
    "soft first": lambda z, t, y: kl(z, t, reduction="batchmean") + F.cross_entropy(z, y, reduction="sum") / 5,
    "scaled sum": lambda z, t, y: (F.cross_entropy(z, y) + kl(z / T, t, reduction="sum")) / 4,
    "masked": lambda z, t, y: (
        (F.cross_entropy(z, y, reduction="none") * mask).sum() / mask.sum()
        + (kl(z / T, t / T, reduction="none").sum(-1) * mask).sum() / mask.sum()
    ),
    "two temperatures": lambda z, t, y: F.cross_entropy(z / 0.5, y) + kl(z / T, t / T, reduction="batchmean"),
    "differences": lambda z, t, y: (
        -(t.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()
        - z.log_softmax(-1).gather(-1, y.clamp(min=0)[:, None]).squeeze(-1).mean()
    ),
    "no temperature": lambda z, t, y: F.cross_entropy(z, y) + F.cross_entropy(z, t.softmax(-1)),
}


def compare(function, *more, options=None, fused=1):
    """Loss and gradients as eager's, and how often the fusion fired."""
    given = [[x.clone().requires_grad_(), head.clone().requires_grad_()] for _ in range(2)]
    loss, report = rewritten(function, *given[0], *more, options=options)
    expected = function(*given[1], *more)
    assert report.count("linear_soft_cross_entropy") == fused, str(report)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    (loss * 0.7).sum().backward()
    (expected * 0.7).sum().backward()
    for ours, theirs in zip(*given, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5, equal_nan=True)
    return report


def call_of(function, *given):
    graphs = []

    def backend(gm, examples):
        compiled = rewriting_backend(select="always")(gm, examples)
        graphs.append(gm)
        return compiled

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*given)
    (call,) = [n for gm in graphs for n in gm.graph.nodes if "linear_soft_cross_entropy" in str(n.target)]
    return call


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    loss, kind = SPELLINGS[name]

    def function(x, w, t):
        return loss(F.linear(x, w), t)

    report = compare(function, teacher)
    assert not reasons(report, "cross_entropy"), "nothing is said of what is fused"
    assert f"{M}, {V}] = log_softmax" not in report.graphs[0].after
    assert kind in call_of(function, x.clone().requires_grad_(), head, teacher).args


def test_shifted_by_one():
    """The last position of each sequence has no next token: its rows have no logits of the student."""

    def function(x, w, t):
        z, t = F.linear(x.view(B, -1, H), w)[:, :-1], t.view(B, -1, V)[:, :-1]
        return F.kl_div(F.log_softmax(z / T, -1), F.softmax(t / T, -1), reduction="batchmean") * T**2

    def laid_out_again(x, w, t):
        z, t = F.linear(x.view(B, -1, H), w)[..., :-1, :].contiguous(), t.view(B, -1, V)[..., :-1, :].contiguous()
        return F.kl_div(F.log_softmax(z.view(-1, V), -1), F.softmax(t.view(-1, V), -1), reduction="batchmean")

    for loss in (function, laid_out_again):
        compare(loss, teacher)


@pytest.mark.parametrize("labels", [target, ignoring], ids=["all labels", "some"])
@pytest.mark.parametrize("name", BESIDE_CLASSES)
def test_a_cross_entropy_of_the_same_logits(name, labels):
    report = compare(lambda x, w, t, y: BESIDE_CLASSES[name](F.linear(x, w), t, y), teacher, labels)
    report.assert_fused(linear_soft_cross_entropy=1, linear_cross_entropy=0, cross_entropy=0)
    assert "with the cross-entropy" in str(report)


@pytest.mark.parametrize("name", ["batchmean", "rows", "product", "product of minus", "by hand, minus", "sequences", "cross_entropy"])
def test_nothing_is_scaled_where_backward_is_called_at_once(name, monkeypatch):
    """The gradients of the forward are those of the number: a factor of 1 moves no memory."""
    factors, original = [], module.factor_behind
    monkeypatch.setattr(module, "factor_behind", lambda *given: factors.append(original(*given)) or factors[-1])
    for beside in (lambda z: 0, lambda z: -F.cross_entropy(z, ignoring) / 3):
        given = [x.clone().requires_grad_(), head.clone().requires_grad_()]
        loss, _ = rewritten(lambda x, w, b=beside: (lambda z: SPELLINGS[name][0](z, teacher) + b(z))(F.linear(x, w)), *given)
        loss.backward()
    assert [float(f) for f in factors] == [1.0, 1.0]


def test_no_label_counts():
    """PyTorch's mean over no class is NaN; its gradient is that of the soft part."""
    nothing = torch.full((M,), -100)
    compare(lambda x, w, t, y: BESIDE_CLASSES["weighed"](F.linear(x, w), t, y), teacher, nothing)


def teacher_of_its_own(z, t):
    q = t.softmax(-1)
    return (q * z.log_softmax(-1) * torch.linspace(0, 1, V)).sum()


LEFT = {
    "a divergence the other way": lambda z, t: (z.softmax(-1) * (z.log_softmax(-1) - t.log_softmax(-1))).sum(-1).mean(),
    "of a mixture": lambda z, t: F.kl_div(((z.softmax(-1) + t.softmax(-1)) / 2).log(), t.softmax(-1), reduction="batchmean"),
    "its exponential": lambda z, t: torch.exp(-kl(z, t, reduction="none").sum(-1)).mean(),
    "its maximum": lambda z, t: kl(z, t, reduction="none").sum(-1).max(),
    "weights of classes": teacher_of_its_own,
    "over another dim": lambda z, t: F.kl_div(z.log_softmax(0), t.softmax(0), reduction="batchmean"),
    "smoothing": lambda z, t: F.cross_entropy(z, t.softmax(-1), label_smoothing=0.1),
    "weights": lambda z, t: F.cross_entropy(z, t.softmax(-1), torch.linspace(0.5, 1, V)),
    "one of a row": lambda z, t: (z.log_softmax(-1) * t[:, :1]).sum(),
    "logits that are read": lambda z, t: kl(z, t, reduction="batchmean") + z.square().mean(),
    "capped logits": lambda z, t: kl(5 * torch.tanh(z / 5), t, reduction="batchmean"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    report = compare(lambda x, w, t: LEFT[name](F.linear(x, w), t), teacher, fused=0)
    assert report.count("linear_cross_entropy") == 0


def test_reasons():
    for name, words in {
        "its maximum": "linear in each row's loss", "weights of classes": "weights of their own",
        "capped logits": "capped", "smoothing": "without weights or smoothing", "logits that are read": "also used outside",
    }.items():  # fmt: skip
        _, report = rewritten(lambda x, w, t, f=LEFT[name]: f(F.linear(x, w), t), x.clone().requires_grad_(), head, teacher)
        assert words in str(report), (name, str(report))


def test_a_distribution_with_a_gradient_stays():
    def function(x, w, t):
        return kl(F.linear(x, w), t, reduction="batchmean")

    _, report = rewritten(function, x.clone().requires_grad_(), head, teacher.clone().requires_grad_())
    report.assert_fused(linear_soft_cross_entropy=0)


def test_an_entropy_is_no_soft_target():
    """Without gradients nothing is known of who is whose teacher; the logits have one reader anyway."""

    def function(x, w):
        z = F.linear(x, w)
        return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()

    with torch.no_grad():
        found, report = rewritten(function, x, head)
    torch.testing.assert_close(found, function(x, head))
    report.assert_fused(linear_soft_cross_entropy=0)


def test_bfloat16_is_as_near_as_eager():
    def loss(x, w, t):
        z = F.linear(x, w)
        return kl(z / T, t / T, reduction="none").sum(-1).mean()

    rows, w, t = torch.randn(64, H) * 0.3, torch.randn(V, H), torch.randn(64, V) * 2
    results = []
    for dtype, ours in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        given = [n.bfloat16().to(dtype).requires_grad_() for n in (rows, w)]
        if ours:
            out, report = rewritten(loss, *given, t.bfloat16())
            report.assert_fused(linear_soft_cross_entropy=1)
        else:
            out = loss(*given, t.bfloat16().to(dtype))
        results.append((out.detach(), *torch.autograd.grad(out, given)))
    for exact, eager, ours in zip(*results, strict=True):
        worst = [(n.double() - exact).abs().max().item() for n in (eager, ours)]
        assert worst[1] <= 2 * worst[0] + 1e-6, worst


def test_float16_is_left_with_the_reason():
    given = [n.half().requires_grad_() for n in (x, head)]
    _, report = rewritten(lambda x, w, t: kl(F.linear(x, w), t, reduction="batchmean"), *given, teacher.half())
    report.assert_fused(linear_soft_cross_entropy=0)
    assert "float16" in reasons(report, "linear_soft_cross_entropy")


def test_autocast():
    def function(x, w, t):
        with torch.autocast("cpu", torch.bfloat16):
            z = F.linear(x, w)
            return kl(z / T, t / T, reduction="batchmean")

    given = [x.clone().requires_grad_(), head.clone().requires_grad_()]
    loss, report = rewritten(function, *given, teacher)
    report.assert_fused(linear_soft_cross_entropy=1)
    expected = function(*given, teacher)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=1e-2)


def test_batches_of_any_size():
    def function(x, w, t, m):
        z = F.linear(x, w)
        each = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
        return (each * m).sum() / m.sum() + F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="batchmean") * 0

    def alone(x, w, t, m):
        z = F.linear(x, w)
        return (F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1) * m).sum() / m.sum()

    compiled = torch.compile(alone, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for b, s in ((2, 5), (3, 7), (4, 2)):
            given = [torch.randn(b, s, H, requires_grad=True), head.clone().requires_grad_()]
            t, m = torch.randn(b, s, V), torch.rand(b, s)
            out, expected = compiled(*given, t, m), alone(*given, t, m)
            torch.testing.assert_close(out, expected)
            for ours, theirs in zip(torch.autograd.grad(out, given), torch.autograd.grad(expected, given), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    report.assert_fused(linear_soft_cross_entropy=len(report.graphs))


def test_rows_whose_number_is_a_product_of_sizes():
    """Run as the graph stands, which must not hold a symbol itself."""

    def function(x, w, t, y):
        z = F.linear(x, w)
        soft = F.cross_entropy(z.flatten(0, 1), t.softmax(-1).flatten(0, 1))
        return soft - (F.cross_entropy(z.reshape(-1, V), y.reshape(-1), reduction="none").mean()) / 3

    compiled = torch.compile(function, backend=rewriting_backend(), dynamic=True)
    for b, s in ((2, 5), (3, 7)):
        given = [torch.randn(b, s, H, requires_grad=True), head.clone().requires_grad_()]
        t, y = torch.randn(b, s, V), torch.randint(0, V, (b, s))
        torch.testing.assert_close(compiled(*given, t, y), function(*given, t, y))


class Distilled(nn.Module):
    """Two unmodified models of transformers, one of them frozen, and a loss as they are written."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = tiny_llama(), tiny_llama(num_hidden_layers=1)

    def forward(self, ids, labels):
        out = self.student(input_ids=ids, labels=labels)
        with torch.no_grad():
            target = self.teacher(input_ids=ids).logits
        divergence = F.kl_div(
            F.log_softmax(out.logits / T, dim=-1), F.softmax(target / T, dim=-1), reduction="none"
        ).sum(-1)  # fmt: skip
        counts = (labels != -100).float()
        return 0.5 * out.loss + 0.5 * T * T * (divergence * counts).sum() / counts.sum(), out.logits


def test_two_models_of_transformers():
    model, ids = Distilled(), tokens(2, 12)
    labels = ids.clone()
    labels[:, :4] = -100
    expected, logits = model(ids, labels)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with fx_fusion.recording() as report:
        loss, ours = torch.compile(model, backend=rewriting_backend(select="always"))(ids, labels)
        loss.backward()
    report.assert_fused(linear_soft_cross_entropy=1, linear_cross_entropy=0)
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in gradients), name
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours + 0, logits, rtol=1e-4, atol=1e-5)


def test_every_replaced_site_against_float64():
    given = [x.clone().requires_grad_(), head.clone().requires_grad_(), teacher]
    with fx_fusion.recording() as report:
        compiled = torch.compile(
            lambda x, w, t: (kl(F.linear(x, w), t, reduction="none").sum(-1) * mask).sum() / mask.sum(),
            backend=rewriting_backend(select="always", verify=True),
        )
        compiled(*given).backward()
    report.assert_fused(linear_soft_cross_entropy=1)
