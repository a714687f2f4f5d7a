"""Prints what a Llama saves whose launches are traced, as on a GPU with static sizes; no kernel runs.

Run in a process of its own without Triton's interpreter, whose kernels can't be traced.
"""

import json
import sys

import torch
import torch.nn.functional as F
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses.fake_tensor import FakeTensorMode

from fx_fusion.kernels import rope
from fx_fusion.kernels.float8 import glu, quantize, together, turn
from fx_fusion.kernels.norms import row_norm
from fx_fusion.memory import candidates
from fx_fusion.ops import library
from tests.helpers import tiny_llama
from tests.partitioned import partitioned

WRITTEN = {"y_ptr", "stats_ptr", "dx_ptr", "parts_ptr", "dw_ptr", "qo_ptr", "ko_ptr"}
OF_GATES = {"q_ptr", "scale_ptr", "qg_ptr", "gate_scale_ptr", "qu_ptr", "up_scale_ptr", "dgate_ptr", "dup_ptr", "y_ptr"}
OF_GATES |= {"largest_ptr", "bits_ptr"}


def writes(kernel_idx, constant_args_idx, kwargs, tma_descriptor_metadata):
    """Return what PyTorch finds out with Triton's compiler for a GPU."""
    names = WRITTEN | {"h_ptr"} if kwargs.get("HAS_RES") else WRITTEN
    of_gates = {"scale_ptr", "gate_scale_ptr", "dgate_ptr", "up_ptr", "largest_ptr", "bits_ptr"}
    names = OF_GATES if kwargs.keys() & of_gates and "stats_ptr" not in kwargs else names  # a norm's, which may quantize too
    for name in ("Y", "DGATE", "DUP"):
        names = names if kwargs.get(f"STORE_{name}", True) else names - {f"{name.lower()}_ptr"}
    return [n for n, value in kwargs.items() if n in names and isinstance(value, torch.Tensor)]


class Read(torch.nn.Module):
    """A norm in float32 and who reads it."""

    def __init__(self, readers):
        super().__init__()
        self.norm, self.readers = torch.nn.RMSNorm(64, eps=1e-6), readers
        self.weight = torch.nn.Parameter(torch.empty(64, 64, dtype=torch.bfloat16))

    def forward(self, x):
        return self.readers(self.norm(x), self.weight)


READERS = {
    "two products": lambda y, w: (y.bfloat16() @ w) * (y.bfloat16() @ w.t()),
    "one cast, returned": lambda y, w: y.bfloat16(),
    "two casts, returned": lambda y, w: (y.bfloat16(), y.bfloat16()),
    "a product, and a cast that is returned": lambda y, w: (y.bfloat16() @ w, y.bfloat16()),
    "parts of it, returned": lambda y, w: (y[:2].bfloat16(), y[1:].bfloat16()),
    "chunks": lambda y, w: [part.bfloat16() for part in y.chunk(2, -1)],
    "its bits": lambda y, w: (y.view(torch.int32), y.bfloat16()),
    "float32 too": lambda y, w: (y.bfloat16() @ w).float() + y,
}


def narrowed_by_reader():
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = {"x": torch.empty(4, 64)}
        found = {}
        for name, readers in READERS.items():
            model = Read(readers)
            found[name] = partitioned(model, batch, step=False, fusions=["rms_norm"]).decisions.narrowed
    print(json.dumps(found))


class Tied(torch.nn.Module):
    """A table whose rows are read, and which is the weight of another op."""

    def __init__(self, readers):
        super().__init__()
        self.table, self.other = (torch.nn.Parameter(torch.empty(256, 64)) for _ in range(2))
        self.readers = readers

    def forward(self, ids):
        return self.readers(ids, self.table, self.other).float().square().mean()


TABLES = {
    "a product": lambda ids, table, other: F.embedding(ids, table) @ table.t(),
    "another table's product": lambda ids, table, other: F.embedding(ids, table) @ other.t(),
    "a product and a sum": lambda ids, table, other: (F.embedding(ids, table) @ table.t()).sum() + table.square().sum(),
    "two lookups and a product": lambda ids, table, other: F.embedding(ids, table + 0) @ (F.embedding(ids, table).sum((0, 1)) + table).t(),
    "two lookups": lambda ids, table, other: F.embedding(ids, table) * F.embedding(ids + 1, table),
    "in other precision": lambda ids, table, other: F.embedding(ids, table).bfloat16() @ table.bfloat16().t(),
    "by parts": lambda ids, table, other: F.embedding(ids, table) @ table[:128].t(),
    "half of a table": lambda ids, table, other: F.embedding(ids, table) @ torch.cat([table, other]).t(),
    "transposed": lambda ids, table, other: F.embedding(ids, table).transpose(1, 2) @ F.embedding(ids, table) + table.t().sum(),
}


