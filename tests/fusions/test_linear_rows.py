"""Losses that treat rows one by one: found by their dims, run in chunks of logits."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.kernels.logits import row_programs
from fx_fusion.patterns import linear_rows
from fx_fusion.patterns.sites import row_tail
from fx_fusion.testing import rewriting_backend
from tests.helpers import reasons
from tests.rows import B, H, T, V, log_p, of, of_labels, operands, results_of, small_chunks  # noqa: F401  a fixture


def jensen_shannon(z, t):
    """As TRL's GKD trainer has it: a mixture by logsumexp of a stack."""
    p, q, half = log_p(z), log_p(t), torch.tensor(0.5, device=z.device).log()
    mixture = torch.logsumexp(torch.stack([p + half, q + half]), dim=0)
    both = (F.kl_div(mixture, of, reduction="none", log_target=True) for of in (q, p))
    return sum(each.sum(-1) for each in both).mean() / 2


def ppo(z, t, y):
    ratio = (of_labels(z, y) - t[..., 0]).exp()
    gain = torch.min(ratio * t[..., 1], ratio.clamp(0.8, 1.2) * t[..., 1])
    return -(gain - 1e-3 * z.float().logsumexp(-1).square() - 1e-3 * z.square().mean(-1)).mean()


def top_k(z, t, y):
    values, index = t.topk(5, -1)
    return F.kl_div(log_p(z).gather(-1, index), values.log_softmax(-1), log_target=True, reduction="batchmean")


