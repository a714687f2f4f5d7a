"""RoPE: spellings, and what only looks like it."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion import pipeline
from fx_fusion.testing import Run, worst_excess
from tests.helpers import reasons, rewritten, tiny_llama, tokens

B, H, G, S, D = 2, 4, 2, 5, 8
q, k = torch.randn(B, S, H, D).transpose(1, 2), torch.randn(B, S, G, D).transpose(1, 2)
angles = torch.outer(torch.arange(S).float(), 1.0 / 100 ** (torch.arange(0, D, 2) / D))
cos, sin = torch.cat([angles, angles], -1).cos()[None], torch.cat([angles, angles], -1).sin()[None]


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_half_chunked(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def every_two_reshaped(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)


def every_two_as(x):
    """As RoFormer writes it."""
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).reshape_as(x)


def every_two_viewed_as(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).view_as(x)


def tables_of_positions_alone(q, k, cos, sin):
    """As timm writes it: (s, d), broadcast over batch and heads."""
    c, s = cos[0], sin[0]
    return q * c + every_two_reshaped(q) * s, k * c + every_two_reshaped(k) * s


def partial(q, k, cos, sin):
    """As transformers writes it: both are rotated, then both are put together."""
    c, s = cos[:, None, :, : D // 2], sin[:, None, :, : D // 2]
    (qr, qp), (kr, kp) = ((x[..., : D // 2], x[..., D // 2 :]) for x in (q, k))
    qr, kr = (x * c + rotate_half(x) * s for x in (qr, kr))
    return torch.cat([qr, qp], dim=-1), torch.cat([kr, kp], dim=-1)


def with_rotation(turn, dim=1):
    def function(q, k, cos, sin):
        c, s = cos.unsqueeze(dim), sin.unsqueeze(dim)
        return q * c + turn(q) * s, (k * c) + (turn(k) * s)

    return function


def explicit_halves(q, k, cos, sin):
    c, s = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    out = []
    for x in (q, k):
        first, second = torch.chunk(x, 2, dim=-1)
        out.append(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
    return tuple(out)


def even_odd(q, k, cos, sin):
    c, s = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    out = []
    for x in (q, k):
        e, o = x[..., 0::2], x[..., 1::2]
        out.append(torch.cat((e * c - o * s, o * c + e * s), dim=-1))
    return tuple(out)


def halves_written_twice(q, k, cos, sin):
    c, s, half = cos[:, None, :, : D // 2], sin[:, None, :, : D // 2], D // 2
    return tuple(
        torch.cat((x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s), dim=-1) for x in (q, k)
    )


ROPES = {
    "slices": with_rotation(rotate_half), "chunks": with_rotation(rotate_half_chunked), "every_two": with_rotation(every_two),
    "every_two_as": with_rotation(every_two_as), "every_two_viewed_as": with_rotation(every_two_viewed_as),
    "reversed": with_rotation(lambda x: torch.cat((x[..., D // 2 :], -x[..., : D // 2]), dim=-1)),
    "explicit_halves": explicit_halves, "even_odd_to_halves": even_odd,
    "indexed_axis": lambda q, k, cos, sin: (q * cos[:, None] + rotate_half(q) * sin[:, None], k * cos[:, None] + rotate_half(k) * sin[:, None]),
    "cast_back": lambda q, k, cos, sin: tuple((x.float() * cos[:, None] + rotate_half(x.float()) * sin[:, None]).to(x.dtype) for x in (q, k)),
    "partial": partial, "halves_written_twice": halves_written_twice,
    "tables_of_positions_alone": tables_of_positions_alone,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_rope_takes_queries_and_keys_together(name, dtype):
    function = ROPES[name]
    leaves = [[t.detach().to(dtype).requires_grad_() for t in (q, k)] for _ in range(2)]
    tables = (cos.to(dtype), sin.to(dtype)) if name != "cast_back" else (cos, sin)
    result, report = rewritten(function, *leaves[0], *tables)
    report.assert_fused(rope=1)
    assert set(next(s for s in report.sites if s.fusion == "rope").shapes) == {"q", "k", "cos", "sin"}
    expected = function(*leaves[1], *tables)
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
    exact_leaves = [t.detach().to(dtype).double().requires_grad_() for t in (q, k)]
    exact = function(*exact_leaves, *(t.double() for t in tables))
    runs = []
    for outs, inputs in ((result, leaves[0]), (expected, leaves[1]), (exact, exact_leaves)):
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
        runs.append(Run({"q": outs[0].detach(), "k": outs[1].detach(), "dq": inputs[0].grad, "dk": inputs[1].grad}))
    worst, used = worst_excess(*runs, dtype)
    assert used <= 1, (worst, used)


@pytest.mark.parametrize("trained", ["q", "k"])
def test_only_one_of_them_is_trained(trained):
    """LoRA on q_proj alone, in a first layer behind frozen embeddings: the other is plain data, and stays so."""
    function = with_rotation(rotate_half)
    leaves = {n: t.clone().requires_grad_(n == trained) for n, t in (("q", q), ("k", k))}
    result, report = rewritten(function, *leaves.values(), cos, sin)
    report.assert_fused(rope=2)  # one op would give both a gradient
    assert [t.requires_grad for t in result] == [n == trained for n in leaves]
    expected = function(*leaves.values(), cos, sin)
    at = list(leaves).index(trained)
    ours, theirs = (torch.autograd.grad(r[at].square().sum(), leaves[trained])[0] for r in (result, expected))
    torch.testing.assert_close(ours, theirs)


def test_heads_behind_positions():
    function = with_rotation(rotate_half, dim=2)
    args = (q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    result, report = rewritten(function, *args)
    report.assert_fused(rope=1)
    for ours, theirs in zip(result, function(*args), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tables_that_need_a_gradient_are_left_alone():
    table = cos.clone().requires_grad_()
    result, report = rewritten(with_rotation(rotate_half), q, k, table, sin)
    report.assert_fused(rope=0)
    assert "needs a gradient" in reasons(report, "rope")


def test_keys_made_from_rotated_queries_are_rotated_later():
    def chained(q, cos, sin):
        c, s = cos[:, None], sin[:, None]
        first = q * c + rotate_half(q) * s
        second = torch.tanh(first)
        return first, second * c + rotate_half(second) * s

    result, report = rewritten(chained, q, cos, sin)
    report.assert_fused(rope=2)
    for ours, theirs in zip(result, chained(q, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_halves_that_are_written_to_in_between_are_two_values():
    def function(q, cos, sin):
        q, c, s, half = q * 1, cos[:, None, :, : D // 2], sin[:, None, :, : D // 2], D // 2
        first = q[..., :half] * c - q[..., half:] * s
        q[..., half:].mul_(2)
        return torch.cat((first, q[..., half:] * c + q[..., :half] * s), dim=-1)

    result, report = rewritten(function, q, cos, sin)
    report.assert_fused(rope=0)
    torch.testing.assert_close(result, function(q, cos, sin))


def test_other_rotations_are_not_rope():
    quarter = with_rotation(lambda x: torch.cat((-x[..., 2:], x[..., :2]), dim=-1))
    both_negative = with_rotation(lambda x: torch.cat((-x[..., D // 2 :], -x[..., : D // 2]), dim=-1))
    of_another = lambda q, k, cos, sin: (q * cos[:, None] + rotate_half(k[:, :1]) * sin[:, None], k)  # noqa: E731
    for function in (quarter, both_negative, of_another):
        result, report = rewritten(function, q, k, cos, sin)
        report.assert_fused(rope=0)
        for ours, theirs in zip(result, function(q, k, cos, sin), strict=True):
            torch.testing.assert_close(ours, theirs)
        torch._dynamo.reset()


def attended(q, k, v, cos, sin, mask=None, extra=False):
    q, k = (x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin for x in (q, k))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return (out, q) if extra else out


def under_autocast(function, inputs, monkeypatch=None, **options):
    """Results and gradients as a float32 model has them under autocast, and the report."""
    if monkeypatch is not None:
        monkeypatch.setattr(pipeline, "finish", lambda *_: None)
    given = [t.clone().requires_grad_(t.dim() == 4) for t in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, report = rewritten(function, *given, options=options)
    loss = sum(t.float().sin().sum() for t in (out if isinstance(out, tuple) else (out,)))
    return [loss.detach(), *torch.autograd.grad(loss, given[:3])], report


@pytest.fixture
def wide_tables():
    """Queries, keys and values in 16 bits, as linears under autocast give them; cos and sin in float32."""
    torch.manual_seed(0)
    return [torch.randn(2, 4, 33, 16).bfloat16() for _ in range(3)] + [torch.randn(1, 33, 16) for _ in range(2)]


def test_what_autocast_would_round_is_stored_in_16_bits(wide_tables, monkeypatch):
    """Attention under autocast reads queries and keys in 16 bits: bit for bit the same, without float32 in between."""
    ours, report = under_autocast(attended, wide_tables)
    report.assert_fused(rope=1)
    assert "out='input'" in report.graphs[0].after
    torch._dynamo.reset()
    before, report = under_autocast(attended, wide_tables, monkeypatch)
    assert "out='promoted'" in report.graphs[0].after
    for found, expected in zip(ours, before, strict=True):
        assert torch.equal(found, expected)


def test_float32_that_somebody_else_reads_stays(wide_tables):
    """A result of the graph, or a sum, is what it was."""
    found, report = under_autocast(lambda *given: attended(*given, extra=True), wide_tables)
    report.assert_fused(rope=1)
    assert "out='promoted'" in report.graphs[0].after
    given = [t.clone().requires_grad_(t.dim() == 4) for t in wide_tables]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, q = attended(*given, extra=True)
    expected = out.float().sin().sum() + q.sin().sum()
    torch.testing.assert_close(found[0], expected.detach(), rtol=1e-3, atol=1e-3)


def test_float32_that_two_read_stays(wide_tables):
    """The gradients of both are added up in float32, as eager does."""

    def twice(q, k, v, cos, sin):
        q, k = (x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin for x in (q, k))
        attend = F.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True) + attend(q, k, v)

    _, report = under_autocast(twice, wide_tables)
    report.assert_fused(rope=1)
    assert "out='promoted'" in report.graphs[0].after


def test_without_autocast_attention_reads_float32(wide_tables):
    q, k, v, cos, sin = wide_tables
    given = [q.clone().requires_grad_(), k.clone().requires_grad_(), v.float().requires_grad_(), cos, sin]
    out, report = rewritten(attended, *given)
    assert out.dtype == torch.float32
    assert "out='promoted'" in report.graphs[0].after


@pytest.mark.slow
def test_a_llama_under_autocast_verifies():
    """What is stored narrower is no fault to ``verify``."""
    model, ids = tiny_llama(), tokens(2, 40)
    compiled = torch.compile(model, backend="fx_fusion", options={"select": "always", "verify": "first"})
    with fx_fusion.recording() as report, torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(input_ids=ids, labels=ids).loss.backward()
    assert "out='input'" in report.graphs[0].after
    assert report.count("rope") == model.config.num_hidden_layers


def test_angles_without_dims_are_left_alone():
    def function(q, c, s):
        return q * c + torch.cat((-q[..., 4:], q[..., :4]), -1) * s

    given = torch.randn(2, 3, 5, 8), torch.tensor(0.6), torch.tensor(0.8)
    found, report = rewritten(function, *given, options={"select": "always"})
    torch.testing.assert_close(found, function(*given))
    assert "tables of one shape" in reasons(report, "rope")
