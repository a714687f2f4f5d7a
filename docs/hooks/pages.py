"""A hook of MkDocs: pages from outside of docs/, and links that lead where they lead on GitHub.

A page of the site has the path of its file, from the root of the repository or from docs/. What a page links to and is
no page (an image, a script) becomes a file of the site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    "COVERAGE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
    "bench/README.md", "bench/TARGETS.md", "examples/README.md",
)  # fmt: skip
_BEFORE = r"""(?:(?<=\]\()|(?<=src=")|(?<=srcset="))"""  # Markdown's links, and pictures in HTML
LINK = re.compile(rf"""{_BEFORE}(?!\w+:|#)([^)\s#"]+)(?=[)#"])""")
FENCE = re.compile(r"^(```\w+) ([\w/.]+)$", re.M)  # "python patterns/dyt.py": a language and the name of a file


def on_files(files: Files, config: Any) -> Files:
    for path in OUTSIDE:
        files.append(_file(path, config))
    for page in list(files.documentation_pages()):
        for _, target in links(page.content_string, _source(page)):
            if target.suffix != ".md" and files.get_file_from_path(_on_site(target)) is None:
                files.append(_file(target.relative_to(ROOT).as_posix(), config))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = os.path.dirname(page.file.src_uri)
    for link, target in sorted(links(markdown, _source(page.file)), key=lambda found: -len(found[0])):
        there = os.path.relpath(_on_site(target), here or ".")
        markdown = re.sub(rf"""{_BEFORE}{re.escape(link)}(?=[)#"])""", there, markdown)
    return FENCE.sub(r'\1 title="\2"', markdown)


def links(markdown: str, source: Path) -> Iterator[tuple[str, Path]]:
    """The relative links of a page that lead to a file of the repository, and these files."""
    for link in dict.fromkeys(LINK.findall(markdown)):
        target = (source.parent / link).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield link, target


def _file(path: str, config: Any) -> File:
    return File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.INCLUDED)


def _source(file: File) -> Path:
    return Path(file.abs_src_path or "").resolve()


def _on_site(target: Path) -> str:
    """Return where a file of the repository is on the site."""
    path = target.relative_to(ROOT)
    if path == Path("README.md"):
        return "index.md"
    return (path.relative_to("docs") if path.is_relative_to("docs") else path).as_posix()
