"""Linear layer and the cross-entropy of each row, with the logits kept for the backward, which overwrites them.

    l = x · Wᵀ + b,  loss and dl of l: formulas in ``logit_rows``        W = lm_head
    dl is written over l
    dx = dl · W,  dW = dlᵀ · x,  db = Σ_rows dl

Three products of m·h·v, where ``linear_cross_entropy`` without a reduction and ``token_log_probs``, which keep no logits,
take four: what is faster for a wide x. For eager code; a graph has the logits as they are, and Inductor plans their memory.

Shapes     x: (m, h); lm_head: (v, h); bias, weight (of the classes): (v); target, loss: (m).
Dtypes     x, lm_head, bias alike: bf16 | fp16 | fp32. loss in fp32, logits in x's dtype.
Saved      the inputs and m·v logits. A second backward computes them again.
"""

import torch
import torch.nn.functional as F

from fx_fusion.kernels.logits.logit_chunks import loss_of_rows
from fx_fusion.ops.library import first_derivatives_only


def _backward(ctx, dloss):
    x, lm_head, bias, target, weight = ctx.saved_tensors
    logits, ctx.logits = ctx.logits, None
    if logits is None:  # the first backward has overwritten them
        logits = F.linear(x, lm_head, bias)
    _fill(logits, target, weight, ctx.options, dloss.float().contiguous(), logits)
    needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
    dx = logits @ lm_head if needs_dx else None
    dw = logits.t() @ x if needs_dw else None
    return dx, dw, logits.sum(0) if needs_db else None, None, None, None


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
