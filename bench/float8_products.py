"""FP8 matrix products and what quantizes for them, beside bfloat16, on one GPU: the figures an fp8 recipe is chosen by.

    python -m bench.float8_products

For every linear of five models: the product of its forward, the gradient of its input (dgrad) and of its weight (wgrad)
with operands that are quantized already, tensorwise, rowwise and in blocks (1 x 128 of activations and gradients, 128 x
128 of weights), against bfloat16. Then kernels that make such operands: RMSNorm and SwiGLU with a scale a row, SwiGLU
with blocks of both directions in one pass, a quantization by itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from tabulate import tabulate
from torch import Tensor
from triton.testing import do_bench

from bench.process import environment

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128
# (rows, {linear: (out features, in features)}); q, k, v and gate, up as one product
SHAPES: dict[str, tuple[int, dict[str, tuple[int, int]]]] = {
    "Llama 1B, 8 x 2048": (16384, {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}),
    "Llama 8B, 1 x 4096": (4096, {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}),
    "Qwen3 0.6B, 8 x 2048": (16384, {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}),
    "BERT base, 64 x 512": (32768, {"q": (768, 768), "up": (3072, 768), "down": (768, 3072)}),
    "GPT-2, 16 x 1024": (16384, {"qkv": (2304, 768), "o": (768, 768), "up": (3072, 768), "down": (768, 3072)}),
    "ViT-L, 64 images": (12608, {"qkv": (3072, 1024), "o": (1024, 1024), "up": (4096, 1024), "down": (1024, 4096)}),
}


def quantized(x: Tensor, rows: int | None, columns: int | None) -> tuple[Tensor, Tensor]:
    """x in e4m3 with a scale for each tile of ``rows`` x ``columns`` (None: all of them), and what to multiply it by."""
    m, n = x.shape
    rows, columns = rows or m, columns or n
    m_tiles, n_tiles = -(-m // rows), -(-n // columns)
    padded = torch.nn.functional.pad(x.float(), (0, n_tiles * columns - n, 0, m_tiles * rows - m))
    tiles = padded.view(m_tiles, rows, n_tiles, columns)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
    small = (tiles / scale).clamp(-LARGEST, LARGEST).view_as(padded)[:m, :n]
    return small.to(E4M3).contiguous(), scale[:, 0, :, 0].contiguous()


def product_by(recipe: str, a: Tensor, b: Tensor, fast: bool, b_is_weight: bool) -> Callable[[], Tensor]:
    """A call that computes a @ b.T in bfloat16; a (M, K) and b (N, K), quantized before."""
    if recipe == "bfloat16":
        return lambda: a @ b.t()
    if recipe == "tensorwise":
        (qa, sa), (qb, sb) = quantized(a, None, None), quantized(b, None, None)
        sa, sb = sa.reshape(()), sb.reshape(())
    elif recipe == "rowwise":
        (qa, sa), (qb, sb) = quantized(a, 1, None), quantized(b, 1, None)
        sb = sb.reshape(1, -1)
    else:
        kind = torch.nn.functional.ScalingType
        (qa, sa), (qb, sb) = quantized(a, 1, BLOCK), quantized(b, BLOCK if b_is_weight else 1, BLOCK)
        sa = sa.t().contiguous().t()  # the rows of one block of K lie together
        if b_is_weight:  # as (K / 128, N / 128) with K's blocks beside each other, their number a multiple of four
            sb = torch.nn.functional.pad(sb, (0, -sb.shape[1] % 4)).t()
        else:
            sb = sb.t().contiguous().t()
        of_b = kind.BlockWise128x128 if b_is_weight else kind.BlockWise1x128
        return lambda: torch.nn.functional.scaled_mm(
            qa, qb.t(), sa, kind.BlockWise1x128, sb, of_b, output_dtype=torch.bfloat16, use_fast_accum=fast
        )
    return lambda: torch._scaled_mm(qa, qb.t(), scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=fast)


def decibels(value: Tensor, true: Tensor) -> float:
    """20 log10(|true| / |true - value|)."""
    true = true.float()
    return float(20 * torch.log10(true.norm() / (true - value.float()).norm().clamp(min=1e-30)))


def products() -> list[dict[str, Any]]:
    rows = []
    for model, (tokens, linears) in SHAPES.items():
        for linear, (n, k) in linears.items():
            x, w, dy = (
                torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((tokens, k), (n, k), (tokens, n))
            )
            for direction, (a, b) in {
                "forward": (x, w), "dgrad": (dy, w.t().contiguous()), "wgrad": (dy.t().contiguous(), x.t().contiguous()),
            }.items():  # fmt: skip
                row: dict[str, Any] = {"model": model, "linear": linear, "direction": direction}
                row |= {"rows": tokens, "n": n, "k": k}
                true = a.float() @ b.float().t()
                for recipe in ("bfloat16", "tensorwise", "rowwise", "block"):
                    try:
                        call = product_by(recipe, a, b, direction == "forward", direction != "wgrad")
                        row[f"{recipe}_db"] = round(decibels(call(), true), 1)
                        row[f"{recipe}_us"] = round(do_bench(call, warmup=5, rep=25, return_mode="median") * 1e3, 1)
                    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
                        row[f"{recipe}_error"] = str(error).split("\n")[0][:300]
                rows.append(row)
    return rows


@triton.jit
def _rms_norm_row_scaled_kernel(x, w, y, scale, n, eps, WIDTH: tl.constexpr, FP8: tl.constexpr):
    """One row: y = x * rsqrt(mean(x^2) + eps) * w, in bfloat16 or in e4m3 with the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    seen = at < n
    value = tl.load(x + row * n + at, seen, 0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / n + eps) * tl.load(w + at, seen, 0.0).to(tl.float32)
    if FP8:
        largest = tl.maximum(tl.max(tl.abs(value)), 1e-12)
        tl.store(scale + row, largest / 448.0)
        value = value * (448.0 / largest)
    tl.store(y + row * n + at, value.to(y.dtype.element_ty), seen)


