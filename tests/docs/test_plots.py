"""The plots of the benchmarks: every size and label is there, lines are of one kind, and no result is written in the code."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from bench import hero, plots
from bench.cells import by_row, cells_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
NAMES = [f"{name}{suffix}" for name in ("hero", "speedup", "rates", "memory") for suffix in ("", "_dark")]
WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def measured(fusion, case, sizes, layout, ours=1.0, inductor=2.0, share=0.5, **more):
    """The rows of one cell: Inductor takes ``inductor`` ms and twice the memory."""
    about = {
        "fusion": fusion, "case": case, "sizes": sizes, "dtype": "bfloat16", "layout": layout, "mode": "forward+backward",
        "copy_gb_s": 4000, "environment": {"gpu": "A GPU", "commit": "a"}, **more,
    }  # fmt: skip
    return [
        {**about, "provider": "fx_fusion", "ms": ours, "share": share, "peak_mib": 64.0},
        {**about, "provider": "inductor", "ms": inductor, "share": share * ours / inductor, "peak_mib": 128.0},
        {**about, "provider": "eager", "ms": 9.0, "share": 0.1, "peak_mib": 512.0},
    ]


def grid():
    rows = []
    for n in WIDTHS:
        rows += measured("rms_norm", f"64x{n}", {"m": 64, "n": n}, "... n", inductor=1.25, statics={"offset": 0})
        rows += measured("attention", f"1x2x{n}x128", {"b": 1, "h": 2, "s": n, "d": 128}, "b s h d")
        for layout, suffix in (("b c ...", ""), ("b ... c", " nhwc")):
            rows += measured("group_norm", f"2x{n}x28x28{suffix}", {"b": 2, "c": n, "m": 784}, layout)
    rows += measured("rms_norm", "odd_columns", {"m": 64, "n": 1000}, "... n", statics={"offset": 0})
    rows += measured("rms_norm", "gemma_2b", {"m": 64, "n": 3072}, "... n", statics={"offset": 1})
    rows += measured("rms_norm", "64x1024", {"m": 64, "n": 1024}, "... n", dtype="float32", inductor=7.77)
    return rows + measured("swiglu", "llama_8b", {"m": 16, "n": 14336}, "... n")


def model(variant, rate, gib, commit, name="llama-1b", **options):
    return {
        "variant": variant, "mask": "none", "model": name, "batch": 8, "length": 2048, "unit": "tokens", "items_per_s": rate,
        "peak_gib": gib, "options": options, "environment": {"gpu": "A GPU", "commit": commit},
    }  # fmt: skip


MODELS = [
    model("inductor", 100.0, 20.0, "a"),
    model("liger", 111.0, 15.0, "a"),
    model("fx_fusion", 140.0, 10.0, "a", memory="min"),
    model("inductor", 200.0, 40.0, "b"),
    model("fx_fusion", 250.0, 30.0, "b", memory="min"),
    model("fx_fusion", 999.0, 1.0, "c", memory="min"),  # nothing beside it
    model("fx_fusion", 888.0, 1.0, "b"),  # another option
    model("inductor", 777.0, 1.0, "b", **{"triton.cudagraphs": True}),
]
SETUPS = [
    {"setup": "lora", "inductor": {"ms": 30.0, "gib": 8.0}, "fx_fusion": {"ms": 20.0, "gib": 6.0}},
    {"setup": "lora", "inductor": {"ms": 30.0, "gib": 8.0}, "fx_fusion": {"ms": 24.0, "gib": 6.5}},
]
PRODUCTS = [
    {"rows": 1000, "n": 1000, "k": 1000, "bfloat16_us": 4.0},
    {"rows": 1000, "n": 1000, "k": 1000, "bfloat16_us": 2.5},
    {"kernel": "norm", "us": 1.0},
]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The plots of the rows above, as texts and as XML."""
    folder = tmp_path_factory.mktemp("plots")
    for name, rows in (("grid", grid()), ("models", MODELS), ("setups", SETUPS), ("float8_products", PRODUCTS)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plots.main([str(folder / "grid.jsonl"), "--out", str(folder)])
    return {name: (folder / f"{name}.svg").read_text("utf-8") for name in NAMES}


def texts(svg):
    return [found for found in ("".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")) if found]


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_has_text_and_no_place_that_is_no_number(drawn, name):
    assert len(texts(drawn[name])) > 8
    assert not re.search(r"\bnan\b|\binf\b", drawn[name], re.I)


@pytest.mark.parametrize("name", ["hero", "speedup", "rates", "memory"])
def test_both_schemes_say_the_same(drawn, name):
    light, dark = drawn[name], drawn[f"{name}_dark"]
    assert texts(light) == texts(dark)
    assert "#ffffff" in light
    assert "#0d1117" in dark
    assert "#ffffff" not in dark


def test_the_heatmap_names_every_size(drawn):
    said = texts(drawn["speedup"])
    assert {f"64 x {n}" for n in (*WIDTHS, 1000, 3072)} | {"16 x 14336"} <= {*said}
    assert {f"2 x {n} x 28 x 28" for n in WIDTHS} | {f"1 x 2 x {n} x 128" for n in WIDTHS} <= {*said}
    assert {"rms_norm", "rms_norm, gemma_2b", "group_norm", "group_norm, channels last", "attention", "swiglu"} <= {*said}
    assert said.count("1.25") == len(WIDTHS)
    assert said.count("2.00") == 3 * len(WIDTHS) + 3
    assert "7.77" not in said, "a cell of another dtype"


def test_rates_are_of_the_copy_rate_or_of_products(drawn):
    said = texts(drawn["rates"])
    assert {"rms_norm", "group_norm", "attention"} <= {*said}
    assert "swiglu" not in said, "one size makes no line"
    assert said.count("TFLOP/s") == said.count("GFLOP") == 1
    assert said.count("% of the copy rate") == said.count("MiB that have to move") == 2


def test_lines_join_sizes_of_one_kind():
    rows = by_row(cells_of(grid(), "bfloat16"))
    assert [cell.size[1] for cell in rows["rms_norm"] if not cell.apart] == list(WIDTHS)
    assert [cell.size[1] for cell in rows["rms_norm"] if cell.apart] == [1000]
    assert {cell.ours["layout"] for cell in rows["group_norm, channels last"]} == {"b ... c"}
    assert {cell.ours["layout"] for cell in rows["group_norm"]} == {"b c ..."}


def test_the_work_of_a_cell():
    rows = by_row(cells_of(grid(), "bfloat16"))
    assert rows["rms_norm"][0].bytes == 0.5 * 4000e9 * 1e-3
    assert rows["rms_norm"][0].flops is None
    s = WIDTHS[0]
    assert rows["attention"][0].flops == 14 * 1 * 2 * 128 * s * (s + 1) / 2
    assert plots.fastest_product(PRODUCTS) == 800.0


def test_memory_names_the_largest_size(drawn):
    said = texts(drawn["memory"])
    assert f"rms_norm: 64 x {WIDTHS[-1]}" in said
    assert f"group_norm, channels last: 2 x {WIDTHS[-1]} x 28 x 28" in said
    assert said.count("0.50") == 6


def test_the_chart_takes_the_last_run_that_has_inductors_beside_it(drawn):
    llama, lora = hero.bars(MODELS, SETUPS)
    assert (llama.speed, llama.gib) == (
        {"inductor": 1.0, "fx_fusion": 1.25, "liger": 0.555}, {"inductor": 40.0, "fx_fusion": 30.0, "liger": 15.0},
    )  # fmt: skip
    assert (lora.speed["fx_fusion"], lora.gib["fx_fusion"]) == (1.25, 6.5)
    said = texts(drawn["hero"])
    assert {'Llama 3.2 1B, memory="min", 8 x 2048', "40.0 → 30.0 GiB", "8.0 → 6.5 GiB", "Training on one A GPU"} <= {*said}
    assert said.count("1.25 x") == 2


def test_the_plots_that_are_shipped_are_those_of_the_results(tmp_path):
    plots.main([str(RESULTS / "grid.jsonl"), "--out", str(tmp_path)])
    for name in ("hero", "speedup"):
        shipped, made = ((folder / f"{name}.svg").read_text("utf-8") for folder in (RESULTS, tmp_path))
        assert texts(shipped) == texts(made), f"python -m bench.plots makes another {name}"
    for file in RESULTS.glob("*.svg"):
        assert file.stat().st_size < 200_000, file
