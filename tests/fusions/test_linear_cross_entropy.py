"""Cross-entropy behind a linear layer: what fires, what must not, and the numbers of every option."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import reasons, rewritten, tiny_llama, tokens
from tests.losses import H, M, V, bias, class_weight, compare, head, ignoring, target, x


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_option_of_torch_cross_entropy(reduction, smoothing, weighted, with_bias):
    weight = class_weight if weighted else None

    def loss(x, head, bias, target):
        logits = F.linear(x, head, bias if with_bias else None)
        return F.cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=smoothing)

    tensors = (x, head, bias, ignoring)
    if not with_bias:
        function = lambda x, head, target: loss(x, head, None, target)  # noqa: E731
        tensors = (x, head, tensors[-1])
    else:
        function = loss
    compare(function, *tensors)


@pytest.mark.parametrize("smoothing", [-0.1, float("nan")])
@pytest.mark.parametrize("alone", [False, True], ids=["with lm_head", "alone"])
def test_what_does_not_smooth(smoothing, alone):
    """PyTorch takes a label_smoothing that is not above 0 for none."""

    def loss(x, head, target):
        logits = F.linear(x, head)
        return F.cross_entropy(logits + x.mean() * 0 if alone else logits, target, label_smoothing=smoothing)

    compare(loss, x, head, ignoring, expect=("cross_entropy",) if alone else ("linear_cross_entropy",))


SPELLINGS = {
    "nll": lambda x, w, t: F.nll_loss(F.log_softmax(F.linear(x, w), dim=-1), t),
    "nll_of_float32": lambda x, w, t: F.nll_loss(F.log_softmax(F.linear(x, w), -1, dtype=torch.float32), t),
    "nll_dim_1": lambda x, w, t: F.nll_loss(torch.log_softmax(F.linear(x, w), 1), t, reduction="sum"),
    "gather_mean": lambda x, w, t: -F.linear(x, w).log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1).mean(),
    "gather_sum": lambda x, w, t: F.linear(x, w).log_softmax(-1).gather(1, t[:, None]).squeeze(1).neg().sum(),
    "gather_rows": lambda x, w, t: -torch.gather(torch.log_softmax(F.linear(x, w), -1), -1, t.unsqueeze(-1)).squeeze(-1),
    "gather_cast": lambda x, w, t: F.linear(x, w).log_softmax(-1).gather(-1, t.int().unsqueeze(-1).long()).neg().sum(),
    "gather_masked": lambda x, w, t: (
        (F.linear(x, w).log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1) * (t > 3)).sum() / (t > 3).sum()
    ),
    "difference": lambda x, w, t: (lambda z: z.gather(-1, t.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(z, -1))(
        F.linear(x, w)
    ),
    "difference_masked": lambda x, w, t: (
        lambda z: ((z.gather(1, t[:, None]).squeeze(1) - z.logsumexp(dim=-1)) * (t > 3)).sum()
    )(F.linear(x, w)),
    "float": lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t),
    "scaled": lambda x, w, t: F.cross_entropy(F.linear(x, w) * 0.125, t),
    "divided": lambda x, w, t: F.cross_entropy(F.linear(x, w) / 8.0, t),
    "softcap": lambda x, w, t: F.cross_entropy(30.0 * torch.tanh(F.linear(x, w) / 30.0), t),
    "scale_and_softcap": lambda x, w, t: F.cross_entropy(torch.tanh(F.linear(x, w) * 0.5 / 5.0) * 5.0, t),
    "added_bias": lambda x, w, t: F.cross_entropy(F.linear(x, w) + w[:, 0][None, :].detach(), t),
    "num_items": lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction="sum") / torch.tensor(7),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    compare(SPELLINGS[name], x, head, target)


CLASSES_SECOND = {
    "transpose": lambda z: z.transpose(1, 2),
    "swapaxes": lambda z: torch.swapaxes(z, -1, 1),
    "permute": lambda z: z.permute(0, 2, 1),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CLASSES_SECOND)
def test_classes_in_the_second_dim(name, reduction):
    """``F.cross_entropy`` of three dims takes (batch, classes, length)."""
    rows = x.view(2, M // 2, H)

    def function(x, w, b, t):
        logits = CLASSES_SECOND[name](F.linear(x, w, b))
        return F.cross_entropy(logits, t, class_weight, reduction=reduction, label_smoothing=0.1)

    compare(function, rows, head, bias, ignoring.view(2, -1), expect=("linear_cross_entropy",))


def test_classes_in_the_second_dim_of_any_length():
    compiled = torch.compile(
        lambda x, w, t: F.cross_entropy((x @ w.T).transpose(1, 2), t), backend=rewriting_backend(), dynamic=True
    )
    for length in (5, 7, 9):
        rows, t = torch.randn(2, length, H), torch.randint(0, V, (2, length))
        with fx_fusion.recording() as report:
            torch.testing.assert_close(compiled(rows, head, t), F.cross_entropy((rows @ head.T).transpose(1, 2), t))
        assert not report.graphs or report.count("cross_entropy") + report.count("linear_cross_entropy") == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda z, t: F.cross_entropy(z, t),  # the second dim really is the classes
        lambda z, t: F.cross_entropy(z.transpose(1, 2).contiguous().view(z.shape), t),
    ],
    ids=["as it is", "another view"],
)
def test_other_losses_of_three_dims_stay(function):
    z, t = torch.randn(2, 6, 6, requires_grad=True), torch.randint(0, 6, (2, 6))
    found, report = rewritten(function, z, t)
    torch.testing.assert_close(found, function(z, t))
    assert report.count("cross_entropy") == 0


def test_two_dims_and_the_shift():
    ids = torch.randint(0, V, (2, 6))
    h = torch.randn(2, 6, H)

    def transformers_way(h, head, ids):
        logits = F.linear(h[:, 0:, :], head).float()
        labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100, reduction="mean")

    def older_way(h, head, ids):
        logits = F.linear(h, head)
        return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, V), ids[..., 1:].contiguous().view(-1))

    compare(transformers_way, h, head, ids)
    compare(older_way, h, head, ids)


def test_all_targets_ignored_gives_what_pytorch_gives():
    nothing = torch.full((M,), -100)
    compare(lambda x, head, t: F.cross_entropy(F.linear(x, head), t), x, head, nothing)
    compare(lambda x, head, t: F.cross_entropy(F.linear(x, head), t, reduction="sum"), x, head, nothing)


def test_no_rows():
    empty = torch.zeros(0, H)
    nothing = torch.zeros(0, dtype=torch.long)
    compare(lambda x, head, t: F.cross_entropy(F.linear(x, head), t, reduction="sum"), empty, head, nothing)


@pytest.mark.parametrize("frozen", ["x", "head", "both"])
def test_frozen_inputs_get_no_gradient(frozen):
    inputs = [t.clone().requires_grad_(frozen not in (n, "both")) for n, t in (("x", x), ("head", head))]
    compiled = torch.compile(lambda x, head: F.cross_entropy(F.linear(x, head), target), backend=rewriting_backend())
    with fx_fusion.recording() as report:
        loss = compiled(*inputs)
    report.assert_fused(**({"linear_cross_entropy": 1} if frozen != "both" else {}))
    expected_inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    expected = F.cross_entropy(F.linear(*expected_inputs), target)
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == (frozen != "both")
    if loss.requires_grad:
        loss.backward()
        expected.backward()
        for ours, theirs in zip(inputs, expected_inputs, strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_backward_twice_gives_the_same_gradient():
    leaf = head.clone().requires_grad_()
    compiled = torch.compile(lambda w: F.cross_entropy(F.linear(x, w), target), backend=rewriting_backend())
    with fx_fusion.recording() as report:
        loss = compiled(leaf)
    report.assert_fused(linear_cross_entropy=1)
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    leaf.grad = None
    loss.backward()
    torch.testing.assert_close(leaf.grad, first, rtol=0, atol=0)


LEFT_ALONE = {
    "probabilities": lambda x, w, t: F.cross_entropy(F.linear(x, w), F.linear(x, w).softmax(-1).detach()),
    "images": lambda x, w, t: F.cross_entropy(F.linear(x, w).view(3, V, 4), t.view(3, 4)),
    "another_dim": lambda x, w, t: F.nll_loss(F.log_softmax(F.linear(x, w), dim=0), t),
    "tanh_of_something_else": lambda x, w, t: F.cross_entropy(30.0 * torch.tanh(F.linear(x, w) / 20.0), t),
    "half_the_vocabulary": lambda x, w, t: F.cross_entropy(F.linear(x, w)[:, 20:], t % 20),
    "per_row_scale": lambda x, w, t: F.cross_entropy(F.linear(x, w) * x[:, :1], t),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_linear_cross_entropy(name):
    function = LEFT_ALONE[name]
    result, report = rewritten(function, x, head, target)
    assert report.count("linear_cross_entropy") == 0, str(report)
    torch.testing.assert_close(result, function(x, head, target), rtol=1e-5, atol=1e-5)


def test_a_rounded_logit_is_not_taken_for_an_exact_one():
    def rounded(x, head, target):
        return F.cross_entropy(F.linear(x, head).bfloat16().float(), target)

    result, report = rewritten(rounded, x, head, target)
    assert report.count("linear_cross_entropy") == 0
    assert "rounds the logits" in reasons(report, "linear_cross_entropy")
    torch.testing.assert_close(result, rounded(x, head, target))


def test_returned_logits_without_deferral_keep_the_logits():
    def model(x, head, target):
        logits = F.linear(x, head)
        return F.cross_entropy(logits, target), logits

    (loss, logits), report = rewritten(model, x, head, target, options={"defer_outputs": False})
    report.assert_fused(linear_cross_entropy=0, cross_entropy=1)
    assert "also returned by the graph" in reasons(report, "linear_cross_entropy")
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, F.linear(x, head))


def test_float16_with_a_loss_scale():
    """A gradient of the mean over many rows underflows in fp16 unless the scale is applied first."""
    rows = 4096
    big = torch.randn(rows, H).half()
    w = (torch.randn(V, H) / 4).half().requires_grad_()
    t = torch.randint(0, V, (rows,))
    function = lambda w: F.cross_entropy(F.linear(big, w).float(), t)  # noqa: E731
    exact = w.detach().double().requires_grad_()
    F.cross_entropy(F.linear(big.double(), exact), t).backward(torch.tensor(2.0**16).double())
    for run in (torch.compile(function, backend=rewriting_backend()), function):
        w.grad = None
        with fx_fusion.recording() as report:
            run(w).backward(torch.tensor(2.0**16))
        assert run is function or report.count("linear_cross_entropy") == 1
        error = (w.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < 2e-3


@pytest.mark.parametrize("weighted", [False, True])
def test_float16_sums_that_overflow_before_the_mean(weighted):
    """Of 4096 rows of 60 and one target: their sum is past 65504, their mean is not, and what is kept stays in fp16."""
    big = torch.full((4096, H), 60.0).half() * torch.rand(4096, H).round().half()
    w = torch.randn(V, H).half().requires_grad_()
    t = torch.full((4096,), 3)
    classes = torch.full((V,), 4.0).half() if weighted else None
    function = lambda w: F.cross_entropy(F.linear(big, w), t, weight=classes)  # noqa: E731
    exact = w.detach().double().requires_grad_()
    F.cross_entropy(F.linear(big.double(), exact), t).backward()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append((t.shape, t.dtype)), t)[1], lambda t: t):
        loss, report = rewritten(function, w)
    report.assert_fused(linear_cross_entropy=1)
    assert (w.shape, torch.float16) in kept
    assert (w.shape, torch.float32) not in kept
    loss.backward()
    torch.testing.assert_close(w.grad.double(), exact.grad, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("unseen", "smoothing"), [(float("inf"), 0.0), (1e8, 0.0), (1.0, 0.1)])
def test_float16_and_weights_of_classes_that_no_row_has(unseen, smoothing):
    """What bounds the sums is in the rows: 1 / frequency is inf for a class that never comes."""
    x, w = torch.randn(64, H).half(), (torch.randn(V, H) / 4).half()
    w.requires_grad_()
    t = torch.randint(0, V - 1, (64,))
    classes = torch.cat([torch.ones(V - 1), torch.tensor([unseen])])
    function = lambda w: F.cross_entropy(F.linear(x, w).float(), t, weight=classes, label_smoothing=smoothing)  # noqa: E731
    loss, report = rewritten(function, w)
    report.assert_fused(linear_cross_entropy=1)
    (gradient,) = torch.autograd.grad(loss, w)
    (expected,) = torch.autograd.grad(function(w), w)
    torch.testing.assert_close(gradient, expected, rtol=4e-3, atol=2e-5)


def test_autocast_computes_the_head_in_bfloat16():
    def step(x, head, target):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(F.linear(x, head), target)

    compare_ambient = torch.compile(lambda x, head: F.cross_entropy(F.linear(x, head), target), backend=rewriting_backend())
    leaf, expected_leaf = head.clone().requires_grad_(), head.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with fx_fusion.recording() as report:
            loss = compare_ambient(x, leaf)
        expected = F.cross_entropy(F.linear(x, expected_leaf), target)
    report.assert_fused(linear_cross_entropy=1)
    loss.backward()
    expected.backward()
    assert leaf.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(leaf.grad, expected_leaf.grad, rtol=2e-2, atol=2e-3)
    inside, report = rewritten(step, x, head, target)
    report.assert_fused(linear_cross_entropy=1)
    torch.testing.assert_close(inside, step(x, head, target), rtol=2e-3, atol=2e-3)


def test_the_head_of_a_tied_model_gets_both_gradients():
    model = tiny_llama(tie_word_embeddings=True)
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    with fx_fusion.recording() as report:
        torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids).loss.backward()
    assert report.count("linear_cross_entropy") == report.count("embedding") == 1, str(report)
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=1e-5, atol=1e-6)


def divisions():
    other = torch.tensor(3.0)
    return {
        "number of tokens": (lambda total, n: total / n, torch.tensor(7), True),
        "int32": (lambda total, n: torch.div(total, n), torch.tensor(7, dtype=torch.int32), True),
        "float": (lambda total, n: total.div(n), torch.tensor(0.3), True),
        "of one element": (lambda total, n: total / n, torch.tensor([7]), False),  # a loss of shape (1,)
        "with a gradient": (lambda total, n: total / n, torch.tensor(7.0, requires_grad=True), False),
        "a rounded one": (lambda total, n: torch.div(total, n, rounding_mode="floor"), torch.tensor(7), False),
        "a number": (lambda total, n: total / 7, torch.tensor(7), False),
        "one that is read": (lambda total, n: total / n + total * 0.1, torch.tensor(7), False),
        "its reciprocal": (lambda total, n: n / total, torch.tensor(7.0), False),
        "two": (lambda total, n: total / n / other, torch.tensor(7), True),
    }


@pytest.mark.parametrize("name", divisions())
def test_a_sum_that_is_divided(name):
    """transformers divides a sum by the tokens of all micro-batches: the op makes its gradients for that, so that they need no
    factor where ``loss.backward()`` is called."""
    divide, number, inside = divisions()[name]

    def function(x, head, target, number):
        return divide(F.cross_entropy(F.linear(x, head), target, reduction="sum"), number)

    graphs = []

    def backend(gm, examples):
        compiled = rewriting_backend(select="always", fusions=["linear_cross_entropy"])(gm, examples)
        graphs.append(gm)
        return compiled

    expected_leaves, leaves = ([t.clone().requires_grad_() for t in (x, head)] for _ in range(2))
    expected = function(*expected_leaves, ignoring, number)
    found = torch.compile(function, backend=backend)(*leaves, ignoring, number)
    torch.testing.assert_close(found, expected)
    for of in (expected, found):
        of.sum().backward()
    for leaf, right in zip(leaves, expected_leaves, strict=True):
        torch.testing.assert_close(leaf.grad, right.grad)
    (call,) = [n for n in graphs[0].graph.nodes if "linear_cross_entropy" in str(n.target)]
    assert ("count" in call.kwargs) == inside
