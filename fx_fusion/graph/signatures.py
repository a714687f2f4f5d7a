"""The vocabulary of the canonical view: which torch callables mean which op, and how their arguments bind.

One row an op: ``name(parameter, parameter=default)``. Every spelling (``torch.x``, ``F.x``, ``tensor.x``, the operator,
the in-place form) is looked up once, here, and bound through that row, so that ``x.mean(-1, True)`` and
``torch.mean(input=x, axis=-1, keepdim=True)`` are the same term. What isn't listed is an opaque leaf.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_ROWS = """
add(input, other, alpha=1)
sub(input, other, alpha=1)
mul(input, other)
div(input, other, rounding_mode=None)
pow(input, exponent)
neg(input)
sqrt(input)
rsqrt(input)
square(input)
reciprocal(input)
sigmoid(input)
tanh(input)
erf(input)
exp(input)
log(input)
silu(input, inplace=False)
gelu(input, approximate='none')
relu(input, inplace=False)
mean(input, dim=None, keepdim=False, dtype=None)
sum(input, dim=None, keepdim=False, dtype=None)
linalg_vector_norm(input, ord=2, dim=None, keepdim=False, dtype=None)
norm(input, p='fro', dim=None, keepdim=False, dtype=None)
logsumexp(input, dim, keepdim=False)
softmax(input, dim=None, _stacklevel=3, dtype=None)
log_softmax(input, dim=None, _stacklevel=3, dtype=None)
var(input, dim=None, unbiased=None, keepdim=False, correction=None)
maximum(input, other)
rms_norm(input, normalized_shape, weight=None, eps=None)
layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True)
group_norm(input, num_groups, weight=None, bias=None, eps=1e-05, cudnn_enabled=True)
linear(input, weight, bias=None)
embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False)
addmm(input, mat1, mat2, beta=1, alpha=1)
matmul(input, other)
bmm(input, mat2)
masked_fill(input, mask, value)
cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', label_smoothing=0.0)
nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean')
gather(input, dim, index, sparse_grad=False)
dropout(input, p=0.5, training=True, inplace=False)
scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
cat(tensors, dim=0)
stack(tensors, dim=0)
chunk(input, chunks, dim=0)
split(tensor, split_size_or_sections, dim=0)
unbind(input, dim=0)
unsqueeze(input, dim)
squeeze(input, dim=None)
transpose(input, dim0, dim1)
flatten(input, start_dim=0, end_dim=-1)
unflatten(input, dim, sizes)
narrow(input, dim, start, length)
repeat_interleave(input, repeats, dim=None, output_size=None)
contiguous(input, memory_format=torch.contiguous_format)
clone(input, memory_format=torch.preserve_format)
view_as(input, other)
expand_as(input, other)
type_as(input, other)
float(input)
half(input)
bfloat16(input)
double(input)
int(input)
long(input)
bool(input)
getitem(input, index)
"""

# Ops whose arguments are variadic or overloaded: bound by hand where they are used, listed here by their spellings.
VARIADIC = ("view", "reshape", "expand", "permute", "to", "type")

_PREFIXES = {
    "dim": ("axis",),
    "keepdim": ("keepdims",),
    "input": ("x", "self", "tensor"),
    "exponent": ("other",),
    "tensors": ("arrays",),
}
_OPERATORS: dict[str, tuple[Callable[..., Any], ...]] = {
    "add": (operator.add,),
    "sub": (operator.sub,),
    "mul": (operator.mul,),
    "div": (operator.truediv,),
    "pow": (operator.pow,),
    "neg": (operator.neg,),
    "getitem": (operator.getitem,),
    "matmul": (operator.matmul,),
}
_IN_PLACE: dict[str, tuple[Callable[..., Any], ...]] = {
    "add": (operator.iadd,),
    "sub": (operator.isub,),
    "mul": (operator.imul,),
    "div": (operator.itruediv,),
    "pow": (operator.ipow,),
}
_ALIASES = {
    "div": ("true_divide", "divide"),
    "mul": ("multiply",),
    "sub": ("subtract",),
    "neg": ("negative",),
    "linalg_vector_norm": (),
    "cat": ("concat", "concatenate"),
    "transpose": ("swapaxes", "swapdims"),
}
_NAMESPACES = (torch, F, torch._C._nn, torch.special, torch.functional)


def _parse(row: str) -> tuple[str, inspect.Signature]:
    name, parameters = row.split("(", 1)
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def op({parameters}: pass", scope)
    return name, inspect.signature(scope["op"])


SIGNATURES: dict[str, inspect.Signature] = dict(_parse(row) for row in _ROWS.strip().splitlines())


def _tables() -> tuple[dict[Any, str], dict[str, str], dict[Any, str]]:
    functions: dict[Any, str] = {}
    methods: dict[str, str] = {}
    in_place: dict[Any, str] = {}
    for name in (*SIGNATURES, *VARIADIC):
        for spelling in (name, *_ALIASES.get(name, ())):
            for namespace in _NAMESPACES:
                if callable(function := getattr(namespace, spelling, None)):
                    functions[function] = name
            methods[spelling] = name
            in_place[spelling + "_"] = name
        for function in _OPERATORS.get(name, ()):
            functions[function] = name
        for function in _IN_PLACE.get(name, ()):
            in_place[function] = name
    functions[torch.linalg.vector_norm] = "linalg_vector_norm"
    for dunder in ("add", "sub", "mul", "truediv", "pow", "neg", "getitem", "matmul"):
        methods[f"__{dunder}__"] = {"truediv": "div"}.get(dunder, dunder)
    return functions, methods, in_place


FUNCTIONS, METHODS, IN_PLACE = _tables()
REFLECTED = {"__radd__": "add", "__rmul__": "mul", "__rsub__": "sub", "__rtruediv__": "div", "__rpow__": "pow"}


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of one call by parameter name, defaults filled in; None if they don't fit the signature."""
    signature = SIGNATURES[name]
    if kwargs:
        kwargs = {_parameter(signature, key): value for key, value in kwargs.items()}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def _parameter(signature: inspect.Signature, key: str) -> str:
    if key in signature.parameters:
        return key
    for parameter, others in _PREFIXES.items():
        if key in others and parameter in signature.parameters:
            return parameter
    return key
