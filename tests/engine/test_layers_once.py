"""Equal layers are compiled once: what counts as equal, where a graph may be cut, and that nothing else changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fx_fusion
from fx_fusion.inductor.layers_once import compile_layers_once
from fx_fusion.inductor.repeats import Work
from fx_fusion.torch_internals.subgraphs import is_call

N, LAYERS = 16, 6


@pytest.fixture(autouse=True)
def without_caches():
    """Compile everything: a graph of torch's compile cache is not cut."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def traced(function, *given):
    """The graph of aten ops that Inductor would lower, and its inputs."""
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given), given


def layer(x, w, v, factor=2):
    """Values between its products; its first sum is in memory, because a product reads it."""
    x = x.relu() + x @ w
    return torch.layer_norm(torch.relu(x @ v), (N,)).mul(factor).cos() @ v


def pairs(weights):
    return enumerate(zip(weights[::2], weights[1::2], strict=True))


def stack(x, *weights):
    for _, (w, v) in pairs(weights):
        x = layer(x, w, v)
    return x


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights(count=LAYERS):
    return [numbers(N, N) / N**0.5 * (1 + i / 10) for i in range(2 * count)]


def calls_of(gm):
    return [node.args[0].target for node in gm.graph.nodes if is_call(node)]


def assert_once(function, *given, calls):
    """The graph calls a body so often, and returns what it did."""
    gm, _ = traced(function, *given)
    expected = gm(*given)
    bodies = compile_layers_once(gm)
    found = gm(*given)
    for one, other in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert torch.equal(one, other)
    assert [body.calls for body in bodies] == calls, gm.graph
    assert len(calls_of(gm)) == sum(calls)
    return gm


def test_equal_layers_are_calls_of_one_body():
    gm = assert_once(stack, numbers(4, N), *weights(), calls=[LAYERS])
    assert len(set(calls_of(gm))) == 1


def test_values_that_are_returned_too_and_views_of_them():
    """Take what a forward saves for its backward out of a layer, in whatever shape."""

    def function(x, *weights):
        saved = []
        for _, (w, v) in pairs(weights):
            hidden = (torch.layer_norm(x, (N,)) * 2 + 1) @ w
            x = x + torch.relu(hidden).sin().cos() @ v
            saved += [hidden.view(2, 2, N), hidden.mT, x]
        return x, saved

    assert_once(function, numbers(4, N), *weights(), calls=[LAYERS - 1])


def test_another_literal_or_wiring_is_another_layer():
    def function(x, *weights):
        for i, (w, v) in pairs(weights):
            x = layer(x, w, w if i == 4 else v, factor=3 if i == 2 else 2)
        return x

    assert_once(function, numbers(4, N), *weights(), calls=[4])


@pytest.mark.parametrize(("others", "calls", "bodies"), [((0, 3, 6), [3], 1), ((0, 1, 2), [3, 3], 2)], ids=["every third", "first three"])
def test_some_layers_are_different(others, calls, bodies):
    """As where some layers see a window of tokens, and some all of them: three layers are one body, or two."""

    def function(x, *weights):
        for i, (w, v) in pairs(weights):
            x = torch.sigmoid(layer(x, w, v).exp().neg().tanh() @ w) @ v if i in others else layer(x, w, v)
        return x

    gm = assert_once(function, numbers(4, N), *weights(9), calls=calls)
    assert len(set(calls_of(gm))) == bodies


def test_nothing_is_cut_between_what_one_kernel_computes():
    """Cut behind a product, and not between ops that Inductor computes in one kernel."""
    gm, _ = traced(lambda x, w: ((x @ w).sin().cos() @ w).exp(), numbers(4, N), numbers(N, N))
    work = Work(gm.graph)
    may_cut = {node.name: may for node, may in zip(work.nodes, work.may_cut, strict=True)}
    assert may_cut == {"mm": True, "sin": False, "cos": True, "mm_1": True, "exp": True}
    epilogues = Work(gm.graph, epilogues=True)  # a template's kernel computes what follows the product as well
    assert not epilogues.may_cut[0]
    assert epilogues.may_cut[2]


def test_a_value_that_is_read_across_a_product_is_in_memory():
    """Cut behind a value that a product reads. One that only generated kernels read is computed again in each of them."""

    def cuts(function):
        work = Work(traced(function, numbers(4, N), numbers(N, N))[0].graph)
        return [node.name for node, may in zip(work.nodes, work.may_cut, strict=True) if may]

    assert cuts(lambda x, w: (h := x.sin()) + h @ w) == ["sin", "mm", "add"]
    assert cuts(lambda x, w: ((h := x.sin()) + h.cos() @ w, h)) == ["cos", "mm", "add"]
    assert cuts(lambda x, w: (h := x.sin()) + h.cos() @ w) == ["add"]


def test_constants_are_made_in_each_body():
    def function(x, *weights):
        scale = torch.full((N,), 2.0)
        for _, (w, v) in pairs(weights):
            x = layer(x, w, v) * scale @ v
        return x

    gm = assert_once(function, numbers(4, N), *weights(), calls=[LAYERS])
    (name,) = set(calls_of(gm))
    body = getattr(gm, name).graph
    assert len(body.find_nodes(op="call_function", target=torch.ops.aten.full.default)) == 1
    assert not any(n.meta["val"].shape == (N,) for n in body.find_nodes(op="placeholder"))


