"""Every fusion at every case, variant and dtype: it fires once, and outputs and gradients pass the accuracy rule.

Names no fusion. On a machine without a GPU the ops run their references, and their kernels under TRITON_INTERPRET=1.
"""

import pytest
import torch

import fx_fusion
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.testing import make_inputs, rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import shape_of_variant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(fusion, case, {**variant, **case.statics}, id=f"{fusion.name}-{case.name}-{i}")
    for fusion in all_fusions()
    for case in fusion.cases
    for i, variant in enumerate(fusion.variants)
    if not case.bench and variant.items() >= {k: v for k, v in case.statics.items() if k in variant}.items()
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("fusion", "case", "statics"), CASES)
def test_fires_once_and_is_no_less_accurate_than_eager(fusion, case, statics, dtype, device):
    function = reference_of(fusion, statics)
    inputs = shape_of_variant(fusion, make_inputs(fusion, case, statics, dtype, device), statics)
    frozen = ("cos", "sin", "weight") if fusion.name in ("rope", "cross_entropy", "linear_cross_entropy") else ()
    # Only this fusion: a smaller one may be a part of its reference.
    compiled = torch.compile(function, backend=rewriting_backend(fusions=[fusion.name]), dynamic=False)
    with fx_fusion.recording() as report:
        fused = run(compiled, inputs, frozen=frozen)
    if fusion.name == "repeat_kv" and device == "cuda" and dtype == torch.float32:
        assert report.count(fusion.name, "declined") == 1  # the kernel behind it lays its result out differently
    else:
        assert report.count(fusion.name) == 1, str(report)
    eager = run(function, inputs, frozen=frozen)
    oracle = run_oracle(function, inputs, frozen=frozen)
    name, used = worst_excess(fused, eager, oracle, dtype)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"
    for key, expected in eager.values.items():
        assert fused.values[key].dtype == expected.dtype
        assert fused.values[key].shape == expected.shape
