"""Norms over the channels of images: by group, in steps, in tiles."""

import pytest
import torch

from fx_fusion.kernels.lib import image_tiles as images
from fx_fusion.kernels.lib.plan import Plan
from fx_fusion.kernels.norms import group_norm_dispatch as channel_norm
from fx_fusion.kernels.norms import group_norm_math as norm_formulas
from fx_fusion.kernels.norms.group_plan import group_plan, steps_plan

pytestmark = pytest.mark.kernel


def test_grids_of_any_number_of_images(monkeypatch):
    """CUDA takes 2^31 - 1 programs in the first dim and 65535 in the others."""
    grids = []
    monkeypatch.setattr(images, "launch", lambda kernel, grid, *args, **options: grids.append(grid))
    images.Tiles(torch.empty(70000, 4, 3, 3)).moments(torch.empty(70000, 4, 3, 3))
    assert all(n <= 65535 for grid in grids for n in grid[1:])
    assert grids[0][0] >= 70000


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "in_steps"])
@pytest.mark.parametrize(("channels", "groups"), [(6, 2), (64, 32), (40, 1), (5, 5)])
def test_norms_of_images(channels, groups, resident, last, device):
    """Groups in registers, in steps, or in tiles with sums between: the same numbers."""

    def plan(norm, x, other, *, backward):
        chosen = group_plan.choose(norm, x, other, backward=backward)
        assert (chosen is None) == last
        return chosen if resident or chosen is None else steps_plan(norm, x, backward=backward)

    memory = torch.channels_last if last else torch.contiguous_format
    x = (torch.randn(2, channels, 9, 7, device=device) + 3).to(memory_format=memory).requires_grad_()
    w, b = (torch.randn(channels, device=device).requires_grad_() for _ in range(2))
    dy = torch.randn(2, channels, 9, 7, device=device).to(memory_format=memory)
    with torch.no_grad(), group_plan.instead(plan):
        y = torch.empty_like(x)
        stats = channel_norm.norm_fwd(x, y, groups, w, b, None, 1e-5, norm_formulas.GROUP_NORM_SWISH)
        dx, (dw, db) = channel_norm.norm_bwd(dy, x, groups, w, b, None, stats, norm_formulas.GROUP_NORM_SWISH)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = torch.nn.functional.silu(torch.nn.functional.group_norm(exact[0], groups, *exact[1:], 1e-5))
    gradients = torch.autograd.grad(expected, exact, dy.double())
    for ours, theirs in zip((y, dx, dw, db), (expected, *gradients), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    assert y.stride() == dx.stride() == x.stride()


@pytest.mark.parametrize("kind", ["GROUP_NORM", "GROUP_NORM_SWISH", "EVONORM_S0"])
@pytest.mark.parametrize(("channels", "groups", "tiles"), [(6, 2, (2, 1)), (40, 1, (32, 8))])
def test_groups_in_two_tiles(channels, groups, tiles, kind, device):
    """As in one, but for how sums are rounded."""
    x, dy = (torch.randn(2, channels, 9, 7, device=device) + 3 for _ in range(2))
    w, b, v = (torch.randn(channels, device=device) for _ in range(3))
    kind, found = getattr(norm_formulas, kind), []
    for first, rest in (tiles, (2 * tiles[0], 0)):
        plan = Plan(RESIDENT=True, BC=first, REST=rest, BS=64, num_warps=4)
        y = torch.empty_like(x)
        with group_plan.instead(plan.but(LANES=1024)):
            stats = channel_norm.norm_fwd(x, y, groups, w, b, v, 1e-5, kind)
        with group_plan.instead(plan):
            dx, sums = channel_norm.norm_bwd(dy, x, groups, w, b, v, stats, kind)
        found.append((y, stats, dx, *sums))
    for two, one in zip(*found, strict=True):
        assert (two - one).abs().max() <= 1e-5 * one.abs().max()


@pytest.mark.parametrize("way", ["by_group", "by_tile"])
def test_images_that_begin_unlike_the_rest(way, device):
    """A border of zeros: every lane begins with one, and sees hundreds of other values."""
    plan = Plan(RESIDENT=False, BC=1, REST=0, BS=16, LANES=16, num_warps=1)
    x = torch.full((1, 1, 128, 128) if way == "by_group" else (1, 1, 512, 256), 255.0, device=device)
    x[:, :, 0] = 0
    in_one_split = images.tile_plan.choose(x).but(splits=1)
    with group_plan.instead(plan if way == "by_group" else None), images.tile_plan.instead(in_one_split):
        stats = channel_norm.norm_fwd(x, torch.empty_like(x), 1, None, None, None, 1e-5, norm_formulas.GROUP_NORM)
    flat = x.double().flatten(1)
    torch.testing.assert_close(stats[0].double(), flat.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(stats[1].double(), (flat.var(1, unbiased=False) + 1e-5).rsqrt(), rtol=1e-5, atol=0)
