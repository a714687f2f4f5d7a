"""Linear layer, log-probability of one class per row, and entropy of the row, one chunk of logits at a time.

    z = softcap(scale · (x · Wᵀ + b)),  log p = z − lse(z)        W = lm_head
    logp = log p_t                       entropy = −Σ_c p_c log p_c

Reinforcement learning from feedback needs both of every token. Upstream gradients are one number per row, unknown in the
forward, and have to be inside the sum of dW: the backward computes the logits again, as linear_cross_entropy does without a
reduction. Formulas of the gradients in ``logits/logit_rows``: logp = −loss without weights and smoothing.
``token_log_probs_of_part``: lm_head and bias are a rank's part of all classes, as in ``linear_cross_entropy``.

Shapes     x: (m, h); lm_head: (v, h); bias: (v); target: (m). logp, entropy: (m).
Dtypes     x, lm_head, bias alike: bf16 | fp16 | fp32. logp and entropy in fp32.
Saved      the inputs (nothing of size m·v).
Source     Milakov and Gimelshein 2018, arXiv:1805.02867; the entropy is one more sum of the online softmax.
"""

import torch

from fx_fusion.kernels.logits.class_part import ClassPart
from fx_fusion.kernels.logits.logit_chunks import each_chunk
from fx_fusion.kernels.logits.logit_rows import NO_IGNORE
from fx_fusion.ops.fused_op import fused_op
from fx_fusion.ops.launch import refuse_tracing
from fx_fusion.ops.library import plain_op, register_autograd


def _chunks(x, lm_head, bias, target, softcap, scale, dlogp=None, dentropy=None, needs=(False, False, False), part=None):
    """Returns logp, entropy and the gradients of x, lm_head, bias."""
    refuse_tracing()  # a loop of matrix products on the host
    x, target = x.contiguous(), target.contiguous()
    lm_head = lm_head if lm_head.stride(-1) == 1 else lm_head.contiguous()
    logp, entropy = _fake(x, lm_head, bias, target, softcap, scale)
    dloss = torch.zeros_like(logp) if dlogp is None else -dlogp.float().contiguous()
    dentropy = torch.zeros_like(logp) if dentropy is None else dentropy.float().contiguous()
    options = (NO_IGNORE, 0.0, softcap, scale)
    grads = each_chunk(x, lm_head, bias, target, None, options, dloss, needs, logp, entropy, dentropy, part=part)
    return logp.neg_(), entropy, grads


def _fwd(x, lm_head, bias, target, softcap, scale):
    return _chunks(x, lm_head, bias, target, softcap, scale)[:2]


def _bwd(dlogp, dentropy, x, lm_head, bias, target, softcap, scale, needs, part=None):
    grads = _chunks(x, lm_head, bias, target, softcap, scale, dlogp, dentropy, needs, part)[2]
    like = (x, lm_head, x if bias is None else bias)
    return tuple(t.new_empty(0) if g is None else g.to(t.dtype) for g, t in zip(grads, like, strict=True))


def _fake(x, lm_head, bias, target, softcap, scale, *part):
    return tuple(torch.empty(x.shape[:1], dtype=torch.float32, device=x.device) for _ in range(2))


token_log_probs = fused_op(
    "token_log_probs",
    (
        "(Tensor x, Tensor lm_head, Tensor? bias, Tensor target, float softcap, float scale)"
        " -> (Tensor logp, Tensor entropy)",
        _fwd,
    ),
    (
        "(Tensor? dlogp, Tensor? dentropy, Tensor x, Tensor lm_head, Tensor? bias, Tensor target, float softcap,"
        " float scale, bool[] needs) -> (Tensor dx, Tensor dlm_head, Tensor dbias)",
        _bwd,
    ),
    fake=_fake,
    grads=("x", "lm_head", "bias"),
)


def _fwd_of_part(x, lm_head, bias, target, softcap, scale, *part):
    return _chunks(x, lm_head, bias, target, softcap, scale, part=ClassPart(*part))[:2]


def _bwd_of_part(dlogp, dentropy, x, lm_head, bias, target, softcap, scale, group, first, classes, ranks, needs):
    part = ClassPart(group, first, classes, ranks)
    return _bwd(dlogp, dentropy, x, lm_head, bias, target, softcap, scale, needs, part)


def _fake_bwd_of_part(dlogp, dentropy, x, lm_head, bias, *rest):
    like = (x, lm_head, x if bias is None else bias)
    return tuple(t.new_empty(t.shape if n else 0) for t, n in zip(like, rest[-1], strict=True))


_INPUTS = "Tensor x, Tensor lm_head, Tensor? bias, Tensor target, float softcap, float scale"
_PART = "str group, int first, int classes, int ranks"

token_log_probs_of_part = plain_op(
    "token_log_probs_of_part", f"({_INPUTS}, {_PART}) -> (Tensor logp, Tensor entropy)", _fwd_of_part, _fake
)
token_log_probs_of_part_bwd = plain_op(
    "token_log_probs_of_part_bwd",
    f"(Tensor? dlogp, Tensor? dentropy, {_INPUTS}, {_PART}, bool[] needs) -> (Tensor dx, Tensor dlm_head, Tensor dbias)",
    _bwd_of_part,
    _fake_bwd_of_part,
)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx, dlogp, dentropy):
    if dlogp is None and dentropy is None:
        return (None,) * len(ctx.needs_input_grad)
    needs = list(ctx.needs_input_grad[:3])
    grads = token_log_probs_of_part_bwd(dlogp, dentropy, *ctx.saved_tensors, *ctx.options, needs)
    return (*(g if n else None for g, n in zip(grads, needs, strict=True)), *(None,) * (1 + len(ctx.options)))


register_autograd("token_log_probs_of_part", _backward, _setup_context)
