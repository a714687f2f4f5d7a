"""Losses outside of the compiled model: what was computed of deferred logits is a graph, which is rewritten as any other.

    logits = model(x)                                                  deferred
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())          deferred, too
    loss.backward()                                                    reads it

The calls between the linear layer and what is read are a record (``runtime.sources``). When a number or the losses of rows
are read, the linear layer and the record are one graph. Where a fusion takes the layer, the losses are computed without the
logits, by the graph as it was rewritten, op by op. Where none does, the logits are made, and the calls repeated.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fx_fusion.runtime.capture import is_capturing
from fx_fusion.runtime.recipe import Recipe
from fx_fusion.runtime.recorded_ops import ARITHMETIC, LAYOUT, inserted
from fx_fusion.runtime.sources import Output, Source, Step, comparable, in_order
from fx_fusion.torch_internals.dispatch import has_saved_tensor_hooks
from fx_fusion.torch_internals.fsdp import is_freed, is_its_hook
from fx_fusion.torch_internals.nodes import enter_autocast, exit_autocast, set_grad

Compiled = Callable[..., Any]
Program = tuple[Compiled, Callable[[], bool]]

_MOST_RECORDS = 64  # of one graph's outputs
_MOST_PROGRAMS = 8  # of one record, for numbers that change from step to step


@dataclass(frozen=True)
class Record:
    """Some sources of one recipe, in order, and what they read.

    Attributes:
        steps: the calls.
        wanted: what of them, or of the outputs, is computed.
        operands: input, weight and perhaps bias of the linear layer; then the tensors that the calls take, each once.
        taken: places in ``operands`` of what the calls take, in order.
        key: equal for records that differ in their tensors and numbers alone.
        numbers: that the calls take.
        apart: places in ``wanted`` of what is computed without gradients.
    """

    recipe: Recipe
    steps: list[Step]
    wanted: list[Source]
    operands: list[Tensor]
    taken: tuple[int, ...]
    key: tuple[Any, ...]
    numbers: tuple[Any, ...]
    apart: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        """The shapes of the operands."""
        return tuple(t.shape for t in self.operands)

    def graph(self, changing: Sequence[int] = ()) -> tuple[fx.Graph, list[fx.Node]]:
        """Return a graph of placeholders for the operands, then for the numbers at ``changing``; and the wanted nodes."""
        graph, recipe = fx.Graph(), self.recipe
        head_size = len(_head(recipe))
        given = [graph.placeholder(f"operand_{i}") for i in range(len(self.operands))]
        numbers: list[Any] = [number for step in self.steps for number in step.numbers]
        for at in changing:
            numbers[at] = graph.placeholder(f"number_{at}")
        modes = _Modes(graph, recipe.device().type)
        first = self.steps[0].autocast if self.steps else None
        modes.enter(recipe.grad, first if first == recipe.of_linear else None)
        made = recipe.of_linear
        dtypes = [t.dtype for t in self.operands[:head_size]]
        cast = [n if t == made else graph.call_method("to", (n, made)) for n, t in zip(given, dtypes, strict=False)]
        nodes: dict[Source, fx.Node] = {}

        def logits(x: fx.Node, dtype: torch.dtype) -> fx.Node:
            result = graph.call_function(F.linear, (x, *cast[1:]))
            result.meta["stack_trace"] = self.steps[0].place if self.steps else ""
            return result if dtype == made else graph.call_method("to", (result, dtype))

        outputs = (source for source in in_order(self.wanted, values=False) if isinstance(source, Output))
        nodes |= {source: logits(cast[0], source.meta.dtype) for source in outputs}
        tensors, values = iter([given[at] for at in self.taken]), iter(numbers)
        for step in self.steps:
            modes.enter(step.grad or step.func is Tensor.detach, step.autocast)
            args, kwargs = _replaced(step, nodes, tensors, values)
            nodes[step] = inserted(graph, step.func, args, kwargs)
            nodes[step].meta["stack_trace"] = step.place
        modes.enter(True, None)
        wanted = [nodes[source] for source in self.wanted]
        for at in self.apart:
            place = wanted[at].meta["stack_trace"]
            wanted[at] = graph.call_method("detach", (wanted[at],))
            wanted[at].meta["stack_trace"] = place
        return graph, wanted


def _replaced(step: Step, nodes: Mapping[Source, fx.Node], tensors: Any, numbers: Any) -> tuple[Any, Any]:
    """Return the arguments of a call with nodes in place of tensors, and with other numbers."""

    def changed(item: Any, spec: Any) -> Any:
        if spec == "parent":
            return nodes.get(item)
        if spec == "tensor":
            return next(tensors)
        if spec[0] == "number":
            return next(numbers)
        if spec[0] == "dict":
            return {name: changed(item[name], inner) for name, inner in spec[1:]}
        if isinstance(item, slice):
            bounds = zip((item.start, item.stop, item.step), spec[1:], strict=True)
            return slice(*(changed(bound, inner) for bound, inner in bounds))
        if isinstance(item, (tuple, list)):
            made = (changed(each, inner) for each, inner in zip(item, spec[1:], strict=True))
            return list(made) if isinstance(item, list) else tuple(made)
        return item

    _, args, kwargs = step.spec
    return changed(step.args, args), changed(step.kwargs, kwargs)


class _Modes:
    """Writes the grad mode and the autocast of calls into a graph."""

    def __init__(self, graph: fx.Graph, device: str):
        self.graph, self.device = graph, device
        self.grad, self.autocast = True, None
        self.entered: fx.Node | None = None

    def enter(self, grad: bool, autocast: torch.dtype | None) -> None:
        """Be in these modes from here on."""
        if grad != self.grad:
            set_grad(self.graph, grad)
            self.grad = grad
        if autocast != self.autocast:
            if self.entered is not None:
                exit_autocast(self.graph, self.entered)
            self.entered = None if autocast is None else enter_autocast(self.graph, self.device, autocast)
            self.autocast = autocast


def record_of(recipe: Recipe, wanted: Sequence[Source]) -> Record | None:
    """Return what ``wanted`` is made of, down to the linear layer. None where somebody waits for a gradient in between, or
    where the layer's operands are not at hand. Raises StaleTensorError if what it is made of has changed."""
    if recipe.of_linear in (None, torch.float64) or recipe.inference:
        return None
    if any(map(is_freed, recipe.operands)) or (has_saved_tensor_hooks() and not recipe.is_checkpointed):
        return None  # a checkpointed loss alone runs again when they may have been read
    order = list(in_order(wanted, values=False))
    below = {parent for source in order for parent in source.parents()}
    inside = [source for source in order if source in below or source not in wanted]
    if any(not is_its_hook(hook.function) for source in inside for hook in source.hooks):
        return None  # FSDP's own is on the loss, too, and hands gradients on as they are
    if any(isinstance(source, Step) and source.default != torch.float32 for source in order):
        return None  # the graph would be run under the default dtype of who reads
    return _recorded(recipe, wanted, order)


