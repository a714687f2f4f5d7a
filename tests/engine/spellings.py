"""Every op of the vocabulary in its spellings, as functions of some of these inputs:

x, y: (2, 4, 8) positive      w: (8, 8)      ids: (2,) indices      c, d: (2, 4, 8) of bool
"""

import operator

import torch
import torch.nn.functional as F

from tests.engine.graphs import BF16, F16, beside, method


def unary(name, *others):
    function = getattr(torch, name)
    return [lambda x: function(x), lambda x: function(input=x), lambda x: method(x, name), *others]


def binary(name, *others):
    function = getattr(torch, name)
    return [
        lambda x, y: function(x, y), lambda x, y: function(input=x, other=y), lambda x, y: method(x, name, y),
        lambda x, y: method(x, name, other=y), *others,
    ]  # fmt: skip


def by(function):
    return lambda x, y: function(x, y)


def dunder(name):
    return lambda x, y: method(x, f"__{name}__", y)


def reflected(name):
    return lambda x, y: method(y, f"__r{name}__", x)


COMPARISONS = {"le": "less_equal", "lt": "less", "ge": "greater_equal", "gt": "greater", "ne": "not_equal", "eq": "eq"}
SPELLINGS = {
    **{n: unary(n) for n in ("sqrt", "rsqrt", "square", "reciprocal", "sigmoid", "tanh", "erf", "exp", "log", "relu", "clone", "detach", "logical_not")},
    **{n: [lambda x, n=n: method(x, n)] for n in ("float", "half", "bfloat16", "double", "int", "long", "bool", "contiguous")},
    **{n: [lambda x, y, n=n: method(x, n, y), lambda x, y, n=n: method(x, n, other=y)] for n in ("expand_as", "type_as")},
    **{n: binary(n, by(getattr(operator, n)), by(getattr(torch, o)), dunder(n)) for n, o in COMPARISONS.items()},
    "neg": unary("neg", lambda x: -x, lambda x: torch.negative(x), lambda x: method(x, "__neg__")),
    "abs": unary("abs", lambda x: abs(x), lambda x: method(x, "__abs__")),
    "add": binary("add", by(operator.add), dunder("add"), reflected("add"), lambda x, y: x.add(y, alpha=1)),
    "sub": binary("sub", by(operator.sub), by(torch.subtract), dunder("sub"), reflected("sub")),
    "mul": binary("mul", by(operator.mul), by(torch.multiply), dunder("mul"), reflected("mul")),
    "div": binary("div", by(operator.truediv), by(torch.true_divide), by(torch.divide), dunder("truediv"), reflected("truediv")),
    "pow": [by(torch.pow), by(operator.pow), dunder("pow"), reflected("pow"), lambda x, y: torch.pow(x, exponent=y),
            lambda x, y: method(x, "pow", exponent=y)],
    "floor_divide": binary("floor_divide", by(operator.floordiv), dunder("floordiv")),
    "rsub": [by(torch.rsub), lambda x, y: torch.rsub(input=x, other=y)],
    "maximum": binary("maximum"),
    "matmul": [lambda x, w: x @ w, lambda x, w: torch.matmul(x, w), lambda x, w: torch.matmul(input=x, other=w), lambda x, w: x.matmul(w),
               lambda x, w: method(x, "__matmul__", w)],
    "bitwise_and": [lambda c, d: c & d, lambda c, d: torch.bitwise_and(c, d), lambda c, d: method(c, "__and__", d)],
    "bitwise_or": [lambda c, d: c | d, lambda c, d: torch.bitwise_or(c, d), lambda c, d: method(c, "__or__", d)],
    "bitwise_not": [lambda c: ~c, lambda c: torch.bitwise_not(c), lambda c: method(c, "__invert__")],
    "logical_and": binary("logical_and"),
    "logical_or": binary("logical_or"),
    "silu": [lambda x: F.silu(x), lambda x: F.silu(input=x), lambda x: F.silu(x, False)],
    "gelu": [lambda x: F.gelu(x, approximate="tanh"), lambda x: F.gelu(input=x, approximate="tanh")],
    "mean": [lambda x: x.mean(-1, True), lambda x: torch.mean(x, -1, keepdim=True), lambda x: torch.mean(x, dim=-1, keepdim=True),
             lambda x: torch.mean(input=x, axis=-1, keepdims=True), lambda x: method(x, "mean", axis=-1, keepdim=True)],
    "sum": [lambda x: x.sum(-1), lambda x: torch.sum(x, -1), lambda x: torch.sum(x, axis=-1), lambda x: x.sum(dim=-1, keepdim=False)],
    "linalg_vector_norm": [lambda x: torch.linalg.vector_norm(x, dim=-1), lambda x: torch.linalg.vector_norm(x, 2, -1)],
    "norm": [lambda x: x.norm(2, -1), lambda x: x.norm(p=2, dim=-1), lambda x: beside(x, torch.norm, x, 2, dim=-1)],
    "logsumexp": [lambda x: x.logsumexp(-1), lambda x: torch.logsumexp(x, dim=-1), lambda x: torch.special.logsumexp(x, -1)],
    "softmax": [lambda x: F.softmax(x, dim=-1), lambda x: x.softmax(-1), lambda x: torch.softmax(x, -1), lambda x: torch.special.softmax(x, -1)],
    "log_softmax": [lambda x: F.log_softmax(x, dim=-1), lambda x: x.log_softmax(-1), lambda x: torch.log_softmax(x, dim=-1)],
    "var": [lambda x: x.var(-1, unbiased=False), lambda x: torch.var(x, -1, False), lambda x: torch.var(x, axis=-1, unbiased=False)],
    "rms_norm": [lambda x, w: F.rms_norm(x, (8,), w[0], 1e-6), lambda x, w: F.rms_norm(x, (8,), weight=w[0], eps=1e-6),
                 lambda x, w: torch.rms_norm(x, (8,), w[0], 1e-6)],
    "layer_norm": [lambda x, w: F.layer_norm(x, (8,), w[0]), lambda x, w: F.layer_norm(x, normalized_shape=(8,), weight=w[0], bias=None),
                   lambda x, w: torch.layer_norm(x, (8,), w[0], None, 1e-5)],
    "group_norm": [lambda x: F.group_norm(x, 2), lambda x: torch.group_norm(x, 2), lambda x: F.group_norm(x, num_groups=2, eps=1e-5)],
    "conv1d": [
        lambda x, y: F.conv1d(x, y[..., :3], None, 1, 1), lambda x, y: torch.conv1d(x, weight=y[..., :3], padding=1),
        lambda x, y: F.conv1d(input=x, weight=y[..., :3], padding=1, groups=1),
    ],
    "linear": [lambda x, w: F.linear(x, w), lambda x, w: F.linear(x, weight=w, bias=None)],
    "embedding": [lambda ids, w: F.embedding(ids, w), lambda ids, w: F.embedding(input=ids, weight=w, padding_idx=None)],
    "addmm": [lambda w: torch.addmm(w, w, w), lambda w: w.addmm(w, w), lambda w: torch.addmm(w, mat1=w, mat2=w, alpha=1)],
    "addcmul": [lambda x, y: torch.addcmul(x, x, y), lambda x, y: x.addcmul(x, y), lambda x, y: torch.addcmul(x, tensor1=x, tensor2=y, value=1)],
    "bmm": [lambda x, y: torch.bmm(x, y.mT), lambda x, y: x.bmm(y.mT), lambda x, y: torch.bmm(input=x, mat2=y.mT)],
    "masked_fill": [lambda x, c: x.masked_fill(c, 0.5), lambda x, c: torch.masked_fill(x, c, 0.5), lambda x, c: x.masked_fill(mask=c, value=0.5)],
    "cross_entropy": [lambda w, ids: F.cross_entropy(w[:2], ids), lambda w, ids: F.cross_entropy(input=w[:2], target=ids, ignore_index=-100)],
    "nll_loss": [lambda w, ids: F.nll_loss(w[:2], ids), lambda w, ids: F.nll_loss(w[:2], target=ids, reduction="mean")],
    "gather": [lambda w, ids: w[:2].gather(-1, ids[:, None]), lambda w, ids: torch.gather(w[:2], dim=-1, index=ids[:, None])],
    "dropout": [lambda x: F.dropout(x, 0.0, True), lambda x: F.dropout(x, p=0.0), lambda x: torch.dropout(x, 0.0, True)],
    "scaled_dot_product_attention": [lambda x, y: F.scaled_dot_product_attention(x, y, y, is_causal=True),
                                     lambda x, y: F.scaled_dot_product_attention(query=x, key=y, value=y, attn_mask=None, is_causal=True)],
    "cat": [lambda x, y: torch.cat((x, y), -1), lambda x, y: torch.cat(tensors=(x, y), dim=-1), lambda x, y: torch.concat((x, y), dim=-1),
            lambda x, y: torch.concatenate((x, y), axis=-1)],
    "stack": [lambda x, y: torch.stack((x, y), -1), lambda x, y: torch.stack((x, y), dim=-1)],
    "chunk": [lambda x: x.chunk(2, -1), lambda x: torch.chunk(x, 2, dim=-1), lambda x: x.chunk(chunks=2, dim=-1)],
    "split": [lambda x: x.split(4, -1), lambda x: torch.split(x, 4, dim=-1), lambda x: torch.split(x, split_size_or_sections=4, dim=-1)],
    "unbind": [lambda x: x.unbind(-1), lambda x: torch.unbind(x, dim=-1)],
    "unsqueeze": [lambda x: x.unsqueeze(-1), lambda x: torch.unsqueeze(x, dim=-1), lambda x: torch.unsqueeze(input=x, dim=-1)],
    "squeeze": [lambda x: x.squeeze(-1), lambda x: torch.squeeze(x, dim=-1)],
    "transpose": [lambda x: x.transpose(1, 2), lambda x: torch.transpose(x, dim0=1, dim1=2), lambda x: torch.swapaxes(x, 1, 2), lambda x: x.swapdims(1, 2)],
    "flatten": [lambda x: x.flatten(1), lambda x: torch.flatten(x, start_dim=1), lambda x: x.flatten(1, -1)],
    "unflatten": [lambda x: x.unflatten(-1, (2, 4)), lambda x: torch.unflatten(x, dim=-1, sizes=(2, 4))],
    "narrow": [lambda x: x.narrow(-1, 2, 4), lambda x: torch.narrow(x, dim=-1, start=2, length=4)],
    "select": [lambda x: x.select(-1, 2), lambda x: torch.select(x, -1, 2), lambda x: torch.select(input=x, dim=-1, index=2)],
    "repeat_interleave": [lambda x: x.repeat_interleave(2, 1), lambda x: torch.repeat_interleave(x, 2, dim=1)],
    "getitem": [lambda x: x[..., :4], lambda x: method(x, "__getitem__", (..., slice(None, 4, None)))],
    "view": [lambda x: x.view(2, 32)],
    "reshape": [lambda x: x.reshape(2, 32)],
    "expand": [lambda x: x.expand(3, 2, 4, 8)],
    "broadcast_to": [lambda x: torch.broadcast_to(x, (3, 2, 4, 8)), lambda x: x.broadcast_to((3, 2, 4, 8)), lambda x: torch.broadcast_to(x, size=(3, 2, 4, 8))],
    "permute": [lambda x: x.permute(0, 2, 1)],
    "to": [lambda x: x.to(F16)],
    "type": [lambda x: x.type(F16)],
    "t": [lambda w: w.t(), lambda w: torch.t(w), lambda w: torch.t(input=w)],
    "arange": [lambda x: beside(x, torch.arange, x.size(0), 8)],
    "ones": [lambda x: beside(x, torch.ones, x.size(0), 3)],
    "zeros": [lambda x: beside(x, torch.zeros, x.size(0), 3)],
    "full": [lambda x: beside(x, torch.full, (2, 3), 0.5), lambda x: beside(x, torch.full, size=(2, 3), fill_value=0.5)],
    "tensor": [lambda x: beside(x, torch.tensor, 0.5), lambda x: beside(x, torch.tensor, data=0.5)],
    "scalar_tensor": [lambda x: beside(x, torch.scalar_tensor, 0.5), lambda x: beside(x, torch.scalar_tensor, s=0.5)],
    "ones_like": [lambda x: torch.ones_like(x), lambda x: torch.ones_like(input=x)],
    "zeros_like": [lambda x: torch.zeros_like(x), lambda x: torch.zeros_like(input=x)],
    "full_like": [lambda x: torch.full_like(x, 0.5), lambda x: torch.full_like(x, fill_value=0.5), lambda x: torch.full_like(input=x, fill_value=0.5)],
    "new_ones": [lambda x: x.new_ones(2, 3)],
    "new_zeros": [lambda x: x.new_zeros(2, 3)],
    "new_full": [lambda x: x.new_full((2, 3), 0.5), lambda x: x.new_full(size=(2, 3), fill_value=0.5)],
    "where": [lambda x, y, c: torch.where(c, x, y), lambda x, y, c: torch.where(condition=c, input=x, other=y)],
    "tril": [lambda w: torch.tril(w, 1), lambda w: w.tril(1), lambda w: torch.tril(w, diagonal=1)],
    "triu": [lambda w: torch.triu(w, 1), lambda w: w.triu(1), lambda w: torch.triu(w, diagonal=1)],
    "diff": [lambda x: torch.diff(x), lambda x: x.diff(), lambda x: torch.diff(x, n=1, dim=-1)],
    "cumsum": [lambda x: x.cumsum(-1), lambda x: torch.cumsum(x, dim=-1), lambda x: torch.cumsum(x, axis=-1)],
    "sort": [lambda x: x.sort(-1), lambda x: torch.sort(x), lambda x: torch.sort(input=x, dim=-1, descending=False)],
    "argsort": [lambda x: x.argsort(), lambda x: torch.argsort(x, -1), lambda x: torch.argsort(input=x, descending=False)],
    "topk": [lambda x: x.topk(2), lambda x: torch.topk(x, 2, -1), lambda x: torch.topk(input=x, k=2, dim=-1, sorted=True)],
    "histc": [lambda x: torch.histc(x, 4, 0, 3), lambda x: x.histc(bins=4, min=0, max=3), lambda x: torch.histc(input=x, bins=4, max=3)],
    "grouped_mm": [lambda x, w: torch._grouped_mm(x[0].to(BF16), w.to(BF16)[None], (w[0, :1] * 0).int() + 4),
                   lambda x, w: F.grouped_mm(x[0].to(BF16), w.to(BF16)[None], offs=(w[0, :1] * 0).int() + 4),
                   lambda x, w: F.grouped_mm(mat_a=x[0].to(BF16), mat_b=w.to(BF16)[None], offs=(w[0, :1] * 0).int() + 4)],
    "empty_like": [lambda x: torch.empty_like(x[:0]), lambda x: torch.empty_like(input=x[:0])],
    "index_add": [lambda x, ids: torch.index_add(x, 1, ids % 4, x[:, :2]), lambda x, ids: x.index_add(1, ids % 4, x[:, :2]),
                  lambda x, ids: torch.index_add(input=x, dim=1, index=ids % 4, source=x[:, :2])],
    "scatter": [lambda x: torch.scatter(x, -1, x.long() % 2, x), lambda x: x.scatter(-1, x.long() % 2, x),
                lambda x: torch.scatter(input=x, dim=-1, index=x.long() % 2, src=x)],
    "pad": [lambda x: F.pad(x, (1, 0)), lambda x: F.pad(x, pad=(1, 0), mode="constant")],
    "take_along_dim": [lambda x: torch.take_along_dim(x, x.long() % 2, -1), lambda x: x.take_along_dim(x.long() % 2, -1),
                       lambda x: torch.take_along_dim(x, indices=x.long() % 2, dim=-1)],
    "index_select": [lambda x, ids: torch.index_select(x, 1, ids), lambda x, ids: x.index_select(1, ids),
                     lambda x, ids: torch.index_select(x, dim=1, index=ids)],
    "one_hot": [lambda ids: F.one_hot(ids, 5), lambda ids: F.one_hot(ids, num_classes=5)],
    "broadcast_tensors": [lambda x, y: torch.broadcast_tensors(x, y)],
    "kl_div": [lambda x, y: F.kl_div(x, y), lambda x, y: F.kl_div(input=x, target=y)],
    "clamp": [lambda x: torch.clamp(x, 0.6), lambda x: x.clamp(0.6), lambda x: x.clamp(min=0.6)],
    "clamp_min": [lambda x: torch.clamp_min(x, 0.6), lambda x: x.clamp_min(0.6), lambda x: torch.clamp_min(x, min=0.6)],
    "mT": [lambda x: x.mT],
    "T": [lambda x: x[0].T],
    "roll": [lambda x: torch.roll(x, 2, -1), lambda x: x.roll(2, -1), lambda x: x.roll(shifts=2, dims=-1)],
    "repeat": [lambda x: x.repeat(1, 2, 1)],
    "mm": [lambda w: torch.mm(w, w), lambda w: w.mm(w), lambda w: torch.mm(w, mat2=w)],
    "baddbmm": [lambda x, w: torch.baddbmm(x, x, w.expand(2, 8, 8), beta=0), lambda x, w: x.baddbmm(x, w.expand(2, 8, 8), beta=0)],
    "einsum": [lambda x, w: torch.einsum("abc,dc->abd", x, w)],
    "var_mean": [lambda x: torch.var_mean(x, -1, correction=0), lambda x: torch.var_mean(x, dim=-1, correction=0)],
    "std": [lambda x: x.std(-1), lambda x: torch.std(x, dim=-1), lambda x: torch.std(input=x, dim=-1)],
    "amax": [lambda x: x.amax(-1), lambda x: torch.amax(x, dim=-1)],
    "max": [lambda x: torch.max(x, -1), lambda x: x.max(-1), lambda x: x.max(dim=-1)],
    "normalize": [lambda x: F.normalize(x, dim=-1), lambda x: F.normalize(x, 2.0, -1)],
    "native_layer_norm": [lambda x, w: torch.native_layer_norm(x, (8,), w[0], w[1], 1e-5)],
    "embedding_bag": [lambda w, c: F.embedding_bag(c[0].long(), w), lambda w, c: F.embedding_bag(input=c[0].long(), weight=w)],
}  # fmt: skip
