"""Tables of a GPU: what was measured, and which cell speaks for a site."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from bench import merge
from bench.fewest import fewest_bytes
from bench.grid_file import read, write
from bench.table import cells
from bench.worst import decided
from fx_fusion.cost import table as tables
from fx_fusion.fusion.declaration import case
from fx_fusion.fusion.dims import parse
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.fusion.registry import all_fusions, fusion_named
from fx_fusion.graph.devices import planning_for
from fx_fusion.testing import make_inputs
from fx_fusion.torch_internals.fakes import FakeTensorMode

ROOT = Path(__file__).parents[2]
# Their why_keep decides, by sizes.
WHY_KEEP_ALONE = (
    "linear_cross_entropy", "linear_soft_cross_entropy", "linear_rows", "flex_attention", "biased_attention",
)  # fmt: skip


@pytest.fixture
def two_tables(monkeypatch):
    """A fast and a slow GPU that were measured, on which RMSNorm's kernels won by much, by little and not."""
    times = {"Fast": {512: 0.5, 8192: 0.97, 65536: 1.2}, "Slow": {512: 1.2, 8192: 1.2, 65536: 0.5}}
    sizes = {gpu: [{"m": m, "n": 2048} for m in of] for gpu, of in times.items()}
    cells = {
        gpu: tuple(tables.Cell("rms_norm", 2, True, "... n", s, times[gpu][s["m"]], 1.0, gpu=gpu) for s in sizes[gpu]) for gpu in times
    }
    monkeypatch.setattr(tables, "rates_of_tables", lambda: {"Fast": 4e12, "Slow": 1e12})
    monkeypatch.setattr(tables, "cells_of", lambda gpu, fusion: cells.get(gpu, ()))
    tables.tables_for.cache_clear()
    yield lambda gpu, rate: (
        monkeypatch.setattr(tables, "gpu_name", lambda tensor: gpu),
        monkeypatch.setattr(tables, "bytes_per_second", lambda device: rate),
        tables.tables_for.cache_clear(),
    )
    tables.tables_for.cache_clear()


def kept(rows, dtype=torch.bfloat16):
    """Return what is said of RMSNorm of so many rows."""
    with FakeTensorMode():
        given = {"x": torch.empty(rows, 2048, dtype=dtype, device="cuda"), "weight": torch.empty(2048, device="cuda")}
    return tables.why_slower_for(fusion_named("rms_norm"), given, {})


def test_a_gpu_that_was_not_measured_goes_by_the_one_whose_memory_is_nearest_in_speed(two_tables):
    two_tables("Unknown", 3e12)
    assert kept(512) is None
    assert kept(65536) == "Inductor was 1.20 times as fast at 65536 x 2048, the nearest sizes that were measured, on an Fast"
    two_tables("Unknown", 5e11)
    assert kept(65536) is None
    assert kept(512) == "Inductor was 1.20 times as fast at 512 x 2048, the nearest sizes that were measured, on an Slow"


def test_what_was_not_measured_here_is_looked_up_on_the_gpu_most_alike(two_tables, monkeypatch):
    """A table of 16 bits alone says nothing of float32."""
    two_tables("Unknown", 3e12)
    both = tables.cells_of
    wide = dataclasses.replace(both("Slow", "rms_norm")[0], itemsize=4, ours=0.5)
    monkeypatch.setattr(tables, "cells_of", lambda gpu, fusion: (wide,) if gpu == "Slow" else both(gpu, fusion))
    assert kept(65536, torch.float32) is None, "as on the slow one"
    assert "on an Fast" in kept(65536)


def test_by_the_table_of_another_gpu_only_what_won_by_a_margin_is_fused(two_tables):
    two_tables("Unknown", 3e12)
    assert kept(8192) == (
        "Inductor was nearly as fast (0.97) at 8192 x 2048, the nearest sizes that were measured, on an Fast"
    )
    two_tables("Fast", 3e12)
    assert kept(8192) is None


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
            assert set(made.sizes) <= set(fusion_named(made.fusion).dims)


def test_every_formula_is_a_number_of_bytes():
    for fusion in all_fusions():
        if fusion.traffic is not None:
            sizes = {**dict.fromkeys(fusion.dims, 4096), "bytes": 2}
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


