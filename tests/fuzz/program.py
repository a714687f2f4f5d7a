"""Define what a fuzzed program is: source text of a function, of its inputs, and of what is done with its results."""

from __future__ import annotations

import ast
import contextlib
import linecache
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CALLS = 3  # with other values each, and other sizes and scalars where the program is dynamic


@dataclass(frozen=True)
class Input:
    """An argument: an expression over a generator ``g``, the number of the ``call`` and the sizes.

    ``grad``: "leaf" for a parameter; "made" for a tensor computed from one, which may be written to; "" for neither.
    ``dtype``: another one than the program's.
    """

    text: str
    grad: str = ""
    dtype: str = ""


@dataclass
class Program:
    """A function as a list of statements, each a line or a block, with what it takes and returns."""

    seed: int
    family: str
    dtype: str = "float32"
    inputs: dict[str, Input] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # one for each call
    statements: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)  # done with the results ``r``, outside the compiled function
    dynamic: bool | None = False
    mode: str = "train"  # or "no_grad", "inference"
    outer: str = ""  # "checkpoint" or "autocast" around the compiled function
    mutations: list[str] = field(default_factory=list)

    def source(self) -> str:
        """The function, what is done with its results, and a second function that may be handed some of them."""
        body = [f"def program({', '.join(self.inputs)}):"]
        body += [_indented(s) for s in (*self.statements, f"return ({', '.join(self.outputs)},)")]
        body += ["", "def second(z):", _indented("return (z.float() * 0.5).softmax(-1).square().sum()")]
        body += ["", "def after(r, second):"]
        body += [_indented(s) for s in (*self.after, "return r")]
        return "\n".join(body) + "\n"

    def made(self, call: int) -> dict[str, Any]:
        """The arguments of one call, as they are before anything is a leaf."""
        given = {
            **namespace(), **{n: s[call] for n, s in self.sizes.items()},
            "g": torch.Generator().manual_seed(1000 + call), "call": call,
        }  # fmt: skip
        found: dict[str, Any] = {}
        for name, item in self.inputs.items():
            value = eval(item.text, given)
            if (isinstance(value, Tensor) and value.is_floating_point()) or isinstance(value, torch.nn.Module):
                value = value.to(getattr(torch, item.dtype or self.dtype))
            found[name] = value
        return found

    def coarsest(self) -> torch.dtype:
        """The dtype of fewest digits that anything is computed in."""
        text = " ".join([self.source(), self.dtype, self.outer, *(i.dtype for i in self.inputs.values())])
        for name, dtype in (
            ("bfloat16", torch.bfloat16),
            ("autocast", torch.bfloat16),
            ("float16", torch.float16),
            ("half()", torch.float16),
        ):
            if name in text:
                return dtype
        return torch.float32

    def writes(self) -> bool:
        """Return True if anything is changed in place."""
        return bool(re.search(r"\w_\(|\] = |[\w\]] [-+*/]= |out=|_foreach", self.source()))


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.split("\n"))


def namespace() -> dict[str, Any]:
    """The names that every program may use."""
    return {
        "torch": torch, "F": F, "nn": torch.nn, "math": math, "checkpoint": checkpoint, "autocast": torch.autocast,
        "randomized": randomized,
    }  # fmt: skip


def randomized(module: torch.nn.Module, g: torch.Generator) -> torch.nn.Module:
    """The module with parameters that are neither ones nor zeros, the same in each call."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.5 + 0.25)
    return module


def functions(source: str, double: bool = False) -> dict[str, Callable[..., Any]]:
    """The functions of a source text. With ``double`` nothing is computed in less: autocast does nothing."""
    name = f"<fuzz {zlib.crc32(source.encode()) + double:x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    given = namespace()
    if double:
        given["autocast"] = lambda *args, **kwargs: contextlib.nullcontext()
    exec(compile(source, name, "exec"), given)
    return given


def names_read(text: str) -> list[str]:
    """Names that a statement reads, in order, each once."""
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return list(dict.fromkeys(n.id for n in nodes))


def names_set(text: str) -> list[str]:
    """Names that a statement gives a value, blocks of ``with`` included, inner functions not."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            if isinstance(node, ast.FunctionDef):
                found.append(node.name)
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(text))
    return list(dict.fromkeys(found))


def script(program: Program, rest: str) -> str:
    """A script of its own that shows what the program does with the rewriter and without."""
    inputs = "\n".join(f"    {n} = {_input_text(i, program)}" for n, i in program.inputs.items())
    sizes = "\n".join(f"    {n} = {s}[call]" for n, s in program.sizes.items())
    context = {"no_grad": "torch.no_grad()", "inference": "torch.inference_mode()"}.get(program.mode, "torch.enable_grad()")
    call = "f(**given)"
    if program.outer == "checkpoint":
        call = "checkpoint(f, *given.values(), use_reentrant=False)"
    if program.outer == "autocast":
        context += ', torch.autocast("cpu", dtype=torch.bfloat16)'
    return f'''# seed {program.seed}, {program.family}: {", ".join(program.mutations) or "no mutation"}
import math, torch, torch.nn as nn, torch.nn.functional as F
from torch import autocast
from torch.utils.checkpoint import checkpoint
import fx_fusion
from tests.structured_masks import structures_on_cpu
from tests.fuzz.judge import ours, plain
from tests.fuzz.program import randomized

torch._dynamo.config.capture_scalar_outputs = True

{program.source()}
def arguments(call):
    g = torch.Generator().manual_seed(1000 + call)
{sizes}
{inputs}
    return dict({", ".join(f"{n}={n}" for n in program.inputs)})

for name, backend in (("eager", None), ("plain", plain("{rest}")), ("ours", ours("{rest}"))):
    torch._dynamo.reset()
    f, s = (h if backend is None else torch.compile(h, backend=backend, dynamic={program.dynamic}) for h in (program, second))
    with fx_fusion.recording() as report, structures_on_cpu():
        for call in range({CALLS}):
            given = arguments(call)
            try:
                with {context}:
                    r = after(list({call}), s)
                print(name, call, [t.double().sum().item() if isinstance(t, torch.Tensor) else t for t in r])
                pairs = [t for t in r if isinstance(t, torch.Tensor) and t.requires_grad]
                if pairs:
                    torch.autograd.backward([t.sum() for t in pairs])
                print("   gradients", {{n: t.grad.double().sum().item() for n, t in given.items() if isinstance(t, torch.Tensor) and t.is_leaf and t.grad is not None}})
            except Exception as error:
                print(name, call, type(error).__name__, str(error)[:300])
print(report)
'''


def _input_text(item: Input, program: Program) -> str:
    text = item.text
    if re.search(r"torch\.rand|randn|randomized|polar", text) and "randint" not in text and "polar" not in text:
        text = f"({text}).to(torch.{item.dtype or program.dtype})"
    if item.grad and "randomized" not in text:
        text = f"({text}).requires_grad_()" + (" * 1" if item.grad == "made" else "")
    return text
