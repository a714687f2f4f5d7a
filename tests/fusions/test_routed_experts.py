"""Experts that are computed for every token and multiplied by 0: Llama 4, and what is not exactly 0."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.patterns.routed_experts import every_expert
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import reasons, rewritten, statuses

T, E, H, INNER = 11, 4, 8, 16


def inputs(dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    shapes = {"x": (T, H), "logits": (T, E), "up": (E, H, 2 * INNER), "down": (E, INNER, H)}
    return {name: torch.randn(shape, generator=draw).to(dtype) / 2 for name, shape in shapes.items()}


def written(x, logits, up, down, *, least=-float("inf"), squash=torch.sigmoid, k=1, gate=F.silu, late=lambda s: s, bias=None,
            ids=lambda i: i, rows=lambda r: r, total=lambda y: y.sum(dim=0)):  # fmt: skip
    """As transformers writes it, with one thing changed."""
    values, at = torch.topk(logits, k, dim=1)
    scores = torch.full_like(logits, least).scatter_(1, ids(at), values)
    scores = late(squash(scores.float()).to(x.dtype))
    routed = rows(x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1))
    h = torch.bmm(routed.view(E, -1, H), up)
    h = h if bias is None else h + bias
    first, second = h.chunk(2, dim=-1)
    y = torch.bmm(second * gate(first), down).view(-1, H)
    return total(y.reshape(E, -1, H))


def _zeroed(scores):
    scores[0] = 0.5
    return scores


def _no_grad(scores):
    with torch.no_grad():
        return torch.sigmoid(scores)


LEFT = {
    "a least score": {"least": -5.0},
    "a softmax": {"squash": lambda s: s.softmax(-1)},
    "sigmoid behind an offset": {"squash": lambda s: torch.sigmoid(s) + 0.1},
    "a bias": {"bias": 0.5},
    "exponential": {"gate": torch.exp},
    "scores that are written": {"late": _zeroed},
    "scores without a gradient": {"squash": _no_grad},
    "scores scaled": {"late": lambda s: s * 2},
    "other experts": {"ids": lambda i: (i + 1) % E},
    "rows that are written": {"rows": lambda r: r.add_(0.1)},
    "a mean": {"total": lambda y: y.mean(dim=0)},
    "a sum over tokens": {"total": lambda y: y.sum(dim=1)},
    "three of four": {"k": 3},
}


@pytest.mark.parametrize("name", LEFT)
def test_is_left_alone(name):
    given = inputs()
    y, report = rewritten(lambda **t: written(**t, **LEFT[name]), **given)
    assert "fused" not in statuses(report, "routed_experts")
    torch.testing.assert_close(y, written(**given, **LEFT[name]))


def test_most_of_the_experts_are_declined():
    _, report = rewritten(lambda **t: written(**t, k=3), **inputs())
    assert "3 of 4 experts are chosen" in reasons(report, "routed_experts")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {**t, "up": t["up"].repeat(1, 1, 2)[..., ::2]}, "have gaps"),
        (
            lambda t: {**t, "down": t["down"][..., :6].clone(), "up": t["up"][:, :6].clone(), "x": t["x"][:, :6].clone()},
            "multiples of 16 bytes",
        ),
    ],
)
def test_what_grouped_products_do_not_take_is_declined(change, reason):
    given = change(inputs())
    y, report = rewritten(lambda **t: every_expert(**t, k=1), **given)
    assert reason in reasons(report, "routed_experts")
    torch.testing.assert_close(y, every_expert(**given, k=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2])
def test_only_the_chosen_experts_are_computed(k, dtype):
    given, function = inputs(dtype), lambda **t: written(**t, k=k)
    with fx_fusion.recording() as report:
        ours = run(torch.compile(function, backend=rewriting_backend()), given)
    report.assert_fused(routed_experts=1)
    assert "bmm" not in report.graphs[0].after
    name, excess = worst_excess(ours, run(function, given), run_oracle(function, given), dtype)
    assert excess <= 1, f"{name} uses {excess:.2f} times the allowed error"
    reference = run(lambda **t: every_expert(**t, k=k), given)
    torch.testing.assert_close(ours.values["out0"], reference.values["out0"], rtol=0.05, atol=0.05)


def test_ids_and_scores_that_are_returned():
    def layer(x, logits, up, down):
        values, at = torch.topk(logits, 1, dim=1)
        scores = torch.full_like(logits, -float("inf")).scatter_(1, at, values).float().sigmoid().to(x.dtype)
        routed = x.repeat(E, 1) * scores.t().reshape(-1, 1)
        first, second = torch.bmm(routed.view(E, -1, H), up).chunk(2, dim=-1)
        return torch.bmm(second * F.silu(first), down).sum(0), scores, at

    given = inputs()
    found, report = rewritten(layer, **given)
    report.assert_fused(routed_experts=1)
    torch.testing.assert_close(found, layer(**given))


def test_llama_4():
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(1, 64, (2, 12))
    with fx_fusion.recording() as report:
        loss = torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids).loss
        loss.backward()
    report.assert_fused(routed_experts=2)
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5)
