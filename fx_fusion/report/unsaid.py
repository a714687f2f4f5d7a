"""Find what does the same as a fusion and is named by no site, so that nothing is silent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fx_fusion.graph.statistics import is_statistic
from fx_fusion.report.diff import Row
from fx_fusion.report.site import Site

# Ops that tell what is done: a norm, a softmax over scores, a loss; and the fusion that is nearest.
_TELLING = {
    **dict.fromkeys(("rsqrt", "sqrt", "norm", "vector_norm", "linalg_vector_norm", "rms_norm"), "rms_norm"),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "layer_norm"), "layer_norm"),
    **dict.fromkeys(("group_norm", "instance_norm"), "group_norm"),
    **dict.fromkeys(("softmax", "multi_head_attention_forward"), "attention"),
    "glu": "swiglu",
    **dict.fromkeys(("log_softmax", "logsumexp", "cross_entropy", "nll_loss", "kl_div"), "cross_entropy"),
}
_PICKED = {"log", "gather", "take_along_dim"}  # what a loss does with the result of a softmax, and attention does not
_CHOSEN = {"topk"}  # what a router does with it, or before it
_SUMS = {"add", "sub", "addcmul"}
_A_ROOT = "a root"
_ROOT = re.compile(r"pow\(.*, -?0\.5\)")
_ROOTS = {"rsqrt", "sqrt"}
_LENGTHS = {"norm", "vector_norm", "linalg_vector_norm"}
_ONE_NUMBER = re.compile(r": \w+\[[1, ]*\] = ")  # the shape of what is one number for a whole tensor
_ACTIVATIONS = {"silu", "gelu", "relu", "sigmoid", "tanh", "mish", "hardswish", "softplus", "leaky_relu", "elu"}
_LINEARS = {"linear", "addmm", "matmul", "mm", "bmm", "einsum", "chunk", "split"}
# Ops through which a value stays what it is, but for its dtype, shape or scale.
_VIEWS = {
    "to", "float", "type_as", "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "expand", "contiguous",
    "getitem", "flatten", "unflatten", "repeat", "repeat_interleave", "cat", "stack", "concat", "clone", "mul",
}  # fmt: skip
_OVER_ROWS = re.compile(r"mean\(\w+, (?:dim=)?[(\[]?-1\b")
_WAVE = re.compile(r"(?:^|_)(cos|sin)(?:_|$)")  # in the name of an input
_FAR = 10  # a near miss speaks for what is so many steps above its root


class Unsaid(NamedTuple):
    """Something that no site is about: its op (of a rotation and of a gate: what it is), where, its row, and the fusion that
    is nearest."""

    op: str
    module: str
    location: str
    row: str
    nearest: str

    def __str__(self) -> str:
        return f"{self.op} ({self.location}), nearest to {self.nearest}"


def unsaid(rows: Sequence[Row], sites: Iterable[Site]) -> list[Unsaid]:
    """Return what no site names in one graph, given its rows before and its sites."""
    sites = list(sites)
    named = {name for site in sites for name in site.nodes}
    found = []
    for body in _bodies(rows):
        graph = _Graph(body)
        parts = {name for site in sites for name in graph.above(site)}
        roots = {name for site in sites for name in graph.above(site, steps=1)}
        for row in body:
            what = None if row.name in named else graph.tells(row)
            if what is None or row.name in (parts if what[0] in _TELLING else roots if what[0] == _A_ROOT else ()):
                continue
            found.append(Unsaid(what[0], row.module, row.location, row.name, what[1]))
    return found


def _bodies(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of a graph and of each body inside it: their names are their own. A row without a name begins a body."""
    bodies: list[list[Row]] = [[]]
    for row in rows:
        if row.name:
            bodies[-1].append(row)
        else:
            bodies.append([])
    return bodies


