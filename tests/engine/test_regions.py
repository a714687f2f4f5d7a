"""Regions that users mark (``nested_compile_region``), or that Dynamo finds: their bodies are read, and train as in eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import tiny_llama, tokens

N = 16


def pre_norm(h, r, w):
    """The first half of a layer: the residual that it returns is saved for its own backward, too."""
    r = r + h @ w
    return r.cos(), r


def saves_a_view(h, r, w):
    r = (r + h @ w).view(-1, 2, N // 2)
    return r.cos().reshape(h.shape), r.reshape(h.shape)


def drops(h, r, w):
    return F.dropout(h @ w, 0.5) + r, r * 2


def run(layer, h, weights):
    r = h.sin()
    for w, v in zip(weights[::2], weights[1::2], strict=True):
        h, r = layer(h, r, w)
        h = h @ v  # takes memory of the graph around the region
    return (h + r).sum()


@pytest.mark.parametrize("layer", [pre_norm, saves_a_view])
def test_gradients_of_marked_regions(layer):
    """Inductor alone takes what a region returns twice for two tensors, and writes to one while it reads the other."""
    marked = torch.compiler.nested_compile_region(layer)
    weights = [(torch.randn(N, N, generator=torch.Generator().manual_seed(i)) / 8).requires_grad_() for i in range(8)]
    h = torch.randn(8, N, generator=torch.Generator().manual_seed(9)).requires_grad_()
    compiled = torch.compile(lambda h, *weights: run(marked, h, weights), backend="fx_fusion", options={"strict": True})
    found, expected = (torch.autograd.grad(loss, [h, *weights]) for loss in (compiled(h, *weights), run(layer, h, weights)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dropout_in_a_marked_region_differs_between_its_calls():
    marked = torch.compiler.nested_compile_region(drops)
    compiled = torch.compile(lambda h, w: [h := marked(h, h, w)[0] for _ in range(3)], backend="fx_fusion")
    h, w = torch.ones(64, N), torch.eye(N)
    first, second, _ = compiled(h, w)
    zeros = [(layer == below).float() for layer, below in ((first, h), (second, first))]
    assert not torch.equal(*zeros)
    assert all(0.3 < z.mean() < 0.7 for z in zeros)


@pytest.fixture(params=["marked", "found"])
def regions(request, monkeypatch):
    """Layers of a Llama as regions."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if request.param == "marked":
        monkeypatch.setattr(LlamaDecoderLayer, "forward", torch.compiler.nested_compile_region(LlamaDecoderLayer.forward))
        yield
    else:
        with torch._dynamo.config.patch(use_graph_deduplication=True):
            yield


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bodies_of_regions_are_rewritten_with_what_their_calls_hand_in(regions, padded):
    """A mask that is made outside is proved inside, where all calls hand in the same one."""
    model, ids = tiny_llama(num_hidden_layers=2), tokens()
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 5:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def gradients(call):
        model.zero_grad()
        call(**given).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    with fx_fusion.recording() as report:
        found = gradients(torch.compile(model, backend="fx_fusion", options={"select": "always", "strict": True}))
    torch.testing.assert_close(found, gradients(model), rtol=1e-4, atol=1e-6)
    assert len(report.graphs) == 1, str(report)
    fused = {site.fusion for site in report.sites if site.status == "fused"}
    assert {"add_rms_norm", "rope", "swiglu", "linear_cross_entropy"} <= fused, str(report)
    assert padded or "causal_mask" in fused, str(report)


def test_a_mask_that_is_another_one_in_each_call_is_not_proved():
    @torch.compiler.nested_compile_region
    def layer(x, mask):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def function(x):
        causal = torch.ones(8, 8, dtype=torch.bool).tril()
        return layer(layer(x, causal), causal.logical_not() | causal.T)

    x = torch.randn(2, 2, 8, N)
    with fx_fusion.recording() as report:
        torch.testing.assert_close(torch.compile(function, backend=rewriting_backend())(x), function(x))
    assert not report.count("causal_mask"), str(report)


def test_a_body_in_two_autocast_regions_is_left():
    """Leave a body whose ops compute in another dtype at each call."""
    norm = nn.RMSNorm(N)

    @torch.compiler.nested_compile_region
    def layer(x, w):
        return norm(x) @ w

    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            low = layer(x, w)
        return low.float() + layer(x, w)

    x, w = torch.randn(4, N), torch.randn(N, N)
    torch.testing.assert_close(torch.compile(function, backend=rewriting_backend())(x, w), function(x, w))
