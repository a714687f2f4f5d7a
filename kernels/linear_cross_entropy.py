"""Linear layer and cross-entropy together: the logits exist one chunk of rows at a time.

    l = x · Wᵀ + b, rounded to x's dtype;  loss, dl as in logit_rows
    dx = dl · W      dW = Σ_chunks dlᵀ · x      db = Σ_rows dl

The gradients are made in the forward, from the chunk that is there anyway: 6·m·h·v FLOPs in all, against 8 if the
backward computed the logits again. They are made for an upstream gradient of 1 a row and without the 1/count of the
mean; the backward multiplies by (upstream · factor), a number on the device for dx and one for dW. So the gradients of a
mean over many rows do not underflow in fp16, and nothing is read back to the host. The sums of dW could overflow there: x
is made smaller by the power of two that rules it out, and the factor of dW larger. With ``reduction="none"`` the upstream
gradient is a number a row, unknown in the forward, and has to be inside the sum of dW: then, and only then, the backward
computes the logits again.

Shapes     x: (m, h); weight: (v, h); bias, class_weight: (v); target: (m); loss: () or (m).
Dtypes     x, weight, bias alike: bf16 | fp16 | fp32. Loss in fp32. On a GPU dW of up to four chunks is rounded after
           each; of more, and in fp16 without a reduction, it is accumulated in fp32 and rounded once, as on a CPU.
Saved      dx and dW (nothing of size m·v).
Memory     one chunk of logits, on a GPU 0.5 GiB (of up to 2 GiB) to 1.3 GiB, and dW in fp32 where it is accumulated so.
Source     gradient in the forward, in chunks: Malek 2024, efficient_cross_entropy; here with few large chunks, so that
           the matrix products stay efficient, and fp32 accumulation.
"""

import torch
from torch import Tensor

from fx_fusion.dtypes import on_tensor_cores
from fx_fusion.kernels.launch import cdiv
from fx_fusion.kernels.logit_rows import launch_rows
from fx_fusion.op import interpreting, plain_op, register_autograd

# Every chunk reads and writes dW: 4096 rows of it (1 GiB at 128256 classes) make that some 2 % of its products, or 5 % in
# fp32. A sum that is rounded to 16 bits four times on its way is off by 1.6 roundings in the mean, where one is off by one.
_ROUNDED_CHUNKS = 4
# So: a fourth of all logits, within these bounds.
_CHUNK_BYTES = {"cuda": (1 << 29, 5 << 28), "cpu": (8 << 20, 8 << 20)}
_FLOAT32_ROWS = 2048  # products of 1024 rows cost 3 % more
_ROW_MULTIPLE = 256  # keeps the matrix products of a chunk on whole tiles
# Classes are padded to this where 16 bytes don't divide a row: tensor cores take four times as long there.
_CLASS_MULTIPLE = 64


