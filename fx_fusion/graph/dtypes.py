"""Tell dtype changes that keep every value from those that round.

A cast that keeps every value is invisible to matching; a cast that rounds is part of what the model says. Between
a producer and its consumer there may be several: ``bf16 -> f32 -> bf16`` rounds nothing, ``f32 -> bf16 -> f32`` does.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_KEEPS = {
    torch.bool: {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    },
    torch.uint8: {torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64},
    torch.int8: {torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64},
    torch.int16: {torch.int32, torch.int64, torch.float32, torch.float64},
    torch.int32: {torch.int64, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
}


def keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if every value of ``source`` is a value of ``target``."""
    return source == target or target in _KEEPS.get(source, ())


def roundings(chain: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    """The dtypes in a chain of casts that lose information, in order; the first entry is the producer's dtype.

    >>> roundings([torch.bfloat16, torch.float32, torch.bfloat16])
    ()
    >>> roundings([torch.float32, torch.bfloat16, torch.float32])
    (torch.bfloat16,)
    """
    dtypes = list(chain)
    information, lost = dtypes[0], []
    for dtype in dtypes[1:]:
        if not keeps_values(information, dtype):
            lost.append(dtype)
            information = dtype
    return tuple(lost)


def computed_in(tensor: torch.Tensor) -> torch.dtype:
    """Return what a matrix product or attention computes with this tensor in: autocast's dtype where that is on."""
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return (autocast_dtype(tensor.device.type) if eligible else None) or tensor.dtype


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return what autocast casts to on this type of device; None where it is off, or the device has none (meta)."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Return True if a GPU multiplies matrices of this dtype on its tensor cores: float32 where the user allows TF32."""
    return dtype.itemsize < 4 or (dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(tensor: torch.Tensor) -> str:
    """Return the dtype and shape of a tensor, as ``float32[4, 128]``."""
    return f"{name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"
