"""Find the part of a graph that treats each row of logits by itself.

Between a language-model head and the first op that mixes rows (tokens), a loss reads one row at a time. ``region_of``
follows the logits of a linear layer through the nodes that read them, below autograd, and labels the dims of each value:

    Rows(a, b)   the axes a..b of the rows of the logits, as one dim
    CLASS        the classes
    FEW          a few numbers a row: the k of a top-k, a stack of two
    ONE          size 1

Each rule also writes its op for rows in one dim: (rows, few ..., classes). These ops are the *body* of the region. It has no
shape of the batch in it, so it runs on any chunk of rows. A value without classes that an op without a rule reads is a
*seam*: the body returns it, and what follows stays an ordinary graph. Where a value with classes meets such an op, the region
is opaque.

Values that the logits do not reach (labels, a teacher's logits) are inputs of the body. Their labels follow from the first
op that combines them with a labeled value. Tensors as large as the logits are followed backwards: what makes them is part of
the body where the rules allow it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.effects import entered, storages
from fx_fusion.graph.size_hints import expected
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.torch_internals.containers import map_nodes, tree_leaves, tree_map
from fx_fusion.torch_internals.dispatch import DispatchMode, decomposed
from fx_fusion.torch_internals.fakes import fake_mode_of, without_guards, without_tracing_context

aten = torch.ops.aten
CLASS, FEW, ONE = "class", "few", "one"


@dataclass(frozen=True, order=True)
class Rows:
    """The axes ``first`` to ``last`` (exclusive) of the rows, as one dim."""

    first: int
    last: int


Label = Rows | str


class Opaque(Exception):
    """The region can't be cut off: the reason, and the node of the graph, once it is known."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason
        self.node: fx.Node | None = None


