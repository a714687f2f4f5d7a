"""Biases that are no parameter's, and finite everywhere: they hide nothing, and are handed to the fused kernel."""

import math

import pytest
import torch

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
