"""Rotations as public models write them: what fuses, and what only looks like a rotation."""

import pytest
import torch

import fx_fusion
from fx_fusion.testing import Run, rewriting_backend, worst_excess
from tests.helpers import reasons, rewritten, statuses

B, S, H, D = 2, 5, 3, 8
HALF = D // 2
generator = torch.Generator().manual_seed(0)
x = torch.randn(B, S, H, D, generator=generator)
angles = torch.outer(torch.arange(S).float(), 1.0 / 100 ** (torch.arange(0, D, 2) / D))
table = torch.stack([angles.cos(), angles.sin()], -1).view(1, S, 1, HALF, 2)
cos, sin = table[..., 0].clone(), table[..., 1].clone()


def of_columns(first, second, c, s):
    """Return the rotated pairs side by side, as gpt-fast and torchtune do."""
    return torch.stack([first * c - second * s, second * c + first * s], -1).flatten(3)


def as_pairs(x):
    return x.float().reshape(*x.shape[:-1], -1, 2)


def gpt_fast(x, table):
    """Index every operand where it is used: `apply_rotary_emb` of gpt-fast and torchtune."""
    pairs = as_pairs(x)
    y = torch.stack(
        [
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
        ],
        -1,
    )
    return y.flatten(3).type_as(x)


def of_every_other_column(x, table):
    return of_columns(x[..., 0::2], x[..., 1::2], torch.select(table, -1, 0), table.narrow(-1, 1, 1).squeeze(-1))


def of_indices(p, q, c, s):
    """Return a function that reads these columns: the first and second member of a pair, cos and sin."""
    return lambda x, table: of_columns(as_pairs(x)[..., p], as_pairs(x)[..., q], table[..., c], table[..., s]).type_as(x)


