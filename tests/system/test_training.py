"""Test what real training adds to a forward and a backward, on several families: the same sites fire, the same numbers."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import slow_but
from tests.zoo import batch, build

FAMILIES = ("Llama", "Gemma2", "GPT2", "T5")


def on(device, inputs):
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def steps(model, call, device, around=contextlib.nullcontext, dtype=None, count=3):
    """Losses of some steps of SGD under autocast (``dtype``), with a GradScaler in float16."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16, init_scale=256.0)
    losses = []
    for i in range(count):
        with around():
            loss = call(**on(device, batch(seed=i))).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach().float().cpu())
    return torch.stack(losses)


@pytest.mark.parametrize("inside", [False, True], ids=["ambient", "inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", slow_but(("Llama",), FAMILIES))
def test_autocast(family, dtype, inside, device):
    """Ambient, and entered inside the compiled function as accelerate does; float16 with a GradScaler."""
    model = build(family).to(device)
    ours = copy.deepcopy(model)

    def around():
        return torch.autocast(device, dtype)

    def forward(**inputs):
        with around():
            return ours(**inputs)

    compiled = torch.compile(forward if inside else ours, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        found = steps(ours, compiled, device, contextlib.nullcontext if inside else around, dtype)
    expected = steps(model, model, device, around, dtype)
    exact = steps(*(2 * [build(family).to(device)]), device)
    allowed = 2 * (expected - exact).abs() + 2 * torch.finfo(dtype).eps * exact.abs()
    assert ((found - exact).abs() <= allowed).all(), (found, expected, exact)
    assert report.count("linear_cross_entropy") + report.count("cross_entropy") >= 1, str(report)
    assert not any(site.status == "declined" and "dtype" in site.reason for site in report.sites), str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_cast_behind_autocast_stay_deferred(dtype, device):
    """accelerate casts what a model returns to float32 outside of its autocast: still no logits in training."""
    model = build("Llama").to(device)
    inputs = on(device, batch())

    def forward(**inputs):
        with torch.autocast(device, dtype):
            out = model(**inputs)
        return out.loss.float(), out.logits.float()

    loss, logits = forward(**inputs)
    with fx_fusion.recording() as report:
        our_loss, our_logits = torch.compile(forward, backend=rewriting_backend())(**inputs)
    assert report.count("linear_cross_entropy") == 1, str(report)
    assert len(report.graphs[0].deferred) == 1
    assert our_logits.dtype == torch.float32
    torch.testing.assert_close(our_loss, loss, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(our_logits + 0, logits, rtol=3e-2, atol=3e-2)
    assert torch.equal((our_logits + 0).to(dtype).float(), our_logits + 0), "computed in 16 bits, as under autocast"


@pytest.mark.parametrize("family", slow_but(("Llama", "GPT2"), FAMILIES))
def test_compiling_in_place_and_layer_by_layer(family, device):
    """``module.compile()`` of every block: regional compilation, the same graph for all blocks."""
    model = build(family).to(device)
    eager = copy.deepcopy(model)
    expected = steps(eager, eager, device)
    blocks = [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "Block"))]
    assert len(blocks) >= 2
    with fx_fusion.recording() as report:
        for block in blocks:
            block.compile(backend=rewriting_backend())
        found = steps(model, model, device)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert any(site.status == "fused" for site in report.sites), str(report)


@pytest.mark.parametrize("family", slow_but(("Llama", "GPT2"), FAMILIES))
def test_frozen_weights_get_no_gradient(family, device):
    """A frozen base with a trained head: the same gradients as eager, and none where none is wanted."""
    model = build(family).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name or "DenseReluDense" in name)
    inputs = on(device, batch())

    def gradients(call):
        model.zero_grad()
        call(**inputs).loss.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    expected = gradients(model)
    with fx_fusion.recording() as report:
        found = gradients(torch.compile(model, backend=rewriting_backend()))
    assert report.count("linear_cross_entropy") + report.count("cross_entropy") == 1, str(report)
    assert {n for n, g in found.items() if g is not None} == {n for n, g in expected.items() if g is not None}
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", slow_but(("Llama",), ("Llama", "GPT2")))
def test_lora(family, device):
    peft = pytest.importorskip("peft")
    names = {"Llama": ["q_proj", "v_proj", "up_proj"], "GPT2": ["c_attn"]}[family]
    config = peft.LoraConfig(r=4, target_modules=names, lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(build(family), config).to(device).train()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        found = steps(model, compiled, device)
    torch.testing.assert_close(found, steps(eager, eager, device), rtol=1e-4, atol=1e-5)
    assert report.count("causal_mask") >= 2, str(report)
    assert report.count("linear_cross_entropy") + report.count("cross_entropy") == 1, str(report)


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
@pytest.mark.parametrize("family", slow_but(("GPT2",), FAMILIES))
def test_changing_lengths(family, dynamic, device):
    """As many graphs as with the same capture and no rewriting, and the same losses as eager."""
    model = build(family).to(device)

    def lengths(call):
        losses = []
        for length in (12, 9, 10, 7):
            inputs = {n: t[:, :length].contiguous() for n, t in on(device, batch()).items()}
            losses.append(call(**inputs).loss.detach())
        return torch.stack(losses)

    graphs = []

    def counting(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    lengths(torch.compile(model, backend=counting, dynamic=dynamic))
    torch._dynamo.reset()
    with fx_fusion.recording() as report:
        found = lengths(torch.compile(model, backend=rewriting_backend(), dynamic=dynamic))
    torch.testing.assert_close(found, lengths(model), rtol=1e-4, atol=1e-5)
    assert len(report.graphs) <= len(graphs)
    assert report.count("linear_cross_entropy") + report.count("cross_entropy") >= 1, str(report)


@pytest.mark.parametrize("family", slow_but(("Llama",), ("Llama", "Gemma2", "Qwen3")))
def test_generation_with_a_static_cache(family, device):
    model = build(family).to(device).eval()
    ids = on(device, batch())["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(ids, **options)
    model.forward = torch.compile(model.forward, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        assert torch.equal(model.generate(ids, **options), expected)
    assert report.count("rms_norm") + report.count("add_rms_norm") >= 5, str(report)


@pytest.mark.parametrize("family", slow_but(("GPT2",), ("Llama", "GPT2")))
def test_compiled_autograd(family, device):
    """As torch's tutorial has it: the function that calls ``backward`` is compiled, and the backward is one graph."""

    def trained(model, compiled):
        def step(**given):
            loss = model(**given).loss
            loss.backward()
            return loss.detach()

        call = torch.compile(step, backend=rewriting_backend()) if compiled else step
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
        for i in range(3):
            losses.append(call(**on(device, batch(seed=i))).clone())
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses)

    model = build(family).to(device)
    expected = trained(copy.deepcopy(model), compiled=False)
    counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True), fx_fusion.recording() as report, warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        found = trained(model, compiled=True)
    assert counters["compiled_autograd"]["captures"] == 1
    assert report.count("linear_cross_entropy") + report.count("cross_entropy") == 1, str(report)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", slow_but(("Llama",), FAMILIES))
def test_keys_and_values_that_leave_the_graph(family, device):
    """``use_cache=True`` in a forward: they are results of the graph, and have the values and layout of eager's."""
    model = build(family).to(device).eval()
    inputs = {**on(device, batch()), "use_cache": True}

    def cached(call):
        with torch.no_grad():
            out = call(**inputs)
        cache = out.past_key_values
        cache = getattr(cache, "self_attention_cache", cache)
        return [t for layer in cache.layers for t in (layer.keys, layer.values)]

    expected = cached(model)
    for found, wanted in zip(cached(torch.compile(model, backend=rewriting_backend())), expected, strict=True):
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted)
