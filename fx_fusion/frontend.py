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
import importlib.util
import inspect
import io
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import fx

from fx_fusion.after_import import after_import
from fx_fusion.errors import DeclarationError
from fx_fusion.fusion.registry import load_plugins
from fx_fusion.options import wants_front_ends
from fx_fusion.torch_internals.substitutes import substitute


@dataclass(frozen=True)
class Substitute:
    """Say what stands for a function or a class of a library while a graph is captured.

    Args:
        target: the object as the code that calls it finds it, as ``trl.trainer.utils:_use_triton``.
        by: the function or class that is captured instead.
        sources: the modules, functions and classes on whose source ``by`` relies, named like ``target``.
        known: the hashes of those sources (``source_hash``) that are known, each with the versions that have them.
        within: the module in whose code alone ``by`` stands for the target; any, where it is empty.
        unless: a module that takes the calls itself where it is installed: then nothing stands for the target.
    """

    target: str
    by: Any
    sources: tuple[str, ...]
    known: Mapping[str, str]
    within: str = ""
    unless: str = ""


@dataclass(frozen=True)
class FrontEnd:
    """Say what is substituted in the code of a library.

    Args:
        library: the distribution's name, which has a version.
        module: the module whose import makes all targets known.
        substitutes: what stands for what.
        written_out: functions of plain PyTorch that models run where the library is not installed; the report names them.
    """

    library: str
    module: str
    substitutes: tuple[Substitute, ...]
    written_out: tuple[str, ...] = ()


GROUP = "fx_fusion.front_ends"  # the entry points of installed plug-ins
_registered: list[FrontEnd] = []
_met: dict[str, None] = {}  # a sentence for each target that was met since the last report and left alone


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
    """Register the front ends of this package, and those that installed packages name as entry points of the group
    ``fx_fusion.front_ends``. Each of them acts when its library is imported. One that fails is left out with a warning."""
    for file in sorted((Path(__file__).parent / "frontends").glob("[!_]*.py")):
        register_front_end(importlib.import_module(f"fx_fusion.frontends.{file.stem}").FRONT_END)
    load_plugins(GROUP, register_front_end)


def _install(front_end: FrontEnd, module: ModuleType) -> None:
    for each in front_end.substitutes:
        try:
            target = _object(each.target)
        except (ImportError, AttributeError):
            continue  # this version has no such function, so nobody calls it
        substitute(target, functools.partial(_stand_in, each, why_unknown(front_end, each)))


def _stand_in(each: Substitute, unknown: str | None, within: str, options: Mapping[str, Any]) -> Any:
    """Return what is captured in place of a target in the code of a module, or None."""
    if each.within not in ("", within) or not wants_front_ends(options):
        return None
    if unknown is None:
        return each.by
    _met[unknown] = None
    return None


def why_unknown(front_end: FrontEnd, each: Substitute) -> str | None:
    """Return why a target is not substituted: its source is of no known version, or another library takes its calls. None
    where it is."""
    if each.unless and importlib.util.find_spec(each.unless) is not None:
        return f"{each.target} is left to {each.unless}, which is installed"
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


def left_alone() -> list[str]:
    """Return a sentence for each target that was met since the last call, and whose source is not known."""
    found = list(_met)
    _met.clear()
    return found


def libraries_in(graph: fx.Graph) -> tuple[str, ...]:
    """Return the libraries whose calls a captured graph holds by a front end."""
    frames = {frame for node in graph.nodes for frame in _FRAME.findall(node.stack_trace or "")} if _registered else set()
    found = (each.library for each in _registered for s in each.substitutes if not frames.isdisjoint(_frames(s.by)))
    return tuple(sorted(set(found)))


def written_out_in(graph: fx.Graph) -> tuple[str, ...]:
    """Return a sentence for each library whose absence fills a captured graph with calls of plain PyTorch."""
    names = {name: each.library for each in _registered for name in each.written_out if not _is_installed(each.library)}
    if not names:
        return ()
    called = re.compile(rf", in ({'|'.join(map(re.escape, names))})$", re.MULTILINE)
    counts = Counter(name for node in graph.nodes for name in set(called.findall(node.stack_trace or "")))
    return tuple(
        f"{count} of its nodes are {name} in plain PyTorch: with {names[name]} installed its kernels are called instead"
        for name, count in counts.items()
    )


def _is_installed(library: str) -> bool:
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


_FRAME = re.compile(r'File "([^"]*)", line \d+, in (\w+)')


def _frames(by: Any) -> set[tuple[str, str]]:
    """Return file and name of the functions that a stand-in is, or has."""
    functions = [getattr(f, "__func__", f) for f in vars(by).values()] if inspect.isclass(by) else [inspect.unwrap(by)]
    codes = (f.__code__ for f in functions if inspect.isfunction(f))
    return {(code.co_filename, code.co_name) for code in codes}


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
