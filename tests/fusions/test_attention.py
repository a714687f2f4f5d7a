"""Attention written out: the spellings that become scaled_dot_product_attention, and those that must not."""

import math

import pytest
import torch

import fx_fusion
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import check_rewritten, reasons, rewritten, statuses

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


def in_float32(query, key, value):
    """The first product of what was widened for it, as models with large scores do."""
    scores = torch.matmul(query.float(), key.float().transpose(2, 3)) * 0.3
    return torch.softmax(scores.masked_fill(hidden(), float("-inf")), -1).to(value.dtype) @ value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_of_widened_queries_and_keys(dtype):
    inputs = dict(zip(("query", "key", "value"), tensors(dtype), strict=True))
    with fx_fusion.recording() as report:
        fused = run(torch.compile(in_float32, backend=rewriting_backend(), dynamic=False), inputs)
    report.assert_fused(attention=1)
    assert "float()" not in report.graphs[0].after
    name, used = worst_excess(fused, run(in_float32, inputs), run_oracle(in_float32, inputs), dtype)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


def written_after_it_was_widened(query, key, value):
    query = query * 1
    wide = query.float()
    query.mul_(2)
    return torch.softmax(wide @ key.float().mT, -1).to(value.dtype) @ value + query


def one_of_them_in_float32(query, key, value):
    return torch.softmax(query.float() @ (key.float() + 1e-6).mT, -1).to(value.dtype) @ value


def at_a_temperature(query, key, value):
    """The queries times it in 16 bits would be rounded once more than these scores."""
    scores = query.float() @ key.float().mT * torch.full((), 83.3).exp().log()
    return torch.softmax(scores, -1).to(value.dtype) @ value


@pytest.mark.parametrize("function", [written_after_it_was_widened, one_of_them_in_float32, at_a_temperature])
def test_what_was_not_only_widened(function):
    qkv = tensors(torch.bfloat16)
    ours, report = rewritten(function, *qkv)
    assert report.count("attention") == 0
    assert "takes one dtype" in reasons(report, "attention")
    close(ours, function(*qkv), qkv, torch.bfloat16)


def test_keys_transposed_without_a_gradient():
    def attention(q, k, v):
        with torch.no_grad():
            turned = k.transpose(-1, -2)
        return torch.softmax(q @ turned * 0.3, -1) @ v

    qkv = tensors()
    found, report = rewritten(attention, *qkv)
    assert report.count("attention") == 1
    for result in (found, attention(*qkv)):
        grads = torch.autograd.grad(result.sum(), qkv, allow_unused=True)
        assert [g is None for g in grads] == [False, True, False]
    torch.testing.assert_close(found, attention(*qkv), rtol=1e-4, atol=1e-5)


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


def test_numbers_of_float16_are_not_hidden_by_its_lowest_behind_a_scale():
    q, k, v = (torch.randn(B, H, S, 64).half() for _ in range(3))
    low = torch.finfo(torch.float16).min

    def attention(scale):
        mask = lambda: torch.zeros(S, S, dtype=torch.float16).masked_fill(hidden(), low)  # noqa: E731
        return lambda q, k, v: torch.softmax((q @ k.mT + mask()) / scale, -1) @ v

    for scale, fused in ((1e4, 0), (8.0, 1)):
        ours, report = rewritten(attention(scale), q, k, v)
        assert report.count("attention") == fused, str(report)
        torch.testing.assert_close(ours, attention(scale)(q, k, v), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_is_no_fused_attention(name):
    qkv = tensors()
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    mask[0, :, 2] = True  # a row that is hidden entirely
    added = torch.zeros(B, 1, S, S).masked_fill(mask, LOW)
    ours, report = rewritten(NOT_ATTENTION[name], *qkv, mask, added)
    ran = report.graphs[-1].index  # a mask from outside is taken for causal first, and is not
    assert not [s for s in report.sites if s.graph == ran and (s.fusion, s.status) == ("attention", "fused")], str(report)
    torch.testing.assert_close(ours, NOT_ATTENTION[name](*qkv, mask, added), equal_nan=True)


def test_a_bias_that_is_written_to_in_between():
    qkv, bias = tensors(), torch.zeros(S, S, requires_grad=True)

    def attention(q, k, v, bias):
        learned = bias * 1
        scores = scores_of(q, k) + learned
        learned.add_(torch.arange(S))
        return soft(scores, v)

    check_rewritten(attention, *qkv, bias, rtol=1e-4, atol=1e-5, attention=0)


def test_a_near_miss_names_the_mask():
    qkv = tensors()
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    _, report = rewritten(lambda q, k, v, m: soft(scores_of(q, k).masked_fill(m, LOW), v), *qkv, mask)
    assert "depends on the input m" in reasons(report, "attention")
