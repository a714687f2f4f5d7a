"""The report: table, diff, JSON, counts, what is said of breaks, and whose it is."""

import inspect
import json
import logging
import os
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.fusion import registry
from fx_fusion.graph import places
from fx_fusion.options import parse
from fx_fusion.report import reference
from fx_fusion.report import trace as debug
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.report import Report
from fx_fusion.report.table import Group, in_lines, shared_prefix, table
from fx_fusion.report.whereabouts import instead_of
from fx_fusion.rewrite.verify_graph import Verified
from fx_fusion.testing import rewriting_backend
from tests.helpers import rewritten, tiny_llama, tokens


def silu_mlp(x, w):
    return F.silu(x @ w) * (x @ w.t())


x, w = torch.randn(4, 8), torch.randn(8, 8)


def test_table_diff_json_and_counts():
    model, ids = tiny_llama(), tokens()
    with fx_fusion.recording() as report:
        torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids)
    text = str(report)
    assert "modeling_llama.py:" in text
    assert "model.layers.{0-1}.mlp" in text
    assert report.count("swiglu", "fused") == 2
    report.assert_fused(swiglu=2, rope=2, linear_cross_entropy=1)
    with pytest.raises(AssertionError, match="swiglu: 2 fused, 7 expected"):
        report.assert_fused(swiglu=7)
    site = next(s for s in report.sites if s.fusion == "swiglu")
    assert (site.status, site.reason, site.module) == ("fused", "", "model.layers.0.mlp")
    assert site.location.startswith("modeling_llama.py:")
    assert site.shapes == {"gate": "float32[2, 16, 128]", "up": "float32[2, 16, 128]"}
    data = json.loads(report.to_json())
    assert data["counts"]["fused/swiglu"] == 2
    assert data["sites"][0].keys() >= {"fusion", "status", "reason", "module", "location", "shapes"}
    removed = [line for line in report.diff().splitlines() if line.startswith("-q_embed")]
    added = [line for line in report.diff().splitlines() if line.startswith("+q_embed")]
    assert removed
    assert added, "the node that takes the place of another keeps its name"


def test_statuses_on_cpu():
    _, report = rewritten(silu_mlp, x, w, options={"select": "auto"})
    assert [(s.fusion, s.status) for s in report.sites] == [("swiglu", "kept")]
    assert "CPU" in report.sites[0].reason
    _, report = rewritten(silu_mlp, x, w, options={"select": "never"})
    assert report.sites[0].status == "kept"
    _, report = rewritten(silu_mlp, x, w, options={"fusions": ["-swiglu"]})
    assert report.count("swish") == 1, "the smaller fusion takes its place"


def test_debug_prints_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FX_FUSION_DEBUG", "1")
    monkeypatch.setenv("RANK", "3")
    _, report = rewritten(silu_mlp, x, w)
    assert "swiglu" in capsys.readouterr().out
    (file,) = (tmp_path / "fx_fusion_debug" / f"rank_3_process_{os.getpid()}").glob("*.diff")
    assert "fx_fusion.swiglu" in file.read_text()


def test_debug_where_nothing_can_be_written(monkeypatch, tmp_path, capsys):
    (tmp_path / "fx_fusion_debug").write_text("a file")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FX_FUSION_DEBUG", "1")
    _, report = rewritten(silu_mlp, x, w)
    assert "the diff of graph" in capsys.readouterr().err
    assert report.count("swiglu") == 1
    assert [g.fallback for g in report.graphs] == [""]


def test_a_report_over_a_reset_of_dynamo():
    """Its ids of code begin anew, and another function is no second attempt at the first."""

    def broken(x):
        y = torch.nn.functional.rms_norm(x, (8,))
        torch._dynamo.graph_break()
        return torch.nn.functional.rms_norm(y, (8,))

    with fx_fusion.recording() as report:
        torch.compile(lambda x: torch.nn.functional.rms_norm(x, (8,)), backend=rewriting_backend())(torch.randn(4, 8))
        torch._dynamo.reset()
        torch.compile(broken, backend=rewriting_backend())(torch.randn(4, 8))
    assert report.count("rms_norm") == len(report.graphs) == 3, str(report)


