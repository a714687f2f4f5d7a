"""EvoNorm-B0 in one of its ways."""

import contextlib

from fx_fusion.kernels.lib.integers import next_power_of_2
from fx_fusion.kernels.lib.plan import Plan
from fx_fusion.kernels.norms.evonorm_b0_by_channel import channel_plan, channel_tile
from fx_fusion.kernels.norms.evonorm_b0_by_tile import merge_plan

B0_WAYS = ("as chosen", "channels", "tiles that merge", "tiles")


def by(way):
    """EvoNorm-B0 in one of its ways, wherever that can take the images."""

    def in_small_tiles(x, *others, backward):
        if way.startswith("tiles") or not all(t.is_contiguous() for t in (x, *others)):
            return None
        return channel_tile(x, max(64, 2 * next_power_of_2(x[0, 0].numel())), 512)

    chosen = contextlib.ExitStack()
    if way != "as chosen":
        chosen.enter_context(channel_plan.instead(in_small_tiles))
    if way == "tiles":
        chosen.enter_context(merge_plan.instead(Plan(ROWS=0)))
    return chosen
