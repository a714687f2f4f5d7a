"""Test what every op promises to torch.library: its schema, its gradient, and what the fake says of its results."""

import sys

import pytest
import torch
import torch.distributed as dist

from fx_fusion.checking import calls_of, keeps_its_promises
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.kernels.float8.glu import quantize_glu, quantize_glu_bwd
from fx_fusion.kernels.float8.quantize import quantize_columns, quantize_rows
from fx_fusion.kernels.float8.together import quantize_columns_together, quantize_rows_together
from fx_fusion.kernels.float8.turn import turn_rows
from fx_fusion.kernels.lib.block_lists import block_lists
from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.logits.scaled import scaled
from fx_fusion.kernels.moe_down import moe_down, moe_down_bwd, moe_up, moe_up_bwd
from fx_fusion.kernels.rms_norm_rope import rms_norm_rope
from fx_fusion.kernels.token_log_probs import token_log_probs_of_part, token_log_probs_of_part_bwd
from fx_fusion.ops import library
from fx_fusion.ops.layouts import any_layout, channels_last, copied, in_memory
from fx_fusion.ops.on_cpu import interpreting, kernels_on_cpu

pytestmark = pytest.mark.kernel

# tests/system/test_frontend_fla.py
OF_LIBRARIES = {f"{name}{bwd}" for name in ("fla_gated_delta_rule", "fla_kda") for bwd in ("", "_bwd")}
OPS = set(library.names()) - OF_LIBRARIES
WITH_OPS = [f for f in all_fusions() if f.name in OPS]


def _rows(count):
    return [torch.randn(48, 33, dtype=torch.bfloat16) for _ in range(count)]


def _numbers(count):
    return [torch.rand(1) + 1 for _ in range(count)]


def _heads():
    """x (b, h, s, d), weight, cos and sin."""
    return torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)


def _rows_of(columns):
    return [torch.randn(48, columns, dtype=torch.bfloat16)]


def _experts(gate=False):
    """Rows or halves of a gate and its scale, weights of three experts, and the ends of their rows."""
    given = (*_rows_of(32), torch.rand(48, 1)) if gate else _rows_of(16)
    ends = torch.tensor([5, 5, 48], dtype=torch.int32)
    return *given, torch.randn(3, 16, 24, dtype=torch.bfloat16), ends