def _recorded(recipe: Recipe, wanted: Sequence[Source], order: Sequence[Source]) -> Record:
    """Return the record of some sources in order. Raises StaleTensorError if what they are made of has changed."""
    recipe.check()
    steps = [source for source in order if isinstance(source, Step)]
    place = {source: i for i, source in enumerate(order)}
    described = []
    for step in steps:
        step.check()
        parents = tuple(map(place.__getitem__, step.parents()))
        described.append((step.spec, parents, step.grad, step.autocast, step.inference))
    head = _head(recipe)
    outputs = tuple((place[s], s.meta.dtype) for s in order if isinstance(s, Output))
    operands, taken = _operands(head, steps)
    key = (recipe.of_linear, len(head), outputs, tuple(described), taken, tuple(place[source] for source in wanted))
    numbers = tuple(comparable(number) for step in steps for number in step.numbers)
    return Record(recipe, steps, list(wanted), operands, taken, key, numbers)


def _losses(members: Sequence[Any]) -> list[int]:
    """Return the places of deferred tensors that are likely to be differentiated. The others are computed without gradients.

    The losses of rows that a loss is made of, the terms of a sum and numbers for a log are alive where a function keeps them
    in a variable, and mostly nobody differentiates them. If somebody could, no gradient would be known before the backward.
    The loss is the last number that nothing else is made of."""
    trained = [member.source for member in members if member.requires_grad]
    below = {parent for source in in_order(trained, values=False) for parent in source.parents()}
    ends = [source for source in trained if source not in below]
    numbers = [source for source in ends if not source.meta.dim()]
    likely = numbers[-1:] or ends
    return [at for at, member in enumerate(members) if member.source in likely]


