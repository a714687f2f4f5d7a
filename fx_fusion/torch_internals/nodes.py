"""FX nodes and what they call: schemas, regions, higher-order ops."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
        "irshift", "setitem", "delitem",
    )
)  # fmt: skip


# How Dynamo names the calls of NumPy that it traces: of functions, methods and operators alike, ``a[i] = x`` among them.
# Which of them write is not told. Gone: their writes are not seen.
NUMPY_CALL = "wrapped_"

_HOOKS = frozenset({"register_hook", "_register_hook_trampoline"})  # the second is compiled autograd's


def sets_a_hook(node: fx.Node) -> bool:
    """Return True if a node sets a hook on its first operand. What the hook returns takes the place of the gradient, and no
    rewrite may step over that: it is a write. Gone: Dynamo writes another node, which is not seen as one."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in _HOOKS


def is_an_attribute(node: fx.Node) -> bool:
    """Return True if a number is an attribute of an object, a module's eps, and no argument of the function. Gone: False,
    and such a number that is another one in another module is taken for one that changes."""
    while node.op == "call_method" and node.target == "item" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return "." in str(name() if callable(name) else name)


def is_erased(node: fx.Node) -> bool:
    """Return True if a node was erased from its graph. Gone: looked for in the graph, which is slower."""
    erased = getattr(node, "_erased", None)
    return erased if erased is not None else node not in node.graph.nodes


def rename(node: fx.Node, name: str) -> None:
    """Give a node this name, or one made of it where another node has it. Gone: it keeps its name, and the graph diff of the
    report shows more changed lines, and sites are not verified."""
    change = getattr(node, "_rename", None)
    if change is not None:
        change(name)


def take_name(node: fx.Node, other: fx.Node) -> None:
    """Give ``node`` the name of ``other``, whose own gets the ending ``_unfused``. Gone: see ``rename``."""
    name = other.name
    rename(other, f"{name}_unfused")
    used = getattr(getattr(node.graph, "_graph_namespace", None), "_used_names", None)
    if used is not None:
        used.discard(name)  # a graph never frees a name by itself
    rename(node, name)


def empty_like(graph: fx.Graph) -> fx.Graph:
    """An empty graph for the tracer of another. Gone: for the default tracer."""
    return fx.Graph(tracer_cls=getattr(graph, "_tracer_cls", None))


def take_codegen(graph: fx.Graph, source: fx.Graph) -> None:
    """Let a graph take its arguments and return its results as ``source`` does. Gone: raises AttributeError, and the graph
    goes to Inductor unchanged."""
    graph.set_codegen(source._codegen)


def namespaces() -> tuple[Any, ...]:
    """The modules in which torch's functions stand. Gone: functions that only ``torch._C._nn`` has are unknown."""
    private = getattr(torch._C, "_nn", None)
    return tuple(n for n in (torch, F, private, torch.special, getattr(torch, "functional", None)) if n is not None)


# -- what a call writes to -----------------------------------------------------------------------------------------
def schemas_of(target: Any) -> list[Any] | None:
    """The schemas of an operator (all overloads of a packet); None for a function without one."""
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    return None


def written_parameters(schema: Any) -> Iterator[tuple[int, str]]:
    """Position and name of each parameter that an operator writes to."""
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield i, argument.name


def is_operator(target: Any) -> bool:
    """Return True if a node calls an operator of the dispatcher (``torch.ops...``)."""
    return isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def is_higher_order(target: Any) -> bool:
    """Return True if a node calls a higher-order operator, which takes graphs as operands."""
    return isinstance(target, torch._ops.HigherOrderOperator)


# Higher-order operators that write to no operand but through a graph of theirs. What stands nowhere is taken to write.
_WRITE_BY_BODY_ONLY = frozenset((
    "associative_scan", "autograd_function_apply", "base_hop", "cond", "flex_attention", "foreach_map", "hints_wrapper",
    "inductor_compiled_code", "inline_asm_elementwise", "invoke_quant", "invoke_subgraph", "local_map_hop", "map_impl",
    "out_dtype", "scan", "strict_mode", "tag_activation_checkpoint", "while_loop", "wrap", "wrap_activation_checkpoint",
    "wrap_with_autocast", "wrap_with_set_grad_enabled",
))  # fmt: skip


def may_write_to_operands(target: Any) -> bool:
    """Return True if a higher-order operator may write to its operands itself, not through the graphs that it is given."""
    return target.name() not in _WRITE_BY_BODY_ONLY


