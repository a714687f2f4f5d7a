"""``python -m bench.row_losses``: losses that treat rows one by one and have no kernel of their own, with their lm_head.

Each row is a process of its own: the first step with cold caches, the time of a step, the peak above what is there before
(x, lm_head, the teacher's logits, the gradients), and the first step of a second process, with warm caches."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.process import Row, give, measured
from fx_fusion.patterns.linear_rows import linear_then_rows

BACKENDS = ("eager", "inductor", "auto_chunker", "fx_fusion")


def _ppo(x: Tensor, lm_head: Tensor, bias: None, values: Tensor) -> Tensor:
    """A clipped ratio, an entropy bonus and a z-loss. The old log-probabilities and advantages are columns of ``values``."""
    log_p = F.linear(x, lm_head).float().log_softmax(-1)
    label = torch.arange(len(x), device=x.device) % lm_head.shape[0]
    ratio = (log_p.gather(-1, label[:, None]).squeeze(-1) - values[:, 0].float()).exp()
    gain = torch.min(ratio * values[:, 1], ratio.clamp(0.8, 1.2) * values[:, 1])
    return -(gain - 0.01 * (log_p.exp() * log_p).sum(-1)).mean()


def _policy(x: Tensor, lm_head: Tensor, bias: None, values: Tensor) -> Tensor:
    """A ratio to old log-probabilities times an advantage, columns of ``values``: GRPO's loss inside of its clipping."""
    label = torch.arange(len(x), device=x.device) % lm_head.shape[0]
    log_p = F.linear(x, lm_head).float().log_softmax(-1).gather(-1, label[:, None]).squeeze(-1)
    return -((log_p - values[:, 0].float() + 11).exp() * values[:, 1]).mean()


def _top_k(x: Tensor, lm_head: Tensor, bias: None, values: Tensor) -> Tensor:
    """Forward KL on the teacher's 64 likeliest classes."""
    top, index = values.float().topk(64, dim=-1)
    log_p = F.linear(x, lm_head).float().log_softmax(-1).gather(-1, index)
    return F.kl_div(log_p, top.log_softmax(-1), reduction="batchmean", log_target=True)


def _reverse_kl(z: Tensor, t: Tensor) -> Tensor:
    log_p, log_q = z.float().log_softmax(-1), t.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _with_a_teacher(x: Tensor, lm_head: Tensor, bias: None, values: Tensor) -> Tensor:
    """Reverse KL to logits that a frozen head makes in the same graph, of columns of ``values``."""
    with torch.no_grad():
        t = F.linear(values[:, : x.shape[1]], lm_head)
    return _reverse_kl(F.linear(x, lm_head), t).mean()


def _of_half_of_the_rows(x: Tensor, lm_head: Tensor, bias: None, values: Tensor) -> Tensor:
    """Reverse KL of every other row, as where prompts are not trained."""
    mask = (torch.arange(len(x), device=x.device) % 2).float()
    return (_reverse_kl(F.linear(x, lm_head), values) * mask).sum() / mask.sum()


LOSSES: dict[str, Callable[..., Tensor]] = {
    **{kind: partial(linear_then_rows, kind=kind) for kind in ("reverse_kl", "total_variation", "jensen_shannon")},
    "policy_gradient": _policy, "ppo_with_entropy": _ppo, "top_k_distillation": _top_k,
    "with_a_teacher": _with_a_teacher, "of_half_of_the_rows": _of_half_of_the_rows,
}  # fmt: skip


def _step(loss: str, backend: str) -> Callable[..., Tensor]:
    function = LOSSES[loss]
    if backend == "eager":
        return function
    if backend == "auto_chunker":
        import torch._inductor.config as config

        config.auto_chunker.enable = True  # AttributeError: this torch has none
        backend = "inductor"

    def compiled(x: Tensor, lm_head: Tensor, bias: None, values: Tensor) -> Tensor:
        return function(x, lm_head, bias, values)

    return torch.compile(compiled, backend=backend, dynamic=False)


def _measure(loss: str, backend: str, m: int, h: int, v: int) -> Row:
    torch.manual_seed(0)
    x = torch.randn(m, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    lm_head = (torch.randn(v, h, device="cuda", dtype=torch.bfloat16) / h**0.5).requires_grad_()
    values = torch.randn(m, v, device="cuda", dtype=torch.bfloat16)
    step = _step(loss, backend)

    def run() -> Tensor:
        x.grad = lm_head.grad = None
        result = step(x, lm_head, None, values)
        result.backward()
        return result

    start = time.perf_counter()
    number = run().item()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(3):
        run()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    there = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    norms = [t.grad.float().norm().item() for t in (x, lm_head) if t.grad is not None]
    return {
        "loss": loss, "backend": backend, "m": m, "h": h, "v": v, "ms": round(statistics.median(times), 2),
        "ms_least": round(min(times), 2), "gib": round((torch.cuda.max_memory_allocated() - there) / 2**30, 2),
        "first_s": round(first, 1), "value": number, "norms": norms, "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("losses", nargs="*", default=[])
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--hidden", default="2048,4096")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--inner", action="store_true", help="measure in this process")
    given = parser.parse_args()
    if given.inner:
        give(_measure(given.losses[0], given.backends, given.rows, int(given.hidden), given.classes))
        return
    for loss in given.losses or LOSSES:
        for hidden in given.hidden.split(","):
            for backend in given.backends.split(","):
                sizes = ["--hidden", hidden, "--rows", str(given.rows), "--classes", str(given.classes)]
                with tempfile.TemporaryDirectory() as cache:
                    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                    arguments = ["bench.row_losses", loss, "--backends", backend, "--inner", *sizes]
                    row = {"loss": loss, "backend": backend, "h": int(hidden), **measured(arguments, 300)}
                    if "error" not in row and backend == "fx_fusion":
                        row["first_warm_s"] = measured(arguments, 300).get("first_s")
                print(json.dumps(row), flush=True)
                if given.write:
                    with Path(given.write).open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
