"""Test what ``torch_internals`` relies on, on the torch that is installed; and what each function does when its name is gone."""

import inspect
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils.checkpoint import checkpoint

from fx_fusion.torch_internals import (
    containers,
    dispatch,
    dynamo,
    fakes,
    flex_attention,
    inductor,
    kernel_accesses,
    lowerings,
    modules,
    nodes,
    substitutes,
)
from fx_fusion.torch_internals.attention import takes_grouped_heads
from fx_fusion.torch_internals.fakes import FakeTensor, FakeTensorMode, example_of


def captured(function, *args, dynamic=False):
    """The graph that Dynamo captures of a function."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    return graphs[0]


def in_regions(x):
    with torch.no_grad():
        a = x.sin()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = x @ x
    return a + b.float()


def under_vmap(x):
    return torch.vmap(torch.sin)(x)


def in_inference_mode(x):
    with torch.inference_mode():
        a = x.sin()
    return a


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (in_regions, [nodes.SET_GRAD, nodes.SET_GRAD, nodes.ENTER_AUTOCAST, nodes.EXIT]),
        (under_vmap, [nodes.ENTER_OTHER, nodes.EXIT]),
        (in_inference_mode, [nodes.ENTER_OTHER, nodes.EXIT]),
    ],
)
def test_dynamo_writes_regions_as_calls_that_are_known(function, changes):
    graph = captured(function, torch.randn(4, 4)).graph
    assert [change for node in graph.nodes if (change := nodes.region_change(node)) is not None] == changes


def test_an_unknown_region_is_a_region_and_an_unknown_autocast_an_error():
    def _enter_something():
        pass

    def _autocast_later():
        pass

    graph = fx.Graph()
    assert nodes.region_change(graph.call_function(_enter_something)) == nodes.ENTER_OTHER
    with pytest.raises(RuntimeError, match="may change grad mode or autocast"):
        nodes.region_change(graph.call_function(_autocast_later))


def test_every_tensor_of_a_captured_graph_has_an_example():
    graph = captured(lambda x: (x + 1).chunk(2, -1)[0].relu(), torch.randn(2, 4)).graph
    computed = [node for node in graph.nodes if node.op in ("placeholder", "call_function", "call_method")]
    assert all(isinstance(example_of(node), (FakeTensor, tuple, list)) for node in computed)
    node = computed[-1]
    node.meta["val"] = node.meta.pop("example_value")
    assert isinstance(example_of(node), FakeTensor), "AOTAutograd's key speaks for it"


def test_views_share_a_storage_and_copies_do_not():
    with FakeTensorMode():
        x = torch.empty(2, 6)
        assert fakes.storage_of(x) == fakes.storage_of(x.view(3, 4)[1:])
        assert fakes.storage_of(x) != fakes.storage_of(x.clone())


def test_symbolic_sizes_have_hints_expressions_and_bounds():
    graph = captured(lambda x: x.sin(), torch.randn(6, 4), dynamic=True).graph
    size = next(example_of(n).shape[0] for n in graph.nodes if isinstance(example_of(n), torch.Tensor))
    assert fakes.hint_of(size) == 6
    (symbol,) = fakes.expression_of(size).free_symbols
    assert fakes.lower_bound(size, symbol) >= 1


def test_without_guards_a_comparison_adds_none():
    graph = captured(lambda x: x.sin(), torch.randn(6, 4), dynamic=True).graph
    tensor = next(example_of(n) for n in graph.nodes if isinstance(example_of(n), torch.Tensor))
    environment = tensor.fake_mode.shape_env
    before = len(environment.guards)
    with fakes.without_guards(tensor.fake_mode):
        assert bool(tensor.shape[0] == 6)
    assert len(environment.guards) == before
    with fakes.without_guards(None):
        pass


def test_without_tracing_context_the_entered_mode_counts():
    tensor = torch.empty(3)
    other = torch._guards.TracingContext(fakes.FakeTensorMode())
    with torch._guards.tracing(other), (mode := fakes.FakeTensorMode()), fakes.without_tracing_context():
        assert torch._guards.detect_fake_mode([mode.from_tensor(tensor)]) is mode


def test_checkpointed_functions_are_calls_of_one_operator():
    graph = captured(lambda x: checkpoint(torch.sin, x, use_reentrant=False), torch.randn(3, requires_grad=True)).graph
    calls = [n for n in graph.nodes if n.target is nodes.checkpoint_operator()]
    assert len(calls) == 1
    assert nodes.is_higher_order(calls[0].target)
    assert not nodes.may_write_to_operands(calls[0].target)


def test_schemas_say_what_is_written():
    (schema,) = nodes.schemas_of(torch.ops.aten.add_.Tensor)
    assert list(nodes.written_parameters(schema)) == [(0, "self")]
    assert len(nodes.schemas_of(torch.ops.aten.add)) > 3
    assert nodes.schemas_of(torch.add) is None
    assert nodes.is_operator(torch.ops.aten.add)
    assert not nodes.is_operator(torch.add)


def test_nodes_are_renamed_and_known_to_be_erased(monkeypatch):
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    nodes.rename(y, "another")
    assert y.name == "another"
    assert not nodes.is_erased(y)
    graph.erase_node(y)
    assert nodes.is_erased(y)


def test_inplace_is_found_by_position():
    assert nodes.takes_inplace(F.relu6) == 1
    assert nodes.takes_inplace(torch.sin) is None


def test_functions_of_torch_stand_in_known_namespaces():
    assert all(any(hasattr(space, name) for space in nodes.namespaces()) for name in ("linear", "gelu", "softmax", "layer_norm"))


def test_inductor_takes_the_options_that_the_cache_key_needs():
    patches = inductor.with_key({}, "key", {"module.function": "hash"})
    assert set(patches) <= inductor.option_names()
    (slot,) = (v for v in patches.values() if isinstance(v, inductor.CustomGraphPass))
    assert slot.uuid() == ("key", ())
    both = inductor.with_key(patches, "another", {})
    assert any(getattr(v, "uuid", lambda: None)() == (("key", ()), "another", ()) for v in both.values())


def test_modes_and_configurations():
    assert {"default", "reduce-overhead", "max-autotune"} <= set(inductor.modes())
    assert inductor.captures_cuda_graphs(inductor.configuration("reduce-overhead", {}))
    assert not inductor.captures_cuda_graphs(inductor.configuration(None, {}))
    with pytest.raises(Exception, match="max_autotune"):
        inductor.configuration(None, {"max_autotune": "yes"})


def test_caches_and_donations_can_be_switched_off():
    config = torch._inductor.config
    with inductor.without_caches():
        assert config.force_disable_caches
    with inductor.without_donated_buffers():
        assert not torch._functorch.config.donated_buffer
    assert isinstance(inductor.optimizes_layouts(), bool)
    assert isinstance(inductor.forces_layouts(), bool)


def test_inductor_compiles_a_graph():
    def backend(gm, inputs):
        return inductor.compile_graph(gm, inputs, {})

    torch._dynamo.reset()
    x = torch.randn(4)
    torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1, backend=backend)(x), x.sin() + 1)


def test_lowerings_are_registered_where_inductor_looks():
    from torch._inductor.lowering import lowerings as known

    from fx_fusion.fusion.registry import all_fusions
    from fx_fusion.ops import library

    all_fusions()
    library.register_lowerings()
    assert torch.ops.fx_fusion.rms_norm.default in known
    assert torch.ops.fx_fusion.channels_last.default in known
    assert callable(lowerings.lower_channels_last)


def test_kernel_accesses_ask_torch_by_names_that_exist():
    from torch._higher_order_ops import triton_kernel_wrap

    asked = [getattr(triton_kernel_wrap, name, None) for name in kernel_accesses._QUESTIONS]
    assert any(asked)
    for ask in filter(None, asked):
        first, second, *_ = inspect.signature(inspect.unwrap(ask)).parameters.values()
        assert second.name in ("kwargs", "kernel_args"), "arguments by name, handed over by position"
        assert first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)


def test_the_operator_below_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b, h, q, k):
        return q >= k

    q = torch.randn(1, 2, 128, 16)
    mask = create_block_mask(causal, 1, 1, 128, 128, device="cpu")

    def score(s, b, h, q, k):
        return s

    ours, lse = flex_attention.flex_attention(q, q, q, score, mask.as_tuple(), 0.25, (), {}, with_lse=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.25))
    hidden = ~torch.ones(128, 128, dtype=torch.bool).tril()
    torch.testing.assert_close(lse, (q @ q.mT * 0.25).masked_fill(hidden, float("-inf")).logsumexp(-1))


def test_dispatch():
    x = torch.randn(3, requires_grad=True)
    assert dispatch.is_view(x.detach()[1:])
    assert not dispatch.is_view(x.detach().clone())
    assert dispatch.version_of(torch.ones(1).add_(1)) == 1
    with torch.inference_mode():
        assert dispatch.version_of(torch.ones(1)) == -1
    assert not dispatch.has_backward_hooks(x)
    x.register_hook(lambda gradient: None)
    assert dispatch.has_backward_hooks(x)
    assert dispatch.saved_tensor_hooks_are_enabled()
    overload = torch.ops.aten.native_layer_norm.default
    assert dispatch.parameter_names(overload)[0] == "input"
    assert set(dispatch.optional_parameters(overload)) == {"weight", "bias"}
    assert len(dispatch.result_names(overload)) == 3
    assert "native_layer_norm" in dispatch.schema_of(overload)
    assert dispatch.computation_dtype(torch.bfloat16) == torch.float32
    assert all(dispatch.foreach(name) for name in ("mul", "mul_", "add_", "addcmul_", "addcdiv_", "div", "sub"))
    assert dispatch.foreach("no_such_op") is None


def test_a_backward_knows_whether_another_comes(monkeypatch):
    said = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            said.append(dispatch.is_freed_after_this_backward(*ctx.saved_tensors))
            return dy

    y = Saves.apply(torch.ones(3, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    with dispatch.calls_of("fx_fusion"):  # somebody looks at every op
        y.backward(retain_graph=True)
    y.backward()
    assert said == [False, False, True]
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert not dispatch.is_freed_after_this_backward(torch.ones(3))


def test_a_tensor_without_memory():
    class Waiting(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("no op is called")

    tensor = dispatch.wrapper(Waiting, torch.empty(2, 3, device="meta"), torch.device("cpu"))
    dispatch.throw_on_data_ptr(tensor)
    assert (type(tensor), tuple(tensor.shape), tensor.device.type) == (Waiting, (2, 3), "cpu")
    with dispatch.without_torch_function(), pytest.raises(RuntimeError):
        tensor.data_ptr()


def test_the_compilation_that_runs_has_an_id_and_a_reason_to_end():
    seen = []

    def backend(gm, inputs):
        seen.append((dynamo.current_compile_id(), dynamo.is_compiling(), dynamo.why_it_ends(gm)))
        return gm.forward

    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch._dynamo.reset()
    torch.compile(broken, backend=backend)(torch.randn(3))
    (first, compiling, why), (second, _, nothing) = seen
    assert first[0]
    assert first != second
    assert compiling
    assert why.startswith("graph break at test_torch_contract.py:")
    assert nothing == ""
    assert dynamo.current_compile_id() == ("", 0)
    assert not dynamo.is_compiling()


def test_parameters_have_the_path_of_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2))
    seen = []

    def backend(gm, example_inputs):
        seen.extend(dynamo.parameter_path(node) for node in gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.ones(2, 2))
    assert {"0.weight", "1.running_mean"} <= set(seen)
    assert "" in seen, "of the input, and of what is computed"
    assert dynamo.parameter_path(torch.fx.Graph().placeholder("x")) == ""


@torch.compiler.disable
def left_to_eager(x):
    return x + 1


class StandsForIt:
    @staticmethod
    def apply(x):
        return x + 1


def stands_for_it(x):
    return x + 1


class NotTraced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch._dynamo.graph_break()
        return x + 1


def test_something_else_stands_for_a_function_and_a_class(monkeypatch):
    """Under a backend of this package; another one sees the original."""
    assert substitutes.substitute(left_to_eager, lambda within, options: stands_for_it if within == __name__ else None)
    assert substitutes.substitute(NotTraced, lambda within, options: StandsForIt)

    def function(x):
        return NotTraced.apply(left_to_eager(x.sin())).cos()

    for module, count in (("fx_fusion.backend", 1), ("another.backend", 3)):
        graphs = []

        def backend(gm, inputs, graphs=graphs):
            graphs.append(gm)
            return gm

        backend.__module__ = module
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, backend=backend)(torch.ones(3)), function(torch.ones(3)))
        assert len(graphs) == count
    monkeypatch.setitem(sys.modules, "torch._dynamo.variables.builder", None)
    assert not substitutes.substitute(left_to_eager, lambda within, options: None)


def test_nodes_in_containers():
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert containers.map_nodes(lambda n: n.name, ([x, 1], {"k": (x,)})) == (["x", 1], {"k": ("x",)})


class Gone:
    """An object without any attribute."""


def test_what_is_done_without_a_name(monkeypatch):
    """The degraded modes that the docstrings promise."""
    graph = fx.Graph()
    y = graph.call_function(torch.sin, (graph.placeholder("x"),))
    bare = Gone()
    bare.graph = graph
    assert nodes.is_erased(bare), "looked for in the graph"
    nodes.rename(bare, "another")
    number = Gone()
    number.node = Gone()
    number.node.shape_env = Gone()
    assert fakes.lower_bound(number, None) == -math.inf
    monkeypatch.setattr(dynamo, "torch", Gone())
    assert dynamo.current_compile_id() == ("", 0)
    without = Gone()
    without._inductor = Gone()
    monkeypatch.setattr(inductor, "torch", without)
    assert "reduce-overhead" in inductor.modes()
    assert inductor.configuration(None, {"max_autotune": True}) == {"max_autotune": True}
    inductor.reset()
    monkeypatch.setattr(inductor, "config", Gone())
    assert not inductor.optimizes_layouts()
    assert not inductor.forces_layouts()
    with pytest.raises(AttributeError):
        inductor.with_key({}, "key", {})
    assert y.name == "sin"


def test_torch_says_which_attention_takes_grouped_heads(monkeypatch):
    query, key = torch.randn(1, 8, 32, 16), torch.randn(1, 2, 32, 16)
    mask = torch.ones(32, 32, dtype=torch.bool).tril()
    given = query, key, key, mask, 0.0, False, None, torch.bfloat16
    assert takes_grouped_heads(*given)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not takes_grouped_heads(*given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in (query, key, key, mask)]
        takes_grouped_heads(*fakes, *given[4:])  # says something
    assert not takes_grouped_heads("no tensor", *given[1:])
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert not takes_grouped_heads(*given)



def test_without_a_bisector_or_a_store(monkeypatch):
    """Gone: nothing is left out; nobody waits."""
    import torch._inductor.compiler_bisector as torchs

    from fx_fusion.torch_internals import bisector, collectives

    bisector.make_known()
    assert "fx_fusion" in torchs.BACKENDS
    assert not bisector.is_switched_off(lambda: "")
    monkeypatch.delattr(torchs, "CompilerBisector")
    monkeypatch.delattr(torchs, "BACKENDS")
    bisector.make_known()
    assert not bisector.is_switched_off(lambda: "")
    if torch.distributed.is_available():
        assert hasattr(torch.distributed.distributed_c10d, "_get_process_group_store")
        monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_process_group_store")
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 7)
        assert collectives.present_within(0.0, None, "logits") == 7
    assert all(hasattr(torch.ops._c10d_functional, name) for name in ("all_reduce_", "all_gather_into_tensor", "wait_tensor"))


def test_without_dynamos_loggers(monkeypatch):
    """The graph ends at the message then."""
    from torch._dynamo.variables import misc

    from fx_fusion.torch_internals import loggers

    known = misc.LoggingLoggerVariable
    loggers.warn_while_compiling()
    assert known.call_method.warns_once
    monkeypatch.delattr(misc, "LoggingLoggerVariable")
    loggers.warn_while_compiling()
    assert known.call_method.warns_once


def test_calls_of_modules():
    """Through another function, and past it with the module's hooks. Gone: as the module is."""
    module, x, seen = torch.nn.Linear(2, 2), torch.randn(3, 2), []
    module.register_forward_hook(lambda *_: seen.append(True))
    assert modules.is_called_as_it_is(module)
    modules.call_through(module, lambda *_: "another")
    assert not modules.is_called_as_it_is(module)
    assert module(x) == "another"
    torch.testing.assert_close(modules.called_as_it_is(module, x), torch.nn.functional.linear(x, module.weight, module.bias))
    assert seen == [True]
    bare = SimpleNamespace(forward=lambda x: x)
    modules.call_through(bare, None)
    assert modules.is_called_as_it_is(bare)
    assert modules.called_as_it_is(bare, x) is x
