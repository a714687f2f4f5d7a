"""The site of the documents: it builds without a warning, every page and fusion is there, and no link of it is dead."""

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs")
pytest.importorskip("material")


class Page(HTMLParser):
    """What a page links to, and the anchors it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {file: Page(file.read_text()) for file in site.rglob("*.html")}


def in_nav():
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r"^ +- .*?([\w/]+\.md)$", text[text.index("\nnav:") :], re.M)


def test_every_page_of_the_navigation_exists(site):
    for name in in_nav():
        assert (site / (re.sub(r"README$", "index", name.removesuffix(".md")) + ".html")).is_file(), name


def test_every_document_is_in_the_navigation():
    documents = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert sorted(documents - set(in_nav())) == []


def test_every_fusion_has_a_section(site, pages):
    from fx_fusion.fusion.registry import built_in

    page = site / "fusions.html"
    for fusion in built_in():
        assert fusion.name in pages[page].anchors
        assert f'options={{"fusions": ["-{fusion.name}"]}}' in html.unescape(page.read_text()), fusion.name


def test_every_exported_name_has_a_section(site, pages):
    import fx_fusion

    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "api.html").read_text()))
    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "api.md").read_text(), re.M)
    for name in fx_fusion.__all__:
        assert name in pages[site / "api.html"].anchors
        assert f"`fx_fusion.{name}`" in table
        first = re.split(r"\.\s|``", getattr(fx_fusion, name).__doc__)[0]
        assert " ".join(first.split()) in " ".join(text.split()), name
    assert {"Report.why", "Verification.ok", "Report.from_json"} <= pages[site / "api.html"].anchors
    assert "fx_fusion.explain(model: Callable[..., Any], *args: Any, options:" in text


def test_no_link_is_dead(site, pages):
    dead = []
    for file, page in pages.items():
        if file.name == "404.html":  # served for any address: its links are absolute
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            there = target.is_file() and target.is_relative_to(site.resolve())
            if not there or (parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors):
                dead.append(f"{file.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = re.compile(r"<(?:script|img|link)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]+")
    for file in site.rglob("*.html"):
        assert [found for found in loaded.findall(file.read_text()) if 'rel="canonical"' not in found] == [], file.name


def test_pages_look_as_on_github(site):
    """No Markdown is left in the text: a list or a table that Python-Markdown wants an empty line before."""
    for file in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", file.read_text(), flags=re.S)
        left = re.findall(r"^(?:- \S.*|\|.*\||#+ \S.*|```.*)$", re.sub(r"<[^>]+>", "", text), re.M)
        assert left == [], file.name
