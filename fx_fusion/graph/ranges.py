"""Bounds of the elements of a tensor, by how it is made: a bias of which they are known hides no score.

What is read are numbers, ranges and integers (whatever they hold, it fits their dtype) and arithmetic on them, as ALiBi's
slopes and distances are made. Of everything else nothing is known. Rounding moves a bound a little; where that would matter,
at a divisor or a base near 0, only what is not computed counts: numbers, integers, powers of such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View

Bounds = tuple[float, float]
_MOST = 1e30  # beyond it float32 may overflow
_DEEPEST = 64  # steps that are read of how something is made
_LEAST = 1e-4  # of a divisor, which no dtype rounds to 0
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Ops whose elements are elements of their input.
_MOVES = {
    "view", "reshape", "expand", "expand_as", "broadcast_to", "permute", "transpose", "t", "mT", "T", "unsqueeze", "squeeze",
    "flatten", "unflatten", "getitem", "narrow", "repeat", "repeat_interleave", "roll", "index_select", "gather",
    "take_along_dim", "contiguous", "clone", "detach", "alias", "to", "type", "type_as", "float", "half", "bfloat16",
    "double", "int", "long",
}  # fmt: skip


def bounds_of(view: View, item: Any) -> Bounds | None:
    """The least and the largest value that an element of a tensor, or a number, may have; None where that is not known, or
    may be beyond 1e30 or what its dtype holds."""
    return _Ranges(view).of(item)


class _Ranges:
    """Bounds of what one graph computes, each read once."""

    def __init__(self, view: View):
        self.view = view
        self._known: dict[fx.Node, Bounds | None] = {}
        self._depth = 0

    def of(self, item: Any) -> Bounds | None:
        item = self.view.folded(item)
        if isinstance(item, (bool, int, float)):
            return _finite(float(item), float(item))
        if not isinstance(item, fx.Node):
            return None
        if item not in self._known:
            if self._depth == _DEEPEST:
                return None
            self._depth += 1
            self._known[item] = self._of_node(item)
            self._depth -= 1
        return self._known[item]

    def _of_node(self, item: fx.Node) -> Bounds | None:
        view = self.view
        if not is_tensor(item):
            return (-(2.0**63), 2.0**63) if isinstance(example(item), (int, torch.SymInt)) else None
        dtype = example(item).dtype
        if view.effects.written_after(view.order[item], [item]) is not None:
            return None
        if dtype == torch.bool:
            return 0.0, 1.0
        found = self._made(item) if dtype in _FLOATS or not dtype.is_floating_point else None
        if dtype.is_floating_point or dtype.is_complex:
            return found if found is not None and _fits(found, dtype) else None
        least, most = float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)
        if found is None or not least < math.floor(found[0]) <= math.ceil(found[1]) < most:  # the least has no opposite
            return least, most
        return float(math.floor(found[0])), float(math.ceil(found[1]))  # whichever way it is rounded

    def _made(self, node: fx.Node) -> Bounds | None:
        bound, name = self.view.arguments(node), self.view.name(node)
        if bound is None or name is None:
            return None
        if name in _MOVES:
            below = bound["input"]
            return self.of(below) if is_tensor(below) and (name != "view" or _same_kind(below, node)) else None
        rule, dtype = _RULES.get(name), example(node).dtype
        if rule is None or (dtype.is_floating_point and not all(_fits(b, dtype) for b in self._operands(bound))):
            return None
        found = rule(self, bound)
        return None if found is None else _finite(*found)

    def _operands(self, bound: Mapping[str, Any]) -> list[Bounds]:
        """Return those of tensors, which are converted to the dtype of the result before anything is computed."""
        tensors = [bound[name] for name in ("input", "other", "exponent") if is_tensor(bound.get(name))]
        return [bounds for bounds in map(self.of, tensors) if bounds is not None]


def _fits(bounds: Bounds, dtype: torch.dtype) -> bool:
    return dtype in _FLOATS and max(map(abs, bounds)) <= torch.finfo(dtype).max / 2


def _is_exact(view: View, item: Any) -> bool:
    """Return True if an operand is a number, integers, or a power: what rounding moves in proportion to itself alone."""
    while isinstance(item, fx.Node) and view.name(item) in _MOVES:
        item = (view.arguments(item) or {}).get("input")
    if not is_tensor(item):
        return True
    return not example(item).dtype.is_floating_point or view.name(item) in ("full", "full_like", "new_full", "pow", "arange")


def _same_kind(below: fx.Node, node: fx.Node) -> bool:
    return example(below).dtype == example(node).dtype


def _finite(least: float, most: float) -> Bounds | None:
    return (least, most) if -_MOST <= least <= most <= _MOST else None


# -- rules ---------------------------------------------------------------------------------------------------------------
Rule = Callable[[_Ranges, Mapping[str, Any]], Bounds | None]


def _of(*names: str, corners: Callable[..., float]) -> Rule:
    """The rule of an op that is monotonous in each of its operands: it is extreme where they are."""

    def rule(ranges: _Ranges, bound: Mapping[str, Any]) -> Bounds | None:
        operands = [ranges.of(bound[name]) for name in names]
        if any(operand is None for operand in operands):
            return None
        try:
            values = [corners(*point) for point in _points([o for o in operands if o is not None])]
        except (ArithmeticError, ValueError):
            return None
        return min(values), max(values)

    return rule


def _points(operands: list[Bounds]) -> list[tuple[float, ...]]:
    points: list[tuple[float, ...]] = [()]
    for operand in operands:
        points = [(*point, end) for point in points for end in operand]
    return points


def _sum(sign: int) -> Rule:
    plain = _of("input", "other", corners=lambda a, b: a + sign * b)
    return lambda ranges, bound: plain(ranges, bound) if bound["alpha"] == 1 else None


def _quotient(ranges: _Ranges, bound: Mapping[str, Any]) -> Bounds | None:
    divisor = ranges.of(bound["other"])
    if bound["rounding_mode"] is not None or divisor is None or not _is_exact(ranges.view, bound["other"]):
        return None
    if divisor[0] < _LEAST and divisor[1] > -_LEAST:
        return None
    return _of("input", "other", corners=lambda a, b: a / b)(ranges, bound)


def _power(ranges: _Ranges, bound: Mapping[str, Any]) -> Bounds | None:
    base = ranges.of(bound["input"])
    if base is None or base[0] < _LEAST or not _is_exact(ranges.view, bound["input"]):
        return None
    return _of("input", "exponent", corners=math.pow)(ranges, bound)


def _arange(ranges: _Ranges, bound: Mapping[str, Any]) -> Bounds | None:
    bounds, keywords = bound["bounds"], bound["keywords"]
    from_zero = len(bounds) == 1 and "end" not in keywords
    start = 0 if from_zero else bounds[0] if bounds else keywords.get("start", 0)
    end = keywords.get("end", bounds[0] if from_zero else bounds[1] if len(bounds) > 1 else None)
    return _hull(ranges, start, end)


def _running_sum(ranges: _Ranges, bound: Mapping[str, Any]) -> Bounds | None:
    each, length = ranges.of(bound["input"]), example(bound["input"]).shape[bound["dim"]]
    return (min(each[0], each[0] * length), max(each[1], each[1] * length)) if each and isinstance(length, int) else None


def _hull(ranges: _Ranges, *items: Any) -> Bounds | None:
    found = [ranges.of(item) for item in items]
    known = [bounds for bounds in found if bounds is not None]
    return (min(b[0] for b in known), max(b[1] for b in known)) if known and len(known) == len(found) else None


def _absolute(ranges: _Ranges, bound: Mapping[str, Any]) -> Bounds | None:
    found = ranges.of(bound["input"])
    return None if found is None else (0.0, max(map(abs, found)))


_RULES: dict[str, Rule] = {
    "add": _sum(1), "sub": _sum(-1), "div": _quotient, "pow": _power, "arange": _arange, "abs": _absolute,
    "mul": _of("input", "other", corners=lambda a, b: a * b),
    "neg": _of("input", corners=lambda a: -a),
    "cumsum": _running_sum,
    "exp": _of("input", corners=math.exp),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda ranges, bound: (1.0, 1.0)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda ranges, bound: (0.0, 0.0)),
    **dict.fromkeys(("full", "full_like", "new_full"), lambda ranges, bound: ranges.of(bound["fill_value"])),
    **dict.fromkeys(("cat", "stack"), lambda ranges, bound: _hull(ranges, *bound["tensors"])),
    **dict.fromkeys(("tril", "triu"), lambda ranges, bound: _hull(ranges, bound["input"], 0)),
    "where": lambda ranges, bound: _hull(ranges, bound["input"], bound["other"]),
    "masked_fill": lambda ranges, bound: _hull(ranges, bound["input"], bound["value"]),
}  # fmt: skip