def test_names_that_are_no_text(tmp_path):
    """Of a file whose name is no UTF-8; and modules called by what only looks like a number."""
    _, report = rewritten(silu_mlp, x, w)
    site = replace(report.sites[0], location="\udcff.py:3", module="layers.\u00b2")
    report.sites = [site, replace(site, module="layers.3")]
    assert "\\udcff.py" in report.to_html(tmp_path / "r.html").read_text()


def test_json_knows_no_infinity():
    _, report = rewritten(silu_mlp, x, w)
    report.graphs[0].verified = Verified(calls=1, used=float("inf"), step=float("inf"))
    text = report.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert Report.from_json(text).graphs[0].verified == report.graphs[0].verified


def test_options_that_leave_everything_out():
    """An empty list of fusions would mean all."""
    every = [f"-{fusion.name}" for fusion in registry.all_fusions()]
    assert sorted(parse(None, {"fusions": every}).given()["fusions"]) == sorted(every)


def test_artifacts_reach_the_structured_trace(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        debug,
        "publish_artifact",
        lambda name, payload: seen.update({name: payload()}),
    )
    rewritten(silu_mlp, x, w)
    assert seen.keys() == {"fx_fusion_report", "fx_fusion_diff", "fx_fusion_json"}
    assert "swiglu" in seen["fx_fusion_report"]


LOGGER = logging.getLogger("a model")


class Logging(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 128)

    def forward(self, x, y):
        logits = self.head(x)
        LOGGER.debug("each time")
        return F.cross_entropy(logits, y)


def test_a_graph_break_before_the_loss_is_named_with_its_remedy():
    """A logger between lm_head and loss: the loss fires alone, and the report says what broke the graph, where, and how
    to mend it."""
    with fx_fusion.recording() as report:
        torch.compile(Logging(), backend=rewriting_backend())(x, torch.arange(4))
    report.assert_fused(cross_entropy=1, linear_cross_entropy=0)
    broken = [g.broke for g in report.graphs if g.broke]
    assert len(broken) == 1
    assert broken[0].startswith("graph break at test_report.py:")
    assert "torch._dynamo.config.ignore_logging_functions.add(logging.Logger.debug)" in broken[0]
    assert broken[0] in str(report)
    near = next(s for s in report.sites if s.fusion == "linear_cross_entropy")
    assert "expected linear, found an input of this graph" in near.reason


def test_graphs_that_return_do_not_end_at_a_break():
    with fx_fusion.recording() as report:
        torch.compile(silu_mlp, backend=rewriting_backend())(x, w)
    assert [g.broke for g in report.graphs] == [""]


def test_a_name_that_nobody_has_is_an_error():
    """A typo in an assertion of somebody's CI would pass for ever."""
    with fx_fusion.recording() as report:
        rewritten(silu_mlp, x, w)
    with pytest.raises(ValueError, match="Did you mean 'rms_norm'"):
        report.assert_fused(rmsnorm=0)
    with pytest.raises(ValueError, match="Did you mean 'fused'"):
        report.count("rms_norm", "fussed")


@pytest.mark.parametrize("number", ["1", 1.0, None, [1]], ids=repr)
def test_a_number_of_sites_that_is_none(number):
    _, report = rewritten(silu_mlp, x, w)
    with pytest.raises(TypeError, match=r"^assert_fused\(\) takes how many sites, as swiglu=1; got swiglu="):
        report.assert_fused(swiglu=number)


def test_threads_record_what_is_theirs():
    import threading

    seen = {}

    def work(name, function):
        with fx_fusion.recording() as report:
            barrier.wait()
            torch.compile(function, backend=rewriting_backend())(x, w)
            barrier.wait()
        seen[name] = report

    barrier = threading.Barrier(2, timeout=900)  # one that fails leaves the other waiting
    threads = [
        threading.Thread(target=work, args=given)
        for given in (("mlp", silu_mlp), ("norm", lambda x, w: F.layer_norm(x, (8,))))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {s.fusion for s in seen["mlp"].sites} == {"swiglu"}
    assert {s.fusion for s in seen["norm"].sites} == {"layer_norm"}


# -- why ------------------------------------------------------------------------------------------------------------------
class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleDict({name: Spelled(name) for name in SPELLED})

    def forward(self, x):
        for norm in self.norms.values():
            x = norm(x) + 0.5 * x
        return x


class Spelled(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.function = SPELLED[name]

    def forward(self, x):
        return self.function(x)


SPELLED = {
    "clamped": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp_min(1e-6)),
    "outside": lambda x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6),
    "other_dim": lambda x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6),
    "by_sum": lambda x: x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-6),
    "l2": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True)),
    "plain": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "tanh": torch.tanh,
}


