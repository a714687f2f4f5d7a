"""Attention written out with a window, a softcap or a sink: what is read, and what is left alone."""

import pytest
import torch
import transformers

import fx_fusion
from fx_fusion.fusion.search import Search
from fx_fusion.graph.view import View
from fx_fusion.kernels.block_sparse_attention import block_sparse_attention
from fx_fusion.patterns import flex_attention
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import pairwise, reasons, rewritten
from tests.structured_masks import IDS, S, documents, structures_on_cpu, tensors, window

LOWEST = torch.finfo(torch.float32).min


def written_out(query, key, value, *, mask=None, softcap=None, sink=None, groups=1, first=False, dtype=None):
    """As transformers writes it."""
    key, value = (
        t[:, :, None].expand(-1, -1, groups, -1, -1).reshape(t.shape[0], -1, *t.shape[2:]) if groups > 1 else t
        for t in (key, value)
    )
    scores = torch.matmul(query, key.transpose(2, 3)) * 0.3
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sink is not None:
        sink = sink.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
        scores = torch.cat([scores, sink], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
    probabilities = torch.softmax(scores, dim=-1, dtype=dtype or scores.dtype)
    if sink is not None:
        probabilities = probabilities[..., :-1]
    return torch.matmul(probabilities.to(value.dtype), value).transpose(1, 2).contiguous()


def added(visible):
    return torch.zeros(visible.shape).masked_fill(~visible, LOWEST)


WINDOW = added(window(S, 37))
SINKS = torch.linspace(-1, 2, 4)
HOW = {
    "window": lambda **t: written_out(**t, mask=added(window(S, 37))),
    "window_in_double": lambda **t: written_out(**t, mask=added(window(S, 37)), dtype=torch.float32),
    "softcap": lambda **t: written_out(**t, softcap=5.0),
    "softcap_causal": lambda **t: written_out(**t, mask=added(window(S, S)), softcap=5.0),
    "softcap_window": lambda **t: written_out(**t, mask=added(window(S, 37)), softcap=5.0),
    "documents": lambda **t: written_out(**t, mask=added(documents(IDS)), softcap=5.0),
}
WITH_SINK = {
    "sink": lambda sink, **t: written_out(**t, sink=sink),
    "sink_causal": lambda sink, **t: written_out(**t, mask=added(window(S, S)), sink=sink),
    "sink_window": lambda sink, **t: written_out(**t, mask=added(window(S, 37)), sink=sink),
    "sink_softcap_window": lambda sink, **t: written_out(**t, mask=added(window(S, 37)), sink=sink, softcap=5.0),
}


def check(function, inputs, *, count=1, dtype=torch.float32):
    inputs = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False), inputs)
    assert report.count("flex_attention") == count, str(report)
    assert "softmax" not in report.graphs[0].after
    worst, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), dtype)
    assert used <= 1, f"{worst} uses {used:.2f} times the allowed error"
    return report


@pytest.mark.parametrize("how", HOW)
def test_fires_and_is_as_accurate(how, on_cpu):
    check(lambda query, key, value: HOW[how](query=query, key=key, value=value), tensors())


@pytest.mark.parametrize("how", WITH_SINK)
def test_with_a_sink_that_learns(how, on_cpu):
    def function(query, key, value, sink):
        return WITH_SINK[how](query=query, key=key, value=value, sink=sink)

    check(function, {**tensors(), "sink": SINKS.clone()})


def test_a_sink_that_is_capped_with_the_scores(on_cpu):
    def function(query, key, value, sink):
        scores = torch.cat([query @ key.mT * 0.05, sink.view(1, -1, 1, 1).expand(2, 4, S, 1)], -1)
        return torch.softmax(5.0 * torch.tanh(scores), -1)[..., :-1] @ value

    inputs = {**tensors(h=4), "sink": torch.tensor([1.0, 2.0, -3.0, 0.5])}
    found, report = rewritten(function, *inputs.values())
    assert report.count("flex_attention") == 0
    assert "capped or masked with the scores" in reasons(report, "attention")
    torch.testing.assert_close(found, function(**inputs), rtol=1e-4, atol=1e-5)


