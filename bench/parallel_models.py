"""The modes of ``bench.distributed``: from options of torch.compile to a model over several GPUs, and what is called."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and its batches."""

    device: str = "cuda"
    vocabulary: int = 128256
    hidden: int = 2048
    layers: int = 8
    heads: int = 32
    batch: int = 4
    length: int = 2048
    steps: int = 50

    @property
    def dtype(self) -> Any:
        import torch

        return torch.bfloat16 if self.device == "cuda" else torch.float32


FULL, TINY = Sizes(), Sizes("cpu", 5000, 64, 2, 8, 2, 64, 6)


Model = tuple[Any, Any]  # the module with the parameters, what is called


def llama(sizes: Sizes) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads // 4 or 1,
        head_dim=sizes.hidden // sizes.heads, max_position_embeddings=8192, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device(sizes.device):
        return LlamaForCausalLM(config).to(sizes.dtype).train()


def ddp(compiled: dict[str, Any], sizes: Sizes) -> Model:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ids = [torch.cuda.current_device()] if sizes.device == "cuda" else None
    model = llama(sizes)
    return model, torch.compile(DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True), **compiled)


def _sharded(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh)
    return model


def _mesh(sizes: Sizes, *names: tuple[str, int]) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shape = names or (("all", dist.get_world_size()),)
    return init_device_mesh(sizes.device, tuple(n for _, n in shape), mesh_dim_names=tuple(name for name, _ in shape))


def fsdp2(compiled: dict[str, Any], sizes: Sizes) -> Model:
    """A unit a layer, the whole compiled."""
    import torch

    model = _sharded(llama(sizes), _mesh(sizes))
    return model, torch.compile(model, **compiled)


def fsdp2_embedding(compiled: dict[str, Any], sizes: Sizes) -> Model:
    """The same, and embed_tokens compiled too: Dynamo leaves calls of torch's own layers in eager."""
    import torch

    model, call = fsdp2(compiled, sizes)
    model.model.embed_tokens.forward = torch.compile(model.model.embed_tokens.forward, **compiled)
    return model, call


def fsdp2_layers(compiled: dict[str, Any], sizes: Sizes) -> Model:
    """Layers compiled one by one, before they are sharded."""
    model = llama(sizes)
    for layer in model.model.layers:
        layer.compile(**compiled)
    return (_sharded(model, _mesh(sizes)),) * 2


def fsdp2_layers_and_head(compiled: dict[str, Any], sizes: Sizes) -> Model:
    """The same, and lm_head compiled alone: the loss stays in eager."""
    import torch

    model, call = fsdp2_layers(compiled, sizes)
    model.lm_head.forward = torch.compile(model.lm_head.forward, **compiled)
    return model, call


def _in_parallel(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"self_attn.{n}_proj": columns for n in "qkv"} | {"self_attn.o_proj": rows, "mlp.down_proj": rows}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**plan, "mlp.gate_proj": columns, "mlp.up_proj": columns})
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def tensor_parallel(compiled: dict[str, Any], sizes: Sizes) -> Model:
    """Heads, gates and classes on all GPUs; logits gathered, as transformers' plans ask for."""
    import torch

    model = _in_parallel(llama(sizes), _mesh(sizes))
    return model, torch.compile(model, **compiled)


def fsdp2_tensor_parallel(compiled: dict[str, Any], sizes: Sizes) -> Model:
    """Two GPUs a tensor-parallel group, the groups sharded: four GPUs at least."""
    import torch
    import torch.distributed as dist

    mesh = _mesh(sizes, ("data", dist.get_world_size() // 2), ("tensor", 2))
    model = _sharded(_in_parallel(llama(sizes), mesh["tensor"]), mesh["data"])
    return model, torch.compile(model, **compiled)


def experts(compiled: dict[str, Any], sizes: Sizes) -> Model:
    """Qwen3-MoE under transformers' own plan (``tp_plan="auto"``), which lays a part of each expert on every GPU."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = os.path.join(tempfile.gettempdir(), f"experts_{os.environ['MASTER_PORT']}")
    if dist.get_rank() == 0 and not os.path.exists(folder):  # a plan is applied where a model is loaded
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        config = Qwen3MoeConfig(
            vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, moe_intermediate_size=sizes.hidden * 3 // 8,
            num_hidden_layers=max(sizes.layers // 2, 2), num_attention_heads=sizes.heads, num_experts=32,
            num_key_value_heads=sizes.heads // 4 or 1, head_dim=sizes.hidden // sizes.heads, num_experts_per_tok=4,
            use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device(sizes.device):
            Qwen3MoeForCausalLM(config).to(sizes.dtype).save_pretrained(folder)
    dist.barrier()
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=sizes.dtype, tp_plan="auto").train()
    return model, torch.compile(model, **compiled)


MODES = {
    "ddp": ddp, "fsdp2": fsdp2, "fsdp2-embedding": fsdp2_embedding, "fsdp2-layers": fsdp2_layers,
    "fsdp2-layers-head": fsdp2_layers_and_head, "tensor-parallel": tensor_parallel, "experts": experts,
    "fsdp2-tensor-parallel": fsdp2_tensor_parallel,
}  # fmt: skip
SAME_BATCH = {"tensor-parallel", "experts"}  # on every rank
