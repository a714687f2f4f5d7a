"""Find where a graph computes an EvoNorm, and what it is made of: shared by the fusions of S0 and B0.

Group statistics are written with a reshape to groups whose shape no traced function can pin down, so both are read
from the graph: from the node that is only in an EvoNorm (the sigmoid of S0, the maximum of B0) up to the affine end,
and from there down to x.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.dtypes import name, roundings
from fx_fusion.graph.indices import index_of
from fx_fusion.graph.terms import example, is_scalar, is_tensor, same_shape, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary

_SHAPES = ("view", "reshape", "unsqueeze", "getitem", "expand", "expand_as", "flatten", "squeeze")


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
    """The affine transform that is the only user of ``core``, computed in its dtype."""
    product = only_user(view, core, ("mul",))
    total = only_user(view, product, ("add",))
    nodes, dtype = {product, total}, example(core).dtype
    weight = per_channel(view, other_operand(view, product, core), channels, dtype, nodes)
    bias = per_channel(view, other_operand(view, total, product), channels, dtype, nodes)
    computed_in(dtype, product, total)
    return Affine(total, weight, bias, nodes)


def computed_in(dtype: torch.dtype, *nodes: fx.Node) -> None:
    """Raise NotThis unless these nodes have the dtype that the kernel computes them in."""
    for node in nodes:
        if example(node).dtype != dtype:
            found = name(example(node).dtype)
            raise NotThis(node, f"{node.name} is computed in {found}; the kernel computes it in {name(dtype)}")


def casts_to(dtype: torch.dtype, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of the kernel's own dtype: of parameters and deviations, which it rounds too."""
    return frozenset(n for n in nodes if example(n).dtype == dtype)


def rounded_once(path: Sequence[fx.Node], to: torch.dtype) -> None:
    """Raise NotThis unless the casts along ``path`` (from a value to where it is used) round to ``to`` and to nothing
    else."""
    found = roundings([example(n).dtype for n in path])
    if found != roundings([example(path[0]).dtype, to]):
        extra = next((d for d in found if d != to), None)
        what = f"a cast rounds {path[0].name} to {name(extra)}" if extra else f"nothing rounds {path[0].name} to {name(to)}"
        raise NotThis(path[-1], f"{what}; the kernel {'does not' if extra else 'does'}")
    computed_in(to, path[-1])


def only_user(view: View, node: fx.Node, names: tuple[str, ...]) -> fx.Node:
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or view.name(user) not in names:
        found = ", ".join(view.name(u) or u.name for u in node.users) or "nothing"
        raise NotThis(node, f"expected one {' or '.join(names)} to use {node.name}, found {found}")
    return user


def other_operand(view: View, node: fx.Node, one: fx.Node) -> Any:
    rest = [a for a in binary(view, node) if a is not one]
    if len(rest) != 1 or not is_tensor(rest[0]):
        raise NotThis(node, f"expected a tensor beside {one.name}")
    return rest[0]


def per_channel(view: View, node: fx.Node, channels: Any, dtype: torch.dtype, nodes: set[fx.Node]) -> fx.Node:
    """The ``channels`` numbers behind a (1, c, 1, 1) view of them, a cast to ``dtype`` crossed; adds what it crosses and
    nobody else uses. What comes back has c elements, maybe with dims of size 1 around them."""
    shape = example(node).shape
    at = len(shape) - 3
    if at < 0 or not all(statically_known_true(s == (channels if d == at else 1)) for d, s in enumerate(shape)):
        raise NotThis(node, f"{node.name} has shape {tuple(shape)}; expected one number a channel")
    crossed = []
    while (below := _same_numbers(view, node)) is not None:
        crossed.append(node)
        node = below
    rounded_once([node, *reversed(crossed)], dtype)
    nodes.update(n for n in crossed if len(n.users) == 1)  # shared views stay where they are
    return node


def _same_numbers(view: View, node: fx.Node) -> fx.Node | None:
    """Return what ``node`` is a cast of, or a view of that adds or drops dims of size 1 only."""
    below = view.transparent(node)
    if below is None and view.name(node) in _SHAPES and node.args and isinstance(node.args[0], fx.Node):
        plain = is_tensor(node.args[0]) and not view.hides_gradient(node)
        if plain and view.name(node) == "getitem":
            index = index_of(node.args[1], example(node.args[0]).dim())
            plain = index is not None and index.only_slices and not index.cuts
        below = node.args[0] if plain and _squeezed_alike(node.args[0], node) else None
    return below if isinstance(below, fx.Node) and is_tensor(below) else None


