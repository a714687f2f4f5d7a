"""Values of a region of rows: labels, what computes them, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.torch_internals.containers import tree_leaves
from fx_fusion.torch_internals.nodes import is_higher_order

CLASS, FEW, ONE = "class", "few", "one"


@dataclass(frozen=True, order=True)
class Rows:
    """The axes ``first`` to ``last`` (exclusive) of the rows, as one dim."""

    first: int
    last: int


Label = Rows | str


def is_plain_call(node: fx.Node) -> bool:
    """Return True for a call that can be run on tensors without values: of no graph, and of nodes with an example each."""
    return not is_higher_order(node.target) and all(
        n.op != "get_attr" or is_tensor(n) for n in node.all_input_nodes
    ) and not any(example(n) is None for n in node.all_input_nodes)


class Opaque(Exception):
    """The region can't be cut off: the reason, and the node of the graph, once it is known."""

    def __init__(self, reason: str, node: fx.Node | None = None):
        super().__init__(reason)
        self.reason, self.node = reason, node


class Split(Opaque):
    """A view has more row axes than the region: row axis ``axis`` in parts of these sizes."""

    def __init__(self, axis: int, sizes: Sequence[Any]):
        super().__init__("a view splits the rows in another way than the logits have them")
        self.axis, self.sizes = axis, tuple(sizes)


class NoRule(Exception):
    """An op without a rule."""


@dataclass(frozen=True, eq=False)
class Typed:
    """A value of the region: the labels of its dims, and the node of the body that computes it for rows in one dim."""

    labels: tuple[Label, ...]
    node: fx.Node
    reached: bool  # by the logits

    @property
    def has_classes(self) -> bool:
        return CLASS in self.labels

    @property
    def has_rows(self) -> bool:
        return any(isinstance(label, Rows) for label in self.labels)

    @property
    def inner(self) -> tuple[str, ...]:
        """The labels of the dims behind the rows."""
        return tuple(label for label in self.labels if label in (CLASS, FEW))  # type: ignore[misc]

    def position(self, dim: int) -> int:
        """The dim of the body's value that stands for ``dim``."""
        return int(self.has_rows) + sum(label in (CLASS, FEW) for label in self.labels[:dim])


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor that an op below the nodes of the graph made, outside of the region. ``item``: of several results."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None


@dataclass(frozen=True, eq=False)
class Seam:
    """A result of the body, as a tensor of this shape."""

    typed: Typed
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Input:
    """An operand of the body: a node of the graph, or a tensor made of such nodes. ``per_row``: it has rows."""

    source: fx.Node | Made
    typed: Typed
    tensor: Tensor

    @property
    def per_row(self) -> bool:
        return self.typed.has_rows


@dataclass
class Region:
    """The rows of one linear layer's logits.

    Attributes:
        root: the node that makes the logits.
        rows: the sizes of its row axes, of which a dim of the logits may be several.
        selected: the call that takes some of its rows (``[:, :-1]``), if everything else reads what that takes.
        body: a graph of aten ops. Its placeholders are the logits (rows, classes) and the ``inputs``; it returns ``seams``.
        ends: nodes of the graph that are seams.
        rest: nodes that mix rows after a seam inside of one call (``F.kl_div``), as what is made of seams.
        nodes: all nodes of the graph that the region stands for.
        returned: nodes with classes that the graph returns.
        float16: whether values of the body are in float16, whose gradient overflows without its upstream gradient.
        made_by: the node of the graph, or the op below it, that makes a tensor outside of the region.
    """

    root: fx.Node
    rows: tuple[Any, ...]
    body: fx.Graph
    selected: fx.Node | None = None
    inputs: list[Input] = field(default_factory=list)
    seams: list[Seam] = field(default_factory=list)
    ends: dict[fx.Node, Seam] = field(default_factory=dict)
    rest: dict[fx.Node, Made | Seam] = field(default_factory=dict)
    nodes: set[fx.Node] = field(default_factory=set)
    returned: list[fx.Node] = field(default_factory=list)
    float16: bool = False
    made_by: Callable[[Tensor], fx.Node | Made | None] = field(default=lambda tensor: None, repr=False)

    def nodes_below(self, made: Iterable[fx.Node | Made | Seam]) -> dict[fx.Node, None]:
        """Return the nodes of the graph that tensors outside of the region are made of, in the order of a walk."""
        found: dict[fx.Node, None] = {}
        waiting: list[Any] = list(made)
        while waiting:
            item = waiting.pop()
            if isinstance(item, fx.Node):
                found[item] = None
            elif isinstance(item, Made):
                waiting += [self.made_by(t) for t in tree_leaves((item.args, item.kwargs)) if isinstance(t, Tensor)]
        return found
