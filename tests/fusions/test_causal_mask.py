"""Masks that are causal, or hide nothing: proved, or left alone with the node that decided."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import check_rewritten, reasons, rewritten

S = 11
q, k, v = (torch.randn(2, 3, S, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))


def attend(mask_of):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(q.shape[-2], k.shape[-2]))


CAUSAL = {
    "compare": lambda n, m: torch.arange(m)[None, :] <= torch.arange(n)[:, None],
    "greater": lambda n, m: ~(torch.arange(m)[None, :] > torch.arange(n)[:, None]),
    "less_than_next": lambda n, m: torch.arange(m).view(1, -1) < torch.arange(n).view(-1, 1) + 1,
    "tril": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(),
    "tril_of_ints": lambda n, m: torch.tril(torch.ones(n, m)) == 1,
    "not_triu": lambda n, m: torch.logical_not(torch.triu(torch.ones(n, m, dtype=torch.bool), diagonal=1)),
    "additive_triu": lambda n, m: torch.triu(torch.full((n, m), float("-inf")), diagonal=1),
    "additive_where": lambda n, m: torch.where(
        torch.arange(m)[None] <= torch.arange(n)[:, None], 0.0, torch.finfo(torch.float32).min
    ),
    "masked_fill": lambda n, m: torch.zeros(n, m).masked_fill(
        torch.arange(m)[None] > torch.arange(n)[:, None], float("-inf")
    ),
    "four_dims": lambda n, m: (torch.arange(m)[None, None, None, :] <= torch.arange(n)[None, None, :, None]).expand(
        2, 1, n, m
    ),
    "wide_window": lambda n, m: (
        (torch.arange(m)[None] <= torch.arange(n)[:, None]) & (torch.arange(m)[None] > torch.arange(n)[:, None] - 64)
    ),
    "gathered": lambda n, m: torch.arange(m)[torch.arange(m)][None, :] <= torch.arange(n)[torch.arange(n)][:, None],
    "one_document": lambda n, m: (
        (torch.arange(m)[None] <= torch.arange(n)[:, None])
        & (((torch.arange(n).diff(prepend=torch.arange(n)[:1] - 1) != 1).cumsum(-1))[:, None] == 0)
    ),
}
NO_MASK = {
    "ones": lambda n, m: torch.ones(n, m, dtype=torch.bool),
    "zeros": lambda n, m: torch.zeros(n, m),
    "always_true": lambda n, m: torch.arange(m)[None, :] < torch.arange(n)[:, None] + 100,
}


def one_cell(n, m):
    mask = torch.ones(n, m, dtype=torch.bool).tril()
    mask[3, 1] = False
    return mask


UNPROVED = {
    "one_cell": (one_cell, "in place"),
    "strict": (
        lambda n, m: (torch.arange(m)[None] < torch.arange(n)[:, None]) | (torch.arange(m)[None] == 0),
        "visible where",
    ),
    "not_quite_minus_infinity": (lambda n, m: torch.triu(torch.full((n, m), -1e4), diagonal=1), "adds"),
    "learned": (lambda n, m: torch.tril(torch.ones(n, m)) + torch.linspace(0, 1, m), ""),
    "half_step": (lambda n, m: torch.arange(m)[None] * 2.0 <= torch.arange(n)[:, None] * 2.0 + 1.0, ""),
    "low_precision": (
        lambda n, m: torch.arange(250, m + 250).bfloat16()[None] <= torch.arange(250, n + 250).bfloat16()[:, None],
        "may reach 260 in bfloat16",
    ),
    "wraps_around": (
        lambda n, m: torch.arange(m)[torch.arange(m) - 1][None] <= torch.arange(n)[:, None],
        "index from the end",
    ),
    "reversed": (lambda n, m: (m - 1 - torch.arange(m))[None] <= torch.arange(n)[:, None], "visible where"),
    "one_row_of_a_triangle": (lambda n, m: torch.ones(1, m, dtype=torch.bool).tril(), "visible where"),
    "prepended_by_position": (
        lambda n, m: (torch.diff(torch.arange(m), 1, -1, torch.zeros(1, dtype=torch.long)) == 1)[None].expand(n, m),
        "visible where",
    ),
    "counted_in_bytes": (
        lambda n, m: torch.full((m,), 30).cumsum(0, dtype=torch.uint8)[None] <= torch.arange(1, n + 1)[:, None] * 30,
        "may reach 330 in uint8, which wraps around",
    ),
    "indexed_by_true": (lambda n, m: (torch.arange(m)[None] <= torch.arange(n)[:, None])[True], "indexed by True"),
    "two_documents": (
        lambda n, m: (
            (torch.arange(m)[None] <= torch.arange(n)[:, None])
            & ((torch.arange(m)[None] >= 5) == (torch.arange(n)[:, None] >= 5))
        ),
        "",
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name, dynamic):
    function = attend(CAUSAL[name])
    result, report = rewritten(function, q, k, v, dynamic=dynamic)
    if not (name == "wide_window" and dynamic):  # a window of 64 is no mask only while the length is at most 64
        report.assert_fused(causal_mask=1)
        assert "is_causal=True" in report.diff()
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NO_MASK)
def test_no_mask(name):
    function = attend(NO_MASK[name])
    result, report = rewritten(function, q, k, v)
    report.assert_fused(causal_mask=1)
    assert "is_causal=False" in report.diff()
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UNPROVED)
def test_unproved(name):
    mask_of, fragment = UNPROVED[name]
    function = attend(mask_of)
    result, report = rewritten(function, q, k, v)
    report.assert_fused(causal_mask=0)
    assert "not proved" in reasons(report, "causal_mask")
    assert fragment in reasons(report, "causal_mask")
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)


def test_more_keys_than_queries():
    """is_causal of PyTorch counts from the first query: exactly k <= q."""
    short = q[:, :, :5]
    function = attend(CAUSAL["compare"])
    check_rewritten(function, short, k, v, rtol=1e-5, atol=1e-5, causal_mask=1)


def test_a_mask_from_an_input_is_left_alone():
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    function = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    result, report = rewritten(function, q, k, v, mask, options={"speculate": False})
    report.assert_fused(causal_mask=0)
    assert "depends on the input mask" in reasons(report, "causal_mask")


def test_one_mask_two_calls():
    def function(q, k, v):
        mask = CAUSAL["compare"](S, S)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.scaled_dot_product_attention(h, k, v, attn_mask=mask), mask

    (result, mask), report = rewritten(function, q, k, v)
    report.assert_fused(causal_mask=2)
    torch.testing.assert_close(result, function(q, k, v)[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(mask, function(q, k, v)[1])


def test_a_kernel_with_another_layout_is_used_and_its_result_laid_out_as_before():
    """A mask with three dims has no fused kernel on CPU; without it there is one, whose result lies as the queries do."""

    def attend(q, k, v):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = (torch.randn(2, 8, 3, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    expected = attend(q, k, v)
    result, report = rewritten(attend, q, k, v)
    assert report.count("causal_mask") == 1, str(report)
    assert "permute" in report.graphs[0].after, "the kernels lay out alike now: this tests nothing"
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    dy = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(result, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_sizes_are_still_positive():
    """The same proofs go through where the symbol is the size of a tensor."""
    compiled = torch.compile(attend(CAUSAL["less_than_next"]), backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for n in (5, 9):
            compiled(q[:, :, :n], k[:, :, :n], v[:, :, :n])
    report.assert_fused(causal_mask=1)
    assert len(report.graphs) == 1


@pytest.mark.parametrize("kv", [(2, 2), (2, 1), (1, 4), (1, 1)], ids=["grouped", "one head", "one batch", "both"])
def test_keys_of_other_heads_and_batches(kv):
    """SDPA shares keys between heads (``enable_gqa``) and broadcasts batches: the mask goes all the same."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(*kv, 6, 8)

    def function(q, k):
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=kv == (2, 2))

    found, report = rewritten(function, q, k)
    torch.testing.assert_close(found, function(q, k))
    report.assert_fused(causal_mask=1)


