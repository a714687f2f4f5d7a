"""Linear layer and cross-entropy, one chunk of logits at a time: formulas in ``logits/logit_chunks``.

The forward also computes the gradients, while a chunk of logits exists: 6·m·h·v FLOPs in all, against 8 if the backward
computed the logits again. It computes them for a dloss of 1:

    dx = dloss · dx_factor · dx₁        dx_factor = 1; in fp16 mean_factor / shrink
    dW = dloss · dw_factor · dW₁        dw_factor = 1; in fp16 mean_factor / (shrink · headroom)
    db = dloss · dx_factor · db₁

dx₁, dW₁ and db₁ are the results of the forward; both factors are numbers on the device, so nothing is read back to the
host, and 0 where no target counts. ``count``: one number that a sum of losses is divided by (Trainer's tokens of all
micro-batches); it is in dx₁ and dW₁ as the mean's is, so that a dloss of 1 is usual. dW₁ is multiplied in place where it
may be (``logits/scaled``). In fp16 the gradients of a mean over many rows would underflow, so its 1/count is in the
factors; dl could overflow or underflow (weights, scales), the sums of dW overflow: ``shrink`` multiplies dl and
``headroom`` x, powers of two that rule it out.

With ``reduction="none"`` there is one upstream gradient per row, unknown in the forward, and it has to be inside the sum
of dW: only then the backward computes the logits again. But where each row's weight in a number is known (``row_weights``,
m, fp32), the gradients are those of that number; upstream gradients of the losses are a factor times the weights, and that
factor (``logits/scaled.factor_behind``) is the dloss of the formulas.

Rows whose target is ignored need no logits. Where somebody reads the logits, they are handed out (without a gradient) and
computed for all rows. ``small_chunks``: of the least memory, see ``logits/logit_chunks``. With a ``group`` of so many
``ranks`` lm_head and bias are this rank's part, from class ``first`` on, of ``classes``, target counts from the first of
all, and dx is the sum over the ranks (``logits/class_part``; logits are not handed out). ``z_loss`` times the square of
each row's logsumexp is added to its loss, for the rows ``z_over``: those that "count" or "all"; under a mean their squares
are divided by the number of rows that count ("count"), or by that of all rows ("all", and "masked": the rows that count).
Not in fp16, where it would need a bound.

Shapes     x: (m, h); lm_head: (v, h); bias, weight (of the classes): (v); target: (m); loss: () or (m);
           logits: (m, v), as x.
Dtypes     x, lm_head, bias alike: bf16 | fp16 | fp32. Loss in fp32.
Saved      dx₁, dW₁, db₁ (nothing of size m·v); with ``reduction="none"`` and no weights of rows the inputs.
Source     gradient in the forward, in chunks: Malek 2024, efficient_cross_entropy.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fx_fusion.kernels.logits.class_part import class_part
from fx_fusion.kernels.logits.logit_chunks import each_chunk, each_chunk_that_counts
from fx_fusion.kernels.logits.scaled import factor_behind, scaled_gradients
from fx_fusion.kernels.logits.targets import Totals, totals_of
from fx_fusion.ops.library import plain_op, register_autograd


def _z_factor(target, divisor, reduction: str, ignore_index: int, z_loss: float, z_over: str) -> Tensor | None:
    """Returns the factor (m) of each row's squared logsumexp before the reduction divides by ``divisor``; None without a
    z-loss."""
    if not z_loss:
        return None
    counts = target != ignore_index
    factor = torch.full(target.shape, z_loss, dtype=torch.float32, device=target.device)
    if reduction == "mean":
        rows = counts.sum(dtype=torch.float32) if z_over == "count" else target.shape[0]
        factor = factor * (divisor / rows)
    return factor if z_over == "all" else torch.where(counts, factor, 0.0)


def _reduce(loss, totals: Totals, reduction: str, z_over: str) -> Tensor:
    """Reduce the losses of all rows."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum() / totals.divisor
    # PyTorch's mean is 0 / 0 where no target counts. Rows without a target may have a z-loss.
    return loss.sum() / (totals.weights if z_over != "all" else torch.where(totals.any[0] > 0, totals.divisor, float("nan")))


