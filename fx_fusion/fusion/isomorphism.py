"""Compare a stretch of a graph with a reference, call by call: for computations of too many ops to be read by rules.

The reference is a function, traced for the sizes of the site (``tracing.trace``). Both sides are read through the one
vocabulary (``graph/signatures.py``), so that ``x.float()`` and ``torch.Tensor.float(x)`` are one call. Nothing else is
forgiven: the finder proposes inputs, and what this accepts is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.tracing import results_of
from fx_fusion.graph import signatures
from fx_fusion.graph.terms import example
from fx_fusion.graph.view import View


@dataclass(frozen=True)
class Difference:
    """The first call of a graph that is not the reference's, and why."""

    node: fx.Node
    reason: str


def compare(view: View, root: fx.Node, reference: fx.Graph, inputs: Mapping[str, Any]) -> frozenset[fx.Node] | Difference:
    """Return the nodes that compute the reference's first result at ``root``, or the first difference.

    inputs: the node of the graph for each placeholder of the reference."""
    walk = _Walk(view, inputs)
    difference = walk.operand(results_of(reference)[0], root, root)
    return difference or frozenset(walk.pairs.values())


@dataclass
class _Walk:
    view: View
    inputs: Mapping[str, Any]
    pairs: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def operand(self, wanted: Any, found: Any, at: fx.Node) -> Difference | None:
        """Compare what a call of each side is given; ``at`` is the graph's call."""
        if isinstance(wanted, fx.Node):
            return self.node(wanted, found, at)
        if isinstance(wanted, (tuple, list)):
            if not isinstance(found, (tuple, list)) or len(found) != len(wanted):
                return _other(at, wanted, found)
            pairs = zip(wanted, found, strict=True)
            return next((d for w, f in pairs if (d := self.operand(w, f, at)) is not None), None)
        if isinstance(wanted, slice):
            if not isinstance(found, slice):
                return _other(at, wanted, found)
            return self.operand([wanted.start, wanted.stop, wanted.step], [found.start, found.stop, found.step], at)
        found = self.view.folded(found)
        if isinstance(wanted, (int, float, torch.SymInt)) and not isinstance(wanted, bool):
            number = example(found) if isinstance(found, fx.Node) else found
            same = isinstance(number, (int, float, torch.SymInt)) and not isinstance(number, bool)
            return None if same and statically_known_true(number == wanted) else _other(at, wanted, found)
        return None if type(found) is type(wanted) and found == wanted else _other(at, wanted, found)

    def node(self, wanted: fx.Node, found: Any, at: fx.Node) -> Difference | None:
        """Compare the makers of an operand."""
        if wanted.op == "placeholder":
            given = self.inputs[str(wanted.target)]
            return None if found is given else Difference(at, f"{at.name} reads {found} in the place of {given}")
        if not isinstance(found, fx.Node):
            return _other(at, wanted.name, found)
        if wanted in self.pairs:
            known = self.pairs[wanted]
            return None if known is found else Difference(at, f"{at.name} reads {found.name} in the place of {known.name}")
        name, given = self.view.name(found), self.view.arguments(found)
        expected = signatures.names_of(wanted)[0]
        assert expected is not None, f"graph/signatures.py does not list {wanted.target}, which the reference calls"
        if name != expected or given is None:
            return Difference(found, f"expected {expected}, found {name or found.target}")
        self.pairs[wanted] = found
        bound = signatures.bind(expected, wanted)
        assert bound is not None, f"{wanted.format_node()} does not fit the signature of {expected}"
        wants, finds = (_flat(list(arguments.values())) for arguments in (bound, given))
        return self.operand(wants, finds, found)


def _flat(arguments: list[Any]) -> list[Any]:
    """Return the arguments of a call: sizes alike whether they were given one by one or as a tuple, keywords in order."""
    made: list[Any] = []
    for item in arguments:
        if isinstance(item, dict):
            made += [part for key in sorted(item) for part in (key, item[key])]
        elif isinstance(item, tuple) and len(item) == 1 and isinstance(item[0], (tuple, list)):
            made.append(item[0])
        else:
            made.append(item)
    return made


def _other(at: fx.Node, wanted: Any, found: Any) -> Difference:
    return Difference(at, f"{at.name} is given {found}; expected {wanted}")
