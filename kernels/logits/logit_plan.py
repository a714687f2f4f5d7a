"""Launch plans of ``logit_rows``: the fastest of ``python -m bench.tune rows`` on an H200, for bfloat16 and float32."""

from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner

EACH = 8  # logits that a lane adds in one step: one exponential for each, and one that rescales the lane's sum
_FEW_ROWS = 2  # rows per multiprocessor up to which a row has to occupy a multiprocessor alone
_MANY_ROWS = 8  # rows per multiprocessor above which small blocks leave no multiprocessor idle
_NARROW = 8192  # columns up to which a row stays in few blocks

FASTEST = {
    "few rows": Plan(BLOCK=16384, num_warps=32, programs_per_sm=2, STAGES=1),
    "loss": Plan(BLOCK=4096, num_warps=8, programs_per_sm=8, STAGES=1),
    "loss of many rows": Plan(BLOCK=2048, num_warps=4, programs_per_sm=16, STAGES=1),
    "gradient, narrow": Plan(BLOCK=2048, num_warps=8, programs_per_sm=8, STAGES=1),
    "gradient": Plan(BLOCK=16384, num_warps=16, programs_per_sm=4, STAGES=1),
    "gradient, unaligned": Plan(BLOCK=4096, num_warps=4, programs_per_sm=8, STAGES=3),
    "loss and gradient, narrow": Plan(BLOCK=2048, num_warps=4, programs_per_sm=16, STAGES=1),
    "loss and gradient": Plan(BLOCK=8192, num_warps=8, programs_per_sm=8, STAGES=1),
    "loss and gradient, float32": Plan(BLOCK=16384, num_warps=32, programs_per_sm=2, STAGES=1),
}


@planner
def logit_rows_plan(
    m: int, width: int, itemsize: int, multiprocessors: int, *, align: int, reads_stats: bool, gradient: bool
) -> Plan:
    """Choose by what the launch computes (``reads_stats``: not the loss; ``gradient``), by the rows ``m`` per
    multiprocessor, by the ``width`` of a row, by the ``itemsize`` of a logit and by ``align`` (above 1 where rows of odd
    length are read from their first aligned column). Numbers: ``FASTEST``; rows shorter than BLOCK take a smaller one.

    Returns BLOCK logits in one step of a program, EACH of a lane, STAGES of the loop over the steps, ``num_warps``, and
    ``programs_per_sm``, the persistent programs of one multiprocessor."""
    padded_width, rows = next_power_of_2(width), cdiv(m, multiprocessors)
    if rows <= _FEW_ROWS:
        name = "few rows"
    elif not gradient:
        name = "loss of many rows" if rows > _MANY_ROWS else "loss"
    elif padded_width <= _NARROW:
        name = "gradient, narrow" if reads_stats else "loss and gradient, narrow"
    elif reads_stats:
        name = "gradient, unaligned" if align > 1 else "gradient"
    else:
        name = "loss and gradient" if itemsize == 2 else "loss and gradient, float32"
    plan = FASTEST[name]
    if padded_width < plan.BLOCK:
        block = max(padded_width, 2 * align * EACH)
        plan = plan.but(BLOCK=block, num_warps=min(plan.num_warps, max(4, block // 512)))
    return plan.but(EACH=min(EACH, plan.BLOCK))