def _fwd(
    x, lm_head, bias, target, weight, reduction, ignore_index, label_smoothing, softcap, scale, needs, returns_logits,
    small_chunks=False, group="", first=0, classes=0, ranks=1, z_loss=0.0, z_over="", count=None, row_weights=None,
):  # fmt: skip
    x, lm_head, target = x.contiguous(), lm_head if lm_head.stride(-1) == 1 else lm_head.contiguous(), target.contiguous()
    options = (ignore_index, label_smoothing, softcap, scale)
    loss = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    needs_now = needs if reduction != "none" or row_weights is not None else [False] * 3
    totals = totals_of(target, weight, ignore_index, mean=reduction == "mean", count=count)
    # No row has a gradient where no target counts: the backward sees it by a factor of 0. With a z-loss of all rows it has.
    counts = torch.ones_like(totals.any) if z_over == "all" else totals.any
    headroom, factors = None, counts
    divided = reduction == "mean" or count is not None
    each = totals.upstream if z_over != "all" else 1 / totals.divisor
    upstream = each.expand(x.shape[0]) if any(needs_now) and divided else None
    if row_weights is not None:
        upstream = row_weights
    if any(needs_now) and x.dtype == torch.float16 and x.numel() > 0:
        bounds = _dl_bounds(target, weight, options)
        if row_weights is not None:  # of a row that is ignored 0, whatever its weight
            bounds = torch.where(bounds == 0, 0.0, bounds * row_weights.abs())
        shrink = _power_below(bounds.amax(), most=64)
        headroom = _headroom(x, bounds * shrink) if needs_now[1] else None
        upstream = shrink.expand(x.shape[0]) if row_weights is None else shrink * row_weights
        factors = counts / (totals.divisor * shrink)
        factors = factors if headroom is None else torch.stack([factors[0], factors[1] / headroom])
    z_factor = _z_factor(target, totals.divisor, reduction, ignore_index, z_loss, z_over)
    given = x, lm_head, bias, target, weight, options, upstream, needs_now, loss
    more = {"headroom": headroom, "small": small_chunks, "z_factor": z_factor}
    logits = torch.empty((x.shape[0], lm_head.shape[0]) if returns_logits else 0, dtype=x.dtype, device=x.device)
    if returns_logits:
        dx, dw, db = each_chunk(*given, all_logits=logits, **more)
    else:
        part = class_part(group, first, classes, ranks)
        if z_over == "all":
            dx, dw, db = each_chunk(*given, part=part, **more)
        else:
            dx, dw, db = each_chunk_that_counts(*given, part=part, number=totals.number, **more)
    reduced = _reduce(loss, totals, reduction, z_over)
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return (
        reduced,
        factors,
        empty if dx is None else dx,
        torch.empty_like(empty) if dw is None else dw.to(x.dtype),
        torch.empty(0, dtype=torch.float32, device=x.device) if db is None else db,
        logits,
    )


def _dl_bounds(target, weight, options) -> Tensor:
    """Returns upper bounds (m) of each row's |dl| for an upstream gradient of 1: |scale| times the weight of its target and
    of the smoothing. 0 for ignored rows."""
    ignore_index, smoothing, _, scale = options
    counts = target != ignore_index
    if weight is None:
        return counts * abs(scale)
    weights = weight.float().abs()
    w_target = weights[torch.where(counts, target, 0)]
    return torch.where(counts, w_target + (smoothing * weights.amax() if smoothing else 0), 0) * abs(scale)


def _power_below(bound: Tensor, most: int = 0) -> Tensor:
    """Returns the largest power of two p <= 2^most (products with it are exact) with p · bound <= 1, at least 2^-24, the
    smallest that fp16 holds."""
    return torch.exp2(-torch.log2(bound).ceil().clamp(-most, 24))


def _headroom(x, dl_bounds: Tensor) -> Tensor:
    """Returns the power of two that keeps all sums of dW = dlᵀ · (headroom · x) below 2^15, half of fp16's range. A row adds
    at most its largest |x| times its largest |dl|, ``dl_bounds``."""
    x_bounds = torch.linalg.vector_norm(x, float("inf"), dim=1, dtype=torch.float32)
    return _power_below((x_bounds * dl_bounds).sum() / 2**15)


def _fake(
    x, lm_head, bias, target, weight, reduction, ignore_index, label_smoothing, softcap, scale, needs, returns_logits,
    small_chunks=False, group="", first=0, classes=0, ranks=1, z_loss=0.0, z_over="", count=None, row_weights=None,
):  # fmt: skip
    m = x.shape[0]
    needs_dx, needs_dw, needs_db = needs if reduction != "none" or row_weights is not None else [False] * 3
    empty = x.new_empty
    return (
        empty((m,) if reduction == "none" else (), dtype=torch.float32),
        empty((2,), dtype=torch.float32),
        empty(x.shape if needs_dx else (0,)),
        empty(lm_head.shape if needs_dw else (0,)),
        empty(lm_head.shape[:1] if needs_db else (0,), dtype=torch.float32),
        empty((m, lm_head.shape[0]) if returns_logits else (0,)),
    )


def _bwd_rows(
    dloss, x, lm_head, bias, target, weight, ignore_index, label_smoothing, softcap, scale, needs, small_chunks=False,
    group="", first=0, classes=0, ranks=1, z_loss=0.0, z_over="",
):  # fmt: skip
    """Returns the gradients for ``reduction="none"``: one upstream gradient per row."""
    x, lm_head, target = x.contiguous(), lm_head if lm_head.stride(-1) == 1 else lm_head.contiguous(), target.contiguous()
    options = (ignore_index, label_smoothing, softcap, scale)
    loss = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    upstream = dloss.float().contiguous()
    given = x, lm_head, bias, target, weight, options, upstream, needs, loss
    z_factor = _z_factor(target, None, "none", ignore_index, z_loss, z_over)
    chunks = each_chunk if z_over == "all" else each_chunk_that_counts
    grads = chunks(*given, small=small_chunks, part=class_part(group, first, classes, ranks), z_factor=z_factor)
    like = (x, lm_head, x if bias is None else bias)
    return tuple(t.new_empty(0) if g is None else g.to(t.dtype) for g, t in zip(grads, like, strict=True))


