"""Test what is an RMSNorm and what only looks like one: one difference a test, and the reason that the report gives."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import reasons, rewritten, statuses

N = 24
x = torch.randn(3, 5, N)
w = torch.randn(N)
EPS = 1e-6


def statistic(x):
    return x.pow(2).mean(-1, keepdim=True)


EQUIVALENT = {
    "pow_method": lambda x: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)),
    "operator": lambda x: (x * torch.rsqrt((x**2).mean(-1, keepdim=True) + EPS)) * w,
    "product": lambda x: torch.mul(w, torch.rsqrt(EPS + torch.mean(x * x, dim=-1, keepdim=True)) * x),
    "square": lambda x: w * x.mul(torch.square(x).mean(dim=(-1,), keepdim=True).add(EPS).rsqrt()),
    "one_over_sqrt": lambda x: w * (x * (1 / torch.sqrt(statistic(x) + EPS))),
    "power_minus_half": lambda x: w * (x * (statistic(x) + EPS) ** -0.5),
    "divided_by_sqrt": lambda x: w * (x / torch.sqrt(statistic(x) + EPS)),
    "reciprocal": lambda x: w * (x * (statistic(x) + EPS).sqrt().reciprocal()),
    "dim_from_the_front": lambda x: w * (x * torch.rsqrt(x.pow(2).mean(x.dim() - 1, keepdim=True) + EPS)),
    "weight_first": lambda x: (x * w) * torch.rsqrt(statistic(x) + EPS),
    "weight_into_rstd": lambda x: x * (torch.rsqrt(statistic(x) + EPS) * w),
    "vector_norm": lambda x: w * (x * torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).pow(2) / N + EPS)),
    "unsqueezed": lambda x: w * (x * torch.rsqrt(x.pow(2).mean(-1).unsqueeze(-1) + EPS)),
    "sum_over_n": lambda x: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / N + EPS)),
    "sum_over_a_float": lambda x: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / float(N) + EPS)),
    "keywords": lambda x: w * (x * torch.rsqrt(torch.mean(input=x.pow(2), axis=-1, keepdim=True) + EPS)),
    "library": lambda x: F.rms_norm(x, (N,), w, EPS),
    "library_default_eps": lambda x: F.rms_norm(x, (N,), w),
    "no_op_casts": lambda x: (
        w * (x.float() * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS)).type_as(x)
    ),
    "no_op_views": lambda x: w * (x.contiguous() * torch.rsqrt(statistic(x.view(x.shape)[:, :]) + EPS)).reshape(x.shape),
    "in_place_on_a_dead_value": lambda x: w * (x * statistic(x).add_(EPS).rsqrt_()),
    "no_weight": lambda x: x * torch.rsqrt(statistic(x) + EPS),
    "one_plus_weight": lambda x: (x * torch.rsqrt(statistic(x) + EPS)) * (1.0 + w),
}


@pytest.mark.parametrize("name", EQUIVALENT)
def test_every_spelling_is_the_norm(name):
    result, report = rewritten(EQUIVALENT[name], x)
    report.assert_fused(rms_norm=1)
    torch.testing.assert_close(result, EQUIVALENT[name](x), rtol=2e-6, atol=2e-6)
    site = next(s for s in report.sites if s.fusion == "rms_norm")
    assert site.shapes["x"] == f"float32[3, 5, {N}]"
    if name not in ("no_weight",):
        assert site.shapes["weight"] == f"float32[{N}]"


@pytest.mark.parametrize("name", EQUIVALENT)
def test_every_spelling_behind_a_residual_add(name):
    def block(x, residual):
        h = x + residual
        return EQUIVALENT[name](h), h * 2

    residual = torch.randn_like(x)
    result, report = rewritten(block, x, residual)
    report.assert_fused(add_rms_norm=1, rms_norm=0)
    torch.testing.assert_close(result, block(x, residual), rtol=2e-6, atol=2e-6)


def test_eps_as_a_tensor():
    eps = torch.tensor(EPS)
    _, report = rewritten(lambda x: w * (x * torch.rsqrt(statistic(x) + eps)), x)
    assert report.count("rms_norm") == 0
    assert "not a number" in reasons(report, "rms_norm")


def in_place_between(x):
    x = x + 0
    rstd = torch.rsqrt(statistic(x) + EPS)
    x.add_(1)
    return w * (x * rstd)


def escaping_statistic(x):
    rstd = torch.rsqrt(statistic(x) + EPS)
    return w * (x * rstd), rstd


def escaping_to_another_op(x):
    normed = x * torch.rsqrt(statistic(x) + EPS)
    return w * normed + normed.sum()


def narrowing_cast(x):
    return w * (x * torch.rsqrt(x.bfloat16().float().pow(2).mean(-1, keepdim=True) + EPS))


def integer_cast(x):
    return w * (x * torch.rsqrt(x.int().float().pow(2).mean(-1, keepdim=True) + EPS))


def two_grad_modes(x):
    with torch.no_grad():
        rstd = torch.rsqrt(statistic(x) + EPS)
    return w * (x * rstd)


LOOKALIKES = {
    "mean_over_rows": (lambda x: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + EPS)), "over dim -2"),
    "mean_over_two_dims": (lambda x: w * (x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + EPS)), "over"),
    "sum": (lambda x: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)), "the squares are added up"),
    "cube": (
        lambda x: w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS)),
        "the mean is of another power",
    ),
    "eps_outside": (lambda x: w * (x * (torch.rsqrt(statistic(x)) + EPS)), None),
    "minus_eps": (lambda x: w * (x * torch.rsqrt(statistic(x) - EPS)), "expected add, found sub"),
    "another_tensor": (lambda x: w * (x * torch.rsqrt(statistic(x + 1) + EPS)), "in another"),
    "two_plus_weight": (lambda x: (x * torch.rsqrt(statistic(x) + EPS)) * (2.0 + w.view(1, 1, N)), ""),
    "weight_is_an_activation": (lambda x: x.sigmoid() * (x * torch.rsqrt(statistic(x) + EPS)), ""),
    "weight_is_one_number": (lambda x: w[0] * (x * torch.rsqrt(statistic(x) + EPS)), ""),
    "weight_a_row": (lambda x: w[:5, None] * (x * torch.rsqrt(statistic(x) + EPS)), ""),
    "in_place_between": (in_place_between, "x is add_ in one place and x in another"),
    "escaping_statistic": (escaping_statistic, "also"),
    "narrowing_cast": (narrowing_cast, "a cast rounds x to bfloat16 in one place"),
    "integer_cast": (integer_cast, "x is l_x_ in one place and float_1 in another"),
    "two_grad_modes": (two_grad_modes, "grad-mode or autocast region"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_lookalike_is_left_alone_or_its_weight_is(name):
    function, fragment = LOOKALIKES[name]
    result, report = rewritten(function, x)
    expected = function(x)
    torch.testing.assert_close(result, expected, rtol=2e-6, atol=2e-6)
    if fragment != "":
        assert report.count("rms_norm") == 0, str(report)
        assert (fragment or "") in reasons(report, "rms_norm")
    else:  # what is normalized is an RMSNorm without weight; the factor is not its weight
        assert all("weight" not in s.shapes for s in report.sites if s.status == "fused")


def test_an_inner_value_used_outside_keeps_only_the_part_that_is_whole():
    result, report = rewritten(escaping_to_another_op, x)
    torch.testing.assert_close(result, escaping_to_another_op(x))
    report.assert_fused(rms_norm=1)  # x * rstd, with both of its users; the weight stays outside
    assert "weight" not in next(s for s in report.sites if s.status == "fused").shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_cast_order_is_part_of_the_pattern(dtype):
    low, weight = x.to(dtype), w.to(dtype)

    def llama(x):
        return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)

    def olmo(x):
        return (weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS))).to(dtype)

    def t5(x):
        return weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)

    def no_upcast(x):
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))

    for function in (llama, olmo, t5):
        result, report = rewritten(function, low)
        report.assert_fused(rms_norm=1)
        torch.testing.assert_close(result, function(low), rtol=0, atol=0)
    result, report = rewritten(no_upcast, low)
    assert statuses(report, "rms_norm") == ["declined"]
    assert f"is computed in {str(dtype).removeprefix('torch.')}; the kernel computes it in float32" in reasons(
        report, "rms_norm"
    )


def test_float64_is_declined():
    result, report = rewritten(EQUIVALENT["pow_method"], x.double())
    assert report.count("rms_norm") == 0
    result, report = rewritten(lambda x: w * (x.double() * torch.rsqrt(statistic(x.double()) + EPS)).float(), x)
    assert report.count("rms_norm") == 0
    assert "float64" in reasons(report, "rms_norm")


def test_symbolic_sizes_match_without_guards():
    result, report = rewritten(EQUIVALENT["pow_method"], x, dynamic=True)
    report.assert_fused(rms_norm=1)
    compiled = torch.compile(
        EQUIVALENT["pow_method"], backend="fx_fusion", dynamic=True, options={"select": "always", "strict": True}
    )
    torch._dynamo.utils.counters.clear()
    counter = torch._dynamo.utils.counters["stats"]
    for rows in (3, 4, 9):
        rows_x = torch.randn(rows, 2, N)
        torch.testing.assert_close(compiled(rows_x), EQUIVALENT["pow_method"](rows_x), rtol=2e-6, atol=2e-6)
    assert counter["unique_graphs"] <= 2


def test_an_odd_mixture_of_users_and_nodes_is_never_wrong():
    """Random compositions of norm pieces: whatever fires, the numbers stay."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    pieces = (
        lambda h: h * torch.rsqrt(statistic(h) + EPS), lambda h: h + x, lambda h: w * h, lambda h: h.bfloat16().float(),
        lambda h: h / torch.sqrt(statistic(h) + EPS), lambda h: F.silu(h) * h, lambda h: h.add(h), lambda h: (1 + w) * h,
        lambda h: h.clone().mul_(2), lambda h: h * torch.sigmoid(h),
    )  # fmt: skip

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=5), st.booleans())
    def check(order, keep):
        def function(h):
            seen = []
            for i in order:
                h = pieces[i](h)
                seen.append(h)
            return (h, sum(seen)) if keep else h

        torch._dynamo.reset()
        result, _ = rewritten(function, x)
        # Where the model rounds to bfloat16, a difference in the last bit of float32 may round the other way: one step.
        step = torch.finfo(torch.bfloat16).eps if 3 in order else 1e-5
        torch.testing.assert_close(result, function(x), rtol=step, atol=step)

    check()


def test_a_residual_that_is_written_to_after_its_norm():
    """Two casts of one tensor are one value, although the tensor changes later."""

    def function(x, w):
        h = x * 1.0
        y = (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w
        h.add_(1)
        return y, h

    x, w = torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()
    found, report = rewritten(function, x, w)
    torch.testing.assert_close(found, function(x, w))
    report.assert_fused(rms_norm=1)
