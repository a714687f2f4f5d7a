"""Dims and counts that are arguments: Dynamo makes them symbols from the second value on."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend

CALLS = {
    "flatten": lambda x, d: x.flatten(d),
    "flatten up to": lambda x, d: x.flatten(0, d),
    "mean": lambda x, d: x.mean(d),
    "mean of several": lambda x, d: x.mean((d, -1)),
    "sum": lambda x, d: x.sum(d, keepdim=True),
    "transpose": lambda x, d: x.transpose(d, 0),
    "var": lambda x, d: x.var(d),
    "var_mean": lambda x, d: torch.var_mean(x, d)[0],
    "norm": lambda x, d: x.norm(2, d),
    "vector_norm": lambda x, d: torch.linalg.vector_norm(x, dim=d),
    "softmax": lambda x, d: x.softmax(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "chunk": lambda x, d: x.chunk(2, d)[0],
    "chunks": lambda x, d: x.chunk(d + 1, 3)[0],
    "split": lambda x, d: x.split(d, 3)[0],
    "split along": lambda x, d: x.split(1, d)[0],
    "unbind": lambda x, d: x.unbind(d)[0],
    "cat": lambda x, d: torch.cat([x, x], d),
    "unsqueeze": lambda x, d: x.unsqueeze(d),
    "squeeze": lambda x, d: x.squeeze(d),
    "narrow": lambda x, d: x.narrow(d, 0, d),
    "roll": lambda x, d: x.roll(1, d),
    "permute": lambda x, d: x.permute(d, 0, 2, 3) if d == 1 else x.permute(0, 1, d, 3),
    "select": lambda x, d: x.select(d, 0),
    "cumsum": lambda x, d: x.cumsum(d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "amax": lambda x, d: x.amax(d),
    "gather": lambda x, d: x.gather(d, torch.zeros(1, 1, 1, 1, dtype=torch.long)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_rest_of_the_graph_is_rewritten(name):
    def function(x, weight, d):
        return F.rms_norm(x, (8,), weight, 1e-6), CALLS[name](x, d)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=rewriting_backend())
    x, weight = torch.randn(2, 4, 6, 8), torch.rand(8)
    with fx_fusion.recording() as report:
        for d in (1, 2):
            torch.testing.assert_close(compiled(x, weight, d), function(x, weight, d))
    assert len(report.graphs) == 2
    assert not any(graph.fallback for graph in report.graphs)
    report.assert_fused(rms_norm=2)
