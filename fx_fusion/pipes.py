"""Decide what a command does when the program that reads its output, as ``head``, ends first."""

from __future__ import annotations

import os
import select
import sys

READER_ENDED = 141  # the exit code that a shell gives to a program that SIGPIPE ended


def reader_ended() -> bool:
    """Return True if stdout or stderr is a pipe without a reader."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def discard_output() -> None:
    """Send stdout and stderr to nowhere, because Python writes what is left of them when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