def checkpoint_operator() -> Any:
    """The higher-order operator that runs a checkpointed function. Gone: None, and masks made outside of checkpointed
    functions are not proved inside."""
    return getattr(torch.ops.higher_order, "tag_activation_checkpoint", None)


def checkpointed_body(target: Any, args: Sequence[Any]) -> fx.GraphModule | None:
    """The graph of a block under ``torch.utils.checkpoint``, if that is called; the arguments behind it are its inputs."""
    is_block = target is checkpoint_operator() and target is not None and args
    return args[0] if is_block and isinstance(args[0], fx.GraphModule) else None


def namespace_of(target: Any) -> str:
    """The namespace of an operator, or the top-level package of a function; empty for anything else."""
    return getattr(target, "namespace", "") or getattr(target, "__module__", "").split(".")[0]


def takes_inplace(function: Callable[..., Any]) -> int | None:
    """The position of a parameter ``inplace``, None where there is none."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return parameters.index("inplace") if "inplace" in parameters else None


# -- regions ---------------------------------------------------------------------------------------------------------
SET_GRAD, ENTER_AUTOCAST, ENTER_OTHER, EXIT = "set grad", "enter autocast", "enter", "exit"


def region_change(node: fx.Node) -> str | None:
    """Return how a node changes grad mode, autocast, inference mode or functorch's level: one of the constants above, or
    None.

    Dynamo writes these as calls of private functions, told apart by their names. Gone: what enters or exits something else
    is a region of its own, in which nothing is fused; another name that speaks of grad mode or autocast raises
    RuntimeError, and the graph goes to Inductor unchanged."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if "autocast" in name and not name.startswith("_"):  # the parts that autocast is made of
        raise RuntimeError(f"the graph calls {name}, which may change grad mode or autocast")
    if not name.startswith("_"):
        return None
    if name == "_set_grad_enabled":
        return SET_GRAD
    if name == "_enter_autocast":
        return ENTER_AUTOCAST
    if name.startswith(("_enter", "_push")) or name.endswith("_increment_nesting"):
        return ENTER_OTHER
    if name.startswith(("_exit", "_pop")) or name.endswith("_decrement_nesting"):
        return EXIT
    if name == "_set_fwd_grad_enabled":  # within a level of functorch
        return None
    if "grad_enabled" in name or "autocast" in name:
        raise RuntimeError(f"the graph calls {name}, which may change grad mode or autocast")
    return None


def set_grad(graph: fx.Graph, enabled: bool) -> None:
    """Switch gradients on or off in a graph, as Dynamo does. Gone: raises AttributeError, and deferred logits are read."""
    graph.call_function(torch._C._set_grad_enabled, (enabled,))


def enter_autocast(graph: fx.Graph, device: str, dtype: torch.dtype) -> fx.Node:
    """Begin a region of autocast in a graph, as Dynamo does. Gone: raises AttributeError, and deferred logits are read."""
    return graph.call_function(torch.amp.autocast_mode._enter_autocast, (device, dtype, True, False))


def exit_autocast(graph: fx.Graph, entered: fx.Node) -> None:
    """End a region that ``enter_autocast`` began. Gone: as there."""
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))


_ENTERS = re.compile(r"^(\w+) = torch\.amp\.autocast_mode\._enter_autocast\((.*?)\)(;.*)?$")
_EXITS = re.compile(r"^(\w+ = )?torch\.amp\.autocast_mode\._exit_autocast\((\w+)\)")


def write_for_dynamo(module: fx.GraphModule) -> None:
    """Let the code of a module say ``with torch.autocast(...):`` where its graph enters and exits, and ``x.data``: Dynamo,
    which wrote the graph, reads that back as it was, and takes its own calls apart or stops at them. Gone, or regions that
    are not one inside the other: the code stays."""
    for node in module.graph.find_nodes(op="call_function", target=getattr(torch._C._autograd, "_get_data_attr", None)):
        node.target, node.args = getattr, (*node.args, "data")
    module.graph.on_generate_code(lambda before: lambda body: _in_blocks(body if before is None else before(body)))
    module.recompile()


def _in_blocks(body: list[str]) -> list[str]:
    written: list[str] = []
    inside: list[str] = []  # the regions that are open
    for line in "".join(body).splitlines():
        if (enters := _ENTERS.match(line)) is not None:
            written += ["    " * len(inside) + f"with torch.autocast({enters[2]}):", "    " * len(inside) + "    pass"]
            inside.append(enters[1])
        elif (exits := _EXITS.match(line)) is not None:
            if not inside or inside.pop() != exits[2]:
                return body
        else:
            written.append("    " * len(inside) + line)
    return body if inside else [line + "\n" for line in written]