@pytest.fixture(scope="module")
def odd():
    return fx_fusion.explain(Odd(), torch.randn(2, 8, 64), options={"select": "always"})


@pytest.mark.parametrize(
    ("place", "sentences"),
    [
        ("norms.clamped", ["near: ", "eps is a lower bound of the mean of squares", "write F.rms_norm("]),
        ("norms.other_dim", ["near: ", "mean is over dim -2, here it has to be over dim -1"]),
        ("norms.outside", ["near: ", "eps is added outside of the root", "write F.rms_norm"]),
        ("norms.by_sum", ["not recognized in norms.by_sum: sqrt (test_report.py:", "nearest to rms_norm"]),
        ("norms.l2", ["near: ", "so it is sqrt(n) times as large"]),
        ("norms.plain", ["fused: add_rms_norm in norms.plain"]),
        ("tanh", ["nothing there that a fusion is about"]),
    ],
)
def test_why(odd, place, sentences):
    said = odd.why(place)
    assert len(said.splitlines()) == 1
    for sentence in sentences:
        assert sentence in said


def test_why_a_line(odd):
    location = next(site.location for site in odd.sites if site.module == "norms.clamped")
    assert "clamp_min" in odd.why(location)


def test_why_a_place_that_is_not_there(odd):
    with pytest.raises(ValueError, match=r"^No node comes from `norms.plane`. The closest of \d+ modules are `norms.plain`, "):
        odd.why("norms.plane")
    with pytest.raises(ValueError, match="nothing was compiled while this report was recording"):
        fx_fusion.Report().why("norms")
    assert "nothing was compiled" in str(fx_fusion.Report())


def test_why_unknown_module_names_few_of_many():
    """A model of 36 layers has hundreds of modules: the closest are shown, and how to list the others."""
    modules = [f"model.layers.{layer}.{part}" for layer in range(36) for part in ("self_attn.q_proj", "mlp", "input_layernorm")]
    said = instead_of("model.layers.3.input_norm", [], modules)
    assert said.startswith("The closest of 108 modules are `model.layers.3.input_layernorm`, ")
    assert said.endswith(". To list the modules with a site, print the report (the command without `--why`).")
    assert said.count("`model.layers.") == 5
    assert len(said) < 300


@pytest.mark.parametrize("place", [None, 12, torch.nn.Linear(2, 2)], ids=str)
def test_why_of_no_string(odd, place):
    with pytest.raises(TypeError, match=r"^why\(\) takes the name of a module, as layers.3.norm, or a line, as model.py:12; got "):
        odd.why(place)


@pytest.mark.parametrize("place", ["", "  "])
def test_why_of_nothing(odd, place):
    with pytest.raises(ValueError, match="got an empty string"):
        odd.why(place)


def test_why_as_the_model_writes_it(odd):
    assert odd.why("self.norms.plain") == odd.why("norms.plain")


def test_why_another_line(odd):
    """Those whose numbers are nearest, in the order of the file."""
    numbers = sorted({int(row.location.partition(":")[2]) for graph in odd.graphs for row in graph.rows_before if row.location})
    with pytest.raises(ValueError, match=r"^No node comes from `test_report.py:9999`") as raised:
        odd.why("test_report.py:9999")
    assert str(raised.value).endswith(f"of this file: {', '.join(f'test_report.py:{number}' for number in numbers[-5:])}.")
    with pytest.raises(ValueError, match=r"^No node comes from `test_reprot.py:9`. The only file is `test_report.py`"):
        odd.why("test_reprot.py:9")


def tanh_before(x, w):
    x = torch.tanh(x)
    return by_lines(x, w)


