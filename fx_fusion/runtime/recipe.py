"""Compute deferred outputs: from what, whether that is still what it was, and all of a family at once."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fx_fusion.errors import StaleTensorError
from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.runtime.computed import Computed
from fx_fusion.runtime.reads import Call
from fx_fusion.runtime.sources import Source, has_value, in_order
from fx_fusion.runtime.steps import Kept, Spans, any_is_among, same_bits, sample, wait, wait_no_more
from fx_fusion.runtime.streams import on_stream, stream_of
from fx_fusion.torch_internals.collectives import present_within
from fx_fusion.torch_internals.dispatch import (
    has_saved_tensor_hooks,
    outside_of_functorch,
    version_of,
    without_saved_tensor_hooks,
    without_torch_function,
)
from fx_fusion.torch_internals.fakes import FakeTensor
from fx_fusion.torch_internals.fsdp import gathered, is_freed, is_gathered_for_its_module_alone, owner_of

_MOST_RECORDED = 256  # computed of one graph's outputs: rows in a loop make a record that is slow to compile
_PATIENCE = 300  # seconds for which a rank that reads waits for the others
_calls: Counter[tuple[str, str]] = Counter()  # of this rank, by the name of a group and that of an output
_NOT_DEFERRED = 'compile with options={"defer_outputs": False} (FX_FUSION_DEFER_OUTPUTS=0 where a trainer compiles)'


class Losses(Protocol):
    """Computes numbers and losses of rows that are made of outputs, without these."""

    def __call__(self, recipe: Recipe) -> bool:
        """Compute those that are alive. Return False where it can't be done."""

    def operands(self, source: Source) -> list[Tensor]:
        """Return the tensors that one is made of."""

    def again(self, source: Source, wanted: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Compute one once more, of leaves in the place of its operands; those at ``wanted`` need a gradient."""


class Recipe:
    """Says how outputs that share memory are computed, from what, and whether that is still what it was.

    Args:
        module: returns a tuple with one tensor for each of ``names``.
        operands: its arguments.
        names: of the outputs, as the graph calls them.
        autocast: device type, dtype, and whether autocast is on where the graph computes them.
        grad: whether the graph computes them with gradients.
        call: of the graph, which is told what becomes of them.
        values: the outputs where the graph computed them already, without gradients; the module is for those then.
        of_linear: the module is one linear layer, whose result has this dtype, and perhaps a cast.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        operands: Sequence[Any],
        names: Sequence[str],
        autocast: tuple[str, torch.dtype, bool],
        grad: bool,
        call: Call,
        *,
        values: tuple[Tensor, ...] | None = None,
        of_linear: torch.dtype | None = None,
    ):
        self.module, self.operands, self.names, self.autocast = module, tuple(operands), tuple(names), autocast
        self.grad, self.inference = grad and torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._constant = [isinstance(o, Tensor) and not o.requires_grad for o in self.operands]
        self.is_checkpointed = has_saved_tensor_hooks()
        self._device = next(o.device for o in self.operands if isinstance(o, Tensor))
        self._stream = None if self.is_traced() else stream_of(self._device)
        self.owners = [owner_of(o) for o in self.operands]
        self._occasions = self._number_this_call()
        self.versions = self._versions()
        self.family: list[weakref.ref[Any]] = []  # in the order in which they were made
        self.reading = threading.RLock()  # of the family: computed by one thread, and by nobody while a member is added
        self.stepped = False  # whether an optimizer has changed an operand since
        self._copied: list[weakref.ref[Tensor]] = []  # parameters: operands are copies, made before an optimizer's step
        self.kind = ""  # the first output's dtype and shape between commas, for errors
        self.graph: Any = None  # whose outputs they are: its next call frees the copies
        self.rows_taken = 0  # by losses outside of the graph
        self._gatherings = 0  # how often all ranks have met for it
        self._met = False  # whether there were others to meet
        self.call, self._computed, self.of_linear = call, values, of_linear
        self._values: tuple[Tensor, ...] | None = None
        self._samples: list[Tensor | None] = [None] * len(self.operands)
        self.classes = self.elements = 0  # of the outputs
        self.losses: Losses | None = None
        self._recorded = 0
        self._copies: dict[int, tuple[Any, Any, Any]] = {}  # by the id of a tensor: it, its version and the copy

    def wait(self) -> None:
        """From now on the operands may change before they are needed."""
        pairs = zip(self.operands, self.owners, strict=True)
        if self._computed is not None and self.is_sharded():
            self.call.read_beside_the_loss = True  # for good: whether another rank reads is not known here
        self._samples = [sample(o) if owner is None and self._computed is None else None for o, owner in pairs]
        wait(self)

    def device(self) -> torch.device:
        return self._device

    def is_traced(self) -> bool:
        """Return True if the operands are fake: somebody asks for the types of the results and will never read them."""
        return any(isinstance(o, FakeTensor) for o in self.operands)

    def is_sharded(self) -> bool:
        """Return True if FSDP has an operand in parts, and gathers it for the model alone."""
        return any(owner is not None for owner in self.owners)

    def may_wait(self, is_all: bool) -> bool:
        """Return True if who reads them, or a loss that follows, will find the operands. Parameters that are in parts on
        ranks are freed behind their module. ``is_all``: the graph is this linear layer, in a module of FSDP that goes on."""
        if any(map(is_gathered_for_its_module_alone, self.operands)):
            return False
        if any(isinstance(o, Tensor) and o.is_inference() for o in self.operands):
            return False  # PyTorch counts no writes to an inference tensor, so that a change would go unnoticed.
        return self.of_linear is None or is_all or not self.is_sharded()

    def records(self, layout: bool) -> bool:
        """Return True if what an op makes of the outputs may wait. ``layout``: it only casts, views or slices.

        In a loss that is checkpointed alone nothing else may wait. When it runs again the outputs were read, and it would
        save other tensors. Nor may anything once a loss took the outputs: a second one needs them."""
        if layout:
            return True
        if self.losses is None or self.of_linear is None or self.rows_taken:
            return False
        if torch.is_inference_mode_enabled() or (has_saved_tensor_hooks() and not self.is_checkpointed):
            return False
        self._recorded += 1
        return self._recorded <= _MOST_RECORDED

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a small tensor for a call that waits: the same one until the tensor is written to."""
        original, version, copy = self._copies.get(id(tensor), (None, None, None))
        if original is None or original() is not tensor or version != version_of(tensor):
            with torch.enable_grad():
                copy = tensor.clone()
            self._copies[id(tensor)] = weakref.ref(tensor), version_of(tensor), copy
        return copy  # type: ignore[return-value]

    def was_taken(self, rows: int) -> None:
        """Remember that a loss of so many rows was computed without the outputs."""
        of_all = self.elements // max(self.classes, 1)
        self.call.was_taken(again=self.rows_taken + rows > of_all)
        self.rows_taken += rows

    def may_wait_for_a_number(self) -> bool:
        """Return True if losses of rows may wait until somebody reads them. A checkpoint counts what is saved inside, and
        FSDP may free the head at the end of the module that computes the loss."""
        return not has_saved_tensor_hooks() and not self.is_sharded()

    def metas(self, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
        """Shape and stride of the results, by running the module on meta tensors, whose dtypes autocast leaves alone."""
        with torch.no_grad(), self._autocast():
            found = self.module(*(torch.empty_like(o, device="meta") if isinstance(o, Tensor) else o for o in self.operands))
        return tuple(
            torch.empty_strided(meta.shape, meta.stride(), dtype=dtype, device="meta")
            for meta, dtype in zip(found, dtypes, strict=True)
        )

    def _versions(self) -> list[Any]:
        """Return what changes with an operand. Of a parameter that FSDP frees and gathers again, this rank's part tells."""
        pairs = zip(self.operands, self.owners, strict=True)
        return [_version(o) if owner is None else version_of(owner.sharded) for o, owner in pairs]

    def check(self) -> None:
        """Raise StaleTensorError if an operand was written to since, as far as PyTorch is told of it."""
        versions = zip(self.operands, self._versions(), self.versions, strict=True)
        self._raise_if([operand for operand, now, then in versions if now != then])

    def check_samples(self) -> None:
        """Raise StaleTensorError if an operand was written to through ``.data``, which PyTorch is not told of. Waits for the
        GPU."""
        pairs = zip(self.operands, self._samples, strict=True)
        self._raise_if([o for o, then in pairs if then is not None and not same_bits(sample(o), then)])

    def _raise_if(self, changed: Sequence[Any]) -> None:
        if not changed and not self.stepped:
            return
        which = "an optimizer step changed one" + ", and the model ran again since" * bool(self._copied)
        if changed:
            which = f"one of shape {tuple(changed[0].shape)} was changed in place"
        raise StaleTensorError(
            f"The deferred output `{self.names[0]}`{self.kind} is computed when it is first read, from tensors that must "
            f"not have changed since the model ran; {which}. Read it before what changes them (an optimizer step), or "
            f"{_NOT_DEFERRED}."
        )

    def values(self) -> tuple[Tensor, ...]:
        """The results, computed once: as the model would have, in its grad mode and autocast, whatever is ambient now."""
        if self._values is None and self._computed is None:
            self.check()
            self.check_samples()
            with self._gathered(), self._in_its_modes(), self._autocast():
                self._values = self.module(*self.as_called())
        elif self._values is None:
            assert self._computed is not None
            with self._in_its_modes():
                operands = self.as_called()
                wanted = self.grad and any(isinstance(o, Tensor) and o.requires_grad for o in operands)
                self._values = Computed.apply(self, *operands) if wanted else self._computed
        return self._values

    @contextlib.contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Let parameters that needed a gradient when the model ran need one inside, though they may be frozen now."""
        pairs = zip(self.operands, self._constant, strict=True)
        frozen = [o for o, constant in pairs if isinstance(o, Tensor) and not (constant or o.requires_grad)]
        for operand in frozen:
            operand.requires_grad_(True)
        try:
            yield
        finally:
            for operand in frozen:
                operand.requires_grad_(False)

    @contextlib.contextmanager
    def _in_its_modes(self) -> Iterator[None]:
        """Record gradients inside, or not, as when the model ran."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), self.unfrozen():
            yield

    def as_called(self) -> tuple[Any, ...]:
        """The operands; those that needed no gradient when the model ran need none."""
        pairs = zip(self.operands, self._constant, strict=True)
        return tuple(o.detach() if constant and o.requires_grad else o for o, constant in pairs)

    def again(self, operands: Sequence[Any]) -> tuple[Tensor, ...]:
        """The same computation on other operands (leaves, to differentiate it)."""
        self.check()
        with self._gathered(), self._autocast():
            return self.module(*operands)

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        """Make parameters that FSDP has freed whole inside. Raises RuntimeError unless all ranks that have a part of the
        operands read now: to gather it takes all of them."""
        freed = [owner for o, owner in zip(self.operands, self.owners, strict=True) if owner is not None and is_freed(o)]
        self._meet([*_groups_of(self.operands), *(owner.group for owner in freed if owner.group is not None)])
        return gathered(freed) if freed else contextlib.nullcontext()

    def _number_this_call(self) -> dict[str, int]:
        """Return which of all calls whose outputs have this name this is, by the name of each group that is asked to read
        them. All ranks make the same calls in the same order, so the number stands for the same tensor on each."""
        if self.is_traced():
            return {}
        groups = [*_groups_of(self.operands), *(owner.group for owner in self.owners if owner is not None)]
        names = {group.group_name for group in groups if group is not None}
        for group in names:
            _calls[group, self.names[0]] += 1
        return {group: _calls[group, self.names[0]] for group in names}

    def _meet(self, groups: Sequence[Any]) -> None:
        """Wait until all ranks of the groups read this tensor. Raises RuntimeError if they do not."""
        name = self.names[0]
        for group in {group.group_name: group for group in groups}.values():
            self._met = True
            occasion = f"{group.group_name}/{name}/{self._occasions[group.group_name]}/{self._gatherings}"
            present, ranks = present_within(_PATIENCE, group, occasion), group.size()
            if present < ranks:
                raise RuntimeError(
                    f"{name} is computed when it is read, and gathered from {ranks} ranks then; {present} of them read it "
                    f"within {_PATIENCE} s. Read {name} on every rank, in the same order (then use it on one), or "
                    f"{_NOT_DEFERRED}."
                )
        self._gatherings += 1

    def read(self, source: Source) -> None:
        """Compute a tensor of the family, and others: all that are alive, or only those without classes, if that can be done
        without the outputs."""
        if not source.is_number or not self._take_rows():
            self.settle()

    def read_numbers(self) -> None:
        """Compute what is made of the outputs and has no classes, if somebody has such a tensor and nobody has read it."""
        waiting = next(iter(self.numbers()), None)
        if waiting is not None and not self.is_sharded() and not self.stepped:
            self.read(waiting.source)

    def numbers(self) -> list[Any]:
        """Return the deferred tensors that were computed of the outputs, have no classes, and are alive and unread."""
        unread = [t for t in self._members() if t._value is None and t._source is not None]
        return [t for t in unread if t._source.is_number]

    def _take_rows(self) -> bool:
        with self.reading, without_torch_function(), outside_of_functorch():
            return self.losses is not None and not self.rows_taken and self.losses(self)

    def values_of(self, sources: Iterable[Source]) -> dict[Source, Tensor]:
        """Return the values of tensors of the family, and compute those that are alive."""
        with self.reading, without_torch_function():
            if any(member._value is None and member._source is not None for member in self._members()):
                self.settle()
            values = self._computed_of(list(sources))
            self._values = None
            return values

    def _computed_of(self, wanted: Sequence[Source]) -> dict[Source, Tensor]:
        """Return the values of ``wanted``. What is between is freed as soon as nothing needs it."""
        order = list(in_order(wanted))
        readers = Counter(parent for source in order if not has_value(source) for parent in source.parents())
        values: dict[Source, Tensor] = {}
        for source in order:
            if has_value(source):
                values[source] = source.tensor._value
                continue
            value = values[source] = source.compute(values.__getitem__)
            for hook in source.hooks:
                hook.register(value)
            for parent in source.parents():
                readers[parent] -= 1
                if not readers[parent] and parent not in wanted:
                    del values[parent]
        return values

    def settle(self) -> None:
        """Compute every tensor of the family that is alive."""
        with (
            self.reading,
            on_stream(self._stream),
            without_torch_function(),
            without_saved_tensor_hooks(),
            outside_of_functorch(),
        ):
            self.values()  # it may be refused on one rank: to count that as read would change what only this rank runs
            if self._met or not self.is_sharded():  # nor may what one rank reads alone, while FSDP has not freed the head
                self.call.was_read(for_a_loss_outside=self.of_linear is not None)
            unread = [member for member in self._members() if member._value is None]
            values = self._computed_of([member.source for member in unread])
            for member in unread:
                value = values[member.source]
                member.give(value)
                member._taken = self.names[0] if self.rows_taken else None
                if self.of_linear is not None and not member.source.parents() and value.grad_fn is not None:
                    value.grad_fn.register_prehook(lambda dys, call=self.call: call.was_differentiated())
            for member in self._members():  # what they were computed from is theirs no more
                member._source = None
            self._values = self._computed = None
        wait_no_more(self)

    def keep(self, changing: Spans, copies: dict[int, Tensor]) -> None:
        """Copy the operands in memory that an optimizer is about to change, if somebody can still read the outputs.
        ``copies``: by the id of an operand, shared by recipes. Numbers and losses of rows are computed instead."""
        self.read_numbers()
        unread = any(member._value is None for member in self._members())
        if self._computed is not None or self.is_sharded() or self.stepped or not unread:
            return
        with self.reading, torch.inference_mode(False), torch.enable_grad():
            if self._values is not None or self._versions() != self.versions:
                return
            operands = list(self.operands)
            for n, operand in enumerate(operands):
                if isinstance(operand, Tensor) and changing.overlap(operand):
                    if id(operand) not in copies:
                        copies[id(operand)] = Kept.apply(operand)
                    operands[n] = copies[id(operand)]
                    self._copied.append(weakref.ref(operand))
            self.operands = tuple(operands)
            self.versions = self._versions()

    def forget_copies(self, called_with: Sequence[Any]) -> None:
        """Free copies of parameters that the graph is called with again (models may share it): the outputs can't be computed
        any more."""
        if not self._copied:
            return
        self.read_numbers()
        with self.reading:
            if self._values is None and any_is_among(self._copied, called_with):
                self.operands, self.stepped = tuple(None if isinstance(o, Tensor) else o for o in self.operands), True
                self.versions = self._versions()

    def _members(self) -> list[Any]:
        return [tensor for reference in self.family if (tensor := reference()) is not None]

    def _autocast(self) -> Any:
        device, dtype, enabled = self.autocast
        if not enabled and autocast_dtype(device) is None:
            return contextlib.nullcontext()
        # A cast that stayed in the cache of the autocast around the reader would be read there after an optimizer's step.
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


def refuse_gradient(name: str) -> None:
    """Raise RuntimeError because a loss took what an output would be computed of. Its gradient would lack that loss."""
    raise RuntimeError(
        f"a loss took what {name} would be computed of; its gradient is not computed. Ask for gradients of {name} before "
        f"the loss (a hook, retain_grad()), or {_NOT_DEFERRED}."
    )


def _groups_of(operands: Sequence[Any]) -> list[Any]:
    """The process groups over which DTensors among them lie in parts."""
    parts = (o for o in operands if any(not p.is_replicate() for p in getattr(o, "placements", ())))
    return [group for part in parts for group in part.device_mesh.get_all_groups()]


def _version(operand: Any) -> tuple[int, int] | None:
    if not isinstance(operand, Tensor) or operand.is_inference() or isinstance(operand, FakeTensor):
        return None
    return version_of(operand), operand.data_ptr()  # another pointer: ``.data`` was replaced
