"""The models of ``bench.models`` at full size, on tensors without memory: a step of each, planned for the GPU that it is
measured on. No figures."""

import contextlib
import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fusion
from bench import families
from bench.families import FAMILIES, OF_TIMM
from fx_fusion.graph.devices import planning_for
from tests.helpers import slow_but

OF_DIFFUSERS = ("unet", "sd3", "flux", "wan")
NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "group_norm", "group_norm_swish", "evonorm_s0")


@pytest.fixture
def without_a_gpu(monkeypatch):
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    monkeypatch.setattr(families, "DEVICE", "cpu")
    monkeypatch.setitem(TORCH_INIT_FUNCTIONS, "trunc_normal_", lambda tensor, **_: tensor)  # draws until it has all values


@pytest.mark.parametrize("name", slow_but(("cohere2", "albert"), FAMILIES))
def test_a_step(name, without_a_gpu):
    """One graph is captured, and the fusions that the model has are found; the loss reaches the parameters."""
    needed = "timm" if name in OF_TIMM else "diffusers" if name in OF_DIFFUSERS else "transformers"
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"no {needed}")
    family = FAMILIES[name]
    batch = 2 if name in OF_TIMM else family.batch
    with contextlib.nullcontext() if name in OF_TIMM else FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model, step, items = family.build(batch, family.length)
        finally:
            torch.set_default_dtype(torch.float32)
        model.train()
        given, later = step(0), step(11)
        assert [(n, t.shape, t.dtype) for n, t in later.items()] == [(n, t.shape, t.dtype) for n, t in given.items()]
        assert items == batch if family.unit != "tokens" else items >= batch * family.length
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        with planning_for("NVIDIA H200"):
            report = fx_fusion.explain(model, **given)
        loss = family.loss_of(model(**given), given)
        loss.backward()
    assert loss.shape == ()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert [n for n in without if not n.endswith("mask_token")] == []
    assert [graph.fallback for graph in report.graphs] == [""], str(report)
    assert any(s.fusion in NORMS and s.status in ("fused", "kept") for s in report.sites), str(report)
    assert report.count("linear_cross_entropy") == (family.unit not in ("images", "clips")), str(report)
