"""Masks with a structure: what is read off them, and what FlexAttention makes of it."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.patterns import block_sparse_attention as pattern
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import reasons, slow_but
from tests.structured_masks import IDS, MASKS, S, attend, by_blocks, positions, tensors, window


@pytest.mark.parametrize("name", slow_but(("window", "additive_window", "chunks", "documents"), MASKS))
def test_a_mask_with_a_structure_fires_and_is_as_accurate(name, on_cpu):
    mask_of, _ = MASKS[name]
    function, inputs = attend(mask_of), {**tensors(), "ids": IDS}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 1, str(report)
    worst, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)
    assert used <= 1, f"{worst} uses {used:.2f} times the allowed error"


@pytest.mark.parametrize("name", slow_but(("window", "documents"), MASKS))
def test_without_a_gpu_it_is_declined_with_the_structure_known(name):
    mask_of, structure = MASKS[name]
    inputs = {**tensors(), "ids": IDS}
    with fx_fusion.recording() as report:
        run(torch.compile(attend(mask_of), backend=rewriting_backend(speculate=False), dynamic=False), inputs)
    assert report.count("block_sparse_attention", "declined") == 1, str(report)
    assert "no backward on cpu" in reasons(report, "block_sparse_attention")


def test_repeated_heads_are_not_copied(on_cpu):
    def function(query, key, value):
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=window(S, 37))

    inputs = tensors(h=4, g=2)
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 1
    assert "repeat_interleave" not in report.graphs[0].after
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def test_layers_share_the_blocks(on_cpu):
    def function(query, key, value):
        mask = window(S, 37)
        for _ in range(3):
            query = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return query

    inputs = tensors()
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    after = report.graphs[0].after
    assert report.count("block_sparse_attention") == 3
    assert after.count("visible_blocks(") == 1
    assert "arange" not in after
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def test_a_result_that_lies_otherwise_is_laid_out_anew(on_cpu, monkeypatch):
    def by_blocks_positions_first(*given):
        return by_blocks(*given).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(pattern, "block_sparse_attention", by_blocks_positions_first)
    function, inputs = attend(MASKS["window"][0]), {**tensors(), "ids": IDS}
    expected = function(**inputs).contiguous()
    with fx_fusion.recording() as report:
        found = torch.compile(lambda **given: function(**given).contiguous(), backend=rewriting_backend())(**inputs)
    assert report.count("block_sparse_attention") == 1, str(report)
    torch.testing.assert_close(found, expected)


def test_any_length_with_symbolic_sizes(on_cpu):
    def function(query, key, value):
        query, key, value = (t.view(2, 4, -1, 16) for t in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=window(query.shape[2], 37))

    compiled = torch.compile(function, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for s in (S, 130, 517):
            inputs = tensors(s=s)
            fused = run(compiled, inputs)
            assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1
    assert len(report.graphs) == 1
    assert report.count("block_sparse_attention") == 1


def test_a_window_over_another_number_of_keys(on_cpu):
    def function(query, key, value):
        q, k = torch.arange(S)[:, None], torch.arange(S - 1)[None]
        return F.scaled_dot_product_attention(query, key[:, :, 1:], value[:, :, 1:], attn_mask=(k <= q) & (k > q - 9))

    inputs = tensors()
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 1, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def hidden_row(query, key, value):
    q, k = positions(S)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(k < q) & (k > q - 9))


def two_documents_kinds(query, key, value):
    q, k = positions(S)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(k <= q) & (q // 16 == k // 32))


def with_dropout(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=window(S, 9), dropout_p=0.1)


def label_of_other_lengths(query, key, value):
    q, k = torch.arange(S)[:, None], torch.arange(S - 1)[None]
    return F.scaled_dot_product_attention(query, key[:, :, 1:], value[:, :, 1:], attn_mask=(k <= q) & (q // 16 == k // 16))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (hidden_row, "visible where"),  # the first query sees nothing
        (two_documents_kinds, "visible where"),
        (with_dropout, "no dropout"),
        (label_of_other_lengths, "as many keys as queries"),
    ],
)
def test_what_must_not_fire(function, reason, on_cpu):
    inputs = tensors()
    torch.manual_seed(3)
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 0
    assert reason in reasons(report, "block_sparse_attention") + reasons(report, "causal_mask")
    torch.manual_seed(3)
    assert torch.equal(fused.values["out0"], run(function, inputs).values["out0"])


def test_a_scale_that_becomes_a_symbol(on_cpu):
    def function(query, key, value, scale):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=window(S, 9), scale=scale)

    inputs = tensors()
    compiled = torch.compile(function, backend=rewriting_backend())
    for scale in (0.3, 0.4):
        torch.testing.assert_close(compiled(**inputs, scale=scale), function(**inputs, scale=scale), rtol=1e-5, atol=1e-5)
