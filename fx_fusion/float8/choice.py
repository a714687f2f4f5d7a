"""Choose the products that run in float8: where a scale a row is exact enough to be asked for, and its time is won back.

The product itself gains what the table of ``bench.float8_products`` says at least (H200, linears of six models); making its
operands costs their traffic. Products of one activation (q, k and v; gate and up) share what it costs to quantize it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch

from fx_fusion.float8.products import VOCABULARY, Product, WeightGradient
from fx_fusion.graph import dtypes
from fx_fusion.graph.size_hints import expected
from fx_fusion.memory.cost import flops_per_second
from fx_fusion.torch_internals.inductor import bytes_per_second

RECIPES = ("off", "rowwise_gw_hp", "rowwise")
_UNIT = 16  # what sizes must be a multiple of
_REACHED = 0.75  # of the peak, by products in bfloat16
_FASTER = {False: 1.6, True: 1.4}  # than that in float8: a forward, and the gradient of an input
_FASTER_GRADIENT = 1.5  # of a weight
_LAUNCH = 3e-6  # seconds
_BYTES_OF_A, _BYTES_OF_B, _BYTES_OF_B_TURNED = 3, 3, 5  # read and written for an element in bfloat16
_BYTES_OF_X, _BYTES_OF_DY = 3, 2  # the same, to turn x in bfloat16 and dy in float8
_BYTES_OF_A_TERM = 4  # the same, of a sum in bfloat16: a product writes it, the sum reads it

T = TypeVar("T")


def why_not(product: Product, modules: Iterable[str], keep: Sequence[str], *, of_classes: bool) -> str:
    """Return why a product can't or shall not run in float8 whatever its time; empty if it may. ``modules``: those that it
    is of. ``of_classes``: its weight is a vocabulary's."""
    m, n, k = product.sizes
    a, b, bias = product.a.meta["val"], product.b.meta["val"], None if product.bias is None else product.bias.meta["val"]
    if any(fnmatchcase(module, pattern) for module in modules for pattern in keep):
        return "float8_keep names it"
    if any(t.dtype != torch.bfloat16 for t in (a, b)):
        return f"{dtypes.name(a.dtype)} x {dtypes.name(b.dtype)}: only bfloat16 has such products"
    if not all(isinstance(size, int) and size > 0 and size % _UNIT == 0 for size in (n, k)):
        return f"{k} -> {n}: both must be multiples of {_UNIT}"
    if bias is not None and (tuple(bias.shape) != (n,) or bias.stride() != (1,)):
        return f"its bias has the shape {tuple(bias.shape)} and the strides {bias.stride()}: it must be {n} dense numbers"
    if of_classes:
        here = "" if product.outputs >= VOCABULARY else " of this rank"
        return f"{product.outputs} outputs{here} are taken for a vocabulary's"
    if isinstance(m, int) and m == 0:
        return "no rows"
    return ""


def without_support(device: torch.device) -> str:
    """Return why a device has no products in float8; empty if it has."""
    if device.type != "cuda":
        return "a CPU has none: select='always' emulates it"
    if torch.cuda.is_available() and (found := torch.cuda.get_device_capability(device)) < (9, 0):
        return f"it needs a GPU of compute capability 9.0 or more, this one has {found[0]}.{found[1]}"
    return ""


def slower(products: Iterable[Product]) -> dict[Product, str]:
    """Return those of ``products`` that would not win back what their operands cost, and the time of each in words."""
    return _without_gain(products, _activation, _gain, _seconds_of_a)


def pays_together(group: Sequence[Product], slow: Collection[Product]) -> bool:
    """Return True if gradients of one input gain more as one product than those do that are not ``slow`` by themselves: what
    is beside others is neither written nor added."""
    m, n, _ = map(_expected, group[0].sizes)
    saved = _BYTES_OF_A_TERM * m * n / bytes_per_second(group[0].a.meta["val"].device) + _LAUNCH

    def gain(members: Sequence[Product]) -> float:
        return sum(_gain(p) - _seconds_of_a(p) for p in members) + saved * max(len(members) - 1, 0)

    return gain(group) > gain([p for p in group if p not in slow])


