"""Launch plans of ``norm_by_group``: the fastest of ``python -m bench.tune groups`` on an H200, for bfloat16 and float32.

Facts of a row, by which its numbers are chosen (the first row whose facts all hold):

    backward, forward             the pass
    4_bytes                       x is float32
    group_norm, evonorm_s0        the kind of norm
    groups<=2*SMs, groups<=4*SMs  few groups for each multiprocessor
    in_two                        the group is two tiles
    padding                       more than a quarter of the tiles is padding
    tile<=...                     elements of a group's tiles, padding included
    size>=...                     positions of an image
"""

from fx_fusion.kernels.lib.device import multiprocessors
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.lib.plan_table import first_row
from fx_fusion.kernels.norms.group_norm_math import EVONORM_S0, GROUP_NORM, Norm

# Elements of a group's tiles up to which the group stays in registers. Where groups are many, tiles that are mostly padding
# cost more than reading a group again out of the cache.
RESIDENT = (
    ("groups<=4*SMs backward 4_bytes", 16384),
    ("groups<=4*SMs backward", 20480),
    ("groups<=4*SMs group_norm", 16384),
    ("groups<=4*SMs in_two", 16384),
    ("groups<=4*SMs", 8192),
    ("padding", 4096),
    ("evonorm_s0", 4096),
    ("forward 4_bytes", 32768),
    ("group_norm", 16384),
    ("", 8192),
)

# Whether a resident group of more than 8192 elements is cut into two tiles where that is less padding.
IN_TWO = (
    ("groups<=4*SMs backward group_norm", True),
    ("groups<=4*SMs backward 4_bytes", False),
    ("groups<=4*SMs backward", True),
    ("groups<=4*SMs 4_bytes", True),
    ("groups<=4*SMs group_norm", False),
    ("groups<=4*SMs", True),
    ("", False),
)

# Warps of a resident group.
RESIDENT_WARPS = (
    ("backward tile<=4096", 4),
    ("backward tile<=10240", 8),
    ("backward 4_bytes", 32),
    ("backward", 16),
    ("tile<=2048", 2),
    ("tile<=8192", 4),
    ("tile<=16384", 8),
    ("", 16),
)

# Elements of a tile, warps, and lanes of the forward's first pass, for a group that is read twice.
IN_STEPS = (
    ("backward 4_bytes size>=2048", (4096, 8, 0)),
    ("backward 4_bytes", (2048, 4, 0)),
    ("backward size>=1024", (4096, 8, 0)),
    ("backward", (1024, 4, 0)),
    ("groups<=2*SMs size>=2048", (8192, 8, 4096)),
    ("size>=1024", (4096, 8, 2048)),
    ("4_bytes", (4096, 8, 2048)),
    ("", (2048, 4, 1024)),
)


@planner
def group_plan(norm: Norm, x, other, *, backward: bool) -> Plan | None:
    """Choose by the sizes and the kind of the norm, by the dtype and device of x and by the pass. None where a group cannot
    be one program's: for images that are not contiguous (``other``: y or dy), groups of 2^31 elements, and large groups that
    are too few for the device. Numbers: the tables above.

    Returns RESIDENT (the group stays in registers), BC channels x BS positions of a tile, REST channels of a second tile,
    ``num_warps`` and, for the forward, LANES of the first pass over a group that is read twice."""
    if not (x.is_contiguous() and other.is_contiguous()):
        return None
    if norm.length >= 2**31 or (norm.all_groups < multiprocessors(x) and norm.length > 16384):
        return None
    return resident_plan(norm, x, backward=backward) or steps_plan(norm, x, backward=backward)


def resident_plan(norm: Norm, x, *, backward: bool) -> Plan | None:
    """Returns the plan of a group that stays in registers, None for one that is too large."""
    facts = _facts(norm, x, backward)
    bc, rest, bs = next_power_of_2(norm.per_group), 0, next_power_of_2(norm.size)
    if bc * bs > 8192 and first_row(IN_TWO, facts):
        bc, rest = in_two(norm.per_group)
    tile = (bc + rest) * bs
    facts |= {"in_two": rest > 0, "padding": 3 * tile > 4 * norm.length}
    facts |= {f"tile<={most}": tile <= most for most in (2048, 4096, 8192, 10240, 16384)}
    if tile > first_row(RESIDENT, facts):
        return None
    lanes = {} if backward else {"LANES": 1024}
    return Plan(RESIDENT=True, BC=bc, REST=rest, BS=bs, num_warps=first_row(RESIDENT_WARPS, facts), **lanes)


def steps_plan(norm: Norm, x, *, backward: bool) -> Plan:
    """Returns the plan of a group that is read twice: blocks of at most 8 channels, of which at most a fifth is padding. A
    warp stays in one channel."""
    tile, warps, lanes = first_row(IN_STEPS, _facts(norm, x, backward))
    whole = next_power_of_2(norm.per_group)
    bc = next(b for b in (8, 4, 2, 1) if b <= whole and 4 * cdiv(norm.per_group, b) * b <= 5 * norm.per_group)
    bs = min(next_power_of_2(norm.size), tile // bc)
    return Plan(RESIDENT=False, BC=bc, REST=0, BS=bs, num_warps=warps, **({} if backward else {"LANES": lanes}))


def in_two(channels: int) -> tuple[int, int]:
    """Returns the channels, powers of two, of two tiles that hold ``channels``; of one tile and 0 where two are no less
    padding."""
    whole = next_power_of_2(channels)
    parts = whole // 2, next_power_of_2(channels - whole // 2)
    return parts if sum(parts) < whole else (whole, 0)


def _facts(norm: Norm, x, backward: bool) -> dict[str, bool]:
    """Returns the facts of a norm but for those of its tiles."""
    return {
        "backward": backward,
        "forward": not backward,
        "4_bytes": x.element_size() == 4,
        "group_norm": norm.kind == GROUP_NORM.value,
        "evonorm_s0": norm.kind == EVONORM_S0.value,
        "groups<=2*SMs": norm.all_groups <= 2 * multiprocessors(x),
        "groups<=4*SMs": norm.all_groups <= 4 * multiprocessors(x),
        "size>=1024": norm.size >= 1024,
        "size>=2048": norm.size >= 2048,
    }
