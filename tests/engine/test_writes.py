"""Writes in the graph: to operands, copies, results and what the backward reads. Whatever fires, eager's numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers import rewriting_backend, rewritten
from tests.hostile import S, h3, head, k4, q4, rms, same, t3, u, w8, x


def _write(how):
    def function(h):
        h = h * 1
        statistic = h.pow(2).mean(-1, keepdim=True)
        how(h)
        return rms(h, statistic)

    return function


@torch.library.custom_op("fx_fusion_tests::scale", mutates_args=("x",))
def scale(x: torch.Tensor) -> None:
    x.mul_(3)


WRITES = {
    "custom_op_packet": lambda h: torch.ops.fx_fusion_tests.scale(h),
    "custom_op": lambda h: torch.ops.fx_fusion_tests.scale.default(h),
    "foreach": lambda h: torch._foreach_add_([h], 1.0),
    "relu6_in_place": lambda h: F.relu6(h, True),
    "module_in_place": lambda h: torch.nn.Hardtanh(inplace=True)(h),
    "keyword_operand": lambda h: torch.clamp_(input=h, min=0.1),
    "imul": lambda h: h.__imul__(3),
    "view": lambda h: h[:, :2].add_(1),
    "detached": lambda h: h.detach().add_(1),
    "setitem": lambda h: h.__setitem__((slice(None), 0), 5.0),
    "out": lambda h: torch.add(h, 1, out=h),
    "copy": lambda h: h.copy_(h + 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_statistic_and_use(name):
    report = same(_write(WRITES[name]), x)
    assert report.count("rms_norm") == 0, str(report)


def test_a_write_inside_a_checkpointed_body():
    same(_write(lambda h: checkpoint(lambda a: a.add_(1), h, use_reentrant=False)), x)


def _attention_of_what_it_reads(q, k):
    q = q * 1
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ q.mul_(2)


def _attention_with_a_bias_that_becomes_values(q, k, b):
    b = b * 1
    return torch.softmax(q @ k.mT + b, -1) @ b.mul_(2)


def _glu(x, u):
    x = x * 1
    return F.silu(x) * x.add_(u)


def _layer_norm(x, w):
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
    w = w * 1
    y = y * w
    return y + w.add_(1)


def _half_turned(x):
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


def _rope(q, cos):
    q, cos = q * 1, cos * 1
    a = q * cos
    return a + _half_turned(q) * cos.sin_()


square = torch.randn(2, 4, 8, 8)
MADE_OF_EACH_OTHER = {
    "values of queries": (_attention_of_what_it_reads, [q4, k4], []),
    "values of a bias": (_attention_with_a_bias_that_becomes_values, [square, square.flip(-1), square.flip(-2)], []),
    "the two halves of a glu": (_glu, [x, u], ["swish"]),
    "a bias of a weight": (_layer_norm, [x, w8], ["layer_norm"]),  # without the bias
    "sines of cosines": (_rope, [torch.randn(2, 3, 7, 8), torch.randn(7, 8)], []),
}


@pytest.mark.parametrize("name", MADE_OF_EACH_OTHER)
def test_an_input_that_is_written_to_the_memory_of_another(name):
    """The op would read both behind the write. Eager has read the first before it."""
    function, inputs, fires = MADE_OF_EACH_OTHER[name]
    report = same(function, *inputs, fires=fires)
    assert fires or "in place" in str(report)


def test_an_input_that_a_write_between_has_left():
    def function(x, u):
        u, gate = u * 1, F.silu(x)
        return gate * u.add_(1)

    same(function, x, u, fires=["swiglu"])


def _clone_then_write(use):
    def function(x, u):
        y = x.clone()
        y.mul_(3)
        return use(x, y, u)

    return function


COPIES = {
    "silu": lambda x, y, u: x * torch.sigmoid(y) * u,
    "norm": lambda x, y, u: w8 * (x * torch.rsqrt((x * y).mean(-1, keepdim=True) + 30)),
    "gelu": lambda x, y, u: 0.5 * x * (1 + torch.erf(y / 2**0.5)) * u,
    "source_written": lambda x, y, u: (lambda c, _: x * torch.sigmoid(c) * u)(y.clone(), x.mul_(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_is_changed_is_another_value(name):
    same(_clone_then_write(COPIES[name]), x, u)


def test_targets_changed_after_a_copy():
    def function(h, t):
        index = t.unsqueeze(-1).clone()
        index.zero_()
        return F.linear(h, head).log_softmax(-1).gather(-1, index).mean()

    same(function, h3, t3, fires=("linear_cross_entropy",))  # of the index itself


def test_an_index_that_is_written_to_behind_the_gather():
    def function(h, t):
        index = t[:, 1:, None].clone()
        loss = F.linear(h[:, 1:], head).log_softmax(-1).gather(-1, index).mean()
        index.zero_()
        return loss

    same(function, h3, t3, fires=("linear_cross_entropy",))


def test_targets_changed_behind_a_reshape_that_copies_them():
    def function(h, t):
        labels = t.clone()
        index = labels[:, 1:].reshape(-1, 1)
        labels.zero_()
        return F.linear(h[:, 1:].flatten(0, 1), head).log_softmax(-1).gather(-1, index).mean()

    same(function, h3, t3)


def test_a_gradient_that_a_hook_of_compiled_autograd_changes():
    def step(backend):
        x = torch.ones(3, 8, requires_grad=True)

        def loss():
            h = x + r
            h.register_hook(lambda gradient: gradient * 2)
            (F.rms_norm(h, (8,), w, 1e-6) + h).sum().backward()

        torch._dynamo.reset()
        torch.compile(loss, backend=backend)()
        return x.grad

    r, w = torch.randn(3, 8), torch.rand(8) + 0.5
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.testing.assert_close(step(rewriting_backend()), step("aot_eager"))


def hooked(node):
    node.register_hook(lambda gradient: gradient * 3)


def heads_hooked(x):
    q, k = x.view(1, 3, -1, 8), x[:1].view(1, 1, 1, 8)
    keys = k.repeat_interleave(3, 1)
    y = F.scaled_dot_product_attention(q, keys, k.repeat_interleave(3, 1))
    hooked(keys)
    return y


def a_cast_hooked(x):
    wide = (x * 1.5).float()
    y = F.rms_norm(wide, (8,), w8, 1e-6)
    hooked(wide)
    return y


def an_input_hooked(x):
    h = x * 1.5
    y = rms(h)
    hooked(h)
    return y


@pytest.mark.parametrize("function", [heads_hooked, a_cast_hooked, an_input_hooked])
def test_a_hook_that_is_set_behind_the_pattern(function):
    """On what a rewrite would step over, or read."""
    given = torch.randn(9, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found, report = rewritten(function, given)
    assert not [site for site in report.sites if site.status == "fused"], str(report)
    expected = function(given)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), given) for y in (found, expected)))


def test_a_padding_mask_written_to_in_the_graph():
    def function(q, k, mask):
        mask[:, :2] = 0
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask.bool()[:, None, None])

    masks = [torch.ones(2, S, dtype=torch.long) for _ in range(2)]
    found, _ = rewritten(function, q4, k4, masks[0])
    torch.testing.assert_close(found, function(q4, k4, masks[1]), rtol=1e-5, atol=1e-5)


SAVED = {
    "input_of_the_norm": lambda x: (lambda x, r: x.add_(torch.tanh(r)))(*(lambda x: (x, rms(x).bfloat16().float()))(x * 1)),
    "sum_of_the_norm": lambda x: (lambda h: (rms(h), h.mul_(2)))(x + u),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_the_backward_reads_is_not_written_later(name):
    leaf = x.clone().requires_grad_()
    for function in (SAVED[name], lambda leaf: rewritten(SAVED[name], leaf)[0]):  # eager refuses as well
        found = function(leaf)
        found = found[0] if isinstance(found, tuple) else found
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(found.sum(), leaf)


def three_dim_mask(q, k):
    """Has no fused kernel on CPU, so that the one without it lays its result out in another way."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()[None]


