"""A measurement in a process of its own: it prints its row, and cannot disturb the next one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
MARK, READY = "ROW ", "READY"


def give(row: Row) -> None:
    """Hand a row from the inner process to the outer one."""
    print(MARK + json.dumps(row), flush=True)


def measured(arguments: list[str], timeout: int) -> Row:
    """The last row that ``python -m ...`` gives; with ``error`` if it gives none. Its errors go to ours."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, timeout=timeout
        )
        said, errors = done.stdout, done.stderr
        why = (errors.strip().splitlines() or ["no output"])[-1][:90]
    except subprocess.TimeoutExpired as late:
        said, errors = ((stream or b"").decode(errors="replace") for stream in (late.stdout, late.stderr))
        why = f"no result after {timeout} s"
    rows = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
    if not rows:
        print(errors[-3000:], file=sys.stderr)
        return {"error": why}
    return json.loads(rows[-1])


def wait_for_turn() -> None:
    """Wait in an inner process of ``in_turns`` that has compiled: it goes on when nothing else runs."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("its turn never came")


class _Inner:
    """One of the processes of ``in_turns``."""

    def __init__(self, arguments: list[str]) -> None:
        self.errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self.run = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.rows: list[Row] = []
        self.ready = threading.Event()
        self.late = False
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.run.stdout is not None
        for line in self.run.stdout:
            if line.startswith(MARK):
                self.rows.append(json.loads(line.removeprefix(MARK)))
            if line.startswith(READY):
                self.ready.set()
        self.ready.set()

    def stop(self) -> None:
        self.late = self.late or self.run.poll() is None
        self.run.kill()
        self.run.wait()

    def result(self) -> list[Row] | str:
        """Its rows, or why there are none."""
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines()
        return self.rows or ("its time was up" if self.late else (said or ["no output"])[-1][:90])


def in_turns(inner: dict[str, list[str]], until_ready: float, each: float) -> dict[str, list[Row] | str]:
    """The rows of several ``python -m ...`` that compile side by side and measure one at a time, or why there are none.

    Each calls ``wait_for_turn`` when it has compiled. The first may measure when all have, or are stopped after
    ``until_ready`` seconds: a compilation beside it would disturb what it measures. ``each`` seconds for a measurement.
    """
    runs = {name: _Inner(arguments) for name, arguments in inner.items()}
    try:
        end = time.monotonic() + until_ready
        for run in runs.values():
            if not run.ready.wait(max(end - time.monotonic(), 0)):
                run.stop()
        for run in runs.values():
            if run.run.poll() is None:
                assert run.run.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it ended in between: its result says why
                    run.run.stdin.write("\n")
                    run.run.stdin.flush()
                run.reader.join(each)
                run.stop()
    finally:
        for run in runs.values():
            run.run.kill()
    return {name: run.result() for name, run in runs.items()}


@contextlib.contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """While no other process has the file ``lock``, which stands for a GPU; at once without one."""
    if lock is None:
        yield
        return
    import torch

    torch.cuda.synchronize()
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.synchronize()


def environment() -> Row:
    """Return what a figure was measured on and with."""
    import torch
    import transformers
    import triton

    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
        "triton": triton.__version__, "transformers": transformers.__version__, "commit": commit.stdout.strip(),
    }  # fmt: skip