class _Graph:
    """The rows of a graph by name, and what their ops are."""

    def __init__(self, rows: Sequence[Row]):
        self.rows: Mapping[str, Row] = {row.name: row for row in rows}
        self.ops = {row.name: _op(row) for row in rows}
        self._readers: dict[str, list[str]] = {}
        self._waves: dict[str, frozenset[str]] = {}
        for row in rows:  # operands stand above
            own = frozenset({self.ops[row.name]} & {"cos", "sin"})
            for name in row.operands:
                self._readers.setdefault(name, []).append(row.name)
            inside = map(self._waves_in, row.operands)
            self._waves[row.name] = own.union(*inside) if self.ops[row.name] in _VIEWS else own
        self._sums = {row.name: self._sum_of_products(row) for row in rows if self.ops[row.name] in _SUMS}

    def above(self, site: Site, steps: int = _FAR) -> Iterator[str]:
        """Yield what a site that names its root alone may be about: what that is made of, in the same module."""
        if site.status != "near":
            return
        edge = {name for name in site.nodes if name in self.rows}
        for _ in range(steps):
            edge = {n for name in edge for n in self.rows[name].operands if n in self.rows}
            edge = {name for name in edge if self.rows[name].module == site.module}
            yield from edge

    def tells(self, row: Row) -> tuple[str, str] | None:
        """Return what a row does that a fusion does, and which; None if nothing."""
        op = self.ops[row.name]
        is_root = op in _ROOTS or (op == "pow" and _ROOT.search(row.text) is not None)
        if (is_root or op in _LENGTHS) and not self._is_of_rows(row):
            return None  # an optimizer's: of a running average, or of a whole gradient
        if op == "softmax" and (self._goes_to(_CHOSEN, row.name) or self._is_of_the_largest(row)):
            return None  # a router's, of experts: no fusion is near
        if op == "softmax" and self._goes_to(_PICKED, row.name):
            return op, "cross_entropy"
        if op in _TELLING:
            return op, _TELLING[op]
        if is_root:
            return _A_ROOT, "rms_norm"
        if op == "log" and self._is(row, "sum") and self._is(self._first(row), "exp"):
            return "log of a sum of exponentials", "cross_entropy"
        if op in _SUMS and ({"cos", "sin"} <= self._times_waves(row) or self._is_half_of_a_rotation(row)):
            return "a rotation", "rope"
        if op in ("div", "truediv") and self._is_divided_by_its_size(row):
            return "a division by a mean of magnitudes", "rms_norm"
        if op in ("div", "truediv") and self._is_share_of_exponentials(row):
            return "a softmax", "attention"
        if op == "mul" and self._is_gate(row):
            return "a gated activation", "swiglu"
        return None

    def _is_of_rows(self, row: Row) -> bool:
        """Return True if a root or a length may be that of each row: a statistic, and not one number for a whole tensor."""
        computed = lambda name: [n for n in self.rows[name].operands if n in self.rows]  # noqa: E731
        return _ONE_NUMBER.search(row.text) is None and is_statistic(row.name, self.ops.__getitem__, computed)

    def _first(self, row: Row) -> Row:
        return self.rows.get(row.operands[0], row) if row.operands else row

    def _is(self, row: Row, op: str) -> bool:
        return bool(row.operands) and self.ops.get(row.operands[0]) == op

    def _waves_in(self, name: str) -> frozenset[str]:
        """Return True if a node is a cosine, a sine or a product of one; an input says so by its name."""
        if name in self._waves:
            return self._waves[name]
        found = None if name in self.rows else _WAVE.search(name)
        return frozenset({found[1]} if found else ())

    def _times_waves(self, row: Row) -> frozenset[str]:
        """Return True if a cosine or a sine is a factor of one of two products that are added."""
        factors = [frozenset().union(*map(self._waves_in, operands)) for _, operands in self._products(row)]
        return factors[0] ^ factors[1] if len(factors) == 2 else frozenset()

    def _products(self, row: Row) -> list[tuple[int, Sequence[str]]]:
        """Return the products that a sum or difference is of: the sign of each, and its factors."""
        by_addcmul = self.ops[row.name] == "addcmul"
        signs = 1, -1 if self.ops[row.name] == "sub" else 1
        summands = zip(signs, row.operands[: 1 if by_addcmul else 2], strict=False)
        found: list[tuple[int, Sequence[str]]] = [
            (sign, self.rows[name].operands) for sign, name in summands if self.ops.get(name) == "mul"
        ]
        return [*found, (1, row.operands[1:])] if by_addcmul else found

    def _sum_of_products(self, row: Row) -> tuple[bool, frozenset[frozenset[str]]]:
        """Return whether two products have the same sign, and the factors of each."""
        signs, pairs = [], set()
        for sign, operands in self._products(row):
            factors = [self._below(name, {"neg"}) for name in operands]
            signs.append(sign * (-1) ** sum(name != factor for name, factor in zip(operands, factors, strict=True)))
            pairs.add(frozenset(map(self._value, factors)))
        return len(set(signs)) == 1, frozenset(pairs)

    def _value(self, name: str) -> str:
        """Return what a node is, the same for an index that is written twice."""
        return self.rows[name].text.partition(" = ")[2] if self.ops.get(name) in ("getitem", "select") else name

    def _is_half_of_a_rotation(self, row: Row) -> bool:
        """Return True for ``a * c - b * s`` beside ``b * c + a * s``, whatever the tables are called."""
        same_sign, pairs = self._sums[row.name]
        if len(pairs) != 2 or len(frozenset().union(*pairs)) != 4:
            return False
        return any(
            same_sign != other_sign and pairs != other and frozenset().union(*pairs) == frozenset().union(*other)
            for other_sign, other in self._sums.values()
            if len(other) == 2
        )

    def _goes_to(self, ops: set[str], name: str, steps: int = 4) -> bool:
        """Return True if probabilities go on to one of these ops within some steps."""
        readers = self._readers.get(name, []) if steps else []
        onwards = (n for n in readers if self.ops[n] in {*_VIEWS, "add", "clamp"})
        return any(self.ops[n] in ops for n in readers) or any(self._goes_to(ops, n, steps - 1) for n in onwards)

    def _is_of_the_largest(self, row: Row) -> bool:
        return bool(row.operands) and self.ops.get(self._below(row.operands[0], _VIEWS)) in _CHOSEN

    def _is_divided_by_its_size(self, row: Row) -> bool:
        if len(row.operands) != 2:
            return False
        above, mean = (self._below(name, {*_VIEWS, "add", "clamp", "clamp_min"}) for name in row.operands)
        if self.ops.get(mean) != "mean" or not _OVER_ROWS.search(self.rows[mean].text) or not self.rows[mean].operands:
            return False
        magnitude = self._below(self.rows[mean].operands[0], _VIEWS)
        if self.ops.get(magnitude) not in ("abs", "square", "pow") or not self.rows[magnitude].operands:
            return False
        return self._below(self.rows[magnitude].operands[0], _VIEWS) == above

    def _is_share_of_exponentials(self, row: Row) -> bool:
        """Return True if powers, of two as well, are divided by their sum."""
        if len(row.operands) != 2:
            return False
        powers, total = (self._below(name, _VIEWS) for name in row.operands)
        summed = self.rows[total].operands if self.ops.get(total) == "sum" else ()
        return self.ops.get(powers) in ("exp", "exp2") and bool(summed) and self._below(summed[0], _VIEWS) == powers

    def _is_gate(self, row: Row) -> bool:
        if len(row.operands) != 2 or not all(name in self.rows for name in row.operands):
            return False
        for act, up in (row.operands, row.operands[::-1]):
            if self._is_of_itself(act, up):
                continue
            gate = self._activated(self._below(act, {"pow", "square", *_VIEWS})) or self._weighted(act)
            if gate is not None and {self.ops.get(gate), self.ops.get(self._below(up, _VIEWS))} <= _LINEARS:
                return True
        return False

    def _is_of_itself(self, act: str, up: str) -> bool:
        """Return True if an activation is one of what it is multiplied by, as ``h * sigmoid(1.702 * h)``: no gate."""
        act = self._below(act, {"pow", "square", *_VIEWS})
        operands = self.rows[act].operands if self.ops.get(act) in _ACTIVATIONS else ()
        same = _VIEWS - {"getitem"}  # the halves of a chunk are two
        return bool(operands) and self._below(operands[0], same) == self._below(up, same)

    def _activated(self, name: str) -> str | None:
        """Return what a node is an activation of."""
        if self.ops.get(name) not in _ACTIVATIONS or not self.rows[name].operands:
            return None
        return self._below(self.rows[name].operands[0], _VIEWS)

    def _weighted(self, name: str) -> str | None:
        """Return what ``g * sigmoid(g)`` is of, its second factor being ``1 / (1 + exp(-g))``."""
        factors = self.rows[name].operands if self.ops.get(name) == "mul" else ()
        for factor, g in (factors, factors[::-1]) if len(factors) == 2 else ():
            for op in ("reciprocal", "add", "exp", "neg"):
                if self.ops.get(factor) != op or not self.rows[factor].operands:
                    break
                factor = self.rows[factor].operands[-1]
            else:
                if (gate := self._below(g, _VIEWS)) == self._below(factor, _VIEWS):
                    return gate
        return None

    def _below(self, name: str, through: set[str]) -> str:
        seen = set[str]()
        while name in self.rows and name not in seen and self.ops[name] in through and self.rows[name].operands:
            seen.add(name)
            name = self.rows[name].operands[0]
        return name


def _op(row: Row) -> str:
    if (found := re.search(r" = \.?([\w.]+)\(", row.text)) is not None:
        return found[1].rsplit(".", 1)[-1]
    return "getitem" if re.search(r" = \w+\[", row.text) else ""
