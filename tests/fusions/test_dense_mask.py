"""Biases of attention whose rows are strided: copied once, or left alone."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import reasons


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
        found = torch.compile(function, backend=rewriting_backend(speculate=False))(**inputs, bias=bias, padding=padding)
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
    with fx_fusion.recording() as report:
        found = torch.compile(function, backend=rewriting_backend(), dynamic=False)(**inputs, bias=weights[0])
    report.assert_fused(dense_mask=1)  # the call behind the write; what the one before reads is changed later
    assert "later changes a value in place" in reasons(report, "dense_mask")
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
