"""Which products run in float8: where a scale a row is exact enough to be asked for, and its time is won back.

The product itself gains what the table of ``bench.float8_products`` says at least (H200, linears of six models); making its
operands costs their traffic. Products of one activation (q, k and v; gate and up) share what it costs to quantise it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from fx_fusion.float8.products import Product
from fx_fusion.graph import dtypes
from fx_fusion.graph.size_hints import expected
from fx_fusion.memory.cost import flops_per_second
from fx_fusion.torch_internals.inductor import bytes_per_second

RECIPES = ("off", "rowwise_gw_hp")
_UNIT = 16  # what sizes must be a multiple of
_VOCABULARY = 32000  # outputs from which on a linear is taken for an lm_head
_REACHED = 0.75  # of the peak, by products in bfloat16
_FASTER = {False: 1.6, True: 1.4}  # than that in float8: a forward, and the gradient of an input
_LAUNCH = 3e-6  # seconds
_BYTES_OF_A, _BYTES_OF_B, _BYTES_OF_B_TURNED = 3, 3, 5  # read and written for an element in bfloat16


def why_not(product: Product, module: str, keep: Sequence[str]) -> str:
    """Why a product can't or shall not run in float8 whatever its time; empty if it may."""
    m, n, k = product.sizes
    a, b = product.a.meta["val"], product.b.meta["val"]
    if any(fnmatchcase(module, pattern) for pattern in keep):
        return "float8_keep names it"
    if any(t.dtype != torch.bfloat16 for t in (a, b)):
        return f"{dtypes.name(a.dtype)} x {dtypes.name(b.dtype)}: only bfloat16 has such products"
    if not all(isinstance(size, int) and size % _UNIT == 0 for size in (n, k)):
        return f"{k} -> {n}: both must be multiples of {_UNIT}"
    if max(n, k) >= _VOCABULARY:
        return f"{max(n, k)} outputs are taken for a vocabulary's"
    if isinstance(m, int) and m == 0:
        return "no rows"
    return ""


def without_support(device: torch.device) -> str:
    """Why a device has no products in float8; empty if it has."""
    if device.type != "cuda":
        return "a CPU has none: select='always' emulates it"
    if torch.cuda.is_available() and (found := torch.cuda.get_device_capability(device)) < (9, 0):
        return f"it needs a GPU of compute capability 9.0 or more, this one has {found[0]}.{found[1]}"
    return ""


def slower(products: Iterable[Product]) -> dict[Product, str]:
    """Those of ``products`` that would not win back what their operands cost, and the time of each in words."""
    shared = defaultdict(list)
    for product in products:
        shared[product.source, product.sizes[2]].append(product)
    kept: dict[Product, str] = {}
    for together in shared.values():
        gains = {product: _gain(product) for product in together}
        cost = _seconds_of_a(together[0])
        if sum(gain for gain in gains.values() if gain > 0) <= cost:
            gains = {product: min(gain - cost / len(together), 0) for product, gain in gains.items()}
        kept.update({p: f"float8 would cost {1e6 * -gain:.0f} µs more" for p, gain in gains.items() if gain <= 0})
    return kept


def _gain(product: Product) -> float:
    """Seconds that the product gains, less what its weight costs."""
    m, n, k = map(_expected, product.sizes)
    a, b = product.a.meta["val"], product.b.meta["val"]
    bfloat16 = 2 * m * n * k / (_REACHED * flops_per_second(a.device, a.dtype))
    each = _BYTES_OF_B if b.stride(0) == 1 else _BYTES_OF_B_TURNED
    return bfloat16 * (1 - 1 / _FASTER[product.backward]) - each * n * k / bytes_per_second(a.device) - _LAUNCH


def _seconds_of_a(product: Product) -> float:
    m, _, k = map(_expected, product.sizes)
    return _BYTES_OF_A * m * k / bytes_per_second(product.a.meta["val"].device) + _LAUNCH


def _expected(size: int | torch.SymInt) -> float:
    """A size; of one that nobody knows, a usual number of rows."""
    known = expected(size)
    return known if math.isfinite(known) else 4096.0
