"""Test what the backward computes again, on a GPU: traced launches, less memory, the same gradients."""

import copy

import pytest
import torch

import fx_fusion
from fx_fusion.inductor import compile as inductor_of_ours
from tests.helpers import tiny_llama

pytestmark = pytest.mark.gpu


def step(model, memory):
    torch._dynamo.reset()
    model.zero_grad()
    ids = torch.randint(0, 4096, (4, 1024), generator=torch.Generator().manual_seed(0)).cuda()
    call = torch.compile(model, backend="fx_fusion", options={"memory": memory, "strict": True, "fusions": ["-swiglu"]})
    with fx_fusion.recording() as report, torch._inductor.config.patch(force_disable_caches=True):
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            call(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.cpu() for n, p in model.named_parameters()}, torch.cuda.max_memory_allocated(), report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_less_memory_and_the_same_gradients(dtype):
    model = tiny_llama(
        dtype, vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=1024,
    ).cuda()  # fmt: skip
    before, most, _ = step(model, "speed")
    after, less, report = step(model, "min")
    kinds = [value.kind for value in report.graphs[0].memory.values if value.again]
    assert kinds.count("norm of a sum") == 16, str(report)
    assert kinds.count("norm") == 1, str(report)
    assert sum("mul" in kind for kind in kinds) >= 8, str(report)
    tokens = 4 * 1024 * dtype.itemsize
    saved = tokens * 8 * (4096 + 2 * 1024)  # a gate and two norms a layer; at the peak one layer has them again
    assert most - less >= 0.7 * saved, (most, less)
    for name, gradient in before.items():  # attention adds up its own in any order
        difference = (after[name].float() - gradient.float()).norm() / gradient.float().norm()
        assert difference < (1e-2 if dtype == torch.bfloat16 else 1e-4), (name, difference)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_tied_table_has_one_gradient_in_memory(monkeypatch, dtype, autocast):
    """As close to float64's as where the embedding has one of its own."""
    model = tiny_llama(
        dtype, vocab_size=32768, hidden_size=256, num_attention_heads=4, max_position_embeddings=512, tie_word_embeddings=True
    ).cuda()
    ids = torch.randint(0, 1000, (2, 512), device="cuda")
    ids[0] = 5

    def gradient(call, of):
        of.zero_grad()
        call(input_ids=ids, labels=ids).loss.backward()
        return of.model.embed_tokens.weight.grad.double()

    def compiled():
        torch._dynamo.reset()
        call = torch.compile(model, backend="fx_fusion", options={"select": "always", "strict": True})
        with torch._inductor.config.patch(force_disable_caches=True), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return gradient(call, model)

    added = []
    own = inductor_of_ours.add_embeddings_to_others
    monkeypatch.setattr(inductor_of_ours, "add_embeddings_to_others", lambda graph: added.append(own(graph)) or added[-1])
    found = compiled()
    assert added == [1]
    monkeypatch.setattr(inductor_of_ours, "add_embeddings_to_others", lambda graph: 0)
    apart = compiled()
    exact = gradient(in_float64 := copy.deepcopy(model).double(), in_float64)
    error, other = ((of - exact).norm() / exact.norm() for of in (found, apart))
    assert error <= 1.02 * other, (error, other)
    assert torch.equal(found[2000:], apart[2000:]), "rows of tokens that do not occur"


class Biased(torch.nn.Module):
    """Attention with a learned bias whose heads lie last in memory, as T5's in transformers 5.17."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv = torch.nn.Parameter(torch.randn(128, 128, 4)), torch.nn.Linear(256, 768)
        self.out = torch.nn.Linear(256, 256)

    def forward(self, x, shown):
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        bias = torch.where(shown[:, None, None], self.table.permute(2, 0, 1), -1e4)
        h = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(h.transpose(1, 2).flatten(2)).float().square().mean()


@pytest.mark.parametrize("memory", ["speed", "min"])
def test_a_bias_with_the_heads_last(memory):
    """Computed again in the backward its rows would not be dense, and attention's kernel would refuse it."""
    torch.manual_seed(0)
    model, x = Biased().cuda().bfloat16(), torch.randn(8, 128, 256, device="cuda", dtype=torch.bfloat16)
    shown = torch.rand(8, 128, device="cuda") < 0.9
    model(x, shown).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend="fx_fusion", options={"memory": memory, "strict": True})(x, shown).backward()
    for name, p in model.named_parameters():
        assert (p.grad - expected[name]).norm() <= 0.02 * expected[name].norm(), name