@triton.jit
def _swiglu_row_scaled_kernel(gate, up, y, scale, n, WIDTH: tl.constexpr, FP8: tl.constexpr):
    """One row: y = silu(gate) * up, in bfloat16 or in e4m3 with the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    seen = at < n
    g = tl.load(gate + row * n + at, seen, 0.0).to(tl.float32)
    value = g * tl.sigmoid(g) * tl.load(up + row * n + at, seen, 0.0).to(tl.float32)
    if FP8:
        largest = tl.maximum(tl.max(tl.abs(value)), 1e-12)
        tl.store(scale + row, largest / 448.0)
        value = value * (448.0 / largest)
    tl.store(y + row * n + at, value.to(y.dtype.element_ty), seen)


@triton.jit
def _swiglu_block_scaled_kernel(gate, up, y, y_t, scale, scale_t, m, n, BLOCK: tl.constexpr):
    """A tile of 128 x 128 of silu(gate) * up: e4m3 with a scale for 1 x 128, and transposed with one for 128 x 1."""
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, c = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    here = r[:, None] * n + c[None, :]
    g = tl.load(gate + here).to(tl.float32)
    value = g * tl.sigmoid(g) * tl.load(up + here).to(tl.float32)
    rows = tl.maximum(tl.max(tl.abs(value), 1), 1e-12)
    columns = tl.maximum(tl.max(tl.abs(value), 0), 1e-12)
    tl.store(scale + j * m + r, rows / 448.0)
    tl.store(scale_t + i * n + c, columns / 448.0)
    tl.store(y + here, (value * (448.0 / rows)[:, None]).to(y.dtype.element_ty))
    turned = tl.trans((value * (448.0 / columns)[None, :]).to(y_t.dtype.element_ty))
    tl.store(y_t + c[:, None].to(tl.int64) * m + r[None, :], turned)


@triton.jit
def _quantize_block_kernel(x, y, y_t, scale, scale_t, m, n, BLOCK: tl.constexpr):
    """A tile of 128 x 128 of x, as the kernel above writes its own."""
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, c = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    here = r[:, None] * n + c[None, :]
    value = tl.load(x + here).to(tl.float32)
    rows = tl.maximum(tl.max(tl.abs(value), 1), 1e-12)
    columns = tl.maximum(tl.max(tl.abs(value), 0), 1e-12)
    tl.store(scale + j * m + r, rows / 448.0)
    tl.store(scale_t + i * n + c, columns / 448.0)
    tl.store(y + here, (value * (448.0 / rows)[:, None]).to(y.dtype.element_ty))
    turned = tl.trans((value * (448.0 / columns)[None, :]).to(y_t.dtype.element_ty))
    tl.store(y_t + c[:, None].to(tl.int64) * m + r[None, :], turned)


@triton.jit
def _quantize_row_kernel(x, y, scale, n, WIDTH: tl.constexpr):
    """One row in e4m3 with its scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    value = tl.load(x + row * n + at, at < n, 0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value)), 1e-12)
    tl.store(scale + row, largest / 448.0)
    tl.store(y + row * n + at, (value * (448.0 / largest)).to(y.dtype.element_ty), at < n)