def turned_back(x, cos, sin):
    """Rotate by the negative angle, as modded-nanogpt does and an older nanochat."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos], -1)


def turned_back_by_difference(x, cos, sin):
    x1, x2 = x[..., :HALF], x[..., HALF:]
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1)


def turned_back_by_negative_members(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - (-x2) * sin, -(sin * x1) + x2 * cos], -1)


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat([-x2, x1], -1)


def nanochat(x, cos, sin):
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    y1 = x1 * cos + x2 * sin
    y2 = x1 * (-sin) + x2 * cos
    return torch.cat([y1, y2], 3).to(x.dtype)


def modded_nanogpt(x, cos, sin):
    x1, x2 = (x if x.dtype == torch.float64 else x.to(dtype=torch.float32)).chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos), 3).type_as(x)


def full(table):
    return torch.cat([table, table], -1)


def full_turned_back(x, cos, sin):
    return x * full(cos) - rotate_half(x) * full(sin)


def full_turned_back_by_a_negative_sine(x, cos, sin):
    return x * full(cos) + rotate_half(x) * -full(sin)


def of_addcmul(x, cos, sin):
    return torch.addcmul(x * full(cos), rotate_half(x), full(sin))


def of_addcmul_by_halves(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return torch.cat([torch.addcmul(x1 * cos, x2, sin, value=-1), (x2 * cos).addcmul(x1, sin)], -1)


def rolled(x, cos, sin):
    return x * full(cos) + x.roll(D // 2, -1) * torch.cat([-sin, sin], -1)


def rolled_with_constant_signs(x, cos, sin):
    return x * full(cos) + torch.roll(x, shifts=(-HALF,), dims=(3,)) * (full(sin) * SIGNS)


def swapped_by_cat(x, cos, sin):
    return x * full(cos) + torch.cat([x[..., HALF:], x[..., :HALF]], -1) * torch.cat([-sin, sin], -1)


SIGNS = torch.tensor([-1.0] * HALF + [1.0] * HALF)
FUSED = {
    **{
        f.__name__: (f, cos, sin)
        for f in (
            nanochat, modded_nanogpt, turned_back, turned_back_by_difference, turned_back_by_negative_members, of_addcmul, of_addcmul_by_halves, rolled,
            rolled_with_constant_signs, swapped_by_cat, full_turned_back, full_turned_back_by_a_negative_sine,
        )
    },
    "gpt_fast": (gpt_fast, table),
    "of_every_other_column": (of_every_other_column, table),
    "indices": (of_indices(0, 1, 0, 1), table),
    "indices_from_the_end": (of_indices(-2, -1, -2, -1), table),
}


def assert_fused_and_accurate(function, dtype, *tables, fusion="rope"):
    """Assert that the function is one site of the fusion, and that its result and gradient are eager's by the accuracy rule."""
    leaves = [x.detach().to(dtype).requires_grad_() for _ in range(2)]
    result, report = rewritten(function, leaves[0], *tables)
    report.assert_fused(**{fusion: 1})
    expected = function(leaves[1], *tables)
    assert (result.dtype, result.shape, result.stride()) == (expected.dtype, expected.shape, expected.stride())
    leaves.append(x.detach().to(dtype).double().requires_grad_())
    exact = function(leaves[2], *(t.to(torch.complex128 if t.is_complex() else torch.float64) for t in tables))
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    runs = []
    for out, leaf in zip((result, expected, exact), leaves, strict=True):
        out.backward(weights.to(out.dtype))
        runs.append(Run({"y": out.detach(), "dx": leaf.grad}))
    worst, used = worst_excess(*runs, dtype)
    assert used <= 1, (worst, used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_rope_spelling_of_a_model_is_fused(name, dtype):
    function, *tables = FUSED[name]
    assert_fused_and_accurate(function, dtype, *tables)


@pytest.mark.parametrize("function", [turned_back, rolled], ids=lambda f: f.__name__)
def test_rope_queries_and_keys_are_one_call(function):
    def both(x, y, cos, sin):
        return function(x, cos, sin), function(y, cos, sin)

    keys = x[:, :, :1] * 2
    result, report = rewritten(both, x, keys, cos, sin)
    report.assert_fused(rope=1)
    torch.testing.assert_close(result, both(x, keys, cos, sin))


def test_rope_sine_negated_once_for_both_says_who_uses_it():
    def both(x, y, cos, sin):
        opposite = -sin
        return tuple(torch.cat([a * cos + b * sin, a * opposite + b * cos], -1) for a, b in (t.chunk(2, -1) for t in (x, y)))

    result, report = rewritten(both, x, x * 2, cos, sin)
    report.assert_fused(rope=0)
    assert "opposite is also used outside the pattern" in reasons(report, "rope")
    torch.testing.assert_close(result, both(x, x * 2, cos, sin))


def as_eager(function, *tables):
    """Assert that value and gradient are eager's; return the report."""
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    result, report = rewritten(function, leaves[0], *tables)
    expected = function(leaves[1], *tables)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    return report


def from_two_tables(x, table):
    pairs, other = as_pairs(x), table * 2
    return torch.stack(
        [
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * other[..., 0] + pairs[..., 0] * other[..., 1],
        ],
        -1,
    ).flatten(3)


def swapped_in_one_place(x, table):
    pairs = as_pairs(x)
    return torch.stack(
        [
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * table[..., 1] + pairs[..., 0] * table[..., 0],
        ],
        -1,
    ).flatten(3)


def with_the_wrong_sign(x, table):
    (a, b), (c, s) = as_pairs(x).unbind(-1), (table[..., 0], table[..., 1])
    return torch.stack([a * c + b * s, b * c + a * s], -1).flatten(3)


def written_between_the_reads(x, table):
    pairs, table = as_pairs(x), table.clone()
    first = pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1]
    table.mul_(2)
    return torch.stack([first, pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1]], -1).flatten(3)


def rotated_values_written_between(x, table):
    x = x * 1
    first = as_pairs(x)[..., 0] * table[..., 0] - as_pairs(x)[..., 1] * table[..., 1]
    x.mul_(2)
    return torch.stack([first, as_pairs(x)[..., 1] * table[..., 0] + as_pairs(x)[..., 0] * table[..., 1]], -1).flatten(3)


