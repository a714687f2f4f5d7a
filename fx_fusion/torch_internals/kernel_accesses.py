"""Tell which arguments a kernel writes to, found once for each kernel instead of once for each launch and pass.

PyTorch asks that of every traced launch, several times while it compiles (functionalisation, re-inplacing, lowering),
and each time has Triton translate the kernel anew: some 20 ms, 20 s for the launches of a 16-layer Llama. The answer
depends on the kernel, its constants and the kinds of its arguments only, and is remembered by them, for our kernels.

Gone: PyTorch's question is asked each time, and compiling takes longer.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

_QUESTIONS = ("identify_accessed_tensors", "identify_mutated_tensors")  # the first one since torch 2.12


def remember_accesses() -> None:
    """From now on PyTorch's question is answered from memory where the same has been asked before."""
    try:
        from torch._higher_order_ops import triton_kernel_wrap
    except ImportError:
        return
    for name in _QUESTIONS:
        ask = getattr(triton_kernel_wrap, name, None)
        if ask is not None and not hasattr(ask, "__wrapped__"):
            setattr(triton_kernel_wrap, name, remembered(ask))


def remembered(ask: Callable[..., Any]) -> Callable[..., Any]:
    """``ask(kernel, arguments by name, ...)`` with a memory for kernels of this package."""
    answers: dict[Hashable, Any] = {}

    @functools.wraps(ask)
    def answer(kernel: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        key = _key(kernel, kwargs, rest)
        if key is None:
            return ask(kernel, kwargs, *rest)
        if key not in answers:
            answers[key] = ask(kernel, kwargs, *rest)
        return copy.deepcopy(answers[key])

    return answer


def _key(kernel: Any, kwargs: dict[str, Any], rest: tuple[Any, ...]) -> Hashable | None:
    """None for a kernel that is not ours, or an argument whose kind we don't know."""
    module = getattr(getattr(kernel, "fn", None), "__module__", "")
    if not module.startswith("fx_fusion.") or any(rest):
        return None
    kinds = []
    for name, value in sorted(kwargs.items()):
        if value is None or isinstance(value, (bool, int, float, str)):
            kinds.append((name, type(value), value))
        elif isinstance(dtype := getattr(value, "dtype", None), torch.dtype):  # a tensor, or what stands for one
            kinds.append((name, torch.Tensor, dtype))
        else:
            return None
    return *_function_of(kernel), tuple(kinds)


def _function_of(kernel: Any) -> tuple[Any, Hashable]:
    """Return a kernel's function and the constants of its first configuration, which are the ones that PyTorch looks at.

    PyTorch wraps a kernel that is launched with ``num_warps`` into an autotuner of its own at each launch."""
    configurations = getattr(kernel, "configs", None)
    return (kernel.fn, tuple(sorted(configurations[0].kwargs.items()))) if configurations else (kernel, ())