def of_sequences(z, t, y):
    """Per-sequence means of a masked distance."""
    mask = (y > 1000).float()
    each = (z.softmax(-1) - t.softmax(-1)).abs().sum(-1)
    return ((each * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def tripled(z, t, y):
    """A write in the way of one gradient of two."""
    first, second = (z - t).abs().mean(), (z - t).square().mean()
    copied = second.clone()
    copied.mul_(3)
    return 2 * first + 0.5 * copied


def tripled_view(z, t, y):
    first, second = (z - t).abs().mean(), (z - t).square().mean()
    copied = second.clone()
    copied.view(1).mul_(3)
    return 2 * first + 0.5 * copied


def added(z, t, y):
    first, second = (z - t).abs().mean(), (z - t).square().mean()
    total = first * 2
    total += second
    return total * 3


def collected(z, t, y):
    """Both losses are written to a tensor that had no gradient."""
    first, second = (z - t).abs().mean(), (z - t).square().mean()
    losses = torch.zeros(2)
    losses[0] = first
    losses[1] = second
    return losses.sum(), 3 * first


def accumulated(z, t, y):
    """Divide the loss in place, as loops with gradient accumulation do."""
    loss = (z - t).abs().mean()
    loss /= 4
    return loss


# Losses of logits z (B, T, V), numbers t (B, T, V) and classes y (B, T); whether the gradient is computed in the forward.
LOSSES = {
    "reverse KL": (lambda z, t, y: (z.softmax(-1) * (log_p(z) - log_p(t))).sum(-1).mean(), True),
    "total variation": (lambda z, t, y: (z.softmax(-1) - t.softmax(-1)).abs().sum(-1).mean() / 2, True),
    "Jensen-Shannon": (lambda z, t, y: jensen_shannon(z, t), True),
    "PPO": (ppo, True),
    "top-k": (top_k, True),
    "squared error": (lambda z, t, y: F.mse_loss(z, t), True),
    "sequences": (of_sequences, True),
    "weighted by rows": (lambda z, t, y: -(of_labels(z, y) * t[:, 0, :1] * log_p(z).square().mean(-1)).sum() / 7, True),
    "shifted": (lambda z, t, y: (z[:, :-1].softmax(-1) * (log_p(z[:, :-1]) - log_p(t[:, 1:]))).sum(-1).mean(), True),
    "in one dim": (lambda z, t, y: (lambda z, t: (z - t).abs().sum(-1).mean())(z.view(-1, V), t.view(-1, V)), True),
    "mean of logits": (lambda z, t, y: z.float().square().mean(), True),
    "hardest tokens": (lambda z, t, y: (z - t).square().mean(-1).flatten().topk(6)[0].mean(), False),
    "norm of rows": (lambda z, t, y: (z - t).square().mean(-1).norm(), False),
    "squared mean": (lambda z, t, y: (z - t).square().mean(-1).mean().square(), True),
    "of whole sequences": (lambda z, t, y: -F.logsigmoid((z - t).abs().mean(-1).sum(1)).mean(), False),
    "two of them": (lambda z, t, y: ((z - t).abs().mean(), z.exp().sum(-1).log1p().mean()), False),
    "tokens returned": (lambda z, t, y: (lambda each: (each.mean(), each))((z - t).square().mean(-1)), False),
    "tokens logged": (lambda z, t, y: (lambda each: (each.mean(), each.detach()))((z - t).square().mean(-1)), True),
    "float16 inside": (lambda z, t, y: z.half().square().mean(), False),
    "a write to a copy": (tripled, False),
    "a write to a view": (tripled_view, False),
    "added in place": (added, False),
    "collected in place": (collected, False),
    "divided in place": (accumulated, True),
    "accuracy": (lambda z, t, y: (F.cross_entropy(z.view(-1, V), y.view(-1)), (z.argmax(-1) == y).float().mean()), True),
}


def assert_as_eager(call, compiled, dtype=torch.float32, rows=B, teacher_is_trained=False):
    head, x, t, y = operands(dtype, rows)
    t.requires_grad_(teacher_is_trained)
    found, expected = results_of(compiled, head, x, t, y), results_of(call, head, x, t, y)
    wide = [o.double() if o.is_floating_point() else o for o in (x, t)]
    exact = results_of(call, head.double(), *(o.detach().requires_grad_(o.requires_grad) for o in wide), y)
    for ours, eager, true in zip(found, expected, exact, strict=True):
        allowed = 2 * (eager.double() - true).norm() + (1e-6 if dtype == torch.float32 else 4e-3) * true.norm()
        assert (ours.double() - true).norm() <= allowed


def made_in_the_forward(report):
    """Return True if the op of the rewritten graph is given cotangents."""
    (line,) = (line for line in report.graphs[0].after.splitlines() if "linear_rows(" in line)
    return "cotangents=[]" not in line


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_rows(name, dynamic):
    loss, in_the_forward = LOSSES[name]
    compiled = torch.compile(of(loss), backend=rewriting_backend(select="always"), dynamic=dynamic)
    with fx_fusion.recording() as report:
        assert_as_eager(of(loss), compiled)
        if dynamic:
            assert_as_eager(of(loss), compiled, rows=5)
    assert report.count("linear_rows") == len(report.graphs) == 1, str(report)
    assert dynamic or made_in_the_forward(report) == in_the_forward


def test_a_logit_itself():
    """Its gradient is written over the logits. (On torch 2.15 dropout of nothing has other strides, and nothing is fused.)"""

    def loss(z, t, y):
        return F.dropout(z[..., 3], 0.0).mean() + z.softmax(-1).square().sum(-1).mean()

    assert_as_eager(of(loss), torch.compile(of(loss), backend=rewriting_backend(select="always")))


@pytest.mark.parametrize("name", ["reverse KL", "PPO", "of whole sequences"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_rows_in_16_bits(name, dtype):
    """In float16 the gradient waits for the upstream gradient, which a GradScaler keeps in range."""
    compiled = torch.compile(of(LOSSES[name][0]), backend=rewriting_backend(select="always"))
    with fx_fusion.recording() as report:
        assert_as_eager(of(LOSSES[name][0]), compiled, dtype)
    assert report.count("linear_rows") == 1, str(report)
    assert made_in_the_forward(report) == (LOSSES[name][1] and dtype == torch.bfloat16)


@pytest.mark.parametrize("name", ["reverse KL", "of whole sequences"])
def test_teacher_and_class_weights_have_gradients(name):
    """Inputs with rows get their rows' gradients, inputs without rows the sum over all chunks."""
    weights = torch.linspace(0.5, 1.5, V).requires_grad_()

    def call(head, x, t, y):
        return LOSSES[name][0](head(x) * weights.to(x.dtype), t, y)

    compiled = torch.compile(call, backend=rewriting_backend(select="always"))
    sums = []
    for function in (compiled, call):
        head, x, t, y = operands(torch.float32)
        results_of(function, head, x, t.requires_grad_(), y)
        sums.append(weights.grad)
        weights.grad = None
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-6)
    with fx_fusion.recording() as report:
        torch._dynamo.reset()
        assert_as_eager(call, torch.compile(call, backend=rewriting_backend(select="always")), teacher_is_trained=True)
    assert report.count("linear_rows") == 1, str(report)


@pytest.mark.parametrize("around", ["no_grad teacher", "checkpoint", "autocast"])
def test_loss_of_rows_inside_of(around):
    loss = LOSSES["reverse KL"][0]

    def call(head, x, t, y):
        if around == "no_grad teacher":
            with torch.no_grad():
                t = t / 2
            return loss(head(x), t, y)
        if around == "checkpoint":
            return checkpoint(lambda x, t: loss(head(x), t, y), x, t, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16):
            return loss(head(x), t, y)

    head, x, t, y = operands(torch.float32)
    compiled = torch.compile(call, backend=rewriting_backend(select="always"))
    with fx_fusion.recording() as report:
        found = results_of(compiled, head, x, t, y)
    assert report.count("linear_rows") == 1, str(report)
    rounded = 2e-2 if around == "autocast" else 1e-4
    for ours, eager in zip(found, results_of(call, head, x, t, y), strict=True):
        torch.testing.assert_close(ours, eager, rtol=rounded, atol=rounded * eager.abs().max().item())


def with_a_second_head(head, x, t, y):
    """Log-probabilities of another head, detached: its weight has no gradient at all."""
    other = t[0, :, :H].T.contiguous().view(H, T).repeat(1, V // T + 1)[:, :V]
    return ((head(x) - (x @ other).detach()).abs().sum(-1)).mean()


def under_no_grad(head, x, t, y):
    """A teacher with the student's weights, whose products are hidden from autograd."""
    with torch.no_grad():
        teacher = torch.tanh(F.linear(x, head.weight))
    return (head(x).softmax(-1) - teacher.softmax(-1)).abs().sum(-1).mean()


def hidden_softmax(head, x, t, y):
    with torch.no_grad():
        q = t.softmax(-1)
    return (q * log_p(head(x))).sum(-1).mean() + t.mean()


HARD = {  # what a hostile reader found
    "teacher of the same weights under no_grad": under_no_grad,
    "softmax of a trained teacher under no_grad": hidden_softmax,
    "detached second head": with_a_second_head,
    "learned number": lambda head, x, t, y: ((head(x) * t.mean()).square().mean(-1)).mean(),
    "learned number with a dim": lambda head, x, t, y: ((head(x) * t.mean().view(1)).square().mean(-1)).mean(),
    "the likeliest class": lambda head, x, t, y: (log_p(head(x)).topk(1).values.squeeze(-1) * t[..., 0]).mean(),
    "sums of one number": lambda head, x, t, y: (lambda hit: (hit + hit + 0.0 * log_p(head(x)).sum(-1)).mean())(
        (head(x).argmax(-1) == y).unsqueeze(-1).sum(-1)
    ),
    "one of several": lambda head, x, t, y: (head(x)[..., 5:6].squeeze(-1) * t[..., 0]).mean(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HARD)
def test_gradients_where_they_are_easily_lost(name, dtype):
    compiled = torch.compile(HARD[name], backend=rewriting_backend(select="always"))
    assert_as_eager(HARD[name], compiled, dtype, teacher_is_trained="learned" in name or "trained" in name)


def test_results_without_a_gradient_have_none():
    head, x, t, y = operands(torch.float32)

    def call(x):
        z = head(x)
        return (z - t).abs().mean(), z.logsumexp(-1).detach(), (z.argmax(-1) == 3).float()

    with fx_fusion.recording() as report:
        found = torch.compile(call, backend=rewriting_backend(select="always"))(x)
    assert report.count("linear_rows") == 1, str(report)
    assert [out.requires_grad for out in found] == [True, False, False]


def test_float32_temperature_beside_bfloat16_logits_keeps_float32():
    head, x, t, y = operands(torch.bfloat16)
    temperature = torch.full((1,), 0.7)

    def call(x):
        return (head(x) / temperature).logsumexp(-1).square()

    found = torch.compile(call, backend=rewriting_backend(select="always"))(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, call(x), rtol=1e-4, atol=1e-4)


LEFT = {  # what is no loss of rows, and the reason in the report
    "mean over rows": (lambda z, t, y: z.mean((0, 1)).softmax(-1).max(), "mixes rows while there are classes"),
    "product of logits": (lambda z, t, y: (z.flatten(0, 1).T @ z.flatten(0, 1)).abs().mean(), ""),
    "dropout": (lambda z, t, y: F.dropout(z, 0.5).square().mean(), "changes a value in place|draws random numbers"),
    "in place": (lambda z, t, y: z.mul_(2).square().mean(), "changes a value in place"),
    "softmax over rows": (lambda z, t, y: z.softmax(1).square().mean(), "goes along the rows"),
    "largest of all": (lambda z, t, y: z.max(), ""),
    "other values returned": (lambda z, t, y: ((z - t).abs().mean(), z - t.exp()), "made of more than the logits"),
    "with a gradient and without": (lambda z, t, y: ((z - t).abs().mean(), z, z.detach()), "in the same memory"),
    "logits returned and written to": (lambda z, t, y: ((z - t).abs().mean(), z.mul_(2)), "changes a value in place"),
    "float64": (lambda z, t, y: z.double().square().mean(), "float64"),
    "mixed with a number of all rows": (lambda z, t, y: (z - z.logsumexp(-1).mean()).abs().mean(), "made of all rows"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_mixes_rows_is_left(name):
    loss, why = LEFT[name]
    head, x, t, y = operands(torch.float32)
    with fx_fusion.recording() as report:
        torch.manual_seed(1)
        found = results_of(torch.compile(of(loss), backend=rewriting_backend(select="always")), head, x, t, y)
    assert report.count("linear_rows") == 0, str(report)
    assert any(part in reasons(report, "linear_rows") for part in why.split("|")), str(report)
    torch.manual_seed(1)
    for ours, eager in zip(found, results_of(of(loss), head, x, t, y), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_gradient_once_more_and_frozen_heads():
    """``retain_graph``; a head without a gradient; no gradient at all."""
    loss, call = LOSSES["reverse KL"][0], None
    head, x, t, y = operands(torch.float32)
    call = torch.compile(of(loss), backend=rewriting_backend(select="always"))
    number = call(head, x, t, y)
    number.backward(retain_graph=True)
    once = x.grad.clone()
    number.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    head.requires_grad_(False)
    x.grad = None
    call(head, x, t, y).backward()
    torch.testing.assert_close(x.grad, once)
    with torch.no_grad():
        torch.testing.assert_close(call(head, x, t, y), number.detach())


def test_gradient_is_known_where_several_tensors_are_made_behind_the_logits(monkeypatch):
    """The teacher's best classes, once more for their values: the forward computes the gradient."""
    found = []
    monkeypatch.setattr(
        linear_rows, "cotangents_of", lambda *given: found.append(row_tail.cotangents_of(*given)) or found[-1]
    )

    def loss(z, t, y):
        student = log_p(z).gather(-1, t.topk(5, -1).indices)
        return F.kl_div(student, t.float().topk(5, -1).values.log_softmax(-1), log_target=True, reduction="batchmean")

    head, x, t, y = operands(torch.float32)
    numbers = [results_of(of(loss), head, x, t, y)]
    numbers.append(results_of(torch.compile(of(loss), backend=rewriting_backend(select="always")), head, x, t, y))
    for ours, eager in zip(*numbers, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
    assert len(found) == 1
    assert found[0] is not None


def test_gradient_through_a_checkpoint_with_several_results_counts():
    """Beside a mean: the mean's gradient alone is not that of the rows."""

    def part(rows, y):
        return (rows * (y > V // 2)).mean(), rows.clamp(-1, 1).mean()

    def loss(z, t, y):
        rows = (log_p(z).exp() * log_p(z)).sum(-1)
        mean = rows.mean()
        first, second = checkpoint(part, rows, y, use_reentrant=False)
        return 0.5 * mean + 2 * first + 0.5 * second

    head, x, t, y = operands(torch.float32)
    numbers = [results_of(of(loss), head, x, t, y)]
    with fx_fusion.recording() as report:
        numbers.append(results_of(torch.compile(of(loss), backend=rewriting_backend(select="always")), head, x, t, y))
    for ours, eager in zip(*numbers, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
    assert report.count("linear_rows") == 1, str(report)


def test_saved_tensors_have_no_logits():
    """Neither way keeps a tensor (rows, classes) but the teacher's logits."""
    saved = []
    for name in ("squared error", "of whole sequences"):
        head, x, t, y = operands(torch.float32)
        call = torch.compile(of(LOSSES[name][0]), backend=rewriting_backend(select="always"))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
            call(head, x, t, y)
        assert all(s.numel() < B * T * V or s.untyped_storage().data_ptr() == t.data_ptr() for s in saved)


def test_unknown_program_raises():
    with pytest.raises(RuntimeError, match="unknown program 0123"):
        row_programs.program("0123")


@pytest.mark.slow
def test_compiled_graph_is_found_by_a_second_process(tmp_path):
    """Inductor's caches hold graphs that call a program; each process registers it when it rewrites."""
    script = textwrap.dedent(f"""
        import torch, fx_fusion
        from torch._dynamo.utils import counters
        torch.manual_seed(0)
        head, x, t = torch.nn.Linear({H}, {V}), torch.randn({B * T}, {H}, requires_grad=True), torch.randn({B * T}, {V})
        f = lambda x: (head(x).softmax(-1) - t.softmax(-1)).abs().sum(-1).mean()
        with fx_fusion.recording() as report:
            loss = torch.compile(f, backend="fx_fusion", options={{"select": "always"}})(x)
        loss.backward()
        assert report.count("linear_rows") == 1, str(report)
        torch.testing.assert_close(loss, f(x))
        print("hits", counters["aot_autograd"]["autograd_cache_hit"])
    """)
    for hits in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=1200, check=False,
            env={**__import__("os").environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        )  # fmt: skip
        assert f"hits {hits}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_logits_are_kept_where_making_them_again_takes_longer(memory, monkeypatch):
    """On a GPU from some 1000 columns on, unless the least memory is asked for."""
    from fx_fusion.patterns import linear_rows

    monkeypatch.setattr(linear_rows, "_makes_them_slowly_again", lambda x: True)
    for name, fused in (("of whole sequences", memory == "min"), ("reverse KL", True)):
        torch._dynamo.reset()
        head, x, t, y = operands(torch.float32)
        with fx_fusion.recording() as report:
            torch.compile(of(LOSSES[name][0]), backend=rewriting_backend(select="always", memory=memory))(head, x, t, y)
        assert report.count("linear_rows") == fused, str(report)
        assert fused or "takes longer than keeping them" in reasons(report, "linear_rows")
