"""``python -m fx_fusion new-fusion``: the files of a new fusion, which work as they stand."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Mapping
from pathlib import Path

import jinja2

from fx_fusion.fusion.registry import all_fusions
from fx_fusion.ops.library import names

_FILES = Path(__file__).parent / "skeleton_files"
_IN_A_CHECKOUT = """\
test it:  python -m pytest -k {name} -m "not slow" tests/fusions
then:     change what the comments with CHANGE name (docs/add_a_fusion.md), and add a row to docs/fusions.md"""
_IN_A_PACKAGE = """\
check it, where the package can be imported:

    TRITON_INTERPRET=1 python -c "from fx_fusion.plugin import check, register; \
from {module} import FUSION; register(FUSION); print(check(FUSION))"

use it: fx_fusion.register(FUSION), or for all who install the package, in its pyproject.toml:

    [project.entry-points."fx_fusion.fusions"]
    {name} = "{module}:FUSION"

then: change what the comments with CHANGE name (docs/plugins.md)"""


def new_fusion(name: str, into: str | None) -> str:
    """Write the files of a fusion; returns what was written and what comes next.

    Inside a checkout: its pattern, its kernel and its test. Elsewhere, or into the folder of a package: one module.
    Raises ValueError for a name that can't be a fusion's, for a folder that is no package's, and for files that exist."""
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise ValueError(f"{name!r} can't name a fusion: files, an op and a Python name are called so")
    _free(name)
    root = None if into is not None else _checkout(Path.cwd())
    if root is not None:
        files = {
            root / "patterns" / f"{name}.py": "pattern",
            root / "kernels" / f"{name}.py": "kernel",
            root / "tests" / "fusions" / f"test_{name}.py": "test",
        }
        _write(files, name=name)
        return f"{_written(files)}\n{_IN_A_CHECKOUT.format(name=name)}"
    folder = Path.cwd() if into is None else Path(into).resolve()
    module = ".".join([*_package(folder, certainly=into is not None), name])
    files = {folder / f"{name}.py": "plugin"}
    _write(files, name=name, module=module)
    return f"{_written(files)}\n{_IN_A_PACKAGE.format(name=name, module=module)}"


def _free(name: str) -> None:
    """Raise ValueError for a name that a fusion or an op has, or that means something else in the files."""
    if name in {fusion.name for fusion in all_fusions()}:
        raise ValueError(f"a fusion {name!r} exists already")
    if name in names():
        raise ValueError(f"an op {name!r} exists already")
    tree = ast.parse(_rendered("plugin", name="_", module="_"))
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    if name in used | {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}:
        raise ValueError(f"{name!r} means something else in the file of a fusion: choose another name")


def _checkout(folder: Path) -> Path | None:
    """The checkout of this repository that a folder is in."""
    marks = ("fx_fusion/fusion/declaration.py", "patterns", "kernels", "tests/fusions")
    return next((f for f in (folder, *folder.parents) if all((f / mark).exists() for mark in marks)), None)


def _package(folder: Path, *, certainly: bool) -> list[str]:
    """Return the names by which a folder is imported; none where it is no package. ``certainly``: it is one, with an
    __init__.py or without."""
    parts: list[str] = []
    while (folder / "__init__.py").exists() or (certainly and not parts):
        if not folder.name.isidentifier():
            raise ValueError(f"{folder.name!r} can't be imported: --into takes the folder of a package, as src/my_fusions")
        parts.insert(0, folder.name)
        folder = folder.parent
    return parts


def _write(files: Mapping[Path, str], **values: str) -> None:
    """Write every file from its template, or none where one exists."""
    if there := [str(file) for file in files if file.exists()]:
        raise ValueError(f"{', '.join(there)} would be overwritten")
    for file, template in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_rendered(template, **values))


def _written(files: Mapping[Path, str]) -> str:
    here = Path.cwd()
    return f"written: {' '.join(str(f.relative_to(here) if f.is_relative_to(here) else f) for f in files)}"


def _rendered(template: str, **values: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )  # fmt: skip
    return environment.get_template(f"{template}.py.jinja").render(values).rstrip() + "\n"
