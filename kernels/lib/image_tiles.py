"""Images, contiguous or channels last: their cut into tiles, and the moments of their channels."""

import math

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.device import multiprocessors
from fx_fusion.kernels.lib.divisibility import multiple
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.moments import STEPS, merge, rebased, seen, shifted
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.ops.launch import launch
from fx_fusion.ops.layouts import is_channels_last


@triton.jit
def offset(c, s, channels, size, LAST: tl.constexpr):
    """Returns the element offset of channel ``c`` at position ``s`` within one image."""
    return s * channels + c if LAST else c * size + s


@triton.jit
def tile_of_program(channels, splits, BC: tl.constexpr):
    """Returns the block of channels, the split of the positions and the image of this program of a launch over tiles."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(channels, BC)
    return pid % blocks, pid // blocks % splits, (pid // (blocks * splits)).to(tl.int64)


@triton.jit
def norm_moments_kernel(
    x_ptr, parts_ptr, channels, size, part, splits, all_parts, LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store mean and m2 of each channel over ``part`` positions of one image in ``parts``: (2, n, splits, channels)."""
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    block, split, image = tile_of_program(channels, splits, BC)
    c = (block * BC + tl.arange(0, BC)[None, :]).to(OFFSET)
    base = x_ptr + image * channels * size
    sums = tl.zeros((BS, BC), tl.float32)
    squares = tl.zeros((BS, BC), tl.float32)
    first = split * part
    end = tl.minimum(size, first + part)
    s = (first + tl.arange(0, BS)[:, None]).to(OFFSET)
    shift = tl.load(base + offset(c, s, channels, size, LAST), (c < channels) & (s < end), 0.0).to(tl.float32)
    for start in range(first + BS, end, STEPS * BS):
        stop = tl.minimum(end, start + STEPS * BS)
        for s0 in tl.range(start, stop, BS, num_stages=3):
            s = (s0 + tl.arange(0, BS)[:, None]).to(OFFSET)
            live = (c < channels) & (s < end)
            x = tl.load(base + offset(c, s, channels, size, LAST), live, 0.0).to(tl.float32)
            sums, squares = shifted(sums, squares, x, shift, live)
        sums, squares, shift = rebased(sums, squares, shift, seen(stop - first, BS)[:, None])
    count = seen(end - first, BS)[:, None] + tl.zeros((BS, BC), tl.float32)
    _, mean, m2 = merge(shift, squares, count, 0)
    at = (image * splits + split) * channels + block * BC + tl.arange(0, BC)
    live = block * BC + tl.arange(0, BC) < channels
    tl.store(parts_ptr + at, mean, live)
    tl.store(parts_ptr + all_parts + at, m2, live)


def as_images(x):
    """Returns x itself if it is contiguous or channels last, else a contiguous copy."""
    return x if x.is_contiguous() or is_channels_last(x) else x.contiguous()


def layout_flags(**images) -> dict[str, bool]:
    """Returns the constants X_LAST, DY_LAST ... of a kernel: which of its images are channels last."""
    return {f"{name.upper()}_LAST": is_channels_last(image) for name, image in images.items()}


def empty_images(x):
    """Returns room for a result of x's shape and dtype: channels last where x is, else contiguous."""
    last = is_channels_last(x)
    shape = x.movedim(1, -1).shape if last else x.shape
    # Not empty_strided: AOTAutograd would take the results of both passes for one tensor.
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    return y.movedim(-1, 1) if last else y


@planner
def tile_plan(x) -> Plan:
    """Choose by the shape, dtype, layout and device of the images x. Channels last, the numbers are the fastest on an H200:
    large tensors take few programs, small ones narrow blocks of channels. Contiguous, a warp walks along a channel, so that
    sums over positions need no other warp.

    Returns BC channels x BS positions of a tile, ``num_warps``, and ``splits``, the programs that share the positions of an
    image (``Tiles`` rounds it down to whole tiles)."""
    n, c, *positions = x.shape
    size = math.prod(positions)
    warp, programs = 512 // x.element_size(), 8 * multiprocessors(x)  # ``warp``: elements that a warp loads at once
    if is_channels_last(x):
        large = x.numel() >= 2**23
        bc = min(64 if large else 32, next_power_of_2(c))
        bs = min(next_power_of_2(size), max(1, 8 * warp // bc))
        programs = programs // 2 if large else programs
    else:
        bs = min(next_power_of_2(size), warp)
        bc = min(next_power_of_2(c), 8 * warp // bs)
    splits = max(1, min(cdiv(programs, max(1, cdiv(c, bc) * n)), cdiv(size, 4 * bs)))
    return Plan(BC=bc, BS=bs, splits=splits, num_warps=4)


class Tiles:
    """A tensor of images, cut by ``tile_plan`` into channel blocks x splits of the positions x images."""

    def __init__(self, x):
        self.n, self.c = x.shape[0], x.shape[1]
        self.size = math.prod(x.shape[2:])
        self.plan = tile_plan(x)
        self.part = cdiv(cdiv(self.size, self.plan.splits), self.plan.BS) * self.plan.BS  # positions of a split
        self.splits = cdiv(self.size, self.part)
        self.grid = (cdiv(self.c, self.plan.BC) * self.splits * self.n,)  # of one dim: the others end at 65535
        self.all_parts = self.n * self.splits * self.c
        self.constants = {
            "UNIT_C": math.gcd(16, self.c), "UNIT_S": math.gcd(16, self.size), "OFFSET": offset_type(self.c * self.size),
            **self.plan.meta(),
        }  # fmt: skip

    def moments(self, x):
        """Returns mean and m2 of each channel in each split: (2, n, splits, c)."""
        parts = torch.empty(2, self.n, self.splits, self.c, dtype=torch.float32, device=x.device)
        launch(
            norm_moments_kernel, self.grid, x, parts, self.c, self.size, self.part, self.splits, self.all_parts,
            LAST=is_channels_last(x), **self.constants,
        )  # fmt: skip
        return parts


def offset_type(elements: int):
    """Returns the type of offsets within an image: 64 bits only where they are needed."""
    return tl.int64 if elements >= 2**31 else tl.int32