@pytest.mark.parametrize("what", ["write", "dropout"])
def test_what_stays_outside_of_bodies(what):
    """Writes to an input, and random numbers: their order is part of what they mean."""

    def function(x, seen, *weights):
        for _, (w, v) in pairs(weights):
            x = layer(x, w, v)
            x = seen.copy_(x) * 1 if what == "write" else x * torch.rand_like(x)
        return x

    gm, given = traced(function, numbers(4, N), torch.zeros(4, N), *weights())
    bodies = compile_layers_once(gm)
    assert all(is_call(n) or n.target in (torch.ops.aten.copy_.default, torch.ops.aten.rand_like.default)
               for n in gm.graph.nodes if n.op == "call_function" and str(n.target).startswith("aten.copy_"))
    for name in {f"fx_fusion_layer_{i}" for i, _ in enumerate(bodies)}:
        ops = {str(n.target) for n in getattr(gm, name).graph.nodes}
        assert not ops & {"aten.copy_.default", "aten.rand_like.default"}
    assert len([n for n in gm.graph.nodes if "copy_" in str(n.target) or "rand_like" in str(n.target)]) == LAYERS


@pytest.mark.parametrize("function", [lambda x: x, lambda x: x.sin(), lambda x: [x.sin() for _ in range(80)]])
def test_graphs_that_repeat_too_little_are_left(function):
    gm, _ = traced(function, numbers(4))
    before = str(gm.graph)
    assert compile_layers_once(gm) == []
    assert str(gm.graph) == before


def test_a_large_graph_is_searched_in_seconds():
    gm, _ = traced(stack, numbers(4, N), *weights(200))
    nodes = len(Work(gm.graph).nodes)
    (body,) = compile_layers_once(gm)
    assert body.calls * body.nodes > 0.95 * nodes


class Deep(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(N, 4 * N), nn.Linear(4 * N, N)]) for _ in range(LAYERS))

    def forward(self, x):
        for up, down in self.layers:
            x = x + F.dropout(down(F.gelu(up(F.rms_norm(x, (N,))))), self.dropout)
        return x.square().mean()


def gradients(model, call, x):
    model.zero_grad()
    call(x).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_model_trains_as_in_eager_and_the_report_says_what_was_compiled_once():
    torch.manual_seed(0)
    model, x = Deep(), numbers(32, N)
    with fx_fusion.recording() as report:
        compiled = torch.compile(model, backend="fx_fusion", options={"layers": "once", "strict": True})
        for _ in range(2):
            found = gradients(model, compiled, x)
    torch.testing.assert_close(found, gradients(model, model, x), rtol=1e-4, atol=1e-6)
    forward, backward = (sum(b.calls for b in report.graphs[0].layers.bodies if b.backward is of) for of in (False, True))
    assert forward >= LAYERS - 1
    assert backward >= LAYERS - 2
    assert f"equal layers are compiled once: forward {forward} calls of 1 body, backward {backward} calls of " in str(report)
    again = fx_fusion.Report.from_json(report.to_json()) if hasattr(fx_fusion.Report, "from_json") else report
    assert again.graphs[0].layers == report.graphs[0].layers


def test_layers_are_compiled_one_by_one_by_default():
    model, x = Deep(), numbers(32, N)
    with fx_fusion.recording() as report:
        gradients(model, torch.compile(model, backend="fx_fusion"), x)
    assert report.graphs[0].layers.bodies == []
    assert "compiled once" not in str(report)


def test_a_failure_compiles_each_layer_by_itself(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no")

    monkeypatch.setattr("fx_fusion.inductor.compile.compile_layers_once", fail)
    model, x = Deep(), numbers(32, N)
    with fx_fusion.recording() as report, pytest.warns(UserWarning, match="each layer is compiled by itself: RuntimeError: no"):
        found = gradients(model, torch.compile(model, backend="fx_fusion", options={"layers": "once"}), x)
    torch.testing.assert_close(found, gradients(model, model, x), rtol=1e-4, atol=1e-6)
    assert "each layer is compiled by itself: RuntimeError: no" in str(report)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no"):
        torch.compile(model, backend="fx_fusion", options={"layers": "once", "strict": True})(x)


def test_dropout_draws_what_it_draws_without_bodies():
    """Each layer has a seed of its own, by which its backward draws the same numbers again."""
    model, x, found = Deep(dropout=0.3), numbers(32, N), []
    for layers in ("flat", "once"):
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            compiled = torch.compile(model, backend="fx_fusion", options={"layers": layers, "strict": True})
            torch.manual_seed(3)
            found.append([gradients(model, compiled, x) for _ in range(2)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
    assert not torch.equal(found[1][0][0], found[1][1][0])
    assert sum(body.calls for body in report.graphs[0].layers.bodies if not body.backward) >= LAYERS - 2