def test_the_operator_itself_in_the_graph():
    """Not its likeness for CPUs: FlexAttention's operator traces the softcap, within another's trace. In a dtype that the
    guard admits on a GPU."""

    def function(query, key, value, sink):
        return written_out(query, key, value, mask=added(window(S, 37)), softcap=5.0, sink=sink, groups=2)

    with structures_on_cpu(op=block_sparse_attention):
        check(function, {**tensors(h=4, g=2), "sink": SINKS.clone()}, dtype=torch.bfloat16)


def test_grouped_heads_are_not_copied(on_cpu):
    def function(query, key, value):
        return written_out(query, key, value, mask=added(window(S, 37)), softcap=5.0, groups=2)

    report = check(function, tensors(h=4, g=2))
    assert "expand" not in report.graphs[0].after


def test_a_scale_that_changes_between_calls(on_cpu):
    """A number by which the scores are multiplied or divided: the queries are, then."""

    def function(query, key, value, scale):
        scores = query @ key.transpose(2, 3) * scale / (2 * scale)
        return torch.softmax(scores + added(window(S, 37)), -1) @ value

    compiled = torch.compile(function, backend=rewriting_backend(speculate=False))
    with fx_fusion.recording() as report:
        for scale in (0.5, 0.25, 0.125):
            inputs = {**tensors(), "scale": scale}
            fused = run(compiled, inputs)
            assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1
    assert len(report.graphs) == 2, "the second graph takes any scale"
    assert report.count("flex_attention") == 2, str(report)


def test_layers_share_the_blocks(on_cpu):
    def function(query, key, value):
        mask = added(window(S, 37))
        for _ in range(3):
            query = written_out(query, key, value, mask=mask, softcap=5.0).transpose(1, 2)
        return query

    assert check(function, tensors(), count=3).graphs[0].after.count("visible_blocks(") == 1


@pytest.mark.parametrize("padded", ["left", "right", "a row"])
def test_beside_a_sink_padding_may_hide_a_row(padded, on_cpu):
    """The sink takes all of a hidden row: zeros in both."""

    def function(query, key, value, sink, shown):
        visible = window(S, S) & (shown[:, None, None, :] != 0)
        return written_out(query, key, value, mask=added(visible), sink=sink)

    shown = torch.ones(2, S, dtype=torch.long)
    shown[1, {"left": slice(0, 111), "right": slice(S - 111, S), "a row": slice(None)}[padded]] = 0
    check(function, {**tensors(), "sink": SINKS.clone(), "shown": shown})


PADDED = {"left": slice(0, 111), "right": slice(S - 111, S), "holes": slice(5, 400, 7), "a row": slice(None)}
HIDING = {
    "added": lambda scores, visible: scores + added(visible),
    "filled": lambda scores, visible: scores.masked_fill(~visible, LOWEST),
    "chosen": lambda scores, visible: torch.where(visible, scores, -1e35),
    # As transformers up to 5.17 and from then on make it.
    "of a tensor": lambda scores, visible: scores + torch.where(visible, torch.tensor(0.0, dtype=scores.dtype), LOWEST),
    "of a full tensor": lambda scores, visible: scores + torch.where(visible, torch.zeros((), dtype=scores.dtype), LOWEST),
    "cast": lambda scores, visible: scores + torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min).to(torch.bfloat16),
    "of bfloat16": lambda scores, visible: scores
    + torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill(~visible, torch.finfo(torch.bfloat16).min),
}
SEEN = {
    "causal": lambda shown: window(S, S) & shown[:, None, None, :],
    "keys": lambda shown: shown[:, None, None, :],
    "window": lambda shown: window(S, 37) & shown[:, None, None, :],
}


@pairwise(hide=HIDING, seen=SEEN, padded=PADDED, softcap=[None, 5.0])
def test_padding_may_hide_a_row(hide, seen, padded, softcap, on_cpu):
    """All probabilities of such a row are equal; its scores have a gradient where the number was added to them."""

    def function(query, key, value, shown):
        scores = query @ key.transpose(2, 3) * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = HIDING[hide](scores, SEEN[seen](shown != 0))
        return torch.softmax(scores, -1) @ value

    shown = torch.ones(2, S, dtype=torch.long)
    shown[1, PADDED[padded]] = 0
    check(function, {**tensors(), "shown": shown})