NO_ROTATIONS = {
    "one_column_twice": of_indices(0, 0, 0, 1), "columns_swapped": of_indices(1, 0, 0, 1), "from_two_tables": from_two_tables,
    "swapped_in_one_place": swapped_in_one_place, "wrong_sign": with_the_wrong_sign, 
    "values_written": rotated_values_written_between,
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ROTATIONS)
def test_rope_other_columns_are_left_alone(name):
    as_eager(NO_ROTATIONS[name], table).assert_fused(rope=0)


def test_rope_table_written_between_two_reads_is_two_values():
    result, report = rewritten(written_between_the_reads, x, table)
    report.assert_fused(rope=0)
    torch.testing.assert_close(result, written_between_the_reads(x, table))


def by_halves(first, second):
    """Return a function of halves a, b, their cosine and sine."""
    return lambda x, c, s: torch.cat([first(*x.chunk(2, -1), c, s), second(*x.chunk(2, -1), c, s)], -1)


NO_ROTATIONS_BY_HALVES = {
    "both_plus": by_halves(lambda a, b, c, s: a * c + b * s, lambda a, b, c, s: b * c + a * s),
    "both_minus": by_halves(lambda a, b, c, s: a * c - b * s, lambda a, b, c, s: b * c - a * s),
    "both_minus_by_neg": by_halves(lambda a, b, c, s: a * c + b * (-s), lambda a, b, c, s: b * c + (-a) * s),
    "minus_in_front": by_halves(lambda a, b, c, s: a * c + b * s, lambda a, b, c, s: a * s - b * c),
    "swapped": by_halves(lambda a, b, c, s: a * c + b * s, lambda a, b, c, s: b * s - a * c),
    "other_sine": by_halves(lambda a, b, c, s: a * c + b * s, lambda a, b, c, s: b * c - a * (s * 2)),
    "member_twice": by_halves(lambda a, b, c, s: a * c + b * s, lambda a, b, c, s: b * c - b * s),
    "negated_twice": by_halves(lambda a, b, c, s: a * c + b * s, lambda a, b, c, s: (-a) * (-s) + b * c),
    "addcmul_scaled": by_halves(lambda a, b, c, s: torch.addcmul(a * c, b, s, value=2), lambda a, b, c, s: torch.addcmul(b * c, a, s, value=-2)),
    "full_from_the_sine": lambda x, c, s: rotate_half(x) * full(s) - x * full(c),
    "rolled_by_a_quarter": lambda x, c, s: x * full(c) + x.roll(2, -1) * torch.cat([-s, s], -1),
    "rolled_over_positions": lambda x, c, s: x * full(c) + x[:, :4].roll(2, 1).repeat(1, 2, 1, 1)[:, :5] * torch.cat([-s, s], -1),
    "swapped_halves_of_two": lambda x, c, s: x * full(c) + torch.cat([x[..., HALF:], (x * 2)[..., :HALF]], -1) * torch.cat([-s, s], -1),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ROTATIONS_BY_HALVES)
def test_rope_other_halves_are_left_alone(name):
    as_eager(NO_ROTATIONS_BY_HALVES[name], cos, sin).assert_fused(rope=0)


@pytest.mark.parametrize("indices", [(0, 1, 1, 0), (0, 1, 0, 0)], ids=str)
def test_rope_tables_are_the_columns_that_are_read(indices):
    """Rotate by whatever the two columns hold: cos and sin have no names in a table."""
    as_eager(of_indices(*indices), table).assert_fused(rope=1)


def test_rope_index_that_changes_between_calls_is_another_value():
    tables = torch.cat([table, table * 3], -1)

    def mixed(x, n):
        pairs, c = as_pairs(x), tables[..., 0]
        first = pairs[..., 0] * c - pairs[..., 1] * tables[..., n]
        return torch.stack([first, pairs[..., 1] * c + pairs[..., 0] * tables[..., 3]], -1).flatten(3)

    compiled = torch.compile(mixed, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        for n in (3, 2, 3, 1):
            torch.testing.assert_close(compiled(x, n), mixed(x, n))
    assert "l_n_]" in report.graphs[1].before, "a symbol"
    assert statuses(report, "rope")[:2] == ["fused", "near"], "3 is the column that is read below as well"
    report.assert_fused(rope=1)
