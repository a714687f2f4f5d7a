"""Test what default options make of a model on an H200, beside what Inductor makes of it: kernels launched and bytes moved.

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
# How many of the bytes that Inductor moves. Below 1 even where norms are kept, by the loss or embeddings. BERT's dropout is
# in front of its norms: what these gain in time they lose in bytes.
MOST = {"llama": 0.52, "gpt2": 0.40, "bert": 1.07, "convnext": 1.03}
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
    else:
        assert {*ours["ours"]} >= NORMS
        assert ours["ours"]["row_norm_fwd_kernel"] == found["fused"].get("add_layer_norm", 5)
    # Tables of cos and sin are stored for each layer; they are small.
    assert [name for name in ours["stored twice"] if "cos" not in name] == []
    if case == "llama":  # lm_head's gradient is as the forward saved it, unless the loss has another gradient than 1
        assert ours["ours"]["scale_kernel"] == 1


# Their norms stand beside AdaLN's modulation or RoPE, which Inductor computes in the kernel of a norm. The bounds are what was
# measured. Wan's queries and keys have biases, whose gradients are sums of their own behind the kernel of norm and RoPE.
BESIDE = {"sd3": 1.003, "flux": 0.97, "wan": 1.006, "qwen3": 0.46}


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but((), BESIDE))
def test_norms_beside_pointwise_ops(case):
    library = "transformers" if case == "qwen3" else "diffusers"
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library}")
    found = printed_without_interpreter("tests.code_for_gpu", case)
    assert found["fallbacks"] == [], found["report"]
    assert found["fx_fusion"]["moved"] <= BESIDE[case] * found["inductor"]["moved"], found["report"]


def test_losses_of_rows_store_nothing_but_their_gradient():
    """A chunk of logits in 16 bits is read, and its gradient written over it: 2 bytes each, and 2 for a teacher's. Values of
    a policy gradient are another kernel, and read the logits once more. A value in float32 in memory would be 8."""
    found = printed_without_interpreter("tests.code_for_gpu", "rows")
    for name, (values, gradients) in found.items():
        assert values < (2.01 if "policy" in name else 4.01), found
        assert gradients < 6.01, found
    assert len(found) == 5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deep_bert", "deep_whisper"])
def test_layers_that_are_compiled_once_launch_what_they_launch_one_by_one(case):
    flat, once = (printed_without_interpreter("tests.code_for_gpu", case, json.dumps({"layers": way})) for way in ("flat", "once"))
    assert "equal layers are compiled once: " in once["report"]
    assert "compiled once" not in flat["report"]
    for counted in ("kernels", "ours"):
        assert once["fx_fusion"][counted] == flat["fx_fusion"][counted], counted
    assert once["fx_fusion"]["moved"] == pytest.approx(flat["fx_fusion"]["moved"], rel=1e-6)  # a seed is read as a part of all
