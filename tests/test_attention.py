"""Attention written out: the spellings that become scaled_dot_product_attention, and those that must not."""

import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import reasons, rewritten, statuses

B, H, S, D = 2, 3, 7, 8
LOW = torch.finfo(torch.float32).min


def hidden(device=None):
    return torch.ones(S, S, dtype=torch.bool, device=device).triu(1)


def visible():
    i = torch.arange(S)
    return i[None, :] <= i[:, None]


SPELLINGS = {
    "masked_fill": lambda q, k, v: torch.softmax((q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(hidden(), float("-inf")), -1) @ v,
    "where": lambda q, k, v: torch.softmax(torch.where(visible(), q @ k.mT * 0.3, torch.tensor(LOW)), -1) @ v,
    "additive": lambda q, k, v: torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3 + torch.zeros(S, S).masked_fill(hidden(), LOW), dim=-1).matmul(v),
    "scaled after the mask": lambda q, k, v: torch.softmax((q @ k.transpose(-1, -2)).masked_fill(hidden(), -1e38) / 4, -1) @ v,
    "no mask, float32 softmax": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1), -1, dtype=torch.float32).to(q.dtype) @ v,
    "keys as they are": lambda q, k, v: torch.softmax(q @ k.permute(0, 1, 3, 2), -1) @ v,
    "batched products": lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)), -1), v.flatten(0, 1)).view(B, H, S, D),
}  # fmt: skip


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(B, H, S, D, dtype=dtype, requires_grad=True) for _ in range(3)]


def close(ours, theirs, inputs, dtype=torch.float32):
    rough = {"rtol": 2e-2, "atol": 3e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **rough)
    assert ours.stride() == theirs.stride()
    dy = torch.randn_like(theirs)
    for a, b in zip(torch.autograd.grad(ours, inputs, dy), torch.autograd.grad(theirs, inputs, dy), strict=True):
        torch.testing.assert_close(a, b, **rough)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, dtype):
    qkv = tensors(dtype)
    if name == "additive" and dtype != torch.float32:
        pytest.skip("the mask is float32: the sum is computed in float32")
    ours, report = rewritten(SPELLINGS[name], *qkv)
    assert statuses(report, "attention") == ["fused"], str(report)
    close(ours, SPELLINGS[name](*qkv), qkv, dtype)


def test_a_learned_bias_is_handed_on_and_learns():
    qkv, bias = tensors(), torch.randn(1, H, S, S, requires_grad=True)

    def attention(q, k, v, bias):
        return torch.softmax((q @ k.transpose(-1, -2) * 0.3 + bias).masked_fill(hidden(), LOW), -1) @ v

    ours, report = rewritten(attention, *qkv, bias)
    assert statuses(report, "attention") == ["fused"]
    close(ours, attention(*qkv, bias), [*qkv, bias])


def soft(scores, v):
    return torch.softmax(scores, -1) @ v


def scores_of(q, k):
    return q @ k.transpose(-1, -2)


