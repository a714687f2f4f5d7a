"""The order of the rooms, no circles, private names of torch in their room, files of a size that can be read."""

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A room may import those above it, and itself. Modules at the top of the package are named one by one.
ORDER = (
    {"errors", "accuracy", "after_import", "pipes", "console", "torch_internals"},
    {"graph"},
    {"ops"},
    {"runtime"},
    {"kernels"},
    {"memory"},
    {"float8"},
    {"fusion"},
    {"options"},
    {"frontend", "frontends"},
    {"rewrite"},
    {"patterns"},
    {"inductor"},
    {"cost"},
    {"report"},
    {"candidate"},
    {"pipeline"},
    {"fallback"},
    {"rewriting", "versions"},
    {"backend"},
    {"testing"},
    {"checking"},
    {"tiny_configs", "transformers_models"},
    {"plugin", "explaining", "accelerate", "benching", "doctor", "demo", "lightning", "profiling", "skeleton", "targets", "trainer", "verifying"},
    {"scripts", "showing", "commands", "__init__", "__main__"},
)
RANK = {room: i for i, rooms in enumerate(ORDER) for room in rooms}
# Dynamo's and AOTAutograd's caches ask a tensor subclass for these by name.
PROTOCOLS = {"_stable_hash_for_caching"}


def sources():
    """Every module of the package, by dotted name without ``fx_fusion.``."""
    for folder, start in ((ROOT / "fx_fusion", ""), (ROOT / "kernels", "kernels."), (ROOT / "patterns", "patterns.")):
        for file in sorted(folder.rglob("*.py")):
            inside = file.relative_to(folder)
            if not (start == "" and inside.parts[0] in ("kernels", "patterns")):
                yield start + ".".join(inside.with_suffix("").parts), file


MODULES = dict(sources())
TREES = {name: ast.parse(file.read_text()) for name, file in MODULES.items()}


def imports_of(name):
    """The modules of ours that a module imports, wherever in the file."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fx_fusion"):
            base = node.module.removeprefix("fx_fusion").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in MODULES else f"{base}.__init__".lstrip(".") if base not in MODULES else base
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("fx_fusion.") for a in node.names if a.name.startswith("fx_fusion."))


def test_rooms_import_those_above_them():
    upside_down = [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in imports_of(name)
        if RANK[imported.split(".")[0]] > RANK[name.split(".")[0]]
    ]
    assert not upside_down, "\n".join(upside_down)


HIDE_THE_VERB = {
    "what", "whether", "who", "whose", "which", "how", "why", "where", "those", "inside", "below", "of", "by", "in", "behind",
}  # fmt: skip


def test_docstrings_begin_with_a_verb_or_an_article():
    """A word like What or Of in front hides what a function does."""
    found = [
        f"{name}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if (text := ast.get_docstring(node)) and text.split()[0].strip(",.:;").lower() in HIDE_THE_VERB
    ]
    assert not found, "\n".join(found)


def test_no_circles():
    graph = {name: {i for i in imports_of(name) if i in MODULES and i != name} for name in MODULES}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for other in sorted(graph[name]):
                visit(other)
            path.pop()
            done.add(name)

    for name in graph:
        visit(name)


def test_no_type_checking_imports_of_our_own():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                assert "fx_fusion" not in ast.dump(node), f"{name} imports a module of ours for its types only: that hides a circle"


def test_the_product_imports_no_tests():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not any(module.split(".")[0] in ("tests", "bench") for module in modules), name


def private(part):
    return part.startswith("_") and not part.endswith("__")


def private_names_of_torch(tree, ours):
    """Imports from private modules of torch, and attributes that begin with an underscore and are none of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (f"from {node.module}" for part in parts if private(part))
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "torch" and any(map(private, a.name.split("."))))
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in ours:
            yield f".{node.attr}"


def test_private_names_of_torch_stand_in_their_room():
    ours = set(PROTOCOLS)
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                ours.add(node.target.id)
    found = [
        f"{name}: {what}"
        for name, tree in TREES.items()
        if not name.startswith("torch_internals") and name != "accelerate"  # which has accelerate's enum to deal with
        for what in private_names_of_torch(tree, ours)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("torch_internals.") and not n.endswith("__init__")])
def test_each_use_says_what_happens_when_the_name_is_gone(name):
    tree, text = TREES[name], MODULES[name].read_text()
    assert ast.get_docstring(tree), name
    speaks = [f for f in tree.body if isinstance(f, ast.FunctionDef) and "Gone" in (ast.get_docstring(f) or "")]
    reads_private = bool(list(private_names_of_torch(tree, set())))
    assert speaks or "Gone" in text or not reads_private, f"{name} does not say what happens without its private names"


def test_files_can_be_read():
    lines = {name: len(file.read_text().splitlines()) for name, file in MODULES.items() if not name.endswith("__init__")}
    long = {name: n for name, n in lines.items() if n > 500}
    assert not long, long
    assert statistics.median(lines.values()) <= 140


def test_every_module_says_what_it_is():
    for name, tree in TREES.items():
        doc = ast.get_docstring(tree)
        assert doc, name