REST = {  # ops that are no fusion's
    "channels_last": lambda: (channels_last, (torch.randn(2, 3, 4, 5),)),
    "any_layout": lambda: (any_layout, (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    "quantize_columns": lambda: (quantize_columns, (torch.randn(48, 33, dtype=torch.bfloat16),)),
    "quantize_rows": lambda: (quantize_rows, (torch.randn(48, 33, dtype=torch.bfloat16),)),
    "quantize_glu": lambda: (quantize_glu, (*_rows(2), "silu", True, True)),
    "quantize_glu_bwd": lambda: (quantize_glu_bwd, (*_rows(3), "gelu_tanh", False, [True, False, True])),
    "quantize_rows_together": lambda: (quantize_rows_together, (*_rows(2), None, True)),
    "quantize_columns_together": lambda: (quantize_columns_together, (*_rows(2), None, *_numbers(2), None)),
    "turn_rows": lambda: (turn_rows, (torch.randn(48, 33, dtype=torch.bfloat16), torch.rand(48, 1) + 0.1)),
    "rms_norm_rope": lambda: (rms_norm_rope.overload, (*_heads(), 1e-6, 0.0, False, False, "rotate_half", "input", False)),
    "rms_norm_rope_bwd": lambda: (
        rms_norm_rope.backward,
        (torch.randn(2, 3, 5, 8), *_heads(), torch.rand(2, 5, 3), 1e-6, 0.0, False, False, "rotate_half", "input", False, [True, True]),
    ),
    "scaled": lambda: (scaled, (torch.randn(48, 33, dtype=torch.bfloat16), torch.tensor(0.5))),
    "block_lists": lambda: (block_lists, (torch.rand(2, 1, 3, 5) < 0.5, torch.rand(1, 1, 3, 5) < 0.5)),
    "moe_up": lambda: (moe_up, _experts()),
    "moe_up_bwd": lambda: (moe_up_bwd, (*_rows_of(24), *_experts(), True)),
    "moe_down": lambda: (moe_down, (*_experts(gate=True), False, 0.0, 1.0, 0.0)),
    "moe_down_bwd": lambda: (moe_down_bwd, (*_rows_of(24), *_experts(gate=True), False, True, 2.0, 1.702, 1.0)),
    "in_memory": lambda: (in_memory, (torch.randn(3, 4).mT,)),
    "copied": lambda: (copied, (torch.randn(3, 4).mT,)),
}


def test_every_op_is_checked_here():
    of_fusions = {name for f in WITH_OPS for name in (f.name, f"{f.name}_bwd")}
    elsewhere = {"linear_cross_entropy_rows_bwd", "token_log_probs_of_part", "token_log_probs_of_part_bwd"}  # below
    assert OPS - of_fusions == {*REST, *elsewhere}, "an op that no fusion is named as goes into REST"


@pytest.mark.parametrize("by_kernels", [True, False], ids=["kernels", "reference"])  # ``kernels`` is a fixture
@pytest.mark.parametrize("fusion", WITH_OPS, ids=lambda fusion: fusion.name)
def test_ops_of_a_fusion(fusion, by_kernels, device):
    """The forward and the backward of every variant, each way of calling them once; by what a CPU runs, too."""
    if device != "cpu" and not by_kernels:
        pytest.skip("on a GPU kernels run")
    rows = {"m": 3} if "m" in fusion.dims else {}
    seen = {}
    for variant in range(len(fusion.variants)):
        for op, args in calls_of(fusion, variant, device, **rows):
            how = tuple((a.shape, a.dtype, a.stride()) if isinstance(a, torch.Tensor) else repr(a) for a in args)
            seen.setdefault((op, how), args)
    expected = {name for name in (fusion.name, f"{fusion.name}_bwd") if name in OPS}
    assert {op._opname for op, _ in seen} >= expected
    with kernels_on_cpu(by_kernels and interpreting()):
        for (op, _), args in seen.items():
            keeps_its_promises(op, args)


@pytest.mark.parametrize("by_kernels", [True, False], ids=["kernels", "reference"])  # ``kernels`` is a fixture
@pytest.mark.parametrize("name", REST)
def test_ops_of_no_fusion(name, by_kernels, device):
    """The reference is what a CPU runs, the kernels what CI checks in Triton's interpreter."""
    if device != "cpu" and by_kernels:
        pytest.skip("the tensors are on a CPU, where no kernel runs beside a GPU")
    with kernels_on_cpu(by_kernels and interpreting()):
        keeps_its_promises(*REST[name]())


def test_the_backward_of_a_loss_a_row():
    """Is called where no gradient of the head is kept, behind ``reduction="none"``."""
    fusion = next(f for f in all_fusions() if f.name == "linear_cross_entropy")
    variant = next(i for i, v in enumerate(fusion.variants) if v.get("reduction") == "none")
    calls = calls_of(fusion, variant, "cpu", m=3)
    assert "linear_cross_entropy_rows_bwd" in {op._opname for op, _ in calls}


@pytest.fixture
def group():
    """The name of a group of this process alone."""
    if not dist.is_gloo_available():
        pytest.skip("no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_ops_of_a_part_of_the_classes(group):
    x, head, bias = (torch.randn(*shape) for shape in ((3, 8), (5, 8), (5,)))
    target, part = torch.tensor([0, 4, 2]), (group, 0, 5, 1)
    keeps_its_promises(token_log_probs_of_part, (x, head, bias, target, 5.0, 0.5, *part))
    dlogp, dentropy = torch.randn(2, 3)
    for needs in ([True, True, True], [False, True, False]):
        keeps_its_promises(token_log_probs_of_part_bwd, (dlogp, dentropy, x, head, bias, target, 0.0, 1.0, *part, needs))
    options = (-100, 0.1, 0.0, 1.0, [True, True, False], False, False)
    keeps_its_promises(linear_cross_entropy, (x, head, None, target, None, "mean", *options, *part))


@pytest.mark.parametrize("fusion", WITH_OPS, ids=lambda fusion: fusion.name)
def test_an_input_is_one_argument(fusion, device, monkeypatch):
    """What stands for a tensor that is not there is no input: Inductor would store it once more (``ops.launch``)."""
    seen = []
    for module in [m for name, m in sys.modules.items() if name.startswith("fx_fusion.kernels.") and hasattr(m, "launch")]:
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *args, **_: seen.append((kernel, args)))
    rows = {"m": 3} if "m" in fusion.dims else {}
    for variant in range(len(fusion.variants)):
        for op, args in calls_of(fusion, variant, device, **rows):
            seen.clear()
            op(*args)
            inputs = {t.data_ptr() for t in args if isinstance(t, torch.Tensor) and t.numel()}
            for kernel, given in seen:
                of_inputs = [p for t in given if isinstance(t, torch.Tensor) and (p := t.data_ptr()) in inputs]
                assert len(of_inputs) == len(set(of_inputs)), kernel
