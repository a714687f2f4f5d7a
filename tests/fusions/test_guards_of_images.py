"""Sizes that norms of images don't take."""

import pytest
import torch

from fx_fusion.fusion.registry import fusion_named


@pytest.mark.parametrize("name", ["group_norm", "group_norm_swish", "evonorm_s0", "evonorm_b0"])
def test_channels_longer_than_the_kernels_count(name):
    fusion = fusion_named(name)
    given = {n: torch.empty(4, device="meta") if n in ("v", "weight", "bias") else 2 for n in fusion.inputs if n != "x"}
    for positions, said in (
        (2**30 - 1, None),
        (2**30, "a channel of 1073741824 positions; the kernel takes fewer than 2^30"),
    ):
        x = torch.empty(1, 4, 1, positions, device="meta", dtype=torch.bfloat16)
        assert fusion.guard(**{**given, "x": x, **({"running_var": None} if name == "evonorm_b0" else {})}) == said
