"""Attention under windows, packed documents and chunks, or written out with a softcap or a sink, FlexAttention against
Inductor's code: ``python -m bench.windows``.

Each at some sizes, bfloat16, forward and forward + backward, Inductor and fx_fusion, as CUDA graphs with the L2
cleared. Results are compared with each other before they are timed.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from tabulate import tabulate
from torch import Tensor

import fx_fusion
from bench.process import environment
from fx_fusion.cost.timing import device_ms

Mask = Callable[[Tensor], Tensor]  # of position ids (b, s)
SOFTCAP, SINK = "softcap, ", "sink, "  # in the name of a case


def positions(ids: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(ids.shape[1], device=ids.device)
    return at[:, None], at[None, :]


def band(low: int, high: int) -> Mask:
    def mask(ids: Tensor) -> Tensor:
        q, k = positions(ids)
        return (q - k >= low) & (q - k <= high)

    return mask


def chunks(size: int) -> Mask:
    def mask(ids: Tensor) -> Tensor:
        q, k = positions(ids)
        return (k <= q) & (q // size == k // size)

    return mask


def documents(ids: Tensor) -> Tensor:
    number = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    q, k = positions(ids)
    return (number[:, None, :, None] == number[:, None, None, :]) & (k <= q)


# name, batch, heads, heads of keys, length, head dim, mask, documents in a row
CASES: tuple[tuple[str, int, int, int, int, int, Mask, int], ...] = (
    ("window 64", 2, 16, 16, 128, 64, band(0, 63), 1),
    ("window 64", 2, 16, 16, 300, 64, band(0, 63), 1),
    ("window 128", 32, 16, 16, 256, 64, band(0, 127), 1),
    ("window 256", 16, 16, 16, 512, 128, band(0, 255), 1),
    ("window 256", 8, 16, 16, 1024, 64, band(0, 255), 1),
    ("window 1024", 8, 32, 8, 2048, 64, band(0, 1023), 1),
    ("window 512", 4, 4, 1, 2048, 256, band(0, 511), 1),
    ("window 1024", 1, 8, 4, 8192, 256, band(0, 1023), 1),
    ("window 4096", 1, 32, 8, 8192, 128, band(0, 4095), 1),
    ("+-64", 32, 12, 12, 512, 64, band(-64, 64), 1),
    ("+-1500", 4, 16, 16, 2048, 64, band(-1500, 1500), 1),
    ("+-64", 2, 12, 12, 8192, 64, band(-64, 64), 1),
    ("chunks of 2048", 1, 32, 8, 8192, 128, chunks(2048), 1),
    ("4 documents", 2, 32, 8, 4096, 128, documents, 4),
    ("8 documents", 1, 32, 8, 8192, 128, documents, 8),
    *((SOFTCAP + "causal", b, 8, 4, s, 256, band(0, s), 1) for b, s in ((1, 1024), (1, 4096), (4, 4096))),
    *((SOFTCAP + "causal", 1, 32, 16, s, 128, band(0, s), 1) for s in (1024, 4096)),
    (SOFTCAP + "window 1024", 1, 8, 4, 4096, 256, band(0, 1023), 1),
    *((SINK + "causal", 1, 64, 8, s, 64, band(0, s), 1) for s in (256, 512, 1024, 2048)),
    *((SINK + "window 128", 1, 64, 8, s, 64, band(0, 127), 1) for s in (512, 2048)),
    ("written out, window 1024", 2, 32, 8, 2048, 128, band(0, 1023), 1),
)


def measure(name: str, b: int, h: int, g: int, s: int, d: int, mask: Mask, packed: int) -> dict:
    qkv = [torch.randn(b, s, n, d, device="cuda", dtype=torch.bfloat16) for n in (h, g, g)]
    ids = (torch.arange(s, device="cuda") % (s // packed)).expand(b, s).contiguous()
    dy = torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16)

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(h // g, dim=1) if g < h else t for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(ids))

    def write_out(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        """As transformers does, for what scaled_dot_product_attention has not."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t[:, :, None].expand(-1, -1, h // g, -1, -1).reshape(b, h, s, d) for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * d**-0.5
        if name.startswith(SOFTCAP):
            scores = torch.tanh(scores / 50.0) * 50.0
        scores = scores + torch.where(mask(ids), 0.0, torch.finfo(q.dtype).min).to(q.dtype)
        if not name.startswith(SINK):
            return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(b, -1, s, -1)], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return torch.matmul(torch.softmax(scores, -1)[..., :-1], v)

    sinks = torch.randn(h, device="cuda", dtype=torch.bfloat16)
    written = name.startswith((SOFTCAP, SINK, "written out"))
    row = {"mask": name, "b": b, "h": h, "g": g, "s": s, "d": d}
    results = {}
    for provider in ("inductor", "fx_fusion"):
        torch._dynamo.reset()
        options = {"select": "always", "speculate": False} if provider == "fx_fusion" else None
        compiled = torch.compile(write_out if written else attend, backend=provider, dynamic=False, options=options)

        def both_ways(given: list[Tensor], compiled: Callable[..., Tensor] = compiled) -> list[Tensor]:
            out = compiled(*given, ids)
            return [out, *torch.autograd.grad(out, given, dy)]

        def forward(compiled: Callable[..., Tensor] = compiled) -> Tensor:
            with torch.no_grad():
                return compiled(*qkv, ids)

        # Leaves of their own: what of an older graph is still there would tie a captured one to its stream.
        checked, timed = ([t.detach().clone().requires_grad_() for t in qkv] for _ in range(2))
        with fx_fusion.recording() as report:
            results[provider] = both_ways(checked)
        if provider == "fx_fusion":
            report.assert_fused(**{"flex_attention" if written else "block_sparse_attention": 1})
            for ours, theirs in zip(*results.values(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())
        modes = {"forward": forward, "forward+backward": functools.partial(both_ways, timed)}
        row[provider] = {mode: round(device_ms(call), 4) for mode, call in modes.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--out", default="bench/results/windows.jsonl")
    given = parser.parse_args()
    rows = []
    for case in track([c for c in CASES if not given.only or any(part in c[0] for part in given.only)], "measuring"):
        rows.append({**measure(*case), "environment": environment()})
        with Path(given.out).open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    table = []
    for row in rows:
        theirs, ours = (row[p]["forward+backward"] for p in ("inductor", "fx_fusion"))
        size = f"{row['b']} x {row['h']}({row['g']}) x {row['s']} x {row['d']}"
        table.append([row["mask"], size, theirs, ours, round(theirs / ours, 2)])
    print(tabulate(table, headers=["mask", "size", "Inductor ms", "fx_fusion ms", "x Inductor"]))


if __name__ == "__main__":
    main()
