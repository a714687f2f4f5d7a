"""Linear layer and the cross-entropy with, or the divergence from, a distribution for each row: in chunks of logits.

    soft, hard and dl: formulas in ``logits/soft_rows``, of l = x · Wᵀ + b, rounded to x's dtype        W = lm_head
    dx = f · dl · W,  dW = f · dlᵀ · x,  db = f · Σ_rows dl

The weights of the rows in a number are known before their losses, so the forward also computes the gradients, for a gradient
of 1 of that number, while a chunk of logits exists (``linear_cross_entropy``). Upstream gradients of the losses are f times
the weights (``logits/scaled.factor_behind``). Rows whose weights are 0 need no logits: which they are is read back from a
GPU where there are many logits, and not while a CUDA graph is captured.

Shapes     x: (m, h); lm_head: (v, h); bias: (v); values: (.., v) of m rows; weights, target, hard_weights, soft: (m); hard:
           (m), or (0) without classes.
Dtypes     x, lm_head, bias alike: bf16 | fp32; values: any float; weights, soft, hard fp32; target int64.
Saved      dx, dW, db for an f of 1, and the weights.
Source     gradient in the forward, in chunks: Malek 2024, efficient_cross_entropy.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from fx_fusion.kernels.logits.logit_chunks import each_chunk, rows_to_keep
from fx_fusion.kernels.logits.scaled import factor_behind, scaled_gradients
from fx_fusion.kernels.logits.soft_rows import Soft
from fx_fusion.ops.library import plain_op, register_autograd


def _fwd(
    x, lm_head, bias, values, weights, kind, divergence, values_scale, scale, needs, small_chunks=False, target=None,
    hard_weights=None, hard_scale=1.0,
):  # fmt: skip
    x, lm_head = x.contiguous(), lm_head if lm_head.stride(-1) == 1 else lm_head.contiguous()
    values = values if values.stride(-1) == 1 else values.contiguous()
    hard = None if hard_weights is None else hard_weights.contiguous()
    target = None if target is None else target.contiguous()
    soft = Soft(values, weights.contiguous(), kind, divergence, values_scale, target, hard, hard_scale)
    counts = weights != 0 if hard is None else (weights != 0) | (hard != 0)
    kept = rows_to_keep(counts, lm_head.shape[0])
    rows = torch.arange(x.shape[0], device=x.device) if kept is None else kept
    loss = torch.empty((len(rows), 2), dtype=torch.float32, device=x.device)
    x_rows = x if kept is None else x[kept]
    dx, dw, db = each_chunk(
        x_rows, lm_head, bias, rows, None, (0, 0.0, 0.0, scale), None, needs, loss, of_rows=None if kept is None else len(x),
        small=small_chunks, fill=soft.rows,
    )  # fmt: skip
    if kept is not None:
        loss = loss.new_zeros((len(x), 2)).index_copy_(0, kept, loss)
        dx = None if dx is None else torch.zeros_like(x).index_copy_(0, kept, dx)
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return (
        loss[:, 0].clone(),
        loss.new_empty(0) if hard is None else loss[:, 1].clone(),
        empty if dx is None else dx,
        torch.empty_like(empty) if dw is None else dw.to(x.dtype),
        torch.empty(0, dtype=torch.float32, device=x.device) if db is None else db,
    )


def _fake(
    x, lm_head, bias, values, weights, kind, divergence, values_scale, scale, needs, small_chunks=False, target=None,
    hard_weights=None, hard_scale=1.0,
):  # fmt: skip
    needs_dx, needs_dw, needs_db = needs
    return (
        x.new_empty(x.shape[:1], dtype=torch.float32),
        x.new_empty(x.shape[:1] if hard_weights is not None else (0,), dtype=torch.float32),
        x.new_empty(x.shape if needs_dx else (0,)),
        x.new_empty(lm_head.shape if needs_dw else (0,)),
        x.new_empty(lm_head.shape[:1] if needs_db else (0,), dtype=torch.float32),
    )


linear_soft_cross_entropy = plain_op(
    "linear_soft_cross_entropy",
    "(Tensor x, Tensor lm_head, Tensor? bias, Tensor values, Tensor weights, str kind, bool divergence, float values_scale,"
    " float scale, bool[] needs, bool small_chunks=False, Tensor? target=None, Tensor? hard_weights=None,"
    " float hard_scale=1.0) -> (Tensor soft, Tensor hard, Tensor dx, Tensor dlm_head, Tensor dbias)",
    _fwd,
    _fake,
)


@register_flop_formula(torch.ops.fx_fusion.linear_soft_cross_entropy)
def _flops(x_shape, lm_head_shape, *_, **__):
    """Returns the FLOPs of the three products, for ``torch.utils.flop_counter``."""
    return 6 * x_shape[0] * x_shape[1] * lm_head_shape[0]


def _setup_context(ctx, inputs, output):
    x, lm_head, bias, _, weights = inputs[:5]
    _, hard, dx, dlm_head, dbias = output
    hard_weights = inputs[12] if len(inputs) > 12 else None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(dx, dlm_head, dbias, *(() if hard_weights is not None else (hard,)))
    ctx.needs = inputs[9]
    ctx.dtypes = (x.dtype, lm_head.dtype, None if bias is None else bias.dtype)
    ctx.save_for_backward(dx, dlm_head, dbias, weights, *(() if hard_weights is None else (hard_weights,)))


def _backward(ctx, *dlosses):
    no_grads = (None,) * 11  # from values to hard_scale
    dx, dlm_head, dbias, *weights = ctx.saved_tensors
    given = [(d.float(), w) for d, w in zip(dlosses, weights, strict=False) if d is not None]
    if not given:
        return (None, None, None, *no_grads)
    factor = factor_behind(*zip(*given, strict=True))
    grads = scaled_gradients(dx, dlm_head, dbias, factor, factor)
    needed = [need and ctx.needs_input_grad[i] for i, need in enumerate(ctx.needs)]
    return (*(g.to(d) if n else None for g, d, n in zip(grads, ctx.dtypes, needed, strict=True)), *no_grads)


register_autograd("linear_soft_cross_entropy", _backward, _setup_context)