def exponentials_over_their_sum(scores):
    e = scores.exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("softmax", [lambda scores: scores.softmax(-1), exponentials_over_their_sum])
def test_the_lse_of_shifted_scores_is_another_number(on_cpu, softmax):
    """A softmax is the same without the maximum that was taken off, a logsumexp is not."""

    def function(query, key, value):
        scores = query @ key.mT / 4
        scores = scores - scores.amax(-1, keepdim=True)
        return softmax(scores) @ value * torch.logsumexp(scores, -1, keepdim=True).sigmoid()

    inputs = tensors()
    given = [{name: t.detach().clone().requires_grad_() for name, t in inputs.items()} for _ in range(2)]
    found = torch.compile(function, backend=rewriting_backend(), dynamic=False)(**given[0])
    expected = function(**given[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(y.square().sum(), list(of.values())) for y, of in zip((found, expected), given, strict=True)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("real", [False, True], ids=["", "the operator itself"])
@pytest.mark.parametrize(("keepdim", "size"), [(False, 37), (True, S)], ids=["window", "causal"])
def test_the_lse_of_the_scores_is_read_too(keepdim, size, real):
    """As Granite with windows writes its sink: the result is scaled by it; the logarithm comes before the softmax."""

    def function(query, key, value, sink):
        scores = query @ key.transpose(2, 3) * 0.3 + added(window(S, size))
        lse = torch.logsumexp(scores, dim=-1, keepdim=keepdim)
        lse = lse.squeeze(-1) if keepdim else lse
        scale = (lse - sink.view(1, -1, 1)).float().sigmoid()
        return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value * scale.unsqueeze(-1).to(value.dtype)

    with structures_on_cpu(**({"op": block_sparse_attention} if real else {})):
        dtype = torch.bfloat16 if real else torch.float32
        check(function, {**tensors(), "sink": SINKS.clone()}, dtype=dtype)


def hidden_row(query, key, value):
    q, k = torch.arange(S)[:, None], torch.arange(S)[None]
    return written_out(query, key, value, mask=added((k < q) & (k > q - 9)))


def masked_and_then_capped(query, key, value):
    scores = query @ key.transpose(2, 3) + added(window(S, 37))
    return torch.softmax(5.0 * torch.tanh(scores / 5.0), -1) @ value


def with_the_probability_of_the_sink(query, key, value):
    scores = torch.cat([query @ key.transpose(2, 3), torch.zeros(2, 4, S, 1)], -1)
    return torch.softmax(scores, -1) @ torch.cat([value, value[:, :, :1]], 2)


def sink_first(query, key, value):
    scores = torch.cat([torch.zeros(2, 4, S, 1), query @ key.transpose(2, 3)], -1)
    return torch.softmax(scores, -1)[..., 1:] @ value


def first_key_dropped(query, key, value):
    scores = torch.cat([query @ key.transpose(2, 3), torch.zeros(2, 4, S, 1)], -1)
    return torch.softmax(scores, -1)[..., 1:] @ value


def shifted_below_the_sink(query, key, value):
    scores = query @ key.transpose(2, 3)
    scores = scores - scores.amax(-1, keepdim=True)
    return torch.softmax(torch.cat([scores, torch.zeros(2, 4, S, 1)], -1), -1)[..., :-1] @ value


def shifted_below_the_softcap(query, key, value):
    scores = query @ key.transpose(2, 3)
    scores = torch.tanh((scores - scores.amax(-1, keepdim=True)) / 5.0) * 5.0
    return torch.softmax(scores, -1) @ value


def masked_sink(query, key, value):
    scores = torch.cat([query @ key.transpose(2, 3), torch.zeros(2, 4, S, 1)], -1)
    mask = torch.cat([added(window(S, 37)), torch.full((S, 1), LOWEST)], -1)
    return torch.softmax(scores + mask, -1)[..., :-1] @ value


def probabilities_returned(query, key, value):
    probabilities = torch.softmax(query @ key.transpose(2, 3) + added(window(S, 37)), -1)
    return probabilities @ value, probabilities


def dropped_out(query, key, value):
    probabilities = torch.softmax(query @ key.transpose(2, 3) + added(window(S, 37)), -1)
    return torch.nn.functional.dropout(probabilities, 0.0 if query.shape[0] > 2 else 0.5) @ value


NUMBERS = (torch.arange(S) >= torch.tensor([[0], [9]])).long()  # 0 is padding, at the left


def padded_and_causal(query, key, value):
    """In a hidden row later keys are at -inf, and those before share all."""
    scores = query @ key.transpose(2, 3) + added(window(S, S)) + added((NUMBERS != 0)[:, None, None])
    return torch.softmax(scores, -1) @ value


def padded_by_infinity(query, key, value):
    hidden = ~(window(S, S) & (NUMBERS != 0)[:, None, None])
    return (torch.softmax((query @ key.transpose(2, 3)).masked_fill(hidden, float("-inf")), -1) @ value).nan_to_num(1.0)


def padded_and_scaled(query, key, value):
    scores = query @ key.transpose(2, 3) + added(window(S, S) & (NUMBERS != 0)[:, None, None])
    return torch.softmax(scores * 0.3, -1) @ value


def padded_and_scaled_back(query, key, value):
    """Twice the lowest number is -inf."""
    scores = (query @ key.transpose(2, 3) + added(window(S, S) & (NUMBERS != 0)[:, None, None])) * 2 * 0.5
    return (torch.softmax(scores, -1) @ value).nan_to_num(1.0)


def the_maximum_with_the_lowest(query, key, value):
    """Of two that are the same each gets half of the gradient."""
    scores = query @ key.transpose(2, 3) + added(window(S, S) & (NUMBERS != 0)[:, None, None])
    return torch.softmax(torch.max(scores, torch.tensor(LOWEST)), -1) @ value


def filled_with_a_narrower_number(query, key, value):
    """The lowest float32 is -inf in a tensor of 16 bits."""
    lowest = torch.tensor(LOWEST, dtype=torch.bfloat16)
    visible = window(S, S) & (NUMBERS != 0)[:, None, None]
    return (torch.softmax(torch.where(visible, query @ key.transpose(2, 3), lowest), -1) @ value).nan_to_num(1.0)


def padded_and_its_lse(query, key, value):
    scores = query @ key.transpose(2, 3) + added(window(S, S) & (NUMBERS != 0)[:, None, None])
    return torch.softmax(scores, -1) @ value * torch.logsumexp(scores, -1, keepdim=True).sigmoid()


def packed(query, key, value):
    scores = query @ key.transpose(2, 3) + added(documents(IDS) & (NUMBERS != 0)[:, None, None])
    return torch.softmax(scores, -1) @ value


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (padded_and_causal, "by several numbers"),
        (padded_by_infinity, "may hide a row entirely"),
        (padded_and_scaled, "by a number that is scaled"),
        (padded_and_scaled_back, "by a number that is scaled"),
        (the_maximum_with_the_lowest, "the maximum with"),
        (filled_with_a_narrower_number, "may hide a row entirely"),
        (padded_and_its_lse, "the logsumexp of its scores is read"),
        (packed, "may hide a row entirely"),
        (hidden_row, "is not proved"),
        (masked_and_then_capped, "capped after that"),
        (with_the_probability_of_the_sink, "the probability of the sink"),
        (sink_first, "between the product and the softmax"),
        (first_key_dropped, "probability of the sink"),
        (shifted_below_the_sink, "shifts the scores below their sink"),
        (shifted_below_the_softcap, "shifts the scores below their softcap"),
        (masked_sink, "is not proved"),
        (probabilities_returned, "is used 2 times"),
        (dropped_out, "no dropout"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_is_left_alone_and_why(function, why, on_cpu):
    with fx_fusion.recording() as report:
        inputs = tensors()
        found = torch.compile(function, backend=rewriting_backend(), dynamic=False)(**inputs)
    if function is not dropped_out:
        torch.testing.assert_close(found, function(**inputs), rtol=1e-4, atol=1e-4)
    assert report.count("flex_attention") == 0
    assert why in reasons(report, "flex_attention") + reasons(report, "attention"), str(report)


def tiny(kind, **options):
    config = {
        "gpt_oss": lambda: transformers.GptOssConfig(num_local_experts=2, num_experts_per_tok=1, **options),
        "gemma2": lambda: transformers.Gemma2Config(query_pre_attn_scalar=16, **options),
    }[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 37, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_models_whose_attention_is_written_out(kind, checkpointed, on_cpu):
    """Both layers, one in a window: values, and the gradient of every parameter."""
    model = tiny(kind, **SIZES)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(1, 128, (2, 300))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    with fx_fusion.recording() as report:
        compiled = torch.compile(model, backend=rewriting_backend(), dynamic=False)
        found = _step(compiled, model, batch)
    assert report.count("flex_attention") == 2, str(report)
    expected = _step(model, model, batch)
    model.config._experts_implementation = "eager"  # torch has no grouped products in float64
    exact = _step(model.double(), model, batch)
    for name, value in found.items():
        allowed = 2 * (expected[name].double() - exact[name]).abs().max() + 1e-5 * exact[name].abs().max()
        assert (value.double() - exact[name]).abs().max() <= allowed, name


@pytest.mark.parametrize(
    ("kind", "checkpointed"),
    [("gpt_oss", False), ("gpt_oss", True), ("gemma2", True)],
    ids=["gpt_oss", "gpt_oss, checkpointed", "gemma2, checkpointed"],
)
def test_a_padded_batch(kind, checkpointed, on_cpu):
    """Padding in the first batch: one graph, for any padding. A query that sees nothing is as in eager, sink or not."""
    model = tiny(kind, **SIZES)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(1, 128, (2, 100))
    labels = ids.clone()
    labels[1, 60:] = -100
    with fx_fusion.recording() as report:
        compiled = torch.compile(model, backend=rewriting_backend(), dynamic=False)
        for padding in (slice(60, 100), slice(0, 40), slice(0, 100)):  # right, left, a sequence
            batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
            batch["attention_mask"][1, padding] = 0
            found = _step(compiled, model, batch)
            for name, value in _step(model, model, batch).items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert (len(report.graphs), report.count("flex_attention")) == (1, 2), str(report)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_lengths_that_change(kind):
    """As in training without packing, with FlexAttention's operator in the graph: two graphs for any length."""
    model = tiny(kind, **SIZES)
    with structures_on_cpu(op=block_sparse_attention), fx_fusion.recording() as report:
        compiled = torch.compile(model, backend=rewriting_backend())
        for length in (100, 130, 77):
            ids = torch.randint(1, 128, (2, length))
            batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
            found = _step(compiled, model, batch)
            for name, value in _step(model, model, batch).items():
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4 * value.abs().max().item())
    assert len(report.graphs) == 2
    assert report.count("flex_attention") == 4, str(report)


def _step(model, parameters, batch):
    parameters.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in parameters.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize(
    ("d", "seen", "trained", "kept"),
    [(256, "keys", True, True), (256, "causal", True, False), (256, "window", True, False), (256, "keys", False, False),
     (128, "keys", True, False)],
)  # fmt: skip
def test_wide_heads_under_a_mask_that_hides_little_are_kept(d, seen, trained, kept):
    """The backward at a head dim of 256 is slow: what is hidden has to make up for it."""
    found = []

    def function(query, key, value, shown):
        return written_out(query, key, value, mask=added(SEEN[seen](shown != 0)))

    def backend(gm, inputs):
        found.extend(flex_attention.find(Search(View(gm.graph))))
        return gm.forward

    inputs = {n: t.requires_grad_(trained) for n, t in tensors(h=1, g=1, d=d).items()}
    torch.compile(function, backend=backend)(**inputs, shown=torch.ones(2, S, dtype=torch.long))
    (match,) = found
    assert ("a head dim above 128" in (match.keep or "")) == kept
