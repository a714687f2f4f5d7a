"""Linear layer and the cross-entropy of each row, with the logits kept for the backward, which overwrites them.

    l = x · Wᵀ + b,  loss and dl of l: formulas in ``logit_rows``        W = lm_head
    dl is written over l
    dx = dl · W,  dW = dlᵀ · x,  db = Σ_rows dl

Three products of m·h·v, where ``linear_cross_entropy`` without a reduction and ``token_log_probs``, which keep no logits,
take four: what is faster for a wide x. For eager code; a graph has the logits as they are, and Inductor plans their memory.

``class_and_sum_of_kept_logits``: minus the log-probability of one class of each row, and of all of them, added up:

    of_class = −log p_y,  of_all = −Σ_c log p_c,  z = scale · l
    dl_c = scale · (dof_class · (p_c − [c = y]) + dof_all · (V · p_c − 1))

Shapes     x: (m, h); lm_head: (v, h); bias, weight (of the classes): (v); target, loss, of_class, of_all: (m).
Dtypes     x, lm_head, bias alike: bf16 | fp16 | fp32. loss, of_class and of_all in fp32, logits in x's dtype.
Saved      the inputs and m·v logits. A second backward computes them again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fusion.kernels.logits.logit_chunks import loss_of_rows
from fx_fusion.kernels.logits.soft_rows import Soft
from fx_fusion.ops.library import first_derivatives_only
from fx_fusion.ops.on_cpu import interpreting

_CPU_ROWS = 128  # at once; the reference makes several tensors of their size


def _gradients(ctx, fill):
    """Returns dx, dW and db, from what ``fill`` writes over the logits, their gradient."""
    x, lm_head, bias = ctx.saved_tensors[:3]
    logits, ctx.logits = ctx.logits, None
    if logits is None:  # the first backward has overwritten them
        logits = F.linear(x, lm_head, bias)
    fill(logits)
    needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
    dx = logits @ lm_head if needs_dx else None
    dw = logits.t() @ x if needs_dw else None
    return dx, dw, logits.sum(0) if needs_db else None


def _backward(ctx, dloss):
    target, weight = ctx.saved_tensors[3:]
    dloss = dloss.float().contiguous()
    grads = _gradients(ctx, lambda logits: _fill(logits, target, weight, ctx.options, dloss, logits))
    return (*grads, None, None, None)


class _KeptLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lm_head, bias, target, weight, options):
        ctx.save_for_backward(x, lm_head, bias, target, weight)
        ctx.options, ctx.logits = options, F.linear(x, lm_head, bias)
        return _fill(ctx.logits, target, weight, options)

    backward = staticmethod(first_derivatives_only("losses_of_kept_logits", _backward))


def _fill(logits, target, weight, options, dloss=None, dlogits=None):
    """Returns the cross-entropies (m) of rows of logits, and fills ``dlogits`` for an upstream gradient ``dloss``."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    loss_of_rows(logits, logits.shape[1], target, weight, options, loss, dloss, dlogits, None, None, None)
    return loss


def losses_of_kept_logits(x, lm_head, bias, target, weight, ignore_index, label_smoothing, scale):
    """Returns the loss of each row (m), float32; shapes and dtypes as above."""
    return _KeptLogits.apply(x, lm_head, bias, target.contiguous(), weight, (ignore_index, label_smoothing, 0.0, scale))


def _of_both(ctx, d_class, d_all):
    x, _, _, target = ctx.saved_tensors
    d_class, d_all = (torch.zeros(len(x), device=x.device) if d is None else d.float() for d in (d_class, d_all))
    grads = _gradients(ctx, lambda logits: _fill_both(logits, target, ctx.scale, d_class, d_all, logits))
    return (*grads, None, None)


class _KeptForBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lm_head, bias, target, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, lm_head, bias, target)
        ctx.scale, ctx.logits = scale, F.linear(x, lm_head, bias)
        one = torch.ones(len(x), device=x.device)
        losses = _fill_both(ctx.logits, target, scale, one, one)
        return losses[:, 1].clone(), losses[:, 0].clone()

    backward = staticmethod(first_derivatives_only("class_and_sum_of_kept_logits", _of_both))


def _fill_both(logits, target, scale, of_class: Tensor, of_all: Tensor, dlogits=None) -> Tensor:
    """Returns Σ_c (−log p_c) and −log p_y (m, 2) of each row; fills ``dlogits``, which may be the logits, with the gradient
    of these times ``of_all`` and ``of_class``."""
    m, v = logits.shape
    ones = torch.ones(1, v, device=logits.device).expand(m, v)
    soft = Soft(ones, of_all.contiguous(), "probabilities", False, 1.0, target, of_class.contiguous(), scale)
    rows, loss = torch.arange(m, device=logits.device), torch.empty((m, 2), dtype=torch.float32, device=logits.device)
    step = max(1, m) if logits.is_cuda or interpreting() else _CPU_ROWS
    for start in range(0, m, step):
        at = slice(start, start + step)
        gradient = None if dlogits is None else dlogits[at]
        soft.rows(logits[at], v, rows[at], None, (0, 0.0, 0.0, scale), loss[at], None, gradient)
    return loss


def class_and_sum_of_kept_logits(x, lm_head, bias, target, scale):
    """Returns of_class and of_all (m), float32; shapes and dtypes as above."""
    return _KeptForBoth.apply(x, lm_head, bias, target.contiguous(), scale)
