"""Share what the normal forms need: the type of a rule, the term behind an operand, the term of a plain call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fx_fusion.graph.terms import Reader, Term, is_tensor

Bound = dict[str, Any]
Rule = Callable[[Reader, fx.Node, Bound], Term | None]


class Rules(dict[str, Rule]):
    """Rules by the name of the op whose calls they read. A rule makes the term of a call with bound arguments, or returns
    None for a call that it does not understand: the node is then an opaque leaf."""

    def of(self, *names: str) -> Callable[[Rule], Rule]:
        """Decorate the rule of these ops."""

        def add(rule: Rule) -> Rule:
            self.update(dict.fromkeys(names, rule))
            return rule

        return add


def inner_term(view: Reader, operand: Any, op: str) -> Term | None:
    """The term behind an operand, if it is ``op`` and no cast on the way rounds."""
    edge = view.edge(operand)
    if not isinstance(edge.base, fx.Node) or edge.roundings:
        return None
    term = view.term(edge.base)
    return Term(term.op, term.operands, term.attrs, (*edge.crossed, *term.nodes)) if term.op == op else None


def multiplied_and_summed(bound: Mapping[str, Any]) -> tuple[fx.Node, ...]:
    """The two tensors of ``einsum("...d,...d->...", a, b)``, by the bound arguments of an einsum; none of another one."""
    equation, operands = bound["equation"], bound["operands"]
    if not isinstance(equation, str) or len(operands) != 2 or not all(map(is_tensor, operands)):
        return ()
    left, arrow, out = equation.replace(" ", "").partition("->")
    one, _, other = left.partition(",")
    letters = one.removeprefix("...")
    each_once = letters.isalpha() and len(set(letters)) == len(letters)
    return tuple(operands) if each_once and arrow and one == other and out == one[:-1] else ()


def plain(name: str, node: fx.Node, bound: Bound) -> Term:
    """The term of a call without a rule: tensors and numbers are its operands, everything else its attributes."""
    operands = tuple(v for v in bound.values() if isinstance(v, (fx.Node, int, float)) and not isinstance(v, bool))
    attrs = tuple((k, v) for k, v in bound.items() if not isinstance(v, (fx.Node, int, float)) or isinstance(v, bool))
    return Term(name, operands, attrs, (node,))
