"""Norms, gates, rotations and embeddings as people write them, and what only looks like them."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import reasons, rewritten

D, V = 8, 33
generator = torch.Generator().manual_seed(0)
x, w, b = (torch.randn(*s, generator=generator) for s in ((2, 6, D), (D,), (D,)))
table, ids = torch.randn(V, D, generator=generator), torch.randint(0, V, (2, 6), generator=generator)
q = torch.randn(2, 3, 6, D, generator=generator)
cos, sin = (torch.randn(6, D // 2, generator=generator) for _ in range(2))
whole_cos, whole_sin = (torch.randn(6, D, generator=generator) for _ in range(2))


def pairs(q):
    return q.view(2, 3, 6, D // 2, 2).unbind(-1)


def halves(q):
    return q.view(2, 3, 6, 2, D // 2).unbind(-2)


def rolled(q):
    turned = q.roll(D // 2, -1)
    return q * whole_cos + torch.cat((-turned[..., : D // 2], turned[..., D // 2 :]), -1) * whole_sin


FIRES = {
    "einsum_of_squares": ("rms_norm", lambda x: x * torch.rsqrt(torch.einsum("bsd,bsd->bs", x, x)[..., None] / D + 1e-6) * w),
    "variance_and_mean": (
        "rms_norm",
        lambda x: x * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + x.mean(-1, keepdim=True) ** 2 + 1e-6) * w,
    ),
    "var_mean": (
        "layer_norm",
        lambda x: (lambda v, m: (x - m) * torch.rsqrt(v + 1e-5) * w + b)(*torch.var_mean(x, -1, correction=0, keepdim=True)),
    ),
    "native": ("layer_norm", lambda x: torch.native_layer_norm(x, (D,), w, b, 1e-5)[0]),
    "exp_silu": ("swiglu", lambda x: x / (1 + torch.exp(-x)) * (x + 1)),
    "exp_sigmoid": ("swish", lambda x: x * (1 / (1 + torch.exp(-x))) * b),
    "expit": ("swish", lambda x: x * torch.special.expit(x) * b),
    "pairs_unbound": (
        "rope",
        lambda q: (lambda a, c: torch.stack((a * cos - c * sin, a * sin + c * cos), -1).flatten(-2))(*pairs(q)),
    ),
    "halves_unbound": (
        "rope",
        lambda q: (lambda a, c: torch.stack((a * cos - c * sin, a * sin + c * cos), -2).flatten(-2))(*halves(q)),
    ),
    "rolled": ("rope", rolled),
    "ids_as_index": ("embedding", lambda t: t[ids] * 2),
    "ids_below_zero": ("embedding", lambda t: t[ids - 7] * 2),
    "index_select": ("embedding", lambda t: torch.index_select(t, 0, ids.view(-1)).view(2, 6, D)),
    "one_hot": ("embedding", lambda t: F.one_hot(ids, V).float() @ t),
}  # fmt: skip


def operand(fusion):
    given = {"embedding": table, "rope": q}.get(fusion, x).clone()
    return torch.nn.Parameter(given) if fusion == "embedding" else given.requires_grad_()


@pytest.mark.parametrize("name", FIRES)
def test_a_spelling_fires_and_is_eagers(name):
    fusion, function = FIRES[name]
    leaves = [operand(fusion) for _ in range(2)]
    ours, report = rewritten(function, leaves[0])
    assert report.count(fusion) == 1, str(report)
    theirs = function(leaves[1])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    found, expected = (torch.autograd.grad(t.square().sum(), leaf) for t, leaf in zip((ours, theirs), leaves, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def around_the_end(q):
    turned = q.roll(1, -1)
    return q * whole_cos + torch.cat((-turned[..., : D // 2], turned[..., D // 2 :]), -1) * whole_sin


def rolled_over_positions(q):
    turned = q.roll(D // 2, -2)
    return q * whole_cos + torch.cat((-turned[..., : D // 2], turned[..., D // 2 :]), -1) * whole_sin


NOT = {
    "unbiased_variance": (
        "rms_norm", lambda x: x * torch.rsqrt(x.var(-1, keepdim=True) + x.mean(-1, keepdim=True) ** 2 + 1e-6) * w, "",
    ),
    "einsum_of_two": ("rms_norm", lambda x: x * torch.rsqrt(torch.einsum("bsd,bsd->bs", x, x + b)[..., None] / D + 9) * w, ""),
    "statistics_of_native": ("layer_norm", lambda x: sum(torch.native_layer_norm(x, (D,), w, b, 1e-5)[:2]), "also used"),
    "exp_of_another": ("swiglu", lambda x: x / (1 + torch.exp(-x * 2)) * (x + 1), ""),
    "exp_plus_two": ("swiglu", lambda x: x / (2 + torch.exp(-x)) * (x + 1), ""),
    "around_the_end": ("rope", around_the_end, ""),
    "rolled_over_positions": ("rope", rolled_over_positions, ""),
    "columns_as_index": ("embedding", lambda t: t[:, ids[0] % D], ""),
    "computed_table": ("embedding", lambda t: (t * 2)[ids], ""),
    "normalize": ("rms_norm", lambda x: F.normalize(x, dim=-1) * math.sqrt(D) * w, "write F.rms_norm"),
    "eps_outside": ("rms_norm", lambda x: x / (x.norm(dim=-1, keepdim=True) / D**0.5 + 1e-6) * w, "outside of the root"),
    "eps_beside_std": (
        "layer_norm", lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) * w + b, "write F.layer_norm",
    ),
    "two_dims": ("layer_norm", lambda x: F.layer_norm(x, (6, D)), "the last 2 dims"),
    "bag": ("embedding", lambda t: F.embedding_bag(ids, t), "embedding_bag"),
    "one_hot_of_a_product": ("embedding", lambda t: F.one_hot(ids, V).float() @ (t * 2), "write F.embedding"),
    "one_hot_of_other_classes": (
        "embedding", lambda t: torch.einsum("tv,vd->td", F.one_hot(ids[0] * 0, 1).float(), t), "",
    ),
    "no_dims": ("layer_norm", lambda x: sum(torch.var_mean(x, [], correction=0, keepdim=True)), ""),
    "heads_by_index": (
        "repeat_kv", lambda q: F.scaled_dot_product_attention(q, *(q[:, torch.tensor([0, 0, 1])],) * 2), "tensor of indices",
    ),
    "matrices": (
        "rope",
        lambda q: (lambda z, f: (f[..., 0] * z[..., 0] + f[..., 1] * z[..., 1]).reshape(q.shape))(
            q.reshape(2, 3, 6, -1, 1, 2), torch.stack([cos, -sin, sin, cos], -1).view(6, -1, 2, 2)
        ),
        "matrices of cos and sin",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT)
def test_what_only_looks_like_it_stays_and_is_named(name):
    fusion, function, reason = NOT[name]
    leaf = operand(fusion if fusion != "repeat_kv" else "rope")
    result, report = rewritten(function, leaf)
    assert report.count(fusion) == 0, str(report)
    assert reason in reasons(report, fusion), str(report)
    torch.testing.assert_close(result, function(leaf), rtol=1e-5, atol=1e-5)


def test_nothing_is_said_twice_of_one_place():
    """F.normalize inside of what another fusion takes is no news."""

    def function(x):
        return F.layer_norm(F.normalize(x, dim=-1) * D**0.5, (D,), w, b)

    _, report = rewritten(function, x.clone().requires_grad_())
    said = [(s.fusion, s.status) for s in report.sites]
    assert said == [("layer_norm", "fused"), ("rms_norm", "near")], said
