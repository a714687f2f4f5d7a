"""Logits of a linear layer, one chunk of rows at a time: loss, entropy and all gradients while a chunk is there.

    l = x · Wᵀ + b, rounded to x's dtype;  loss, entropy, dl as in logit_rows
    dx = dl · W      dW = Σ_chunks dlᵀ · x      db = Σ_rows dl

What linear_cross_entropy and token_log_probs are made of. On a GPU dW of up to four chunks is rounded after each; of more,
and in fp16 without headroom, it is accumulated in fp32 and rounded once, as on a CPU.

Memory     one chunk of logits, on a GPU 0.5 GiB (of up to 2 GiB) to 1.3 GiB, and dW in fp32 where it is accumulated so.
Source     gradient in the forward, in chunks: Malek 2024, efficient_cross_entropy; here with few large chunks, so that
           the matrix products stay efficient, and fp32 accumulation.
"""

import torch

from fx_fusion.graph.dtypes import on_tensor_cores
from fx_fusion.kernels.lib.launch import cdiv
from fx_fusion.kernels.logits.logit_rows import launch_rows
from fx_fusion.ops.fused_op import interpreting

# Every chunk reads and writes dW: 4096 rows of it (1 GiB at 128256 classes) make that some 2 % of its products, or 5 % in
# fp32. A sum that is rounded to 16 bits four times on its way is off by 1.6 roundings in the mean, where one is off by one.
_ROUNDED_CHUNKS = 4
# So: a fourth of all logits, within these bounds.
_CHUNK_BYTES = {"cuda": (1 << 29, 5 << 28), "cpu": (8 << 20, 8 << 20)}
_FLOAT32_ROWS = 2048  # products of 1024 rows cost 3 % more
_FLOAT32_WHOLE = 7 << 27  # logits in one piece: in two, 4096 x 768 x 51864 takes 3 % longer than Inductor
_ROW_MULTIPLE = 256  # keeps the matrix products of a chunk on whole tiles
# Classes are padded to this where 16 bytes don't divide a row: tensor cores take four times as long there.
_CLASS_MULTIPLE = 64


def rows_in_a_chunk(m: int, v: int, itemsize: int, device: str) -> int:
    """Rows so that a chunk of logits fits the budget, in float32 2048 at least. Chunks of equal size rather than a small
    last one; where they are many, powers of two, which fill the waves of all products (3328 rows for 4096 cost 6 %)."""
    row = max(1, v * itemsize)
    least, most = _CHUNK_BYTES[device]
    if itemsize == 4 and device == "cuda" and m * row <= _FLOAT32_WHOLE:
        return max(1, m)
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
    class_weight = None if class_weight is None else class_weight.contiguous()
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
