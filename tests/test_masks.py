"""Masks: proved, or left alone with the node that decided. Every mask that fires is compared with eager."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import reasons, rewritten

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


# Neither causal nor nothing: of other masks only the structure is known.
STRUCTURED = {
    "one_ahead": (lambda n, m: torch.arange(m)[None] <= torch.arange(n)[:, None] + 1, "-1 <= q - k"),
    "window": (
        lambda n, m: (
            (torch.arange(m)[None] <= torch.arange(n)[:, None]) & (torch.arange(m)[None] > torch.arange(n)[:, None] - 4)
        ),
        "causal window of 4",
    ),
    "anticausal": (lambda n, m: torch.arange(m)[None] >= torch.arange(n)[:, None], "q - k <= 0"),
    "transposed": (lambda n, m: (torch.arange(m)[None] <= torch.arange(n)[:, None]).t(), "q - k <= 0"),
    "tril_diagonal": (lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(2), "-2 <= q - k"),
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
        lambda n, m: torch.arange(m, dtype=torch.bfloat16)[None] <= torch.arange(n, dtype=torch.bfloat16)[:, None],
        "can't count",
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
        lambda n, m: torch.ones(m, dtype=torch.long).cumsum(0, dtype=torch.uint8)[None] <= torch.arange(1, n + 1)[:, None],
        "can't count",
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


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured(name):
    mask_of, structure = STRUCTURED[name]
    function = attend(mask_of)
    result, report = rewritten(function, q, k, v)
    report.assert_fused(causal_mask=0, block_sparse_attention=0)
    assert structure in reasons(report, "block_sparse_attention")
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)


def test_more_keys_than_queries():
    """is_causal of PyTorch counts from the first query: exactly k <= q."""
    short = q[:, :, :5]
    function = attend(CAUSAL["compare"])
    result, report = rewritten(function, short, k, v)
    report.assert_fused(causal_mask=1)
    torch.testing.assert_close(result, function(short, k, v), rtol=1e-5, atol=1e-5)


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


def test_heads_in_another_order_are_not_grouped_heads():
    few = k[:, :3]
    wide = q.repeat(1, 2, 1, 1)
    tiled = lambda x: x[:, None].expand(2, 2, 3, S, 8).reshape(2, 6, S, 8)  # noqa: E731  (a b c a b c, not a a b b c c)
    function = lambda q, k, v: F.scaled_dot_product_attention(q, tiled(k), tiled(v))  # noqa: E731
    result, report = rewritten(function, wide, few, few)
    report.assert_fused(repeat_kv=0)
    torch.testing.assert_close(result, function(wide, few, few))


def test_only_keys_repeated():
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(3, dim=1), v)  # noqa: E731
    result, report = rewritten(function, q, k[:, :1], v)
    report.assert_fused(repeat_kv=0)
    assert "not repeated alike" in reasons(report, "repeat_kv")
    torch.testing.assert_close(result, function(q, k[:, :1], v))


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


def checkpointed(mask_of, body=None):
    """Attention in a checkpointed body, under a mask that is made outside of it."""
    from torch.utils.checkpoint import checkpoint

    def inside(q, k, v, mask):
        if body is not None:
            mask = body(mask)
        return F.scaled_dot_product_attention(q.sin(), k, v, attn_mask=mask)

    def function(q, k, v, padding):
        mask = mask_of(padding)
        first = checkpoint(inside, q, k, v, mask, use_reentrant=False)
        return checkpoint(inside, first, k, v, mask, use_reentrant=False)

    return function


def causal_and_padding(padding):
    i = torch.arange(S)
    return (i[None, :] <= i[:, None])[None, None] & padding[:, None, None, :].bool()


@pytest.mark.parametrize("full", [True, False], ids=["ones", "padded"])
def test_a_mask_from_outside_of_a_checkpointed_body(full):
    function = checkpointed(causal_and_padding)
    padding = torch.ones(2, S, dtype=torch.int64)
    leaves = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
    if not full:
        padding[0, 7:] = 0
    with fx_fusion.recording() as report:
        result = torch.compile(function, backend=rewriting_backend(), dynamic=False)(*leaves[0], padding)
    assert report.count("causal_mask") >= 2, str(report)
    assert report.graphs[0].assumes == ("padding is all ones",)
    expected = function(*leaves[1], padding)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for out in (result, expected):
        out.square().sum().backward()
    for ours, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask_of", "body"),
    [
        (lambda padding: causal_and_padding(padding).logical_xor(padding[:, None, :, None] == 3), None),
        (lambda padding: (torch.arange(S)[None] <= torch.arange(S)[:, None])[None, None], lambda mask: mask.logical_xor(mask[..., :1])),
    ],
    ids=["data", "changed_inside"],
)  # fmt: skip
def test_what_is_not_proved_in_a_checkpointed_body(mask_of, body):
    function = checkpointed(mask_of, body)
    padding = torch.ones(2, S, dtype=torch.int64)
    with fx_fusion.recording() as report:
        result = torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False)(q, k, v, padding)
    assert report.count("causal_mask") == 0
    torch.testing.assert_close(result, function(q, k, v, padding), rtol=1e-5, atol=1e-5)


INTS = {
    "offset": (lambda n, q: torch.arange(6)[None, :] + n >= 0 * torch.arange(6)[:, None], (4, 6, -3, 0)),
    "diagonal": (lambda n, q: torch.ones(6, 6, dtype=torch.bool).tril(n + 5), (4, 6, -5)),
    "window": (lambda n, q: (torch.arange(6)[None] <= torch.arange(6)[:, None]) & (torch.arange(6)[None] + n >= 0), (4, 6, -2)),
    "product": (lambda n, q: torch.arange(6)[None, :] * n >= 0 * torch.arange(6)[:, None], (2, 3, -1)),
    "item": (lambda n, q: (torch.arange(6) + n.item() >= 1)[None].expand(6, 6), (torch.tensor(3), torch.tensor(0))),
    "slice": (lambda n, q: (torch.arange(12)[n:][:6] + n >= 6)[None].expand(6, 6), (6, 5, 1)),
}  # fmt: skip


@pytest.mark.parametrize("written_out", [False, True], ids=["called", "written_out"])
@pytest.mark.parametrize("name", INTS)
def test_an_int_that_may_be_zero_or_negative(name, written_out):
    """A Python int (symbolic from its second value on) or an ``.item()``: what is proved has to hold at every call."""
    mask_of, values = INTS[name]
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))

    def attention(q, k, v, n):
        if written_out:
            return torch.softmax((q @ k.mT / 2).masked_fill(~mask_of(n, q), float("-inf")), -1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(n, q))

    compiled = torch.compile(attention, backend=rewriting_backend())
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in values:
            torch.testing.assert_close(compiled(q, k, v, n), attention(q, k, v, n), equal_nan=True)


def test_sizes_are_still_positive():
    """The same proofs go through where the symbol is the size of a tensor."""
    compiled = torch.compile(attend(CAUSAL["less_than_next"]), backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for n in (5, 9):
            compiled(q[:, :, :n], k[:, :, :n], v[:, :, :n])
    report.assert_fused(causal_mask=1)
    assert len(report.graphs) == 1


STORED = {
    "truncated": lambda n: torch.full((n, n), 0.5, dtype=torch.long) > 0,
    "rounded to nothing": lambda n: torch.full((n, n), 1e-8, dtype=torch.float16) > 0,
    "another reading": lambda n: torch.ones(n, n, dtype=torch.int32).view(torch.float32) > 0.5,
}


@pytest.mark.parametrize("name", STORED)
def test_what_a_dtype_holds_counts(name):
    def attention(q):
        n = q.shape[2]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=STORED[name](n) | torch.ones(n, n, dtype=torch.bool).tril())

    found, _ = rewritten(attention, q)
    torch.testing.assert_close(found, attention(q))


def test_proofs_are_forgotten_with_their_graph():
    import gc

    from fx_fusion.graph.masks.prover import MaskProver

    for _ in range(3):
        torch._dynamo.reset()
        rewritten(attend(CAUSAL["tril"]), q, k, v)
    torch._dynamo.reset()
    gc.collect()
    assert sum(type(item) is MaskProver for item in gc.get_objects()) <= 2
