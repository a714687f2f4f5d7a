"""Float8 on a GPU that has it: norms that quantize, and products that are one for several linears."""

import copy

import pytest
import torch

from fx_fusion.float8 import norms, rewrite
from fx_fusion.inductor import compile as inductor_of_ours
from tests.helpers import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs float8 products"
    ),
]


def gradients(call, model, ids):
    model.zero_grad()
    call(input_ids=ids, labels=ids).loss.backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def in_float8(model, ids, recipe, memory):
    torch._dynamo.reset()
    options = {"select": "always", "strict": True, "memory": memory, "float8": recipe}
    with torch._inductor.config.patch(force_disable_caches=True):
        return gradients(torch.compile(model, backend="fx_fusion", options=options), model, ids)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("memory", ["speed", "min"])
@pytest.mark.parametrize("recipe", ["rowwise_gw_hp", "rowwise"])
def test_a_llama(monkeypatch, recipe, memory, checkpointed):
    """Gradients are as close to float64's as where kernels behind the norms quantize, and each linear has its own products."""
    torch.manual_seed(0)
    model = tiny_llama(
        torch.bfloat16, vocab_size=4096, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048,
    ).cuda()  # fmt: skip
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, 4096, (4, 512), device="cuda")
    counts = []

    def counted(graph):
        counts.append(norms.quantize_in_norms(graph))
        return counts[-1]

    exact = gradients(in_float64 := copy.deepcopy(model).double(), in_float64, ids)
    with monkeypatch.context() as patched:
        patched.setattr(inductor_of_ours, "quantize_in_norms", counted)
        found = in_float8(model, ids, recipe, memory)
    assert counts[0] >= 7, "of each layer y twice and dx, but the first, and the last norm's dx"
    with monkeypatch.context() as patched:
        patched.setattr(inductor_of_ours, "quantize_in_norms", lambda graph: 0)
        behind = in_float8(model, ids, recipe, memory)
        patched.setattr(rewrite, "sums", lambda *given: ())
        apart = in_float8(model, ids, recipe, memory)
    for name, right in exact.items():
        assert (found[name] - right).norm() < 0.16 * right.norm(), name
    error, *others = (sum((of[name] - right).square().sum() for name, right in exact.items()) for of in (found, behind, apart))
    assert error < 1.1**2 * min(others), (error, others)
