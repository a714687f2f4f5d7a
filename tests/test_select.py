"""Selection: the table of a GPU, formulas where it is silent, and measuring on the spot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from bench.fewest import fewest_bytes
from bench.table import cells
from bench.worst import decided
from fx_fusion.cost import measure, select
from fx_fusion.cost import table as tables
from fx_fusion.fusion.declaration import case
from fx_fusion.fusion.matcher import Match
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.fusion.registry import all_fusions, fusion_named
from fx_fusion.graph.view import View
from fx_fusion.inductor import cache_key
from fx_fusion.inductor.channels_last import goes_channels_last
from fx_fusion.ops.layouts import channels_last
from fx_fusion.options import parse
from fx_fusion.pipeline import Fuel, Placement, find_matches
from fx_fusion.rewrite.editor import Editor
from fx_fusion.testing import make_inputs, rewriting_backend

ROOT = Path(__file__).parent.parent


def norm(x, w):
    return w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FX_FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measure, "_SEEN", {})
    return tmp_path / "measured"


def report_of(select="measure"):
    x, w = torch.randn(4, 8, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    compiled = torch.compile(norm, backend=rewriting_backend(select=select), dynamic=False)
    torch._dynamo.reset()
    with fx_fusion.recording() as report:
        compiled(x, w)
    return report


def test_shipped_tables_are_readable_and_name_fusions():
    files = list(tables._FOLDER.glob("*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        assert tables.slug(found["environment"]["gpu"]) == file.stem
        for cell in found["cells"]:
            made = tables.Cell(**cell)
            assert made.ours > 0
            assert made.inductor > 0
            assert set(made.sizes) <= set(fusion_named(made.fusion).dims())


def test_every_formula_is_a_number_of_bytes():
    for fusion in all_fusions():
        if fusion.traffic is not None:
            sizes = {**dict.fromkeys(fusion.dims(), 4096), "bytes": 2}
            ours, theirs = (tables.evaluate(f, sizes) for f in fusion.traffic)
            assert 0 < ours <= theirs, fusion.name


def test_the_nearest_cell_decides():
    known = (
        tables.Cell("rms_norm", 2, False, "... n", {"m": 128, "n": 768}, 2.0, 1.0),
        tables.Cell("rms_norm", 2, False, "... n", {"m": 65536, "n": 4096}, 1.0, 2.0),
    )
    where = 2, False, "... n"
    assert tables.nearest_of(known, *where, {"m": 100.0, "n": 1000.0}, {}) is known[0]
    assert tables.nearest_of(known, *where, {"m": 10000.0, "n": 4096.0}, {}) is known[1]
    assert tables.nearest_of(known, 4, False, "... n", {"m": 100.0, "n": 1000.0}, {}) is None, "of another width"
    assert tables.nearest_of(known, 2, True, "... n", {"m": 100.0, "n": 1000.0}, {}) is None, "of both passes"


def test_the_shipped_table_is_of_the_shipped_measurements_and_no_cell_is_slow():
    """``auto`` fuses where the cell says so: nowhere below 0.97 of Inductor's speed."""
    rows = [json.loads(line) for line in (ROOT / "bench/results/grid.jsonl").read_text().splitlines()]
    shipped = json.loads((tables._FOLDER / "nvidia_h200.json").read_text())["cells"]
    assert json.loads(json.dumps(cells(rows))) == shipped
    speeds = list(decided(rows, [tables.Cell(**cell) for cell in shipped]))
    assert len(speeds) > 2000
    assert min(speeds)[0] >= 0.97
    assert max(row["share"] for row in rows if row.get("provider") == "fx_fusion") < 1.06, "below the fewest bytes"


