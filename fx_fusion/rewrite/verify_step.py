"""``options={"verify": "graph"}``: in the first call of each graph, the whole compiled graph is compared with the graph that
Dynamo captured: results, what was written to inputs, and the gradient of every input that needs one, by the rule
(``fx_fusion.accuracy``). That includes what Inductor makes of the rest, and outputs that are computed when they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.errors import VerificationError
from fx_fusion.rewrite.verify_graph import Verified, can_compare, gpus, written_inputs
from fx_fusion.rewrite.verify_site import NotComparable, SiteCheck, compared, table
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.runtime.reads import Reads

Compiled = Callable[..., Any]


def verifying_step(
    untouched: fx.GraphModule, when: bool | str, index: int, reads: Reads, verified: Verified
) -> Callable[[Compiled], Compiled]:
    """The layer that compares a compiled graph with ``untouched`` before its first call, if ``when`` is "graph". It raises
    VerificationError if the graph is wrong.

    Args:
        index: the graph's number in the report.
        reads: counts who reads deferred outputs; the comparison is not counted.
    """
    if when != "graph":
        return lambda compiled: compiled
    written = written_inputs(untouched)

    def around(compiled: Compiled) -> Compiled:
        compares = True

        def run(*args: Any) -> Any:
            nonlocal compares
            tensors = [a for a in args if isinstance(a, Tensor)]
            if compares and can_compare(tensors):
                compares = False
                with torch.random.fork_rng(gpus(tensors)), reads.uncounted():
                    _verify(f"graph {index}", compiled, untouched, args, written, verified)
            return compiled(*args)

        return run

    return around


def _verify(
    place: str,
    compiled: Compiled,
    untouched: fx.GraphModule,
    args: Sequence[Any],
    written: Sequence[int],
    verified: Verified,
) -> None:
    check = _step_of(place, compiled, untouched, args, written)
    try:
        if written and _share_memory(args):
            raise NotComparable("it writes to an input, and inputs of it share memory")
        rows = compared(check, dict(zip(check.inputs, args, strict=True)))
    except NotComparable as why:
        verified.skipped[f"{place} as a whole"] = str(why)
        return
    verified.step = rows[0].used
    if not rows[0].ok:
        raise VerificationError(
            f"{place}, as a whole, is wrong on the inputs of this call.\n{table(rows)}\n"
            "which replacement it is: print(fx_fusion.verify(model, **batch)); "
            'whether it is one: options={"select": "never", "verify": "graph"} compiles without any'
        )


def _step_of(
    place: str, compiled: Compiled, untouched: fx.GraphModule, args: Sequence[Any], written: Sequence[int]
) -> SiteCheck:  # fmt: skip
    """A whole graph as a site that reads every argument; what it writes to is a result of it too."""
    inputs = tuple(node.name for node in untouched.graph.find_nodes(op="placeholder"))
    results = untouched.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    outputs = (*(f"{result} ({i})" for i, result in enumerate(results)), *(f"{inputs[i]}, written" for i in written))

    def with_what_is_written(function: Compiled) -> Compiled:
        def step(*given: Any) -> tuple[Any, ...]:
            outs = [out.materialize() if type(out) is DeferredTensor else out for out in function(*given)]
            return (*outs, *(given[i] for i in written))

        return step

    needs = [isinstance(a, Tensor) and a.requires_grad and torch.is_grad_enabled() for a in args]
    return SiteCheck(
        place, "", with_what_is_written(untouched), with_what_is_written(compiled), inputs, outputs,
        trained=frozenset(name for name, needed in zip(inputs, needs, strict=True) if needed),
        differentiated=frozenset(outputs), at="",
    )  # fmt: skip


def _share_memory(args: Sequence[Any]) -> bool:
    plain = [a for a in args if type(a) in (Tensor, torch.nn.Parameter) and a.numel()]
    return any(count > 1 for count in Counter(a.untyped_storage().data_ptr() for a in plain).values())
