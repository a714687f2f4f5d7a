"""Where a graph computes an EvoNorm, and what it is made of: shared by the fusions of S0 and B0.

Group statistics are written with a reshape to groups whose shape no traced function can pin down, so both are read
from the graph: from the node that is only in an EvoNorm (the sigmoid of S0, the maximum of B0) up to the affine end,
and from there down to x.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.canonicalize import View, is_scalar, is_tensor, same_shape, value

_SHAPES = ("view", "reshape", "unsqueeze", "getitem", "expand", "expand_as", "flatten", "view_as", "squeeze")


class NotThis(Exception):
    """The graph does something else here: at ``node``, for this reason."""

    def __init__(self, node: Any, reason: str):
        super().__init__(reason)
        self.node = node


@dataclass
class Affine:
    """``core * weight + bias`` with one weight and bias a channel; ``root`` is the sum."""

    root: fx.Node
    weight: fx.Node
    bias: fx.Node
    nodes: set[fx.Node] = field(default_factory=set)


@dataclass
class Deviation:
    """``sqrt(var(x, dims) + eps)``, expanded to the shape of x."""

    x: fx.Node
    var: fx.Node
    eps: Any
    correction: int
    groups: int | None  # None: var is over whole dims of x
    dims: tuple[int, ...]
    nodes: set[fx.Node]


def affine_end(view: View, core: fx.Node, channels: Any) -> Affine:
    """The affine transform that is the only user of ``core``."""
    product = only_user(view, core, ("mul",))
    total = only_user(view, product, ("add",))
    nodes = {product, total}
    weight = per_channel(view, other_operand(product, core), channels, nodes)
    bias = per_channel(view, other_operand(total, product), channels, nodes)
    return Affine(total, weight, bias, nodes)


def only_user(view: View, node: fx.Node, names: tuple[str, ...]) -> fx.Node:
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or view.name(user) not in names:
        found = ", ".join(view.name(u) or u.name for u in node.users) or "nothing"
        raise NotThis(node, f"expected one {' or '.join(names)} to use {node.name}, found {found}")
    return user


def other_operand(node: fx.Node, one: fx.Node) -> Any:
    rest = [a for a in node.args if a is not one]
    if len(rest) != 1 or not is_tensor(rest[0]):
        raise NotThis(node, f"expected a tensor beside {one.name}")
    return rest[0]


def per_channel(view: View, node: fx.Node, channels: Any, nodes: set[fx.Node]) -> fx.Node:
    """The vector of ``channels`` numbers behind a (1, c, 1, 1) view of it, casts crossed; adds what it crosses."""
    shape = value(node).shape
    at = len(shape) - 3
    if at < 0 or not all(statically_known_true(s == (channels if d == at else 1)) for d, s in enumerate(shape)):
        raise NotThis(node, f"{node.name} has shape {tuple(shape)}; expected one number a channel")
    crossed = []
    while value(node).dim() != 1:
        below = view.transparent(node) or (node.args[0] if view.name(node) in _SHAPES and node.args else None)
        if not isinstance(below, fx.Node) or not is_tensor(below):
            return _as_parameter(node, nodes, [])
        crossed.append(node)
        node = below
    while (below := view.transparent(node)) is not None and value(below).dim() == 1:
        crossed.append(node)
        node = below
    if not statically_known_true(value(node).shape[0] == channels):
        raise NotThis(node, f"{node.name} has {value(node).shape[0]} elements for {channels} channels")
    return _as_parameter(node, nodes, crossed)


def _as_parameter(node: fx.Node, nodes: set[fx.Node], crossed: list[fx.Node]) -> fx.Node:
    nodes.update(n for n in crossed if len(n.users) == 1)  # shared views stay where they are
    return node


def deviation(view: View, node: fx.Node, x: fx.Node) -> Deviation:
    """Read a standard deviation of x, from its last node down."""
    nodes: set[fx.Node] = set()
    node = _through(view, node, nodes)
    if view.name(node) not in ("sqrt", "pow") or (view.name(node) == "pow" and node.args[1] != 0.5):
        raise NotThis(node, f"expected a square root, found {view.name(node) or node.name}")
    nodes.add(node)
    total = _through(view, node.args[0], nodes)
    if view.name(total) != "add":
        raise NotThis(total, f"expected a variance plus eps, found {view.name(total) or total.name}")
    nodes.add(total)
    operands = [view.constant(a) for a in total.args]
    eps = next((o for o in operands if is_scalar(o)), None)
    var = next((o for o in operands if is_tensor(o)), None)
    if eps is None or var is None or len(operands) != 2:
        raise NotThis(total, "expected a variance plus eps")
    var = _through(view, var, nodes)
    term = view.term(var)
    if term.op != "var":
        raise NotThis(var, f"expected a variance, found {term.op}")
    nodes.add(var)
    dims, _, correction = term.attrs
    reduced, below = value(term.operands[0]), term.operands[0]
    while view.edge(below).base is not view.edge(x).base:
        step = view.transparent(below)
        if step is None and view.name(below) in ("view", "reshape"):
            step = below.args[0]
        if step is None:
            raise NotThis(below, f"{below.name} is not x")
        nodes.add(below)
        below = step
    nodes.update(n for n in view.edge(below).crossed if len(n.users) == 1)
    groups = None
    if reduced.dim() != value(x).dim() or not same_shape(reduced, value(x)):
        groups = reduced.shape[1]
        fits = statically_known_true(reduced.shape[0] == value(x).shape[0]) and isinstance(groups, int)
        if not fits or dims != tuple(range(2 - reduced.dim(), 0)):
            raise NotThis(var, f"the variance is over {dims} of {tuple(reduced.shape)}; expected whole groups of an image")
    return Deviation(x, var, eps, correction, groups, dims, nodes)


def _through(view: View, node: Any, nodes: set[fx.Node]) -> fx.Node:
    """Down through casts and through what repeats or reshapes a statistic."""
    while isinstance(node, fx.Node):
        below = view.transparent(node)
        if below is None and view.name(node) in _SHAPES and node.args:
            below = node.args[0]
        if not isinstance(below, fx.Node) or not is_tensor(below):
            return node
        nodes.add(node)
        node = below
    raise NotThis(None, f"{node} is not a tensor")
