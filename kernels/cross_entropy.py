"""Cross-entropy of rows of logits, with softcap, scale, class weights, label smoothing and ignored targets.

    z    = scale · l                          softcap c > 0:  z = c · tanh(scale · l / c)
    top  = max z,  total = Σ_c exp(z_c − top),  lse = top + log total,  p = exp(z − top) / total
    loss = (1 − ε) · w_t · (lse − z_t) + (ε / V) · Σ_c w_c (lse − z_c)        w = 1 without class weights; t the target
    dz_c = dloss · ( p_c · ((1 − ε) w_t + (ε / V) Σ w) − (1 − ε) w_t [c = t] − (ε / V) w_c )
    dl   = dz · scale · (1 − (z / c)²)        the last factor with a softcap only

Shapes     logits: (m, v), unit stride along v; target: (m); weight: (v); loss: (m); stats: (2, m), top and total.
Dtypes     logits bf16 | fp16 | fp32, gradient alike; arithmetic, loss and stats in fp32. target int64. p is made of
           top and total, not of lse: rounding lse would scale a whole row of p by the same error.
Ignored    a row whose target is ignore_index has loss 0 and gradient 0. A target outside 0..v-1 gives loss NaN.
Saved      logits, target, weight, stats.
Traffic    forward m·v read, backward m·v read and m·v written. With the gradient made in the forward
           (linear_cross_entropy): m·v read, m·v written, and a second read that a row of 256 KiB finds in the L2.
Source     Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax); label smoothing as torch.nn.functional.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.launch import launch, multiprocessors, next_power_of_2
from fx_fusion.op import fused_op

_BLOCK, _GRADIENT_BLOCK = 4096, 16384  # logits in one step of a program
_WARPS = 64  # warps a multiprocessor for the sums
_EACH = 8  # logits that a lane adds at once: one exponential each, and one to rescale what it has


@triton.jit
def _tanh(x):
    # exp of a negative number only: no overflow for any x.
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _block_of_z(row, start, lanes, skip, v, scale, softcap, SOFTCAP: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """A block of z, and dz/dl. ``row`` points ``skip`` columns before the first one, where a wide load may start; only
    blocks at the ends of such a row are masked, since a mask that starts anywhere makes loads narrow."""
    at = start + lanes
    if ALIGN == 1:
        z = tl.load(row + at, at < v, 0.0)
    elif (start == 0) | (start + BLOCK > v + skip):
        z = tl.load(row + at, (at >= skip) & (at < v + skip), 0.0)
    else:
        z = tl.load(row + at)
    z = z.to(tl.float32) * scale
    slope = scale
    if SOFTCAP:
        bent = _tanh(z / softcap)
        slope = scale * (1.0 - bent * bent)
        z = softcap * bent
    return z, slope


@triton.jit
def _store_block(row, values, start, lanes, skip, v, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    at = start + lanes
    values = values.to(row.dtype.element_ty)
    if ALIGN == 1:
        tl.store(row + at, values, at < v)
    elif (start == 0) | (start + BLOCK > v + skip):
        tl.store(row + at, values, (at >= skip) & (at < v + skip))
    else:
        tl.store(row + at, values)


@triton.jit
def _fold(tops, sums, z, LANES: tl.constexpr, EACH: tl.constexpr):
    """A block of z into the running maxima and sums: each lane rescales its sum once for EACH new values."""
    z = tl.reshape(z, (LANES, EACH))
    above = tl.maximum(tops, tl.max(z, 1))
    base = tl.where(above == -float("inf"), 0.0, above)  # a lane that has seen -inf only
    sums = sums * tl.exp(tops - base) + tl.sum(tl.exp(z - base[:, None]), 1)
    return above, sums


@triton.jit
def _weights(weight_ptr, cols, v, HAS_WEIGHT: tl.constexpr):
    live = (cols >= 0) & (cols < v)
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + cols, live, 0.0).to(tl.float32)
    else:
        w = tl.where(live, 1.0, 0.0)
    return w


@triton.jit
def _rows_kernel(
    l_ptr, dl_ptr, target_ptr, weight_ptr, weight_sum_ptr, loss_ptr, stats_ptr, dloss_ptr,
    m, v, width, l_stride, dl_stride, dloss_stride, ignore_index, smoothing, softcap, scale, programs,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr,
    STATS_GIVEN: tl.constexpr, GRADIENT: tl.constexpr, HAS_DLOSS: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr, ALIGN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + programs, ...: the loss unless stats are given, and the gradient if wanted (it may overwrite the
    logits). So few programs that the rows in flight stay in the L2 between the two reads. Each lane keeps a maximum
    and a sum of its own; lanes meet once a row."""
    smoothing = tl.cast(smoothing, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    scale = tl.cast(scale, tl.float32)
    lanes = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0).to(tl.int64), m, programs):
        target = tl.load(target_ptr + row)
        # Rows of odd length start anywhere. The blocks of a row start ``skip`` columns early, where a wide load may.
        skip = (row * l_stride % ALIGN).to(tl.int32)
        l_row = l_ptr + tl.multiple_of(row * l_stride - skip, ALIGN)
        dl_row = dl_ptr + tl.multiple_of(row * dl_stride - skip, ALIGN)
        if target == ignore_index:
            if not STATS_GIVEN:
                tl.store(loss_ptr + row, 0.0)
                tl.store(stats_ptr + row, 0.0)
                tl.store(stats_ptr + m + row, 1.0)
            if GRADIENT:
                for start in range(0, width + skip, BLOCK):
                    _store_block(dl_row, tl.zeros((BLOCK,), tl.float32), start, lanes, skip, width, ALIGN, BLOCK)
        else:
            valid = (target >= 0) & (target < v)
            w_target = 1.0
            if HAS_WEIGHT:
                w_target = tl.load(weight_ptr + target, valid, 0.0).to(tl.float32)
            w_sum = v * 1.0
            if HAS_WEIGHT and SMOOTH:
                w_sum = tl.load(weight_sum_ptr)
            if STATS_GIVEN:
                top = tl.load(stats_ptr + row)
                total = tl.load(stats_ptr + m + row)
            else:
                tops = tl.full((BLOCK // EACH,), -float("inf"), tl.float32)
                sums = tl.zeros((BLOCK // EACH,), tl.float32)
                smooth = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, width + skip, BLOCK):
                    cols = start + lanes - skip
                    z, _ = _block_of_z(l_row, start, lanes, skip, width, scale, softcap, SOFTCAP, ALIGN, BLOCK)
                    if SMOOTH:
                        smooth += _weights(weight_ptr, cols, v, HAS_WEIGHT) * z
                    z = tl.where((cols >= 0) & (cols < v), z, -float("inf"))
                    tops, sums = _fold(tops, sums, z, BLOCK // EACH, EACH)
                top = tl.max(tops, 0)
                # A row of -inf only: NaN, as in PyTorch.
                total = tl.sum(sums * tl.exp(tops - top), 0)
                z_target = tl.load(l_row + skip + target, valid, 0.0).to(tl.float32) * scale
                if SOFTCAP:
                    z_target = softcap * _tanh(z_target / softcap)
                loss = w_target * (tl.log(total) + (top - z_target))
                if SMOOTH:
                    spread = (top + tl.log(total)) * w_sum - tl.sum(smooth, 0)
                    loss = (1.0 - smoothing) * loss + smoothing / v * spread
                tl.store(loss_ptr + row, tl.where(valid, loss, float("nan")))
                tl.store(stats_ptr + row, top)
                tl.store(stats_ptr + m + row, total)
            if GRADIENT:
                dloss = 1.0
                if HAS_DLOSS:
                    dloss = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
                if not STATS_GIVEN:
                    tl.debug_barrier()  # the target's logit is read before any lane overwrites it
                hit = (1.0 - smoothing) * w_target
                pull = hit
                if SMOOTH:
                    pull += smoothing / v * w_sum
                pull = pull / total
                for start in range(0, width + skip, BLOCK):
                    cols = start + lanes - skip
                    z, slope = _block_of_z(l_row, start, lanes, skip, width, scale, softcap, SOFTCAP, ALIGN, BLOCK)
                    dz = tl.exp(z - top) * pull
                    dz = tl.where(cols == target, dz - hit, dz)
                    if SMOOTH:
                        dz -= smoothing / v * _weights(weight_ptr, cols, v, HAS_WEIGHT)
                    dz *= slope * dloss
                    if PADDED:
                        dz = tl.where(cols < v, dz, 0.0)
                    _store_block(dl_row, dz, start, lanes, skip, width, ALIGN, BLOCK)


def launch_rows(
    logits, target, weight, ignore_index, label_smoothing, softcap, scale, *,
    classes=None, loss=None, stats, dloss=None, dlogits=None,
):  # fmt: skip
    """Run the kernel over 2-D logits. ``loss`` given: write it and ``stats``; else ``stats`` are read. ``dlogits`` given:
    write the gradient (``dlogits is logits`` overwrites), for the upstream gradient ``dloss`` (m), or 1. Columns from
    ``classes`` on are padding: no logits, their gradient is zero."""
    m, width = logits.shape
    v = width if classes is None else classes
    if m == 0 or v == 0:
        return
    given = loss is None
    out = logits if dlogits is None else dlogits
    # The sums are bound by instructions and latency: many small programs. The gradient is bound by the bandwidth: few rows
    # in flight.
    align = 16 // logits.element_size()
    few_rows = m <= 2 * multiprocessors(logits)
    block = min(next_power_of_2(v), _BLOCK if dlogits is None and not few_rows else _GRADIENT_BLOCK)
    warps = max(4, min(32, block // 512))
    programs = min(m, multiprocessors(logits) * (_WARPS // warps if dlogits is None else max(1, 32 // warps)))
    launch(_rows_kernel, (programs,), 
        logits, out, target, logits if weight is None else weight, stats if weight is None else weight.float().sum(),
        stats if given else loss, stats, stats if dloss is None else dloss, m, v, width, logits.stride(0), out.stride(0),
        0 if dloss is None else dloss.stride(0), int(ignore_index), float(label_smoothing), float(softcap),
        float(scale), programs, HAS_WEIGHT=weight is not None, SMOOTH=label_smoothing > 0, SOFTCAP=softcap > 0,
        STATS_GIVEN=given, GRADIENT=dlogits is not None, HAS_DLOSS=dloss is not None, BLOCK=block, EACH=min(_EACH, block),
        ALIGN=align if logits.stride(0) % align and logits.stride(0) == out.stride(0) else 1, PADDED=width > v,
        num_warps=warps,
    )  # fmt: skip


def _fwd(logits, target, weight, ignore_index, label_smoothing, softcap, scale):
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    loss, stats = _fake(logits, target, weight, ignore_index, label_smoothing, softcap, scale)
    launch_rows(logits, target.contiguous(), weight, ignore_index, label_smoothing, softcap, scale, loss=loss, stats=stats)
    return loss, stats


def _bwd(dloss, logits, target, weight, stats, ignore_index, label_smoothing, softcap, scale, needs):
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch_rows(
        logits, target.contiguous(), weight, ignore_index, label_smoothing, softcap, scale,
        stats=stats, dloss=dloss, dlogits=dlogits,
    )  # fmt: skip
    return dlogits


def _fake(logits, target, weight, ignore_index, label_smoothing, softcap, scale):
    loss = torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device)
    return loss, torch.empty((2, logits.shape[0]), dtype=torch.float32, device=logits.device)


_OPTIONS = "int ignore_index, float label_smoothing, float softcap, float scale"

cross_entropy = fused_op(
    "cross_entropy",
    (f"(Tensor logits, Tensor target, Tensor? weight, {_OPTIONS}) -> (Tensor loss, Tensor stats)", _fwd),
    (
        f"(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor stats, {_OPTIONS}, bool[] needs)"
        " -> Tensor dlogits",
        _bwd,
    ),
    fake=_fake,
    stats=("stats",),
    grads=("logits",),
)