@pytest.mark.parametrize(
    ("name", "sizes", "forward", "both"),
    [
        ("rms_norm", {"m": 8, "n": 64}, 2 * 8 * 64 + 64, 5 * 8 * 64),
        ("add_rms_norm", {"m": 8, "n": 64}, 4 * 8 * 64 + 64, 8 * 8 * 64),
        ("gated_rms_norm", {"m": 8, "n": 64}, 3 * 8 * 64 + 64, 8 * 8 * 64),
        ("swiglu", {"m": 8, "n": 64}, 3 * 8 * 64, 8 * 8 * 64),
        ("swish", {"m": 8, "n": 64}, 2 * 8 * 64, 5 * 8 * 64),
        ("embedding", {"m": 8, "n": 4, "v": 10**5}, 2 * 8 * 4 + 8 * 2, 3 * 8 * 4 + 10**5 * 4),
        ("embedding", {"m": 8, "n": 64, "v": 1}, (1 + 8) * 64 + 8 * 2, (1 + 2 * 8) * 64 + 64),
        ("cross_entropy", {"m": 8, "v": 64}, 8 * 64 + 8 * 2 + 8, 3 * 8 * 64),
    ],
)
def test_the_fewest_bytes(name, sizes, forward, both):
    """In float32 numbers (an id is two)."""
    fusion = fusion_named(name)
    statics = fusion.variants[0]
    inputs = make_inputs(fusion, case("some", **sizes), statics, torch.float32, "cpu")
    given = {
        n: t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in inputs.items()
    }
    out = reference_of(fusion, statics)(**given)
    found = fewest_bytes(fusion, sizes, torch.float32, given, out if isinstance(out, tuple) else (out,))
    assert found["forward"] == 4 * forward
    assert found["forward+backward"] == 4 * both


def test_a_cell_of_a_variant_speaks_for_that_variant_only():
    halves = tables.Cell("rope", 2, False, "b h s d", {"s": 2048}, 2.0, 1.0)
    pairs = tables.Cell("rope", 2, False, "b h s d", {"s": 2048}, 1.0, 2.0, {"style": "rotate_every_two"})
    where = 2, False, "b h s d", {"s": 2048.0}
    assert tables.nearest_of((halves, pairs), *where, {"style": "rotate_half", "out": "input"}) is halves
    assert tables.nearest_of((halves, pairs), *where, {"style": "rotate_every_two", "out": "input"}) is pairs


def test_of_both_16_bit_dtypes_the_table_has_the_one_that_says_more_for_inductor():
    row = {"fusion": "rms_norm", "case": "a", "mode": "forward", "layout": "... n", "sizes": {"m": 1, "n": 8}}
    times = {"bfloat16": (1.0, 1.1), "float16": (1.0, 0.9), "float32": (1.0, 5.0)}
    rows = [
        {**row, "dtype": dtype, "provider": provider, "ms": ms}
        for dtype, both in times.items()
        for provider, ms in zip(("fx_fusion", "inductor"), both, strict=True)
    ]
    assert [(c["itemsize"], c["inductor"]) for c in cells(rows)] == [(2, 0.9), (4, 5.0)]


@pytest.mark.parametrize(("ours", "status"), [(1.0, "fused"), (3.0, "kept")])
def test_a_measurement_decides_and_is_kept(folder, monkeypatch, ours, status):
    calls = []

    def measured(site):
        calls.append(site)
        return {"ours": ours, "inductor": 2.0}

    monkeypatch.setattr(measure, "_measure_in_a_process", measured)
    assert report_of().count("rms_norm", status) == 1
    first = len(calls)
    measure._SEEN.clear()  # a new process
    assert report_of().count("rms_norm", status) == 1
    assert len(calls) == first  # the second time the files speak
    assert calls[0]["inputs"]["x"]["shape"] == [4, 8, 64]
    assert len(list(folder.glob("*.json"))) == first
    assert not list(folder.glob("*.tmp"))


def test_a_broken_file_is_measured_again(folder, monkeypatch):
    monkeypatch.setattr(measure, "_measure_in_a_process", lambda site: {"ours": 1.0, "inductor": 2.0})
    report_of()
    (file,) = folder.glob("*.json")
    for broken in ("", "{", "[]", '{"ours": "x"}'):
        file.write_text(broken)
        measure._SEEN.clear()
        assert report_of().count("rms_norm") == 1
        assert json.loads(file.read_text()) == {"ours": 1.0, "inductor": 2.0}


def test_a_failed_measurement_falls_back_to_auto(folder, monkeypatch):
    monkeypatch.setattr(measure, "_measure_in_a_process", lambda site: "measuring failed: no memory")
    report = report_of()
    assert report.count("rms_norm", "kept") == 1  # what auto says on a CPU
    assert not folder.exists()


