"""The pages for users: their code runs as far as it can here, and what they name (messages, variables, commands) exists."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "index", "install", "quickstart", "huggingface", "trl", "troubleshooting", "faq", "padding_and_deferred_outputs", "accuracy",
    "report", "verify", "options", "command_line", "api",
)  # fmt: skip
TEXT = {"README": (ROOT / "README.md").read_text(), **{name: (ROOT / "docs" / f"{name}.md").read_text() for name in PAGES}}
BLOCKS = {
    f"{name}-{n}": code for name in TEXT for n, code in enumerate(re.findall(r"^```python\n(.*?)^```$", TEXT[name], re.S | re.M))
}  # fmt: skip
# What accelerate says to a script that does not import fx_fusion: in the script, on its command line, of a file.
OF_ACCELERATE = (
    "'FX_FUSION' is not a valid DynamoBackend", "invalid choice: 'fx_fusion'", "Unknown dynamo backend: FX_FUSION",
)  # fmt: skip
OF_OTHERS = (*OF_ACCELERATE, "Invalid backend: 'fx_fusion'", "Either mode or options can be specified")


@pytest.fixture
def examples(monkeypatch, tmp_path):
    """Yield where the code of the pages runs: beside examples/small.py, in an empty folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("small", None)


@pytest.mark.parametrize("name", BLOCKS)
def test_code_compiles_and_what_it_imports_exists(name, examples):
    known = {}
    tree = ast.parse(BLOCKS[name])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = pytest.importorskip(alias.name)
                known[(alias.asname or alias.name).partition(".")[0]] = sys.modules[module.__name__.partition(".")[0]]
        elif isinstance(node, ast.ImportFrom):
            module = pytest.importorskip(node.module)
            known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    known.setdefault("fx_fusion", importlib.import_module("fx_fusion"))
    known.setdefault("torch", importlib.import_module("torch"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolved(node, known)
        elif isinstance(node, ast.Call) and node.keywords and (called := resolved(node.func, known)) is not None:
            inspect.signature(called).bind_partial(**{k.arg: None for k in node.keywords if k.arg})


def resolved(node, known):
    """Return what a dotted name stands for, None if its first name is not imported; an AttributeError where it has no such
    name."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = resolved(node.value, known)
    return None if owner is None else getattr(owner, node.attr)


def test_the_loop_of_the_quickstart(examples, capsys):
    pytest.importorskip("transformers")
    exec(compile(BLOCKS["quickstart-0"], "quickstart.md", "exec"), {})
    assert re.search(r"^fused +linear_cross_entropy ", capsys.readouterr().out, re.M)


RUNS = {
    "quickstart-1": "accelerate", "quickstart-2": "lightning", "quickstart-3": "accelerate", "huggingface-0": "accelerate",
    "huggingface-1": "accelerate", "huggingface-2": "peft", "accuracy-0": "transformers",
}  # fmt: skip


def test_the_code_that_runs_is_on_the_pages():
    assert set(RUNS) <= set(BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_code_runs(name, examples):
    pytest.importorskip(RUNS[name])
    exec(compile(BLOCKS[name], name, "exec"), {"__name__": name})


def strings():
    """Every string of the sources, with dots for what is put in, as one text."""
    parts = []
    for folder in ("fx_fusion", "patterns", "kernels"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts.append("".join(v.value if isinstance(v, ast.Constant) else "..." for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    parts.append(node.value)
    return "\n".join(parts)


@pytest.mark.parametrize("page", ["troubleshooting", "install", "report"])
def test_messages_exist(page):
    """Cells below "message" or "it says" quote the sources: each piece between dots is in one of their strings."""
    said, missing = strings(), []
    for table in re.findall(r"^\| (?:message|it says) \|.*?(?=^$)", TEXT[page], re.S | re.M):
        for row in table.splitlines()[2:]:
            for quoted in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                quoted = re.sub(r"^(fused|kept|declined|near|not recognized):", "", quoted)
                pieces = [piece.strip(" ;:.,") for piece in quoted.split("...")]
                if not quoted.startswith(OF_OTHERS):
                    missing += [piece for piece in pieces if piece and piece not in said]
    assert missing == []


def test_a_search_for_what_accelerate_says_finds_the_pages(tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "c.yaml").write_text("distributed_type: 'NO'\ndynamo_config:\n  dynamo_backend: FX_FUSION\nnum_processes: 1\nuse_cpu: true\n")
    (tmp_path / "s.py").write_text("from accelerate import Accelerator\nAccelerator(cpu=True, dynamo_backend='fx_fusion')\n")
    launch = (sys.executable, "-m", "accelerate.commands.launch")
    for how, said in zip((
        (sys.executable, "s.py"),
        (*launch, "--cpu", "--dynamo_backend", "fx_fusion", "s.py"),
        (*launch, "--config_file", "c.yaml", "s.py"),
    ), OF_ACCELERATE, strict=True):  # fmt: skip
        found = subprocess.run(how, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert said in found.stderr.splitlines()[-1]
        assert all(said in TEXT[page] for page in ("huggingface", "troubleshooting"))


def test_variables_and_commands_exist():
    from fx_fusion.__main__ import _parser
    from fx_fusion.options import _OURS

    source = "\n".join(f.read_text() for f in (ROOT / "fx_fusion").rglob("*.py"))
    commands = next(a.choices for a in _parser()._actions if isinstance(a.choices, dict))
    of_options = {f"FX_FUSION_{name.upper()}" for name in _OURS}
    for text in TEXT.values():
        for variable in re.findall(r"\bFX_FUSION_[A-Z_]+[A-Z]\b", text):
            assert variable in of_options or f'"{variable}"' in source, variable
        for command, rest in re.findall(r"python -m fx_fusion ([a-z][a-z-]*)\b([^`\n#]*)", text):
            options = {o for a in commands[command]._actions for o in a.option_strings}
            assert [o for o in re.findall(r"--[a-z][a-z-]*", rest.split(" -- ")[0]) if o not in options] == [], (command, rest)


def test_every_option_has_a_variable_on_the_page_of_hugging_face(monkeypatch):
    """Its row gives the values that the code takes from the environment; another one is refused where there is a list."""
    from fx_fusion.errors import OptionError
    from fx_fusion.options import _OURS, parse

    rows = dict(re.findall(r"^\| `(FX_FUSION_\w+)` \| (.*) \|$", TEXT["huggingface"], re.M))
    assert list(rows) == [f"FX_FUSION_{name.upper()}" for name in _OURS]
    for variable, values in rows.items():
        for value in re.findall(r"`([^`]+)`", values):
            monkeypatch.setenv(variable, value)
            parse(None, None)
        if _OURS[variable.removeprefix("FX_FUSION_").lower()][0] is not list:
            monkeypatch.setenv(variable, "no such value")
            with pytest.raises(OptionError):
                parse(None, None)
        monkeypatch.delenv(variable)


TERMS = ("site", "AOTAutograd", "joint graph", "e4m3", "graph break")
FOR_USERS = (
    "faq", "quickstart", "report", "options", "memory", "troubleshooting", "float8", "huggingface", "trl", "padding_and_deferred_outputs", "verify",
)  # fmt: skip


@pytest.mark.parametrize("page", FOR_USERS)
def test_terms_lead_to_the_glossary_where_they_are_first_used(page):
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.S | re.M)
    paragraphs = re.split(r"\n\s*\n", text)
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    for term in TERMS:
        assert f"**{term}**" in glossary
        first = next((p for p in paragraphs if re.search(rf"\b{term}s?\b", p)), "glossary.md")
        assert "glossary.md" in first, (term, first)


def test_pages_are_short():
    for name in PAGES:
        assert len(TEXT[name].splitlines()) <= (180 if name == "command_line" else 150), name
