"""Log-probability of one class per row and entropy of the row, from logits: formulas in ``logits/logit_rows``.

Shapes     logits: (m, v), unit stride along v; target: (m), int64. logp, entropy: (m); stats: (2, m).
Dtypes     logits bf16 | fp16 | fp32, gradient alike; the rest in fp32.
Saved      logits, target, entropy, stats.
Traffic    forward m·v read, backward m·v read and m·v written, both results together.
Source     Milakov and Gimelshein 2018, arXiv:1805.02867; the entropy is one more sum of the online softmax.
"""

import torch

from fx_fusion.kernels.logits.logit_rows import NO_IGNORE, launch_rows
from fx_fusion.ops.fused_op import fused_op


def _fwd(logits, target, softcap, scale):
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    loss, entropy, stats = _fake(logits, target, softcap, scale)
    options = (NO_IGNORE, 0.0, softcap, scale)
    launch_rows(logits, target.contiguous(), None, *options, loss=loss, stats=stats, entropy=entropy)
    return -loss, entropy, stats


def _bwd(dlogp, dentropy, logits, target, entropy, stats, softcap, scale, needs):
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    dloss = torch.zeros_like(entropy) if dlogp is None else -dlogp.float()
    dentropy = torch.zeros_like(entropy) if dentropy is None else dentropy.float().contiguous()
    launch_rows(
        logits, target.contiguous(), None, NO_IGNORE, 0.0, softcap, scale,
        stats=stats, dloss=dloss, dlogits=dlogits, entropy=entropy, dentropy=dentropy,
    )  # fmt: skip
    return dlogits


def _fake(logits, target, softcap, scale):
    rows = logits.shape[:1]
    return tuple(torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in (rows, rows, (2, *rows)))


log_probs_entropy = fused_op(
    "log_probs_entropy",
    ("(Tensor logits, Tensor target, float softcap, float scale) -> (Tensor logp, Tensor entropy, Tensor stats)", _fwd),
    (
        "(Tensor? dlogp, Tensor? dentropy, Tensor logits, Tensor target, Tensor entropy, Tensor stats, float softcap,"
        " float scale, bool[] needs) -> Tensor dlogits",
        _bwd,
    ),
    fake=_fake,
    stats=("stats",),
    grads=("logits",),
)
