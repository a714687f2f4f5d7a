"""Logits of a linear layer, one chunk of rows at a time: loss, entropy and all gradients while the chunk exists.

    l  = x · Wᵀ + b, rounded to x's dtype        W = lm_head;  loss, entropy and dl of l: formulas in ``logit_rows``
    dx = dl · W
    dW = Σ_chunks dlᵀ · x
    db = Σ_rows dl

Shapes     x: (m, h); lm_head: (v, h); bias, weight (of the classes): (v); target: (m); loss, entropy: (m).
Dtypes     x, lm_head, bias alike: bf16 | fp16 | fp32; loss and entropy in fp32. On a GPU dW of up to four chunks is rounded
           after each chunk; dW of more chunks, and of fp16 without headroom, is accumulated in fp32 and rounded once, as
           on a CPU.
           Where the caller wants ``all_logits``, they are written beside.
Memory     one chunk of logits, on a GPU 0.5 GiB (of up to 2 GiB) to 1.3 GiB, and dW in fp32 where it is accumulated in it.
           ``small`` chunks: as little of both together as is as accurate, 0.5 GiB and dW at most; always so on a GPU of less
           than 32 GiB.
Source     gradient in the forward, in chunks: Malek 2024, efficient_cross_entropy; here in few large chunks, so that the
           matrix products stay efficient, and accumulated in fp32.
"""

import torch

from fx_fusion.graph.dtypes import on_tensor_cores
from fx_fusion.kernels.lib.device import memory_of_device
from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.logits.logit_rows import launch_rows
from fx_fusion.ops.on_cpu import interpreting
from fx_fusion.torch_internals.collectives import add_up, arrived

# Every chunk reads and writes dW: with 4096 rows (1 GiB at 128256 classes) that is some 2 % of the time of its products, 5 %
# in fp32. A sum rounded to 16 bits four times is off by 1.6 roundings in the mean, a sum rounded once by one.
_ROUNDED_CHUNKS = 4
# Bytes of a chunk, at least and at most: a fourth of all logits within these bounds.
_CHUNK_BYTES = {"cuda": (1 << 29, 5 << 28), "cpu": (8 << 20, 8 << 20)}
_SMALL_GPU = 32 << 30  # bytes; by the device, not by what is free on it: the same program gives the same numbers
_FLOAT32_ROWS = 2048  # products of 1024 rows cost 3 % more
# Summed in fp32, dW of 16 chunks of 1024 rows takes a tenth of the time of the products (151936 classes, H200), of 2048
# rows half of it.
_SUMMED_ROWS = 2048
_FLOAT32_WHOLE = 7 << 27  # bytes of logits in one chunk: in two, 4096 x 768 x 51864 takes 3 % longer than Inductor
_WORTH_COUNTING = 1 << 27  # logits; a forward and backward of them take a millisecond and more on an H200
_ROW_MULTIPLE = 256  # keeps the matrix products of a chunk on whole tiles
# Classes are padded to this where 16 bytes don't divide a row: tensor cores take four times as long there.
_CLASS_MULTIPLE = 64


@planner
def chunk_plan(m: int, v: int, itemsize: int, device: str, small: bool = False, sum_bytes: int = 0) -> Plan:
    """Choose by ``m`` rows of ``v`` logits of ``itemsize`` bytes and the type of the device: ``rows`` so that a chunk fits
    the budget of bytes, in float32 at least 2048. Chunks of equal size rather than a small last one; where they are many,
    powers of two, which fill the waves of all products (3328 rows instead of 4096 cost 6 %). ``small``: the least memory,
    with the ``sum_bytes`` of dW in fp32 where there are more than four chunks.

    Returns ``rows`` of a chunk and ``rounded_chunks``, up to which dW is rounded to 16 bits after each. Measured on an H200
    (``python -m bench.tune chunks``)."""
    rows = _rows_of_a_small_chunk if small and device == "cuda" else _rows_of_a_chunk
    return Plan(rows=rows(m, v * itemsize, itemsize, device, sum_bytes), rounded_chunks=_ROUNDED_CHUNKS)


