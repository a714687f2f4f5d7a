"""TORCH_LOGS="fx_fusion": our messages as torch's own logs show theirs, and none where nobody asked."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, warnings, torch
warnings.simplefilter("ignore")
if sys.argv[1] == "set_logs":
    import logging
    torch._logging.set_logs(modules={"fx_fusion": logging.INFO})
if sys.argv[1] == "broken":
    from fx_fusion.graph.view import View
    def term(self, node):
        raise ZeroDivisionError("a bug of ours")
    View.term = term
norm = torch.nn.RMSNorm(8)
torch.compile(lambda x: norm(x).sin(), backend="fx_fusion", options={"select": "always"})(torch.randn(4, 8))
"""

TWO_NORMS = """
import torch
first, second = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8)
def model(x):
    x = first(x)
    x = x @ torch.ones(8, 8)
    return second(x).sum()
torch.compile(model, backend="fx_fusion", options={"select": "always"})(torch.randn(4, 8, requires_grad=True)).backward()
"""


def logged(tmp_path, logs, how="plain"):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_LOGS")}
    environment |= {"PYTHONPATH": str(ROOT), **({"TORCH_LOGS": logs} if logs else {})}
    done = subprocess.run([sys.executable, str(script), how], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


LINE = r"^I\d{4} .*report/trace.py:\d+\] \[0/0\] graph 0: \d+ -> \d+ nodes in .* s; fused: 1 x rms_norm"


@pytest.mark.slow
def test_a_line_a_graph(tmp_path):
    text = logged(tmp_path, "fx_fusion")
    assert len(re.findall(LINE, text, re.M)) == 1, text
    assert not re.search(r"^V\d{4}", text, re.M), "the table is for +fx_fusion"


@pytest.mark.slow
@pytest.mark.parametrize("logs", ["", "-fx_fusion", "dynamo"])
def test_nothing_where_nobody_asked(logs, tmp_path):
    assert "graph 0:" not in logged(tmp_path, logs)


@pytest.mark.slow
def test_the_table_at_debug(tmp_path):
    text = logged(tmp_path, "+fx_fusion,dynamo")
    assert re.search(LINE, text, re.M), text
    assert re.search(r"^V\d{4} .*\] fused +rms_norm", text, re.M), text
    assert re.search(r"torch/_dynamo/.*Step 1: torchdynamo start tracing", text), "beside torch's own"


@pytest.mark.slow
def test_set_in_a_program(tmp_path):
    assert re.search(LINE, logged(tmp_path, "", "set_logs"), re.M)


@pytest.mark.slow
def test_where_an_error_of_ours_was_raised(tmp_path):
    text = logged(tmp_path, "+fx_fusion", "broken")
    assert re.search(r"^I\d{4} .*the graph goes to Inductor unchanged: ZeroDivisionError\('a bug of ours'\)", text, re.M), text
    assert re.search(r"^V\d{4} .*script.py\", line \d+, in term", text, re.M), text


def test_tlparse_lists_our_artifacts(tmp_path):
    """``TORCH_TRACE=folder``, read by tlparse itself: the table, the diff and the JSON of each graph."""
    command = shutil.which("tlparse", path=Path(sys.executable).parent) or shutil.which("tlparse")
    if command is None:
        pytest.skip("there is no tlparse")
    traces, pages = tmp_path / "traces", tmp_path / "pages"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_TRACE": str(traces)}
    subprocess.run([sys.executable, str(script), "plain"], check=True, cwd=tmp_path, env=environment)
    (trace,) = traces.iterdir()
    subprocess.run([command, str(trace), "-o", str(pages), "--no-browser"], check=True, capture_output=True)
    found = {re.sub(r"_\d+$", "", file.stem): file.read_text() for file in pages.rglob("fx_fusion_*")}
    assert found.keys() == {"fx_fusion_report", "fx_fusion_diff", "fx_fusion_json"}
    assert re.search(r"fused +rms_norm", found["fx_fusion_report"])
    assert "rms_norm" in found["fx_fusion_diff"]
    assert json.loads(found["fx_fusion_json"])["sites"][0]["fusion"] == "rms_norm"
    assert "fx_fusion_report" in (pages / "index.html").read_text()


@pytest.mark.slow
def test_which_line_a_kernel_belongs_to(tmp_path):
    """PyTorch's provenance tracking knows the user's lines of our ops, forward and backward, each launch by itself."""
    script, traces = tmp_path / "script.py", tmp_path / "traces"
    script.write_text(TWO_NORMS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_TRACE": str(traces), "INDUCTOR_PROVENANCE": "1"}
    environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path, env=environment)
    (trace,) = traces.iterdir()
    payloads = re.findall(r'"name": "inductor_provenance_tracking_kernel_stack_traces".*\n((?:\t.*\n)+)', trace.read_text())
    forward, backward = map(json.loads, payloads)
    for launches, op in ((forward, "rms_norm"), (backward, "rms_norm_bwd")):
        ours = {name: "".join(stacks) for name, stacks in launches.items() if f"fx_fusion.{op}.default:" in name}
        assert len(ours) == 2
        assert sorted(line for line in ("first(x)", "second(x)") for said in ours.values() if line in said) == ["first(x)", "second(x)"]
