"""Front ends: calls of another library that end a graph become part of it.

A front end names functions of a library that Dynamo cannot capture, the sources of them that it knows, and what stands for
each in a graph: plain PyTorch, which is then matched like any other graph, or an op. Each file of ``fx_fusion/frontends``
declares one, as ``FRONT_END``; a plug-in registers its own.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import io
import os
import textwrap
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fx_fusion.after_import import after_import
from fx_fusion.errors import DeclarationError
from fx_fusion.options import wants_front_ends
from fx_fusion.torch_internals.substitutes import substitute


@dataclass(frozen=True)
class Substitute:
    """What stands for a function or a class of a library while a graph is captured.

    Args:
        target: the object as the code that calls it finds it, as ``trl.trainer.utils:_use_triton``.
        by: the function or class that is captured instead.
        sources: the modules, functions and classes on whose source ``by`` relies, named like ``target``.
        known: the hashes of those sources (``source_hash``) that are known, each with the versions that have them.
        within: the module in whose code alone ``by`` stands for the target; any, where it is empty.
    """

    target: str
    by: Any
    sources: tuple[str, ...]
    known: Mapping[str, str]
    within: str = ""


@dataclass(frozen=True)
class FrontEnd:
    """What is substituted in the code of a library.

    Args:
        library: the distribution's name, which has a version.
        module: the module whose import makes all targets known.
        substitutes: what stands for what.
    """

    library: str
    module: str
    substitutes: tuple[Substitute, ...]


_registered: list[FrontEnd] = []
_unused: dict[str, str] = {}  # a sentence for each target that is left alone, by the file that it is in


def register_front_end(front_end: FrontEnd) -> None:
    """Use a front end in everything that is captured from now on. Raises DeclarationError for anything else than one, and
    for a second one of the same library. Nothing happens when the same one is registered again."""
    if not isinstance(front_end, FrontEnd):
        raise DeclarationError(f"register_front_end() takes a FrontEnd; got {front_end!r}.")
    if front_end in _registered:
        return
    if front_end.library in (known.library for known in _registered):
        raise DeclarationError(f"the library {front_end.library!r} has a front end already.")
    _registered.append(front_end)
    after_import(front_end.module, functools.partial(_install, front_end))


@functools.cache
def install() -> None:
    """Register the front ends of this package. Each of them acts when its library is imported."""
    for file in sorted((Path(__file__).parent / "frontends").glob("[!_]*.py")):
        register_front_end(importlib.import_module(f"fx_fusion.frontends.{file.stem}").FRONT_END)


def _install(front_end: FrontEnd, module: ModuleType) -> None:
    for each in front_end.substitutes:
        original = _object(each.target)
        file = inspect.getsourcefile(inspect.unwrap(original)) or ""
        if (trouble := why_unknown(front_end, each)) is not None:
            _unused[file] = trouble
        elif not substitute(original, functools.partial(_stand_in, each)):
            _unused[file] = f"this version of torch lets nothing stand for {each.target}"


def _stand_in(each: Substitute, within: str, options: Mapping[str, Any]) -> Any:
    """Return what is captured in place of a target in the code of a module, or None."""
    return each.by if each.within in ("", within) and wants_front_ends(options) else None


def why_unknown(front_end: FrontEnd, each: Substitute) -> str | None:
    """Return why a target is not substituted: its source is of no known version. None where it is known."""
    try:
        if source_hash(each.sources) in each.known:
            return None
    except (ImportError, AttributeError, OSError, TypeError, SyntaxError) as error:
        return f"{each.target} has no source that can be read ({type(error).__name__}: {error})"
    try:
        version = importlib.metadata.version(front_end.library)
    except importlib.metadata.PackageNotFoundError:
        version = "of no version"
    known = ", ".join(dict.fromkeys(each.known.values()))
    return f"the source of {each.target} in {front_end.library} {version} is none of those that are known ({known})"


def unused_at(broke: str) -> str:
    """Return why no front end stands for what a graph ends at, if one was to. ``broke``: the sentence on the graph break."""
    return next((said for file, said in _unused.items() if file and f" at {os.path.basename(file)}:" in broke), "")


def source_hash(names: tuple[str, ...]) -> str:
    """Return a hash of the source of modules, functions and classes (``module:name`` or ``module``) without comments,
    docstrings and empty lines. Raises OSError where there is no source."""
    text = "\n".join(_normalized(inspect.getsource(_object(name))) for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _object(name: str) -> Any:
    module, _, inside = name.partition(":")
    return functools.reduce(getattr, filter(None, inside.split(".")), importlib.import_module(module))


def _normalized(source: str) -> str:
    source = textwrap.dedent(source)
    lines = source.splitlines()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            for i in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[i] = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())
