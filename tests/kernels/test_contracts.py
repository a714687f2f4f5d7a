"""What every op promises to torch.library: its schema, its gradient, and what the fake says of its results."""

import pytest
import torch

from fx_fusion.checking import calls_of, keeps_its_promises
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.kernels.float8.quantise import quantise_columns, quantise_rows
from fx_fusion.ops import library
from fx_fusion.ops.layouts import any_layout, channels_last, copied

pytestmark = pytest.mark.kernel

OPS = set(library.names())
WITH_OPS = [f for f in all_fusions() if f.name in OPS]
REST = {  # ops that are no fusion's
    "channels_last": lambda: (channels_last, (torch.randn(2, 3, 4, 5),)),
    "any_layout": lambda: (any_layout, (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    "quantise_columns": lambda: (quantise_columns, (torch.randn(48, 33, dtype=torch.bfloat16),)),
    "quantise_rows": lambda: (quantise_rows, (torch.randn(48, 33, dtype=torch.bfloat16),)),
    "copied": lambda: (copied, (torch.randn(3, 4).mT,)),
}


def test_every_op_is_checked_here():
    of_fusions = {name for f in WITH_OPS for name in (f.name, f"{f.name}_bwd")}
    assert OPS - of_fusions == {*REST, "linear_cross_entropy_rows_bwd"}, "an op that no fusion is named as goes into REST"


@pytest.mark.parametrize("fusion", WITH_OPS, ids=lambda fusion: fusion.name)
def test_ops_of_a_fusion(fusion, device):
    """The forward and the backward of every variant, each way of calling them once."""
    rows = {"m": 3} if "m" in fusion.dims else {}
    seen = {}
    for variant in range(len(fusion.variants)):
        for op, args in calls_of(fusion, variant, device, **rows):
            how = tuple((a.shape, a.dtype, a.stride()) if isinstance(a, torch.Tensor) else repr(a) for a in args)
            seen.setdefault((op, how), args)
    expected = {name for name in (fusion.name, f"{fusion.name}_bwd") if name in OPS}
    assert {op._opname for op, _ in seen} >= expected
    for (op, _), args in seen.items():
        keeps_its_promises(op, args)


@pytest.mark.parametrize("name", REST)
def test_ops_of_no_fusion(name):
    keeps_its_promises(*REST[name]())


def test_the_backward_of_a_loss_a_row():
    """Is called where no gradient of the head is kept, behind ``reduction="none"``."""
    fusion = next(f for f in all_fusions() if f.name == "linear_cross_entropy")
    variant = next(i for i, v in enumerate(fusion.variants) if v.get("reduction") == "none")
    calls = calls_of(fusion, variant, "cpu", m=3)
    assert "linear_cross_entropy_rows_bwd" in {op._opname for op, _ in calls}