def slower_gradients(gradients: Iterable[WeightGradient]) -> dict[WeightGradient, str]:
    """The same of gradients of weights: those of linears with one x share what it costs to turn it."""
    return _without_gain(gradients, _x, _gain_of_gradient, _seconds_of_x)


def gained(
    products: Iterable[Product], gradients: Iterable[WeightGradient]
) -> dict[Product | WeightGradient, float]:  # fmt: skip
    """The seconds that each gains in float8, in equal shares less what they share."""
    found: dict[Product | WeightGradient, float] = {}
    for together in _shared(products, _activation):
        found.update({p: _gain(p) - _seconds_of_a(p) / len(together) for p in together})
    for of_one_x in _shared(gradients, _x):
        found.update({g: _gain_of_gradient(g) - _seconds_of_x(g) / len(of_one_x) for g in of_one_x})
    return found


def _without_gain(
    found: Iterable[T], shares: Callable[[T], Hashable], gain_of: Callable[[T], float], cost_of: Callable[[T], float]
) -> dict[T, str]:
    """Return those that gain nothing by themselves, or together less than what they share costs."""
    kept: dict[T, str] = {}
    for together in _shared(found, shares):
        gains = {product: gain_of(product) for product in together}
        cost = cost_of(together[0])
        if sum(gain for gain in gains.values() if gain > 0) <= cost:
            gains = {product: min(gain - cost / len(together), 0) for product, gain in gains.items()}
        kept.update({p: f"float8 would cost {1e6 * -gain:.0f} µs more" for p, gain in gains.items() if gain <= 0})
    return kept


def _shared(found: Iterable[T], shares: Callable[[T], Hashable]) -> Iterable[list[T]]:
    """Return those that share what it costs to quantize an activation."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for product in found:
        groups[shares(product)].append(product)
    return groups.values()


def _activation(product: Product) -> Hashable:
    return product.activation


def _x(gradient: WeightGradient) -> Hashable:
    return gradient.forward.activation


def _gain(product: Product) -> float:
    """Seconds that the product gains, less what its weight costs."""
    m, n, k = map(_expected, product.sizes)
    a, b = product.a.meta["val"], product.b.meta["val"]
    bfloat16 = 2 * m * n * k / (_REACHED * flops_per_second(a.device, a.dtype))
    each = _BYTES_OF_B if b.stride(0) == 1 else _BYTES_OF_B_TURNED
    return bfloat16 * (1 - 1 / _FASTER[product.backward]) - each * n * k / bytes_per_second(a.device) - _LAUNCH


def _gain_of_gradient(gradient: WeightGradient) -> float:
    """Seconds that the gradient of a weight gains, less what its dy costs."""
    dy = gradient.dy.meta["val"]
    m, n, k = map(_expected, (*dy.shape, gradient.x.meta["val"].shape[1]))
    bfloat16 = 2 * m * n * k / (_REACHED * flops_per_second(dy.device, dy.dtype))
    cost = _BYTES_OF_DY * m * n / bytes_per_second(dy.device) + 2 * _LAUNCH
    return bfloat16 * (1 - 1 / _FASTER_GRADIENT) - cost


def _seconds_of_x(gradient: WeightGradient) -> float:
    return _seconds_of_a(gradient.forward, _BYTES_OF_X)


def _seconds_of_a(product: Product, each: int = _BYTES_OF_A) -> float:
    m, _, k = map(_expected, product.sizes)
    return each * m * k / bytes_per_second(product.a.meta["val"].device) + _LAUNCH


def _expected(size: int | torch.SymInt) -> float:
    """A size; of one that nobody knows, a usual number of rows."""
    known = expected(size)
    return known if math.isfinite(known) else 4096.0
