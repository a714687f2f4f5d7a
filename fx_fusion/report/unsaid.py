"""What does the same as a fusion, and no site names: so that nothing is silent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fx_fusion.report.diff import Row
from fx_fusion.report.site import Site

# Ops that tell what is done: a norm, a softmax over scores, a loss; and the fusion that is nearest.
_TELLING = {
    **dict.fromkeys(("rsqrt", "sqrt", "norm", "vector_norm", "linalg_vector_norm", "normalize", "rms_norm"), "rms_norm"),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "layer_norm"), "layer_norm"),
    **dict.fromkeys(("group_norm", "instance_norm"), "group_norm"),
    "softmax": "attention",
    **dict.fromkeys(("log_softmax", "logsumexp", "cross_entropy", "nll_loss", "kl_div"), "cross_entropy"),
}
_ROOT = re.compile(r"pow\(.*, -?0\.5\)")
_ACTIVATIONS = {"silu", "gelu", "relu", "sigmoid", "tanh", "mish", "hardswish", "softplus", "leaky_relu", "elu"}
_LINEARS = {"linear", "addmm", "matmul", "mm", "bmm", "einsum", "chunk", "split"}
# Ops through which a value stays what it is, but for its dtype, shape or scale.
_VIEWS = {
    "to", "float", "type_as", "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "expand", "contiguous",
    "getitem", "flatten", "unflatten", "repeat", "repeat_interleave", "cat", "stack", "concat", "clone", "mul",
}  # fmt: skip
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
    """Of one graph: its rows before, and its sites."""
    graph, sites = _Graph(rows), list(sites)
    named = {name for site in sites for name in site.nodes}
    parts = {name for site in sites for name in graph.above(site)}
    found = []
    for row in rows:
        what = None if row.name in named else graph.tells(row)
        if what is not None and not (row.name in parts and what[0] in _TELLING):
            found.append(Unsaid(what[0], row.module, row.location, row.name, what[1]))
    return found


class _Graph:
    """The rows of a graph by name, and what their ops are."""

    def __init__(self, rows: Sequence[Row]):
        self.rows: Mapping[str, Row] = {row.name: row for row in rows}
        self.ops = {row.name: _op(row) for row in rows}
        self._waves: dict[str, frozenset[str]] = {}
        for row in rows:  # operands stand above
            own = frozenset({self.ops[row.name]} & {"cos", "sin"})
            inside = (self._waves.get(name, frozenset()) for name in row.operands)
            self._waves[row.name] = own.union(*inside) if self.ops[row.name] in _VIEWS else own

    def above(self, site: Site) -> Iterator[str]:
        """What a site that names its root alone may be about: what that is made of, in the same module."""
        if site.status != "near":
            return
        edge = {name for name in site.nodes if name in self.rows}
        for _ in range(_FAR):
            edge = {n for name in edge for n in self.rows[name].operands if n in self.rows}
            edge = {name for name in edge if self.rows[name].module == site.module}
            yield from edge

    def tells(self, row: Row) -> tuple[str, str] | None:
        """What a row does that a fusion does, and which; None if nothing."""
        op = self.ops[row.name]
        if op in _TELLING:
            return op, _TELLING[op]
        if op == "pow" and _ROOT.search(row.text):
            return "a root", "rms_norm"
        if op == "log" and self._is(row, "sum") and self._is(self._first(row), "exp"):
            return "log of a sum of exponentials", "cross_entropy"
        if op in ("add", "sub") and {"cos", "sin"} <= self._times_waves(row):
            return "a rotation", "rope"
        if op == "mul" and self._is_gate(row):
            return "a gated activation", "swiglu"
        return None

    def _first(self, row: Row) -> Row:
        return self.rows.get(row.operands[0], row) if row.operands else row

    def _is(self, row: Row, op: str) -> bool:
        return bool(row.operands) and self.ops.get(row.operands[0]) == op

    def _times_waves(self, row: Row) -> frozenset[str]:
        """Of two products that are added: whether a cosine or a sine is a factor."""
        products = [self.rows[name] for name in row.operands if self.ops.get(name) == "mul"]
        factors = [frozenset().union(*(self._waves.get(n, frozenset()) for n in p.operands)) for p in products]
        return factors[0] ^ factors[1] if len(factors) == 2 else frozenset()

    def _is_gate(self, row: Row) -> bool:
        if len(row.operands) != 2 or not all(name in self.rows for name in row.operands):
            return False
        for act, up in (row.operands, row.operands[::-1]):
            inner = self._below(act, {"pow", "square", *_VIEWS})
            if self.ops.get(inner) in _ACTIVATIONS and self.rows[inner].operands:
                gate = self._below(self.rows[inner].operands[0], _VIEWS)
                if {self.ops.get(gate), self.ops.get(self._below(up, _VIEWS))} <= _LINEARS:
                    return True
        return False

    def _below(self, name: str, through: set[str]) -> str:
        while name in self.rows and self.ops[name] in through and self.rows[name].operands:
            name = self.rows[name].operands[0]
        return name


def _op(row: Row) -> str:
    found = re.search(r" = \.?([\w.]+)\(", row.text)
    return found[1].rsplit(".", 1)[-1] if found is not None else ""