def test_a_line_that_no_fusion_is_about_names_the_nearest_that_one_is():
    _, report = rewritten(tanh_before, torch.randn(4, 8), torch.randn(8))
    said = report.why(f"test_report.py:{inspect.getsourcelines(tanh_before)[1] + 1}")
    assert "nothing there that a fusion is about" in said
    assert said.endswith(f"; the nearest lines with a site: {report.sites[0].location}")


def test_lines_are_sorted_by_number():
    lines = [f"model.py:{number}" for number in (8, 9, 10, 99, 100, 101)] + ["other.py:98"]
    assert instead_of("model.py:98", lines, []) == (
        "The nearest lines of this file: model.py:9, model.py:10, model.py:99, model.py:100, model.py:101."
    )


def test_why_of_a_model_without_modules():
    _, report = rewritten(torch.nn.RMSNorm(8), torch.randn(4, 8))
    assert report.why("self").startswith("fused: rms_norm (")
    with pytest.raises(ValueError, match=r"All of them come from the model itself, .* ask for 'self', or a line, as model.py:12"):
        report.why("norm")


def test_a_line_is_of_the_whole_name_of_its_file(odd):
    """model.py is no end of my_model.py."""
    location = next(site.location for site in odd.sites if site.module == "norms.clamped")
    with pytest.raises(ValueError, match="No node comes from"):
        odd.why(location.removeprefix("test_"))


def test_one_near_miss_a_place(odd):
    near = [site.module for site in odd.sites if site.status == "near"]
    assert len(near) == len(set(near))


def test_what_no_site_names_is_said(odd):
    assert re.search(r"not recognized: 1 x sqrt \(test_report.py:\d+\), nearest to rms_norm in norms.by_sum", str(odd))


def by_lines(x, w):
    squares = x.pow(2)
    mean = squares.mean(-1, keepdim=True)
    rstd = torch.rsqrt(mean + 1e-6)
    return w * (x * rstd)


def test_every_line_of_a_site_is_answered():
    _, report = rewritten(by_lines, torch.randn(4, 8), torch.randn(8))
    first = inspect.getsourcelines(by_lines)[1]
    for line in range(first + 1, first + 5):
        assert report.why(f"test_report.py:{line}").startswith("fused: rms_norm")


def test_the_users_frame_stands_beside_one_of_a_library(monkeypatch):
    monkeypatch.setattr(places, "_TORCH", "no such folder")  # as a function of another package
    _, report = rewritten(lambda x, w: F.rms_norm(x, (8,), w, 1e-6), torch.randn(4, 8), torch.randn(8))
    said = report.why(report.sites[0].location)
    assert re.fullmatch(r"fused: rms_norm \(functional.py:\d+, called at test_report.py:\d+\)", said)


def test_functions_of_torch_are_no_place():
    _, report = rewritten(lambda x, w: F.rms_norm(x, (8,), w, 1e-6), torch.randn(4, 8), torch.randn(8))
    assert report.sites[0].location.startswith("test_report.py:")