NOT_ATTENTION = {
    "over queries": lambda q, k, v, m, f: torch.softmax(scores_of(q, k), -2) @ v,
    "a mask from outside, filled": lambda q, k, v, m, f: soft(scores_of(q, k).masked_fill(m, LOW), v),
    "a mask from outside, added": lambda q, k, v, m, f: soft(scores_of(q, k) + f, v),
    "a mask of ones added": lambda q, k, v, m, f: soft(scores_of(q, k) + visible(), v),
    "alpha": lambda q, k, v, m, f: soft(torch.add(scores_of(q, k), torch.zeros(S, S).masked_fill(hidden(), -1.0), alpha=3), v),
    "floored": lambda q, k, v, m, f: soft(torch.div(scores_of(q, k), 0.7, rounding_mode="floor"), v),
    "integers on the way": lambda q, k, v, m, f: soft(scores_of(q, k).int().float(), v),
    "rounded probabilities": lambda q, k, v, m, f: torch.softmax(scores_of(q, k) * 5, -1, dtype=torch.bfloat16).float() @ v,
    "hidden by a small number": lambda q, k, v, m, f: soft(scores_of(q, k).masked_fill(hidden(), -5.0), v),
    "hidden by nan": lambda q, k, v, m, f: soft(scores_of(q, k).masked_fill(hidden(), float("nan")), v),
    "a mask scaled away": lambda q, k, v, m, f: soft(scores_of(q, k).masked_fill(hidden(), -1e31) * 1e-30, v),
    "negative scale": lambda q, k, v, m, f: soft(scores_of(q, k).masked_fill(hidden(), float("-inf")) * -1.0, v),
    "softcap": lambda q, k, v, m, f: soft(torch.tanh(scores_of(q, k) / 5) * 5, v),
    "probabilities returned": lambda q, k, v, m, f: (lambda p: torch.cat([p @ v, p], -1))(torch.softmax(scores_of(q, k), -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_is_no_fused_attention(name):
    qkv = tensors()
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    mask[0, :, 2] = True  # a row that is hidden entirely
    added = torch.zeros(B, 1, S, S).masked_fill(mask, LOW)
    ours, report = rewritten(NOT_ATTENTION[name], *qkv, mask, added)
    assert "fused" not in statuses(report, "attention"), str(report)
    torch.testing.assert_close(ours, NOT_ATTENTION[name](*qkv, mask, added), equal_nan=True)


def test_a_bias_that_is_written_to_in_between():
    qkv, bias = tensors(), torch.zeros(S, S, requires_grad=True)

    def attention(q, k, v, bias):
        learned = bias * 1
        scores = scores_of(q, k) + learned
        learned.add_(torch.arange(S))
        return soft(scores, v)

    ours, _ = rewritten(attention, *qkv, bias)
    torch.testing.assert_close(ours, attention(*qkv, bias), rtol=1e-4, atol=1e-5)


def test_a_near_miss_names_the_mask():
    qkv = tensors()
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    _, report = rewritten(lambda q, k, v, m: soft(scores_of(q, k).masked_fill(m, LOW), v), *qkv, mask)
    assert "depends on the input m" in reasons(report, "attention")


def biased(q, k, v, bias, mask=None):
    bias = bias.permute(2, 0, 1)[None]
    bias = bias if mask is None else mask(bias)
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return q


LOWEST = torch.finfo(torch.bfloat16).min
MASKED_BIASES = {
    "alone": None,
    "causal": lambda bias: torch.where(torch.ones(9, 9, dtype=torch.bool).tril(), bias, LOWEST),
    "added": lambda bias: bias + torch.zeros(9, 9, dtype=bias.dtype).masked_fill(torch.ones(9, 9).triu(1).bool(), LOWEST),
}


@pytest.mark.parametrize("mask", MASKED_BIASES)
def test_a_bias_with_strided_rows_is_copied_once(mask):
    function = functools.partial(biased, mask=MASKED_BIASES[mask])
    inputs = {n: torch.randn(2, 3, 9, 16, dtype=torch.bfloat16) for n in "qkv"}
    inputs["bias"] = torch.randn(9, 9, 3, dtype=torch.bfloat16)
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("dense_mask") == 2, str(report)
    assert report.graphs[0].after.count("= .contiguous(") == 1
    name, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.bfloat16)
    assert used <= 1, name


@pytest.mark.parametrize("inside", [False, True], ids=["ambient", "inside"])
def test_a_strided_bias_is_copied_in_the_dtype_of_autocast(inside):
    """Queries are 16-bit and the bias float32, as in T5 under Trainer's bf16: autocast casts it at every call."""

    def around():
        return torch.autocast("cpu", torch.bfloat16)

    def function(q, k, v, bias):
        with around() if inside else contextlib.nullcontext():
            return biased(q, k, v, bias)

    inputs = {n: torch.randn(2, 3, 9, 16, dtype=torch.bfloat16) for n in "qkv"}
    inputs["bias"] = torch.randn(9, 9, 3)
    with fx_fusion.recording() as report, contextlib.nullcontext() if inside else around():
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
        eager = run(function, inputs)
    assert report.count("dense_mask") == 2, str(report)
    assert report.graphs[0].after.count("= .contiguous(") == 1
    name, used = worst_excess(fused, eager, run_oracle(biased, inputs), torch.bfloat16)
    assert used <= 1, name


def test_a_bias_that_is_dense_or_may_hide_a_row_is_left_alone():
    inputs = {n: torch.randn(2, 3, 9, 16, dtype=torch.bfloat16) for n in "qkv"}
    dense = torch.randn(3, 9, 9, dtype=torch.bfloat16).permute(1, 2, 0)
    with fx_fusion.recording() as report:
        run(torch.compile(biased, backend=rewriting_backend(), dynamic=False), {**inputs, "bias": dense})
    # run() clones; the layout is kept
    assert report.count("dense_mask") == 0
    padding = torch.zeros(2, 1, 1, 9, dtype=torch.bfloat16)
    padding[0, ..., 4:] = LOWEST

    def function(q, k, v, bias, padding):
        return biased(q, k, v, bias, lambda b: b + padding)

    bias = torch.randn(9, 9, 3, dtype=torch.bfloat16).requires_grad_()
    with fx_fusion.recording() as report:
        found = torch.compile(function, backend=rewriting_backend(), dynamic=False)(**inputs, bias=bias, padding=padding)
    assert report.count("dense_mask") == 0
    assert "may hide a row entirely" in reasons(report, "dense_mask")
    assert torch.equal(found, function(**inputs, bias=bias, padding=padding))


def test_a_copy_of_a_bias_is_not_shared_across_grad_modes():
    def function(q, k, v, bias):
        bias = bias.permute(2, 0, 1)[None]
        with torch.no_grad():
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    inputs = {n: torch.randn(2, 3, 9, 16, dtype=torch.bfloat16) for n in "qkv"}
    weights = [torch.ones(9, 9, 3, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    with fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend(), dynamic=False)
        compiled(**inputs, bias=weights[0]).float().square().sum().backward()
    assert report.count("dense_mask") == 2
    function(**inputs, bias=weights[1]).float().square().sum().backward()
    assert weights[1].grad.abs().max() > 0
    torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=5e-2, atol=5e-3)


def test_a_copy_of_a_bias_is_not_shared_across_a_write():
    def function(q, k, v, bias):
        with torch.no_grad():
            mask = bias.permute(2, 0, 1)[None]
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            bias.mul_(3)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    inputs = {n: torch.randn(2, 3, 9, 16, dtype=torch.bfloat16) for n in "qkv"}
    weights = [
        torch.nn.Parameter(torch.randn(9, 9, 3, generator=torch.Generator().manual_seed(0)).bfloat16()) for _ in range(2)
    ]
    found = torch.compile(function, backend=rewriting_backend(), dynamic=False)(**inputs, bias=weights[0])
    torch.testing.assert_close(found, function(**inputs, bias=weights[1]), rtol=2e-2, atol=2e-2)


def test_a_bias_under_a_window_over_fewer_keys_may_hide_a_row():
    def function(q, k, v, bias):
        at_q, at_k = torch.arange(9)[:, None], torch.arange(5)[None, :]
        bias = torch.where((at_k <= at_q) & (at_k > at_q - 3), bias.permute(2, 0, 1)[None], LOWEST)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    inputs = {n: torch.randn(2, 3, 9 if n == "q" else 5, 16, dtype=torch.bfloat16) for n in "qkv"}
    bias = torch.randn(9, 5, 3, dtype=torch.bfloat16).requires_grad_()
    with fx_fusion.recording() as report:
        torch.compile(function, backend=rewriting_backend(), dynamic=False)(**inputs, bias=bias)
    assert report.count("dense_mask") == 0, str(report)
    assert "may hide a row entirely" in reasons(report, "dense_mask")
