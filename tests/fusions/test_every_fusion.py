"""Every fusion at every case, variant and dtype: it fires once, and outputs and gradients pass the accuracy rule.

Both of an op's forms run: its reference, and its kernel (without a GPU in Triton's interpreter).
"""

import pytest
import torch

from fx_fusion.checking import of_case
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.kernels.logits import logit_chunks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(
        fusion, case, {**variant, **case.statics}, dtype,
        id=f"{fusion.name}-{case.name}-{i}-{str(dtype).removeprefix('torch.')}",
        # Make test has each case in float32, and the odd one of each fusion in every dtype.
        marks=[] if (dtype == torch.float32 or (case.name == "odd" and i == 0)) else pytest.mark.slow,
    )
    for fusion in all_fusions()
    for case in fusion.cases
    for i, variant in enumerate(fusion.variants)
    if not case.bench and variant.items() >= {k: v for k, v in case.statics.items() if k in variant}.items()
    for dtype in DTYPES
]  # fmt: skip


@pytest.mark.parametrize(("fusion", "case", "statics", "dtype"), CASES)
def test_fires_once_and_is_no_less_accurate_than_eager(fusion, case, statics, dtype, device, monkeypatch):
    """With the references of the ops, which shows the rewrite, and with their kernels."""
    if case.name == "chunks":  # of 16 rows: as many chunks as of a large model, in seconds
        row = case.sizes["v"] * dtype.itemsize
        monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", dict.fromkeys(("cpu", "cuda"), (16 * row, 16 * row)))
        monkeypatch.setattr(logit_chunks, "_ROW_MULTIPLE", 8)
    assert list(of_case(fusion, case, statics, dtype, device)) == []
