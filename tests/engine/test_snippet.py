"""A site as a program that stands alone."""

import subprocess
import sys

import pytest

import fx_fusion
from fx_fusion.fusion import registry
from fx_fusion.report.site import Site
from fx_fusion.report.snippet import snippet
from tests.helpers import tiny_llama, tokens

KNOWN = {fusion.name: fusion for fusion in registry.all_fusions()}


@pytest.fixture(scope="module")
def llama():
    ids = tokens()
    return fx_fusion.explain(tiny_llama(), input_ids=ids, labels=ids, options={"select": "always"})


@pytest.mark.parametrize("fusion", ["rms_norm", "add_rms_norm", "rope", "swiglu", "linear_cross_entropy"])
def test_it_runs_and_is_fused(llama, fusion, capsys):
    site = next(s for s in llama.sites if s.fusion == fusion)
    program = snippet(KNOWN[fusion], site)
    exec(program, {})
    assert f"fused     {fusion}" in capsys.readouterr().out
    of_rows = fusion != "linear_cross_entropy"  # whose leading dims are one
    for name, shape in site.shapes.items():
        if name in KNOWN[fusion].inputs and of_rows:
            assert f"{name}=torch.randn({shape[len('float32[') : -1]}, dtype=torch.float32" in program


def test_every_fusion_has_one_that_compiles(llama):
    for name, fusion in KNOWN.items():
        compile(snippet(fusion, Site(name, "near", "why\nnot", "m", "f.py:1")), name, "exec")
    for site in llama.sites:
        compile(snippet(KNOWN[site.fusion], site), site.fusion, "exec")


def test_of_a_near_miss_it_runs_in_a_process_of_its_own(tmp_path):
    file = tmp_path / "case.py"
    file.write_text(snippet(KNOWN["rms_norm"], Site("rms_norm", "near", "", "m", "f.py:1")))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert "rms_norm" in done.stdout, done.stderr
