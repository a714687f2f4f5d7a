"""Measure how FlexAttention's kernels are best tiled, by head dim: what ``kernels/block_sparse_attention.py`` holds.

    python -m bench.attention_tiles [--out bench/results/attention_tiles.jsonl]

Several processes compile, one at a time measures: milliseconds forward and backward, medians, in bfloat16, for Inductor's
own choice (null) and the tilings below, under padding, causal padding and windows. A minute and a half on 16 cores.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

Tiles = tuple[int, ...] | None
# batch, heads, heads of keys, length, head dim, mask
CASES = {
    "bert64": (64, 12, 12, 512, 64, "keys"), "llama64": (4, 32, 8, 2048, 64, "causal"),
    "llama128": (2, 32, 8, 4096, 128, "causal"), "mistral128": (1, 32, 8, 8192, 128, "window"),
    "gemma256": (2, 8, 4, 4096, 256, "window"), "t32": (16, 16, 16, 1024, 32, "keys"),
}  # fmt: skip
# BLOCK_M, BLOCK_N, warps, stages; and BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2, warps, stages.
FORWARD: tuple[Tiles, ...] = (
    None, (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3),
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (128, 128, 8, 2),
)  # fmt: skip
BACKWARD: tuple[Tiles, ...] = (
    None, (64, 64, 64, 64, 4, 3), (64, 64, 64, 64, 4, 2), (64, 128, 128, 64, 8, 3), (64, 128, 128, 64, 8, 2),
    (32, 64, 64, 32, 4, 3), (32, 64, 64, 32, 4, 2), (32, 128, 128, 32, 4, 2), (64, 64, 64, 64, 8, 2), (64, 64, 64, 64, 4, 1),
    (32, 64, 64, 32, 8, 2), (64, 64, 64, 64, 8, 3),
)  # fmt: skip
SHARES = (1.0, 0.75, 0.875, 0.53125, 0.9375, 0.8125, 0.65625, 1.0)  # of a row that is no padding
LOCK = Path(tempfile.gettempdir()) / "fx_fusion_attention_tiles.lock"


def measure(task: tuple[str, Tiles, Tiles]) -> dict[str, Any]:
    """Time one case with one tiling in each direction."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    from triton.testing import do_bench

    from fx_fusion.kernels.block_sparse_attention import _BACKWARD, _FORWARD, BLOCK, visible_blocks

    case, forward, backward = task
    batch, heads, groups, length, dim, kind = CASES[case]
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    made = (torch.randn(batch, length, n, dim, dtype=torch.bfloat16).transpose(1, 2) for n in (heads, groups, groups, heads))
    query, key, value, gradient = (t.requires_grad_() for t in made)
    lengths = [int(length * SHARES[i % 8]) for i in range(batch)]
    shown = torch.arange(length) < torch.tensor(lengths)[:, None]
    low, high = {"keys": (None, None), "causal": (0, None), "window": (0, 1023)}[kind]

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        if kind == "window":
            return (q >= k) & (q - k <= 1023)
        return shown[b, k] & (q >= k) if kind == "causal" else shown[b, k]

    blocks = visible_blocks(query, key, [], [] if kind == "window" else [shown], [], low, high)
    mask = BlockMask((length, length), *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)
    options = dict([*zip(_FORWARD, forward or (), strict=False), *zip(_BACKWARD, backward or (), strict=False)])
    row = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    row |= {"case": case, "forward": forward, "backward": backward}
    given = {"block_mask": mask, "enable_gqa": heads != groups, "kernel_options": options or None}
    try:
        attend = torch.compile(lambda: flex_attention(query, key, value, **given))
        out = attend()

        def differentiate() -> Any:
            return torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

        differentiate()
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            times = [do_bench(call, rep=60, return_mode="median") for call in (attend, differentiate)]
    except Exception as error:  # a tiling that does not fit this GPU: the row says so, the others go on
        return {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**row, "forward_ms": round(times[0], 3), "backward_ms": round(times[1], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="bench/results/attention_tiles.jsonl")
    given = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    tasks = [(case, *tiles) for case, tiles in itertools.product(CASES, zip(FORWARD, BACKWARD, strict=True))]
    workers = multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1))
    with workers as pool, Path(given.out).open("a") as file:
        for row in pool.imap_unordered(measure, tasks):
            file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
