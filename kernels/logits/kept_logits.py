"""Linear layer and log-probability of one class per row, with the logits kept for the backward, which overwrites them.

    l = x · Wᵀ + b,  z = scale · l,  logp = z_t − log Σ_c exp(z_c)        W = lm_head, t the target
    dl = dlogp · scale · ([c = t] − p_c)                                  in place of l
    dx = dl · W,  dW = dlᵀ · x,  db = Σ_rows dl

Three products of m·h·v, where ``token_log_probs``, which keeps no logits, takes four: what is faster for a wide x. For eager
code; a graph has the logits as they are, and Inductor plans their memory.

Shapes     x: (m, h); lm_head: (v, h); bias: (v); target: (m); logp: (m).
Dtypes     x, lm_head, bias alike: bf16 | fp16 | fp32. logp in fp32, logits in x's dtype.
Saved      the inputs and m·v logits. A second backward computes them again.
"""

import torch
import torch.nn.functional as F

from fx_fusion.kernels.logits.logit_chunks import loss_of_rows
from fx_fusion.kernels.logits.logit_rows import NO_IGNORE
from fx_fusion.ops.library import first_derivatives_only


def _backward(ctx, dlogp):
    x, lm_head, bias, target = ctx.saved_tensors
    logits, ctx.logits = ctx.logits, None
    if logits is None:  # the first backward has overwritten them
        logits = F.linear(x, lm_head, bias)
    _losses(logits, target, ctx.scale, dlogp.neg().float().contiguous(), logits)
    needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
    dx = logits @ lm_head if needs_dx else None
    dw = logits.t() @ x if needs_dw else None
    return dx, dw, logits.sum(0) if needs_db else None, None, None


class _KeptLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lm_head, bias, target, scale):
        ctx.save_for_backward(x, lm_head, bias, target)
        ctx.scale, ctx.logits = scale, F.linear(x, lm_head, bias)
        return _losses(ctx.logits, target, scale).neg_()

    backward = staticmethod(first_derivatives_only("log_probs_of_kept_logits", _backward))


def _losses(logits, target, scale, dloss=None, dlogits=None):
    """Returns the cross-entropies (m) of rows of logits, and fills ``dlogits`` for an upstream gradient ``dloss``."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    options = (NO_IGNORE, 0.0, 0.0, scale)
    loss_of_rows(logits, logits.shape[1], target, None, options, loss, dloss, dlogits, None, None, None)
    return loss


def log_probs_of_kept_logits(x, lm_head, bias, target, scale):
    """Returns logp (m), float32; shapes and dtypes as above."""
    return _KeptLogits.apply(x, lm_head, bias, target.contiguous(), scale)