def added_by_reader():
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = {"ids": torch.zeros(2, 16, dtype=torch.long)}
        found = {}
        for name, readers in TABLES.items():
            found[name] = partitioned(Tied(readers), batch, step=False, fusions=["embedding"]).decisions.added
    print(json.dumps(found))


class Later(torch.autograd.Function):
    """A product of y that only the backward computes."""

    @staticmethod
    def forward(ctx, y, weight):
        ctx.save_for_backward(y, weight)
        return y.sin()

    @staticmethod
    def backward(ctx, gradient):
        y, weight = ctx.saved_tensors
        return gradient * F.linear(y, weight), None


def in_float8_later():
    """The launches of forward and backward where only the backward multiplies y in float8."""
    quantize.interpreting = lambda: True
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = {"x": torch.empty(64, 64, requires_grad=True)}
        of = partitioned(Read(Later.apply), batch, "speed", step=False, fusions=["rms_norm"], float8="rowwise_gw_hp")
    print(json.dumps(of.launched))


def in_float8(memory, fusions):
    """The launches of forward and backward in a Llama of one layer, by recipe; ``inference``: those without a gradient."""
    for module in (quantize, turn, glu, together):
        module.interpreting = lambda: True
    with torch.device("meta"):
        model = tiny_llama(num_hidden_layers=1).bfloat16()
    found = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        ids = torch.zeros(2, 16, dtype=torch.long)
        for recipe in ("rowwise_gw_hp", "rowwise"):
            batch = {"input_ids": ids, "labels": ids}
            with torch.set_grad_enabled(memory != "inference"):
                given = "speed" if memory == "inference" else memory
                of = partitioned(model, batch, given, step=False, fusions=fusions, float8=recipe)
            ops = sorted(name for name in of.backward if name in library.names())
            both = dict(zip(("forward", "backward"), of.launched, strict=False))
            found[recipe] = {**both, "ops": ops, "trouble": of.linears.trouble}
    print(json.dumps(found))


def main():
    triton_kernel_wrap.get_mutated_tensors = writes
    library._is_traceable = lambda tensor, symbolic: symbolic or all(isinstance(n, int) for n in tensor.shape)
    row_norm.multiprocessors = lambda tensor: 132
    rope.interpreting = lambda: True  # kernels, and not what they compute in torch
    candidates._SMALLEST = 1
    if sys.argv[1:] == ["tables"]:
        added_by_reader()
        return
    if sys.argv[1:] == ["readers"]:
        narrowed_by_reader()
        return
    if sys.argv[1:] == ["float8", "later"]:
        in_float8_later()
        return
    if sys.argv[1:2] == ["float8"]:
        in_float8(sys.argv[2], sys.argv[3:])
        return
    with torch.device("meta"):
        model = tiny_llama()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        ids = torch.zeros(2, 16, dtype=torch.long)
        only = ["rms_norm", "add_rms_norm", "rope", "linear_cross_entropy"]
        dynamic, autocast = (how in sys.argv[1:] for how in ("dynamic", "autocast"))

        def step(memory, **options):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return partitioned(model, {"input_ids": ids, "labels": ids}, memory, step=False, dynamic=dynamic, **options)

        found = {memory: step(memory, fusions=only) for memory in ("speed", "min")}
        guards = found["min"].guards - step("min", select="never").guards
        of_sizes = sorted(guard for guard in guards if not guard.startswith("Eq(zf"))  # eps is to be a constant
    launches = {memory: of.backward["triton_kernel_wrapper_functional"] for memory, of in found.items()}
    kinds = found["min"].again()
    again = {kind: kinds[kind] for kind in ("norm of a sum", "norm", "mul")}
    sizes = {memory: of.bytes for memory, of in found.items()}
    ops = sorted(name for name in found["min"].backward if name in library.names())
    narrowed = found["min"].decisions.narrowed
    of_norms = {"again": again, "handed_out": found["min"].handed_out, "ops": ops}
    print(json.dumps({**of_norms, "launches": launches, "bytes": sizes, "guards": of_sizes, "narrowed": narrowed}))


if __name__ == "__main__":
    main()
