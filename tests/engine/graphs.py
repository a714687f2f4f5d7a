"""Small graphs as Dynamo makes them: a function traced with proxies, an example value on each node."""

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fx_fusion.graph.view import View

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Input:
    """A tensor that a graph is given."""

    shape: tuple
    dtype: torch.dtype = F32
    device: str = "cpu"
    grad: bool = False

    def made(self):
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.grad)


def tensor(*shape, **kind):
    return Input(shape, **kind)


class Captured:
    """A graph, its nodes by name, its view."""

    def __init__(self, graph):
        self.graph = graph

    @functools.cached_property
    def view(self):
        return View(self.graph)

    def __getitem__(self, name):
        return next(node for node in self.graph.nodes if node.name == name)

    @property
    def results(self):
        """The nodes that it returns."""
        return next(n for n in self.graph.nodes if n.op == "output").args[0]

    @property
    def result(self):
        return self.results[0]

    @property
    def term(self):
        """Return what its first result means."""
        return self.view.term(self.result)

    @property
    def names(self):
        return [node.name for node in self.graph.nodes]

    def run(self, *args):
        return fx.GraphModule(torch.nn.Module(), self.graph)(*args)


def capture(function, *, dynamic=False, **inputs):
    """The graph of a function of proxies. ``inputs``: a shape or an ``Input`` (a tensor), a number or a tensor that is handed
    over as it is (a symbolic number, a subclass). ``dynamic``: sizes are symbols."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {name: fx.Proxy(graph.placeholder(name), tracer) for name in inputs}
    results = function(**proxies)
    results = results if isinstance(results, tuple) else (results,)
    graph.output(tuple(r.node if isinstance(r, fx.Proxy) else r for r in results))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = []
    for name, item in inputs.items():
        known = Input(item) if isinstance(item, tuple) else item
        if isinstance(known, Input):
            with contextlib.nullcontext() if dynamic else mode:
                known = known.made()
            if dynamic:
                known = mode.from_tensor(known, static_shapes=False, source=ConstantSource(name))
        given.append(known)
    with mode, torch.set_grad_enabled(True):
        _Recorder(torch.nn.Module(), graph=graph).run(*given)
    return Captured(graph)


class _Recorder(fx.Interpreter):
    def run_node(self, n):
        result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = result
        return result


def beside(proxy, target, *args, **kwargs):
    """A ``call_function`` node in the graph of ``proxy``."""
    return proxy.tracer.create_proxy("call_function", target, args, kwargs)


def method(x, name, *args, **kwargs):
    """A ``call_method`` node: ``x.__radd__(y)`` of a proxy would be another call."""
    return x.tracer.create_proxy("call_method", name, (x, *args), kwargs)


@contextlib.contextmanager
def no_grad(proxy):
    """Yield what Dynamo makes of ``with torch.no_grad():``."""
    beside(proxy, torch._C._set_grad_enabled, False)
    yield
    beside(proxy, torch._C._set_grad_enabled, True)


@contextlib.contextmanager
def autocast(proxy, dtype=BF16):
    """Yield what Dynamo makes of ``with torch.autocast("cpu", dtype):``."""
    entered = beside(proxy, torch.amp.autocast_mode._enter_autocast, "cpu", dtype, True, True)
    yield
    beside(proxy, torch.amp.autocast_mode._exit_autocast, entered)


def symbolic_float(hint):
    """A float that changes between calls, ``hint`` at the first."""
    env, source = ShapeEnv(), ConstantSource("number")
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=hint, source=source)


def symbolic_int(hint):
    """An int that changes between calls, ``hint`` at the first."""
    env, source = ShapeEnv(), ConstantSource("count")
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source)
