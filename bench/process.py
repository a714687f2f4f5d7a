"""A measurement in a process of its own: it prints its row, and cannot disturb the next one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

Row = dict[str, Any]
MARK = "ROW "


def give(row: Row) -> None:
    """What the inner process says to the outer one."""
    print(MARK + json.dumps(row), flush=True)


def measured(arguments: list[str], timeout: int) -> Row:
    """The row that ``python -m ...`` gives; with ``error`` if it gives none. Its errors go to ours."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired as late:
        print((late.stderr or b"")[-3000:], file=sys.stderr)
        return {"error": f"no result after {timeout} s"}
    row = next((line[len(MARK) :] for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if row is None:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:90]}
    return json.loads(row)


def environment() -> Row:
    """What a figure was measured on and with."""
    import torch
    import transformers
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
        "triton": triton.__version__, "transformers": transformers.__version__, "commit": commit.stdout.strip(),
    }  # fmt: skip
