"""What does the same as a fusion, and no site names: so that nothing is silent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fx_fusion.report.diff import Row
from fx_fusion.report.site import Site

# Ops that normalise rows, weigh by a softmax, or are a loss.
_TELLING = re.compile(
    r"= \.?(rsqrt|sqrt|norm|layer_norm|rms_norm|group_norm|instance_norm|normalize|linalg_vector_norm|vector_norm"
    r"|softmax|log_softmax|logsumexp|cross_entropy|nll_loss|kl_div)\("
)


class Unsaid(NamedTuple):
    """An op that no site is about, in a module that no site is in."""

    op: str
    module: str
    location: str
    row: str  # its name


def unsaid(rows: Sequence[Row], sites: Iterable[Site]) -> list[Unsaid]:
    """Of one graph: its rows before, and its sites."""
    sites = list(sites)
    named = {name for site in sites for name in site.nodes}
    spoken = {site.module for site in sites if site.module} | {site.location for site in sites if not site.module}
    found = []
    for row in rows:
        op = _TELLING.search(row.text)
        if op is not None and row.name not in named and (row.module or row.location) not in spoken:
            found.append(Unsaid(op[1], row.module, row.location, row.name))
    return found
