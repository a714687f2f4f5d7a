"""Images in memory, contiguous or channels last: how they are cut into tiles, and the moments of their channels."""

import math

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.divisibility import multiple
from fx_fusion.kernels.lib.launch import cdiv, launch, multiprocessors, next_power_of_2
from fx_fusion.kernels.lib.moments import STEPS, merge, rebased, seen, shifted
from fx_fusion.ops.layouts import is_channels_last


@triton.jit
def offset(c, s, channels, size, LAST: tl.constexpr):
    """Of a channel at a position of an image."""
    return s * channels + c if LAST else c * size + s


@triton.jit
def place(channels, splits, BC: tl.constexpr):
    """Of a program of a tiled launch: its block of channels, its split of the positions, its image."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(channels, BC)
    return pid % blocks, pid // blocks % splits, (pid // (blocks * splits)).to(tl.int64)


@triton.jit
def moments_kernel(
    x_ptr, parts_ptr, channels, size, part, splits, all_parts, LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Mean and m2 of each channel over ``part`` positions of one image: ``parts`` is (2, n, splits, channels)."""
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    block, split, image = place(channels, splits, BC)
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
    """x itself if it lies in memory as images or channels last; else a contiguous copy."""
    return x if x.is_contiguous() or is_channels_last(x) else x.contiguous()


def lie_last(**images) -> dict[str, bool]:
    """Which of a kernel's images have their channels last."""
    return {f"{name.upper()}_LAST": is_channels_last(image) for name, image in images.items()}


def empty_images(x):
    """A result for x: channels last where x is, else contiguous."""
    last = is_channels_last(x)
    shape = x.movedim(1, -1).shape if last else x.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device)  # empty_strided of both passes would be one tensor to AOTAutograd
    return y.movedim(-1, 1) if last else y


class Tiles:
    """How a tensor of images is cut into tiles: channel blocks x splits of the positions x images."""

    def __init__(self, x):
        self.n, self.c = x.shape[0], x.shape[1]
        self.size = math.prod(x.shape[2:])
        warp, programs = 512 // x.element_size(), 8 * multiprocessors(x)  # elements that a warp loads at once
        if is_channels_last(x):  # by what was fastest on an H200: large images in few programs, small ones in narrow blocks
            large = x.numel() >= 2**23
            self.bc = min(64 if large else 32, next_power_of_2(self.c))
            self.bs = min(next_power_of_2(self.size), max(1, 8 * warp // self.bc))
            programs = programs // 2 if large else programs
        else:  # a warp walks along a channel: sums over positions stay inside it
            self.bs = min(next_power_of_2(self.size), warp)
            self.bc = min(next_power_of_2(self.c), 8 * warp // self.bs)
        blocks = cdiv(self.c, self.bc)
        splits = max(1, min(cdiv(programs, max(1, blocks * self.n)), cdiv(self.size, 4 * self.bs)))
        self.part = cdiv(cdiv(self.size, splits), self.bs) * self.bs
        self.splits = cdiv(self.size, self.part)
        self.grid = (blocks * self.splits * self.n,)  # of one dim: the others end at 65535
        self.all_parts = self.n * self.splits * self.c
        self.options = {
            "UNIT_C": math.gcd(16, self.c), "UNIT_S": math.gcd(16, self.size), "OFFSET": offset_type(self.c * self.size),
            "BC": self.bc, "BS": self.bs, "num_warps": 4,
        }  # fmt: skip

    def moments(self, x):
        """(2, n, splits, c): mean and m2 of each channel in each split."""
        parts = torch.empty(2, self.n, self.splits, self.c, dtype=torch.float32, device=x.device)
        launch(
            moments_kernel, self.grid, x, parts, self.c, self.size, self.part, self.splits, self.all_parts,
            LAST=is_channels_last(x), **self.options,
        )  # fmt: skip
        return parts


def offset_type(elements: int):
    """Offsets inside an image: 64 bits only where they are needed."""
    return tl.int64 if elements >= 2**31 else tl.int32
