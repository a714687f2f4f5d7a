"""``explain()``: what it sees, and that it leaves no trace."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from tests.helpers import tiny_llama, tokens

x, w = torch.randn(4, 8), torch.randn(8, 8)


def test_explain_leaves_the_model_alone():
    model, ids = tiny_llama(), tokens()
    report = fx_fusion.explain(model, input_ids=ids, labels=ids, options={"select": "always"})
    report.assert_fused(swiglu=2)
    assert all(p.grad is None for p in model.parameters())


class Broken(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = torch.nn.RMSNorm(width), torch.nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        torch._dynamo.graph_break()
        return self.linear(y)


def test_explain_sees_every_model_of_a_sweep_and_leaves_no_trace():
    models = [Broken(8 * (i + 1)) for i in range(12)]
    for i, model in enumerate(models):
        report = fx_fusion.explain(model, torch.randn(2, 8 * (i + 1)), options={"select": "always"})
        assert (len(report.graphs), report.count("rms_norm")) == (2, 1)
    graphs = []

    def count(gm, inputs):
        graphs.append([n.meta["example_value"].shape for n in gm.graph.nodes if n.op == "placeholder"])
        return gm.forward

    compiled = torch.compile(models[0], backend=count)
    compiled(torch.randn(3, 8))
    assert len(graphs) == 2, "the user's own compilation comes after twelve others"
    assert all(isinstance(n, int) for shapes in graphs for shape in shapes for n in shape), "no size was seen to change"


@pytest.mark.slow
def test_explain_beside_a_model_that_is_compiled():
    model, graphs = Broken(8), []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=count)
    compiled(torch.randn(2, 8))
    for n in range(100):
        assert len(fx_fusion.explain(compiled if n % 2 else model, torch.randn(2 + n, 8)).graphs) == 2
    compiled(torch.randn(2, 8))
    compiled(torch.randn(5, 8))
    assert len(graphs) in (4, 6), "once, once more for another size, and at most once because its versions were dropped"


def test_a_symbolic_size_is_a_node_of_the_graph():
    """explain() runs the rewritten graph as it is: outside of and inside a checkpoint, with a vocabulary of any size."""
    from torch.utils.checkpoint import checkpoint

    def loss(z, y):
        return -F.log_softmax(z, -1).gather(-1, y.unsqueeze(-1)).mean()

    z, y = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    torch._dynamo.mark_dynamic(z, 2)
    for function in (loss, lambda z, y: checkpoint(loss, z, y, use_reentrant=False)):
        fx_fusion.explain(function, z, y, options={"select": "always", "strict": True}).assert_fused(cross_entropy=1)
