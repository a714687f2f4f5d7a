"""The ops of deferred tensors whose results are deferred, too. Every other op reads the values."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fx_fusion.runtime.tensor_methods import KEPT_LAZY

# The kinds of ops, by what becomes of the classes.
LAYOUT = "layout"  # renames, casts or slices
POINTWISE = "pointwise"  # each element by itself: a result has the classes of an operand
ARITHMETIC = "arithmetic"  # pointwise, and another operand may be a number that changes from step to step
SOFTMAX = "softmax"  # of a dim that stays
REDUCTION = "reduction"  # over dims that go
CHOICE = "choice"  # of one class by an index of int64
LOSS = "loss"  # of classes or of probabilities

_NAMES = {
    LAYOUT: "reshape flatten unsqueeze squeeze transpose permute narrow select",
    POINTWISE: """
        abs neg negative exp exp2 expm1 log log2 log10 log1p sigmoid tanh square sqrt rsqrt reciprocal pow clamp clip
        clamp_min clamp_max minimum maximum min max fmin fmax where masked_fill logaddexp xlogy sign logical_and logical_or
        logical_not isnan isinf isfinite nan_to_num
        """,
    ARITHMETIC: "add sub subtract rsub mul multiply div divide true_divide eq ne lt le gt ge",
    SOFTMAX: "softmax log_softmax cumsum",
    REDUCTION: "sum mean logsumexp amax amin argmax argmin",
    CHOICE: "gather take_along_dim",
}
_OF_FUNCTIONAL = {
    POINTWISE: "relu softplus logsigmoid silu gelu",
    SOFTMAX: "softmax log_softmax",
    LOSS: "cross_entropy nll_loss kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits",
}
# Methods that Python calls for operators, which a graph has as operators; those of other names are listed above.
_OPERATORS = {
    "__pow__": operator.pow, "__eq__": operator.eq, "__ne__": operator.ne, "__and__": operator.and_,
    "__or__": operator.or_, "__invert__": operator.invert, "__getitem__": operator.getitem, "__neg__": operator.neg,
}  # fmt: skip
_REFLECTED = {"__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rpow__": operator.pow}
# All that Python calls for the operators of tensors.
PYTHONS = {
    *_OPERATORS.values(), *_REFLECTED.values(), operator.add, operator.mul, operator.lt, operator.le, operator.gt,
    operator.ge,
}  # fmt: skip


def _functions(names: str, modules: Iterable[Any]) -> Iterator[Any]:
    for module, name in itertools.product(modules, names.split()):
        if hasattr(module, name):
            yield getattr(module, name)


RECORDED: dict[Any, str] = dict.fromkeys(KEPT_LAZY, LAYOUT)
for _kind, _names in _NAMES.items():
    RECORDED |= dict.fromkeys(_functions(_names, (torch, Tensor, torch.special)), _kind)
for _kind, _names in _OF_FUNCTIONAL.items():
    RECORDED |= dict.fromkeys(_functions(_names, (F,)), _kind)
_operators = {getattr(Tensor, name): name for name in (*_OPERATORS, *_REFLECTED) if hasattr(Tensor, name)}
_CHANGING = {"__eq__", "__ne__", "__rsub__", "__rdiv__"}
RECORDED |= {
    method: ARITHMETIC if name in _CHANGING else POINTWISE for method, name in _operators.items() if name != "__getitem__"
}  # fmt: skip


# Ops that return parts of a tensor along a dim, by the place of that among their arguments.
SPLITS: dict[Any, int] = dict.fromkeys(_functions("chunk split tensor_split", (torch, Tensor)), 2)
SPLITS |= dict.fromkeys(_functions("unbind", (torch, Tensor)), 1)


def parts_of(shape: Sequence[int], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the indices that take the parts which one of ``SPLITS`` returns of a tensor of this shape."""
    parts = function(torch.empty(shape, device="meta"), *args, **kwargs)
    place = SPLITS[function] - 1
    dim = kwargs.get("dim", args[place] if len(args) > place else 0) % len(shape)
    whole = (slice(None),) * dim
    if parts and parts[0].dim() < len(shape):
        return [(*whole, i) for i in range(len(parts))]
    ends = list(itertools.accumulate(part.shape[dim] for part in parts))
    return [(*whole, slice(start, end)) for start, end in itertools.pairwise([0, *ends])]


def inserted(graph: fx.Graph, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Insert a call of a recorded op into a graph, as Dynamo would write it."""
    name = _operators.get(function)
    if name in _OPERATORS:
        return graph.call_function(_OPERATORS[name], args, kwargs)
    if name in _REFLECTED:
        return graph.call_function(_REFLECTED[name], (args[1], args[0]), kwargs)
    method = str(getattr(function, "__name__", ""))
    if getattr(Tensor, method, None) is function:
        return graph.call_method(method, args, kwargs)
    return graph.call_function(function, args, kwargs)

