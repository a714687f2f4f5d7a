"""Heads of keys and values that are repeated for attention."""

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.patterns import repeat_kv as pattern
from tests.helpers import check_rewritten, reasons, rewritten

S = 11
q, k, v = (torch.randn(2, 3, S, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_repeated_heads(dynamic):
    few_k, few_v = k[:, :1], v[:, :1]
    wide = q.repeat(1, 2, 1, 1)

    def expand(x, n=6):
        b, h, s, d = x.shape
        return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)

    for repeat in (expand, lambda x: x.repeat_interleave(6, dim=1)):
        function = lambda q, k, v, repeat=repeat: F.scaled_dot_product_attention(q, repeat(k), repeat(v))  # noqa: E731
        result, report = rewritten(function, wide, few_k, few_v, dynamic=dynamic)
        report.assert_fused(repeat_kv=1)
        torch.testing.assert_close(result, function(wide, few_k, few_v), rtol=1e-5, atol=1e-5)
        torch._dynamo.reset()


def test_heads_that_are_expanded_without_a_gradient():
    few = k[:, :1]

    def function(q, k, v):
        with torch.no_grad():
            k, v = (x[:, :, None].expand(2, 1, 3, S, 8) for x in (k, v))
        return F.scaled_dot_product_attention(q, k.reshape(2, 3, S, 8), v.reshape(2, 3, S, 8))

    result, report = rewritten(function, q.clone().requires_grad_(), few.clone().requires_grad_(), few)
    report.assert_fused(repeat_kv=0)
    torch.testing.assert_close(result, function(q, few, few))


def test_heads_in_another_order_are_not_grouped_heads():
    few = k[:, :3]
    wide = q.repeat(1, 2, 1, 1)
    tiled = lambda x: x[:, None].expand(2, 2, 3, S, 8).reshape(2, 6, S, 8)  # noqa: E731  (a b c a b c, not a a b b c c)
    function = lambda q, k, v: F.scaled_dot_product_attention(q, tiled(k), tiled(v))  # noqa: E731
    check_rewritten(function, wide, few, few, repeat_kv=0)


def test_all_heads_repeated_in_a_row_are_named():
    few, wide = k[:, :2], q[:, :2].repeat(1, 3, 1, 1)
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))  # noqa: E731
    result, report = rewritten(function, wide, few, few)
    report.assert_fused(repeat_kv=0)
    assert "repeats all heads in a row" in reasons(report, "repeat_kv")
    torch.testing.assert_close(result, function(wide, few, few))


def test_only_keys_repeated():
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(3, dim=1), v)  # noqa: E731
    result, report = rewritten(function, q, k[:, :1], v)
    report.assert_fused(repeat_kv=0)
    assert "not repeated alike" in reasons(report, "repeat_kv")
    torch.testing.assert_close(result, function(q, k[:, :1], v))


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("takes", [True, False])
def test_only_where_torch_has_a_kernel(takes, flash, monkeypatch):
    """A call under a mask that stays and one without: the graph is told to be a GPU's, with FlashAttention (which takes grouped
    heads without a mask) or not, and torch's answer is given."""
    asked = []

    def answer(query, key, value, mask, *rest):
        asked.append((query.shape[1], key.shape[1], mask if mask is None else tuple(mask.shape), rest[-1]))
        return takes

    monkeypatch.setattr(pattern, "takes_grouped_heads", answer)
    monkeypatch.setattr(pattern, "on_a_gpu", lambda tensor: True)
    monkeypatch.setattr(pattern, "flash_runs", lambda tensor: flash)

    def function(q, k, v, bias):
        k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias) + F.scaled_dot_product_attention(q, k, v)

    few, bias = k[:, :1], torch.randn(1, 3, S, S)
    result, report = rewritten(function, q, few, few, bias, options={"speculate": False})
    report.assert_fused(repeat_kv=2 if takes else int(flash))
    assert asked == [(3, 1, (1, 3, S, S), torch.float32)] + ([] if flash else [(3, 1, None, torch.float32)])
    if not takes:
        assert "the mask stays" in reasons(report, "repeat_kv")
        assert ("FlashAttention does not run here" in reasons(report, "repeat_kv")) is not flash
    torch.testing.assert_close(result, function(q, few, few, bias), rtol=1e-5, atol=1e-5)
