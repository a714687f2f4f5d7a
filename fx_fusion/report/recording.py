"""Record what a thread compiles, in the reports that are active there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from fx_fusion.report.graph import GraphReport
from fx_fusion.report.report import Report
from fx_fusion.report.site import Site

_active: ContextVar[tuple[Report, ...]] = ContextVar("recordings", default=())  # of this thread


@contextlib.contextmanager
def recording() -> Iterator[Report]:
    """``with fx_fusion.recording() as report:`` collects what this thread compiles inside."""
    report = Report()
    with recording_in((report,)):
        yield report


@contextlib.contextmanager
def recording_in(reports: Iterable[Report]) -> Iterator[None]:
    """Yield what this thread compiles inside is added to these reports too."""
    known = _active.get()
    before = _active.set((*known, *(r for r in reports if not any(r is k for k in known))))
    try:
        yield
    finally:
        _active.reset(before)


def recordings() -> tuple[Report, ...]:
    """The reports that record what this thread compiles now."""
    return _active.get()


def publish(graph: GraphReport, sites: list[Site]) -> None:
    """Hand one graph's result to everybody who records."""
    for report in _active.get():
        report.record(graph, sites)