@pytest.mark.parametrize("changed", ["gpu", "torch", "triton", "source", "dtype", "shape", "grad"])
def test_what_was_measured_elsewhere_says_nothing_here(folder, monkeypatch, changed):
    calls = []
    monkeypatch.setattr(measure, "_measure_in_a_process", lambda site: calls.append(site) or {"ours": 1.0, "inductor": 2.0})
    site = {"fusion": "rms_norm", "inputs": {"x": {"dtype": "float32", "shape": [4, 8]}}, "grad": True}
    monkeypatch.setattr(measure, "_environment", measure._environment.__wrapped__)  # not the remembered one
    measure.measured(site)
    if changed == "gpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "another")
    elif changed == "source":
        monkeypatch.setattr(cache_key, "source_hash", lambda: "another")
    elif changed in ("torch", "triton"):
        monkeypatch.setattr({"torch": torch, "triton": measure.triton}[changed], "__version__", "9.9")
    elif changed == "grad":
        site = {**site, "grad": False}
    else:
        site = {**site, "inputs": {"x": {**site["inputs"]["x"], changed: "bfloat16" if changed == "dtype" else [4, 9]}}}
    measure._SEEN.clear()
    measure.measured(site)
    assert len(calls) == 2
    measure._SEEN.clear()
    measure.measured(site)
    assert len(calls) == 2


def test_processes_that_write_and_read_one_measurement(folder):
    """Each file is there as a whole or not at all, whoever writes it last."""
    code = (
        "import sys; from pathlib import Path; from fx_fusion.cost import measure\n"
        "file, ms = Path(sys.argv[1]), float(sys.argv[2])\n"
        "for _ in range(300):\n"
        "    measure._write(file, {'ours': ms, 'inductor': ms, 'padding': 'x' * 20000})\n"
        "    found = measure._read(file)\n"
        "    assert found is not None and found['ours'] == found['inductor'], found\n"
    )
    file = folder / "one.json"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(file), str(i + 1)], cwd=ROOT) for i in range(2)]
    assert [writer.wait(timeout=300) for writer in writers] == [0] * 2
    assert [f.name for f in folder.iterdir()] == ["one.json"]


@pytest.mark.slow
def test_measuring_for_real(folder):
    """One site, in a process of its own, both ways through Inductor."""
    report = report_of()
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert found
    assert all(f["ours"] > 0 and f["inductor"] > 0 for f in found)
    faster = any(f["ours"] <= f["inductor"] for f in found)
    assert report.count("rms_norm", "fused" if faster else "kept") == 1


def test_a_cell_of_each_measured_fusion_pays_where_it_was_fastest():
    """What the table is for: some cells say fuse, some say keep."""
    cells = tables._table("NVIDIA H200")
    fused = {c.fusion for c in cells if c.ours <= c.inductor}
    kept = {c.fusion for c in cells if c.ours > c.inductor}
    assert {"evonorm_s0", "group_norm_swish", "layer_norm", "attention", "embedding"} <= fused
    assert "swiglu" in kept


@pytest.mark.parametrize(
    ("shape", "order", "spec", "layout"),
    [
        ((2, 8, 5, 5), (0, 1, 2, 3), "b c ...", "b c ..."),
        ((2, 8, 5, 5), (0, 2, 3, 1), "b c ...", "b ... c"),
        ((2, 8, 5, 5), (0, 2, 3, 1), "b c h w", "b h w c"),
        ((2, 8, 5, 16), (0, 2, 1, 3), "b h s d", "b s h d"),
        ((2, 5, 16), (1, 0, 2), "... n", "... n"),
    ],
)
def test_layouts_are_named_by_the_dims_of_the_declaration(shape, order, spec, layout):
    back = sorted(range(len(shape)), key=order.__getitem__)
    tensor = torch.empty([shape[d] for d in order]).permute(back)
    assert tuple(tensor.shape) == shape
    assert tables.layout_of(spec, tensor) == layout


