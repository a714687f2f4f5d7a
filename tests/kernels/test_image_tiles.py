"""Results as norms of images allocate them."""

import pytest
import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fusion.kernels.lib.image_tiles import empty_images


@pytest.mark.parametrize("shape", [(2, 6, 7), (2, 6, 4, 5), (2, 6, 3, 4, 5), (2, 6, 1, 4)])
def test_results_of_both_passes_are_allocated_apart(shape):
    """AOTAutograd takes two equal ``empty_strided`` for one value: the forward then saved its result unwritten for the
    backward, and both passes copied it before they wrote to it."""
    x = torch.empty(shape).movedim(1, -1).contiguous().movedim(-1, 1)
    traced = make_fx(lambda x: (empty_images(x) + 1, empty_images(x) + 2), select_decomp_table(), tracing_mode="fake")(x)
    made = [node for node in fx_graph_cse(traced.graph).nodes if "empty" in str(node.target)]
    assert len(made) == 2
    assert empty_images(x).movedim(1, -1).is_contiguous()