class _NoRule(Exception):
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
        rows: the sizes of its row axes.
        body: a graph of aten ops. Its placeholders are the logits (rows, classes) and the ``inputs``; it returns ``seams``.
        ends: nodes of the graph that are seams.
        rest: nodes that mix rows after a seam inside of one call (``F.kl_div``), as what is made of seams.
        nodes: all nodes of the graph that the region stands for.
        made_by: the node of the graph, or the op below it, that makes a tensor outside of the region.
    """

    root: fx.Node
    rows: tuple[Any, ...]
    body: fx.Graph
    inputs: list[Input] = field(default_factory=list)
    seams: list[Seam] = field(default_factory=list)
    ends: dict[fx.Node, Seam] = field(default_factory=dict)
    rest: dict[fx.Node, Made | Seam] = field(default_factory=dict)
    nodes: set[fx.Node] = field(default_factory=set)
    made_by: Callable[[Tensor], fx.Node | Made | None] = field(default=lambda tensor: None, repr=False)


def region_of(view: View, root: fx.Node) -> Region:
    """Return the region of the logits that ``root`` makes. Raises Opaque, with the node that decided."""
    return _Finder(view, root).region


# -- along the graph ------------------------------------------------------------------------------------------------------
class _Finder:
    """Runs the nodes that read the logits, on fake tensors, and sorts them: inside, at the seam, behind it."""

    def __init__(self, view: View, root: fx.Node):
        self.view = view
        logits = example(root)
        self.reader = _Reader(logits)
        self.region = Region(root, tuple(logits.shape[:-1]), self.reader.body, made_by=self.reader.made_by)
        self.values: dict[fx.Node, Any] = {root: logits}  # of nodes inside
        self.after: set[fx.Node] = set()  # nodes that are computed from seams
        self.classes = logits.shape[-1]
        for node in list(view.graph.nodes):
            if node is root or node.op in ("output", "get_attr"):
                continue
            reads_logits = any(n in self.values and self._is_reached(n) for n in node.all_input_nodes)
            try:
                if node.op == "placeholder" or not reads_logits:
                    self._feed(node)
                else:
                    self._follow(node)
            except Opaque as opaque:
                opaque.node = opaque.node or node
                raise
        self._close()

    def _is_reached(self, node: fx.Node) -> bool:
        return any(typed.reached for typed in self._typed(self.values[node]))

    def _typed(self, value: Any) -> Iterator[Typed]:
        found = (self.reader.typed.get(id(t)) for t in tree_leaves(value) if isinstance(t, Tensor))
        return (typed for typed in found if typed is not None)

    def _feed(self, node: fx.Node) -> None:
        """Take in a node that the logits do not reach, if it makes a tensor as large as they are, or reads one."""
        tensor = example(node)
        if any(n in self.after for n in node.all_input_nodes):
            self.after.add(node)
            return
        if not self._is_large(tensor) and not any(n in self.values for n in node.all_input_nodes):
            return
        value = None
        if node.op != "placeholder" and self.view.is_pure(node):
            try:
                value = self._run(node)
            except Opaque:
                value = None
        known = [] if value is None else list(self._typed(value))
        if known and len(known) == len([t for t in tree_leaves(value) if isinstance(t, Tensor)]):
            self.values[node] = value
        elif self._is_large(tensor):
            labels = self.reader.labels_like_logits(tensor)
            if labels is not None:
                made = self.reader.outside.get(id(value)) if isinstance(value, Tensor) else None
                self.values[node] = self.reader.take(tensor, labels, made or node)

    def _is_large(self, tensor: Any) -> bool:
        large = isinstance(tensor, Tensor) and tensor.dim() >= 2
        return large and statically_known_true(tensor.shape[-1] == self.classes)

    def _follow(self, node: fx.Node) -> None:
        """Run a node that reads values of the region."""
        has_classes = any(t.has_classes for n in node.all_input_nodes for t in self._typed(self.values.get(n)))
        if any(n in self.after for n in node.all_input_nodes) and not has_classes:
            self.after.add(node)
            return
        if any(n in self.after for n in node.all_input_nodes):
            raise Opaque("a value with classes meets a number that was made of all rows")
        before = len(self.region.seams)
        try:
            value = self._run(node)
        except Opaque:
            if has_classes:
                raise
            del self.region.seams[before:]
            self.after.add(node)
            return
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        typed = list(self._typed(value))
        if not tensors:
            return  # a size: it needs no values
        if len(typed) == len(tensors):
            self.values[node] = self.reader.detached(value) if self._drops_gradients(node) else value
            self.region.nodes.add(node)
        elif not typed and len(tensors) == 1 and isinstance(value, Tensor):
            self.region.rest[node] = self.reader.made(value)
            self.region.nodes.add(node)
            self.after.add(node)
        elif not has_classes:
            self.after.add(node)
        else:
            raise Opaque("only some of its results treat rows one by one")

    def _drops_gradients(self, node: fx.Node) -> bool:
        region = self.view.effects.region
        return not region[node][0] and region[self.region.root][0]

    def _run(self, node: fx.Node) -> Any:
        reader = self.reader

        def operand(n: fx.Node) -> Any:
            if n in self.values:
                return self.values[n]
            known = example(n)
            if isinstance(known, Tensor):
                reader.sources[id(known)] = n
            return known

        args, kwargs = map_nodes(operand, (node.args, node.kwargs))
        target: Callable[..., Any] = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target  # type: ignore[assignment]
        mode = fake_mode_of(example(self.region.root))
        if mode is None or node.op not in ("call_method", "call_function"):
            raise Opaque(f"{node.name} is no call of a function")
        around = self.view.effects.region[node]
        reader.region = self.region
        try:
            with entered((False, *around[1:])), mode, without_guards(mode), without_tracing_context(), reader:
                return target(*args, **kwargs)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise Opaque(f"{node.name} could not be run on tensors without values: {str(error).splitlines()[0]}") from error

    def _close(self) -> None:
        """Every value that is read outside is a seam."""
        region = self.region
        if not region.nodes:
            raise Opaque("nothing that treats rows one by one reads the logits")
        for node in [region.root, *region.nodes]:
            if node in region.rest or not self._is_reached(node):
                continue
            if all(user in region.nodes for user in node.users):
                continue
            value = self.values[node]
            if any(t.has_classes for t in self._typed(value)):
                outside = next(user for user in node.users if user not in region.nodes)
                what = "is returned by the graph" if outside.op == "output" else f"is read by {outside.name}"
                if not _asks_for_a_size(outside):
                    opaque = Opaque(f"{node.name} {what}, as a whole")
                    opaque.node = node
                    raise opaque
                continue
            if isinstance(value, Tensor):
                region.ends[node] = self.reader.seam(value)
            elif any(user not in region.nodes for user in node.users):
                raise Opaque(f"{node.name} has several results that are read outside")
        self.reader.body.output(tuple(seam.typed.node for seam in region.seams))
        used = {n for n in self.reader.body.nodes if n.users}
        region.inputs = [given for given in self.reader.inputs if given.typed.node in used]
        for given in self.reader.inputs:
            if given not in region.inputs:
                self.reader.body.erase_node(given.typed.node)
        _remove_dead(self.reader.body)
        self._check_writes()

    def _check_writes(self) -> None:
        effects = self.view.effects
        read = {given.source for given in self.region.inputs if isinstance(given.source, fx.Node)}
        involved = {*self.values, *read, self.region.root}
        memory = {storage for node in involved for storage in storages(node)}
        for write in effects.writes:
            written = effects.mutated(write)
            if any(n in involved or memory.intersection(storages(n)) for n in written):
                opaque = Opaque(f"{write.name} changes a value in place")
                opaque.node = write
                raise opaque


def _asks_for_a_size(node: fx.Node) -> bool:
    return not is_tensor(node) and isinstance(example(node), (int, torch.SymInt, torch.Size))


def _remove_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


# -- below the nodes ------------------------------------------------------------------------------------------------------
_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.unsqueeze.default,
}  # fmt: skip
_SAME = {aten.alias.default, aten.clone.default, aten.lift_fresh.default, aten.contiguous.default}
# Reductions: the place of their dim among the arguments. ``keepdim`` follows.
_REDUCTIONS = {
    aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.amax.default: 1, aten.amin.default: 1, aten.logsumexp.default: 1,
    aten.argmax.default: 1, aten.argmin.default: 1, aten.max.dim: 1, aten.min.dim: 1, aten.any.dim: 1, aten.all.dim: 1,
    aten.prod.dim_int: 1, aten.linalg_vector_norm.default: 2,
}  # fmt: skip
_OF_ALL = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
# Ops along one dim that keep it: the place of the dim.
_ALONG = {
    aten._log_softmax.default: 1, aten._softmax.default: 1, aten.cumsum.default: 1, aten.logcumsumexp.default: 1,
    aten.sort.default: 1, aten.topk.default: 2, aten.flip.default: 1,
}  # fmt: skip
_FILLS = {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default}
_WITHOUT_A_PLACE = ("memory_format", "layout", "device", "pin_memory")


class _Reader(DispatchMode):
    """Labels what ops make of labeled values, and writes the body."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.shape = tuple(logits.shape)
        self.body = fx.Graph()
        self.typed: dict[int, Typed] = {}
        self.outside: dict[int, Made | Seam] = {}
        self.sources: dict[int, fx.Node] = {}  # nodes of the graph, by their example
        self.inputs: list[Input] = []
        self.region: Region
        self._alive: list[Tensor] = []  # an id stands for a tensor as long as that lives
        self._taken: dict[Any, Typed] = {}
        labels = self.labels_like_logits(logits)
        if labels is None or not any(isinstance(label, Rows) for label in labels):
            raise Opaque("there is one row")
        self._note(logits, labels, self.body.placeholder("logits"), reached=True)

    # -- values
    def labels_like_logits(self, tensor: Tensor) -> tuple[Label, ...] | None:
        """Return labels for a tensor (.., classes) whose dims are those of the logits, or of their last dims."""
        offset = len(self.shape) - tensor.dim()
        if offset < 0:
            return None
        labels: list[Label] = []
        for i, size in enumerate(tensor.shape[:-1]):
            if statically_known_true(size == 1):
                labels.append(ONE)
            elif statically_known_true(size == self.shape[i + offset]):
                labels.append(Rows(i + offset, i + offset + 1))
            else:
                return None
        return (*labels, CLASS)

    def made(self, tensor: Tensor) -> Made | Seam:
        """Return how a tensor outside of the region is made."""
        return self.outside[id(tensor)]

    def made_by(self, tensor: Tensor) -> fx.Node | Made | None:
        """Return what makes a tensor outside of the region."""
        return self.sources.get(id(tensor)) or self.outside.get(id(tensor))

    def take(self, tensor: Tensor, labels: Sequence[Label], source: fx.Node | Made) -> Tensor:
        """Make a tensor from outside an input of the body, with these labels; returns it."""
        alias = tensor.detach() if id(tensor) in self.typed else tensor
        self._adopt(alias, tuple(labels), source)
        typed = self._taken[id(alias), tuple(labels)]
        return self._note(alias, typed.labels, typed.node, reached=False)

    def detached(self, value: Any) -> Any:
        """Return values of the region without their gradient."""

        def detach(tensor: Any) -> Any:
            known = self.typed.get(id(tensor)) if isinstance(tensor, Tensor) else None
            if known is None:
                return tensor
            return self._note(tensor.detach(), known.labels, self._emit(aten.detach.default, (known.node,)), known.reached)

        return tree_map(detach, value)

    def seam(self, tensor: Tensor) -> Seam:
        """Return the seam of a value without classes. Raises Opaque where its dims are not the rows in order."""
        typed = self.typed[id(tensor)]
        for seam in self.region.seams:
            if seam.tensor is tensor:
                return seam
        rows = [label for label in typed.labels if isinstance(label, Rows)]
        covered = [axis for label in rows for axis in range(label.first, label.last)]
        needed = [i for i, size in enumerate(self.shape[:-1]) if not statically_known_true(size == 1)]
        kinds = [isinstance(label, Rows) for label in typed.labels if label != ONE]
        ones = all(statically_known_true(n == 1) for n, label in zip(tensor.shape, typed.labels, strict=True) if label == ONE)
        if typed.has_classes or covered != needed or kinds != sorted(kinds, reverse=True) or not ones:
            raise Opaque("a value is read outside whose dims are not the rows of the logits in their order")
        self.region.seams.append(Seam(typed, tensor))
        return self.region.seams[-1]

    def _note(self, tensor: Tensor, labels: Sequence[Label], node: fx.Node, reached: bool) -> Tensor:
        self.typed[id(tensor)] = Typed(tuple(labels), node, reached)
        self._alive.append(tensor)
        return tensor

    def _emit(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
        if any(isinstance(item, (torch.SymInt, torch.SymFloat)) for item in tree_leaves((args, kwargs))):
            raise Opaque("a size that changes is part of the arithmetic")
        return self.body.call_function(op, tuple(args), kwargs or {})

    def _adopt(self, tensor: Tensor, labels: tuple[Label, ...], source: fx.Node | Made | None = None) -> Typed:
        """Return an operand from outside with these labels, as an input of the body."""
        key = id(tensor), labels
        if key not in self._taken:
            source = source or self.made_by(tensor)
            if source is None:
                raise Opaque("an operand comes from nowhere")
            if isinstance(source, Made):
                if self._is_made_of_seams(source):
                    raise Opaque("a value of each row meets a number that was made of all rows")
                inside = self._pulled(source, tensor, labels)
                if inside is not None:
                    self._taken[key] = inside
                    self._alive.append(tensor)
                    return inside
            typed = Typed(labels, self.body.placeholder(f"input_{len(self.inputs)}"), reached=False)
            self._alive.append(tensor)
            self.inputs.append(Input(source, typed, tensor))
            self._taken[key] = typed
        return self._taken[key]

    def _pulled(self, made: Made, tensor: Tensor, labels: tuple[Label, ...]) -> Typed | None:
        """Return a tensor (rows, classes) that an elementwise op makes, computed in the body; None for another one."""
        if CLASS not in labels or not any(isinstance(label, Rows) for label in labels) or made.item is not None:
            return None
        if torch.Tag.pointwise not in made.op.tags and made.op is not aten._to_copy.default:
            return None
        nodes: dict[int, fx.Node] = {}
        for operand in tree_leaves((made.args, made.kwargs)):
            if isinstance(operand, Tensor):
                nodes[id(operand)] = self._aligned(operand, labels, self._adopt(operand, _broadcast(operand, labels)))
        return Typed(labels, self._emit_with(made.op, made.args, made.kwargs, nodes), reached=False)

    def _is_made_of_seams(self, made: Made) -> bool:
        operands = tree_leaves((made.args, made.kwargs))
        below = (self.outside.get(id(t)) for t in operands if isinstance(t, Tensor) and id(t) not in self.sources)
        return any(isinstance(o, Seam) for o in operands) or any(m is not None and self._is_made_of_seams(m) for m in below)

    # -- ops
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.prim.device.default:
            return args[0].device
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and id(t) in self.typed]
        if not known:
            return self._outside(op, args, kwargs)
        if op._schema.is_mutable:
            raise Opaque(f"{op.name()} changes a value in place")
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise Opaque(f"{op.name()} draws random numbers")
        if any(t.dtype == torch.float64 for t in known):
            raise Opaque("float64 is Inductor's")
        try:
            return self._rule(op, args, kwargs)
        except _NoRule:
            pass
        found = decomposed(op, args, kwargs, self, composite_only=not any(self.typed[id(t)].has_classes for t in known))
        if found is not NotImplemented:
            return found
        return self._outside(op, args, kwargs)

    def _outside(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op outside of the region. Values of the region that it reads are seams."""

        def read(item: Any) -> Any:
            typed = self.typed.get(id(item)) if isinstance(item, Tensor) else None
            if typed is None:
                return item
            if typed.has_classes or not typed.reached:
                raise Opaque(f"{op.name()} reads classes of several rows, or has no rule")
            return self.seam(item)

        if op._schema.is_mutable:
            raise Opaque(f"{op.name()} changes a value in place")
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise Opaque(f"{op.name()} draws random numbers")
        recorded, words = tree_map(read, (args, kwargs))
        result = op(*args, **kwargs)
        for i, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(tensor, Tensor) and id(tensor) not in self.sources:
                self.outside[id(tensor)] = Made(op, recorded, words, i if isinstance(result, (tuple, list)) else None)
                self._alive.append(tensor)
        return result

    def _rule(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op is aten.stack.default:
            return self._stack(args, kwargs)
        if torch.Tag.pointwise in op.tags or op is aten._to_copy.default:
            return self._pointwise(op, args, kwargs)
        first = args[0] if args else None
        if op in _FILLS:
            return self._filled(op, args, kwargs)
        typed = self.typed.get(id(first)) if isinstance(first, Tensor) else None
        if typed is None or first is None:
            raise _NoRule
        if op in _SAME:
            return self._note(op(*args, **kwargs), typed.labels, typed.node, typed.reached)
        if op is aten.detach.default:
            return self._note(op(*args, **kwargs), typed.labels, self._emit(op, (typed.node,)), typed.reached)
        if op in _VIEWS:
            result = op(*args, **kwargs)
            return self._note(result, self._viewed(first, result, typed), typed.node, typed.reached)
        if op is aten.expand.default:
            return self._expand(op(*args, **kwargs), first, typed)
        if op in (aten.permute.default, aten.transpose.int, aten.t.default):
            return self._permute(op, args, first, typed)
        if op in _REDUCTIONS or op in _OF_ALL:
            return self._reduce(op, args, kwargs, first, typed)
        if op in _ALONG:
            return self._along(op, args, kwargs, first, typed)
        if op is aten.gather.default:
            return self._gather(args, first, typed)
        if op in (aten.slice.Tensor, aten.select.int):
            return self._slice(op, args, kwargs, first, typed)
        raise _NoRule

    # -- rules
    def _pointwise(self, op: Any, args: Any, kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise _NoRule
        labels: list[Label] = [ONE] * result.dim()
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = [t for t in operands if id(t) in self.typed]
        for t in known:
            for i, label in enumerate(self.typed[id(t)].labels, result.dim() - t.dim()):
                if label != ONE and labels[i] not in (ONE, label):
                    raise Opaque(f"{op.name()} combines {_words(label)} with {_words(labels[i])}")
                labels[i] = label if label != ONE else labels[i]
        for t in operands:
            for i, size in enumerate(t.shape, result.dim() - t.dim()):
                if labels[i] == ONE and not statically_known_true(size == 1):
                    is_class = i == result.dim() - 1 and statically_known_true(size == self.shape[-1])
                    if not is_class or CLASS in labels:
                        raise _NoRule if not any(self.typed[id(k)].has_classes for k in known) else Opaque(
                            f"{op.name()} combines a row with a larger operand"
                        )
                    labels[i] = CLASS
        nodes = {}
        for t in operands:
            typed = self.typed.get(id(t))
            if typed is None:
                typed = self._adopt(t, _broadcast(t, labels))
            nodes[id(t)] = self._aligned(t, tuple(labels), typed)
        reached = any(self.typed[id(t)].reached for t in known)
        return self._note(result, labels, self._emit_with(op, args, kwargs, nodes), reached)

    def _filled(self, op: Any, args: Any, kwargs: Any) -> Any:
        typed = self.typed.get(id(args[0]))
        if typed is None:
            raise _NoRule
        words = {name: value for name, value in kwargs.items() if name not in _WITHOUT_A_PLACE}
        return self._note(op(*args, **kwargs), typed.labels, self._emit(op, (typed.node, *args[1:]), words), typed.reached)

    def _aligned(self, tensor: Tensor, labels: tuple[Label, ...], typed: Typed) -> fx.Node:
        """Return an operand's node with a dim of size 1 for each few and class dim of ``labels`` that it lacks."""
        node, lead = typed.node, int(typed.has_rows)
        if not typed.has_rows and not typed.inner:
            return node
        for k, place in enumerate(i for i, label in enumerate(labels) if label in (CLASS, FEW)):
            i = place - (len(labels) - len(typed.labels))
            if i < 0 or typed.labels[i] == ONE:
                node = self._emit(aten.unsqueeze.default, (node, lead + k))
        return node

    def _emit_with(self, op: Any, args: Any, kwargs: Any, nodes: dict[int, fx.Node]) -> fx.Node:
        args, kwargs = tree_map(lambda item: nodes[id(item)] if isinstance(item, Tensor) else item, (args, kwargs))
        if op is aten._to_copy.default:
            kwargs = {name: value for name, value in kwargs.items() if name not in _WITHOUT_A_PLACE}
        return self._emit(op, args, kwargs)

    def _stack(self, args: Any, kwargs: Any) -> Any:
        tensors = args[0]
        result = aten.stack.default(*args, **kwargs)
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
        labels = next(self.typed[id(t)].labels for t in tensors if id(t) in self.typed)
        all_typed = [self.typed.get(id(t)) or self._adopt(t, _broadcast(t, labels)) for t in tensors]
        if any(typed.labels != labels for typed in all_typed) or not all_typed[0].has_rows:
            raise Opaque("aten::stack combines values of other rows or classes")
        at = all_typed[0].position(dim)
        node = self._emit(aten.stack.default, ([typed.node for typed in all_typed], at))
        return self._note(result, (*labels[:dim], FEW, *labels[dim:]), node, any(t.reached for t in all_typed))

    def _expand(self, result: Tensor, tensor: Tensor, typed: Typed) -> Any:
        before = [1] * (result.dim() - tensor.dim()) + list(tensor.shape)
        if not all(statically_known_true(a == b) for a, b in zip(before, result.shape, strict=True)):
            raise _NoRule if not typed.has_classes else Opaque("aten::expand repeats a value with classes")
        return self._note(result, [ONE] * (result.dim() - tensor.dim()) + list(typed.labels), typed.node, typed.reached)

    def _permute(self, op: Any, args: Any, tensor: Tensor, typed: Typed) -> Any:
        rank = tensor.dim()
        order = list(range(rank))
        if op is aten.permute.default:
            order = [d % rank for d in args[1]]
        elif rank > 1:
            a, b = (args[1] % rank, args[2] % rank) if op is aten.transpose.int else (0, 1)
            order[a], order[b] = order[b], order[a]
        labels = [typed.labels[d] for d in order]
        if tuple(label for label in labels if label in (CLASS, FEW)) != typed.inner:
            raise Opaque(f"{op.name()} swaps classes with another dim of a row")
        return self._note(op(*args), labels, typed.node, typed.reached)

    def _reduce(self, op: Any, args: Any, kwargs: Any, tensor: Tensor, typed: Typed) -> Any:
        if op in _OF_ALL:
            inner = [i for i, label in enumerate(typed.labels) if label in (CLASS, FEW)]
            if not inner or not typed.has_rows:
                raise _NoRule
            with self:
                return op(_OF_ALL[op](tensor, inner, False, **kwargs))
        place = _REDUCTIONS[op]
        dims = args[place] if len(args) > place else kwargs.get("dim")
        listed = isinstance(dims, (list, tuple))
        dims = list(range(tensor.dim())) if dims is None or dims == [] else list(dims) if listed else [dims]
        dims = [d % tensor.dim() for d in dims]
        keepdim = args[place + 1] if len(args) > place + 1 else kwargs.get("keepdim", False)
        over_rows = [d for d in dims if isinstance(typed.labels[d], Rows)]
        inner = [d for d in dims if typed.labels[d] in (CLASS, FEW)]
        if over_rows and inner:
            if op not in _OF_ALL.values():
                raise Opaque(f"{op.name()} reduces rows and classes together")
            with self:  # a sum over classes, then one over rows
                return op(op(tensor, inner, True, **kwargs), dims, keepdim)
        if over_rows:
            if typed.has_classes:
                raise Opaque(f"{op.name()} mixes rows while there are classes")
            raise _NoRule
        result = op(*args, **kwargs)
        labels = [ONE if i in dims else label for i, label in enumerate(typed.labels) if keepdim or i not in dims]
        if not inner:
            if isinstance(result, Tensor) and op not in (aten.argmax.default, aten.argmin.default, aten.linalg_vector_norm.default):
                return self._note(result, labels, typed.node, typed.reached)
            raise _NoRule
        where = [typed.position(d) for d in inner]
        words = {k: v for k, v in kwargs.items() if k not in ("dim", "keepdim")}
        front = [typed.node, *args[1:place]]
        node = self._emit(op, (*front, where if listed else where[0]), words)
        if isinstance(result, Tensor):
            return self._note(result, labels, node, typed.reached)
        return tuple(
            self._note(r, labels, self._emit(operator.getitem, (node, i)), typed.reached) for i, r in enumerate(result)
        )

    def _along(self, op: Any, args: Any, kwargs: Any, tensor: Tensor, typed: Typed) -> Any:
        place = _ALONG[op]
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        listed = isinstance(dim, (list, tuple))
        if listed and len(dim) != 1:
            raise Opaque(f"{op.name()} goes along several dims")
        dim = (dim[0] if listed else dim) % tensor.dim()
        if typed.labels[dim] not in (CLASS, FEW):
            raise Opaque(f"{op.name()} goes along the rows") if typed.has_classes else _NoRule
        at = typed.position(dim)
        front, words = [typed.node, *args[1:]], dict(kwargs)
        if len(args) > place:
            front[place] = [at] if listed else at
        else:
            words["dim"] = at
        result, node = op(*args, **kwargs), self._emit(op, front, words)
        if isinstance(result, Tensor):
            return self._note(result, typed.labels, node, typed.reached)
        changed: Label = FEW if op is aten.topk.default else typed.labels[dim]
        labels = [changed if i == dim else label for i, label in enumerate(typed.labels)]
        return tuple(
            self._note(r, labels, self._emit(operator.getitem, (node, i)), typed.reached) for i, r in enumerate(result)
        )

    def _gather(self, args: Any, tensor: Tensor, typed: Typed) -> Any:
        dim, index = args[1] % tensor.dim(), args[2]
        if typed.labels[dim] not in (CLASS, FEW):
            raise Opaque("aten::gather takes other rows")
        alone = statically_known_true(index.shape[dim] == 1)
        labels = [(ONE if alone else FEW) if i == dim else label for i, label in enumerate(typed.labels)]
        same = all(
            statically_known_true(a == b) for i, (a, b) in enumerate(zip(index.shape, tensor.shape, strict=True)) if i != dim
        )
        if not same:
            raise Opaque("aten::gather takes some of the rows")
        chosen = self.typed.get(id(index)) or self._adopt(index, tuple(labels))
        if chosen.labels != tuple(labels):
            raise Opaque("aten::gather is given an index with other dims")
        at, node = typed.position(dim), chosen.node
        if alone:
            node = self._emit(aten.unsqueeze.default, (node, at))
        node = self._emit(aten.gather.default, (typed.node, at, node))
        if alone:
            node = self._emit(aten.squeeze.dim, (node, at))
        return self._note(aten.gather.default(*args), labels, node, typed.reached)

    def _slice(self, op: Any, args: Any, kwargs: Any, tensor: Tensor, typed: Typed) -> Any:
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensor.dim()
        label, result = typed.labels[dim], op(*args, **kwargs)
        if label in (CLASS, FEW):
            node = self._emit(op, (typed.node, typed.position(dim), *args[2:]), {k: v for k, v in kwargs.items() if k != "dim"})
            labels = [known for i, known in enumerate(typed.labels) if i != dim or op is aten.slice.Tensor]
            return self._note(result, labels, node, typed.reached)
        if op is aten.select.int and label == ONE:
            labels = [known for i, known in enumerate(typed.labels) if i != dim]
            return self._note(result, labels, typed.node, typed.reached)
        if op is aten.slice.Tensor and statically_known_true(result.shape[dim] == tensor.shape[dim]):
            return self._note(result, typed.labels, typed.node, typed.reached)
        if typed.has_classes:
            raise Opaque("some of the rows are taken")
        raise _NoRule

    def _viewed(self, before: Tensor, after: Tensor, typed: Typed) -> list[Label]:
        """Return the labels of a view: dims of size 1 come and go, row axes are merged and split as they were."""
        for size, label in zip(before.shape, typed.labels, strict=True):
            if label == ONE and not statically_known_true(size == 1):
                raise Opaque("a view of what was expanded")
        labels: list[Label] = [ONE] * after.dim()
        for old, new in _groups(before.shape, after.shape):
            found = [typed.labels[i] for i in old]
            if len(old) == len(new) == 1:
                labels[new[0]] = found[0]
                continue
            rows = [label for label in found if isinstance(label, Rows)]
            follow = all(a.last == b.first for a, b in zip(rows, rows[1:], strict=False))
            if len(rows) < len(found) or not rows or not follow:
                raise Opaque("a view mixes rows and classes")
            axes = [i for i in range(rows[0].first, rows[-1].last) if not statically_known_true(self.shape[i] == 1)]
            if len(new) == 1:
                labels[new[0]] = Rows(rows[0].first, rows[-1].last)
                continue
            sizes = [after.shape[i] for i in new]
            if len(sizes) != len(axes) or not all(statically_known_true(n == self.shape[i]) for n, i in zip(sizes, axes)):
                raise Opaque("a view splits the rows in another way than the logits have them")
            for i, axis in zip(new, axes, strict=True):
                labels[i] = Rows(axis, axis + 1)
        return labels


def _words(label: Label) -> str:
    return {CLASS: "classes", FEW: "a few numbers a row"}.get(label, "rows") if isinstance(label, str) else "rows"


def _broadcast(tensor: Tensor, labels: Sequence[Label]) -> tuple[Label, ...]:
    """Return the labels of an operand that is broadcast to a value with ``labels``."""
    offset = len(labels) - tensor.dim()
    if offset < 0:
        raise Opaque("an operand has more dims than the rows")
    return tuple(ONE if statically_known_true(size == 1) else labels[i + offset] for i, size in enumerate(tensor.shape))


def _groups(old: Sequence[Any], new: Sequence[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the dims of both shapes that hold the same elements, without dims of size 1."""
    left = [i for i, n in enumerate(old) if not statically_known_true(n == 1)]
    right = [i for i, n in enumerate(new) if not statically_known_true(n == 1)]
    while left or right:
        if not left or not right:
            raise Opaque("a view of a size that is not known")
        ours, theirs = [left.pop(0)], [right.pop(0)]
        while not statically_known_true(_product(old, ours) == _product(new, theirs)):
            smaller = math.prod(expected(old[i]) for i in ours) < math.prod(expected(new[i]) for i in theirs)
            side, rest = (ours, left) if smaller else (theirs, right)
            if not rest:
                raise Opaque("a view of a size that is not known")
            side.append(rest.pop(0))
        yield ours, theirs


def _product(sizes: Sequence[Any], dims: Sequence[int]) -> Any:
    result: Any = 1
    for dim in dims:
        result = result * sizes[dim]
    return result
