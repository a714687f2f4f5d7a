"""Times launch shapes of the kernels whose tiles were chosen by measuring.

    python -m bench.tune norms|tables|rows|groups|channels|rope|normed_rope|chunks [--dtype bfloat16]

``norms``: ``row_norm``'s backward. ``tables``: ``embedding``'s. ``rows``: ``logit_rows``, the sums, the gradient, and both
in one launch. ``groups``: ``norm_by_group``, forward and backward. ``channels``: ``evonorm_b0``, by tile and by channel.
``rope``: its tiles; ``normed_rope``: those of the backward with a norm of each head (Qwen3, Flux) or of all (Wan).
``chunks``: how many of them ``linear_cross_entropy`` cuts its logits into, and the dtype of their sum.
For every shape: what is chosen now, and the three fastest candidates.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fx_fusion.cost import timing
from fx_fusion.kernels import embedding, evonorm_b0, linear_cross_entropy, rms_norm_rope, rope
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan
from fx_fusion.kernels.logits.logit_chunks import chunk_plan
from fx_fusion.kernels.logits.logit_plan import EACH, logit_rows_plan
from fx_fusion.kernels.logits.logit_rows import launch_rows
from fx_fusion.kernels.norms import group_norm_dispatch as channel_norm
from fx_fusion.kernels.norms import group_norm_math as norm_formulas
from fx_fusion.kernels.norms import row_norm
from fx_fusion.kernels.norms.evonorm_b0_by_channel import channel_plan, channel_tile
from fx_fusion.kernels.norms.group_plan import group_plan, in_two
from fx_fusion.testing import zipf

Candidate = tuple[str, Any]  # its name, and a context that chooses it
Work = tuple[str, Callable[[], object], list[Candidate]]

NORMS = ((16384, 4096), (16384, 8192), (16384, 2048), (16384, 1024), (8192, 768), (65536, 128), (2048, 4096))
TABLES = (
    (2048, 50257, 768), (16384, 30522, 768), (16384, 32000, 4096), (8192, 128256, 2048), (65536, 50257, 768),
    (65536, 32000, 2048), (262144, 32000, 1024),
)  # fmt: skip
PIECES = (32, 64, 128, 256)
# Rows that a program reads at once, columns, warps.
WIDTHS = ((4, 256, 2), (8, 256, 2), (4, 512, 4), (8, 512, 4), (4, 1024, 4))
LOGITS = ((16384, 32000), (8192, 128256), (1024, 128256), (16384, 50257), (8192, 151936))
# BLOCK logits in a step, warps, programs per multiprocessor, stages.
STEPS = (
    (1024, 4, 16, 1), (2048, 4, 16, 1), (2048, 8, 8, 1), (4096, 4, 8, 1), (4096, 8, 8, 1), (8192, 8, 8, 1), (8192, 16, 4, 1),
    (8192, 16, 2, 1), (16384, 16, 4, 1), (16384, 32, 2, 1), (2048, 4, 8, 3), (4096, 4, 8, 3), (4096, 8, 4, 3),
)  # fmt: skip
IMAGES = (
    (8, 320, 64, 64), (8, 640, 32, 32), (16, 1280, 16, 16), (64, 256, 56, 56), (128, 512, 28, 28), (256, 1024, 14, 14),
    (16, 512, 128, 128), (8, 512, 64, 64), (64, 64, 28, 28), (64, 64, 112, 112),
)  # fmt: skip
# Elements of a tile, warps, lanes of the first pass.
TILES = (
    (512, 4, 1024), (1024, 4, 1024), (2048, 4, 1024), (2048, 4, 2048), (2048, 8, 2048), (4096, 8, 2048), (4096, 8, 4096),
    (4096, 16, 4096), (8192, 16, 4096),
)  # fmt: skip
BATCHES = (
    (1, 64, 28, 28), (16, 64, 28, 28), (32, 64, 28, 28), (64, 64, 28, 28), (256, 64, 28, 28), (128, 512, 28, 28),
    (8, 640, 32, 32), (256, 1024, 14, 14), (8, 1280, 16, 16), (64, 2048, 7, 7), (8, 320, 64, 64), (2, 512, 64, 64),
    (64, 256, 56, 56),
)  # fmt: skip
# Elements of a tile, and of a lane.
OWNED = ((1024, 8), (2048, 8), (4096, 8), (4096, 16), (4096, 32), (8192, 8), (8192, 16), (16384, 16))
# Batch, heads of q and of k, positions, columns.
HEADS = ((4, 32, 8, 4096, 128), (8, 32, 8, 2048, 64), (64, 12, 12, 128, 64), (2, 8, 1, 8192, 256), (1, 32, 8, 1024, 128))


def norms(dtype: torch.dtype, shapes: tuple[tuple[int, int], ...] = NORMS, device: str = "cuda") -> Iterator[Work]:
    for (m, n), center, added in itertools.product(shapes, (True, False), (False, True)):
        x, dy, dh = (torch.randn(m, n, device=device).to(dtype) for _ in range(3))
        w, b = torch.randn(n, device=device).to(dtype), torch.randn(n, device=device).to(dtype) if center else None
        *_, stats = row_norm.norm_fwd(x, None, w, b, 1e-5, 0.0, False, center=center)

        def call(given: Any = (dy, dh if added else None, x, w, b, stats), center: bool = center) -> None:
            row_norm.norm_bwd(*given, 0.0, False, [True] * 3, center=center)

        block = next_power_of_2(n)
        plans = [
            Plan(ROWS=tile // block, BLOCK_N=block, num_warps=warps, programs_per_sm=programs, STAGES=stages)
            for tile, warps, programs, stages in itertools.product((2048, 4096, 8192, 16384), (4, 8, 16), (1, 2, 4), (2, 3))
            if tile >= block and 8 <= programs * warps <= 16 and 256 * warps <= tile <= 1024 * warps
        ]
        candidates = [(str(plan), row_norm.row_norm_bwd_plan.instead(plan)) for plan in plans]
        yield f"{m} x {n} {'layer' if center else 'rms'}{' added' if added else ''}", call, candidates


def tables(dtype: torch.dtype, shapes: tuple[tuple[int, int, int], ...] = TABLES, device: str = "cuda") -> Iterator[Work]:
    for (m, v, h), kind in itertools.product(shapes, ("uniform", "zipf", "half of them one")):
        ids = torch.randint(0, v, (m,), device=device)
        if kind == "zipf":
            ids = zipf(m, v, device)
        elif kind != "uniform":
            ids[: m // 2] = 7
        dy = torch.randn(m, h, device=device).to(dtype)

        def call(ids: Any = ids, dy: Any = dy, v: int = v) -> None:
            embedding._bwd(dy, ids, v, -1)

        chosen = embedding.segments_plan(m, h)
        plans = [
            chosen.but(PIECE=piece, ROWS=at_once, BLOCK=block, STAGES=stages, num_warps=warps)
            for piece, (at_once, block, warps), stages in itertools.product(PIECES, WIDTHS, (1, 3))
            if block <= next_power_of_2(h) and piece < m
        ]
        yield f"{m} of {v} x {h} {kind}", call, [(str(plan), embedding.segments_plan.instead(plan)) for plan in plans]


def rows(dtype: torch.dtype, shapes: tuple[tuple[int, int], ...] = LOGITS, device: str = "cuda") -> Iterator[Work]:
    for m, v in shapes:
        logits, target = torch.randn(m, v, device=device).to(dtype) * 3, torch.randint(0, v, (m,), device=device)
        loss, stats, dloss = (torch.empty(*size, device=device) for size in ((m,), (2, m), (m,)))
        dlogits = torch.empty_like(logits)
        modes = {
            "sums": {"loss": loss}, "gradient": {"dloss": dloss, "dlogits": dlogits},
            "both": {"loss": loss, "dloss": dloss, "dlogits": dlogits},
        }  # fmt: skip
        for mode, outputs in modes.items():

            def call(logits: Any = logits, target: Any = target, stats: Any = stats, outputs: Any = outputs) -> None:
                launch_rows(logits, target, None, -100, 0.0, 0.0, 1.0, stats=stats, **outputs)

            plans = [
                Plan(BLOCK=block, EACH=EACH, num_warps=warps, programs_per_sm=programs, STAGES=stages)
                for block, warps, programs, stages in STEPS
                if block <= next_power_of_2(v)
            ]
            yield f"{m} x {v} {mode}", call, [(str(plan), logit_rows_plan.instead(plan)) for plan in plans]


def groups(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = IMAGES, device: str = "cuda") -> Iterator[Work]:
    kind, at_once = norm_formulas.GROUP_NORM_SWISH, 32
    for shape in shapes:
        x, dy = (torch.randn(*shape, device=device).to(dtype) for _ in range(2))
        y, p = torch.empty_like(x), torch.randn(shape[1], device=device).to(dtype)
        stats = channel_norm.norm_fwd(x, y, at_once, p, p, None, 1e-5, kind)
        norm = norm_formulas.Norm(x, at_once, p, p, None, kind, 0)
        bc, bs = next_power_of_2(norm.per_group), next_power_of_2(norm.size)
        plans = [
            (Plan(RESIDENT=False, BC=block, REST=0, BS=min(bs, tile // block), num_warps=warps), lanes)
            for (tile, warps, lanes), block in itertools.product(TILES, (8, 4, 2))
            if block <= bc
        ]
        for first, rest in dict.fromkeys([(bc, 0), in_two(norm.per_group)]):
            fits = [warps for warps in (2, 4, 8, 16, 32) if 512 * warps <= (first + rest) * bs <= 2048 * warps]
            plans += [(Plan(RESIDENT=True, BC=first, REST=rest, BS=bs, num_warps=warps), 1024) for warps in fits]

        def forward(x: Any = x, y: Any = y, p: Any = p) -> None:
            channel_norm.norm_fwd(x, y, at_once, p, p, None, 1e-5, kind)

        def backward(x: Any = x, dy: Any = dy, p: Any = p, stats: Any = stats) -> None:
            channel_norm.norm_bwd(dy, x, at_once, p, p, None, stats, kind)

        for name, call in (("forward", forward), ("backward", backward)):
            each = [plan.but(LANES=lanes) for plan, lanes in plans] if name == "forward" else [plan for plan, _ in plans]
            candidates = [(str(plan), group_plan.instead(plan)) for plan in dict.fromkeys(each)]
            yield f"{' x '.join(map(str, shape))} {name}", call, candidates


def channels(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = BATCHES, device: str = "cuda") -> Iterator[Work]:
    for shape in shapes:
        x, dy = (torch.randn(*shape, device=device).to(dtype) for _ in range(2))
        v, w, b = (torch.randn(shape[1], device=device).to(dtype) for _ in range(3))
        _, _, images, batch = evonorm_b0._fwd(x, v, w, b, None, 1e-3)
        bs = next_power_of_2(shape[2] * shape[3])
        sizes = [(tile, lane) for tile, lane in OWNED if bs <= tile <= bs * next_power_of_2(shape[0])]
        plans = {str(plan): plan for plan in (channel_tile(x, *size) for size in sizes)} | {"by tile": None}
        candidates = [(name, channel_plan.instead(plan)) for name, plan in plans.items()]

        def forward(x: Any = x, v: Any = v, w: Any = w, b: Any = b) -> None:
            evonorm_b0._fwd(x, v, w, b, None, 1e-3)

        def backward(x: Any = x, dy: Any = dy, p: Any = (v, w, b), images: Any = images, batch: Any = batch) -> None:
            evonorm_b0._bwd(dy, x, *p, None, images, batch, 1e-3, [True] * 4)

        yield f"{' x '.join(map(str, shape))} forward", forward, candidates
        yield f"{' x '.join(map(str, shape))} backward", backward, candidates


def rotations(dtype: torch.dtype, device: str = "cuda") -> Iterator[Work]:
    for b, h, g, s, d in HEADS:
        cos, sin = (torch.randn(b, 1, s, d, device=device).to(dtype) for _ in range(2))
        for layout in ("positions", "heads"):

            def laid(heads: int, b: int = b, s: int = s, d: int = d, layout: str = layout) -> torch.Tensor:
                if layout == "heads":
                    return torch.randn(b, heads, s, d, device=device).to(dtype)
                return torch.randn(b, s, heads, d, device=device).to(dtype).transpose(1, 2)

            q, k = laid(h), laid(g)

            def call(q: Any = q, k: Any = k, cos: Any = cos, sin: Any = sin) -> None:
                rope.rope(q, k, cos, sin, "rotate_half", "input", False)

            plans = []
            for rows, steps, warps in itertools.product((4, 8, 16, 32), (1, 2, 4), (1, 2, 4, 8)):
                plan = Plan(POSITIONS=1, HEADS=rows, PROGRAM_HEADS=rows * steps, num_warps=warps)
                if layout == "heads":
                    plan = Plan(POSITIONS=rows, HEADS=1, PROGRAM_HEADS=4 * steps, num_warps=warps)
                if rows * d <= 256 * warps * 8 and rows * steps <= 32:
                    plans.append(plan)
            candidates = [(str(plan), rope.rope_plan.instead(plan)) for plan in plans]
            yield f"{b} x {h}({g}) x {s} x {d} by {layout}", call, candidates


def normed_rotations(dtype: torch.dtype, device: str = "cuda") -> Iterator[Work]:
    """The forward beside it is as ``rope``'s: see the plan there."""
    of_each_head = ((8, 16, 2048, 128, False), (8, 8, 2048, 128, False), (1, 24, 4608, 128, False))
    for b, h, s, d, across in (*of_each_head, (1, 12, 32760, 128, True)):
        x = torch.randn(b, s, h, d, device=device).to(dtype)
        weight = torch.randn(h * d if across else d, device=device).to(dtype)
        cos, sin = torch.randn(2, 1, s, 1, d, device=device)
        static = 1e-6, 0.0, False, across, "rotate_half", "input", False
        y, rstd = rms_norm_rope._fwd(x, weight, cos, sin, *static)

        def backward(given: Any = (y, x, weight, cos, sin, rstd, *static, [True, True])) -> None:
            rms_norm_rope._bwd(*given)

        plans = []
        for heads, stages, warps, per_sm in itertools.product((4, 8, 16, 32), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8)):
            if warps * per_sm <= 16 and 16 <= heads * d // warps // 16 <= 256:
                tile = next_power_of_2(h) if across else heads
                plans.append(Plan(POSITIONS=1, HEADS=tile, STAGES=stages, num_warps=warps, programs_per_sm=per_sm))
        candidates = [(str(plan), rms_norm_rope.bwd_plan.instead(plan)) for plan in dict.fromkeys(plans)]
        yield f"{b} x {h} x {s} x {d}{' across heads' * across}", backward, candidates


