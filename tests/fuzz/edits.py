"""Small edits of source text: which names a statement may be given instead, which operands it may swap."""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.program import Program, functions, names_read, names_set, namespace


@dataclass(frozen=True)
class Seen:
    """A tensor as a statement finds it in the first call."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    floating: bool


def states(program: Program) -> list[dict[str, Seen]] | None:
    """The tensors there are before each statement and before the return; None where eager raises."""
    given: dict[str, Any] = {**namespace(), **program.made(0)}
    found = []
    for statement in [*program.statements, "pass"]:
        found.append({
            n: Seen(n, tuple(t.shape), t.dtype, t.is_floating_point())
            for n, t in given.items() if isinstance(t, Tensor)
        })  # fmt: skip
        try:
            with torch.no_grad():
                exec(statement, given)
        except Exception:
            return None
    return found


def works(program: Program) -> bool:
    """Return True if eager runs its first call, without gradients."""
    try:
        with torch.no_grad():
            functions(program.source())["program"](**program.made(0))
    except Exception:
        return False
    return True


def _offset(text: str, line: int, column: int) -> int:
    return sum(len(row) + 1 for row in text.split("\n")[: line - 1]) + column


def spans(text: str, name: str) -> list[tuple[int, int]]:
    """Return where a statement reads a name."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            start = _offset(text, node.lineno, node.col_offset)
            found.append((start, start + len(name)))
    return sorted(found)


def with_use(text: str, name: str, expression: str, rng: random.Random, all_of_them: bool = False) -> str:
    """The statement with ``expression`` for one of its uses of ``name``, or for all."""
    places = spans(text, name)
    for start, end in reversed(places if all_of_them else [rng.choice(places)]):
        text = text[:start] + expression + text[end:]
    return text


def with_swapped(text: str, rng: random.Random) -> str | None:
    """The statement with the operands of one sum, product or difference swapped."""
    operators = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Add, ast.Mult, ast.Sub))
    ]
    if not operators:
        return None
    node = rng.choice(operators)
    left, right = (ast.get_source_segment(text, n) for n in (node.left, node.right))
    whole = ast.get_source_segment(text, node)
    sign = {ast.Add: "+", ast.Mult: "*", ast.Sub: "-"}[type(node.op)]
    return text.replace(whole, f"(({right}) {sign} ({left}))", 1)


def with_pattern(text: str, pattern: str, replacement: str, rng: random.Random) -> str | None:
    """The statement with one occurrence of a regular expression replaced."""
    places = list(re.finditer(pattern, text))
    if not places:
        return None
    place = rng.choice(places)
    return text[: place.start()] + place.expand(replacement) + text[place.end() :]


def block_of(statements: list[str], start: int, end: int, opening: str) -> list[str]:
    """The statements with some of them in a block."""
    body = "\n".join("    " + line for s in statements[start:end] for line in s.split("\n"))
    return [*statements[:start], f"{opening}:\n{body}", *statements[end:]]


def as_function(program: Program, start: int, end: int) -> tuple[list[str], list[str], list[str]] | None:
    """A function made of some statements, what it takes and what is needed of it behind: ``(lines, takes, gives)``."""
    inside = program.statements[start:end]
    sets = [n for s in inside for n in names_set(s)]
    before = {*program.inputs, *(n for s in program.statements[:start] for n in names_set(s))}
    takes = [n for n in dict.fromkeys(n for s in inside for n in names_read(s)) if n in before]
    behind = {n for s in program.statements[end:] for n in names_read(s)} | {
        n for o in program.outputs for n in names_read(o)
    }
    gives = [n for n in dict.fromkeys(sets) if n in behind]
    if not takes or not gives:
        return None
    body = "\n".join("    " + line for s in inside for line in s.split("\n"))
    return [f"def part({', '.join(takes)}):\n{body}\n    return {', '.join(gives)}"], takes, gives