def _rows_of_a_small_chunk(m: int, row: int, itemsize: int, device: str, sum_bytes: int) -> int:
    least = _CHUNK_BYTES[device][0]
    fourth = cdiv(cdiv(m, _ROUNDED_CHUNKS), _ROW_MULTIPLE) * _ROW_MULTIPLE
    rows = max(_ROW_MULTIPLE, least // max(1, row))
    rows = 1 << (rows.bit_length() - 1)
    rows = max(rows, _SUMMED_ROWS) if sum_bytes else rows
    return max(1, min(m, max(rows, fourth) if fourth * row <= rows * row + sum_bytes else rows))


def _rows_of_a_chunk(m: int, row: int, itemsize: int, device: str, sum_bytes: int) -> int:
    row = max(1, row)
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


def again_takes_longer(h: float, dtype: torch.dtype, device: str) -> bool:
    """Return True if making logits of x (m, ``h``) again in a backward, a fourth product of m·h·v beside three, takes longer
    than their passes through memory: on an H200 from some 1000 columns on; without tensor cores, which multiply 15 times as
    fast, from some 150 to 200."""
    return device == "cuda" and h > (1024 if on_tensor_cores(dtype) else 128)


def each_chunk_that_counts(
    x, lm_head, bias, target, weight, options, dloss, needs, loss, headroom=None, small=False, part=None, z_factor=None,
    number=None,
):  # fmt: skip
    """``each_chunk`` without the rows whose target is ignored: their loss and their gradients are 0 without logits. They are
    the padding of a batch, and the prompts where only answers are trained. Their ``z_factor`` has to be 0. ``number``: of
    targets that count, on the device, where that is known.

    How many rows are left is read back from the GPU, which then waits for its next launch for some 20 µs. So all rows stay
    below 2^27 logits, where more than 15/16 of them count, and while a CUDA graph is captured."""
    kept = _rows_that_count(target, options[0], lm_head.shape[0] if part is None else part.largest, number)
    if kept is None:
        return each_chunk(
            x, lm_head, bias, target, weight, options, dloss, needs, loss, headroom=headroom, small=small, part=part,
            z_factor=z_factor,
        )  # fmt: skip
    loss_kept, (dloss_kept, z_kept) = loss.new_empty(kept.shape), (None if t is None else t[kept] for t in (dloss, z_factor))
    dx, dw, db = each_chunk(
        x[kept], lm_head, bias, target[kept], weight, options, dloss_kept, needs, loss_kept, headroom=headroom,
        of_rows=x.shape[0], small=small, part=part, z_factor=z_kept,
    )  # fmt: skip
    loss.zero_().index_copy_(0, kept, loss_kept)
    return None if dx is None else torch.zeros_like(x).index_copy_(0, kept, dx), dw, db


def _rows_that_count(target, ignore_index: int, v: int, number):
    """Returns the indices of the rows whose target counts; None where all rows had better stay."""
    if number is not None and _is_read(target, v) and 16 * int(number) > 15 * target.numel():
        return None
    return rows_to_keep(target != ignore_index, v)


def rows_to_keep(counts, v: int):
    """Returns the indices of the rows of ``v`` logits that ``counts`` (m, booleans) names; None where all might stay."""
    if not _is_read(counts, v):
        return None
    kept = counts.nonzero()[:, 0]
    return kept if 16 * kept.numel() <= 15 * counts.numel() else None


def _is_read(counts, v: int) -> bool:
    """Return True if it pays to read back which rows count, and whether that is possible."""
    return counts.numel() * v >= _WORTH_COUNTING and not (counts.is_cuda and torch.cuda.is_current_stream_capturing())


def each_chunk(
    x, lm_head, bias, target, weight, options, dloss, needs, loss, entropy=None, dentropy=None, headroom=None, of_rows=None,
    all_logits=None, small=False, part=None, z_factor=None, fill=None,
):  # fmt: skip
    """Fill ``loss`` (and ``entropy``, ``all_logits``); return dx, dW, db where ``needs`` says so, else None. dW is
    multiplied by ``headroom``. ``options``: ignore_index, label_smoothing, softcap, scale. ``of_rows``: how many rows there
    were before some were left out; chunks are no larger then than with all of them, and of equal size. ``small``: of the
    least memory. ``part``: which of all classes lm_head has, if other ranks have the rest (``class_part``); dx is then the
    sum over all ranks. ``z_factor`` (m), fp32: of the z-loss. ``fill``: what takes the place of ``loss_of_rows``."""
    m, v = x.shape[0], lm_head.shape[0]
    columns = v if part is None else part.largest
    needs_dx, needs_dw, needs_db = needs
    gradient = any(needs)
    # All ranks take the same chunks, also where one has a smaller GPU.
    small = small or (part is None and memory_of_device(x) < _SMALL_GPU)
    sum_bytes = 4 * columns * lm_head.shape[1] if needs_dw and x.element_size() < 4 else 0
    plan = chunk_plan(m if of_rows is None else of_rows, columns, x.element_size(), x.device.type, small, sum_bytes)
    step = plan.rows
    # Without headroom a partial sum in fp16 could overflow where the whole sum doesn't.
    rounded = (x.dtype == torch.bfloat16 or headroom is not None) and cdiv(m, step) <= plan.rounded_chunks
    lm_head, bias = padded(lm_head), None if bias is None else padded(bias)
    weight = None if weight is None else weight.contiguous()
    if all_logits is not None and not gradient:
        step = max(1, m)  # they are all kept, so nothing is won by chunks
    aligned = lm_head.shape[0] == v
    # As large for any number of rows that count: the allocator finds the same block in every step.
    needs_buffer = all_logits is None or gradient or not aligned
    buffer = torch.empty(step if needs_buffer else 0, lm_head.shape[0], dtype=x.dtype, device=x.device)
    if of_rows is not None and m > 0:
        step = min(step, cdiv(cdiv(m, cdiv(m, step)), _ROW_MULTIPLE) * _ROW_MULTIPLE)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_dx else None
    dw_dtype = x.dtype if rounded and x.is_cuda else torch.float32
    dw = torch.zeros(lm_head.shape, dtype=dw_dtype, device=x.device) if needs_dw and m == 0 else None
    db = torch.zeros(v, dtype=torch.float32, device=x.device) if needs_db else None
    for start in range(0, m, step):
        rows = slice(start, min(m, start + step))
        x_rows, chunk = x[rows], buffer[: min(m, start + step) - start]
        logits = chunk if all_logits is None or not aligned else all_logits[rows]
        if bias is None:
            torch.mm(x_rows, lm_head.t(), out=logits)
        else:
            torch.addmm(bias, x_rows, lm_head.t(), out=logits)
        if all_logits is not None and not aligned:
            all_logits[rows].copy_(chunk[:, :v])
        upstream, h, dh, z = (None if t is None else t[rows] for t in (dloss, entropy, dentropy, z_factor))
        dlogits = chunk if gradient else None
        fill = fill or (loss_of_rows if part is None else part.rows)
        fill(logits, v, target[rows], weight, options, loss[rows], upstream, dlogits, h, dh, z)
        if dx is not None:
            torch.mm(chunk, lm_head, out=dx[rows])
            if part is not None:
                add_up(dx[rows], part.group)  # while dW and the next chunk are computed
        if needs_dw:
            if dw is None:  # not before: a chunk's loss needs memory, too
                dw = torch.empty(lm_head.shape, dtype=dw_dtype, device=x.device)
            # What adds dx up gets processors only where a kernel of ours ends: behind the last chunk it would run alone.
            in_two = part is not None and dx is not None and rows.stop == m
            width = cdiv(cdiv(v, 2), _CLASS_MULTIPLE) * _CLASS_MULTIPLE if in_two else max(1, lm_head.shape[0])
            for some, dlogits_of_some in zip(dw.split(width), chunk.split(width, 1), strict=True):
                _add_product(some, dlogits_of_some, x_rows if headroom is None else x_rows * headroom, first=start == 0)
        if db is not None:
            db += chunk[:, :v].sum(0, dtype=torch.float32)
    if dx is not None and part is not None:
        dx = arrived(dx)
    return dx, None if dw is None else dw[:v], db


def padded_classes(v: int, dtype: torch.dtype, on_gpu: bool) -> int:
    """Returns how many logits lie between two rows of a chunk of ``v`` classes."""
    aligned = v * dtype.itemsize % 16 == 0
    return v if aligned or not on_gpu or not on_tensor_cores(dtype) else cdiv(v, _CLASS_MULTIPLE) * _CLASS_MULTIPLE


def padded(classes):
    """Return ``classes`` (lm_head or bias), with rows of zeros behind the last class where a row of logits would be
    unaligned. The columns of logits for these rows are padding: their gradients are zero."""
    v = classes.shape[0]
    more = padded_classes(v, classes.dtype, classes.is_cuda or interpreting()) - v
    if not more:
        return classes
    return torch.nn.functional.pad(classes, (0, 0, 0, more) if classes.dim() == 2 else (0, more))


def _add_product(dw, dlogits, x, *, first: bool) -> None:
    """dw += dlogitsᵀ · x, in dw's dtype; ``first``: dw is not there yet."""
    if not dlogits.is_cuda:
        dlogits, x = dlogits.float(), x.float()
    if dw.dtype == dlogits.dtype:
        torch.mm(dlogits.t(), x, out=dw) if first else dw.addmm_(dlogits.t(), x)
    elif first:
        torch.mm(dlogits.t(), x, out_dtype=torch.float32, out=dw)
    else:
        torch.addmm(dw, dlogits.t(), x, out_dtype=torch.float32, out=dw)


def loss_of_rows(logits, v, target, weight, options, loss, dloss, dlogits, entropy, dentropy, z_factor):
    """Fill ``loss`` of one chunk, over its first ``v`` columns, and ``dlogits``, which may be the chunk itself or None."""
    if logits.is_cuda or interpreting():
        stats = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
        launch_rows(
            logits, target, weight, *options, classes=v, loss=loss, stats=stats, dloss=dloss,
            dlogits=dlogits, entropy=entropy, dentropy=dentropy, z_factor=z_factor,
        )  # fmt: skip
        return
    ignore_index, smoothing, softcap, scale = options
    z = logits.float() * scale if scale != 1 else logits.float()
    ratio = torch.tanh(z / softcap) if softcap else None
    z = z if ratio is None else softcap * ratio
    top = z.amax(1)
    powers = (z - top[:, None]).exp_()
    total = powers.sum(1)
    counts = target != ignore_index
    index = torch.where(counts, target, 0)  # an index error for a target out of range, as in PyTorch
    w = None if weight is None else weight.float()
    w_target = torch.ones_like(top) if w is None else w[index]
    row_loss = w_target * (total.log() + (top - z.gather(1, index[:, None])[:, 0]))
    w_sum = float(v) if w is None else w.sum()
    if smoothing:
        over_classes = (top + total.log()) * w_sum - (z.sum(1) if w is None else z @ w)  # Σ_c w_c (lse − z_c)
        row_loss = (1 - smoothing) * row_loss + smoothing / v * over_classes
    loss.copy_(torch.where(counts, row_loss, 0))
    has_loss = counts
    if z_factor is not None:
        lse, has_loss = top + total.log(), counts | (z_factor != 0)
        loss += torch.where(has_loss, z_factor * lse.square(), 0)
    if dlogits is None:
        return
    q_target = (1 - smoothing) * w_target
    q_sum = q_target + smoothing / v * w_sum if smoothing else q_target  # without smoothing w_sum may be inf: not 0 · inf
    if z_factor is not None:
        q_target, q_sum = torch.where(counts, q_target, 0), torch.where(counts, q_sum, 0) + 2 * z_factor * lse
    dz = powers.mul_((q_sum / total)[:, None])
    dz.scatter_add_(1, index[:, None], -q_target[:, None])
    if smoothing:
        share = smoothing / v * (1.0 if w is None else w)
        dz -= share if z_factor is None else share * counts[:, None]  # rows that are ignored may have a z-loss
    if ratio is not None:
        dz *= 1 - ratio * ratio
    factor = has_loss * scale if dloss is None else has_loss * dloss * scale
    # where, not a product: an ignored row has no gradient even if its probabilities are NaN.
    dlogits.copy_(torch.where(has_loss[:, None], dz.mul_(factor[:, None]), 0))