def _squeezed_alike(a: fx.Node, b: fx.Node) -> bool:
    """Return True if the shapes differ by dims of size 1 only: then the order of the elements is the same."""
    one, other = ([n for n in example(t).shape if not statically_known_true(n == 1)] for t in (a, b))
    return same_sizes(one, other)


def deviation(view: View, node: fx.Node, x: fx.Node) -> Deviation:
    """Read a standard deviation of x from its last node down, and check that each number ends up where it belongs."""
    chain: list[fx.Node] = []  # from the end down to the variance
    root = total = None
    eps: Any = None
    while True:
        op = view.name(node)
        below: Any = None
        bound = view.arguments_of(node, "sqrt", "pow")
        if root is None and bound is not None and bound.get("exponent", 0.5) == 0.5:
            root, below = node, bound["input"]
        elif root is not None and total is None and op == "add":
            operands = binary(view, node)
            eps = next((o for o in operands if is_scalar(o)), None)
            below = next((o for o in operands if is_tensor(o)), None)
            total = node if eps is not None else None
        elif total is not None and view.term(node).op == "var":
            break
        else:
            below = view.transparent(node)
            if below is None and op in _SHAPES and node.args:
                below = node.args[0]
        if not isinstance(below, fx.Node) or not is_tensor(below):
            wanted = "a square root" if root is None else "a variance plus eps" if total is None else "a variance"
            raise NotThis(node, f"expected {wanted}, found {op or node.name}")
        chain.append(node)
        node = below
    var, term = node, view.term(node)
    dims, _, correction = term.attrs
    nodes = {var, *chain}
    assert root is not None
    computed_in(torch.float32, var, total, root)
    rounded_once([var, *reversed(chain[chain.index(root) :])], torch.float32)
    rounded_once([root, *reversed(chain[: chain.index(root)])], example(x).dtype)
    reduced = term.operands[0]
    below, path = reduced, [reduced]
    while not view.same_value(below, x):
        step = view.transparent(below)
        if step is None and view.name(below) in ("view", "reshape"):
            step = below.args[0]
        if step is None:
            raise NotThis(below, f"{below.name} is not x")
        nodes.add(below)
        below = step
        path.append(below)
    if rounds := roundings([example(n).dtype for n in reversed(path)]):
        raise NotThis(reduced, f"a cast rounds x to {name(rounds[0])} before its variance; the kernel does not")
    nodes.update(n for n in view.edge(below).crossed if len(n.users) == 1)
    groups = None
    whole = example(x).shape
    if not same_shape(example(reduced), example(x)):
        shape = example(reduced).shape
        groups = shape[1] if len(shape) > 2 else None
        fits = statically_known_true(shape[0] == whole[0]) and isinstance(groups, int)
        if not fits or dims != tuple(range(2 - len(shape), 0)):
            raise NotThis(var, f"the variance is over {dims} of {tuple(shape)}; expected whole groups of an image")
    _ends_in_place(view, [var, *reversed(chain)], example(reduced).shape, dims, whole, groups)
    return Deviation(x, var, eps, correction, groups, dims, nodes)


def _ends_in_place(view: View, path: list[fx.Node], reduced: Any, dims: Any, whole: Any, groups: int | None) -> None:
    """From the variance up: dims of size 1 come and go, then one expand along the reduced dims; a group's numbers are
    then laid out as x is. Anything else may put a number beside another channel or image."""
    rank = len(reduced)
    kept = [1 if d - rank in dims else n for d, n in enumerate(reduced)]  # the shape with keepdim
    full = False
    for below, node in itertools.pairwise(path):
        shape = example(node).shape
        if same_shape(example(below), example(node)) and view.name(node) != "getitem":
            continue
        if full:
            laid_out = groups is not None and view.name(node) in ("view", "reshape") and same_sizes(shape, whole)
            if not laid_out:
                raise NotThis(node, f"{node.name} rearranges the deviations")
        elif view.name(node) in ("expand", "expand_as"):
            aligned = [1] * (rank - example(below).dim()) + list(example(below).shape)
            if not same_sizes(aligned, kept) or not same_sizes(shape, reduced):
                raise NotThis(node, f"{node.name} expands {tuple(example(below).shape)} to {tuple(shape)}")
            full = True
        elif _same_numbers(view, node) is None:
            raise NotThis(node, f"{node.name} rearranges the deviations")
    last = list(example(path[-1]).shape)
    if full or groups is not None:
        if not full or not same_sizes(last, whole):
            raise NotThis(path[-1], f"the deviations of groups end as {tuple(last)}; expected the shape of x")
    elif not same_sizes([1] * (rank - len(last)) + last, kept):
        raise NotThis(path[-1], f"the deviations end as {tuple(last)}, which does not stand for {tuple(kept)}")
