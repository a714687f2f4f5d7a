"""GPUs by name, to plan for one that is not here: how fast each reads its memory, as its data sheet says."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fx_fusion.errors import OptionError, nearest

# GB/s, by NVIDIA's data sheets. Those before Ampere have no bfloat16.
_DATA_SHEETS = {
    "NVIDIA A100 80GB": 2039, "NVIDIA A100 40GB": 1555, "NVIDIA A30": 933, "NVIDIA A10": 600, "NVIDIA A40": 696,
    "NVIDIA L4": 300, "NVIDIA L40S": 864, "NVIDIA RTX A6000": 768, "NVIDIA RTX 6000 Ada": 960, "NVIDIA H20": 4000,
    "NVIDIA H100 PCIe": 2000, "NVIDIA H100 NVL": 3900, "NVIDIA GH200": 4900, "NVIDIA B200": 8000,
    "NVIDIA RTX PRO 6000 Blackwell": 1792, "NVIDIA GeForce RTX 3090": 936, "NVIDIA GeForce RTX 4090": 1008,
    "NVIDIA GeForce RTX 4080": 717, "NVIDIA GeForce RTX 5090": 1792, "NVIDIA GeForce RTX 5080": 960,
}  # fmt: skip
_REACHED = 0.85  # of that by large copies


def rate_of(gpu: str) -> float | None:
    """Return the bytes that large copies on a GPU read and write in a second; None for one that is not known."""
    return 1e9 * _REACHED * _DATA_SHEETS[gpu] if gpu in _DATA_SHEETS else None


def named(name: str, measured: Iterable[str]) -> str:
    """Return the full name of a GPU: ``h200`` -> ``NVIDIA H200``, ``4090`` -> ``NVIDIA GeForce RTX 4090``. Of several the
    first one, and first one of those that were ``measured``. Raises OptionError for a GPU that is not known."""
    known, wanted = [*measured, *_DATA_SHEETS], "".join(_words(name))
    for gpu in known:
        words = _words(gpu)
        if any("".join(words[i:j]) == wanted for i in range(len(words)) for j in range(i + 1, len(words) + 1)):
            return gpu
    raise OptionError(f"no GPU is known as {name!r}. {nearest(name, known)}")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
