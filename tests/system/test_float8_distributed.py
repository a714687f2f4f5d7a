"""Linears in float8 under DDP, FSDP2 and tensor parallelism, on two CPU processes (emulated there): which products, and the
gradients beside those of bfloat16 in the same set-up."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers import tiny_llama, tokens
from tests.ranks import on_ranks, whole

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def ddp(model, compiled):
    from torch.nn.parallel import DistributedDataParallel

    dist._DEFAULT_FIRST_BUCKET_BYTES = 20_000
    return torch.compile(DistributedDataParallel(model.bfloat16(), bucket_cap_mb=0.025), **compiled)


def fsdp2(model, compiled):
    """Weights in float32, gathered in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    return torch.compile(model, **compiled)


def tensor_parallel(model, compiled):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rows = ("o_proj", "down_proj")
    for layer in model.bfloat16().model.layers:
        names = {n: m for n, m in layer.named_modules() if n.endswith(LINEARS)}
        plan = {n: RowwiseParallel() if n.endswith(rows) else ColwiseParallel() for n in names}
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    return torch.compile(model, **compiled)


SETUPS = {"ddp": ddp, "fsdp2": fsdp2, "tensor_parallel": tensor_parallel}


def worker(rank, setup):
    """Of each weight in how many decibels its gradient is bfloat16's; what the report says; the losses."""
    import fx_fusion

    found, losses, said = [], [], []
    for recipe in ("off", "rowwise"):
        torch._dynamo.reset()
        model = tiny_llama(num_hidden_layers=1)
        options = {"select": "always", "strict": True, "float8": recipe}
        call = SETUPS[setup](model, {"backend": "fx_fusion", "options": options})
        ids = tokens(4)[0 if setup == "tensor_parallel" else rank][None]
        with fx_fusion.recording() as report:
            out = call(input_ids=ids, labels=ids)
            out.loss.backward()
        said = [sentence for graph in report.graphs for sentence in graph.linears.sentences()]
        losses.append(out.loss.item())
        found.append({n: whole(p.grad).double() for n, p in model.named_parameters()})
    before, after = found
    apart = {n: 20 * torch.log10(g.norm() / (g - after[n]).norm().clamp(min=1e-30)).item() for n, g in before.items()}
    return apart, losses, said


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_all_three_products(setup):
    for apart, losses, said in on_ranks(worker, setup).values():
        text = "\n".join(said)
        for several in ("forward of", "gradients of inputs of", "gradients of weights of"):
            listed = " ".join(part for part in text.replace(";", "\n").splitlines() if several in part)
            assert all(f"1 x {name}" in listed for name in LINEARS), text
        assert losses[1] == pytest.approx(losses[0], rel=2e-3)
        assert all(decibels >= 18 for decibels in apart.values()), sorted(apart.items(), key=lambda item: item[1])[:3]


class Classes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 320, bias=False)

    def forward(self, x):
        return self.head(x + torch.tanh(self.body(x)))


def classes_on_two_ranks(rank):
    """Return what the report says of a vocabulary of which each rank has a half, fewer than are taken for one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import fx_fusion
    from fx_fusion.float8 import choice, products

    products.VOCABULARY = choice.VOCABULARY = 256
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(Classes().bfloat16(), init_device_mesh("cpu", (2,)), plan)
    options = {"select": "always", "strict": True, "float8": "rowwise"}
    with fx_fusion.recording() as report:
        torch.compile(model, backend="fx_fusion", options=options)(torch.randn(64, 64).bfloat16()).float().sum().backward()
    return [sentence for graph in report.graphs for sentence in graph.linears.sentences()]


@pytest.mark.slow
def test_a_vocabulary_in_parts_stays_in_bfloat16():
    for said in on_ranks(classes_on_two_ranks).values():
        assert "forward of 1 x body" in said[0]
        assert "x head" not in said[0], said
        assert any("forward of 1 x head: 160 outputs of this rank are taken for a vocabulary's" in s for s in said), said
