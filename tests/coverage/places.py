"""Define what there is to find in a graph, node by node, as it was captured: read without the matcher.

A node is a place of a kind (``rms_norm``, ``attention`` ...) because of what is called and of what it is called with. The
same is read from the graph as it was left: a place that is not there any more was replaced, one that still is needs a row
in the report that says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.places import location_of, module_of

PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
ROTATES = re.compile(r", in (apply_.*rot|apply_rope)")
_LOSSES = {"cross_entropy", "nll_loss"}
_WRITTEN_OUT = {
    "rms_norm": re.compile(
        "RMSNorm|T5LayerNorm$|^LlamaNorm$|L2Norm$|^(SwitchTransformers|Udop|Pop2Piano|CpmAnt|Pix2Struct|Kosmos2_5)LayerNorm$"
    ),
    "layer_norm": re.compile(r"^Cohere\w*LayerNorm$"),
}
_NORMS = {"layer_norm", "group_norm", "rms_norm", "batch_norm", "instance_norm"}
# What lies between a product and a softmax can be anything but a computation that starts something else.
_STARTS = _NORMS | {
    "linear", "conv1d", "conv2d", "conv3d", "embedding", "softmax", "topk", "sort", "argmax", "scaled_dot_product_attention",
}  # fmt: skip
# From a softmax to the second product, the probabilities stay probabilities.
_KEEPS = {
    "to", "type_as", "type", "float", "half", "bfloat16", "double", "dropout", "mul", "div", "truediv", "add", "sub", "neg",
    "masked_fill", "where", "nan_to_num", "view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim",
    "swapaxes", "contiguous", "clone", "unsqueeze", "squeeze", "expand", "getitem", "narrow", "chunk", "split", "detach",
    "cat", "pad",
}  # fmt: skip
_MOVES = {"view", "reshape", "flatten", "contiguous", "clone", "to", "type_as"}
_REPEATS = {"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave"}
_FAR = 24  # nodes on the way from a product to a softmax, and on to the next


@dataclass(frozen=True)
class Place:
    """A node that is of a kind: its name and the graph that holds it, its module and its source."""

    kind: str
    name: str
    module: str
    location: str


def places(gm: fx.GraphModule) -> list[Place]:
    """Every place of the module and of the bodies inside it."""
    graphs = [(name, m.graph) for name, m in gm.named_modules() if isinstance(m, fx.GraphModule)]
    return [
        Place(kind, f"{name}/{node.name}", module_of(node), location_of(node))
        for name, graph in graphs
        for node in graph.nodes
        for kind in kinds_of(node)
    ]


def modules_of_a_kind(gm: fx.GraphModule, classes: Mapping[str, str]) -> list[Place]:
    """For what shows in no single call: each module of these classes that multiplies in this graph, and each that
    multiplies in a function that rotates."""
    found = {}
    for node in (n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes if called(n) == "mul"):
        kind = "rotary" if ROTATES.search(node.meta.get("stack_trace") or "") else classes.get(_class_of(node))
        if kind is not None:
            found[kind, module_of(node)] = Place(kind, node.name, module_of(node), location_of(node))
    return list(found.values())


def kinds_of(node: fx.Node) -> Iterator[str]:
    """The kinds of place that a node is."""
    if node.op not in ("call_function", "call_method"):
        return
    name = called(node)
    if name in _NORMS & {"layer_norm", "group_norm", "rms_norm"}:
        yield name
    elif name == "rsqrt" or (name in ("pow", "float_power") and -0.5 in node.args):
        if (kind := written_out_norm(_class_of(node))) is not None:  # elsewhere it is no norm
            yield kind
    elif name == "embedding":
        yield name
    elif name in _LOSSES:
        yield "loss"
    elif name == "silu" or (name == "mul" and _is_swish(node)):
        yield "swish"
    elif name == "softmax" and _between_products(node):
        yield "attention"
    elif name == "scaled_dot_product_attention":
        yield from _of_attention_call(node)


def written_out_norm(class_name: str) -> str | None:
    """The kind of norm whose formula a class writes out, by what the class is called."""
    return next((kind for kind, names in _WRITTEN_OUT.items() if names.search(class_name)), None)


def called(node: fx.Node) -> str:
    """Return what is called, whatever its spelling: ``F.silu``, ``Tensor.mul_``, ``operator.matmul``, ``aten.bmm``. Ops of
    other libraries (ours among them) are none of these."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target._schema.name.removeprefix("aten::")
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator":
        name = name.removeprefix("i") if name in ("iadd", "isub", "imul", "itruediv", "imatmul") else name
    name = name.strip("_") if node.op == "call_function" else name.removesuffix("_")
    return {"multiply": "mul", "divide": "div"}.get(name, name)


