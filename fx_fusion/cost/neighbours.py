"""Borders between sites and what Inductor computes in one kernel with them.

Inductor computes pointwise ops and norms in one kernel where no product lies between them, and keeps the values between them
in registers. A fused site is a kernel of its own: a value at its border is written to memory and read again, and so is its
gradient. Examples: LayerScale or dropout in front of a norm, the modulation of a diffusion transformer behind it, RoPE after
a norm of queries, the bias of a convolution in front of a norm of its channels.

A border between two sites costs the same whether one of them is fused or both. Sites are therefore chosen together: as a
project selection, where the gain of a site pays for all of its borders (Picard 1976, "Maximal closure of a graph").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx
import torch
from torch import fx

from fx_fusion.fusion.match import Match
from fx_fusion.graph.effects import entered
from fx_fusion.graph.size_hints import bytes_of, elements, trained
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View

_POINTWISE = frozenset((
    "add", "sub", "mul", "div", "pow", "neg", "sqrt", "rsqrt", "square", "reciprocal", "sigmoid", "tanh", "erf", "exp",
    "log", "silu", "gelu", "relu", "maximum", "clamp", "dropout", "masked_fill", "where", "cat",
))  # fmt: skip
_IN_REGISTERS = _POINTWISE | {"layer_norm", "native_layer_norm", "rms_norm", "group_norm"}
_SUMS = frozenset(("add", "sub"))  # their gradient is the one that comes in: nothing is computed for it
_PERMUTATIONS = ("permute", "transpose", "movedim")
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_PRODUCTS = ("linear", "addmm", "matmul", "mm", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
_PARTS = ("getitem", "narrow", "chunk", "split", "unbind")
_VIEWS = (*_RESHAPES, *_PERMUTATIONS, *_PARTS, "t", "mT", "expand", "expand_as", "broadcast_to", "contiguous")
_SMALL = 16  # times smaller than a site's result: parameters, tables of cos and sin


@dataclass(frozen=True)
class Border:
    """A value that a kernel of Inductor's keeps to itself, and that is in memory once a site at one of its ends is fused.

    Attributes:
        bytes: that are written and read for it, forward and backward.
        launches: kernels more than Inductor's, forward and backward.
        ends: the numbers of the sites that make or read it, with the names of the ops that Inductor computes beside each.
        device: where it is.
    """

    bytes: float
    launches: int
    ends: Mapping[int, str]
    device: torch.device


def borders(sites: Sequence[Match], view: View) -> list[Border]:
    """Return the borders of sites, no node of which is in two of them."""
    owner = {node: i for i, match in enumerate(sites) for node in match.nodes}
    values = dict.fromkeys(value for match in sites for value in _values(match, view, owner))
    found = [border for value in values if (border := _border(value, sites, view, owner)) is not None]
    return found + [border for i, match in enumerate(sites) for border in _of_convolutions(i, match, view)]


def kept(gains: Sequence[float], costs: Sequence[float], ends: Sequence[Mapping[int, str]]) -> set[int]:
    """Return the sites that Inductor should keep, so that gains less the costs of the borders of fused sites are highest.

    Args:
        gains: what each site gains if it is fused, its borders aside; infinity where it is not known.
        costs: what each border costs as soon as a site at one of its ends is fused.
        ends: the sites of each border.
    """
    graph = networkx.DiGraph()
    graph.add_nodes_from(("kept", "fused"))
    for i, cost in enumerate(costs):
        graph.add_edge("kept", ("border", i), capacity=cost)
        for site in ends[i]:
            graph.add_edge(("border", i), ("site", site))
            graph.add_edge(("site", site), "fused", capacity=max(gains[site], 0.0))
    inductor, _ = networkx.minimum_cut(graph, "kept", "fused")[1]  # the larger one of equals
    return {node[1] for node in inductor if node[0] == "site"}


def _values(match: Match, view: View, owner: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """What a site reads and makes, without what is much smaller than its result."""
    if is_tensor(match.root):
        for node in (*match.operands.values(), *match.outputs):
            if is_tensor(node) and _SMALL * elements(example(node)) > elements(example(match.root)):
                yield _below(node, view, owner)


def _border(value: fx.Node, sites: Sequence[Match], view: View, owner: Mapping[fx.Node, int]) -> Border | None:
    """Return the border that a value is; None where a product or the caller makes it, or nothing beside it reads it."""
    maker = owner.get(value)
    if view.name(_below(value, view, {})) not in _IN_REGISTERS:
        return None
    made = sites[maker].nodes if maker is not None else frozenset((value,))
    readers = [(user, size) for user, size in _readers(value, view, owner) if user not in made]
    beside = [(user, size) for user, size in readers if _in_one_kernel(made, user, sites, view, owner)]
    ends = {owner[user]: _name(value, sites, view, owner) for user, _ in beside if user in owner}
    if maker is not None and beside:
        ends[maker] = _name(beside[0][0], sites, view, owner)
    if not ends:
        return None
    stored = len(beside) < len(readers)
    passes = 1 if stored else 2
    with entered(view.effects.region[value]):
        backward = _gradient_passes(value, stored, [user for user, _ in beside], sites, view, owner)
    size = min(bytes_of(example(value)), sum(size for _, size in beside))
    return Border((passes + backward) * size, 1 + (backward > 0), ends, example(value).device)


def _gradient_passes(
    value: fx.Node, stored: bool, beside: Sequence[fx.Node], sites: Sequence[Match], view: View, owner: Mapping[fx.Node, int]
) -> int:
    """Return how often the gradient of a value is written and read besides what Inductor's kernels do."""
    if not trained(example(value)) or all(user not in owner and view.name(user) in _SUMS for user in beside):
        return 0
    if value not in owner and not stored and view.name(value) in _SUMS:  # it is that of the addends too, thus written anyway
        addends = (_below(node, view, {}) for node in value.all_input_nodes if is_tensor(node) and trained(example(node)))
        return int(any(view.name(addend) in _IN_REGISTERS - _SUMS for addend in addends))
    return 1 if any(_has_several_inputs(sites[owner[user]]) for user in beside if user in owner) else 2


