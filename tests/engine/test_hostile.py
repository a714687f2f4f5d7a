"""Graphs made to break the rewriter: each was wrong once, or looks as if it could be. Whatever fires, eager's numbers."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import reasons, rewritten
from tests.hostile import H, S, V, h3, head, k4, q4, rms, same, t3, u, w8, x

cos, sin = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)


def turn(x):
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def rope(x, c, s):
    return x * c + turn(x) * s


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


FIRES = {
    "slice_of_rows_of_a_view": ["linear_cross_entropy"], "two_slices": ["linear_cross_entropy"], "part_of_the_rows": ["linear_cross_entropy"],
    "narrowed_rows": ["linear_cross_entropy"], "small_ints": ["linear_cross_entropy"], "wide_bias": ["cross_entropy"],
    "softmax_dtype": [], "key_written_between": ["rope", "rope"], "table_written_between": ["rope", "rope"],
    "rotated_twice": ["rope", "rope"], "other_length": ["rope"], "other_heads": ["rope"], "keyword_arange": ["causal_mask"],
    "keyword_fill": ["causal_mask"], "keyword_tril": ["causal_mask"],
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    same(LOSSES[name], h3, t3, fires=FIRES.get(name, ()))


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
    same(ROPES[name], q4, k4, cos, sin, fires=FIRES.get(name, ()))


@pytest.mark.parametrize("first", ["q", "k"])
def test_one_of_the_pair_without_gradient(first):
    def function(q, k, c, s):
        with torch.set_grad_enabled(first != "q"):
            a = rope(q, c, s)
        with torch.set_grad_enabled(first != "k"):
            b = rope(k, c, s)
        return a, b

    q, k = q4.clone().requires_grad_(), k4.clone().requires_grad_()
    (a, b), report = rewritten(function, q, k, cos, sin)
    report.assert_fused(rope=2)
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
    same(lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=MASKS[name]()), q4, k4, fires=FIRES.get(name, ()))


def test_a_symbolic_slice_from_the_end():
    def function(q, k):
        n = q.shape[-2]
        index = torch.arange(n, 2 * n)[-n:] - n
        return F.scaled_dot_product_attention(q, k, k, attn_mask=torch.arange(n)[None] <= index[:, None])

    found, _ = rewritten(function, q4, k4, dynamic=True)
    torch.testing.assert_close(found, function(q4, k4), rtol=1e-5, atol=1e-5)


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


def test_arguments_of_a_loss_by_name():
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


def test_a_pattern_that_can_not_be_computed_is_no_match_and_no_failure():
    """CPU autocast to bfloat16 refuses to stack float16 tensors, which this graph does not: it casts before."""

    def function(q, c, s):
        f = q.float()
        turned = torch.stack((-f[..., 1::2], f[..., 0::2]), dim=-1).flatten(-2)
        return (f * c + turned * s).to(q.dtype)

    inputs = [t.half() for t in (torch.randn(2, 3, 5, 8), cos, sin)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = function(*inputs)
        with fx_fusion.recording() as report:
            found = torch.compile(function, backend=rewriting_backend())(*inputs)
    assert torch.equal(found, expected)
    report.assert_fused(rope=1)


def test_a_graph_that_gets_a_view_whose_base_was_written_to_outside_of_inference_mode():
    """torch refuses to say whether such a view is a leaf, or has a gradient."""

    def function(x, bias):
        view = bias.view(1, -1, 1, 1)
        torch._dynamo.graph_break()
        view.detach().add_(0.5)
        return F.group_norm(x, 2) + view

    images, bias = torch.randn(2, 4, 5, 6), torch.randn(4, requires_grad=True)
    expected = function(images, bias.detach().clone())
    with fx_fusion.recording() as report, torch.inference_mode():
        found = torch.compile(function, backend=rewriting_backend(), dynamic=True)(images, bias)
    torch.testing.assert_close(found, expected)
    report.assert_fused(group_norm=1)
