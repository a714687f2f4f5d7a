"""A script that runs as it is, in this process, and what ``torch.compile`` means in it."""

from __future__ import annotations

import ast
import contextlib
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

_INTERRUPTED = 130  # as a shell has it


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run a script in this process; its exit code, 2 where it gives an option that is none. What it raises is printed."""
    if not Path(script).is_file():
        raise ValueError(f"there is no script {script!r}")
    known, sys.argv = sys.argv, [script, *arguments]
    where, beside = str(Path(script).absolute()), str(Path(script).resolve().parent)  # it may change the folder it runs in
    sys.path.insert(0, beside)
    try:
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


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def why_nothing(script: str, where: Path) -> str:
    """Returns what to do about a script that compiled nothing: what it has to call, or which of its functions may be asked
    for instead. ``where``: it is, wherever we are."""
    body = ast.parse(where.read_bytes()).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef) and _takes_nothing(node)]
    if not functions:
        return f"{NOTHING_COMPILED}, in this process"
    named = f"{script}:{functions[0]}" if len(functions) == 1 else f"{script}:FUNCTION ({', '.join(functions)})"
    return (f"{NOTHING_COMPILED}, in this process. Where a function of it returns a model and its arguments: "
            f"python -m fx_fusion explain {named}")  # fmt: skip


def _takes_nothing(function: ast.FunctionDef) -> bool:
    given = function.args
    needed = len(given.posonlyargs) + len(given.args) - len(given.defaults) + given.kw_defaults.count(None)
    return not needed and not function.name.startswith("_")


@contextlib.contextmanager
def compiling(wanted: str, options: dict[str, Any]) -> Iterator[None]:
    """Inside, ``torch.compile`` with Inductor (or without a backend), or with fx_fusion, means the wanted one of both."""
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
