"""Sixteen model families of transformers, unmodified, tiny and random: every site fused or explained, numbers as eager's."""

import pytest
import torch

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import slow_but
from tests.zoo import FAMILIES, batch, build


def gradients(model, run, inputs):
    model.zero_grad()
    out = run(**inputs)
    out.loss.backward()
    values = {"loss": out.loss.detach(), "logits": (out.logits.detach() + 0)}
    values.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return values


@pytest.mark.parametrize("dtype", slow_but((torch.float32,), (torch.float32, torch.bfloat16)), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, dtype):
    model = build(family, dtype)
    inputs = batch()
    oracle = build(family).double()
    if family == "Mixtral":  # the grouped product of its experts has no float64
        oracle.set_experts_implementation("batched_mm")
    exact = gradients(oracle, oracle, inputs)
    eager = gradients(model, model, inputs)
    with fx_fusion.recording() as report:
        ours = gradients(model, torch.compile(model, backend=rewriting_backend()), inputs)
    assert ours.keys() == eager.keys() == exact.keys()
    worst = {}
    for name, truth in exact.items():
        unit = max(truth.abs().max().item(), 1e-3 if name != "loss" else 0)
        error = (ours[name].double() - truth).abs().max().item() / unit
        usual = (eager[name].double() - truth).abs().max().item() / unit
        worst[name] = error / (2 * usual + 2 * torch.finfo(dtype).eps)
    assert {name: used for name, used in worst.items() if not used <= 1} == {}, "parts of the allowed error"

    norms, gated, rope, masks, grouped = FAMILIES[family][1]
    of_experts = sum("with the gate in one kernel" in site.reason for site in report.sites if site.status == "fused")
    counted = (
        report.count("rms_norm") + report.count("add_rms_norm"),
        report.count("swiglu") + report.count("geglu") + of_experts,
        report.count("rope"), report.count("causal_mask"), report.count("repeat_kv"),
    )  # fmt: skip
    assert counted == (norms, gated, rope, masks, grouped), str(report)
    assert report.count("linear_cross_entropy") + report.count("cross_entropy") >= 1, str(report)
    centered = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm) or type(m).__name__ == "CohereLayerNorm"]
    assert report.count("layer_norm") + report.count("add_layer_norm") == len(centered), str(report)
    assert report.count("embedding") >= 1
    assert all(site.reason for site in report.sites if site.status != "fused")
    assert all(site.location for site in report.sites)


def test_checkpointed_layers_are_rewritten_inside():
    model = build("Llama")
    inputs = batch()
    eager = gradients(model, model, inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with fx_fusion.recording() as report:
        ours = gradients(model, torch.compile(model, backend=rewriting_backend()), inputs)
    assert report.count("rope") == 2, str(report)
    assert report.count("swiglu") == 2
    assert report.count("rms_norm") + report.count("add_rms_norm") == 5
    for name, expected in eager.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inside", [False, True], ids=["ambient", "inside"])
def test_autocast(inside):
    model = build("Llama")
    inputs = batch()

    def step(model, **inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**inputs)

    eager = gradients(model, lambda **i: step(model, **i), inputs)
    with fx_fusion.recording() as report:
        if inside:
            compiled = torch.compile(lambda **i: step(model, **i), backend=rewriting_backend())
            ours = gradients(model, compiled, inputs)
        else:
            compiled = torch.compile(model, backend=rewriting_backend())
            ours = gradients(model, lambda **i: step(compiled, **i), inputs)
    assert report.count("linear_cross_entropy") == 1, str(report)
    assert report.count("causal_mask") == 2
    for name, expected in eager.items():
        assert ours[name].dtype == expected.dtype
        error = (ours[name].float() - expected.float()).norm() / (expected.float().norm() + 1e-6)
        assert error < 3e-2, (name, error)


def test_num_items_in_batch_and_gradient_accumulation():
    model = build("Llama")
    inputs = {**batch(), "num_items_in_batch": torch.tensor(17)}
    eager = gradients(model, model, inputs)
    with fx_fusion.recording() as report:
        ours = gradients(model, torch.compile(model, backend=rewriting_backend()), inputs)
    report.assert_fused(linear_cross_entropy=1)
    for name, expected in eager.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-6)


def test_one_training_run_through_inductor():
    """Three steps of AdamW through Inductor: the losses of eager."""
    inputs = batch()
    curves = []
    for wrap in (
        lambda m: m,
        lambda m: torch.compile(m, backend="fx_fusion", options={"select": "always", "strict": True}),
    ):
        model = build("Qwen3")
        run, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), 1e-3)
        curve = []
        for _ in range(3):
            loss = run(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-4, atol=1e-4)
