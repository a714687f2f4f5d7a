"""Every fusion at every case, variant and dtype: it fires once, and outputs and gradients pass the accuracy rule.

Both of an op's forms run: its reference, and its kernel (without a GPU in Triton's interpreter).
"""

import pytest
import torch

import fx_fusion
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.testing import kernels_on_cpu, make_inputs, run, run_oracle, worst_excess
from tests.cases import compiled

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
    function = reference_of(fusion, statics)
    inputs = make_inputs(fusion, case, statics, dtype, device)
    frozen = fusion.frozen
    call = compiled(fusion, function)
    found = {}
    with fx_fusion.recording() as report:
        for ran in ("reference", "kernel") if device == "cpu" else ("kernel",):
            with kernels_on_cpu(ran == "kernel"):
                found[ran] = run(call, inputs, frozen=frozen)
    refusal = None if fusion.guard is None else fusion.guard(**{**dict.fromkeys(fusion.inputs), **inputs, **statics})
    assert report.count(fusion.name, "fused" if refusal is None else "declined") == 1, str(report)
    eager = run(function, inputs, frozen=frozen)
    oracle = run_oracle(function, inputs, frozen=frozen)
    for ran, fused in found.items():
        name, used = worst_excess(fused, eager, oracle, dtype)
        assert used <= 1, f"{ran}: {name} uses {used:.2f} times the allowed error"
        for key, expected in eager.values.items():
            assert fused.values[key].dtype == expected.dtype
            assert fused.values[key].shape == expected.shape
