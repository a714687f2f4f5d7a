"""A step of a Llama by the code that Inductor generates for it, launches of our kernels in it as on a GPU.

It stands for what users run: what an op computes, and what a traced graph says, are tested elsewhere.
"""

import pytest

from tests.helpers import printed_without_interpreter


def trained(case):
    return printed_without_interpreter("tests.generated_code", case)[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["default", "min", "scaled loss", "float8", "float8, min"])
def test_a_llama(case):
    """Its gradients, and the loss without one. (The interpreter cuts bfloat16 off, where a GPU rounds.)"""
    found = trained(case)
    float8 = "float8" in case
    for name, (error, eager) in found["errors"].items():
        # A product in e4m3 is 20 dB off at most, a tenth; the first weights' gradients come through eight of them.
        assert error < (0.1 * 8**0.5 if float8 else 3 * eager), name
    assert found["error"] < 0.12
    assert found["loss"] == pytest.approx(found["exact loss"], rel=1e-2 if float8 else 2e-4)
    launched, ops = ([n for n in found["launched"] if n.endswith("of an op") is of_op] for of_op in (False, True))
    of_the_loss = ["_loss_totals_kernel of an op", "_cross_entropy_rows_kernel of an op"]
    assert ops == of_the_loss, "whose host does more than launch: chunks of logits"
    assert launched.count("_embedding_segments_kernel add") == 1, "into lm_head's gradient: the table is tied"
    assert "scale_kernel" in launched, "of lm_head's gradient, in the memory that the forward saved it in"
    norms = [name for name in launched if name.startswith("row_norm")]
    without_a_gradient = [name for name in found["without a gradient"] if name.startswith("row_norm")]
    in_16_bits = "row_norm_fwd_kernel store_y"  # the last norm, for lm_head
    if float8:
        assert norms[:3] == without_a_gradient == ["row_norm_fwd_kernel store_q"] * 2 + [in_16_bits]
        assert [name.split()[:2] for name in norms[3:5]] == [["row_norm_bwd_kernel", "store_q"]] * 2
    else:
        assert norms[:3] == without_a_gradient == [in_16_bits] * 3
    assert len(norms) == 6
    assert "added into lm_head's gradient, row by row: that of 1 x embedding" in found["report"]
    assert "fallback" not in found["report"]


@pytest.mark.slow
def test_what_a_launch_reads_lies_as_it_was_traced():
    """Inductor pads a product's rows; without being told it would hand the kernel parts of these."""
    found = trained("padded")
    assert all(error < 1e-5 for error, _ in found["errors"].values()), found["errors"]
    assert "_embedding_segments_kernel add" in found["launched"]


@pytest.mark.slow
def test_equal_layers_launch_the_same_kernels_from_one_function():
    """Compiling layers once changes neither a launch nor a number."""
    flat, once = (trained(case) for case in ("flat layers", "layers once"))
    assert "equal layers are compiled once: forward 3 calls of 1 body, backward 3 calls of 1 body" in once["report"]
    assert sorted(once["launched"]) == sorted(flat["launched"])
    assert once["errors"] == flat["errors"]
    assert once["loss"] == flat["loss"]
