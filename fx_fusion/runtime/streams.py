"""Streams of a GPU: what is computed later runs where its operands are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fx_fusion.runtime.capture import is_capturing


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of a device that work goes to now; None where there are none, and while a CUDA graph is captured, whose
    replays run on any."""
    if device.type != "cuda" or not torch.cuda.is_initialized() or is_capturing():
        return None
    return torch.cuda.current_stream(device)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Send work inside to ``stream``, in whose order operands are written to and freed, behind what the reader's own stream
    has done (copies of operands), which waits for it then."""
    here = None if stream is None else stream_of(stream.device)
    if stream is None or here is None or here == stream:
        yield
        return
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield
    here.wait_stream(stream)
