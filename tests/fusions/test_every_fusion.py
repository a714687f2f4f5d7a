"""Every fusion at every case, variant and dtype: it fires once, and outputs and gradients pass the accuracy rule.

Both of an op's forms run: its reference, and its kernel (without a GPU in Triton's interpreter).
"""

import pytest
import torch

from fx_fusion.checking import of_case
from fx_fusion.fusion.registry import all_fusions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(
        fusion, case, {**variant, **case.statics}, dtype,
        id=f"{fusion.name}-{case.name}-{i}-{str(dtype).removeprefix('torch.')}",
        # Make test has each case in float32 ("chunks" of one variant), and the odd one of each fusion in every dtype.
        marks=[] if (dtype == torch.float32 or (case.name == "odd" and i == 0)) and (i == 0 or case.name != "chunks") else pytest.mark.slow,
    )
    for fusion in all_fusions()
    for case in fusion.cases
    for i, variant in enumerate(fusion.variants)
    if not case.bench and variant.items() >= {k: v for k, v in case.statics.items() if k in variant}.items()
    for dtype in DTYPES
]  # fmt: skip


@pytest.mark.parametrize(("fusion", "case", "statics", "dtype"), CASES)
def test_fires_once_and_is_no_less_accurate_than_eager(fusion, case, statics, dtype, device):
    """With the references of the ops, which shows the rewrite, and with their kernels."""
    assert list(of_case(fusion, case, statics, dtype, device)) == []
