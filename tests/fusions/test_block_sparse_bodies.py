"""block_sparse_attention in checkpointed bodies, under masks that are made outside of them."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.structured_masks import IDS, S, documents, tensors, window


def test_a_window_from_outside_of_checkpointed_bodies(on_cpu):
    def layer(query, key, value, mask):
        return F.scaled_dot_product_attention(query.sin(), key, value, attn_mask=mask)

    def function(query, key, value):
        mask = window(S, 37)[None, None]
        for _ in range(2):
            query = checkpoint(layer, query, key, value, mask, use_reentrant=False)
        return query

    inputs = tensors()
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 2, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


@pytest.mark.parametrize("nested", [False, True], ids=["once", "nested"])
def test_documents_from_outside_of_checkpointed_bodies(on_cpu, nested):
    """The number of a document is an operand more of the body; one by that name inside is another."""

    def layer(query, key, value, mask, ids):
        document = (ids % 3 == 1).cumsum(-1)
        own = (document[:, None, :, None] == document[:, None, None, :]) & mask
        query = F.scaled_dot_product_attention(query.sin(), key, value, attn_mask=mask)
        return F.scaled_dot_product_attention(query.sin(), key, value, attn_mask=own)

    def twice(query, *more):
        query = checkpoint(layer, query, *more, use_reentrant=False)
        return checkpoint(layer, query, *more, use_reentrant=False)

    def function(query, key, value, ids):
        mask = documents(ids)
        if nested:
            return checkpoint(twice, query, key, value, mask, ids, use_reentrant=False)
        return twice(query, key, value, mask, ids)

    inputs = {**tensors(), "ids": IDS}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 4, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def test_what_comes_in_through_a_body_between_is_known_there(on_cpu):
    """A loss in the middle body, whose finders look at every node of it."""

    def layer(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def middle(query, key, value, mask, head, target):
        query = checkpoint(layer, query, key, value, mask, use_reentrant=False)
        log_p = torch.log_softmax(F.linear(query, head), -1)
        return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)

    def function(query, key, value, ids, head, target):
        return checkpoint(middle, query, key, value, documents(ids), head, target, use_reentrant=False)

    inputs = {**tensors(), "ids": IDS, "head": torch.randn(50, 16), "target": torch.randint(0, 50, (2, 4, S))}
    with fx_fusion.recording() as report:
        found = torch.compile(function, backend=rewriting_backend(), dynamic=False)(**inputs)
    assert report.count("block_sparse_attention") == report.count("linear_cross_entropy") == 1, str(report)
    torch.testing.assert_close(found, function(**inputs), rtol=1e-4, atol=1e-4)