def producers_at(m: int, n: int, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """The kernels of these kinds on (m, n)."""
    rows: list[dict[str, Any]] = []
    x, up = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w, y16 = torch.ones(n, device="cuda", dtype=torch.bfloat16), torch.empty_like(x)
    y8, y8_t = (torch.empty(shape, device="cuda", dtype=E4M3) for shape in ((m, n), (n, m)))
    scale, blocks, blocks_t = (torch.empty(shape, device="cuda") for shape in ((m,), (n // BLOCK, m), (m // BLOCK, n)))
    width = triton.next_power_of_2(n)
    warps = 8 if width <= 4096 else 16
    both = (y8, y8_t, blocks, blocks_t, m, n)

    def timed(kernel: str, bytes_each: int, launch: Any, *given: Any, **constants: Any) -> None:
        ms = do_bench(lambda: launch(*given, **constants), warmup=10, rep=50, return_mode="median")
        rate = round(bytes_each * m * n / ms / 1e6)
        rows.append({"kernel": kernel, "rows": m, "width": n, "us": round(ms * 1e3, 1), "gb_s": rate})

    row = {"WIDTH": width, "num_warps": warps}
    for dtype, fp8, y in (("bfloat16", False, y16), ("e4m3 and a scale a row", True, y8)):
        size = 1 if fp8 else 2
        if "norm" in kinds:
            timed(f"norm, {dtype}", 2 + size, _rms_norm_row_scaled_kernel[(m,)], x, w, y, scale, n, 1e-5, FP8=fp8, **row)
        if "swiglu" in kinds:
            timed(f"swiglu, {dtype}", 4 + size, _swiglu_row_scaled_kernel[(m,)], x, up, y, scale, n, FP8=fp8, **row)
    timed("quantize a row", 3, _quantize_row_kernel[(m,)], x, y8, scale, n, **row)
    tiles = (m // BLOCK, n // BLOCK)
    for count in (4, 8):
        said = f"blocks of both directions, {count} warps"
        timed(f"quantize, {said}", 4, _quantize_block_kernel[tiles], x, *both, BLOCK=BLOCK, num_warps=count)
        if "swiglu" in kinds:
            timed(f"swiglu, {said}", 6, _swiglu_block_scaled_kernel[tiles], x, up, *both, BLOCK=BLOCK, num_warps=count)
    return rows


def producers() -> list[dict[str, Any]]:
    rows = []
    for m, hidden, inner in ((16384, 2048, 8192), (4096, 4096, 14336)):
        rows += producers_at(m, hidden, ("norm",)) + producers_at(m, inner, ("swiglu",))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="bench/results/float8_products.jsonl")
    given = parser.parse_args()
    rows = [*producers(), *products()]
    with open(given.out, "w") as file:
        for row in rows:
            file.write(json.dumps(row | {"environment": environment()}) + "\n")
    print(tabulate([row for row in rows if "kernel" in row], headers="keys"))
    table: list[tuple[Any, ...]] = []
    for row in rows:
        if "kernel" not in row:
            base = row["bfloat16_us"]
            ratios = [
                f"{base / row[f'{r}_us']:.2f} ({row[f'{r}_db']} dB)" if f"{r}_us" in row else row[f"{r}_error"][:60]
                for r in ("tensorwise", "rowwise", "block")
            ]
            rate = 2 * row["rows"] * row["n"] * row["k"] / base / 1e6
            table.append((row["model"], row["linear"], row["direction"], base, f"{rate:.0f}", *ratios))
    headers = ("model", "linear", "product", "bf16 us", "TFLOP/s", "tensorwise x", "rowwise x", "block x")
    print(tabulate(table, headers=headers))


if __name__ == "__main__":
    main()