def _name(node: fx.Node, sites: Sequence[Match], view: View, owner: Mapping[fx.Node, int]) -> str:
    return sites[owner[node]].fusion if node in owner else str(view.name(node))


def _has_several_inputs(match: Match) -> bool:
    """Return True if the gradient of one input of the site is that of another too, which Inductor stores as well."""
    size = elements(example(match.root))
    return sum(is_tensor(node) and elements(example(node)) == size for node in match.inputs.values()) > 1


def _in_one_kernel(
    made: frozenset[fx.Node], user: fx.Node, sites: Sequence[Match], view: View, owner: Mapping[fx.Node, int]
) -> bool:
    """Return True if Inductor computes ``user`` in the kernel of ``made``: no product of what is made leads to it."""
    if view.name(user) not in _IN_REGISTERS:
        return False
    reading = sites[owner[user]].nodes if user in owner else frozenset((user,))
    first = min(view.order.get(node, 0) for node in made)
    waiting = [(source, False) for node in reading for source in node.all_input_nodes if source not in reading]
    seen = set(waiting)
    while waiting:
        node, behind = waiting.pop()
        if node in made:
            if behind:
                return False
            continue
        if view.order.get(node, 0) < first:
            continue
        behind = behind or _is_of_a_library(node, view)
        new = {(source, behind) for source in node.all_input_nodes} - seen
        seen |= new
        waiting += new
    return True


def _is_of_a_library(node: fx.Node, view: View) -> bool:
    return is_tensor(node) and (view.name(node) is None or view.name(node) in _PRODUCTS)


def _of_convolutions(number: int, match: Match, view: View) -> Iterator[Border]:
    """Yield what a convolution costs whose permuted result a site reads: its bias and the layout of its gradient."""
    for node in match.inputs.values():
        alike = is_tensor(node) and elements(example(node)) == elements(example(match.root))
        found = _permuted_convolution(node, view) if alike else None
        if found is None:
            continue
        convolution, bias = found
        with entered(view.effects.region[convolution]):
            backward = trained(example(convolution))
        passes = bias + 2 * backward  # the gradient is copied, to lie as the result does
        op = "bias of a convolution" if bias else "gradient's layout"
        if passes:
            size, device = bytes_of(example(convolution)), example(convolution).device
            yield Border(passes * size, bias + backward, {number: op}, device)


def _below(node: fx.Node, view: View, owner: Mapping[fx.Node, int], views: Sequence[str] = _VIEWS) -> fx.Node:
    """Return what computes the values of a node: down through views and what changes no value, up to a node of a site."""
    while node not in owner:
        below = view.transparent(node)
        if below is None and (bound := view.arguments_of(node, *views)) is not None:
            below = bound.get("input", bound.get("tensor"))
            if any(is_tensor(source) and source is not below for source in node.all_input_nodes):
                return node  # picked by an index
        if not isinstance(below, fx.Node):
            return node
        node = below
    return node


def _permuted_convolution(node: fx.Node, view: View) -> tuple[fx.Node, bool] | None:
    """The convolution whose permuted result a node is, and whether it adds a bias, which Inductor does behind it."""
    below, permuted = _below(node, view, {}, _RESHAPES), False
    while (bound := view.arguments_of(below, *_PERMUTATIONS)) is not None:
        below, permuted = _below(bound["input"], view, {}, _RESHAPES), True
    if not permuted or below.target not in _CONVOLUTIONS:
        return None
    return below, any(map(is_tensor, (*below.args[2:3], below.kwargs.get("bias"))))


def _readers(value: fx.Node, view: View, owner: Mapping[fx.Node, int]) -> list[tuple[fx.Node, float]]:
    """Return what reads a value, directly or through views and what changes no value, and how many bytes of it."""
    found: dict[fx.Node, float] = {}
    waiting = [(value, user) for user in value.users]
    while waiting:
        source, user = waiting.pop()
        if _below(user, view, {value: 0}) is value:
            waiting += [(user, further) for further in user.users]
        elif is_tensor(source):
            found[user] = found.get(user, 0) + bytes_of(example(source))
    return list(found.items())
