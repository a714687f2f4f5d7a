"""Trace a pattern function into a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from fx_fusion.torch_internals.containers import tree_map_only


def trace(
    function: Callable[..., Any],
    parameters: Iterable[str],
    statics: Mapping[str, Any],
    tracer: type[fx.proxy.TracerBase] = fx.proxy.GraphAppendingTracer,
) -> fx.Graph | None:
    """The graph of ``function``, with a placeholder for each of ``parameters`` and ``statics`` as constants; None for a
    spelling that does not have this variant (it returns NotImplemented). ``tracer`` makes the nodes."""
    graph = fx.Graph()
    tracing = tracer(graph)  # type: ignore[call-arg]
    proxies = {name: fx.Proxy(graph.placeholder(name), tracing) for name in parameters}
    result = function(**proxies, **statics)
    if result is NotImplemented:
        return None
    graph.output(tree_map_only(fx.Proxy, lambda proxy: proxy.node, result))
    return graph


def call_beside(like: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that takes no tensor (``torch.ones``): a node of the graph where ``like`` is being traced."""
    if isinstance(like, fx.Proxy):
        return like.tracer.create_proxy("call_function", function, args, kwargs)
    return function(*args, **kwargs)


def results_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Return what a traced function returns, as a tuple."""
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    return result if isinstance(result, tuple) else (result,)
