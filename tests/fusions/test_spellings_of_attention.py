"""Attention as people write it out: einsum, baddbmm, one head of keys for all, a maximum that is taken off."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import reasons, rewritten

B, H, S, T, D = 2, 3, 6, 5, 4
generator = torch.Generator().manual_seed(0)
q = torch.randn(B, H, S, D, generator=generator)
k, v = (torch.randn(B, H, T, D, generator=generator) for _ in range(2))


SCALES, LOWEST = torch.rand(H, 1, 1, generator=generator) * 3, torch.finfo(torch.float32).min


def lower():
    """A causal mask that is added: later keys have the lowest number."""
    i, j = torch.arange(S)[:, None], torch.arange(T)[None]
    return torch.zeros(S, T).masked_fill(j > i, LOWEST)


def flat(t):
    return t.reshape(-1, *t.shape[-2:])


def exponentials(a, largest=lambda a: a.amax(-1, True)):
    return torch.exp(a - largest(a))


def normalized(e):
    return e / e.sum(-1, keepdim=True)


def positions_first(attend):
    """Operands as (b, s, h, d)."""
    return lambda q, k, v: attend(*(t.transpose(1, 2).contiguous() for t in (q, k, v)))


FIRES = {
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) / 2, -1), v
    ),
    "einsum_positions_first": positions_first(
        lambda q, k, v: torch.einsum("bhst,bthd->bshd", torch.softmax(torch.einsum("bshd,bthd->bhst", q, k) / 2, -1), v)
    ),
    "einsum_keys_first": lambda q, k, v: torch.einsum(
        "bhkd,bhqk->bhqd", v, torch.softmax(torch.einsum("bhkd,bhqd->bhqk", k, q) * 0.5, -1)
    ),
    "einsum_length_first": lambda q, k, v: torch.einsum(
        "bnij,jbnd->ibnd",
        torch.softmax(torch.einsum("ibnd,jbnd->bnij", *(t.permute(2, 0, 1, 3) for t in (q, k))) * 0.5, 3),
        v.permute(2, 0, 1, 3),
    ),
    "einsum_then_matmul": lambda q, k, v: torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) / 2, -1) @ v,
    "matmul_then_einsum": lambda q, k, v: torch.einsum("bhqk,bhkd->bqhd", torch.softmax(q @ k.mT / 2, -1), v),
    "alibi": lambda q, k, v: torch.bmm(
        torch.softmax(torch.baddbmm(-torch.arange(float(T)).expand(B * H, 1, T), flat(q), flat(k).mT, alpha=0.5), -1), flat(v)
    ),
    "baddbmm": lambda q, k, v: torch.bmm(
        torch.softmax(torch.baddbmm(torch.zeros(B * H, S, T), flat(q), flat(k).mT, beta=0, alpha=0.5), -1), flat(v)
    ),
    "baddbmm_of_garbage": lambda q, k, v: torch.bmm(
        torch.softmax(torch.baddbmm(torch.full((B * H, S, T), 7.0), flat(q), flat(k).mT, beta=0, alpha=0.5), -1), flat(v)
    ),
    "maximum_taken_off": lambda q, k, v: (lambda a: torch.softmax(a - a.max(-1, keepdim=True).values, -1))(q @ k.mT / 2) @ v,
    "amax_taken_off": lambda q, k, v: (lambda a: torch.softmax(a - a.amax(-1, True), -1))(q @ k.mT / 2) @ v,
    "scale_is_a_tensor": lambda q, k, v: torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(4.0)), -1) @ v,
    "scale_is_full": lambda q, k, v: torch.softmax(q @ k.mT / torch.full([], 2.0), -1) @ v,
    "maximum_detached": lambda q, k, v: (lambda a: torch.softmax(a - a.max(-1, keepdim=True)[0].detach(), -1))(q @ k.mT) @ v,
    "maximum_of_detached": lambda q, k, v: (lambda a: torch.softmax(a - a.detach().amax(-1, True), -1))(q @ k.mT) @ v,
    "softmax_written_out": lambda q, k, v: normalized(exponentials(q @ k.mT / 2)) @ v,
    "softmax_written_out_with_max": lambda q, k, v: normalized(exponentials(q @ k.mT, lambda a: a.max(-1, keepdim=True)[0])) @ v,
    "softmax_written_out_detached": lambda q, k, v: normalized(exponentials(q @ k.mT, lambda a: a.amax(-1, True).detach())) @ v,
    "softmax_written_out_with_a_mask": lambda q, k, v: normalized(
        exponentials((q @ k.mT).masked_fill(lower() < 0, -torch.inf))
    ) @ v,
    "einsum_of_a_list": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", [torch.softmax(torch.einsum("bhqd,bhkd->bhqk", [q, k]) / 2, -1), v]
    ),
    "einsum_with_dots": lambda q, k, v: torch.einsum(
        "...qk,...kd->...qd", torch.softmax(torch.einsum("...qd,...kd->...qk", q, k) / 2, -1), v
    ),
    "nothing_below_the_lowest": lambda q, k, v: torch.softmax(torch.max(q @ k.mT, torch.tensor(LOWEST)), -1) @ v,
    "clamped_at_the_lowest": lambda q, k, v: torch.softmax((q @ k.mT).clamp(min=LOWEST), -1) @ v,
    "scale_of_the_data": lambda q, k, v: torch.softmax(q @ k.mT / v.square().sum(), -1) @ v,
    "scale_a_head": lambda q, k, v: torch.softmax(
        F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * SCALES.clamp(max=4.6).exp(), -1
    ) @ v,
    "scale_a_query": lambda q, k, v: torch.softmax((q @ k.mT) * q.mean(-1, keepdim=True), -1) @ v,
    "grouped_for_the_softmax": lambda q, k, v: torch.bmm(
        torch.softmax(torch.bmm(flat(q), flat(k).mT).view(B, H, S, T), -1).view(B * H, S, T), flat(v)
    ),
    "grouped_for_a_mask": lambda q, k, v: torch.bmm(
        torch.softmax((torch.bmm(flat(q), flat(k).mT).view(B, H, S, T) + lower()).view(B * H, S, T), -1), flat(v)
    ),
    "grouped_behind_the_softmax": lambda q, k, v: torch.bmm(torch.softmax(q @ k.mT / 2, -1).flatten(0, 1), flat(v)),
    "grouped_by_unflatten": lambda q, k, v: torch.softmax(
        torch.bmm(flat(q), flat(k).mT).unflatten(0, (-1, H)).masked_fill(lower() < 0, -torch.inf), -1
    ) @ v,
    "five_dims": lambda q, k, v: torch.softmax(
        *[q.view(B, 1, H, 1, S, D).flatten(2, 3) @ k.view(B, 1, H, T, D).mT / 2], -1
    ) @ v.view(B, 1, H, T, D),
    "one_head_of_keys": lambda q, k, v: torch.softmax(q @ k[:, :1].mT / 2, -1) @ v[:, :1],
    "one_head_of_keys_einsum": lambda q, k, v: torch.softmax(q @ k[:, :1].mT / 2, -1) @ v,
}


STATIC_ONLY = {  # masks of another size than is known, and heads that are grouped in several ways
    "softmax_written_out_with_a_mask", "nothing_below_the_lowest", "clamped_at_the_lowest", "grouped_for_the_softmax",
    "grouped_for_a_mask", "grouped_behind_the_softmax", "grouped_by_unflatten",
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", FIRES)
def test_attention_fires_and_is_eagers(name, dynamic):
    leaves = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
    ours, report = rewritten(FIRES[name], *leaves[0], dynamic=dynamic)
    assert report.count("attention") == (not dynamic or name not in STATIC_ONLY), str(report)
    theirs = FIRES[name](*leaves[1])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert ours.stride() == theirs.stride()
    found, expected = (torch.autograd.grad(t.square().sum(), given) for t, given in zip((ours, theirs), leaves, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def other(q, k, v):
    return torch.softmax(torch.einsum("bhqd,bhkd->bhkq", q, k) / 2, -1)


NOT = {
    "softmax_over_queries": (lambda q, k, v: torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), 2) @ v, "dim 2"),
    "values_by_query": (lambda q, k, v: torch.einsum("bhqk,bhqd->bhkd", torch.softmax(q @ k.mT, -1), q), "expected a product"),
    "summed_over_heads": (
        lambda q, k, v: torch.einsum("bhqk,bhkd->bqd", torch.softmax(q @ k.mT, -1), v), "expected a product",
    ),
    "a_bias_of_a_float_range": (
        lambda q, k, v: torch.softmax(q @ k.mT + torch.linspace(0.0, 1.0, T), -1) @ v, "the mask is not proved",
    ),
    "maximum_over_queries": (
        lambda q, k, v: (lambda a: torch.softmax(a - a.amax(-2, True), -1))(q @ k.mT) @ v, "between the product",
    ),
    "maximum_of_another": (
        lambda q, k, v: (lambda a: torch.softmax(a - (a * 2).amax(-1, True), -1))(q @ k.mT) @ v, "between the product",
    ),
    "bias_of_five_dims": (
        lambda q, k, v: torch.softmax(q @ k.mT + torch.zeros(1, 1, H, S, T), -1)[0] @ v, "makes scores of shape",
    ),
    "bias_of_more_rows": (
        lambda q, k, v: torch.softmax(q[:1] @ k[:1].mT + torch.zeros(B, 1, S, T), -1) @ v, "makes scores of shape",
    ),
    "mask_scaled_away": (lambda q, k, v: torch.softmax((q @ k.mT + lower()) * 1e-38, -1) @ v, "is scaled to where"),
    "values_of_a_lower_rank": (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v[0, 0], "batch and heads"),
    "keys_of_a_lower_rank": (lambda q, k, v: torch.softmax(q @ k[0, 0].mT, -1) @ v, "batch and heads"),
    "scale_a_key": (lambda q, k, v: torch.softmax(q @ k.mT / v.square().sum(-1)[..., None, :], -1) @ v, "not one number for all"),
    "scaled_behind_a_mask": (
        lambda q, k, v: torch.softmax((q @ k.mT + lower()) * SCALES, -1) @ v, "is scaled with the scores",
    ),
    "filled_and_scaled": (
        lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(lower() < 0, -torch.inf) * SCALES, -1) @ v,
        "is scaled with the scores",
    ),
    "scale_that_is_written_to": (lambda q, k, v: written_scale_a_head(q, k, v), "which is written to"),
    "grouped_in_two_ways": (
        lambda q, k, v: torch.bmm(
            torch.softmax(torch.bmm(flat(q), flat(k).mT).view(B, H, S, T).exp().log().view(H, B, S, T), -1).view(-1, S, T), flat(v)
        ),
        "between the product",
    ),
    "two_numbers_of_heads": (
        lambda q, k, v: torch.bmm(
            torch.softmax(torch.bmm(flat(q), flat(k).mT).view(B, H, S, T).view(H, B, S, T), -1).view(-1, S, T), flat(v)
        ),
        "are grouped as",
    ),
    "the_keys_are_regrouped": (
        lambda q, k, v: torch.softmax((q @ k[:, :, :4].mT).view(B, H, 4, S), -1) @ q, "between the product",
    ),
    "clamped_higher": (lambda q, k, v: torch.softmax((q @ k.mT).clamp(min=-1.0), -1) @ v, "clamp is between"),
    "negative_alpha": (
        lambda q, k, v: torch.bmm(
            torch.softmax(torch.baddbmm(torch.zeros(B * H, S, T), flat(q), flat(k).mT, beta=0, alpha=-0.5), -1), flat(v)
        ),
        "scales the scores by -0.5",
    ),
    "exp_over_sum": (lambda q, k, v: (lambda a: a / a.sum(-1, keepdim=True))(torch.exp(q @ k.mT)) @ v, "write softmax"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT)
def test_what_is_no_attention_is_named(name):
    function, reason = NOT[name]
    result, report = rewritten(function, q, k, v)
    assert report.count("attention") == 0, str(report)
    assert reason in reasons(report, "attention"), str(report)
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["repeat", "expand"])
def test_one_head_for_all_is_grouped_heads(how):
    def function(q, k, v):
        one = [t[:, :1].repeat(1, H, 1, 1) if how == "repeat" else t[:, :1].expand(-1, H, -1, -1) for t in (k, v)]
        return F.scaled_dot_product_attention(q, *one)

    result, report = rewritten(function, q, k, v)
    report.assert_fused(repeat_kv=1)
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)


def test_repeats_of_several_heads_are_not_grouped_heads():
    """a b a b, not a a b b; and repeats of another dim."""

    def function(q, k, v):
        several = [torch.cat([t, t[:, :1]], 1)[:, :2].repeat(1, 2, 1, 1) for t in (k, v)]
        longer = [t[:, :1].repeat(1, 4, 2, 1) for t in (k, v)]
        wide = torch.cat([q, q[:, :1]], 1)
        return F.scaled_dot_product_attention(wide, *several), F.scaled_dot_product_attention(wide, *longer)

    result, report = rewritten(function, q, k, v)
    report.assert_fused(repeat_kv=0)
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)


def written_scale(q, k, v):
    scale = torch.tensor(2.0)
    scale.view(()).mul_(2)
    return torch.softmax(q @ k.mT / scale, -1) @ v


def written_scale_a_head(q, k, v):
    scale = SCALES * 1
    scores = q @ k.mT * scale
    result = torch.softmax(scores, -1) @ v
    scale.mul_(2)
    return result + scale.sum()


def written_fill(q, k, v):
    low = torch.full((), float("-inf"))
    low.zero_()
    return torch.softmax(torch.where(torch.ones(S, T, dtype=torch.bool).tril(), q @ k.mT, low), -1) @ v


def one_key_for_all_values(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k[:, :, :1]), -1), v)


def sum_of_others(q, k, v):
    e = exponentials(q @ k.mT)
    return e / (e * 2).sum(-1, keepdim=True) @ v


def sum_over_queries(q, k, v):
    e = exponentials(q @ k.mT)
    return e / e.sum(-2, keepdim=True) @ v


def sum_of_all_heads(q, k, v):
    e = exponentials(q @ k.mT)
    return e / e.sum((1, 3), keepdim=True) @ v


def written_exponentials(q, k, v):
    e = exponentials(q @ k.mT)
    total = e.sum(-1, keepdim=True)
    e.mul_(2)
    return e / total @ v


def exponentials_that_are_read(q, k, v):
    e = exponentials(q @ k.mT)
    return e / e.sum(-1, keepdim=True) @ v + e.sum()


def normalized_by_heads(q, k, v):
    """The sums have no dim for the keys, and there are as many queries as keys."""
    k = q
    e = exponentials(q @ k.mT)
    return e / e.sum(-1).unsqueeze(-2) @ k


def lse_of_shifted(q, k, v):
    """The logsumexp of scores less their maximum is not that of the scores."""
    s = q @ k.mT / 2
    s = s - s.amax(-1, True)
    return torch.softmax(s, -1) @ v * torch.sigmoid(torch.logsumexp(s, -1, True))


def lse_of_shifted_written_out(q, k, v):
    s = q @ k.mT / 2
    s = s - s.amax(-1, True).detach()
    return normalized(s.exp()) @ v * torch.sigmoid(torch.logsumexp(s, -1, True))


def rounded_in_between(q, k, v):
    s = q @ k.mT / 2
    return normalized((s - s.amax(-1, True)).bfloat16().float().exp()) @ v


def by_keyword(q, k, v):
    return F.scaled_dot_product_attention(q, torch.reshape(input=k, shape=k.shape), torch.flatten(input=v, start_dim=3))


@pytest.mark.parametrize("function", [
    written_scale, written_fill, one_key_for_all_values, by_keyword, sum_of_others, sum_over_queries, sum_of_all_heads,
    written_exponentials, exponentials_that_are_read, normalized_by_heads, lse_of_shifted, lse_of_shifted_written_out,
    rounded_in_between,
])  # fmt: skip
def test_what_is_not_what_it_seems(function):
    result, report = rewritten(function, q, k, v)
    assert report.count("attention") == 0, str(report)
    torch.testing.assert_close(result, function(q, k, v), rtol=1e-5, atol=1e-5)