def placed(view, options):
    """The sites of a graph after its fusions were chosen and put in."""
    placement = Placement(view, options, Editor(view), Fuel(None))
    placement.place(find_matches(view)[0])
    return placement.sites


def convolutions(*weights, groups=1, device="cuda"):
    """A graph of convolutions on fake images."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.empty(8, weights[0][1] * groups, 32, 32, device=device)
        for i, shape in enumerate(weights):
            w = graph.placeholder(f"w{i}")
            w.meta["example_value"] = torch.empty(*shape, device=device)
            x = graph.call_function(torch.conv2d, (x, w, None, 1, 1, 1, groups))
            x.meta["example_value"] = torch.empty(8, shape[0], 32, 32, device=device)
    return graph


@pytest.mark.parametrize(
    ("mode", "options", "fused"),
    [(None, {}, False), ("reduce-overhead", {}, True), (None, {"select": "always"}, True)],
    ids=["auto", "cuda_graphs", "always"],
)
def test_norms_between_convolutions_that_go_channels_last(mode, options, fused):
    graph = convolutions((128, 64, 3, 3), (128, 128, 3, 3))
    last = list(graph.nodes)[-1]
    norm = graph.call_function(F.group_norm, (last, 32))
    norm.meta["example_value"] = torch.empty_like(last.meta["example_value"])
    conv = graph.call_function(torch.conv2d, (norm, *last.args[1:]))
    conv.meta["example_value"] = torch.empty_like(norm.meta["example_value"])
    graph.output((conv,))
    view = View(graph)
    sites = placed(view, parse(mode, options))
    assert [site.status for site in sites] == ["fused" if fused else "kept"]
    assert any(node.target is channels_last for node in graph.nodes) == fused
    if not fused:
        assert "reduce-overhead" in sites[0].reason


@pytest.mark.parametrize("trained", [False, True])
def test_rotations_without_a_gradient_are_inductors(trained):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(8, 32, 2048, 64, device="cuda", requires_grad=trained)
        table = torch.empty(8, 1, 2048, 64, device="cuda")
        assert (fusion_named("rope").pays(q, table, table, "rotate_half", "input", False) is None) == trained
        with torch.no_grad():
            assert fusion_named("rope").pays(q, table, table, "rotate_half", "input", False) is not None


def test_a_statistic_that_is_returned_beside_images():
    """EvoNorm-B0 has a second result, a number a channel: no image that would be copied."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["example_value"] = torch.empty(16, 64, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        norm, var = graph.call_function(F.group_norm, (x, 32)), graph.call_method("mean", (x, (0, 2, 3)))
        norm.meta["example_value"] = F.group_norm(x.meta["example_value"], 32)
        var.meta["example_value"] = x.meta["example_value"].mean((0, 2, 3))
    fusion = fusion_named("group_norm")
    match = Match("group_norm", (norm, var), frozenset((norm, var)), {"x": x})
    end = graph.output((var,))
    assert not select.returns_contiguous(fusion, match, View(graph))
    end.args = ((var, norm),)
    assert select.returns_contiguous(fusion, match, View(graph))


