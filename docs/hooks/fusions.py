"""A hook of MkDocs: a section for every fusion behind the table of fusions.md, made from its declaration and its code."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.registry import built_in

MARK = "<!-- a section for every fusion -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri != "fusions.md":
        return markdown
    names = "|".join(sorted((f.name for f in built_in()), key=len, reverse=True))
    table, _, rest = markdown.partition(MARK)
    table = re.sub(r"^(\|[^|]+\|)", lambda cell: re.sub(rf"`({names})`", r"[`\1`](#\1)", cell[1]), table, flags=re.M)
    return "\n\n".join([table, *map(section, built_in()), rest])


def section(fusion: Fusion) -> str:
    """Return what a fusion does, as Markdown."""
    module = sys.modules[fusion.pattern.__module__]
    rows = {
        "found by": _found_by(fusion),
        "inputs": ", ".join(f"`{name}: {spec}`" for name, spec in fusion.inputs.items()),
        "parameters": _variants(fusion),
        "replaced by": _replaced_by(fusion),
        "not replaced where": _listed(said_by(fusion.guard)),
        'left to Inductor by `select="auto"`': _listed(_kept(fusion)),
        "bytes moved, forward + backward": " here, ".join(f"`{formula}`" for formula in fusion.traffic or ()),
        "tried before": ", ".join(f"[`{name}`](#{name})" for name in fusion.before),
        "simplest to write": f"`{fusion.instead}`" if fusion.instead else "",
        "switched off by": f'`options={{"fusions": ["-{fusion.name}"]}}`',
        "source": _linked(fusion.source),
    }
    if fusion.traffic:
        rows["bytes moved, forward + backward"] += " by Inductor"
    near = list(dict.fromkeys(s for other in (module, *_shared(module)) for s in near_misses(other)))
    return "\n\n".join(
        [
            f"## {fusion.name} {{: #{fusion.name} }}",
            _prose(module.__doc__ or ""),
            "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items() if text)]),
            _folded("The pattern, in PyTorch", _code(_sources(fusion))),
            _folded("The kernel", _code(_kernel(fusion), "text")) if _kernel(fusion) else "",
            _folded("Near misses: what the report says", "\n".join(f"- {_escaped(s)}" for s in near)) if near else "",
        ]
    )


# -- rows ----------------------------------------------------------------------------------------------------------
def _found_by(fusion: Fusion) -> str:
    spellings = ", ".join(f"`{function.__name__}`" for function in fusion.spellings)
    if fusion.find is not None:
        return f"a search of the graph (`find`); `{fusion.pattern.__name__}` says what a match computes"
    return f"matching `{fusion.pattern.__name__}`" + (f", or another spelling: {spellings}" if spellings else "")


def _variants(fusion: Fusion) -> str:
    """The values of static parameters, and the inputs that may be missing. (What a search finds, tests have examples of.)"""
    given: dict[str, list[Any]] = {}
    for name, value in ((n, v) for variant in fusion.variants for n, v in variant.items()):
        if value not in given.setdefault(name, []):
            given[name].append(value)
    optional = [f"`{name}`" for name, values in given.items() if values == [None]]
    chosen = {n: ", ".join(f"`{v!r}`" for v in values) for n, values in given.items() if values != [None]}
    texts = [f"`{n}`" if fusion.find is not None else f"`{n}`: {values}" for n, values in chosen.items()]
    without = [f"with and without {', '.join(optional)}"] if optional else []
    return "; ".join([*([", ".join(texts)] if fusion.find is not None and texts else texts), *without])


def _replaced_by(fusion: Fusion) -> str:
    kernels = f"`kernels/{fusion.name}.py`"
    if fusion.emit is None:
        return f"the op `torch.ops.fx_fusion.{fusion.name}` ({kernels})"
    written = f"what `emit` in `patterns/{fusion.name}.py` writes into the graph"
    return f"{written}, around the op of {kernels}" if _kernel(fusion) else written


def _kept(fusion: Fusion) -> Iterator[str]:
    if not fusion.on_cpu:
        yield "on CPU Inductor compiles this as well"
    yield from said_by(fusion.why_keep)


def _linked(source: str) -> str:
    source = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)
    return re.sub(r"(?<![/\w])(github\.com/[\w/-]+)", r"[\1](https://\1)", source)


def _listed(sentences: Iterator[str]) -> str:
    return "<br>".join(map(_escaped, dict.fromkeys(sentences)))


# -- what the code says --------------------------------------------------------------------------------------------
def said_by(function: Callable[..., Any] | None) -> Iterator[str]:
    """The sentences that a check returns, itself or by another check of fx_fusion that it calls."""
    if function is None or not inspect.isfunction(function):
        return
    for node in ast.walk(_parsed(function)):
        if isinstance(node, ast.Return) and node.value is not None:
            yield from _sentences(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = _resolved(node.func, function.__globals__)
            if inspect.isfunction(called) and called.__module__.startswith("fx_fusion.") and called is not function:
                yield from said_by(called)


def near_misses(module: ModuleType) -> Iterator[str]:
    """The sentences of the near misses of a module."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("NearMiss", "NotThis"):
            yield from (found for part in node.args[-1:] for found in _sentences(part))


def _shared(module: ModuleType) -> Iterator[ModuleType]:
    """The modules of ``patterns/sites`` that a pattern takes its search from."""
    names = {getattr(value, "__module__", "") for value in vars(module).values()}
    yield from (sys.modules[name] for name in sorted(names) if name.startswith("fx_fusion.patterns.sites."))


def _parsed(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _resolved(name: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(name, ast.Name):
        return known.get(name.id)
    return getattr(_resolved(name.value, known), name.attr, None) if isinstance(name, ast.Attribute) else None


def _sentences(node: ast.AST) -> Iterator[str]:
    """The strings of several words in an expression, each whole."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        if len(re.findall(r"[a-z]{2,}", text := _text(node))) > 2:
            yield text
    else:
        yield from (found for part in ast.iter_child_nodes(node) for found in _sentences(part))


def _text(node: ast.AST) -> str:
    """A string, with dots in the place of what is put in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def _sources(fusion: Fusion) -> str:
    functions = (fusion.pattern, *fusion.spellings)
    return "\n\n".join(dict.fromkeys(textwrap.dedent(inspect.getsource(f)) for f in functions))


def _kernel(fusion: Fusion) -> str:
    module = sys.modules.get(f"fx_fusion.kernels.{fusion.name}")
    return inspect.cleandoc((module and module.__doc__) or "")


# -- Markdown ------------------------------------------------------------------------------------------------------
def _prose(docstring: str) -> str:
    """A docstring as Markdown: its indented lines are code there too."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(docstring))


def _escaped(sentence: str) -> str:
    return re.sub(r"([|*_<])", r"\\\1", sentence)


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _folded(title: str, markdown: str) -> str:
    return f'??? note "{title}"\n\n{textwrap.indent(markdown, "    ")}' if markdown else ""