def _class_of(node: fx.Node) -> str:
    """The class of the innermost module that made the node."""
    stack = node.meta.get("nn_module_stack")
    found = next(reversed(stack.values()))[1] if stack else ""
    return found.rpartition(".")[2] if isinstance(found, str) else found.__name__


def _is_swish(node: fx.Node) -> bool:
    """Return True if one factor is the sigmoid of the other."""
    factors = [a for a in node.args if isinstance(a, fx.Node)]
    return len(factors) == 2 and any(
        called(a) == "sigmoid" and a.all_input_nodes[:1] == [b] for a, b in (factors, reversed(factors))
    )


def _between_products(softmax: fx.Node) -> bool:
    """Return True if a softmax is of scores, a product of two activations, and its result a factor of another product."""
    scored = any(called(n) in PRODUCTS and not _with_weights(n) for n in _reached(softmax, _above))
    return scored and any(called(n) in PRODUCTS for n in _reached(softmax, _below))


def _reached(start: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """The nodes within reach, nearest first, no further than products."""
    seen, now = {start}, [start]
    for _ in range(_FAR):
        now = [n for at in now for n in step(at) if n not in seen and n.op in ("call_function", "call_method")]
        now = list(dict.fromkeys(now))
        seen.update(now)
        yield from now
        now = [n for n in now if called(n) not in PRODUCTS]


def _above(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if called(n) not in _STARTS]


def _below(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.users if called(n) in PRODUCTS | _KEEPS]


def _with_weights(product: fx.Node) -> bool:
    """Return True if a factor is a parameter: then the product is a linear layer, and its softmax a router's."""
    return any(_is_parameter(n) for n in product.all_input_nodes)


def _is_parameter(node: fx.Node) -> bool:
    while called(node) in _MOVES | {"transpose", "permute", "t", "getattr"} and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr") and isinstance(value(node), torch.nn.Parameter)


def _of_attention_call(node: fx.Node) -> Iterator[str]:
    """``masked attention``, ``dense_mask`` for a bias whose rows are strided, ``repeat_kv`` for copies of keys or values."""
    given = dict(zip(("query", "key", "value", "attn_mask"), node.args, strict=False)) | node.kwargs
    mask = given.get("attn_mask")
    if mask is not None:
        yield "masked attention"
    if _has_strided_rows(value(mask)):
        yield "dense_mask"
    if any(_is_repeated(given.get(n)) for n in ("key", "value")):
        yield "repeat_kv"


def _has_strided_rows(bias: Any) -> bool:
    if not isinstance(bias, torch.Tensor) or not bias.is_floating_point() or bias.dim() < 2:
        return False
    return bias.shape[-1] > 1 and bias.stride(-1) > 1


def _is_repeated(node: Any) -> bool:
    """Return True if keys are a copy that holds each head several times."""
    copied = False
    end = value(node)
    while isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor) and node.all_input_nodes:
        name, source = called(node), node.all_input_nodes[0]
        few = value(source)
        if name in _REPEATS and isinstance(few, torch.Tensor):
            copied |= name in ("repeat", "repeat_interleave")  # expand alone moves nothing
            return copied and few.numel() < end.numel() and few.shape[0] == end.shape[0]
        if name not in _MOVES:
            return False
        copied |= name in ("reshape", "flatten", "contiguous", "clone")
        node = source
    return False


def value(node: Any) -> Any:
    """Return what a node stands for: Dynamo's fake tensor."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node
