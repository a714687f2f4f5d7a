"""Test what is proved of masks: their structure, across bodies, sizes, ints and dtypes."""

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
    "positions_repeated_for_each_row": (  # Whisper's decoder
        lambda n, m: torch.arange(m).unsqueeze(0).repeat(2, 1)[:, None, None] <= torch.arange(n).repeat(2, 3, 1)[..., None] + 1,
        "-1 <= q - k",
    ),
    "tril_diagonal": (lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(2), "-2 <= q - k"),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured(name):
    mask_of, structure = STRUCTURED[name]
    function = attend(mask_of)
    result, report = rewritten(function, q, k, v)
    report.assert_fused(causal_mask=0, block_sparse_attention=0)
    assert structure in reasons(report, "block_sparse_attention")
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)


def test_a_dim_that_is_repeated_is_no_longer_an_index():
    """Twice the positions of half of the keys: nothing is proved."""
    function = attend(lambda n, m: torch.arange(m // 2).repeat(2)[None] <= torch.arange(n)[:, None])
    q, k, v = (torch.randn(2, 3, 12, 8) for _ in range(3))
    result, report = rewritten(function, q, k, v)
    report.assert_fused(causal_mask=0, block_sparse_attention=0)
    assert "repeats a dim of more than 1" in str(report)
    torch.testing.assert_close(result, function(q, k, v))


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
    assert report.count("causal_mask") == (2 if full else 0), str(report)
    assert (report.graphs[0].assumes if full else report.graphs[0].unassumed) == ("padding is all ones",)
    expected = function(*leaves[1], padding)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for out in (result, expected):
        out.square().sum().backward()
    for ours, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_checkpointed_body_is_read_under_the_autocast_around_it():
    """RoPE by a table in float32 leaves queries and keys that autocast casts, values that came from a linear are bfloat16."""
    from torch.utils.checkpoint import checkpoint

    def body(x, w, mask):
        value = (x.transpose(1, 2).flatten(2) @ w).view(2, S, *x.shape[1::2]).transpose(1, 2)
        return F.scaled_dot_product_attention(x.sin(), x.cos(), value, attn_mask=mask)

    def function(x, w, padding):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(body, x, w, causal_and_padding(padding), use_reentrant=False)

    width = q.shape[1] * q.shape[3]
    w, padding = torch.randn(width, width), torch.ones(2, S, dtype=torch.int64)
    with fx_fusion.recording() as report:
        result = torch.compile(function, backend=rewriting_backend(), dynamic=False)(q, w, padding)
    assert report.count("causal_mask") == 1, str(report)
    assert report.graphs[0].assumes == ("padding is all ones",)
    torch.testing.assert_close(result, function(q, w, padding), rtol=2e-2, atol=2e-2)


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
    with torch._dynamo.config.patch(capture_scalar_outputs=True), fx_fusion.recording() as report:
        for n in values:
            torch.testing.assert_close(compiled(q, k, v, n), attention(q, k, v, n), equal_nan=True)
    # The first graph is of a constant, or (an ``.item()``) of a symbol that nothing is known of.
    assert report.count("attention" if written_out else "causal_mask") == (name != "item"), str(report)


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

    found, report = rewritten(attention, q)
    report.assert_fused(causal_mask=int(name != "another reading"))
    torch.testing.assert_close(found, attention(q))


def earlier(n):
    return in_order(torch.arange(n))


def in_order(positions):
    return positions[None] <= positions[:, None]


def in_chunks(n):
    return (torch.arange(n)[None] // 4) == (torch.arange(n)[:, None] // 4)


def hiding(shown, dtype):
    return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, float("-inf"))


BY_ARITHMETIC = {  # and what it is
    "one minus": (lambda n, dtype: (1.0 - earlier(n).to(dtype)) * torch.finfo(dtype).min, "causal"),
    "inverted and filled": (
        lambda n, dtype: (1.0 - earlier(n).to(dtype)).masked_fill((1.0 - earlier(n).to(dtype)).bool(), torch.finfo(dtype).min),
        "causal",
    ),
    "minus one": (lambda n, dtype: (earlier(n).to(dtype) - 1) * torch.finfo(dtype).max, "causal"),
    "negated": (lambda n, dtype: -(torch.finfo(dtype).max * (1 - earlier(n).to(dtype))), "causal"),
    "a sum": (lambda n, dtype: hiding(earlier(n), dtype) + hiding(in_chunks(n), dtype), "chunks of 4"),
    "of both": (lambda n, dtype: (~(earlier(n) & in_chunks(n))).to(dtype) * torch.finfo(dtype).min, "chunks of 4"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BY_ARITHMETIC)
def test_masks_that_are_calculated(name, dtype):
    mask_of, what = BY_ARITHMETIC[name]

    def attention(q):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask_of(q.shape[2], q.dtype))

    given = q.to(dtype)
    found, report = rewritten(attention, given)
    report.assert_fused(causal_mask=int(what == "causal"))
    assert what == "causal" or what in reasons(report, "block_sparse_attention")
    torch.testing.assert_close(found, attention(given), rtol=2e-2, atol=2e-2)


LOW = torch.finfo(torch.float32).min
N = 300  # more than bfloat16 and uint8 count


def at(start, dtype):
    """Return positions from ``start`` on, made in two steps."""
    return torch.arange(N, dtype=dtype) + start


NOT_HELD = {  # Masks that hide other scores than whole numbers and reals would.
    "indices that are added to bfloat16": lambda: in_order(torch.arange(N) + torch.zeros(N, dtype=torch.bfloat16)),
    "indices in a where of bfloat16": lambda: in_order(
        torch.where(torch.arange(N) >= 0, torch.arange(N), torch.zeros(N, dtype=torch.bfloat16))
    ),
    "indices compared to bfloat16": lambda: torch.arange(N)[None] < torch.full((N, 1), N - 1, dtype=torch.bfloat16),
    "int32 that wraps around": lambda: (torch.arange(N, dtype=torch.int32) * 2**30)[None].expand(N, N) >= 0,
    "unsigned": lambda: (torch.full((N, N), -1).to(torch.uint8) < 0) | torch.ones(N, N, dtype=torch.bool).tril(),
    "2049 in float16": lambda: (torch.full((N, N), 2048.0, dtype=torch.half) + 1) > 2048,
    "a mask of many parts": lambda: _many_parts(N),
    "times in float32": lambda: in_order(1.7e9 + torch.arange(N, dtype=torch.float32)),
    "float32 from 2^24 on": lambda: in_order(torch.arange(2**24, 2**24 + N, dtype=torch.float32)),
    "integers cast to float32": lambda: in_order((torch.arange(N) + 2**25).float()),
    "integers compared in float32": lambda: (torch.arange(N) + 2**25)[None] <= (torch.arange(N) + 2**25)[:, None].float(),
    "float64 from 2^53 on": lambda: in_order(at(2.0**53, torch.float64)),
    "a sum that rounds, taken back": lambda: in_order(at(1e9, torch.float32) - 1e9),
    "a fraction, taken back": lambda: (at(10.3, torch.float32) - 10.3)[None] <= torch.arange(N)[:, None],
    "a scale, taken back": lambda: in_order(torch.arange(N) * 0.1 * 10.0),
    "a whole number that float32 rounds": lambda: (torch.full((N, N), 2.0**24) - (2.0**24 + 1)) < 0,
    "a part of a long table of float32": lambda: (
        torch.arange(2**24 + N, dtype=torch.float32) < torch.arange(1, 2**24 + N + 1)
    )[2**24 :].expand(N, N),
    "a part of a long table of int32": lambda: (torch.arange(2**25, dtype=torch.int32) * 100 >= 0)[-N:].expand(N, N),
    "a mask of hundreds of comparisons": lambda: _many_comparisons(N),
    "fractions in integers": lambda: in_order((torch.arange(N) * 0.5).long()),
    "int64 that wraps around": lambda: in_order(at(2**63 - 5, torch.int64)),
    "products in int64": lambda: (torch.arange(N) * 2**62)[None].expand(N, N) >= 0,
    "products in int32": lambda: torch.arange(N).int()[:, None] * torch.arange(N).int() * 10**6 >= 0,
    "squares in int32": lambda: torch.arange(N).int()[:, None] ** 1 * torch.arange(N).int() * 10**5 >= 0,
    "a running sum in int32": lambda: torch.full((N, N), 2**30).int().cumsum(0, dtype=torch.int32) >= 0,
    "a window in float32": lambda: in_window(1.7e9 + torch.arange(N, dtype=torch.float32)),
    "chunks in float32": lambda: in_order(torch.arange(N)) & same(at(2.0**24, torch.float32) // 4),
    "documents in int32": lambda: in_order(torch.arange(N)) & same(torch.arange(N).int() * 2**30 // 2**31),
    "a number that bfloat16 rounds": lambda: torch.ones(N, N, dtype=torch.bfloat16).tril() > 0.999,
    "a number that float16 rounds": lambda: earlier(N) | (torch.ones(N, N, dtype=torch.half) != 1.0001),
    "a sum with a number that bfloat16 rounds": lambda: earlier(N) | (torch.full((N, N), 256.0, dtype=torch.bfloat16) - 256.5 != 0),
    "a number that overflows float16": lambda: (later_is_hidden().half() + 70000.0) <= float("inf"),
    "a tensor without dims that float16 rounds": lambda: earlier(N) | (torch.full((N, N), 6e4, dtype=torch.half) * torch.tensor(1e-8) == 0),
    "chunks in int8": lambda: in_order(torch.arange(N)) & same((torch.arange(N) % 100).to(torch.int8) // 100),
    "chunks beside a float": lambda: in_order(torch.arange(N)) & same((torch.arange(N) + 2**25) // 4.0 - 2**23),
    "float8": lambda: later_is_hidden().to(torch.float8_e5m2).float(),
    "a running sum of one number": lambda: earlier(N) & (torch.tensor(1).cumsum(0) > 0),
    "-inf times 0": lambda: later_is_hidden() * 0,
    "-inf times 0, the other way": lambda: 0.0 * later_is_hidden(),
    "-inf minus -inf": lambda: later_is_hidden() - later_is_hidden(),
    "-inf minus itself": lambda: (lambda m: m - m)(later_is_hidden()),
    "-inf plus inf": lambda: later_is_hidden() + float("inf"),
    "-inf times an index": lambda: later_is_hidden() * torch.arange(N),
    "-inf times a boolean": lambda: torch.full((N, N), float("-inf")) * (torch.arange(N) > torch.arange(N)[:, None]),
    "differences of -inf": lambda: torch.full((N, N + 1), float("-inf")).diff(dim=-1),
    "a running sum of -inf times 0": lambda: (later_is_hidden() * 0).cumsum(0),
}


# One number for each key or document: the tensor itself is read, whatever it holds.
READ_WHEN_IT_RUNS = {
    "int32 that wraps around": "keys shown by mul",
    "products in int64": "keys shown by mul",
    "documents in int32": "documents of floordiv",
    "a part of a long table of int32": "keys shown by getitem",
}


def later_is_hidden(n=N):
    return torch.full((n, n), float("-inf")).triu(1)


def same(number):
    return number[None] == number[:, None]


def in_window(time):
    return in_order(time) & (time[None] > time[:, None] - 16)


def _many_comparisons(n):
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]
    mask = k <= q
    for i in range(57):
        mask = mask | ((k + i if i >= 3 else k) == q * 3 - i)
    return mask


def _many_parts(n):
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]
    mask = k <= q
    for i in range(14):
        a = k % (i + 2) == 0
        mask = (mask & a) | (~mask & (q > i))
    return mask | (k <= q)


@pytest.mark.parametrize("name", NOT_HELD)
def test_mask_beyond_its_dtype_is_not_proved(name):
    def attention(q):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=NOT_HELD[name]())

    wide = torch.randn(1, 1, N, 8, generator=torch.Generator().manual_seed(0))
    found, report = rewritten(attention, wide)
    report.assert_fused(causal_mask=0, block_sparse_attention=0)
    assert READ_WHEN_IT_RUNS.get(name, "the mask is not proved") in str(report)
    torch.testing.assert_close(found, attention(wide), equal_nan=True)


HELD = {  # The same arithmetic within the range of its dtype.
    "bfloat16 up to 256": (lambda n: in_order(torch.arange(n, dtype=torch.bfloat16) + 200), "causal"),
    "uint8 up to 255": (lambda n: in_order(torch.arange(n, dtype=torch.uint8) + 200), "causal"),
    "whole floats": (lambda n: in_order(torch.arange(n) * 1.0 + 3.0), "causal"),
    "float32 below 2^24": (lambda n: in_order(torch.arange(2**24 - n, 2**24, dtype=torch.float32)), "causal"),
    "nanoseconds in int64": (lambda n: in_order(torch.arange(n) + 1_700_000_000_000_000_000), "causal"),
    "-inf times 2": (lambda n: later_is_hidden(n) * 2.0, "causal"),
    "-inf added twice": (lambda n: later_is_hidden(n) + later_is_hidden(n), "causal"),
    "a window in float32": (lambda n: (lambda t: in_order(t) & (t[None] > t[:, None] - 4))(torch.arange(n).float()), "window of 4"),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", HELD)
def test_mask_within_its_dtype_is_proved(name, dynamic):
    mask_of, what = HELD[name]

    def attention(q):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask_of(q.shape[2]))

    found, report = rewritten(attention, q, dynamic=dynamic)
    of_this_length = dynamic and (" up to " in name or " below " in name)  # Longer ones would not be held.
    report.assert_fused(causal_mask=int(what == "causal" and not of_this_length))
    assert what == "causal" or what in reasons(report, "block_sparse_attention")
    torch.testing.assert_close(found, attention(q), rtol=1e-5, atol=1e-5)


def test_int_of_the_caller_is_no_size():
    """A start that changes from call to call may be a time: float32 positions from there on are not proved causal."""

    def attention(q, start):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=in_order(torch.arange(S, dtype=torch.float32) + start))

    compiled = torch.compile(attention, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for start in (3, 1_700_000_000):
            torch.testing.assert_close(compiled(q, start), attention(q, start))
    assert report.count("causal_mask") == 0, str(report)


def test_int_of_the_caller_in_a_size_is_no_size():
    """A number of any size in ``n % 8`` or ``min(n, 8)``, which are sizes."""

    def attention(q, n):
        positions = (torch.arange(n % 8 + 3) + n).float()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=in_order(positions))

    compiled = torch.compile(attention, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for n in (16, 2**24 + 8):
            of = q[:, :, : n % 8 + 3]
            torch.testing.assert_close(compiled(of, n), attention(of, n))
    assert report.count("causal_mask") == 0, str(report)


def test_an_integer_is_rounded_once():
    """float32 rounds this one up; by way of float64 it would be rounded down."""

    def attention(q):
        mask = earlier(S) | (torch.full((S, S), 2**60 + 2**36 + 1).float() != 2.0**60)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    found, report = rewritten(attention, q)
    report.assert_fused(causal_mask=1)
    torch.testing.assert_close(found, attention(q))


def test_element_of_a_tensor_that_is_rounded():
    def attention(q, x):
        positions = torch.tensor(x[0], dtype=torch.float32) + torch.arange(S)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=in_order(positions))

    x = torch.arange(S) + 2**25
    found, report = rewritten(attention, q, x)
    report.assert_fused(causal_mask=0)
    torch.testing.assert_close(found, attention(q, x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_documents_are_found_by_differences_of_positions(dtype):

    def documents(q, ids):
        starts = ids.diff(prepend=ids[:, :1] - 1) != 1
        document = starts.cumsum(-1)
        mask = (document[:, :, None] == document[:, None, :]) & in_order(torch.arange(S))
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None])

    ids = torch.arange(S, dtype=dtype).expand(2, S).clone()
    ids[:, 5:] -= 5
    found, report = rewritten(documents, q, ids)
    assert "documents of" in reasons(report, "block_sparse_attention")
    torch.testing.assert_close(found, documents(q, ids), rtol=1e-5, atol=1e-5)


OF_A_MASK = {  # a function of a mask that comes in, and what fires under it
    "unlike the lowest number": (lambda m: m != LOW, 0),
    "no infinity": (lambda m: m > float("-inf"), 0),
    "no infinity, of all": (lambda m: ~(m == float("-inf")), 0),
    "scaled away": (lambda m: m * 1e-38, 0),
    "a number that it swallows": (lambda m: m + 1e30 != LOW, 0),
    "added to itself": (lambda m: m + m, 1),
    "from itself": (lambda m: m - m, 0),
    "above half of the lowest": (lambda m: m >= LOW / 2, 1),
    "zeros": (lambda m: m == 0, 1),
    "as a boolean": (lambda m: ~m.bool(), 1),
    "added": (lambda m: m + torch.zeros(S, S), 1),
    "narrower and wider": (lambda m: m.to(torch.bfloat16).float(), 0),  # the lowest bfloat16 is not the lowest float32
    "lowest of float16 in bfloat16": (lambda m: m.half().bfloat16() != -65536.0, 0),
    "narrower and zeros": (lambda m: m.half() == 0, 1),
    "narrower, unlike the lowest number": (lambda m: m.half() != torch.finfo(torch.half).min, 0),
    "a whole number": (lambda m: m.long() == 0, 0),
    "as it is": (lambda m: m, 1),
}


@pytest.mark.parametrize("hides_by", [LOW, float("-inf")], ids=["lowest", "inf"])
@pytest.mark.parametrize("name", OF_A_MASK)
def test_what_hides_in_a_mask_that_comes_in_is_not_known(name, hides_by):
    """It is -inf, or the lowest number of its dtype: both pass the check when the model runs."""
    of_mask, fires = OF_A_MASK[name]

    def attention(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=of_mask(mask))

    mask = torch.full((1, 1, S, S), hides_by).triu(1)
    found, report = rewritten(attention, q, k, v, mask)
    torch.testing.assert_close(found, attention(q, k, v, mask), rtol=1e-5, atol=1e-5, equal_nan=True)
    report.assert_fused(causal_mask=fires)


def test_proofs_are_forgotten_with_their_graph():
    import gc

    from fx_fusion.graph.masks.prover import MaskProver

    for _ in range(3):
        torch._dynamo.reset()
        rewritten(attend(lambda n, m: torch.ones(n, m, dtype=torch.bool).tril()), q, k, v)
    torch._dynamo.reset()
    gc.collect()
    assert sum(type(item) is MaskProver for item in gc.get_objects()) <= 2
