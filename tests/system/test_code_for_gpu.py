"""What default options make of a model on an H200, beside what Inductor makes of it: kernels launched and bytes moved.

It stands for the GPU that CI does not have. Two blocks of a model at its real width; Inductor's own code for a GPU, up to
the launches. Bytes are those of everything but products, convolutions, attention and ops that are calls.
"""

import importlib.util
import json
import shutil

import pytest
import torch

from tests.helpers import printed_without_interpreter, slow_but

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="for builds of torch without CUDA"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="the C++ interfaces of torch 2.13"),
]
# How many of the bytes that Inductor moves. Below 1 even where norms are kept, by the loss or embeddings.
MOST = {"llama": 0.52, "gpt2": 0.40, "bert": 0.99, "convnext": 1.03}
NORMS = {"row_norm_fwd_kernel", "row_norm_bwd_kernel", "_column_sums_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(("gpt2",), MOST))
def test_what_is_launched(case):
    found = printed_without_interpreter("tests.code_for_gpu", case)
    theirs, ours = found["inductor"], found["fx_fusion"]
    assert found["fallbacks"] == [], found["report"]
    assert theirs["ours"] == {}
    assert ours["moved"] < MOST[case] * theirs["moved"], found["report"]
    if case == "convnext":  # Inductor adds the bias of a convolution and lays its gradient out in the norm's kernels
        assert (ours["ours"], found["fused"]) == ({}, {})
    elif case == "llama":
        assert {*ours["ours"]} >= NORMS
        assert ours["ours"]["row_norm_fwd_kernel"] == 5
    else:  # Inductor computes dropout in the norm's kernels
        assert not NORMS.intersection(ours["ours"])
    # Tables of cos and sin are stored for each layer; they are small.
    assert [name for name in ours["stored twice"] if "cos" not in name] == []
    if case == "llama":  # lm_head's gradient is as the forward saved it, unless the loss has another gradient than 1
        assert ours["ours"]["scale_kernel"] == 1


# Their norms stand beside AdaLN's modulation or RoPE. What the backward computes again, for memory, is left out.
# Gradients of norms' weights are added up from partial sums of each processor: 5 MB in Wan.
BESIDE = {"sd3": "diffusers", "flux": "diffusers", "wan": "diffusers", "qwen3": "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(("qwen3",), BESIDE))
def test_norms_beside_pointwise_ops_move_no_more_bytes(case):
    if importlib.util.find_spec(BESIDE[case]) is None:
        pytest.skip(f"no {BESIDE[case]}")
    found = printed_without_interpreter("tests.code_for_gpu", case, json.dumps({"memory": "speed"}))
    assert found["fallbacks"] == [], found["report"]
    assert found["fx_fusion"]["moved"] <= 1.002 * found["inductor"]["moved"], found["report"]
    assert "rope" not in found["fused"], found["report"]
    assert found["fx_fusion"]["kernels"] <= found["inductor"]["kernels"], found["report"]
