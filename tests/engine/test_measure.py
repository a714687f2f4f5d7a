"""Measuring on the spot: what decides, what is kept, and where it says nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.cost import estimate as estimates
from fx_fusion.cost import measure
from fx_fusion.inductor import cache_key
from fx_fusion.testing import rewriting_backend

ROOT = Path(__file__).parents[2]


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
    assert [writer.wait(timeout=1200) for writer in writers] == [0] * 2
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


def test_the_process_that_measures_has_no_options_of_this_one(monkeypatch):
    for name in ("FX_FUSION_VERIFY", "FX_FUSION_FUEL", "FX_FUSION_MEMORY"):
        monkeypatch.setenv(name, "1")
    assert not [name for name in measure._environment_of("fx_fusion.kernels.x") if name.startswith("FX_FUSION_")]


def test_the_process_that_measures_sees_the_gpu_of_this_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert measure._environment_of("fx_fusion.kernels.x")["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7f")
    assert measure._environment_of("fx_fusion.kernels.x")["CUDA_VISIBLE_DEVICES"] == "GPU-7f"


def test_equal_sites_are_all_reported_by_what_was_measured(folder, monkeypatch):
    """The first as well: it is described before it is measured."""
    monkeypatch.setattr(measure, "_measure_in_a_process", lambda site: {"ours": 1.0, "inductor": 3.0})
    monkeypatch.setattr(estimates, "device_type", lambda tensor: "cuda")
    with fx_fusion.recording() as report:
        x, w = torch.randn(4, 64, requires_grad=True), torch.randn(64, requires_grad=True)
        torch.compile(lambda x, w: norm(norm(x, w), w), backend=rewriting_backend(select="measure"))(x, w)
    assert [site.estimate["source"] for site in report.sites if site.status == "fused"] == ["measured"] * 2


@pytest.mark.parametrize("stride", [(8, 1), (0, 1), (1, 4), (0, 0)])
def test_tensors_of_any_strides_are_made(stride):
    about = {"shape": [4, 8], "stride": list(stride), "dtype": "float32", "device": "cpu", "grad": True, "below": None}
    made = measure._tensor(about, {})
    assert made.stride() == stride
    assert made.is_leaf
    assert made.requires_grad
    assert made.isfinite().all()