def test_a_file_of_cells_is_read_as_the_rows_that_were_measured(tmp_path, monkeypatch):
    """Written by bench.run, merged into the results, read by whoever draws them: nothing is lost, and the last one counts."""
    about = {
        "fusion": "rope", "case": "gemma_2b", "sizes": {"s": 2048, "b": 4}, "dtype": "bfloat16", "layout": "b s h d",
        "statics": {"style": "rotate_half"},
    }  # fmt: skip
    stamp = {"copy_gb_s": 4242, "environment": {"gpu": "A GPU", "commit": "a"}}
    rows = [
        {**about, "keeps": keeps, "mode": mode, "provider": provider, "ms": 0.12345, "share": 0.5, "host_us": 80.1, "peak_mib": 32.0, **stamp}
        for mode, keeps in (("forward", "Inductor was 1.2 times as fast"), ("forward+backward", None))
        for provider in ("eager", "fx_fusion")
    ]
    rows.append({**about, "case": "odd", "error": "ValueError: nothing was fused", **stamp})
    rows += [{**row, "case": "llama_8b", "environment": {"gpu": "A GPU", "commit": "b"}} for row in rows[:2]]
    (tmp_path / "ops.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(tmp_path / "ops.jsonl") == rows
    write(tmp_path / "grid.jsonl", rows)
    assert len((tmp_path / "grid.jsonl").read_text().splitlines()) == 4, "the environments, and three cells"
    assert [list(row["sizes"]) for row in read(tmp_path / "grid.jsonl")] == [["s", "b"]] * 7
    (tmp_path / "ops.jsonl").write_text(json.dumps({**rows[0], "ms": 9.0}) + "\n")
    monkeypatch.setattr("sys.argv", ["merge", str(tmp_path / "grid.jsonl"), str(tmp_path / "ops.jsonl")])
    merge.main()
    again = read(tmp_path / "grid.jsonl")
    assert len(again) == 7
    assert [row for row in again if row not in rows] == [{**rows[0], "ms": 9.0}]


GRIDS = {"nvidia_h200": ("grid.jsonl", 2000), "nvidia_h100_80gb_hbm3": ("grid_h100.jsonl", 500)}


@pytest.mark.parametrize("gpu", GRIDS)
def test_a_shipped_table_is_of_the_shipped_measurements_and_no_cell_is_slow(gpu):
    """``auto`` fuses where the cell says so: nowhere below 0.97 of Inductor's speed."""
    file, least = GRIDS[gpu]
    rows = read(ROOT / "bench/results" / file)
    shipped = json.loads((tables._FOLDER / f"{gpu}.json").read_text())["cells"]
    assert json.loads(json.dumps(cells(rows))) == shipped
    speeds = list(decided(rows, [tables.Cell(**cell) for cell in shipped]))
    assert len(speeds) > least
    assert min(speeds)[0] >= 0.97
    assert max(row["share"] for row in rows if row.get("provider") == "fx_fusion") < 1.06, "below the fewest bytes"


@pytest.mark.parametrize("gpu", GRIDS)
def test_the_table_of_another_gpu_loses_nowhere_more_than_5_percent(gpu):
    """As if it had not been measured."""
    rows = read(ROOT / "bench/results" / GRIDS[gpu][0])
    (other,) = tables.rates_of_tables().keys() - {rows[0]["environment"]["gpu"]}
    known = {cell.fusion for cell in tables._table(other)}
    rows = [row for row in rows if row["fusion"] in known and row["dtype"] != "float32"]
    assert min(decided(rows, tables._table(other), tables.ELSEWHERE))[0] >= 0.95


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


def kept_on_an_h200(fusion, dtype=torch.bfloat16, **shapes):
    """Return why it is kept there, trained, by the shipped table."""
    with FakeTensorMode(), planning_for("NVIDIA H200"):
        given = {name: torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True) for name, shape in shapes.items()}
        return tables.why_slower_for(fusion_named(fusion), given, {"round_first": False})


def test_a_variant_that_was_measured_at_few_sizes_goes_by_the_other_one():
    """``nn.RMSNorm``: the grid has the Llama's, and of this one nothing below 2048 x 4096."""
    assert "at 128 x 768" in kept_on_an_h200("rms_norm", x=(128, 768), weight=(768,))
    assert kept_on_an_h200("rms_norm", x=(8192, 4096), weight=(4096,)) is None


def test_rows_that_another_kernel_computes_are_not_the_nearest():
    """Above 8192 the backward of a row norm is another one. 9216: OPT-66B's width."""
    assert "at 8192 x 11000" in kept_on_an_h200("layer_norm", x=(8192, 9216), weight=(9216,), bias=(9216,))
    assert kept_on_an_h200("layer_norm", x=(8192, 8192), weight=(8192,), bias=(8192,)) is None


def test_where_a_layout_was_not_measured_another_one_speaks():
    assert "at 128 x 768" in kept_on_an_h200("layer_norm", torch.float32, x=(768,), weight=(768,), bias=(768,))
    heads_first = dict.fromkeys(("q", "k", "v"), (1, 8, 128, 64))
    assert "at 1 x 8 x 128 x 64" in kept_on_an_h200("attention", torch.float32, **heads_first)


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
    assert parse("a fusion", "x", spec).layout(tensor.stride()) == layout


@pytest.mark.parametrize("fusion", all_fusions(), ids=lambda fusion: fusion.name)
def test_sites_can_be_compared_with_what_was_measured(fusion):
    """Cells have the dims of what was measured; a site lacks those that a table of it may have one of."""
    case = next((c for c in fusion.cases if c.name == "odd"), fusion.cases[0])
    given = make_inputs(fusion, case, fusion.variants[0], torch.float32, "cpu")
    sizes = tables.sizes_of(fusion, {n: t for n, t in given.items() if isinstance(t, torch.Tensor)})
    measured = list(tables.cells_of("NVIDIA H200", fusion.name))
    decided = measured or fusion.traffic or fusion.name in WHY_KEEP_ALONE
    assert decided, "nothing decides about an unmeasured fusion without traffic"
    for cell in measured:
        assert set(sizes) & set(cell.sizes), "nothing to compare"
        assert cell.distance({**sizes, **{d: 2.0 * n for d, n in cell.sizes.items() if d in sizes}}) > 0
