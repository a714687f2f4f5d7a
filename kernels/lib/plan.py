"""Describe how a kernel is launched, as a value: block sizes, warps and pipeline stages, chosen by shape, dtype and device.

A *planner* is a function from what is known of a launch to a ``Plan``::

    @planner
    def backward_plan(columns: int, itemsize: int, device: Device) -> Plan: ...

    with backward_plan.instead(Plan(ROWS=1, BLOCK=1024, num_warps=8)):  # a test, or python -m bench.tune
        ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Plan:
    """A frozen set of named numbers: the ``tl.constexpr`` block sizes of a kernel (upper case), ``num_warps``,
    ``num_stages``, and what its launcher needs to compute the grid (lower case: ``programs_per_sm`` ...).

    Numbers are read as attributes. Two plans are equal if their numbers are; a plan can be a key.
    """

    __slots__ = ("_numbers",)
    _numbers: tuple[tuple[str, int], ...]

    def __init__(self, **numbers: int):
        object.__setattr__(self, "_numbers", tuple(sorted(numbers.items())))

    def __getattr__(self, name: str) -> int:
        for known, number in self._numbers:
            if known == name:
                return number
        raise AttributeError(f"this plan has no {name!r}; it has {', '.join(n for n, _ in self._numbers)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a plan is frozen; make another with {name}={value!r}: plan.but({name}={value!r})")

    def but(self, **changes: int) -> Plan:
        """A copy with some numbers changed or added."""
        return Plan(**{**dict(self._numbers), **changes})

    def meta(self) -> dict[str, int]:
        """Return what a launch takes by keyword: the constants of the kernel, ``num_warps`` and ``num_stages``."""
        return {n: v for n, v in self._numbers if n.isupper() or n in ("num_warps", "num_stages")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._numbers == other._numbers

    def __hash__(self) -> int:
        return hash(self._numbers)

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{n}={v}' for n, v in self._numbers)})"


class Planner:
    """A function that chooses a plan; ``instead`` makes it choose another for a while."""

    def __init__(self, choose: Callable[..., Any]):
        functools.update_wrapper(self, choose)
        self.choose = choose
        self.others: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plan for a launch; None where the planner says that its kernel does not fit."""
        choose = self.others[-1] if self.others else self.choose
        return choose(*args, **kwargs)

    def instead(self, plan: Plan | Callable[..., Any] | None) -> Instead:
        """A context inside of which this plan (or what this function of the same arguments returns) is chosen."""
        return Instead(self, plan if callable(plan) else lambda *args, **kwargs: plan)


class Instead:
    """Chooses other plans for a planner, in all threads: autograd runs the backwards of a GPU in threads of its own. May be
    entered again."""

    def __init__(self, planner: Planner, choose: Callable[..., Any]):
        self.planner, self.choose = planner, choose

    def __enter__(self) -> None:
        self.planner.others.append(self.choose)

    def __exit__(self, *error: object) -> None:
        self.planner.others.pop()


def planner(choose: Callable[..., Any]) -> Planner:
    """Decorate a function that chooses a plan."""
    return Planner(choose)
