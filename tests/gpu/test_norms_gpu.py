"""Norms and RoPE whose launches Inductor sees, on a GPU: of symbolic lengths, and under autocast."""

import pytest
import torch
from torch import nn

import fx_fusion
from fx_fusion.inductor import compile as inductor_of_ours
from tests.helpers import tiny_llama

pytestmark = pytest.mark.gpu


def llama():
    return tiny_llama(
        torch.bfloat16, vocab_size=4096, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048,
    ).cuda()  # fmt: skip


def gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.double() for n, p in model.named_parameters()}


@pytest.mark.parametrize("memory", ["speed", "min"])
def test_another_length_every_step(memory):
    """As a collator that pads to the longest row of a batch: one graph for all lengths, and our kernels are in it."""
    torch._dynamo.reset()
    model = llama()
    call = torch.compile(model, backend="fx_fusion", options={"select": "always", "strict": True, "memory": memory})
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for batch, length in ((4, 512), (4, 400), (4, 1024), (4, 77), (4, 1999), (4, 16)):
        ids = torch.randint(0, 4096, (batch, length), generator=generator).cuda()
        with fx_fusion.recording() as report, torch._inductor.config.patch(force_disable_caches=True):
            found = gradients(call, ids)
        graphs.append(len(report.graphs))
        if len(graphs) == 2:
            assert (report.count("rope"), report.count("add_rms_norm")) == (2, 4), str(report)
        usual = gradients(model, ids)
        exact = gradients(model.double(), ids)
        model.bfloat16()
        for name, g in exact.items():
            name_of_ours = next(n for n in found if n.endswith(name))
            errors = [(other - g).norm() / g.norm() for other in (found[name_of_ours], usual[name])]
            assert errors[0] <= 1.5 * errors[1] + 1e-3, (length, name, errors)
    assert graphs == [1, 1, 0, 0, 0, 0], "compiled once for the first length, once for all others"


class Blocks(nn.Module):
    """What of a model stands around attention; deterministic without it."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(1024) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(1024, 512, bias=False) for _ in range(8))
        self.downs = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(4))

    def forward(self, x):
        for i, (norm, down) in enumerate(zip(self.norms, self.downs, strict=True)):
            y = norm(x)
            x = x + down(torch.tanh(self.ups[2 * i](y)) * self.ups[2 * i + 1](y)).to(x.dtype)
        return x


@pytest.mark.parametrize("memory", ["speed", "min"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_stores_what_is_read(dtype, memory, monkeypatch):
    """As accurate as norms that store float32, with two readers each."""
    torch.manual_seed(0)
    model, x = Blocks().cuda(), torch.randn(4096, 1024, device="cuda", requires_grad=True)
    upstream = torch.randn(4096, 1024, device="cuda")
    results = []
    for narrow in (True, False):
        torch._dynamo.reset()
        if not narrow:
            monkeypatch.setattr(inductor_of_ours, "narrow_norms", lambda graph: 0)
        call = torch.compile(model, backend="fx_fusion", options={"select": "always", "strict": True, "memory": memory})
        with fx_fusion.recording() as report, torch._inductor.config.patch(force_disable_caches=True):
            with torch.autocast("cuda", dtype):
                out = call(x)
            out.backward(upstream)
        assert ("stored in 16 bits, as all that reads them casts them: 4 x norm" in str(report)) == narrow, str(report)
        results.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
        x.grad = None
    exact = model.double()(wide := x.detach().double().requires_grad_())
    exact.backward(upstream.double())
    oracle = [exact.detach(), wide.grad, *(p.grad for p in model.parameters())]
    for narrowed, stored, value in zip(*results, oracle, strict=True):
        errors = [(found.double() - value).norm() / value.norm() for found in (narrowed, stored)]
        assert errors[0] <= 1.02 * errors[1], errors
