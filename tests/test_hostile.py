"""Graphs made to break the rewriter: each was wrong once, or looks as if it could be. Whatever fires, eager's numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import reasons, rewritten

V, H = 24, 8
w8 = torch.randn(8)
head = torch.randn(V, H)
h3 = torch.randn(2, 3, H)
t3 = torch.randint(0, V, (2, 3))
x = torch.randn(4, 8)
u = torch.randn(4, 8)
q4, k4 = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
cos, sin = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)


def rms(x, statistic=None):
    statistic = x.pow(2).mean(-1, keepdim=True) if statistic is None else statistic
    return w8 * (x * torch.rsqrt(statistic + 1e-6))


def turn(x):
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def rope(x, c, s):
    return x * c + turn(x) * s


def same(function, *tensors, backward=False):
    copies = [[t.clone() for t in tensors] for _ in range(2)]
    found, report = rewritten(function, *copies[0])
    expected = function(*copies[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)  # 0 * -inf is NaN in eager too
    torch.testing.assert_close(copies[0], copies[1], rtol=1e-6, atol=1e-6)  # the same writes to the arguments
    return report


LOSSES = {
    "slice_of_rows_of_a_view": lambda h, t: F.cross_entropy(F.linear(h, head).view(-1, V)[:-1], t.view(-1)[1:]),
    "slice_then_view": lambda h, t: F.cross_entropy(F.linear(h.view(-1, H), head).view(2, 3, V)[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1)),
    "slice_of_a_batch": lambda h, t: F.cross_entropy(F.linear(h.view(-1, H), head).view(2, 3, V)[1:].view(-1, V), t[1:].view(-1)),
    "two_slices": lambda h, t: F.cross_entropy(F.linear(h, head)[:, :-1][1:].reshape(-1, V), t[1:, 1:].reshape(-1)),
    "part_of_the_rows": lambda h, t: -F.linear(h, head).log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1)[:, :2].mean(),
    "narrowed_rows": lambda h, t: F.linear(h, head).log_softmax(-1).gather(-1, t.unsqueeze(-1)).narrow(0, 0, 1).sum(),
    "fewer_targets": lambda h, t: F.linear(h, head).log_softmax(-1).gather(-1, t[:, 1:].unsqueeze(-1)).mean(),
    "small_ints": lambda h, t: F.linear(h, head).log_softmax(-1).gather(-1, (t * 100 % 300).to(torch.int8).long().abs().clamp(max=V - 1).unsqueeze(-1)).mean(),
    "float64": lambda h, t: F.cross_entropy(F.linear(h, head).double().view(-1, V), t.view(-1)),
    "wide_bias": lambda h, t: F.cross_entropy((F.linear(h.bfloat16(), head.bfloat16()) + 100 * head[:, 0]).view(-1, V), t.view(-1)),
    "softmax_dtype": lambda h, t: F.nll_loss(F.log_softmax(F.linear(h, head).view(-1, V), -1, dtype=torch.float64), t.view(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    same(LOSSES[name], h3, t3)


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


def test_a_late_input_from_a_no_grad_block():
    """The fused call needs w * 2, and must not be put where nothing has a gradient."""

    def function(x, r, w):
        s = x + r
        with torch.no_grad():
            doubled = w * 2
        return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * doubled, s

    leaves = [[t.clone().requires_grad_() for t in (x, u, w8)] for _ in range(2)]
    found, report = rewritten(function, *leaves[0])
    expected = function(*leaves[1])
    assert report.count("add_rms_norm") == 1, str(report)
    assert all(t.requires_grad for t in found)
    gradients = [
        torch.autograd.grad(sum(t.sin().sum() for t in y), given[:2])
        for y, given in zip((found, expected), leaves, strict=True)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_write_inside_a_checkpointed_body():
    same(_write(lambda h: checkpoint(lambda a: a.add_(1), h, use_reentrant=False)), x)


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

    same(function, h3, t3)


ROPES = {
    "key_written_between": lambda q, k, c, s: (rope(q, c, s), k.add_(1), rope(k, c, s)),
    "table_written_between": lambda q, k, c, s: (rope(q, c, s), c.mul_(2), rope(k, c, s)),
    "rotated_twice": lambda q, k, c, s: (lambda a: (a, rope(a, c, s)))(rope(q, c, s)),
    "a_copy_turned": lambda q, k, c, s: (lambda y: q * c + turn(y.mul_(2)) * s)(q.clone()),
    "other_length": lambda q, k, c, s: (rope(q, c[:, :, :1], s[:, :, :1]), rope(k[:, :, :3], c[:, :, :1], s[:, :, :1])),
    "other_heads": lambda q, k, c, s: (rope(q, c[:, :, :1], s[:, :, :1]), rope(k[:, :2], c[:, :, :1], s[:, :, :1])),
}


@pytest.mark.parametrize("name", ROPES)
def test_ropes(name):
    same(ROPES[name], q4, k4, cos, sin)


@pytest.mark.parametrize("first", ["q", "k"])
def test_one_of_the_pair_without_gradient(first):
    def function(q, k, c, s):
        with torch.set_grad_enabled(first != "q"):
            a = rope(q, c, s)
        with torch.set_grad_enabled(first != "k"):
            b = rope(k, c, s)
        return a, b

    q, k = q4.clone().requires_grad_(), k4.clone().requires_grad_()
    (a, b), _ = rewritten(function, q, k, cos, sin)
    assert (a.requires_grad, b.requires_grad) == (first != "q", first != "k")


REPEATS = {
    "keys_written": lambda q, k: (lambda r, _: F.scaled_dot_product_attention(q, r, r))(k.repeat_interleave(3, 1), k.mul_(3)),
    "repeated_written": lambda q, k: (lambda r: F.scaled_dot_product_attention(q, r.mul_(3), r))(k.repeat_interleave(3, 1)),
    "one_head_written": lambda q, k: (lambda r, _: F.scaled_dot_product_attention(q, r, r))(*(lambda r: (r, r.__setitem__((slice(None), 0), 0.0)))(k.repeat_interleave(3, 1))),
    "one_query_head": lambda q, k: F.scaled_dot_product_attention(q[:, :1], k.repeat_interleave(3, 1), k.repeat_interleave(3, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads(name):
    same(REPEATS[name], q4, k4[:, :1])


S = 5
ones, zeros = torch.ones(S, S, dtype=torch.long), torch.zeros(S, S)


def causal():
    return torch.arange(S)[None] <= torch.arange(S)[:, None]


MASKS = {
    "keyword_other": lambda: causal().logical_and(other=torch.arange(S)[None] < 3),
    "keywords_only": lambda: torch.logical_and(input=causal(), other=torch.arange(S)[None] != 2),
    "logical_or": lambda: torch.logical_or(causal(), other=torch.arange(S)[None] < 2),
    "bits": lambda: (torch.ones(S, S, dtype=torch.long) & 2).bool() | causal(),
    "bit_of_an_index": lambda: (torch.arange(S)[None] & 1).bool() | (torch.arange(S)[None] == 0) | (torch.arange(S)[None] <= 0 * torch.arange(S)[:, None]),
    "inverted_integers": lambda: (~torch.ones(S, S, dtype=torch.long)).bool() | causal(),
    "wraps": lambda: ((torch.zeros(S, S, dtype=torch.uint8) - 1) < 0) | causal(),
    "overflows": lambda: ((torch.full((S, S), 100, dtype=torch.int8) + 100) > 0) & causal(),
    "keyword_fill": lambda: torch.zeros(S, S).masked_fill(mask=~causal(), value=float("-inf")),
    "keyword_transpose": lambda: causal().transpose(dim0=0, dim1=1) | causal(),
    "keyword_permute": lambda: causal().permute(dims=(1, 0)) | causal(),
    "keyword_tril": lambda: torch.tril(input=torch.ones(S, S)) == 1,
    "keyword_arange": lambda: torch.arange(start=0, end=S)[None] <= torch.arange(1, end=S + 1)[:, None] - 1,
    "nan": lambda: torch.where(causal(), 0.0, float("-inf")) + (~causal()).float() * float("-inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    same(lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=MASKS[name]()), q4, k4)


def test_a_symbolic_slice_from_the_end():
    def function(q, k):
        n = q.shape[-2]
        index = torch.arange(n, 2 * n)[-n:] - n
        return F.scaled_dot_product_attention(q, k, k, attn_mask=torch.arange(n)[None] <= index[:, None])

    found, _ = rewritten(function, q4, k4, dynamic=True)
    torch.testing.assert_close(found, function(q4, k4), rtol=1e-5, atol=1e-5)


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
    try:
        expected = SAVED[name](leaf)
        expected = expected[0] if isinstance(expected, tuple) else expected
        (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    except RuntimeError:
        wanted = None  # eager refuses as well
    if wanted is not None:
        found, _ = rewritten(SAVED[name], leaf)
        found = found[0] if isinstance(found, tuple) else found
        (got,) = torch.autograd.grad(found.sum(), leaf)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_functorch_transforms_are_left_alone():
    def per_sample(x):
        return torch.func.vmap(rms)(x)

    def gradient(x):
        return torch.func.grad(lambda x: rms(x).square().sum())(x)

    for function in (per_sample, gradient):
        found, report = rewritten(function, x)
        torch.testing.assert_close(found, function(x), rtol=1e-4, atol=1e-5)
        assert report.count("rms_norm") == 0
        assert "functorch" in reasons(report, "rms_norm")
        torch._dynamo.reset()


def test_a_replacement_that_was_tried_leaves_no_guard(monkeypatch):
    """An example value that looks at a size (as a kernel's choice does on some devices) must not cost a recompile."""
    from fx_fusion.rewrite.editor import Editor

    describe = Editor._describe

    def looks_at_sizes(editor, node, target, like):
        def choosing(*args, **kwargs):
            result = target(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                assert all(bool(size > 3) for size in result.shape if size != 1)  # a guard on each
                int(result.shape[0])  # pins the size
            return result

        return describe(editor, node, choosing, like)

    monkeypatch.setattr(Editor, "_describe", looks_at_sizes)

    def norm(x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    compiled = torch.compile(norm, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for rows in (5, 6, 7, 8):
            compiled(torch.randn(rows, 8), torch.ones(8))
    assert report.count("rms_norm") >= 1, str(report)
    assert len(report.graphs) == 1, [g.compile_id for g in report.graphs]


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


def pairs_of(q):
    return torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))


@pytest.mark.parametrize(
    "combine",
    [lambda z, f: z + f, lambda z, f: z / f, lambda z, f: f / z, lambda z, f: z * f.conj(), lambda z, f: z * z],
    ids=["sum", "quotient", "inverse", "conjugate", "square"],
)
def test_what_is_no_rotation_by_complex_numbers(combine):
    freqs = torch.polar(torch.rand(5, 3) + 0.5, torch.randn(5, 3))[None, :, None]

    def turned(q):
        return torch.view_as_real(combine(pairs_of(q), freqs)).flatten(3).type_as(q)

    q = torch.randn(2, 5, 3, 6)
    result, report = rewritten(turned, q)
    assert report.count("complex_rope") == 0, str(report)
    torch.testing.assert_close(result, turned(q))


def test_arguments_by_name():
    freqs = torch.polar(torch.ones(5, 3), torch.randn(5, 3))[None, :, None]

    def turned(q):
        z = torch.view_as_complex(input=torch.reshape(input=q.float(), shape=(*q.shape[:-1], -1, 2)))
        return torch.view_as_real(input=z * freqs).flatten(3)

    q = torch.randn(2, 5, 3, 6)
    result, report = rewritten(turned, q)
    assert report.count("complex_rope") == 1, str(report)
    torch.testing.assert_close(result, turned(q))

    def loss(x, target):
        logits = F.linear(x, torch.linspace(-1, 1, 24 * 8).view(24, 8))
        return F.cross_entropy(torch.flatten(input=logits, end_dim=1), target.view(-1))

    x, target = torch.randn(2, 3, 8), torch.arange(6).view(2, 3)
    result, report = rewritten(loss, x, target)
    assert report.count("linear_cross_entropy") == 1, str(report)
    torch.testing.assert_close(result, loss(x, target))


@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3)])
def test_log_probabilities_of_flat_logits_viewed_apart(shape):
    def loss(logits, target):
        apart = logits.view(*shape, 24)
        return -apart.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1).mean()

    logits, target = torch.randn(6, 24, requires_grad=True), torch.arange(6).view(shape)
    result, report = rewritten(loss, logits, target)
    assert report.count("cross_entropy") == 1, str(report)
    torch.testing.assert_close(result, loss(logits, target))
    ours, theirs = (torch.autograd.grad(r, logits)[0] for r in (result, loss(logits, target)))
    torch.testing.assert_close(ours, theirs)
