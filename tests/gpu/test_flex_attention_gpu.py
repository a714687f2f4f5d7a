"""Attention written out with a window, a softcap or a sink, on a GPU: Inductor's kernels, forward and backward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fx_fusion
from fx_fusion.testing import run, run_oracle, worst_excess

pytestmark = pytest.mark.gpu


def attend(query, key, value, sink, shown, *, window, softcap, with_sink, filled=False):
    groups, s = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (t[:, :, None].expand(-1, -1, groups, -1, -1).reshape(t.shape[0], -1, *t.shape[2:]) for t in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * 0.2
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(s, device=query.device)
    distance = at[:, None] - at[None, :]
    visible = (distance >= 0) & (distance < window)
    if shown is not None:
        visible = visible & (shown[:, None, None, :] != 0)
    lowest = torch.finfo(query.dtype).min
    if filled:
        scores = scores.masked_fill(~visible, lowest)
    else:
        scores = scores + torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill(~visible, lowest)
    if with_sink:
        scores = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(query.shape[0], -1, s, -1)], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if with_sink:
        probabilities = probabilities[..., :-1]
    return torch.matmul(probabilities.to(value.dtype), value).transpose(1, 2).contiguous()


def inputs_of(s, d, dtype, padded):
    made = {n: torch.randn(2, h, s, d, device="cuda", dtype=dtype) for n, h in (("query", 8), ("key", 2), ("value", 2))}
    made["sink"] = torch.randn(8, device="cuda", dtype=dtype)
    if padded:
        made["shown"] = torch.ones(2, s, dtype=torch.long, device="cuda")
        made["shown"][1, {"left": slice(0, s // 3), "right": slice(s - s // 3, s), "a row": slice(None)}[padded]] = 0
    return made


def check(s, d, dtype, how, padded=None):
    inputs = inputs_of(s, d, dtype, padded)
    if not how["with_sink"]:
        del inputs["sink"]

    def function(query, key, value, sink=None, shown=None):
        return attend(query, key, value, sink, shown, **how)

    options = {"select": "always", "strict": True, "speculate": False}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend="fx_fusion", options=options, dynamic=False), inputs)
    assert report.count("flex_attention") == 1, str(report)
    name, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), dtype)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


@pytest.mark.parametrize("s", [128, 300, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
def test_values_and_gradients(softcap, with_sink, dtype, s):
    if softcap is None and not with_sink:
        pytest.skip("a window alone: below")
    for window in (s, 100):
        check(s, 64, dtype, {"window": window, "softcap": softcap, "with_sink": with_sink})


@pytest.mark.parametrize("d", [16, 128, 256])
def test_head_dims(d):
    for how in (
        {"window": 100, "softcap": None, "with_sink": False},
        {"window": 100, "softcap": 5.0, "with_sink": False},
        {"window": 100, "softcap": None, "with_sink": True},
    ):
        check(515, d, torch.bfloat16, how)


@pytest.mark.parametrize("padded", ["left", "right", "a row"])
def test_padding_beside_a_sink(padded):
    check(515, 64, torch.bfloat16, {"window": 100, "softcap": None, "with_sink": True}, padded)


PADDED = ["left", "right", "a row"]


@pytest.mark.parametrize("window", [100, 515])
@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("filled", [False, True], ids=["added", "filled"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
def test_rows_that_see_nothing(softcap, filled, padded, window):
    """Equal probabilities for all keys; a gradient of the scores where a number was added to them."""
    check(515, 64, torch.bfloat16, {"window": window, "softcap": softcap, "with_sink": False, "filled": filled}, padded)


@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("hide", ["added", "filled", "without a bias"])
def test_rows_that_see_nothing_in_calls(hide, padded):
    """Of scaled_dot_product_attention, with a learned bias and without: as its formula has it (PyTorch's fused kernels differ
    among themselves there)."""
    fusion = "block_sparse_attention" if hide == "without a bias" else "biased_attention"

    def function(query, key, value, shown, bias):
        visible = (shown != 0)[:, None, None, :].expand(2, 1, 515, 515)
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros(visible.shape, dtype=query.dtype, device="cuda").masked_fill(~visible, lowest)
        if hide != "without a bias":
            mask = bias + mask if hide == "added" else torch.where(visible, bias, lowest).contiguous()
        for _ in range(2):
            query = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2)
        return query

    inputs = {**inputs_of(515, 64, torch.bfloat16, padded), "bias": torch.randn(1, 8, 515, 515, device="cuda").bfloat16()}
    del inputs["sink"]
    inputs.update({n: torch.randn_like(inputs["query"]) for n in ("key", "value")})
    options = {"select": "always", "strict": True, "speculate": False}
    with fx_fusion.recording() as report, sdpa_kernel(SDPBackend.MATH):
        fused = run(torch.compile(function, backend="fx_fusion", options=options, dynamic=False), inputs)
        assert report.count(fusion) == 2, str(report)
        name, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.bfloat16)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


@pytest.mark.parametrize("s", [128, 515])
def test_the_lse_of_the_scores(s):
    """As Granite with windows writes its sink."""

    def function(query, key, value, sink):
        key, value = (t.repeat_interleave(4, dim=1) for t in (key, value))
        hidden = ~torch.ones(s, s, dtype=torch.bool, device="cuda").tril()
        scores = (torch.matmul(query, key.transpose(2, 3)) * 0.2).masked_fill(hidden, float("-inf"))
        scale = (torch.logsumexp(scores, -1) - sink.view(1, -1, 1)).float().sigmoid()
        out = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype), value)
        return out * scale.unsqueeze(-1).to(out.dtype)

    inputs = inputs_of(s, 64, torch.bfloat16, None)
    options = {"select": "always", "strict": True, "speculate": False}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend="fx_fusion", options=options, dynamic=False), inputs)
    assert report.count("flex_attention") == 1, str(report)
    name, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.bfloat16)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


@pytest.mark.parametrize("masked", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("s", "shape"), [(300, (300, 300, 8)), (515, (515, 515, 8)), (515, (8, 515, 515))], ids=str)
def test_a_learned_bias(s, shape, masked):
    """Its gradient, a sum over all sequences, too; with the heads last, as T5 looks it up."""

    def function(query, key, value, bias):
        bias = bias.permute(2, 0, 1)[None] if bias.shape[0] == s else bias
        at = torch.arange(s, device="cuda")
        if masked:
            bias = torch.where(at[:, None] >= at[None, :], bias, torch.finfo(bias.dtype).min).contiguous()
        for _ in range(2):
            query = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=0.2)
        return query

    inputs = {n: torch.randn(2, 8, s, 64, device="cuda", dtype=torch.bfloat16) for n in ("query", "key", "value")}
    inputs["bias"] = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    options = {"select": "always", "strict": True}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend="fx_fusion", options=options, dynamic=False), inputs)
    assert report.count("biased_attention") == 2, str(report)
    name, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.bfloat16)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_an_evaluation_of_padded_batches(left):
    """Without a gradient nothing pins how the lists of blocks lie in memory but the op that makes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda().bfloat16().eval()
    ids = torch.randint(0, 512, (4, 2048), device="cuda")
    mask = torch.ones_like(ids)
    for row, length in enumerate((2048, 1500, 700, 131)):
        mask[row, slice(0, 2048 - length) if left else slice(length, None)] = 0
    compiled = torch.compile(model, backend="fx_fusion", options={"select": "always"})
    with torch.no_grad(), fx_fusion.recording() as report:
        found = compiled(input_ids=ids, attention_mask=mask).logits
        expected = model(input_ids=ids, attention_mask=mask).logits
    assert report.count("block_sparse_attention") == 2, str(report)
    exact = model.double()(input_ids=ids, attention_mask=mask).logits
    shown = mask.bool()
    errors = [(logits[shown].double() - exact[shown]).abs().max() for logits in (found, expected)]
    assert errors[0] <= 2 * errors[1], errors
