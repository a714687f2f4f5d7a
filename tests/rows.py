"""Share what tests of losses in chunks of rows need: operands, a few losses, and the comparison with eager."""

import pytest
import torch
from torch import nn

from fx_fusion.kernels.logits import logit_chunks

B, T, H, V = 3, 8, 16, 4100


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 8 rows, so that 24 rows take three."""
    monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", dict.fromkeys(("cpu", "cuda"), (8 * V * 4, 8 * V * 4)))
    monkeypatch.setattr(logit_chunks, "_ROW_MULTIPLE", 8)


def log_p(z):
    return z.float().log_softmax(-1)


def of_labels(z, y):
    return log_p(z).gather(-1, y[..., None]).squeeze(-1)


def rows_kl(z, t):
    p, q = z.log_softmax(-1), t.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def operands(dtype, rows=B):
    torch.manual_seed(0)
    head = nn.Linear(H, V).to(dtype)
    x = torch.randn(rows, T, H, dtype=dtype, requires_grad=True)
    return head, x, torch.randn(rows, T, V, dtype=dtype), torch.randint(0, V, (rows, T))


def results_of(call, head, x, t, y, factor=3.0):
    """Values and gradients, for an upstream gradient of ``factor``."""
    head.zero_grad()
    found = call(head, x, t, y)
    found = found if isinstance(found, tuple) else (found,)
    sum(out.double().sum() * factor for out in found if out.requires_grad).backward()
    gradients = [x.grad, head.weight.grad, head.bias.grad, *([t.grad] if t.requires_grad else [])]
    x.grad = t.grad = None
    return [out.detach() for out in found] + [g.clone() for g in gradients]


def of(loss):
    return lambda head, x, t, y: loss(head(x), t, y)
