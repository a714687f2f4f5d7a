"""Python floats that change between calls: right at every value, whatever takes them."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.backend import compile_graph
from fx_fusion.options import parse
from fx_fusion.testing import rewriting_backend
from tests.helpers import slow_but

VALUES = (0.5, 0.25, 0.7, 0.9)
X, Y = torch.rand(4, 6) + 0.1, torch.rand(4, 6) + 0.2


TAKEN = {
    "clamp": lambda s: X.clamp(max=s), "pow": lambda s: X**s, "of pow": lambda s: s**X, "lerp": lambda s: torch.lerp(X, Y, s),
    "remainder": lambda s: X % s, "full": lambda s: torch.full_like(X, s), "alpha": lambda s: torch.add(X, Y, alpha=s),
    "fill": lambda s: X.masked_fill(X > 0.5, s), "foreach": lambda s: torch._foreach_add([X], s)[0],
    "int": lambda s: X * int(s * 10), "leaky": lambda s: F.leaky_relu(X - 0.5, s), "returned": lambda s: s,
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(("clamp", "pow", "foreach", "int", "returned"), TAKEN))
def test_a_float_that_is_a_tensor_here_and_a_constant_there(name):
    """Through Inductor alone what ``TAKEN`` makes stays that of the second value: a hit in the compile cache, torch 2.13."""
    torch._dynamo.reset()

    def function(s):
        return X * s, TAKEN[name](1.5 * s)

    compiled = torch.compile(function, backend="fx_fusion")
    for s in VALUES:
        for a, b in zip(compiled(s), function(s), strict=True):
            torch.testing.assert_close(a, b)


def test_a_float_that_is_a_tensor_everywhere_is_compiled_twice():
    """Another one that is not does not matter."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("fx_fusion")

    def function(s, t):
        return X * s + Y, torch._foreach_mul([X], 1 - s)[0], X.clamp(max=t)

    compiled = torch.compile(function, backend=counter)
    with fx_fusion.recording() as report:
        for s in VALUES:
            for a, b in zip(compiled(s, 0.3), function(s, 0.3), strict=True):
                torch.testing.assert_close(a, b)
        assert counter.frame_count == 2
        for s in VALUES:
            for a, b in zip(compiled(s, s), function(s, s), strict=True):
                torch.testing.assert_close(a, b)
    assert "1 foreach call(s) take a changing float as a tensor" in str(report)


@pytest.mark.slow
def test_a_float_in_a_checkpointed_body():
    torch._dynamo.reset()

    def body(x, s):
        return x * s + x.clamp(max=s)

    def function(x, s):
        return checkpoint(body, x.sin(), s, use_reentrant=False)

    compiled = torch.compile(function, backend="fx_fusion")
    for s in VALUES:
        found, wanted = (
            torch.autograd.grad(f(x := X.clone().requires_grad_(), s).sum(), x)[0] for f in (compiled, function)
        )
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(compiled(X, s), function(X, s))


def test_a_float_out_of_the_data_has_no_value_yet():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * x.sum().item(), backend="fx_fusion", options={"strict": True})
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for x in (X, Y):
            torch.testing.assert_close(compiled(x), x * x.sum().item())


def test_after_a_fallback_the_report_claims_nothing():
    torch._dynamo.reset()

    def chokes_on_ours(gm, inputs, options):
        if any(node.target is torch.ones for node in gm.graph.nodes):
            raise RuntimeError("no such op")
        return gm.forward

    def backend(gm, inputs):
        return compile_graph(gm, inputs, parse(None, None), chokes_on_ours)

    compiled = torch.compile(lambda s: torch._foreach_mul([X], s)[0], backend=backend)
    with fx_fusion.recording() as report:
        compiled(0.5)
        with pytest.warns(UserWarning, match="no such op; the graph goes to Inductor"):
            torch.testing.assert_close(compiled(0.25), X * 0.25)
    assert "no such op" in report.graphs[-1].fallback
    assert "changing float" not in str(report)


def test_one_tensor_for_all_of_a_list():
    """``alpha`` scales it, and no list."""

    def function(alpha):
        return torch._foreach_add([X, X * 2], torch.tensor(2.0), alpha=alpha)

    compiled = torch.compile(function, backend=rewriting_backend())
    for alpha in (0.5, 0.25, 0.125):
        torch.testing.assert_close(compiled(alpha), function(alpha))
