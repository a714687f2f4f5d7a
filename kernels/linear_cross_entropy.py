"""Linear layer and cross-entropy together: the logits exist one chunk of rows at a time. Formulas in ``logit_chunks``.

The gradients are made in the forward, from the chunk that is there anyway: 6·m·h·v FLOPs in all, against 8 if the
backward computed the logits again. They are made for an upstream gradient of 1 a row and without the 1/count of the
mean; the backward multiplies by (upstream · factor), a number on the device for dx and one for dW. So the gradients of a
mean over many rows do not underflow in fp16, and nothing is read back to the host. dl and the sums of dW could overflow
there: dl of large class weights or scales, and x, are made smaller by the powers of two that rule it out, and the factors
larger. With ``reduction="none"`` the upstream
gradient is a number a row, unknown in the forward, and has to be inside the sum of dW: then, and only then, the backward
computes the logits again.

Shapes     x: (m, h); weight: (v, h); bias, class_weight: (v); target: (m); loss: () or (m).
Dtypes     x, weight, bias alike: bf16 | fp16 | fp32. Loss in fp32.
Saved      dx and dW (nothing of size m·v).
Source     gradient in the forward, in chunks: Malek 2024, efficient_cross_entropy.
"""

import torch
from torch import Tensor

from fx_fusion.kernels.logits.logit_chunks import each_chunk
from fx_fusion.ops.fused_op import plain_op, register_autograd


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
    shrink = headroom = upstream = None
    if any(now) and x.dtype == torch.float16 and x.numel() > 0:
        most = _largest_of_rows(target, class_weight, options)
        shrink = _power_below(most.amax())
        headroom = _headroom(x, most * shrink) if now[1] else None
        upstream = shrink.expand(x.shape[0])
    dx, dw, db = each_chunk(x, weight, bias, target, class_weight, options, upstream, now, loss, headroom=headroom)
    coefficient = _coefficient(target, class_weight, reduction, ignore_index)
    reduced = _reduce(loss, target, class_weight, coefficient, reduction, ignore_index)
    of_rows = coefficient if shrink is None else coefficient / shrink
    factors = torch.stack([of_rows, of_rows if headroom is None else of_rows / headroom])
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return (
        reduced,
        factors,
        empty if dx is None else dx,
        torch.empty_like(empty) if dw is None else dw.to(x.dtype),
        torch.empty(0, dtype=torch.float32, device=x.device) if db is None else db,
    )


def _largest_of_rows(target, class_weight, options) -> Tensor:
    """(m): the largest that dl of each row can be, for an upstream gradient of 1: scale, and what the class of its target
    and the smoothing weigh. 0 for ignored rows."""
    ignore_index, smoothing, _, scale = options
    counts = target != ignore_index
    if class_weight is None:
        return counts * abs(scale)
    weights = class_weight.float().abs()
    of_target = weights[torch.where(counts, target, 0)]
    return torch.where(counts, of_target + (smoothing * weights.amax() if smoothing else 0), 0) * abs(scale)


def _power_below(most: Tensor) -> Tensor:
    """The largest power of two up to 1 (a product with it is exact) that makes ``most`` 1 at most; 2^-24 is the least that
    fp16 holds."""
    return torch.exp2(-torch.log2(most).ceil().clamp(0, 24))


def _headroom(x, most: Tensor) -> Tensor:
    """The power of two by which the sums of dW = dlᵀ · x keep below 2^15, a factor of two from what fp16 holds. A row adds
    no more than its largest x times ``most``, its largest dl."""
    of_rows = torch.linalg.vector_norm(x, float("inf"), dim=1, dtype=torch.float32)
    return _power_below((of_rows * most).sum() / 2**15)


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
