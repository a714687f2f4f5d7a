"""Flash-linear-attention's gated delta rule inside a graph, by a stand-in of the library that needs no GPU (``tests/stubs``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fx_fusion
from fx_fusion import frontend
from fx_fusion.frontends import fla as front_end
from fx_fusion.testing import rewriting_backend

STUBS = Path(__file__).parents[1] / "stubs"
B, T, HEADS, VALUES, N = 2, 9, 2, 4, 16


@pytest.fixture(params=["chunk_gated_delta_rule", "chunk_kda"])
def rule(request, monkeypatch):
    """A function of the stand-in, whose source is known."""
    monkeypatch.syspath_prepend(STUBS)
    monkeypatch.setattr(frontend, "_registered", [])
    import fla.ops.gated_delta_rule
    import fla.ops.kda

    monkeypatch.setitem(front_end.KNOWN, frontend.source_hash(front_end.SOURCES), "a stand-in")
    monkeypatch.setitem(front_end.KNOWN_OF_KDA, frontend.source_hash(front_end.SOURCES_OF_KDA), "a stand-in")
    frontend.register_front_end(front_end.FRONT_END)
    yield getattr(fla.ops.kda, request.param, None) or getattr(fla.ops.gated_delta_rule, request.param)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def operands(rule, dtype=torch.float32):
    """q, k, v, g and beta; KDA has a decay for each channel."""
    torch.manual_seed(0)
    made = [torch.randn(B, T, heads, N) for heads in (HEADS, HEADS, VALUES)]
    made += [-torch.rand(B, T, VALUES, *((N,) if rule.__name__ == "chunk_kda" else ())), torch.rand(B, T, VALUES)]
    return [x.to(dtype).requires_grad_() for x in made]


def run(function, of):
    results = [y for y in function(*of) if y is not None]
    return results, torch.autograd.grad(sum(y.float().square().sum() for y in results), of)


CALLS = {
    "norms in the kernel": {"use_qk_l2norm_in_kernel": True},
    "no norms, a scale": {"scale": 0.3},
    "the last state": {"output_final_state": True, "use_qk_l2norm_in_kernel": True},
    "defaults by name": {"initial_state": None, "cu_seqlens": None, "cp_context": None, "allow_neg_eigval": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", CALLS)
def test_a_call_is_part_of_the_graph(rule, how, dtype):
    """The same kernels, so the same bits."""
    function = lambda q, k, v, g, beta: rule(q.sin(), k, v * 2, g=g, beta=beta, **CALLS[how])  # noqa: E731
    of = operands(rule, dtype)
    with fx_fusion.recording() as report:
        found = run(torch.compile(function, backend=rewriting_backend()), of)
    assert len(report.graphs) == 1
    assert report.graphs[0].front_ends == ("flash-linear-attention",)
    torch._dynamo.reset()
    torch.testing.assert_close(found, run(function, of), rtol=0, atol=0)


def test_what_is_frozen_has_no_gradient(rule):
    q, k, v, g, beta = operands(rule)
    function = lambda v, beta: rule(q.detach(), k.detach(), v, g.detach(), beta, use_qk_l2norm_in_kernel=True)  # noqa: E731
    found = run(torch.compile(function, backend=rewriting_backend()), [v, beta])
    torch.testing.assert_close(found, run(function, [v, beta]), rtol=0, atol=0)


@pytest.mark.parametrize("given", [{"initial_state": torch.ones(B, VALUES, N, N)}, {"allow_neg_eigval": True}])
def test_what_the_op_does_not_take_is_left_to_the_library(rule, given):
    function = lambda q, k, v, g, beta: rule(q.sin(), k, v, g, beta, **given)[0].cos()  # noqa: E731
    of = operands(rule)
    with fx_fusion.recording() as report, torch.no_grad():
        found = torch.compile(function, backend=rewriting_backend())(*of)
    assert len(report.graphs) > 1
    torch.testing.assert_close(found, function(*of))


def test_arguments_by_position_are_the_librarys(rule):
    """Behind the tenth one the order is the library's own, and differs between its functions."""
    function = lambda q, k, v, g, beta: rule(q.sin(), k, v, g, beta, 0.3, None, False, True, False)[0]  # noqa: E731
    of = operands(rule)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function, backend=rewriting_backend())(*of), function(*of), rtol=0, atol=0)


def test_an_error_is_the_librarys(rule):
    q, k, v, g, beta = operands(rule)
    with pytest.raises(ValueError, match="3 heads of values for 2 heads"):
        torch.compile(rule, backend=rewriting_backend())(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3])


@pytest.mark.parametrize("rule", ["chunk_gated_delta_rule"], indirect=True)
def test_another_library_that_takes_the_calls(rule, monkeypatch):
    each, _ = front_end.FRONT_END.substitutes
    assert frontend.why_unknown(front_end.FRONT_END, each) is None
    find = frontend.importlib.util.find_spec
    monkeypatch.setattr(frontend.importlib.util, "find_spec", lambda name: name == "flash_qla" or find(name))
    assert frontend.why_unknown(front_end.FRONT_END, each).endswith("is left to flash_qla, which is installed")


def test_the_op_keeps_its_promises(rule):
    of = [x.detach() for x in operands(rule)]
    arguments = (*of, 0.25, True, True, None)
    op = torch.ops.fx_fusion.fla_kda if rule.__name__ == "chunk_kda" else torch.ops.fx_fusion.fla_gated_delta_rule
    torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


QWEN = """
import json, torch, fx_fusion
from fx_fusion import frontend
from fx_fusion.frontends import fla as front_end
import fla.ops.gated_delta_rule
front_end.KNOWN[frontend.source_hash(front_end.SOURCES)] = "a stand-in"
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from fx_fusion.testing import rewriting_backend
torch.manual_seed(0)
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, vocab_size=100,
    use_cache=False,
)).train()
ids = torch.randint(0, 100, (2, 20))
with fx_fusion.recording() as report:
    loss = torch.compile(model, backend=rewriting_backend())(ids, labels=ids).loss
fused = {f: sum(s.status == "fused" for s in report.sites if s.fusion == f) for f in {s.fusion for s in report.sites}}
print(json.dumps([len(report.graphs), fused, loss.item(), model(ids, labels=ids).loss.item()]))
"""


def test_qwen3_5_is_one_graph():
    pytest.importorskip("transformers.models.qwen3_5")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", QWEN], capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{STUBS}"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    graphs, fused, loss, expected = json.loads(run.stdout.splitlines()[-1])
    assert graphs == 1
    assert (fused["causal_conv1d"], fused["gated_rms_norm"], fused["linear_cross_entropy"]) == (3, 3, 1)
    assert loss == pytest.approx(expected, rel=1e-5)

