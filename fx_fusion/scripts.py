"""A script that runs as it is, in this process, and what ``torch.compile`` means in it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fx_fusion.errors import OptionError
from fx_fusion.options import inductors_own
from fx_fusion.pipes import reader_ended
from fx_fusion.profiling import Measured
from fx_fusion.report.verdict import NOTHING_COMPILED
from fx_fusion.targets import print_raised
from fx_fusion.torch_internals.inductor import configuration
from fx_fusion.torch_internals.modules import call_through, called_as_it_is, is_called_as_it_is

_INTERRUPTED = 130  # as a shell has it


def run_script(script: str, arguments: Sequence[str], *, module: bool = False) -> int:
    """Run a script in this process, or a module by its name, as ``python -m`` does; its exit code, 2 where it gives an
    option that is none. What it raises is printed."""
    if not module and not Path(script).is_file():
        raise ValueError(f"there is no script {script!r}; -m runs a module")
    known, sys.argv = sys.argv, [script, *arguments]
    # It may change the folder it runs in.
    where, beside = str(Path(script).absolute()), str(Path.cwd() if module else Path(script).resolve().parent)
    sys.path.insert(0, beside)
    try:
        if module and not _is_module(script):
            print(f"fx_fusion: there is no module {script!r}", file=sys.stderr)
            return 2
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(where, run_name="__main__")
    except Measured:
        raise
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except OptionError as error:  # the frames of torch below it say nothing
        line = next((f":{frame.lineno}" for frame in reversed(_frames(error)) if frame.filename == where), "")
        print(f"fx_fusion: {script}{line}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BaseException as error:  # whatever it raises is the script's, and there is a report to show
        if isinstance(error, BrokenPipeError) and reader_ended():
            raise
        print_raised(error)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.argv = known
        if beside in sys.path:
            sys.path.remove(beside)
    return 0


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a package around it is none, or no name
        return False


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def why_nothing(script: str, where: Path, *, tried: bool = False) -> str:
    """Return what to do about a script, or a module, that compiled nothing: what it has to call, or which of its functions
    may be asked for instead. ``where``: it is, wherever we are. ``tried``: to compile what it trains."""
    if tried:
        return "nothing was compiled: in this process no module with parameters was trained, or Dynamo skips it"
    said = f"{NOTHING_COMPILED}, in this process; or give --compile"
    if not where.is_file():
        return said
    body = ast.parse(where.read_bytes()).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef) and _takes_nothing(node)]
    if not functions:
        return said
    named = f"{script}:{functions[0]}" if len(functions) == 1 else f"{script}:FUNCTION ({', '.join(functions)})"
    return f"{said}. Where a function of it returns a model and its arguments: python -m fx_fusion explain {named}"


def _takes_nothing(function: ast.FunctionDef) -> bool:
    given = function.args
    needed = len(given.posonlyargs) + len(given.args) - len(given.defaults) + given.kw_defaults.count(None)
    return not needed and not function.name.startswith("_")


@contextlib.contextmanager
def compiling(wanted: str, options: dict[str, Any]) -> Iterator[None]:
    """Make ``torch.compile`` inside, with Inductor (or without a backend) or with fx_fusion, mean the wanted one of both."""
    theirs: Callable[..., Any] = torch.compile

    def ours(model: Any = None, *, backend: Any = "inductor", **given: Any) -> Any:
        if backend not in ("inductor", "fx_fusion"):
            return theirs(model, backend=backend, **given)
        mode, known = given.pop("mode", None), given.pop("options", None) or {}
        both = {**known, **({"mode": mode} if mode else {}), **options}
        if wanted == "inductor":
            both = dict(configuration(both.get("mode"), inductors_own(both)))
        return theirs(model, backend=wanted, **({"options": both} if both else {}), **given)

    torch.compile = ours  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = theirs


@contextlib.contextmanager
def compiling_what_trains(options: dict[str, Any]) -> Iterator[None]:
    """Compile, inside, the first module with parameters that is called in training, for the calls of it that train.

    Other calls (``generate``, evaluation) run as before. A script that compiles a model by itself is left to do so."""
    original = torch.nn.Module.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = torch.compiler.is_compiling()  # of a function around the model, which the script compiles by itself
        if not tracing and torch.is_grad_enabled() and self.training and any(p.requires_grad for p in self.parameters()):
            torch.nn.Module.__call__ = original  # type: ignore[method-assign]
            if not hasattr(self, "_orig_mod") and is_called_as_it_is(self):
                call_through(self, _for_training(self, options))
        return original(self, *args, **kwargs)

    torch.nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]


def _for_training(module: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Return what a module is called by: compiled where gradients are computed."""

    def plain(*args: Any, **kwargs: Any) -> Any:  # Dynamo skips the method itself, where the module is one of torch's
        return called_as_it_is(module, *args, **kwargs)

    compiled = torch.compile(plain, backend="fx_fusion", **({"options": options} if options else {}))

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() and module.training else plain)(*args, **kwargs)

    return call
