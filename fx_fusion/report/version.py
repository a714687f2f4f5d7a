"""The report of a graph that is about to be rewritten, and of which other graph it is a version."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx

from fx_fusion.frontend import left_alone, libraries_in, written_out_in
from fx_fusion.graph.devices import planned_gpu
from fx_fusion.options import Options
from fx_fusion.report.diff import rows
from fx_fusion.report.graph import GraphReport
from fx_fusion.runtime.reads import Reads
from fx_fusion.torch_internals.dynamo import current_compile_id, why_it_ends

graph_numbers = itertools.count()


@dataclass(frozen=True)
class Version:
    """Another version of a graph: of which, in words which, who counts how its deferred outputs are read, what it assumes of
    inputs, by their names in that graph, and those names."""

    of: int
    sentence: str
    reads: Reads | None = None
    assumes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


def new_report(gm: fx.GraphModule, version: Version | None, options: Options) -> GraphReport:
    """The report of a graph that is as Dynamo wrote it."""
    compile_id, attempt = current_compile_id()
    broke, unknown = why_it_ends(gm), left_alone()
    report = GraphReport(
        index=next(graph_numbers),
        rows_before=rows(gm),
        nodes_before=len(gm.graph.nodes),
        compile_id=compile_id,
        attempt=attempt,
        broke=" ".join((broke, *unknown)) if broke else "",
        front_ends=libraries_in(gm.graph),
        written_out=written_out_in(gm.graph),
        planned_for=planned_gpu(),
        options=options.given(),
    )
    if version is not None:
        report.instead_of, report.version = version.of, version.sentence
        report.reads, report.assumes = version.reads or report.reads, version.assumes
    return report