def _operands(head: Sequence[Tensor], order: Sequence[Source]) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return the operands of a record, and which of them its calls take, in order."""
    tensors = [tensor for step in order if isinstance(step, Step) for tensor in step.tensors]
    operands = [*head, *{id(tensor): tensor for tensor in tensors}.values()]
    places = {id(tensor): at for at, tensor in enumerate(operands) if at >= len(head)}
    return operands, tuple(places[id(tensor)] for tensor in tensors)


def _head(recipe: Recipe) -> list[Tensor]:
    """Return input and weight of the linear layer of a recipe, and its bias, if it has one."""
    if recipe.module not in _places:
        placeholders = recipe.module.graph.find_nodes(op="placeholder")
        node = next(n for n in recipe.module.graph.nodes if n.op == "call_function" and n.target is F.linear)
        named = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
        given = (named["input"], named["weight"], named.get("bias"))
        _places[recipe.module] = [placeholders.index(n) for n in given if n is not None]
    operands = recipe.as_called()
    return [operands[i] for i in _places[recipe.module]]


_places: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()  # of the layer's operands, by the module


@dataclass
class _Programs:
    """The programs of records that differ in their numbers and sizes alone.

    Attributes:
        numbers, sizes: of the first record.
        sizes_change: whether a later one had others.
        changing: places of numbers that were others in a later one.
        compiled: by the numbers that a program holds.
        reads: no fusion takes the linear layer.
    """

    numbers: tuple[Any, ...]
    sizes: tuple[torch.Size, ...]
    sizes_change: bool = False
    changing: set[int] = field(default_factory=set)
    compiled: dict[tuple[Any, ...], Program] = field(default_factory=dict)
    reads: bool = False


class LossesOutside:
    """Computes losses of the deferred logits of one compiled graph.

    Args:
        compile_graph: compiles a graph that begins with the linear layer, for sizes that change or not. It returns the
            compiled graph, and a function that says, after a call, whether that layer is left in it.
    """

    def __init__(self, compile_graph: Callable[[fx.GraphModule, bool], Program]):
        self._compile, self._known = compile_graph, dict[Any, _Programs]()
        self._trained: dict[Any, set[int]] = {}  # by the key of a record, what gradients came to that were not expected

    def __call__(self, recipe: Recipe) -> bool:
        """Compute all that is alive, was computed of the logits and has no classes. Return False where that takes logits."""
        members = recipe.numbers()
        if any(member.source.is_differentiated for member in members):
            return False  # what is made of it has to be made of its value
        record = record_of(recipe, [member.source for member in members])
        if record is None or any(step.inference for step in record.steps):
            return False
        trained = self._trained.get(record.key) or _losses(members)
        apart = tuple(at for at, member in enumerate(members) if member.requires_grad and at not in trained)
        values = self._values(replace(record, key=(record.key, apart), apart=apart))
        if values is None:
            return False
        for at, (member, value) in enumerate(zip(members, values, strict=True)):
            if at in apart:
                trains = functools.partial(self._trained.setdefault(record.key, set()).add, at)
                value = member.differentiated_again(value, trains)
            for hook in member.source.hooks:
                hook.register(value)
            member.give_apart(value)
        recipe.was_taken(recipe.elements // recipe.classes)
        return True

    def operands(self, source: Source) -> list[Tensor]:
        """Return the tensors that a number is made of: those of the linear layer, then those of the calls."""
        return _operands(_head(source.recipe), list(in_order([source], values=False)))[0]

    def again(self, source: Source, wanted: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Compute a number once more, of leaves in the place of its operands; those at ``wanted`` need a gradient."""
        record = _recorded(source.recipe, [source], list(in_order([source], values=False)))
        leaves = [t.detach() for t in record.operands]
        for at in wanted:
            leaves[at].requires_grad_()
        record = replace(record, operands=leaves)
        values = self._values(record)
        if values is None:
            graph, nodes = record.graph()
            graph.output(tuple(nodes))
            with _plain_modes(source.recipe):
                values = fx.GraphModule(torch.nn.Module(), graph)(*leaves)
        return leaves, values[0]

    def _values(self, record: Record) -> Sequence[Tensor] | None:
        """Return what a record wants, computed without the logits; None where that takes them."""
        if record.key not in self._known and len(self._known) == _MOST_RECORDS:
            return None
        programs = self._known.setdefault(record.key, _Programs(record.numbers, record.sizes))
        program = None if programs.reads else self._program(record, programs)
        if program is None:
            return None
        compiled, head_is_left, changing = program
        with _plain_modes(record.recipe):
            values = compiled(*record.operands, *changing)
        programs.reads = head_is_left()
        return None if programs.reads else values  # type: ignore[no-any-return]

    def _program(self, record: Record, programs: _Programs) -> tuple[Compiled, Callable[[], bool], list[Any]] | None:
        """Return what computes a record, whether its linear layer is left, and the numbers that it takes."""
        known = zip(record.numbers, programs.numbers, strict=True)
        programs.changing |= {i for i, (now, then) in enumerate(known) if now != then}
        programs.sizes_change |= record.sizes != programs.sizes
        inputs = {at: given for at in sorted(programs.changing) if (given := _as_input(record, at)) is not None}
        constant = tuple(number for at, number in enumerate(record.numbers) if at not in inputs)
        key = constant, tuple(inputs), programs.sizes_change
        if key not in programs.compiled:
            if is_capturing() or len(programs.compiled) == _MOST_PROGRAMS:
                return None
            graph, wanted = record.graph(tuple(inputs))
            graph.output(tuple(wanted))
            programs.compiled[key] = self._compile(fx.GraphModule(torch.nn.Module(), graph), programs.sizes_change)
        return *programs.compiled[key], list(inputs.values())


def _as_input(record: Record, at: int) -> Tensor | int | None:
    """Return the number at a place as what a program takes for it: a size as it is, another number as a tensor with which
    its op computes the same. None where there is none."""
    for step in record.steps:
        if at < len(step.numbers):
            number, operands = step.numbers[at], [parent.meta for parent in step.parents()] + step.tensors
            if step.kind == LAYOUT:
                return int(number)
            floats = [t.is_floating_point() for t in operands]
            if step.kind != ARITHMETIC or "alpha" in step.kwargs or any(floats) != all(floats):
                return None
            if not any(floats):  # a count, which makes integers what a number of its kind makes of them
                return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float32)
            if any(t.dim() for t in operands):  # without dims it takes no part in type promotion
                return torch.tensor(float(number), dtype=torch.float64)
            return torch.tensor(float(number), dtype=torch.float32) if step.meta.dtype == torch.float32 else None
        at -= len(step.numbers)
    return None


@contextlib.contextmanager
def _plain_modes(recipe: Recipe) -> Iterator[None]:
    """Set the modes that the graph of a record begins in."""
    autocast = torch.autocast(recipe.device().type, enabled=False)
    with torch.inference_mode(False), autocast, torch.enable_grad(), recipe.unfrozen():
        yield