def test_a_mask_that_is_written_to_through_numpy():
    """Dynamo traces NumPy; the array and the mask share memory."""

    def function(q, k, v):
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        array = mask.numpy()
        array[3, 1] = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    qkv = [torch.randn(2, 2, 5, 16) for _ in range(3)]
    check_rewritten(function, *qkv, causal_mask=0)


OF_BOOLEANS = {
    "a sum is one or the other": lambda a: (a + a).float() * torch.ones(8, 8).tril() > 1.5,
    "which is no 2": lambda a: (torch.ones(8, 8, dtype=torch.bool).tril() + a).long() == 2,
    "of two that are causal": lambda a: (lambda c: c.add(c).float() == 1)(torch.ones(8, 8, dtype=torch.bool).tril()),
    "a product is both": lambda a: torch.ones(8, 8, dtype=torch.bool).tril() * torch.ones(8, 8, dtype=torch.bool),
}


@pytest.mark.parametrize("name", OF_BOOLEANS)
def test_sums_of_booleans(name):
    """PyTorch's ``bool + bool`` is an or."""
    q = torch.randn(2, 2, 8, 16)

    def attend(q):
        mask = OF_BOOLEANS[name](torch.ones(8, 8, dtype=torch.bool))
        bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)

    with fx_fusion.recording() as report:
        found = torch.compile(attend, backend=rewriting_backend(select="always"))(q)
    assert report.count("causal_mask") == (name in ("of two that are causal", "a product is both")), str(report)
    torch.testing.assert_close(found, attend(q), rtol=1e-4, atol=1e-5)
