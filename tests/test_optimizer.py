"""``torch.compile(optimizer.step, backend="fx_fusion")``: Inductor's step, which is at the copy rate already."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend


def train(backend, foreach, tensor_lr):
    """Parameters after five steps with five learning rates, and how often the step was compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    lr = torch.tensor(1e-2) if tensor_lr else 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, foreach=foreach)
    counter = CompileCounterWithBackend(backend or "eager")
    step = torch.compile(optimizer.step, backend=counter) if backend else optimizer.step
    x = torch.randn(8, 16)
    for i in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        for group in optimizer.param_groups:
            if tensor_lr:
                group["lr"].fill_(1e-2 / (i + 1))
            else:
                group["lr"] = 1e-2 / (i + 1)
        step()
    return [p.detach() for p in model.parameters()], counter.frame_count


@pytest.mark.parametrize(("foreach", "tensor_lr"), [(True, False), (False, True)])
def test_adamw_is_the_same_and_compiles_no_more_often_than_inductors(foreach, tensor_lr):
    exact, _ = train(None, foreach, tensor_lr)
    ours, compiled = train("fx_fusion", foreach, tensor_lr)
    theirs, expected = train("inductor", foreach, tensor_lr)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
    assert compiled == expected
