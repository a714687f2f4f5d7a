"""Attention with a learned bias: what is read of the mask, and FlexAttention's numbers."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.kernels import block_sparse_attention as kernel
from fx_fusion.kernels.block_sparse_attention import visible_blocks
from fx_fusion.patterns import biased_attention
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.fusions.test_block_sparse_padding import compared
from tests.helpers import reasons
from tests.structured_masks import blocks as sites_blocks
from tests.structured_masks import by_blocks

B, H, S, D = 2, 4, 37, 16
LOWEST = torch.finfo(torch.float32).min


def as_flex_attention_does(
    query, key, value, blocks, labels, keys, queries, low, high, scale, bias, hidden=None, filled=False
):  # fmt: skip
    """FlexAttention with a bias has no CPU kernel: scores, bias and mask as its formula has them."""
    assert bias.dtype == torch.float32
    assert bias.is_contiguous()
    assert bias.dim() == 2 or bias.shape[-3] == query.shape[1]
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])[None, :]
    visible = torch.ones_like(distance, dtype=torch.bool) if low is None else distance >= low
    visible = visible if high is None else visible & (distance <= high)
    for label in labels:
        visible = visible & (label[..., :, None] == label[..., None, :])
    for shown in keys:
        visible = visible & shown.view(-1, 1, 1, key.shape[2])
    assert not queries
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    of_keys = query @ key.mT * scale
    scores = of_keys + bias.to(query.dtype)
    if hidden is not None:
        rows = hidden.view(-1, 1, query.shape[2], 1)
        added_to = of_keys if filled else scores
        scores = torch.where(rows, added_to - added_to.detach(), scores)
        visible = visible | rows
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), -1) @ value


@pytest.fixture
def on_cpu(monkeypatch):
    guard = biased_attention.FUSION.guard

    def lenient(**given):
        why = guard(**given)
        return None if why is not None and "no backward" in why else why

    monkeypatch.setattr(sites_blocks, "DTYPES", (torch.float32,))
    monkeypatch.setattr(biased_attention, "biased_attention", as_flex_attention_does)
    object.__setattr__(biased_attention.FUSION, "guard", lenient)
    yield
    object.__setattr__(biased_attention.FUSION, "guard", guard)


def given(**sizes):
    made = {n: torch.randn(B, H, S, D) for n in ("q", "k", "v")}
    return {**made, **{n: torch.randn(*shape) for n, shape in sizes.items()}}


def distance():
    return torch.arange(S)[:, None] - torch.arange(S)[None, :]


def causal():
    return torch.arange(S)[:, None] >= torch.arange(S)[None, :]


def heads_last(bias):
    return bias.permute(2, 0, 1)[None]


PROGRAMS = {
    "alone": (lambda bias: bias, (1, H, S, S), ""),
    "heads last": (heads_last, (S, S, H), ""),
    "of all heads": (lambda bias: bias, (S, S), ""),
    "expanded": (lambda bias: bias.expand(B, H, S, S), (1, H, S, S), ""),
    "where": (lambda bias: torch.where(causal().view(1, 1, S, S), heads_last(bias), LOWEST).contiguous(), (S, S, H), "causal"),
    "filled": (lambda bias: bias.masked_fill(~causal(), float("-inf")), (1, H, S, S), "causal"),
    "added": (lambda bias: bias + torch.zeros(S, S).masked_fill(~causal(), LOWEST), (1, H, S, S), "causal"),
    "window": (lambda bias: bias.masked_fill((distance() < 0) | (distance() > 8), LOWEST), (H, S, S), "window of 9"),
    "two": (lambda bias: bias + bias.transpose(-1, -2), (1, H, S, S), ""),
    "looked up": (lambda table: F.embedding((torch.arange(S)[:, None] - torch.arange(S)).clamp(-3, 3) + 3, table)
                  .permute(2, 0, 1)[None], (7, H), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_learned_bias_is_added_to_the_scores(name, on_cpu):
    mask_of, shape, structure = PROGRAMS[name]

    def function(q, k, v, bias):
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(bias), scale=0.3)
        return q

    inputs = given(bias=shape)
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(fusions=["biased_attention"]), dynamic=False), inputs)
    assert report.count("biased_attention") == 2, str(report)
    assert structure in str(report)
    worst, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)
    assert used <= 1, f"{worst} uses {used:.2f} times the allowed error"
    after = report.graphs[0].after
    assert "masked_fill" not in after
    assert "where(" not in after


def test_layers_share_a_bias_that_is_laid_out_once(on_cpu):
    def function(q, k, v, bias):
        bias = heads_last(bias)
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(causal(), bias, LOWEST).contiguous())
        return q

    with fx_fusion.recording() as report:
        run(torch.compile(function, backend=rewriting_backend(), dynamic=False), given(bias=(S, S, H)))
    assert report.count("biased_attention") == 3, str(report)
    assert report.count("dense_mask") == 0
    assert report.graphs[0].after.count(".contiguous(") == 1, report.graphs[0].after


def test_a_padding_mask_of_ones_leaves_the_bias_alone(on_cpu):
    """As T5 of transformers has it: ``where(mask, bias, lowest)``, a mask for each sequence."""

    def function(q, k, v, bias, shown):
        mask = torch.where(shown[:, None, None, :].bool().expand(B, 1, S, S), bias, LOWEST).contiguous()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def call(shown):
        inputs = given(bias=(1, H, S, S))
        compiled = torch.compile(lambda q, k, v, bias: function(q, k, v, bias, shown), backend=rewriting_backend(), dynamic=False)
        with fx_fusion.recording() as report:
            fused = run(compiled, inputs)
        expected = run(lambda q, k, v, bias: function(q, k, v, bias, shown), inputs)
        exact = run_oracle(lambda q, k, v, bias: function(q, k, v, bias, shown), inputs)
        assert worst_excess(fused, expected, exact, torch.float32)[1] <= 1
        return report

    report = call(torch.ones(B, S, dtype=torch.long))
    assert report.count("biased_attention") == 1, str(report)
    assert "is all ones" in str(report)
    padded = call((torch.arange(S) < torch.tensor([[S], [S - 9]])).long())
    assert padded.count("biased_attention") == 1, str(padded)
    assert "keys shown by shown" in str(padded)


SHOWN = {
    "right": torch.arange(S) < torch.tensor([[S], [S - 9]]),
    "left": torch.arange(S) >= torch.tensor([[0], [9]]),
    "a sequence": torch.arange(S) < torch.tensor([[S], [0]]),
}
HIDING = {
    "where": lambda bias, visible: torch.where(visible, bias, LOWEST).contiguous(),
    "filled": lambda bias, visible: bias.masked_fill(~visible, LOWEST),
    "added": lambda bias, visible: bias + torch.zeros(visible.shape).masked_fill(~visible, LOWEST),
}


@pytest.mark.parametrize("causally", [False, True], ids=["keys", "causal"])
@pytest.mark.parametrize("padding", SHOWN)
@pytest.mark.parametrize("hide", HIDING)
def test_padding_is_read_when_the_model_runs(hide, padding, causally, on_cpu):
    """A query that sees nothing sees all keys alike; the bias has its gradient where the lowest number was added to it."""

    def function(q, k, v, bias, shown):
        visible = (shown != 0)[:, None, None, :]
        mask = HIDING[hide](bias, visible & causal() if causally else visible.expand(B, 1, S, S))
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return q

    report = compared(function, {**given(bias=(1, H, S, S)), "shown": SHOWN[padding].long()})
    assert report.count("biased_attention") == 2, str(report)
    assert report.graphs[0].after.count("hidden_rows(") == 1


NUMBERS = SHOWN["left"].long()
DECLINED = {
    "of each sequence": (lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b), (B, H, S, S), "for each sequence"),
    "dropout": (lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b, dropout_p=0.5), (1, H, S, S), "no dropout"),
    "a frozen bias": (lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b.detach()), (1, H, S, S), ""),
    "for one query": (lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b), (1, H, 1, S), "the kernel takes"),
    "for sequences, not heads": (lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b), (B, 1, S, S), "the kernel takes"),
    "computed of the input": (lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b * q.mean()), (1, H, S, S), "row entirely"),
    "hidden by infinity": (
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b.masked_fill(~(NUMBERS != 0)[:, None, None], -torch.inf)),
        (1, H, S, S), "may hide a row entirely",
    ),
    "hidden twice": (
        lambda q, k, v, b: F.scaled_dot_product_attention(
            q, k, v, HIDING["added"](HIDING["added"](b, causal()), (NUMBERS != 0)[:, None, None])
        ), (1, H, S, S), "several masks",
    ),
    "hidden by a small number": (
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b.masked_fill(~causal(), -5.0)), (1, H, S, S), "no learned bias alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_what_stays_a_dense_mask(name, on_cpu):
    function, shape, why = DECLINED[name]
    with fx_fusion.recording() as report, contextlib.suppress(NotImplementedError):
        run(torch.compile(function, backend=rewriting_backend(), dynamic=False), given(b=shape))
    assert report.count("biased_attention") == 0, str(report)
    assert why in reasons(report, "biased_attention")


def test_a_mask_of_another_graph_is_no_learned_bias(on_cpu):
    """It has a gradient, and it may hide a row entirely."""

    def function(q, k, v, bias):
        shown = torch.arange(S) > 5
        mask = torch.where(causal() & shown, bias, LOWEST)
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    inputs = given(bias=(1, H, S, S))
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("biased_attention") == 0, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


@pytest.mark.parametrize("inside", [False, True], ids=["bias made outside", "bias made inside"])
def test_checkpointed_attention(inside, on_cpu):
    def attend(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=heads_last(bias) if inside else bias)

    def function(q, k, v, bias):
        return checkpoint(attend, q, k, v, bias if inside else heads_last(bias), use_reentrant=False)

    inputs = given(bias=(S, S, H))
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("biased_attention") == 1, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def one_call(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_deterministic_algorithms_keep_the_dense_mask(on_cpu):
    torch.use_deterministic_algorithms(True)
    try:
        with fx_fusion.recording() as report:
            run(torch.compile(one_call, backend=rewriting_backend(), dynamic=False), given(bias=(1, H, S, S)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.count("biased_attention") == 0
    assert "atomics" in reasons(report, "biased_attention")


def test_symbolic_sizes_keep_the_dense_mask(on_cpu):
    with fx_fusion.recording() as report:
        run(torch.compile(one_call, backend=rewriting_backend(), dynamic=True), given(bias=(1, H, S, S)))
    assert report.count("biased_attention") == 0, str(report)
    assert "symbolic" in reasons(report, "biased_attention")


def test_eager_flex_attention_has_the_gradient_of_the_bias():
    """What verify() calls, and what the reference above stands for."""
    inputs = given(bias=(H, S, S))
    q, k, v, bias = (t.requires_grad_() for t in inputs.values())
    rest = (visible_blocks(q, k, (), (), (), 0, None), (), (), (), 0, None, 0.25, bias)
    found = kernel.biased_attention(q, k, v, *rest)
    expected = as_flex_attention_does(q, k, v, *rest)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(out, (q, k, v, bias), upstream) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_short_rows_and_wide_heads_are_kept():
    def sizes(s, d, b=64):
        query = torch.empty(b, 12, s, d, device="meta")
        return biased_attention.why_keep(query, query, query, torch.empty(1, 12, s, s, device="meta"))

    assert sizes(512, 64) is None
    assert "512 positions" in sizes(197, 64)
    assert "head dim" in sizes(512, 256)
    assert "scores" in sizes(512, 64, b=4)


def test_the_reference_of_these_tests_is_that_of_masks():
    inputs = given()
    listed = visible_blocks(inputs["q"], inputs["k"], (), (), (), 0, None)
    rest = (inputs["q"], inputs["k"], inputs["v"], listed, (), (), (), 0, None, 0.25)
    torch.testing.assert_close(as_flex_attention_does(*rest, torch.zeros(S, S)), by_blocks(*rest))
