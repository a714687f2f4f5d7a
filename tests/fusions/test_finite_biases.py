"""Biases that are no parameter's, and finite everywhere: they hide nothing, and are handed to the fused kernel."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import reasons, rewritten

B, H, S, D = 2, 4, 6, 8
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(B, H, S, D, generator=generator) for _ in range(3))


def slopes():
    return torch.pow(torch.full((), 2.0 ** (-8 / H)), torch.arange(1, 1 + H, dtype=torch.int32))


def attend(q, k, v, bias, causal=False):
    scores = q @ k.mT / math.sqrt(D) + bias
    if causal:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    return torch.softmax(scores, -1) @ v


def alibi(keys):
    return slopes()[:, None, None] * keys


FIRES = {
    "alibi by keys": lambda q, k, v, mask: attend(q, k, v, alibi(torch.arange(S)[None, None])),
    "causal": lambda q, k, v, mask: attend(q, k, v, alibi(torch.arange(1 - S, 1)[None, None]), causal=True),
    "symmetric": lambda q, k, v, mask: attend(q, k, v, -alibi((torch.arange(S)[None] - torch.arange(S)[:, None]).abs())),
    "positions that a mask counts": lambda q, k, v, mask: attend(
        q, k, v, slopes()[None, :, None, None] * ((mask.bool().cumsum(-1) - 1) * mask.bool())[:, None, None]
    ),
    "ten thousand off": lambda q, k, v, mask: attend(q, k, v, (1.0 - mask.bool()[:, None, None].float()) * -10000.0),
    "a bias for nearness and one for heads": lambda q, k, v, mask: attend(
        q, k, v, alibi(torch.arange(S)[None, None]) + torch.where(mask[:, None, None] > 0, 0.0, -50.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("hidden", [0, 2, S])
@pytest.mark.parametrize("name", FIRES)
def test_fused_as_in_eager(name, hidden):
    """Also where a row is as good as hidden."""
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[0, S - hidden :] = 0
    made = []
    for run, dtype in ((rewritten, torch.float32), (plain, torch.float32), (plain, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        y, report = run(FIRES[name], *leaves, mask)
        made.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
        if report is not None:
            report.assert_fused(attention=1)
    for ours, eagers, exact in zip(*made, strict=True):
        errors = [(value.double() - exact).abs().max() for value in (ours, eagers)]
        assert errors[0] <= 2 * errors[1] + 1e-6


def plain(function, *given):
    return function(*given), None


NOT = {
    "integers of the user's": lambda q, k, v, mask: attend(q, k, v, (1.0 - mask[:, None, None].float()) * -10000.0),
    "a billion off": lambda q, k, v, mask: attend(q, k, v, (1.0 - mask.bool()[:, None, None].float()) * -1e9),
    "a billion off, causal": lambda q, k, v, mask: attend(
        q, k, v, torch.where(mask.bool()[:, None, None], 0.0, -1e9), causal=True
    ),
    "one that is returned": lambda q, k, v, mask: (lambda bias: (attend(q, k, v, bias), bias))(
        alibi(torch.arange(S)[None, None])
    ),
    "a float mask of the user's": lambda q, k, v, mask: attend(q, k, v, mask.float().log()[:, None, None]),
    "minus infinity": lambda q, k, v, mask: attend(
        q, k, v, torch.zeros(B, 1, 1, S).masked_fill(mask[:, None, None] == 0, float("-inf"))
    ),
    "the lowest number": lambda q, k, v, mask: attend(q, k, v, (1.0 - mask[:, None, None].float()) * torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("name", NOT)
def test_what_may_hide_a_row(name):
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[0] = 0
    result, report = rewritten(NOT[name], q, k, v, mask)
    assert report.count("attention") == 0
    assert "the mask is not proved" in reasons(report, "attention")
    torch.testing.assert_close(result, NOT[name](q, k, v, mask), equal_nan=True)


LOWEST = torch.finfo(torch.float32).min
BESIDE_A_CAUSAL_MASK = {  # a learned bias, and what hides keys by a number
    "added": lambda bias, shown: bias + torch.where(shown[:, None, None], 0.0, LOWEST),
    "filled": lambda bias, shown: bias.expand(B, H, S, S).masked_fill(~shown[:, None, None], LOWEST),
    "negated twice": lambda bias, shown: -1.0 * (bias + torch.where(shown[:, None, None], 0.0, -LOWEST)),
    "added, causal, and negated": lambda bias, shown: -1.0 * (
        bias + torch.zeros(S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), LOWEST)
    ),
    "chosen": lambda bias, shown: torch.where(shown[:, None, None], bias, LOWEST),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE_A_CAUSAL_MASK)
def test_learned_biases_that_hide_rows(name):
    """Left padding: what a row that sees nothing is in eager depends on the number that hides."""
    shown = torch.ones(B, S, dtype=torch.bool)
    shown[0, :3] = False
    bias = torch.randn(1, H, S, S, generator=generator, requires_grad=True)

    def attention(q, k, v, bias, shown):
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(D) + BESIDE_A_CAUSAL_MASK[name](bias, shown)).masked_fill(hidden, LOWEST)
        return torch.softmax(scores, -1) @ v

    result, report = rewritten(attention, q, k, v, bias, shown)
    assert report.count("attention") == 0
    assert re.search("may hide a row entirely|calculates with a mask", reasons(report, "attention"))
    torch.testing.assert_close(result, attention(q, k, v, bias, shown))


LEARNED = {
    "a parameter": lambda b, w: b,
    "twice a parameter": lambda b, w: b * 2.0,
    "a table": lambda b, w: F.embedding(torch.arange(S * S).view(S, S), w).permute(2, 0, 1)[None],
    "tables behind each other": lambda b, w: F.interpolate(torch.cat([b[:, :2], b[:, 2:]], 1), (S, S), mode="bilinear"),
    "a bias of pairs": lambda b, w: F.linear(b, w[:S, :S]) + torch.zeros(S, S).masked_fill(
        torch.ones(S, S, dtype=torch.bool).triu(1), LOWEST
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNED)
def test_learned_biases_that_hide_no_row(name):
    bias = torch.randn(1, H, S, S, generator=generator, requires_grad=True)
    table = torch.randn(S * S, H, generator=generator) if name == "a table" else torch.randn(S, S, generator=generator)
    table.requires_grad_()

    def attention(q, k, v, bias, table):
        return attend(q, k, v, LEARNED[name](bias, table), causal=True)

    result, report = rewritten(attention, q, k, v, bias, table)
    report.assert_fused(attention=1)
    torch.testing.assert_close(result, attention(q, k, v, bias, table), rtol=1e-5, atol=1e-5)


def test_scores_that_are_integers():
    """The graph is rewritten all the same."""
    def function(x, q, k, v):
        scores = (q @ k.mT).clamp(min=0)
        return torch.softmax(scores, -1, dtype=torch.float32) @ v, F.silu(x) * x.sin()

    whole = [(10 * t).long() for t in (q, k)]
    result, report = rewritten(function, torch.randn(4, 8), *whole, v)
    report.assert_fused(attention=0, swiglu=1)
    assert "torch.int64" in reasons(report, "attention")
    torch.testing.assert_close(result, function(torch.randn(4, 8), *whole, v)[:1] + result[1:])


def test_what_a_product_does_not_add_has_a_gradient():
    """Of zeros, in eager."""
    def attention(q, k, v, b):
        return torch.baddbmm(b, q[0], k[0].mT, beta=0).softmax(-1) @ v[0]

    bias = torch.randn(H, S, S, requires_grad=True)
    result, report = rewritten(attention, q, k, v, bias)
    assert torch.autograd.grad(result.sum(), bias)[0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bloom(dtype):
    """Keys whose scores are added to ALiBi by baddbmm, batch and heads in one dim, beside transformers' own masks."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4)).to(dtype)
    ids = torch.randint(0, 99, (2, 12))
    batch = {"input_ids": ids, "labels": ids}
    found, report = rewritten(lambda **given: model(**given).logits, **batch)
    assert report.count("attention") == 2, str(report)
    found = found.clone()  # deferred: it is computed from weights that change below
    usual, exact = model(**batch).logits, model.double()(**batch).logits
    errors = [(logits.double() - exact).abs().max() for logits in (found, usual)]
    assert errors[0] <= 2 * errors[1] + 1e-6, errors
