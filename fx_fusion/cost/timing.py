"""Take times: CUDA-graph replays with the L2 cleared for the device, calls in a row for the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def copy_rate() -> float:
    """Bytes a second (read and written) of a large device-to-device copy: what 100 % of the bandwidth is."""
    from triton.testing import do_bench

    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    ms = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.numel() * 4 / ms * 1e3


def cpu_in_turns(calls: Sequence[Call], rounds: int = 10) -> list[float]:
    """Milliseconds of each call on the CPU: the median of some, taken in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return [statistics.median(found) * 1e3 for found in times]


def device_ms(call: Call) -> float:
    """Milliseconds on the GPU: one call captured as a CUDA graph, median of replays, L2 cleared before each."""
    return in_turns([call])[0]


def in_turns(calls: Sequence[Call], rounds: int = 5, long: float = 1.0) -> list[float]:
    """``device_ms`` of each. Calls of more than ``long`` milliseconds take turns, and the median of the rounds counts: how
    fast a GPU multiplies depends on what it did before, by 10 % and more."""
    from triton.testing import do_bench

    pool = torch.cuda.graph_pool_handle()  # one for all: what a call makes is dead when the next one runs
    graphs = [_captured(call, pool) for call in calls]
    times = [[do_bench(graph.replay, warmup=5, rep=25, return_mode="median")] for graph in graphs]
    if len(graphs) > 1 and max(map(max, times)) > long:
        for _ in range(rounds - 1):
            for graph, found in zip(graphs, times, strict=True):
                found.append(do_bench(graph.replay, warmup=5, rep=50, return_mode="median"))
    for graph in graphs:
        graph.reset()
    return [statistics.median(found) for found in times]


def _captured(call: Call, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()
    return graph


def call_ms(call: Call) -> float:
    """Milliseconds of one call on the GPU as it is launched, the host's time included where it is longer."""
    from triton.testing import do_bench

    return do_bench(call, warmup=5, rep=25, return_mode="median")


def host_us(call: Call, calls: int = 20) -> float:
    """Microseconds of the host a call, the device not waited for (it is the larger of the two where it is slower)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def peak_mib(call: Call) -> float:
    """MiB allocated during a call beyond what was there before."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
