"""The graphs of a report as text: rows, and the unified diff of two."""

import re
from collections import Counter

import pytest
import torch
from torch import nn

import fx_fusion
from fx_fusion.report.diff import Row
from fx_fusion.report.site import Site
from fx_fusion.report.text_diff import text_diff
from tests.helpers import tiny_llama, tokens


def llama(layers):
    ids = tokens()
    return fx_fusion.explain(tiny_llama(num_hidden_layers=layers), input_ids=ids, labels=ids, options={"select": "always"})


@pytest.fixture(scope="module")
def five():
    return llama(5)


def diff_of(report):
    (graph,) = report.graphs
    return text_diff(f"graph {graph.index}", graph.rows_before, graph.rows_after, report.sites).splitlines()


def headers(lines):
    return [line for line in lines if line.startswith("@@")]


def row(text, *operands, module=""):
    return Row(text.split(":")[0], text, operands, module)


# -- rows ---------------------------------------------------------------------------------------------------------------
def test_what_an_op_of_ours_takes_is_named_and_all_it_makes_has_a_type(five):
    (made,) = [row.text for row in five.graphs[0].rows_after if row.name == "rms_norm_default"]
    assert made.startswith("rms_norm_default: (float32[2, 16, 64], float32[32]) = fx_fusion.rms_norm(x=inputs_embeds, weight=")
    assert "eps=1e-06, offset=0.0, round_first=True" in made


def test_parameters_have_the_names_of_the_model(five):
    text = five.graphs[0].after
    assert "model.layers.3.self_attn.q_proj.weight" in text
    assert "_modules_" not in text


def test_a_subscript_is_one():
    def slices(x):
        return x[..., :2] + x[:, None, 1:].sum(1) + x[(0,)] + x[:, [0, 1]]

    text = fx_fusion.explain(slices, torch.randn(2, 2)).graphs[0].before
    assert "[..., :2]" in text
    assert "[:, None, 1:]" in text
    assert "[0,]" in text
    assert "[:, [0, 1]]" in text


def test_strings_are_quoted(five):
    assert "style='rotate_half'" in five.graphs[0].after


# -- the diff -----------------------------------------------------------------------------------------------------------
def test_a_hunk_says_what_was_replaced_where(five):
    (norm,) = [line for line in headers(diff_of(five)) if " rms_norm in " in line]
    assert re.fullmatch(
        r"@@ -\d+,\d+ \+\d+,\d+ @@ rms_norm in model\.layers\.0\.input_layernorm \(modeling_llama\.py:\d+\)", norm
    )


def test_layers_that_are_alike_are_shown_once(five):
    lines = diff_of(five)
    assert sum("; the same in model.layers.2 to 4" in line for line in headers(lines)) >= 2
    assert not any("model.layers.3" in line for line in lines)
    more = diff_of(llama(9))
    assert len(more) == len(lines)
    assert sum("; the same in model.layers.2 to 8" in line for line in headers(more)) >= 2


def test_what_is_hidden_is_the_same(five):
    """A layer whose norm reads another operand is no copy of the others."""
    before, after = [], []
    for i in range(4):
        module = f"m.{i}"
        odd = i == 2
        before += [row(f"a_{i}: f[2] = relu(x)", "x", module=module), row(f"b_{i}: f[2] = neg(a_{i})", f"a_{i}", module=module)]
        before += [row(f"c_{i}: f[2] = tanh(b_{i})", f"b_{i}", module=module), row(f"d_{i}: f[2] = exp(c_{i})", f"c_{i}", module=module)]
        read = f"a_{i}" if odd else f"b_{i}"
        after += [before[-4], row(f"b_{i}: f[2] = fused(a_{i})", f"a_{i}", module=module)]
        after += [row(f"c_{i}: f[2] = fused({read})", read, module=module), before[-1]]
    sites = [Site("x", "fused", "", f"m.{i}", "f.py:1", nodes=(f"b_{i}", f"c_{i}")) for i in range(4)]
    lines = text_diff("graph 0", before, after, sites).splitlines()
    assert [line.split("@@ ")[-1] for line in headers(lines)] == [
        "x in m.0 (f.py:1); the same in m.1, m.3",
        "x in m.2 (f.py:1)",
    ]


def test_the_ranges_are_those_of_the_graphs(five):
    graph = five.graphs[0]
    lines = diff_of(five)
    for i, line in enumerate(lines):
        if not line.startswith("@@"):
            continue
        first, count, first_after, count_after = map(int, re.findall(r"\d+", line)[:4])
        hunk = lines[i + 1 : i + 1 + next((n for n, x in enumerate(lines[i + 1 :]) if x.startswith("@@")), len(lines))]
        removed = [x[1:] for x in hunk if x[0] in "- "]
        inserted = [x[1:] for x in hunk if x[0] in "+ "]
        assert Counter(removed) == Counter(r.text for r in graph.rows_before[first - 1 : first - 1 + count])
        assert inserted == [r.text for r in graph.rows_after[first_after - 1 : first_after - 1 + count_after]]


def test_no_node_is_only_renamed(five):
    """A row that goes and a row that comes with the same call would be a neighbor with another name."""
    calls = {sign: {x.split(" = ", 1)[1] for x in diff_of(five) if x[0] == sign and " = " in x} for sign in "-+"}
    assert not calls["-"] & calls["+"]


def test_a_graph_without_sites_and_one_without_changes():
    class Plain(nn.Module):
        def forward(self, x):
            return x + 1

    assert diff_of(fx_fusion.explain(Plain(), torch.ones(2)))[2:] == []
    lines = text_diff("graph 0", [row("a: f[2] = relu(x)", "x", module="m")], [], []).splitlines()
    assert lines[2:] == ["@@ -1,1 +0,0 @@ no longer needed in m", "-a: f[2] = relu(x)"]
