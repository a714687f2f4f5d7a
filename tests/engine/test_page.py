"""The page of a report: what it holds, that it escapes everything, and what it does in a browser."""

import json
import re
import shutil

import pytest
import torch
from torch import nn

import fx_fusion
from fx_fusion.report.alignment import align, blocks
from fx_fusion.report.diff import Row
from tests.helpers import tiny_llama, tokens

EVIL = "</script><script>window_stolen = 1</script><img src=x onerror=alert(1)>"


class Norm(nn.Module):
    """Not one that is known: it clamps."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp_min(1e-6))


def rows(*texts):
    return [Row(text.split(" ")[0], text) for text in texts]


def report_of(layers=3, **options):
    model = tiny_llama(num_hidden_layers=layers)
    options = {"select": "always", "fusions": ["-swiglu"], **options}
    return fx_fusion.explain(model, input_ids=tokens(), labels=tokens(), options=options)


def data_of(page):
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert len(found) == 1
    return json.loads(found[0])


# -- before beside after ------------------------------------------------------------------------------------------------
def test_nodes_are_aligned_by_name():
    pairs = align(rows("a = 1", "b = a", "c = b", "d = c"), rows("a = 1", "f = a", "c = f", "d = c"))
    assert [(p.sign, p.row.name) for p in pairs] == [("=", "a"), ("-", "b"), ("+", "f"), ("~", "c"), ("=", "d")]


def test_a_node_that_moved_is_one_pair():
    pairs = align(rows("a = 1", "b = 2", "c = 3"), rows("b = 2", "a = 1", "c = 3", "d = 4"))
    assert [(p.sign, p.row.name) for p in pairs] == [("=", "b"), ("=", "a"), ("=", "c"), ("+", "d")]


def test_every_node_is_in_one_pair():
    graph = report_of().graphs[0]
    pairs = align(graph.rows_before, graph.rows_after)
    assert sorted(p.before.name for p in pairs if p.before) == sorted(r.name for r in graph.rows_before)
    assert [p.after.name for p in pairs if p.after] == [r.name for r in graph.rows_after]


def test_layers_that_are_alike_are_folded():
    graph = report_of(layers=5).graphs[0]
    found = {block.title: block.like for block in blocks(align(graph.rows_before, graph.rows_after))}
    assert found["model.layers.1"] is None  # layer 0 has a norm without an add
    assert [found[f"model.layers.{i}"].title for i in (2, 3)] == ["model.layers.1"] * 2


# -- what it holds ------------------------------------------------------------------------------------------------------
def test_every_row_of_a_site_knows_it():
    report = report_of()
    data = data_of(report.to_html())
    found = [set() for _ in report.sites]
    for block in data["graphs"][0]["blocks"]:
        for _, name, *_, sites, _ in block["rows"]:
            for site in sites:
                found[site].add(name)
    for site, names in zip(report.sites, found, strict=True):
        assert names >= set(site.made), site
        assert names, site


def test_the_lines_of_the_model_are_there():
    data = data_of(report_of().to_html())
    file = next(path for path in data["sources"] if path.endswith("modeling_llama.py"))
    assert any("rsqrt" in line for line in data["sources"][file].values())
    assert "rsqrt" in data["fusions"]["rms_norm"]["reference"]


def test_it_is_one_file_without_network(tmp_path):
    page = report_of().to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|@import|url\(|https?://(?!www\.w3\.org)""", page.split('id="data"')[0])
    assert "<iframe srcdoc=" in report_of()._repr_html_()


def test_126_layers_are_small():
    """Rows that are alike are not; a third of a megabyte a thousand nodes would be too much for 20 000."""
    report = report_of(layers=126)
    nodes = report.graphs[0].nodes_before
    assert nodes > 8000
    assert len(report.to_html()) < 3e6 * nodes / 16000


def test_names_are_escaped():
    model = nn.ModuleDict({EVIL: Norm()})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner[EVIL](x)

    page = fx_fusion.explain(Model(), torch.randn(4, 8), options={"select": "always"}).to_html()
    assert "<img" not in page
    assert page.count("<script") == 2
    assert any("window_stolen" in name for name in data_of(page)["names"])


# -- in a browser -------------------------------------------------------------------------------------------------------
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Of a machine without GPU, sandbox or network.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with sync.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a report's page; at the end nothing was written to the console as an error."""
    errors = []

    def show(report, scheme="light"):
        page = browser.new_context(color_scheme=scheme, viewport={"width": 1400, "height": 800}).new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        report.to_html(tmp_path / "report.html")
        page.goto(f"file://{tmp_path}/report.html")
        return page

    yield show
    assert not errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_site_is_chosen_and_explained(opened, scheme):
    page = opened(report_of(), scheme)
    page.click("#sites button:has-text('rope')")
    card = page.inner_text("#card")
    assert "rope fused" in card
    assert "model.layers.0.self_attn" in card
    assert "q_embed = (q * cos)" in card
    assert 'options={"fusions": ["-rope"]}' in card
    assert page.locator(".row.picked").count() > 3
    page.click("#sites button:has-text('rope')")  # again: the next of its kind
    assert "model.layers.1.self_attn" in page.inner_text("#card")


def test_keys_and_search(opened):
    page = opened(report_of())
    page.keyboard.press("j")
    first = page.inner_text("#card")
    page.keyboard.press("j")
    assert page.inner_text("#card") != first
    page.keyboard.press("k")
    assert page.inner_text("#card") == first
    page.keyboard.press("/")
    page.keyboard.type("rms_norm")
    assert re.fullmatch(r"1 of \d+", page.inner_text("#found"))
    page.keyboard.press("Enter")
    assert page.inner_text("#found").startswith("2 of")
    assert page.locator(".row.hit").count() == 1
    page.keyboard.press("Escape")
    assert page.inner_text("#found") == ""


def test_folds_and_filters(opened):
    page = opened(report_of(layers=6))
    folded = page.evaluate("lines.length")
    page.keyboard.press("f")
    assert page.evaluate("lines.length") > folded
    page.keyboard.press("f")
    assert page.evaluate("lines.length") == folded
    before = page.locator("#sites button").count()
    page.click("#filters button:has-text('fused')")
    assert page.locator("#sites button").count() < before


def test_a_row_without_a_site(opened):
    page = opened(report_of())
    page.click(".row:has-text('= arange(') >> nth=0")
    assert "No fusion is about this node" in page.inner_text("#card")


def test_nothing_of_a_models_names_runs(opened):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleDict({EVIL: Norm()})

        def forward(self, x):
            return self.inner[EVIL](x)

    page = opened(fx_fusion.explain(Model(), torch.randn(4, 8), options={"select": "always"}))
    page.click("#sites button")
    assert page.evaluate("window.window_stolen") is None
    assert "window_stolen" in page.inner_text("#card")
