"""Documents: relative links lead somewhere, and what a newcomer reads first stays short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")]
LONGEST = {
    "README.md": 150, "CHANGELOG.md": 40, "docs/architecture.md": 150, "docs/add_a_fusion.md": 170, "docs/glossary.md": 80,
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'\bsrc(?:set)?="([^"]+)"', text):
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.mark.parametrize("name", LONGEST)
def test_pages_for_newcomers_are_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST[name]


def test_the_options_of_the_documents_are_those_of_the_code():
    from fx_fusion.options import _OURS

    for page in ("README.md", "docs/options.md"):
        table = re.findall(r"^\| `(\w+)` \|", (ROOT / page).read_text(), re.M)
        assert table == list(_OURS) or sorted(table) == sorted(_OURS), page


def test_every_fusion_is_in_the_documents():
    from fx_fusion.fusion.registry import built_in

    cells = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "fusions.md").read_text(), re.M)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(f.name for f in built_in())