def rows_in_a_chunk(m: int, v: int, itemsize: int, device: str) -> int:
    """Rows so that a chunk of logits fits the budget, in float32 2048 at least. Chunks of equal size rather than a small
    last one; where they are many, powers of two, which fill the waves of all products (3328 rows for 4096 cost 6 %)."""
    row = max(1, v * itemsize)
    least, most = _CHUNK_BYTES[device]
    fourth = max(least, cdiv(m, _ROUNDED_CHUNKS) * row)
    budget = max(_ROW_MULTIPLE, min(fourth, most) // row)
    if itemsize == 4 and device == "cuda":
        budget = max(budget, min(_FLOAT32_ROWS, most // row))
    rows = 1 << (budget.bit_length() - 1)
    if fourth > most and not 0 < m % rows < rows // 2:
        return min(m, rows)
    chunks = cdiv(m, budget)
    return max(1, min(m, cdiv(cdiv(m, max(1, chunks)), _ROW_MULTIPLE) * _ROW_MULTIPLE))


def each_chunk(
    x, weight, bias, target, class_weight, options, dloss, needs, loss, entropy=None, dentropy=None, headroom=None
):  # fmt: skip
    """Fill ``loss`` (and ``entropy``); return the gradients of x, weight, bias that are needed (None for the others), that
    of weight times ``headroom``."""
    m, v = x.shape[0], weight.shape[0]
    needs_dx, needs_dw, needs_db = needs
    gradient = any(needs)
    step = rows_in_a_chunk(m, v, x.element_size(), x.device.type)
    # Without headroom a part of an fp16 sum could overflow where the whole doesn't.
    rounded = (x.dtype == torch.bfloat16 or headroom is not None) and cdiv(m, step) <= _ROUNDED_CHUNKS
    weight, bias = _padded(weight), None if bias is None else _padded(bias)
    buffer = torch.empty(step, weight.shape[0], dtype=x.dtype, device=x.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_dx else None
    dw = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if needs_dw and m == 0 else None
    db = torch.zeros(v, dtype=torch.float32, device=x.device) if needs_db else None
    for start in range(0, m, step):
        rows = slice(start, min(m, start + step))
        x_rows, logits = x[rows], buffer[: min(m, start + step) - start]
        if bias is None:
            torch.mm(x_rows, weight.t(), out=logits)
        else:
            torch.addmm(bias, x_rows, weight.t(), out=logits)
        upstream, h, dh = (None if t is None else t[rows] for t in (dloss, entropy, dentropy))
        _rows(logits, v, target[rows], class_weight, options, loss[rows], upstream, gradient, h, dh)
        if dx is not None:
            torch.mm(logits, weight, out=dx[rows])
        if needs_dw:
            dw = _accumulate(dw, logits, x_rows if headroom is None else x_rows * headroom, rounded)
        if db is not None:
            db += logits[:, :v].sum(0, dtype=torch.float32)
    return dx, None if dw is None else dw[:v], db


def _padded(weight):
    """Rows of zeros behind the classes, so that rows of logits and all products are aligned; columns of logits that
    belong to them stay zero, and so do their gradients."""
    v = weight.shape[0]
    if v * weight.element_size() % 16 == 0 or not (weight.is_cuda or interpreting()) or not on_tensor_cores(weight.dtype):
        return weight
    more = cdiv(v, _CLASS_MULTIPLE) * _CLASS_MULTIPLE - v
    return torch.nn.functional.pad(weight, (0, 0, 0, more) if weight.dim() == 2 else (0, more))


def _accumulate(dw, dlogits, x, rounded: bool):
    """``dw + dlogitsᵀ · x``, in place, in fp32 or ``rounded`` to the dtype of the operands."""
    if dlogits.dtype == torch.float32:
        return torch.mm(dlogits.t(), x) if dw is None else dw.addmm_(dlogits.t(), x)
    if dlogits.is_cuda and rounded:
        return torch.mm(dlogits.t(), x) if dw is None else dw.addmm_(dlogits.t(), x)
    if dlogits.is_cuda:
        if dw is None:
            return torch.mm(dlogits.t(), x, out_dtype=torch.float32)
        return torch.addmm(dw, dlogits.t(), x, out_dtype=torch.float32, out=dw)
    product = torch.mm(dlogits.t().float(), x.float())
    return product if dw is None else dw.add_(product)


def _rows(logits, v, target, class_weight, options, loss, dloss, gradient, entropy, dentropy):
    """Loss of one chunk over the first ``v`` columns; with ``gradient`` the chunk is overwritten by dloss/dlogits."""
    if logits.is_cuda or interpreting():
        stats = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
        launch_rows(
            logits,
            target,
            class_weight,
            *options,
            classes=v,
            loss=loss,
            stats=stats,
            dloss=dloss,
            dlogits=logits if gradient else None,
            entropy=entropy,
            dentropy=dentropy,
        )
        return
    ignore_index, smoothing, softcap, scale = options
    z = logits.float() * scale if scale != 1 else logits.float()
    bent = torch.tanh(z / softcap) if softcap else None
    z = z if bent is None else softcap * bent
    top = z.amax(1)
    total = (z - top[:, None]).exp_().sum(1)
    counts = target != ignore_index
    index = torch.where(counts, target, 0)  # an index error for a target out of range, as in PyTorch
    w = None if class_weight is None else class_weight.float()
    w_target = torch.ones_like(top) if w is None else w[index]
    row_loss = w_target * (total.log() + (top - z.gather(1, index[:, None])[:, 0]))
    w_sum = float(v) if w is None else w.sum()
    if smoothing:
        spread = (top + total.log()) * w_sum - (z.sum(1) if w is None else z @ w)
        row_loss = (1 - smoothing) * row_loss + smoothing / v * spread
    loss.copy_(torch.where(counts, row_loss, 0))
    if not gradient:
        return
    hit = (1 - smoothing) * w_target
    both = hit + smoothing / v * w_sum if smoothing else hit  # a weight of inf is none of an unsmoothed row's
    dz = z.sub_(top[:, None]).exp_().mul_((both / total)[:, None])
    dz.scatter_add_(1, index[:, None], -hit[:, None])
    if smoothing:
        dz -= smoothing / v * (1.0 if w is None else w)
    if bent is not None:
        dz *= 1 - bent * bent
    factor = counts * scale if dloss is None else counts * dloss * scale
    # where, not a product: an ignored row has no gradient even if its probabilities are NaN.
    logits.copy_(torch.where(counts[:, None], dz.mul_(factor[:, None]), 0))


def _coefficient(target, class_weight, reduction: str, ignore_index: int) -> Tensor:
    """What the mean divides by, inverted, as a device scalar: 0 if no target counts (all gradients are zero then)."""
    if reduction != "mean":
        return torch.ones((), dtype=torch.float32, device=target.device)
    counts = target != ignore_index
    if class_weight is None:
        total = counts.sum(dtype=torch.float32)
    else:
        total = torch.where(counts, class_weight.float()[torch.where(counts, target, 0)], 0).sum()
    return torch.where(counts.any(), 1.0 / total, 0.0)


def _reduce(loss, target, class_weight, coefficient, reduction: str, ignore_index: int) -> Tensor:
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    # No target counts: PyTorch's mean is 0 / 0.
    return torch.where((target != ignore_index).any(), total * coefficient, float("nan"))


def _fwd(
    x, weight, bias, target, class_weight, reduction, ignore_index, label_smoothing, softcap, scale, needs
):  # fmt: skip
    x, weight, target = x.contiguous(), weight if weight.stride(-1) == 1 else weight.contiguous(), target.contiguous()
    options = (ignore_index, label_smoothing, softcap, scale)
    loss = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    now = needs if reduction != "none" else [False] * 3
    headroom = _headroom(x, target, class_weight, options) if now[1] and x.dtype == torch.float16 else None
    dx, dw, db = each_chunk(x, weight, bias, target, class_weight, options, None, now, loss, headroom=headroom)
    coefficient = _coefficient(target, class_weight, reduction, ignore_index)
    reduced = _reduce(loss, target, class_weight, coefficient, reduction, ignore_index)
    factors = torch.stack([coefficient, coefficient if headroom is None else coefficient / headroom])
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return (
        reduced,
        factors,
        empty if dx is None else dx,
        torch.empty_like(empty) if dw is None else dw.to(x.dtype),
        torch.empty(0, dtype=torch.float32, device=x.device) if db is None else db,
    )


def _headroom(x, target, class_weight, options) -> Tensor:
    """The largest power of two up to 1 (a product with it is exact) by which the sums of dW = dlᵀ · x keep below 2^15, a
    factor of two from what fp16 holds. A row adds no more than its largest x times its largest dl: scale, and what the
    class of its target and the smoothing weigh."""
    ignore_index, smoothing, _, scale = options
    if x.numel() == 0:
        return torch.ones((), device=x.device)
    counts = target != ignore_index
    of_rows = torch.linalg.vector_norm(x, float("inf"), dim=1, dtype=torch.float32)
    if class_weight is not None:
        weights = class_weight.float().abs()
        of_rows = of_rows * (weights[torch.where(counts, target, 0)] + (smoothing * weights.amax() if smoothing else 0))
    bound = torch.where(counts, of_rows, 0).sum() * (abs(scale) / 2**15)
    return torch.exp2(-torch.log2(bound).ceil().clamp(0, 24))  # 2^-24 is the least that fp16 holds


def _fake(
    x, weight, bias, target, class_weight, reduction, ignore_index, label_smoothing, softcap, scale, needs
):  # fmt: skip
    m = x.shape[0]
    needs_dx, needs_dw, needs_db = needs if reduction != "none" else [False] * 3
    empty = x.new_empty
    return (
        empty((m,) if reduction == "none" else (), dtype=torch.float32),
        empty((2,), dtype=torch.float32),
        empty(x.shape if needs_dx else (0,)),
        empty(weight.shape if needs_dw else (0,)),
        empty(weight.shape[:1] if needs_db else (0,), dtype=torch.float32),
    )


def _bwd_rows(dloss, x, weight, bias, target, class_weight, ignore_index, label_smoothing, softcap, scale, needs):
    """``reduction="none"``: one upstream gradient a row."""
    x, weight, target = x.contiguous(), weight if weight.stride(-1) == 1 else weight.contiguous(), target.contiguous()
    options = (ignore_index, label_smoothing, softcap, scale)
    loss = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    upstream = dloss.float().contiguous()
    made = each_chunk(x, weight, bias, target, class_weight, options, upstream, needs, loss)
    like = (x, weight, x if bias is None else bias)
    return tuple(t.new_empty(0) if g is None else g.to(t.dtype) for g, t in zip(made, like, strict=True))


def _fake_bwd_rows(dloss, x, weight, bias, target, class_weight, ignore_index, label_smoothing, softcap, scale, needs):
    like = (x, weight, x if bias is None else bias)
    return tuple(t.new_empty(t.shape if n else 0) for t, n in zip(like, needs, strict=True))


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_OPTIONS = "int ignore_index, float label_smoothing, float softcap, float scale, bool[] needs"

linear_cross_entropy = plain_op(
    "linear_cross_entropy",
    f"({_INPUTS}, str reduction, {_OPTIONS}) -> (Tensor loss, Tensor factors, Tensor dx, Tensor dweight, Tensor dbias)",
    _fwd,
    _fake,
)
linear_cross_entropy_rows_bwd = plain_op(
    "linear_cross_entropy_rows_bwd",
    f"(Tensor dloss, {_INPUTS}, {_OPTIONS}) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _bwd_rows,
    _fake_bwd_rows,
)


def _setup_context(ctx, inputs, output):
    x, weight, bias, target, class_weight, reduction, *options, needs = inputs
    _, factors, dx, dweight, dbias = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(factors, dx, dweight, dbias)
    ctx.reduction, ctx.options, ctx.needs, ctx.has = (
        reduction,
        options,
        needs,
        (bias is not None, class_weight is not None),
    )
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
    if reduction == "none":
        ctx.save_for_backward(*(t for t in (x, weight, bias, target, class_weight) if t is not None))
    else:
        ctx.save_for_backward(factors, dx, dweight, dbias)


def _backward(ctx, dloss, *_):
    nothing = (None,) * 8  # target, class_weight, reduction, the options, needs
    if dloss is None:
        return (None, None, None, *nothing)
    if ctx.reduction == "none":
        saved = list(ctx.saved_tensors)
        x, weight = saved.pop(0), saved.pop(0)
        bias = saved.pop(0) if ctx.has[0] else None
        target = saved.pop(0)
        class_weight = saved.pop(0) if ctx.has[1] else None
        made = linear_cross_entropy_rows_bwd(dloss, x, weight, bias, target, class_weight, *ctx.options, list(ctx.needs))
    else:
        factors, dx, dweight, dbias = ctx.saved_tensors
        of_rows, of_weight = dloss.float() * factors[0], dloss.float() * factors[1]
        made = dx.float() * of_rows, dweight.float() * of_weight, dbias * of_rows
    wanted = [need and ctx.needs_input_grad[i] for i, need in enumerate(ctx.needs)]
    grads = (g.to(d) if n else None for g, d, n in zip(made, ctx.dtypes, wanted, strict=True))
    return (*grads, *nothing)


register_autograd("linear_cross_entropy", _backward, _setup_context)
