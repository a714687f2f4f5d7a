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
from torch import fx

from fx_fusion.torch_internals.nodes import namespaces

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
var_mean(input, dim=None, unbiased=None, keepdim=False, correction=None)
std(input, dim=None, unbiased=None, keepdim=False, correction=None)
embedding_bag(input, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode='mean', sparse=False, per_sample_weights=None, include_last_offset=False, padding_idx=None)
amax(input, dim=(), keepdim=False)
max(input, dim=None, keepdim=False)
normalize(input, p=2.0, dim=1, eps=1e-12, out=None)
maximum(input, other)
rms_norm(input, normalized_shape, weight=None, eps=None)
layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True)
native_layer_norm(input, normalized_shape, weight, bias, eps)
group_norm(input, num_groups, weight=None, bias=None, eps=1e-05, cudnn_enabled=True)
linear(input, weight, bias=None)
conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)
embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False)
addcmul(input, tensor1, tensor2, value=1)
addmm(input, mat1, mat2, beta=1, alpha=1)
matmul(input, other)
mm(input, other)
bmm(input, mat2)
baddbmm(input, batch1, batch2, beta=1, alpha=1)
einsum(equation, *operands)
masked_fill(input, mask, value)
cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', label_smoothing=0.0)
nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean')
gather(input, dim, index, sparse_grad=False)
index_select(input, dim, index)
take_along_dim(input, index, dim=None)
one_hot(input, num_classes=-1)
broadcast_tensors(*tensors)
kl_div(input, target, size_average=None, reduce=None, reduction='mean', log_target=False)
clamp(input, min=None, max=None)
clamp_min(input, min)
mT(input, name="mT")
T(input, name="T")
dropout(input, p=0.5, training=True, inplace=False)
scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
cat(tensors, dim=0)
stack(tensors, dim=0)
chunk(input, chunks, dim=0)
split(tensor, split_size_or_sections, dim=0)
unbind(input, dim=0)
roll(input, shifts, dims=None)
unsqueeze(input, dim)
squeeze(input, dim=None)
transpose(input, dim0, dim1)
flatten(input, start_dim=0, end_dim=-1)
unflatten(input, dim, sizes)
narrow(input, dim, start, length)
select(input, dim, index)
repeat(input, *sizes)
repeat_interleave(input, repeats, dim=None, output_size=None)
contiguous(input, memory_format=torch.contiguous_format)
clone(input, memory_format=torch.preserve_format)
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
view(input, *shape, **keywords)
reshape(input, *shape, **keywords)
expand(input, *shape, **keywords)
broadcast_to(input, size)
permute(input, *dims, **keywords)
to(input, *target, **keywords)
type(input, *target, **keywords)
detach(input)
alias(input)
t(input)
arange(*bounds, **keywords)
ones(*size, **keywords)
zeros(*size, **keywords)
full(size, fill_value, **keywords)
tensor(data, **keywords)
scalar_tensor(s, **keywords)
ones_like(input, **keywords)
zeros_like(input, **keywords)
full_like(input, fill_value, **keywords)
new_ones(input, *size, **keywords)
new_zeros(input, *size, **keywords)
new_full(input, size, fill_value, **keywords)
le(input, other)
lt(input, other)
ge(input, other)
gt(input, other)
eq(input, other)
ne(input, other)
bitwise_and(input, other)
bitwise_or(input, other)
bitwise_not(input)
logical_and(input, other)
logical_or(input, other)
logical_not(input)
abs(input)
rsub(input, other, alpha=1)
floor_divide(input, other)
where(condition, input, other)
tril(input, diagonal=0)
triu(input, diagonal=0)
diff(input, n=1, dim=-1, prepend=None, append=None)
cumsum(input, dim, dtype=None)
sort(input, dim=-1, descending=False, stable=False)
argsort(input, dim=-1, descending=False, stable=False)
topk(input, k, dim=-1, largest=True, sorted=True)
histc(input, bins=100, min=0, max=0)
grouped_mm(input, other, offs=None, bias=None, out_dtype=None)
empty_like(input, **keywords)
scatter(input, dim, index, src, reduce=None)
index_add(input, dim, index, source, alpha=1)
pad(input, pad, mode='constant', value=None)
"""

_PREFIXES = {
    "dim": ("axis",),
    "keepdim": ("keepdims",),
    "input": ("x", "self", "tensor", "mat_a"),
    "exponent": ("other",),
    "tensors": ("arrays",),
    "index": ("indices",),
    "other": ("mat2", "mat_b"),
}
_OPERATORS: dict[str, tuple[Callable[..., Any], ...]] = {
    "add": (operator.add,),
    "sub": (operator.sub,),
    "mul": (operator.mul,),
    "div": (operator.truediv,),
    "floor_divide": (operator.floordiv,),
    "pow": (operator.pow,),
    "neg": (operator.neg,),
    "abs": (operator.abs,),
    "getitem": (operator.getitem,),
    "matmul": (operator.matmul,),
    "bitwise_and": (operator.and_,),
    "bitwise_or": (operator.or_,),
    "bitwise_not": (operator.invert,),
    "mT": (torch.ops.aten.mT,),  # as Dynamo has x.mT from torch 2.14 on; up to 2.13 getattr(x, "mT")
    "T": (torch.ops.aten.numpy_T,),
    **{name: (getattr(operator, name),) for name in ("le", "lt", "ge", "gt", "eq", "ne")},
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
    "view": ("view_as",),
    "reshape": ("reshape_as",),
    "transpose": ("swapaxes", "swapdims"),
    "le": ("less_equal",),
    "lt": ("less",),
    "ge": ("greater_equal",),
    "gt": ("greater",),
    "ne": ("not_equal",),
    "grouped_mm": ("_grouped_mm",),
}
_DUNDERS = {
    **{name: name for name in ("add", "sub", "mul", "pow", "neg", "abs", "getitem", "matmul", "le", "lt", "ge", "gt", "eq", "ne")},
    "truediv": "div", "floordiv": "floor_divide", "and": "bitwise_and", "or": "bitwise_or", "invert": "bitwise_not",
}  # fmt: skip


DIMS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")  # parameters that choose dims


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
    for name in SIGNATURES:
        for spelling in (name, *_ALIASES.get(name, ())):
            for namespace in namespaces():
                if callable(function := getattr(namespace, spelling, None)):
                    functions[function] = name
            methods[spelling] = name
            in_place[spelling + "_"] = name
        for function in _OPERATORS.get(name, ()):
            functions[function] = name
        for function in _IN_PLACE.get(name, ()):
            in_place[function] = name
    functions[torch.linalg.vector_norm] = "linalg_vector_norm"
    functions[torch.special.expit] = "sigmoid"
    functions.pop(torch.embedding, None)  # the table comes first there
    methods |= {f"__{dunder}__": name for dunder, name in _DUNDERS.items()}
    return functions, methods, in_place


_FUNCTIONS, _METHODS, _IN_PLACE_NAMES = _tables()
_REFLECTED = {"__radd__": "add", "__rmul__": "mul", "__rsub__": "sub", "__rtruediv__": "div", "__rpow__": "pow"}


def names_of(node: fx.Node) -> tuple[str | None, str | None]:
    """The op that a node calls: its name where the call is functional, and its name where it is in place."""
    if node.op == "call_method":
        target = str(node.target)
        return _METHODS.get(target) or _REFLECTED.get(target), _IN_PLACE_NAMES.get(target)
    if node.op == "call_function" and node.target is getattr:
        return (str(node.args[1]) if node.args[1] in ("mT", "T") else None), None
    if node.op == "call_function":
        return _lookup(_FUNCTIONS, node.target), _lookup(_IN_PLACE_NAMES, node.target)
    return None, None


def bind(name: str, node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a call of op ``name`` by parameter, defaults filled in; None if they don't fit its signature."""
    signature = SIGNATURES[name]
    args = node.args
    if node.op == "call_method" and (node.target in _REFLECTED or node.target == "where"):
        args = (*args[1::-1], *args[2:])  # x.__rsub__(other), x.where(condition, other): the first two change places
    kwargs = {_parameter(signature, key): item for key, item in node.kwargs.items()}
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


def _lookup(table: dict[Any, str], target: Any) -> str | None:
    try:
        return table.get(target)
    except TypeError:  # an unhashable callable
        return None