def _fake_bwd_rows(
    dloss, x, lm_head, bias, target, weight, ignore_index, label_smoothing, softcap, scale, needs, small_chunks=False,
    group="", first=0, classes=0, ranks=1, z_loss=0.0, z_over="",
):  # fmt: skip
    like = (x, lm_head, x if bias is None else bias)
    return tuple(t.new_empty(t.shape if n else 0) for t, n in zip(like, needs, strict=True))


_INPUTS = "Tensor x, Tensor lm_head, Tensor? bias, Tensor target, Tensor? weight"
_PART = "str group='', int first=0, int classes=0, int ranks=1"
_Z = "float z_loss=0.0, str z_over=''"
_OPTIONS = "int ignore_index, float label_smoothing, float softcap, float scale, bool[] needs"

linear_cross_entropy = plain_op(
    "linear_cross_entropy",
    f"({_INPUTS}, str reduction, {_OPTIONS}, bool returns_logits, bool small_chunks=False, {_PART}, {_Z},"
    " Tensor? count=None, Tensor? row_weights=None)"
    " -> (Tensor loss, Tensor factors, Tensor dx, Tensor dlm_head, Tensor dbias, Tensor logits)",
    _fwd,
    _fake,
)
linear_cross_entropy_rows_bwd = plain_op(
    "linear_cross_entropy_rows_bwd",
    f"(Tensor dloss, {_INPUTS}, {_OPTIONS}, bool small_chunks=False, {_PART}, {_Z})"
    " -> (Tensor dx, Tensor dlm_head, Tensor dbias)",
    _bwd_rows,
    _fake_bwd_rows,
)


@register_flop_formula(torch.ops.fx_fusion.linear_cross_entropy)
def _flops(x_shape, lm_head_shape, *_, **__):
    """Returns the FLOPs of the three products, for ``torch.utils.flop_counter``."""
    return 6 * x_shape[0] * x_shape[1] * lm_head_shape[0]


def _setup_context(ctx, inputs, output):
    x, lm_head, bias, target, weight, reduction, *options, needs, _, small_chunks, group, first, classes, ranks = inputs[:17]
    _, factors, dx, dlm_head, dbias, logits = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(factors, dx, dlm_head, dbias, logits)
    ctx.reduction, ctx.options, ctx.needs, ctx.small_chunks = reduction, options, needs, small_chunks
    ctx.part = group, first, classes, ranks
    ctx.z = inputs[17:19]
    ctx.has_bias, ctx.has_weight = bias is not None, weight is not None
    ctx.dtypes = (x.dtype, lm_head.dtype, None if bias is None else bias.dtype)
    ctx.is_weighed = len(inputs) > 20 and inputs[20] is not None
    if ctx.is_weighed:
        ctx.save_for_backward(factors, dx, dlm_head, dbias, inputs[20])
    elif reduction == "none":
        ctx.save_for_backward(*(t for t in (x, lm_head, bias, target, weight) if t is not None))
    else:
        ctx.save_for_backward(factors, dx, dlm_head, dbias)


def _backward(ctx, dloss, *_):
    no_grads = (None,) * 18  # from target to row_weights
    if dloss is None:
        return (None, None, None, *no_grads)
    if ctx.reduction == "none" and not ctx.is_weighed:
        saved = list(ctx.saved_tensors)
        x, lm_head = saved.pop(0), saved.pop(0)
        bias = saved.pop(0) if ctx.has_bias else None
        target = saved.pop(0)
        weight = saved.pop(0) if ctx.has_weight else None
        options = (*ctx.options, list(ctx.needs), ctx.small_chunks, *ctx.part, *ctx.z)
        grads = linear_cross_entropy_rows_bwd(dloss, x, lm_head, bias, target, weight, *options)
    else:
        factors, dx, dlm_head, dbias, *weights = ctx.saved_tensors
        dloss = factor_behind([dloss.float()], weights) if weights else dloss
        # A sum divided by the number of targets, 0 of 0, has an infinite dloss, and 0 times that is NaN.
        dx_factor, dw_factor = torch.where(factors == 0, 0.0, dloss.float() * factors).unbind()
        grads = scaled_gradients(dx, dlm_head, dbias, dx_factor, dw_factor)
    needed = [need and ctx.needs_input_grad[i] for i, need in enumerate(ctx.needs)]
    grads = (g.to(d) if n else None for g, d, n in zip(grads, ctx.dtypes, needed, strict=True))
    return (*grads, *no_grads)


register_autograd("linear_cross_entropy", _backward, _setup_context)
