"""The document on the architecture: every file and function that it names exists, every room is in it in the order of the imports."""

import ast
import re
from pathlib import Path

import pytest

from tests.engine.test_architecture import ORDER

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TABLES = [line for line in PAGE.splitlines() if line.startswith("|")]


def names_in(file):
    """Functions and classes of a file, methods with and without their class."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name


def where(path):
    return next((folder / path for folder in (ROOT / "fx_fusion", ROOT) if (folder / path).exists()), None)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"[\w/]+\.py\b", PAGE))))
def test_files_exist(path):
    assert where(path) is not None


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (path, re.findall(r"`([\w.]+)`", rest))
        for line in TABLES
        for path, rest in re.findall(r"`([\w/]+\.py)`((?:,? ?`[A-Za-z_][\w.]*`(?![\w/]))+)", line)
    ],
)
def test_functions_of_the_tables_exist(path, names):
    assert [n for n in names if not n.endswith(".py") and n not in set(names_in(where(path)))] == []


def test_functions_of_the_column_exist():
    column = PAGE.split("```")[1]
    for path, name in re.findall(r"([\w/]+\.py)\s+(\w+)\b", column):
        assert name in set(names_in(where(path))), (path, name)
    for module, name in re.findall(r"\b(backend|pipeline)\.(\w+)", column):
        assert name in set(names_in(where(f"{module}.py"))), (module, name)


def test_rooms_stand_in_the_order_of_their_imports():
    named = [re.findall(r"`(\w+?)(?:\.py|/)?`", line.split("|")[1]) for line in TABLES if re.match(r"\| `\w+(\.py|/)?`", line)]
    rooms = [set(names) for names in named if names and names[0] in {room for rooms in ORDER for room in rooms}]
    assert rooms[:-1] == list(ORDER[:-1])
    assert rooms[-1] <= ORDER[-1]
