"""A hook of MkDocs: a section of api.md for every name that fx_fusion exports, made from its signature and docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import fx_fusion

MARK = "<!-- a section for every name -->"
RESULTS = ("fx_fusion.verifying.Verification", "fx_fusion.float8.stats.Float8Stats")  # what functions return
PARTS = re.compile(r"^(Args|Attributes|Returns|Raises):$\n((?:^(?: .*)?$\n?)+)", re.M)
ENTRY = re.compile(r"^(\*{0,2}\w+): ((?:.*\n?)(?:^ +.*\n?)*)", re.M)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri != "api.md":
        return markdown
    return markdown.replace(MARK, "\n\n".join(section(name, found) for name, found in public().items()))


def public() -> dict[str, Any]:
    """Functions first, then classes, then errors; by the name under which a user finds them."""
    names = {f"fx_fusion.{name}": getattr(fx_fusion, name) for name in fx_fusion.__all__}
    for path in RESULTS:
        module, _, name = path.rpartition(".")
        names[path] = getattr(importlib.import_module(module), name)

    def rank(item: tuple[str, Any]) -> int:
        found = item[1]
        return 0 if not inspect.isclass(found) else 2 if issubclass(found, Exception) else 1

    return dict(sorted(names.items(), key=rank))


def section(path: str, found: Any) -> str:
    """A function, or a class with its public methods and properties, as Markdown."""
    name = path.rpartition(".")[2]
    head = f"## {name} {{: #{name} }}"
    if not inspect.isclass(found):
        return "\n\n".join([head, signature(path, found), prose(found)])
    base = f"({found.__base__.__name__})" if found.__base__ is not object else ""
    parts = [head, f"```python\nclass {path}{base}\n```", prose(found)]
    for member, value in vars(found).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not member.startswith("_") and inspect.isfunction(function):
            shown = f"```python\n{member}\n```" if isinstance(value, property) else signature(member, function)
            parts += [f"### {name}.{member} {{: #{name}.{member} }}", shown, prose(function)]
    return "\n\n".join(parts)


def signature(path: str, function: Callable[..., Any]) -> str:
    """The parameters, annotations and defaults as the source has them, without ``self``."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    if node.args.args and node.args.args[0].arg == "self":
        del node.args.args[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    text = f"{path}({ast.unparse(node.args)}){returns}".replace(": ", ":\0")  # a parameter stays on one line
    lines = textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "```python\n" + "\n".join(lines).replace("\0", " ") + "\n```"


def prose(found: Any) -> str:
    """A docstring as Markdown: its lists of arguments, attributes and errors are lists."""
    text = re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(found.__doc__ or ""))
    return PARTS.sub(lambda part: "\n\n".join([f"**{part[1]}**", "\n".join(entries(part[2])), ""]), text + "\n").strip()


def entries(block: str) -> Iterator[str]:
    for name, text in ENTRY.findall(textwrap.dedent(block)):
        yield f"- `{name}`: {' '.join(text.split())}"