@pytest.mark.parametrize("returned", [False, True])
def test_norms_of_channels_last_images_that_the_graph_returns(returned):
    """PyTorch's result is contiguous on a GPU: the kernel's would be copied."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    with FakeTensorMode():
        # Where Inductor is slower, if there is a GPU to ask the table of.
        x.meta["example_value"] = torch.empty(64, 256, 56, 56, device="cuda").to(memory_format=torch.channels_last)
        w.meta["example_value"] = torch.empty(8, 256, 1, 1, device="cuda")
        norm = graph.call_function(F.group_norm, (x, 32))
        norm.meta["example_value"] = F.group_norm(x.meta["example_value"], 32)
        conv = graph.call_function(torch.conv2d, (norm, w))
        conv.meta["example_value"] = torch.conv2d(norm.meta["example_value"], w.meta["example_value"])
    graph.output((norm, conv) if returned else (conv,))
    view = View(graph)
    sites = placed(view, parse("reduce-overhead", {}))
    assert [site.status for site in sites] == ["kept" if returned else "fused"], [s.reason for s in sites]
    if returned:
        assert "copy" in sites[0].reason


@pytest.mark.parametrize(
    ("hidden", "dtype", "trained", "reduction", "kept"),
    [
        (4096, torch.bfloat16, True, "none", True), (4096, torch.bfloat16, False, "none", False),
        (768, torch.bfloat16, True, "none", False), (4096, torch.bfloat16, True, "mean", False),
        (768, torch.float32, True, "none", True), (64, torch.float32, True, "none", False),
    ],
)  # fmt: skip
def test_heads_whose_backward_would_make_the_logits_again(hidden, dtype, trained, reduction, kept):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(8192, hidden, device="cuda", dtype=dtype, requires_grad=trained)
        lm_head = torch.empty(128256, hidden, device="cuda", dtype=dtype, requires_grad=trained)
        target = torch.empty(8192, device="cuda", dtype=torch.int64)
        loss = fusion_named("linear_cross_entropy").pays(x, lm_head, None, target, None, reduction, -100, 0.0, 0.0, 1.0)
        assert (loss is not None) == kept
        if reduction == "none":
            both = fusion_named("token_log_probs").pays(x, lm_head, None, target, 0.0, 1.0)
            assert (both is not None) == kept
            with torch.no_grad():
                assert fusion_named("token_log_probs").pays(x, lm_head, None, target, 0.0, 1.0) is None


@pytest.fixture
def tf32():
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("tf32")
def test_tensor_cores_make_logits_of_float32_again():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, lm_head = (torch.empty(n, 768, device="cuda", requires_grad=True) for n in (8192, 128256))
        target = torch.empty(8192, device="cuda", dtype=torch.int64)
        assert fusion_named("token_log_probs").pays(x, lm_head, None, target, 0.0, 1.0) is None


def test_which_graphs_inductor_lays_out_channels_last():
    assert goes_channels_last(convolutions((128, 64, 3, 3), (128, 128, 3, 3)))
    assert not goes_channels_last(convolutions((64, 64, 3, 3))), "small channels"
    assert not goes_channels_last(convolutions((64, 128, 3, 3), (128, 64, 3, 3))), "it narrows"
    assert goes_channels_last(convolutions((64, 128, 1, 1), (128, 64, 3, 3))), "a 1 x 1 may narrow"
    assert not goes_channels_last(convolutions((128, 64, 3, 3), groups=2)), "grouped"
    assert goes_channels_last(convolutions((128, 1, 3, 3), groups=128)), "depthwise"
    assert not goes_channels_last(convolutions((128, 64, 3, 3), device="cpu"))
    assert not goes_channels_last(torch.fx.Graph())


@pytest.mark.parametrize("fusion", all_fusions(), ids=lambda fusion: fusion.name)
def test_sites_can_be_compared_with_what_was_measured(fusion):
    """Cells have the dims of what was measured; a site lacks those that a table of it may have one of."""
    case = next((c for c in fusion.cases if c.name == "odd"), fusion.cases[0])
    given = make_inputs(fusion, case, fusion.variants[0], torch.float32, "cpu")
    sizes = tables.sizes_of(fusion, {n: t for n, t in given.items() if isinstance(t, torch.Tensor)})
    for cell in tables.cells_of("NVIDIA H200", fusion.name):
        assert set(sizes) & set(cell.sizes), "nothing to compare"
        assert cell.distance({**sizes, **{d: 2.0 * n for d, n in cell.sizes.items() if d in sizes}}) > 0


def test_what_could_not_be_measured_is_said(monkeypatch):
    """The user asked for measuring: the report says why a rule decided instead."""
    monkeypatch.setattr(measure, "_SEEN", {})
    monkeypatch.setattr(measure, "_read", lambda file: None)
    monkeypatch.setattr(measure, "_measure_in_a_process", lambda site: "measuring failed: no memory")
    with fx_fusion.recording() as report:
        torch.compile(lambda x, w: F.rms_norm(x, (8,), w), backend=rewriting_backend(select="measure"))(torch.randn(4, 8), torch.randn(8))
    (site,) = report.sites
    assert site.status == "kept"
    assert "on CPU Inductor compiles this as well" in site.reason
    assert "not measured: measuring failed: no memory" in site.reason
