"""The rules: for each op, the labels of its result, and what the body computes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.rows_of_logits.shapes import broadcast, viewed
from fx_fusion.graph.rows_of_logits.values import (
    CLASS,
    FEW,
    ONE,
    Input,
    Label,
    Made,
    NoRule,
    Opaque,
    Region,
    Rows,
    Seam,
    Typed,
)
from fx_fusion.torch_internals.aten import RESHAPES, SOFTMAXES, TO_COPY, draws, functional, mutates
from fx_fusion.torch_internals.aten import is_elementwise as of_elements
from fx_fusion.torch_internals.containers import tree_leaves, tree_map
from fx_fusion.torch_internals.dispatch import DispatchMode, decomposed
from fx_fusion.torch_internals.fakes import storage_of

aten = torch.ops.aten
_VIEWS = RESHAPES | {aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default}
_SAME = {aten.alias.default, aten.clone.default, aten.lift_fresh.default, aten.contiguous.default}
# Reductions: the place of their dim among the arguments. ``keepdim`` follows.
_REDUCTIONS = {
    aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.amax.default: 1, aten.amin.default: 1, aten.logsumexp.default: 1,
    aten.argmax.default: 1, aten.argmin.default: 1, aten.max.dim: 1, aten.min.dim: 1, aten.any.dim: 1, aten.all.dim: 1,
    aten.prod.dim_int: 1, aten.linalg_vector_norm.default: 2,
}  # fmt: skip
_OF_ALL = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
# Ops along one dim that keep it: the place of the dim.
_ALONG = SOFTMAXES | {
    aten.cumsum.default: 1, aten.logcumsumexp.default: 1, aten.sort.default: 1, aten.topk.default: 2, aten.flip.default: 1,
}  # fmt: skip
_FILLS = {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default}
_WITHOUT_A_PLACE = ("memory_format", "layout", "device", "pin_memory")


def is_elementwise(made: Any) -> bool:
    """Return True for what an elementwise op makes."""
    return isinstance(made, Made) and of_elements(made.op)


class Reader(DispatchMode):
    """Labels what ops make of labeled values, and writes the body."""

    def __init__(self, logits: Tensor, rows: Sequence[Sequence[Any]]):
        """``rows``: for each dim of the logits but the last, the sizes of the row axes that it holds."""
        super().__init__()
        self.float16 = False  # whether there are values in float16
        self.logits = tuple(logits.shape)
        self.shape = (*itertools.chain.from_iterable(rows), self.logits[-1])
        ends = list(itertools.accumulate(map(len, rows), initial=0))
        self._axes = [Rows(*ends) for ends in itertools.pairwise(ends)]
        self.body = fx.Graph()
        self.typed: dict[int, Typed] = {}
        self.outside: dict[int, Made | Seam] = {}
        self.sources: dict[int, fx.Node] = {}  # nodes of the graph, by their example
        self.inputs: list[Input] = []
        self.region: Region
        self._alive: list[Tensor] = []  # an id stands for a tensor as long as that lives
        self.begun = 0  # what came to be before the node that is being run
        self._taken: dict[Any, Typed] = {}
        labels = self.labels_like_logits(logits)
        if labels is None or not any(isinstance(label, Rows) for label in labels):
            raise Opaque("there is one row")
        self._note(logits, labels, self.body.placeholder("logits"), reached=True)

    # -- values
    def labels_like_logits(self, tensor: Tensor) -> tuple[Label, ...] | None:
        """Return labels for a tensor (.., classes) whose dims are those of the logits, or of their last dims."""
        axes = [Rows(i, i + 1) for i in range(len(self.shape) - 1)]
        return self._labels_like(tensor, self.logits, self._axes) or self._labels_like(tensor, self.shape, axes)

    def _labels_like(self, tensor: Tensor, shape: Sequence[Any], axes: Sequence[Rows]) -> tuple[Label, ...] | None:
        offset = len(shape) - tensor.dim()
        if offset < 0:
            return None
        labels: list[Label] = []
        for size, known, axis in zip(tensor.shape[:-1], shape[offset:], axes[offset:], strict=False):
            if statically_known_true(size == 1):
                labels.append(ONE)
            elif statically_known_true(size == known):
                labels.append(axis)
            else:
                return None
        return (*labels, CLASS)

    def begin(self) -> None:
        """Run another node from here on."""
        self.begun = len(self._alive)

    def made(self, tensor: Tensor) -> Made | Seam:
        """Return how a tensor outside of the region is made. Raises Opaque where that is not known (``torch.vmap``)."""
        if id(tensor) not in self.outside:
            raise Opaque("a number is made in a way that is not known")
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
        dims = zip(tensor.shape, typed.labels, strict=True)
        ones = all(statically_known_true(size == 1) for size, label in dims if label == ONE)
        if typed.has_classes or covered != needed or kinds != sorted(kinds, reverse=True) or not ones:
            raise Opaque("a value is read outside whose dims are not the rows of the logits in their order")
        self.region.seams.append(Seam(typed, tensor))
        return self.region.seams[-1]

    def _note(self, tensor: Tensor, labels: Sequence[Label], node: fx.Node, reached: bool) -> Tensor:
        if any(label == FEW and statically_known_true(n == 0) for n, label in zip(tensor.shape, labels, strict=True)):
            raise Opaque("a row has no numbers")
        self.float16 |= tensor.dtype == torch.float16
        self.typed[id(tensor)] = Typed(tuple(labels), node, reached)
        self._alive.append(tensor)
        return tensor

    def _note_each(self, results: Sequence[Tensor], labels: Sequence[Label], node: fx.Node, reached: bool) -> Any:
        """Note the results of an op with several, of which ``node`` is the call."""
        items = (self._emit(operator.getitem, (node, i)) for i in range(len(results)))
        return tuple(self._note(result, labels, item, reached) for result, item in zip(results, items, strict=True))

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
            self.float16 |= tensor.dtype == torch.float16
            typed = Typed(labels, self.body.placeholder(f"input_{len(self.inputs)}"), reached=False)
            self._alive.append(tensor)
            self.inputs.append(Input(source, typed, tensor))
            self._taken[key] = typed
        return self._taken[key]

    def _pulled(self, made: Made, tensor: Tensor, labels: tuple[Label, ...]) -> Typed | None:
        """Return a tensor (rows, classes) that an elementwise op makes, computed in the body; None for another one."""
        if CLASS not in labels or not any(isinstance(label, Rows) for label in labels) or made.item is not None:
            return None
        if not is_elementwise(made):
            return None
        nodes: dict[int, fx.Node] = {}
        for operand in tree_leaves((made.args, made.kwargs)):
            if isinstance(operand, Tensor):
                nodes[id(operand)] = self._aligned(operand, labels, self._adopt(operand, broadcast(operand, labels)))
        return Typed(labels, self._emit_with(made.op, made.args, made.kwargs, nodes), reached=False)

    def _is_made_of_seams(self, made: Made) -> bool:
        operands = tree_leaves((made.args, made.kwargs))
        if any(isinstance(operand, Seam) for operand in operands):
            return True
        below = (self.outside.get(id(t)) for t in operands if isinstance(t, Tensor) and id(t) not in self.sources)
        return any(self._is_made_of_seams(how) for how in below if isinstance(how, Made))

    # -- ops
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.prim.device.default:
            return args[0].device
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and id(t) in self.typed]
        if not known:
            return self._outside(op, args, kwargs)
        if mutates(op):
            return self._written(op, args, kwargs)
        if draws(op):
            raise Opaque(f"{op.name()} draws random numbers")
        if any(t.dtype == torch.float64 for t in known):
            raise Opaque("float64 is left to Inductor")
        try:
            return self._rule(op, args, kwargs)
        except NoRule:
            pass
        found = decomposed(op, args, kwargs, self, composite_only=not any(self.typed[id(t)].has_classes for t in known))
        if found is not NotImplemented:
            return found
        return self._outside(op, args, kwargs)

    def _written(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that writes to a value which the same node of the graph made, and of which there is no view."""
        target, instead = args[0] if args else None, functional(op)
        new = any(t is target for t in self._alive[self.begun :]) and id(target) in self.typed
        is_seam = any(seam.tensor is target for seam in self.region.seams)
        if not isinstance(target, Tensor) or instead is None or not new or is_seam:
            raise Opaque(f"{op.name()} changes a value in place")
        alike = [t for t in self._alive if t is not target and id(t) in self.typed and storage_of(t) == storage_of(target)]
        with self:
            result = instead(*args, **kwargs)
        if alike or result.dtype != target.dtype or id(result) not in self.typed:
            raise Opaque(f"{op.name()} changes a value in place")
        self.typed[id(target)] = self.typed[id(result)]
        return target

    def _outside(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op outside of the region. Values of the region that it reads are seams."""

        def read(item: Any) -> Any:
            typed = self.typed.get(id(item)) if isinstance(item, Tensor) else None
            if typed is None:
                return item
            if typed.has_classes or not typed.reached:
                raise Opaque(f"{op.name()} reads classes of several rows, or has no rule")
            return self.seam(item)

        if mutates(op):
            raise Opaque(f"{op.name()} changes a value in place")
        if draws(op):
            raise Opaque(f"{op.name()} draws random numbers")
        recorded, words = tree_map(read, (args, kwargs))
        result = op(*args, **kwargs)
        for i, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            known = id(tensor) in self.sources or id(tensor) in self.outside or id(tensor) in self.typed
            if isinstance(tensor, Tensor) and not known:
                self.outside[id(tensor)] = Made(op, recorded, words, i if isinstance(result, (tuple, list)) else None)
                self._alive.append(tensor)
        return result

    def _rule(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op is aten.stack.default:
            return self._stack(args, kwargs)
        if of_elements(op):
            return self._pointwise(op, args, kwargs)
        first = args[0] if args else None
        if op in _FILLS:
            return self._filled(op, args, kwargs)
        typed = self.typed.get(id(first)) if isinstance(first, Tensor) else None
        if typed is None or first is None:
            raise NoRule
        if op in _SAME:
            return self._note(op(*args, **kwargs), typed.labels, typed.node, typed.reached)
        if op is aten.detach.default:
            return self._note(op(*args, **kwargs), typed.labels, self._emit(op, (typed.node,)), typed.reached)
        if op in _VIEWS:
            result = op(*args, **kwargs)
            return self._note(result, viewed(self.shape, first, result, typed), typed.node, typed.reached)
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
        raise NoRule

    # -- rules
    def _pointwise(self, op: Any, args: Any, kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise NoRule
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
                        raise NoRule if not any(self.typed[id(k)].has_classes for k in known) else Opaque(
                            f"{op.name()} combines a row with a larger operand"
                        )
                    labels[i] = CLASS
        nodes = {}
        for t in operands:
            typed = self.typed.get(id(t))
            if typed is None:
                typed = self._adopt(t, broadcast(t, labels))
            nodes[id(t)] = self._aligned(t, tuple(labels), typed)
        reached = any(self.typed[id(t)].reached for t in known)
        return self._note(result, labels, self._emit_with(op, args, kwargs, nodes), reached)

    def _filled(self, op: Any, args: Any, kwargs: Any) -> Any:
        typed = self.typed.get(id(args[0]))
        if typed is None:
            raise NoRule
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
        if op is TO_COPY:
            kwargs = {name: value for name, value in kwargs.items() if name not in _WITHOUT_A_PLACE}
        return self._emit(op, args, kwargs)

    def _stack(self, args: Any, kwargs: Any) -> Any:
        tensors = args[0]
        result = aten.stack.default(*args, **kwargs)
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
        labels = next(self.typed[id(t)].labels for t in tensors if id(t) in self.typed)
        all_typed = [self.typed.get(id(t)) or self._adopt(t, broadcast(t, labels)) for t in tensors]
        if any(typed.labels != labels for typed in all_typed) or not all_typed[0].has_rows:
            raise Opaque("aten::stack combines values of other rows or classes")
        at = all_typed[0].position(dim)
        node = self._emit(aten.stack.default, ([typed.node for typed in all_typed], at))
        return self._note(result, (*labels[:dim], FEW, *labels[dim:]), node, any(t.reached for t in all_typed))

    def _expand(self, result: Tensor, tensor: Tensor, typed: Typed) -> Any:
        before = [1] * (result.dim() - tensor.dim()) + list(tensor.shape)
        if not all(statically_known_true(a == b) for a, b in zip(before, result.shape, strict=True)):
            raise NoRule if not typed.has_classes else Opaque("aten::expand repeats a value with classes")
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
                raise NoRule
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
            raise NoRule
        result = op(*args, **kwargs)
        labels = [ONE if i in dims else label for i, label in enumerate(typed.labels) if keepdim or i not in dims]
        if not inner:
            raise NoRule  # over dims of size 1
        where = [typed.position(d) for d in inner]
        words = {k: v for k, v in kwargs.items() if k not in ("dim", "keepdim")}
        front = [typed.node, *args[1:place]]
        node = self._emit(op, (*front, where if listed else where[0]), words)
        if isinstance(result, Tensor):
            return self._note(result, labels, node, typed.reached)
        return self._note_each(result, labels, node, typed.reached)

    def _along(self, op: Any, args: Any, kwargs: Any, tensor: Tensor, typed: Typed) -> Any:
        place = _ALONG[op]
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        listed = isinstance(dim, (list, tuple))
        if listed and len(dim) != 1:
            raise Opaque(f"{op.name()} goes along several dims")
        dim = (dim[0] if listed else dim) % tensor.dim()
        if typed.labels[dim] not in (CLASS, FEW):
            raise Opaque(f"{op.name()} goes along the rows") if typed.has_classes else NoRule
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
        return self._note_each(result, labels, node, typed.reached)

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
            words = {name: value for name, value in kwargs.items() if name != "dim"}
            node = self._emit(op, (typed.node, typed.position(dim), *args[2:]), words)
            labels = [known for i, known in enumerate(typed.labels) if i != dim or op is aten.slice.Tensor]
            return self._note(result, labels, node, typed.reached)
        if op is aten.select.int and label == ONE:
            labels = [known for i, known in enumerate(typed.labels) if i != dim]
            return self._note(result, labels, typed.node, typed.reached)
        if op is aten.slice.Tensor and statically_known_true(result.shape[dim] == tensor.shape[dim]):
            return self._note(result, typed.labels, typed.node, typed.reached)
        if typed.has_classes:
            raise Opaque("some of the rows are taken")
        raise NoRule


def _words(label: Label) -> str:
    return {CLASS: "classes", FEW: "a few numbers a row"}.get(label, "rows") if isinstance(label, str) else "rows"
