"""Follow who reads the deferred outputs of a graph: nobody, or somebody in call after call.

Outputs that are computed when they are read cost nothing where nobody does, and a second product of the lm_head where
somebody does. After two calls in a row whose outputs were read, the calls that follow run a version of the graph that
computes them beside the loss, once; the first call that is not read ends that. Both versions stay, so that a program that
reads now and then compiles each of them once. (One look at the logits is no habit: it would cost a compilation.)

Logits for a loss outside of the graph are worth deferring while ``F.cross_entropy`` takes them, once. Where they were wanted
for something else in two calls in a row (another loss, a second one), the next 500 calls are given them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fx_fusion.runtime.capture import is_capturing
from fx_fusion.torch_internals.fakes import FakeTensor

Compiled = Callable[..., Any]
HABIT = 2  # calls in a row
AT_ONCE = 500  # calls, before it is tried again whether a loss takes logits


class Call:
    """One call of a graph."""

    def __init__(self, reads: Reads):
        self._reads, self.read, self.taken = reads, False, False
        self.read_beside_the_loss = False  # what a loss in the graph absorbed
        self.is_known = False  # what becomes of logits that are deferred for a loss outside of the graph
        self.wanted = False  # their values, or a second time
        self._at_once: bool | None = None

    def at_once(self) -> bool:
        """Return True if logits for a loss outside of the graph are computed when they are returned, for all of a call."""
        if self._at_once is None:
            self._at_once = self._reads.next_at_once(self)
        return self._at_once

    def was_read(self, for_a_loss_outside: bool) -> None:
        """Remember that one of its deferred outputs was read, and of which kind."""
        if for_a_loss_outside:
            self.wanted, self.is_known = self.wanted or not self.taken, True
        else:
            self.read_beside_the_loss = True
        if not self.read:
            self.read = True
            self._reads.calls_read += 1

    def was_differentiated(self) -> None:
        """Remember that a gradient came through what was read."""
        self.wanted |= self.taken

    def was_taken(self, again: bool = False) -> None:
        """Remember that a loss outside of the graph was computed without reading them; ``again``: of rows of which one
        was."""
        self.wanted, self.is_known = self.wanted or again, True
        if not self.taken:
            self.taken = True
            self._reads.calls_taken += 1


class Reads:
    """The calls of a graph with deferred outputs, how many of them were read, in how many a loss outside of the graph took
    what they would be computed of, and how many were given logits for such a loss at once."""

    def __init__(self) -> None:
        self.calls = self.calls_read = self.calls_taken = self.calls_at_once = 0
        self._in_a_row = 0  # before the last call
        self._last = Call(self)
        self._recent: tuple[Call, ...] = ()  # whose logits for a loss outside were deferred
        self._at_once = 0  # calls from now on

    def next_call(self) -> Call:
        """Returns a new call."""
        self._in_a_row = self.in_a_row()
        self._last = Call(self)
        self.calls += 1
        return self._last

    def next_at_once(self, call: Call) -> bool:
        """Return True if a call gets such logits at once. What became of those before is known late: two calls of a model
        may be followed by a loss of both."""
        if self._wanted_in_a_row():
            self._recent, self._at_once = (), AT_ONCE
        if self._at_once:
            self._at_once -= 1
            self.calls_at_once += 1
            return True
        self._recent = (*self._recent[-15:], call)
        return False

    def will_be_at_once(self) -> bool:
        """Return True if the next call gets such logits at once."""
        return bool(self._at_once) or self._wanted_in_a_row()

    def _wanted_in_a_row(self) -> bool:
        known = [c for c in self._recent if c.is_known][-HABIT:]
        return len(known) == HABIT and all(c.wanted for c in known)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let calls, and reads of them, count for nothing inside."""
        known = dict(vars(self))
        try:
            yield
        finally:
            vars(self).update(known)

    def in_a_row(self) -> int:
        """Return how many calls in a row were read, up to now."""
        return self._in_a_row + 1 if self._last.read_beside_the_loss else 0


def follow(deferring: Compiled, reads: Reads, compile_computing: Callable[[], Compiled]) -> Compiled:
    """Call ``deferring``; while its outputs are read in call after call, what ``compile_computing`` returns, made at first
    need."""
    computing: list[Compiled] = []

    def run(*args: Any) -> Any:
        if reads.in_a_row() < HABIT or any(isinstance(a, FakeTensor) for a in args) or (not computing and is_capturing()):
            return deferring(*args)
        if not computing:
            computing.append(compile_computing())
        return computing[0](*args)

    return run