def added_to(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=three_dim_mask(q, k))
    out.add_(1)
    return F.silu(out) * out


def scaled_logits(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=three_dim_mask(q, k))
    out.mul_(2)
    logits = F.linear(out, torch.linspace(-1, 1, 24 * 16).view(24, 16))
    return F.cross_entropy(logits.view(-1, 24), torch.arange(48) % 24), logits


def residual_in_place(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=three_dim_mask(q, k))
    out.add_(q)
    return F.layer_norm(out, (16,), torch.linspace(0.5, 1.5, 16))


@pytest.mark.parametrize("function", [added_to, scaled_logits, residual_in_place])
def test_writes_to_a_result_that_was_laid_out_anew(function):
    q, k, v = (torch.randn(2, 8, 3, 16).transpose(1, 2) for _ in range(3))
    result, report = rewritten(function, q, k, v)
    assert report.count("causal_mask") == 1, str(report)
    assert "permute" in report.graphs[0].after, "nothing was laid out anew: this tests nothing"
    expected = function(q, k, v)
    if not isinstance(expected, tuple):
        result, expected = (result,), (expected,)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours + 0, theirs, rtol=1e-4, atol=1e-4)


def silu_in_place(x):
    y = F.group_norm(x[..., None], 2)
    with torch.no_grad():
        return F.silu(y, inplace=True)


def norm_in_place(x):
    y = x * 2
    with torch.no_grad():
        return y.mul_(torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).mul_(w8)


def sum_in_place(x):
    y = x * 2
    with torch.no_grad():
        y.add_(u)
    return rms(y), y


@pytest.mark.parametrize("function", [silu_in_place, norm_in_place, sum_in_place])
def test_a_write_under_no_grad_keeps_the_gradient(function):
    """A tensor keeps its history where no_grad code writes to it; an op that makes another tensor has none."""
    gradients = []
    for call in (function, lambda leaf: rewritten(function, leaf, options={"select": "always"})[0]):
        leaf = x.clone().requires_grad_()
        found = call(leaf)
        found = sum(found) if isinstance(found, tuple) else found
        (found.pow(2).sum() + leaf.sum()).backward()
        gradients.append((found.detach(), leaf.grad))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