class Mixed(torch.nn.Module):
    """A norm that is known, and much that is not, in one module."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up = torch.nn.RMSNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        gated = F.relu(self.gate(y)).square() * self.up(y)
        mish = F.mish(self.gate(y)) * self.up(y)
        angles = torch.arange(8.0)
        turned = gated * angles.cos() + gated.roll(2, -1) * angles.sin()
        weights = torch.softmax(turned, 0)
        return torch.log(torch.exp(weights).sum(-1)), mish, mish * mish.pow(2).sum(-1, keepdim=True).pow(-0.5)


def test_a_module_with_a_site_hides_nothing():
    _, report = rewritten(Mixed(), torch.randn(4, 8))
    report.assert_fused(rms_norm=1)
    said = Counter(re.findall(r"not recognized: 1 x (.*) \(test_report.py:\d+\), nearest to (\w+)", str(report)))
    assert said == {
        ("a gated activation", "swiglu"): 2, ("a rotation", "rope"): 1, ("softmax", "attention"): 1,
        ("log of a sum of exponentials", "cross_entropy"): 1,
    }  # fmt: skip
    assert "the squares are added up" in str(report), "the root is part of a near miss"


def halves(x, weight):
    gate, up = (x @ weight).chunk(2, -1)
    return F.mish(gate) * up


def sliced(x, weight):
    both = x @ weight
    return F.relu(both[..., :16]) * both[..., 16:]


def silu_by_exponentials(x, weight):
    gate, up = (x @ weight).chunk(2, -1)
    return gate * torch.reciprocal(1 + torch.exp(-gate)) * up


def turned_by_addcmul(x, cos):
    a, b = x[..., :8], x[..., 8:]
    return torch.addcmul(a * cos, b, -cos.sin()), torch.addcmul(b * cos, a, cos.sin())


def turned_by_an_index(x, angles):
    a, b = x[..., :8], x[..., 8:]
    cos, sin = angles[None].cos(), angles[None].sin()
    return a * cos - b * sin


def turned_by_columns(x, table):
    """Index all operands where they are used; nothing is named cos or sin."""
    pairs, t = x.view(4, 8, 2), torch.stack([table, table + 1], -1)
    return pairs[..., 0] * t[..., 0] - pairs[..., 1] * t[..., 1], pairs[..., 1] * t[..., 0] + pairs[..., 0] * t[..., 1]


def turned_by_selected_columns(x, table):
    pairs, t = x.view(4, 8, 2), torch.stack([table, table + 1], -1)
    a, b, c = pairs.select(-1, 0), pairs.select(-1, 1), t[..., 0]
    return torch.addcmul(a * c, b, t.select(-1, 1)), a * (-t.select(-1, 1)) + b * c


def by_powers_of_two(x, weight):
    scores = x @ weight
    powers = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True) @ weight.t()


def by_glu(x, weight):
    return F.glu(x @ weight)


SILENT_ONCE = {
    by_powers_of_two: ("a softmax", "attention"), by_glu: ("glu", "swiglu"),
    halves: ("a gated activation", "swiglu"), sliced: ("a gated activation", "swiglu"),
    silu_by_exponentials: ("a gated activation", "swiglu"), turned_by_addcmul: ("a rotation", "rope"),
    turned_by_an_index: ("a rotation", "rope"), turned_by_columns: ("a rotation", "rope"),
    turned_by_selected_columns: ("a rotation", "rope"),
}  # fmt: skip


def test_torchs_own_attention_is_named():
    model = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    _, report = rewritten(lambda x, _: model(x, x, x)[0], torch.randn(2, 4, 16), torch.randn(1))
    assert re.search(r"not recognized: 1 x multi_head_attention_forward .*, nearest to attention", str(report)), str(report)


@pytest.mark.parametrize("function", SILENT_ONCE, ids=lambda function: function.__name__)
def test_indices_and_other_ops_hide_nothing(function):
    other = torch.randn(16, 32) if "weight" in function.__code__.co_varnames else torch.randn(4, 8)
    _, report = rewritten(function, torch.randn(4, 16), other)
    found = re.findall(r"not recognized: \d x (.*) \(test_report.py:\d+\), nearest to (\w+)", str(report))
    assert set(found) == {SILENT_ONCE[function]}, str(report)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, s: (a * c + b * s, b * c + a * s), lambda a, b, c, s: (a * c - b * s, b * c - a * s),
        lambda a, b, c, s: (a * c + b * s, a * c - b * s), lambda a, b, c, s: (a * c - b * s, b * c + a * (s + 1)),
        lambda a, b, c, s: (a * c - b * s, b * c + a * c),
    ],
)  # fmt: skip
def test_report_other_sums_of_products_are_no_rotation(function):
    _, report = rewritten(function, *torch.randn(4, 4, 8))
    assert "a rotation" not in str(report)


def test_losses_and_divisions_are_named():
    """A softmax of which classes are picked is a loss; a division by the largest of a row (to quantize it), by a sum of itself
    (a router) or by one number for all is no norm."""
    def picked(z, y):
        return z.softmax(-1)[torch.arange(4), y].log().mean()

    _, report = rewritten(picked, torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
    assert ("softmax", "attention") not in re.findall(r"not recognized: 1 x (\w+) .*, nearest to (\w+)", str(report))
    _, report = rewritten(lambda x: x / (x.abs().mean(-1, keepdim=True) + 1e-6), torch.randn(4, 8))
    assert "a division by a mean of magnitudes" in str(report)
    for divisor in (lambda x: x.sum(-1, keepdim=True), lambda x: x.abs().amax(-1, keepdim=True), lambda x: x.abs().mean()):
        _, report = rewritten(lambda x, divisor=divisor: x / (divisor(x) + 1e-6), torch.randn(4, 8))
        assert "not recognized" not in str(report)


OPTIMIZERS = {
    "adam": lambda p, g, m, v: p - m.lerp(g, 0.1) / (v.mul(0.99).addcmul(g, g, value=0.01).sqrt() / 0.9 + 1e-8),
    "adam_by_rsqrt": lambda p, g, m, v: p - m * (torch.lerp(v, g.square(), 0.01) + 1e-8).rsqrt(),
    "adafactor": lambda p, g, m, v: g * (v[0] * 0.9 + g.square().mean(-2) * 0.1).unsqueeze(-2).rsqrt(),
    "muon": lambda p, g, m, v: (x := g.bfloat16() / (g.bfloat16().norm() + 1e-7)) @ x.mT,
    "muon_of_matrices": lambda p, g, m, v: (x := g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)) @ x.mT,
    "lamb": lambda p, g, m, v: p - p.norm() / m.norm() * m,
    "clipping": lambda p, g, m, v: g * (1.0 / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_report_of_an_optimizer_names_no_norm(name):
    report = fx_fusion.explain(OPTIMIZERS[name], *(torch.rand(8, 16) for _ in range(4)))
    assert report.sites == []
    assert "not recognized" not in str(report)


L2 = {
    "normalize": lambda x, w: F.normalize(x, dim=-1),
    "normalize_with_weight": lambda x, w: F.normalize(x, dim=-1) * w,
    "norm_plus_eps": lambda x, w: x / (x.norm(dim=-1, keepdim=True) + 1e-6),
    "root_of_a_sum": lambda x, w: x / x.pow(2).sum(-1, keepdim=True).sqrt(),
}


@pytest.mark.parametrize("name", L2)
def test_l2_normalization_is_not_told_to_become_rms_norm(name):
    """RMSNorm is the root of the width times as large: embeddings of CLIP, MoCo or ArcFace would change."""
    report = fx_fusion.explain(L2[name], torch.randn(4, 16), torch.randn(16), options={"select": "always"})
    assert "write " not in report.why("self")
    assert [instead_of_page(site) for site in report.sites if site.status == "near"] in ([], [""])


def instead_of_page(site):
    return reference.instead_of(next(f for f in registry.all_fusions() if f.name == site.fusion), site)


def test_scaled_l2_normalization_is_near_rms_norm():
    report = fx_fusion.explain(lambda x, w: F.normalize(x, dim=-1) * w * 4.0, torch.randn(4, 16), torch.randn(16))
    assert "write F.rms_norm" in report.why("self")
    assert instead_of_page(report.sites[0]).startswith("F.rms_norm(")


def test_loss_of_a_split_product_says_so():
    def split(x, weight):
        return F.cross_entropy((x @ weight.t()).chunk(2, -1)[0], torch.zeros(4, dtype=torch.long))

    report = fx_fusion.explain(split, torch.randn(4, 16), torch.randn(32, 16))
    (near,) = (site for site in report.sites if site.fusion == "linear_cross_entropy")
    assert "found part 1 of 2 of a split along dim -1 (" in near.reason
    assert near.reason.endswith("): the product of the head is split before the loss")


def test_bodies_have_names_of_their_own():
    """A view in a checkpointed body is called as one outside of it, which it is made of."""
    def function(x, w):
        h = x.view(4, 4, 4) * 2
        return torch.utils.checkpoint.checkpoint(lambda h: h.view(4, 16) / w, h, use_reentrant=False)

    _, report = rewritten(function, torch.randn(4, 16, requires_grad=True), torch.randn(4, 16))
    assert "not recognized" not in str(report)


def test_an_empty_recording_asserts_nothing():
    with fx_fusion.recording() as report:
        pass
    for said in (report.diff(), report.to_html()):
        assert "nothing was compiled while this report was recording" in said
    with pytest.raises(AssertionError, match="nothing was compiled while"):
        report.assert_fused(rms_norm=0)


def test_what_is_never_in_memory_is_said():
    model, hidden, targets = torch.nn.Linear(16, 4096), torch.randn(512, 16), torch.randint(4096, (512,))
    report = fx_fusion.explain(lambda x, y: F.cross_entropy(model(x), y), hidden, targets, options={"select": "always"})
    report.assert_fused(linear_cross_entropy=1)
    assert "never in memory: 8.0 MiB of logits" in str(report)
    assert re.search(r"rewriting took \d+\.\d s", str(report))


def test_a_report_from_json_is_the_same(odd):
    model, ids = tiny_llama(), tokens()
    llama = fx_fusion.explain(model, input_ids=ids, labels=ids, options={"select": "always"})
    for report in (odd, llama):
        again = fx_fusion.Report.from_json(report.to_json())
        assert str(again) == str(report)
        assert again.to_html() == report.to_html()
        assert again.diff() == report.diff()
        assert again.to_json() == report.to_json()
    facts = json.loads(llama.to_json())
    assert facts["schema"] == 4
    assert facts["environment"]["torch"] == torch.__version__


def test_json_has_the_options_as_they_are_given():
    options = {"select": "always", "fusions": ["-rms_norm", "-rope"], "max_autotune": True}
    document = json.loads(fx_fusion.explain(silu_mlp, x, w, options=options).to_json())
    found = document["graphs"][0]["options"]
    assert {name: found[name] for name in options} == options
    assert (found["speculate"], found["verify"]) == (True, False)
    few = fx_fusion.explain(silu_mlp, x, w, options={"fusions": ["swiglu"]})
    assert few.graphs[0].options["fusions"] == ["swiglu"]
    again = fx_fusion.explain(silu_mlp, x, w, options=found)
    assert again.graphs[0].options == found


def test_a_document_of_before_is_read(odd):
    document = json.loads(odd.to_json())
    document["schema"] = 1
    for graph in document["graphs"]:
        del graph["options"]
        graph["linears"] = {"recipe": "rowwise_gw_hp", "asked": True, "made": True, "products": [["a.q", False, ""], ["a.k", True, ""]]}
    again = fx_fusion.Report.from_json(json.dumps(document))
    assert again.sites == odd.sites
    assert again.graphs[0].options == {}
    assert again.graphs[0].linears.sentences() == ["float8 rowwise_gw_hp: forward of 1 x q; gradients of inputs of 1 x k"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": 99}'])
def test_what_is_no_report(text):
    with pytest.raises(ValueError, match="no report of schema 1 or 2 or 3 or 4: its schema is"):
        fx_fusion.Report.from_json(text)


def test_what_is_said_of_many_graphs_is_said_once():
    """A graph break in a model that is captured for several lengths."""

    def function(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    call = torch.compile(function, backend=rewriting_backend(), dynamic=False)
    with fx_fusion.recording() as report:
        for rows in (2, 3):
            call(torch.randn(rows, 4))
    numbers = [graph.index for graph in report.graphs if graph.broke]
    assert len(numbers) == 2
    assert str(report).count("ends at a graph break") == 1, str(report)
    assert f"graphs {numbers[0]}, {numbers[1]}: ends at a graph break" in str(report)


def test_numbers_of_graphs_begin_at_0_in_each_report():
    """And another version of a graph names that one by its number there."""

    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    for _ in range(2):
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            torch.compile(silu_mlp, backend=rewriting_backend())(x, w)
            with fx_fusion.recording() as inner:
                torch.compile(broken, backend=rewriting_backend())(x)
        assert [graph.index for graph in report.graphs] == [0, 1, 2]
        assert [graph.index for graph in inner.graphs] == [0, 1]
        assert {site.graph for site in report.sites} == {0}
        assert "graph 0: ends at a graph break" in str(inner)
        assert "graph 1: ends at a graph break" in str(report)


def test_another_version_of_a_graph_of_before():
    report = fx_fusion.Report()
    report.record(GraphReport(index=7, compile_id="a"), [])
    report.record(GraphReport(index=9, instead_of=7, version="while it is read"), [])
    report.record(GraphReport(index=10, instead_of=3, version="without its assumption"), [])
    assert [(graph.index, graph.instead_of) for graph in report.graphs] == [(0, None), (1, 0), (2, None)]
    assert "graph 1: graph 0 while it is read\n" in str(report)
    assert "graph 2: a graph of before without its assumption\n" in str(report)
    report.record(GraphReport(index=11, compile_id="a", attempt=1), [])
    assert [graph.index for graph in report.graphs] == [1, 2, 3], "of the one that was given up nothing is left"


def test_a_report_without_sites_says_so():
    said = str(fx_fusion.explain(torch.tanh, x))
    assert said.splitlines()[1] == "no place that a fusion is about"
    assert "modules" not in said


def test_modules_break_at_dots():
    path = "model.layers.{0-23}.post_attention_layernorm"
    assert in_lines(f"model.norm {path} a.b") == "model.norm model.layers.{0-23}\n.post_attention_layernorm a.b"
    name = "a_name_that_is_longer_than_a_column_of_the_table"
    assert in_lines(f"layers.{name}.a") == f"layers\n.{name}\n.a"
    assert in_lines("model.layers.{1-2}.input_layernorm model.norm") == "model.layers.{1-2}.input_layernorm\nmodel.norm"
    assert in_lines("") == ""


def test_what_all_modules_begin_with_stands_in_the_header():
    paths = [f"base_model.model.model.layers.{i}.mlp" for i in range(3)]
    assert shared_prefix(paths) == "base_model.model.model.layers"
    assert shared_prefix([*paths, "base_model.model.lm_head", ""]) == "base_model.model"
    assert shared_prefix(["model.layers.0.mlp", "model.norm"]) == "", "one word is no shorter in the header"
    assert shared_prefix(paths[:1]) == ""
    said = table([Group("fused", "swiglu", "", "llama.py:9", paths), Group("fused", "rms_norm", "", "llama.py:3", ["base_model.model.norm"])])
    assert re.split(r"\s{2,}", said.splitlines()[0])[3] == "modules of base_model.model"
    assert re.search(r"^fused +swiglu +3 +model\.layers\.\{0-2\}\.mlp +llama.py:9", said, re.M)
    assert re.search(r"^fused +rms_norm +1 +norm +llama.py:3", said, re.M)


def test_a_router_is_no_attention():
    """Its softmax chooses experts: nothing of ours is near. One whose results are multiplied is named."""

    def route(x, w):
        weights, experts = torch.topk(F.softmax(F.linear(x, w).float(), dim=-1), 2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts

    def of_the_largest(x, w):  # gpt-oss
        values, experts = torch.topk(F.linear(x, w), 2, dim=-1)
        return F.softmax(values, dim=1), experts

    x, w = torch.randn(6, 8), torch.randn(4, 8)
    assert "not recognized" not in str(fx_fusion.explain(route, x, w))
    assert "not recognized" not in str(fx_fusion.explain(of_the_largest, x, w))
    mixed = str(fx_fusion.explain(lambda x, w: F.softmax(F.linear(x, w), -1).cumsum(-1) @ w, x, w))
    assert re.search(r"not recognized: 1 x softmax .*, nearest to attention", mixed)


def test_an_activation_of_what_it_is_multiplied_by_is_no_gate():
    def quick_gelu(x, w):
        h = F.linear(x, w)
        return F.linear(h * torch.sigmoid(1.702 * h), w.t())

    assert "not recognized" not in str(fx_fusion.explain(quick_gelu, torch.randn(4, 8), torch.randn(16, 8)))


def test_a_root_that_a_near_miss_is_about_is_named_once():
    def by_its_length(x, w):  # CLIP
        h = F.linear(x, w)
        return h / torch.pow(torch.sum(torch.pow(h, 2), dim=-1, keepdim=True), 0.5)

    said = str(fx_fusion.explain(by_its_length, torch.randn(4, 8), torch.randn(16, 8)))
    assert re.search(r"near +rms_norm", said)
    assert "not recognized" not in said


def test_a_division_by_one_number_is_no_norm():
    """DeBERTa divides scores by the root of a size that is a tensor."""
    def scores(q, k):
        return q @ (k / torch.sqrt(torch.tensor(8.0) * 3)).mT

    _, report = rewritten(scores, torch.randn(4, 6, 8), torch.randn(4, 6, 8))
    assert not [site for site in report.sites if site.fusion == "rms_norm"], str(report)