def chunks(dtype: torch.dtype, device: str = "cuda") -> Iterator[Work]:
    for m, h, v in ((32768, 2048, 151936), (16384, 2048, 128256), (8192, 4096, 128256)):
        x, w = (torch.randn(*size, device=device).to(dtype) * 0.02 for size in ((m, h), (v, h)))
        target = torch.randint(0, v, (m,), device=device)

        def call(x: Any = x, w: Any = w, target: Any = target) -> None:
            options = ("mean", -100, 0.0, 0.0, 1.0, [True, True, False], False)
            linear_cross_entropy.linear_cross_entropy(x, w, None, target, None, *options)

        candidates = []
        for n, rounded in itertools.product((3, 4, 5, 6, 8, 12), (4, 6)):
            plan = Plan(rows=cdiv(m, n * 256) * 256, rounded_chunks=rounded)
            candidates.append((f"{n} chunks, {'rounded' if n <= rounded else 'fp32'}", chunk_plan.instead(plan)))
        yield f"{m} x {h} x {v}", call, candidates


WORK = {
    "norms": norms, "tables": tables, "rows": rows, "groups": groups, "channels": channels, "rope": rotations,
    "normed_rope": normed_rotations, "chunks": chunks,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(WORK))
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.tune times kernels on a GPU: there is no CUDA device here.")
    work = WORK[given.what](getattr(torch, given.dtype))
    for name, call, found in work:  # as they come: some take minutes
        now, *fastest = ranked(call, found)
        print(f"{name}, now {now} ms: {', '.join(fastest)}", flush=True)


def ranked(call: Callable[[], object], candidates: list[Candidate]) -> tuple[str, ...]:
    """Return what is chosen now, and the three fastest candidates; one that the machine has no room for is left out."""
    from triton.runtime.errors import OutOfResources

    def run_with(chosen: Any) -> None:
        with chosen:
            call()

    calls, names = [call], ["now"]
    for name, chosen in candidates:
        run = functools.partial(run_with, chosen)
        with contextlib.suppress(OutOfResources):
            run()
            calls.append(run)
            names.append(name)
    now, *timed = zip(timing.in_turns(calls), names, strict=True)
    return f"{now[0]:.4f}", *(f"{ms:.4f} by {name}" for ms, name in sorted(timed)[:3])


if __name__ == "__main__":
    main()
