"""Measure where the memory of a training step goes: what is saved for the backward, and what lives at the peak.

    python -m bench.memory llama-1b --variant fx_fusion --options '{"memory": "min"}'

Trains one of the models of ``bench.models`` for three steps and prints two tables. What the forward saves: bytes by what
computed it and by module, from AOTAutograd's partitioner. What lives at the peak of the third step: bytes by the phase
(forward, backward, optimizer) and the line of code that asked for them, from the allocator's history.
"""

from __future__ import annotations

import argparse
import itertools
import json
import linecache
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from bench.families import FAMILIES

GIB = 2**30
Event = dict[str, Any]


@dataclass(frozen=True)
class Peak:
    """The most that was allocated. ``at``: the index of its event; ``bytes``: above what was allocated before the first;
    ``living``: the events of the blocks that live then."""

    at: int
    bytes: int
    living: tuple[Event, ...]


def peak(events: list[Event]) -> Peak:
    """The peak of an allocator's history: ``alloc`` and ``free_requested`` events with an address and a size."""
    living: dict[int, Event] = {}
    total = most = 0
    at, then = -1, ()
    for i, event in enumerate(events):
        if event["action"] == "alloc":
            living[event["addr"]] = event
            total += event["size"]
        elif event["action"] == "free_requested":  # the caching allocator counts it as free from here on
            living.pop(event["addr"], None)
            total -= event["size"]
        if total > most:
            most, at, then = total, i, tuple(living.values())
    return Peak(at, most, then)


def line_of(event: Event) -> str:
    """The line of code that asked for a block: the innermost of generated code, else of Python's that is not torch's."""
    frames = [f for f in event.get("frames", ()) if f["filename"].endswith(".py")]
    generated = [f for f in frames if "torchinductor" in f["filename"]]
    others = [f for f in frames if "/torch/" not in f["filename"]]
    for frame in (*generated[:1], *others[:1], *frames[:1]):
        text = linecache.getline(frame["filename"], frame["line"]).strip()
        shape = re.search(r"empty_strided\w*\((\([^)]*\)).*(torch\.\w+)\)", text)
        return f"{shape[1]} {shape[2].removeprefix('torch.')}" if shape else text[:90]
    return "autograd"  # no Python on the stack: the engine's own threads


def saved_by_kind(partitions: Iterable[tuple[Any, int]]) -> list[tuple[str, str, int, float]]:
    """Return what computed it, module, how many, bytes: of forward graphs with as many outputs of their own."""
    import torch

    from fx_fusion.memory.candidates import name_of
    from fx_fusion.memory.joint_graph import base, bytes_of

    count, size = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    seen = set()
    for forward, own in partitions:
        for node in forward.graph.output_node().args[0][own:]:
            if not hasattr(node, "op"):
                continue
            node = base(node)
            while getattr(node.target, "_overloadpacket", None) is torch.ops.aten.reshape:  # what Inductor makes of views
                node = base(node.args[0])
            if node in seen or not bytes_of(node):
                continue
            seen.add(node)
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            module = re.sub(r"\.\d+(?=\.|$)", ".*", str(stack[-1][0])).removeprefix("L['self'].") if stack else ""
            source = node.args[0] if node.target is operator.getitem else node
            kind = "an input or a parameter" if source.op in ("placeholder", "get_attr") else name_of(source)
            key = (kind, "" if source.op == "placeholder" else module)
            count[key] += 1
            size[key] += int(bytes_of(node))
    return [(*key, count[key], size[key]) for key in sorted(size, key=lambda key: -size[key])]


def partitions_into(found: list[tuple[Any, int]]) -> Any:
    """Torch's own partitioner, which writes down each forward graph and the number of its outputs."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **given: Any) -> Any:
            both = min_cut_rematerialization_partition(gm, joint_inputs, **given)
            found.append((both[0], given["num_fwd_outputs"]))
            return both

        def uuid(self) -> None:
            return None

    return Partitioner()


def history(step: Callable[[Callable[[str], None]], None]) -> tuple[list[Event], dict[str, float]]:
    """The allocator's events during a step, and when (microseconds) each of its phases began."""
    import torch

    began: dict[str, float] = {}

    def phase(name: str) -> None:
        torch.cuda.synchronize()
        began[name] = time.time() * 1e6

    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        step(phase)
        torch.cuda.synchronize()
        return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()], began
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--variant", default="fx_fusion", choices=("eager", "inductor", "fx_fusion"))
    parser.add_argument("--options", default="{}", help="options of fx_fusion, as JSON")
    parser.add_argument("--rows", type=int, default=12, help="of each table")
    given = parser.parse_args()

    import torch

    family = FAMILIES[given.family]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model, inputs, _ = family.build(given.batch or family.batch, given.length or family.length)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)
    call = model
    if given.variant == "inductor":
        call = torch.compile(model)
    elif given.variant == "fx_fusion":
        call = torch.compile(model, backend="fx_fusion", options=json.loads(given.options))

    def step(phase: Callable[[str], None]) -> None:
        batch = inputs(0)
        phase("forward")
        loss = family.loss_of(call(**batch), batch)
        phase("backward")
        loss.backward()
        phase("optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    partitions: list[tuple[Any, int]] = []
    with torch._inductor.config.patch(custom_partitioner_fn=partitions_into(partitions), force_disable_caches=True):
        for _ in range(2):
            step(lambda name: None)
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    events, began = history(step)
    most = torch.cuda.max_memory_allocated()

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"{given.family}, {given.variant} {given.options}: peak {most / GIB:.2f} GiB; "
          f"{rest / GIB:.2f} between steps, {size / GIB:.2f} of them parameters")  # fmt: skip
    rows = saved_by_kind(partitions)
    print(f"\nsaved for the backward: {sum(r[3] for r in rows if r[0] != 'an input or a parameter') / GIB:.2f} GiB")
    print(_table(("GiB", "of", "computed by", "in"), ((r[3], r[2], r[0], r[1]) for r in rows), given.rows))
    found = peak(events)
    phases = [(name, start) for name, start in began.items()]

    def phase_of(event: Event) -> str:
        return next((name for name, start in reversed(phases) if event["time_us"] >= start), "before")

    moment = events[found.at]
    print(f"\nthe peak, {(rest + found.bytes) / GIB:.2f} GiB, is in the {phase_of(moment)}, at {line_of(moment)}")
    count, blocks = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for event in found.living:
        key = phase_of(event), line_of(event)
        count[key] += 1
        blocks[key] += event["size"]
    rows_of_blocks = ((size, count[key], *key) for key, size in blocks.most_common())
    print(_table(("GiB", "blocks", "from the", "line"), rows_of_blocks, given.rows))


def _table(headers: tuple[str, ...], rows: Iterable[tuple[Any, ...]], most: int) -> str:
    shown = [(f"{r[0] / GIB:.2f}", *r[1:]) for r in itertools.islice(rows, most)]
    return tabulate(shown, headers=headers, disable_numparse=True)


if __name__ == "__main__":
    main()
