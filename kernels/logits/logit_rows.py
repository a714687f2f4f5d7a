"""Cross-entropy of rows of logits, with softcap, scale, class weights, label smoothing and ignored targets.

    z    = scale · l                          softcap c > 0:  z = c · tanh(scale · l / c)
    top  = max z,  total = Σ_c exp(z_c − top),  lse = top + log total,  p = exp(z − top) / total
    loss = (1 − ε) · w_t · (lse − z_t) + (ε / V) · Σ_c w_c (lse − z_c)        w = 1 without class weights; t the target
    dz_c = dloss · ( p_c · ((1 − ε) w_t + (ε / V) Σ w) − (1 − ε) w_t [c = t] − (ε / V) w_c )
    dl   = dz · scale · (1 − (z / c)²)        the last factor with a softcap only
    H    = −Σ_c p_c log p_c = log total − Σ_c p_c (z_c − top)        where asked for; then also
    dz_c = … − dH · p_c · (z_c − top − Σ p (z − top))

Shapes     logits: (m, v), v > 0, unit stride along v; target: (m); weight: (v), any stride; loss: (m); stats: (2, m),
           top and total.
Dtypes     logits bf16 | fp16 | fp32, gradient alike; arithmetic, loss and stats in fp32. target int64. p is made of
           top and total, not of lse: rounding lse would scale a whole row of p by the same error.
-inf       0 · log 0 = 0: beside logits of -inf eager's entropy is NaN, this one is that of the others.
Ignored    a row whose target is ignore_index has loss 0 and gradient 0. A target outside 0..v-1 gives a loss and a
           gradient of NaN.
Saved      logits, target, weight, stats.
Traffic    forward m·v read, backward m·v read and m·v written: 94-97 % of the copy rate. With the gradient made in the
           forward (linear_cross_entropy) a row is read twice, the second time backwards: of 32000 logits in 16 bits out
           of the L2 (12 % faster than two kernels), of 128256 from memory.
Source     Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax); label smoothing as torch.nn.functional.
"""

import triton
import triton.language as tl

from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.fast_math import exp
from fx_fusion.kernels.lib.launch import cdiv, launch, multiprocessors, next_power_of_2, refuse_tracing

NO_IGNORE = -(2**31)  # no target has this index; the least that fits an argument (see launch_rows)
_EACH = 8  # logits that a lane adds at once: one exponential each, and one to rescale what it has


@triton.jit
def _tanh(x):
    # exp of a negative number only: no overflow for any x.
    e = exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _z(pointers, live, scale, softcap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """z of the logits at ``pointers``, -inf where none is, and 1 - (z / c)^2."""
    z = tl.load(pointers, live, -float("inf")).to(tl.float32)
    slope = 1.0
    if SCALED:
        z *= scale
    if SOFTCAP:
        bent = _tanh(z / softcap)
        slope = 1.0 - bent * bent
        z = softcap * bent
    if SCALED or SOFTCAP:
        z = tl.where(live, z, -float("inf"))
    return z, slope


@triton.jit
def _ends(width, head, body, ALIGN: tl.constexpr, LANES: tl.constexpr):
    """The columns before and behind the part of a row that wide loads read: fewer than ALIGN each, a lane for each."""
    e = tl.arange(0, LANES)
    cols = tl.where(e < ALIGN, e, head + body + e - ALIGN)
    return cols, tl.where(e < ALIGN, e < head, cols < width)


@triton.jit
def _fold(tops, sums, z, LANES: tl.constexpr, EACH: tl.constexpr):
    """A block of z into the running maxima and sums: each lane rescales its sum once for EACH new values."""
    z = tl.reshape(z, (LANES, EACH))
    above = tl.maximum(tops, tl.max(z, 1))
    base = tl.where(above == -float("inf"), 0.0, above)  # a lane that has seen -inf only
    sums = sums * exp(tops - base) + tl.sum(exp(z - base[:, None]), 1)
    return above, sums


@triton.jit
def _fold_products(tops, sums, products, z, LANES: tl.constexpr, EACH: tl.constexpr):
    """As ``_fold``, and sums of exp(z - top) · (z - top) beside it."""
    z = tl.reshape(z, (LANES, EACH))
    above = tl.maximum(tops, tl.max(z, 1))
    base = tl.where(above == -float("inf"), 0.0, above)
    scaled = sums * exp(tops - base)
    products = products * exp(tops - base) + tl.where(scaled > 0, (tops - base) * scaled, 0.0)
    e = exp(z - base[:, None])
    products += tl.sum(tl.where(e > 0, e * (z - base[:, None]), 0.0), 1)
    return above, scaled + tl.sum(e, 1), products


@triton.jit
def _weights(weight_ptr, cols, live, HAS_WEIGHT: tl.constexpr):
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + cols, live, 0.0).to(tl.float32)
    else:
        w = tl.where(live, 1.0, 0.0)
    return w


@triton.jit
def _weighted(weight_ptr, cols, live, z, HAS_WEIGHT: tl.constexpr):
    return tl.where(live, _weights(weight_ptr, cols, live, HAS_WEIGHT) * z, 0.0)


@triton.jit
def _dz(
    e, z, slope, top, pull, hit, target, smooth, v, cols, live, weight_ptr, dentropy, mean,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The gradient of some logits of a row; ``e`` is exp(z - top). What multiplies a whole row is in ``pull``, ``hit``,
    ``smooth`` and ``dentropy``, the total too."""
    dz = e * pull - tl.where(cols == target, hit, 0.0)
    if SMOOTH:
        dz -= smooth * _weights(weight_ptr, cols, live, HAS_WEIGHT)
    if ENTROPY:
        dz -= tl.where(e > 0, e * (z - top - mean), 0.0) * dentropy
    if SOFTCAP:
        dz *= slope
    if PADDED:
        dz = tl.where(cols < v, dz, 0.0)
    return dz


@triton.jit
def _rows_kernel(
    l_ptr, dl_ptr, target_ptr, weight_ptr, weight_sum_ptr, loss_ptr, stats_ptr, dloss_ptr, entropy_ptr, dentropy_ptr,
    m, v, width, l_stride, dl_stride, dloss_stride, ignore_index, smoothing, softcap, scale, programs,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    STATS_GIVEN: tl.constexpr, GRADIENT: tl.constexpr, HAS_DLOSS: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + programs, ...: the loss unless stats are given, and the gradient if wanted (it may overwrite the
    logits). Each lane keeps a maximum and a sum of its own; lanes meet once a row.

    A row of odd length starts anywhere: wide loads and stores take its ``body``, from the first multiple of ALIGN behind
    its start, and what is left at both ends is read apart (ALIGN > 1)."""
    tl.static_assert(ALIGN == 1 or not PADDED, "padded rows start where wide loads may")
    width, l_stride, dl_stride = multiple(width, UNIT), multiple(l_stride, UNIT), multiple(dl_stride, UNIT)
    smoothing = tl.cast(smoothing, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    scale = tl.cast(scale, tl.float32)
    lanes = tl.arange(0, BLOCK)
    LANES: tl.constexpr = BLOCK // EACH
    for row in range(tl.program_id(0).to(tl.int64), m, programs):
        target = tl.load(target_ptr + row)
        head = 0
        body = width
        if ALIGN > 1:
            head = tl.minimum((ALIGN - (row * l_stride % ALIGN).to(tl.int32)) % ALIGN, width)
            body = tl.multiple_of((width - head) // ALIGN * ALIGN, ALIGN)
        l_row = l_ptr + tl.multiple_of(row * l_stride + head, ALIGN)  # column ``head``
        dl_row = dl_ptr + tl.multiple_of(row * dl_stride + head, ALIGN)
        if target == ignore_index:
            if not STATS_GIVEN:
                tl.store(loss_ptr + row, 0.0)
                tl.store(stats_ptr + row, 0.0)
                tl.store(stats_ptr + m + row, 1.0)
            if GRADIENT:
                nothing = tl.zeros((BLOCK,), dl_ptr.dtype.element_ty)
                for start in range(0, body, BLOCK):
                    tl.store(dl_row + start + lanes, nothing, start + lanes < body)
                if ALIGN > 1:
                    end_cols, end_live = _ends(width, head, body, ALIGN, LANES)
                    tl.store(dl_row - head + end_cols, tl.zeros((LANES,), dl_ptr.dtype.element_ty), end_live)
        else:
            valid = (target >= 0) & (target < v)
            w_target = 1.0
            if HAS_WEIGHT:
                w_target = tl.load(weight_ptr + target, valid, 0.0).to(tl.float32)
            w_sum = v * 1.0
            if HAS_WEIGHT and SMOOTH:
                w_sum = tl.load(weight_sum_ptr)
            spread = 0.0
            mean = 0.0
            if STATS_GIVEN:
                top = tl.load(stats_ptr + row)
                total = tl.load(stats_ptr + m + row)
                if ENTROPY:
                    mean = tl.log(total) - tl.load(entropy_ptr + row)
            else:
                tops = tl.full((LANES,), -float("inf"), tl.float32)
                sums = tl.zeros((LANES,), tl.float32)
                spreads = tl.zeros((BLOCK,), tl.float32)
                products = tl.zeros((LANES,), tl.float32)
                if ALIGN > 1:  # what a lane begins with
                    end_cols, end_live = _ends(width, head, body, ALIGN, LANES)
                    end_z, end_slope = _z(l_row - head + end_cols, end_live, scale, softcap, SCALED, SOFTCAP)
                    if SMOOTH:
                        spread += tl.sum(_weighted(weight_ptr, end_cols, end_live, end_z, HAS_WEIGHT), 0)
                    tops = end_z
                    sums = tl.where(tops == -float("inf"), 0.0, 1.0)
                for start in tl.range(0, body, BLOCK, num_stages=STAGES):
                    at = start + lanes
                    cols = head + at
                    z, _ = _z(l_row + at, at < body, scale, softcap, SCALED, SOFTCAP)
                    if PADDED:
                        z = tl.where(cols < v, z, -float("inf"))
                    if SMOOTH:
                        spreads += _weighted(weight_ptr, cols, (at < body) & (cols < v), z, HAS_WEIGHT)
                    if ENTROPY:
                        tops, sums, products = _fold_products(tops, sums, products, z, LANES, EACH)
                    else:
                        tops, sums = _fold(tops, sums, z, LANES, EACH)
                top = tl.max(tops, 0)
                # A row of -inf only: NaN, as in PyTorch.
                total = tl.sum(sums * exp(tops - top), 0)
                if SMOOTH:
                    spread += tl.sum(spreads, 0)
                if ENTROPY:  # of z - top
                    shifted = tl.where(sums > 0, (products + (tops - top) * sums) * exp(tops - top), 0.0)
                    mean = tl.sum(shifted, 0) / total
            if not STATS_GIVEN:
                z_target, _ = _z(l_row - head + target, valid, scale, softcap, SCALED, SOFTCAP)
                loss = w_target * (tl.log(total) + (top - z_target))
                if SMOOTH:
                    loss = (1.0 - smoothing) * loss + smoothing / v * ((top + tl.log(total)) * w_sum - spread)
                tl.store(loss_ptr + row, tl.where(valid, loss, float("nan")))
                tl.store(stats_ptr + row, top)
                tl.store(stats_ptr + m + row, total)
                if ENTROPY:
                    tl.store(entropy_ptr + row, tl.log(total) - mean)
            if GRADIENT:
                dloss = 1.0
                if HAS_DLOSS:
                    dloss = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
                dloss = tl.where(valid, dloss, float("nan"))  # as the loss: no step is made with such a row
                dentropy = 0.0
                if ENTROPY:
                    dentropy = tl.load(dentropy_ptr + row) / total
                if not STATS_GIVEN:
                    tl.debug_barrier()  # the target's logit is read before any lane overwrites it
                hit = (1.0 - smoothing) * w_target
                pull = hit
                if SMOOTH:
                    pull += smoothing / v * w_sum
                factor = dloss * scale
                pull = pull / total * factor
                hit *= factor
                smooth = smoothing / v * factor
                dentropy *= scale
                column = tl.where(valid, target, -1).to(tl.int32)
                last = (body - 1) // BLOCK * BLOCK
                for start in tl.range(0, body, BLOCK, num_stages=STAGES):
                    if STATS_GIVEN:
                        at = start + lanes
                    else:  # backwards: what was read last is still in the L2
                        at = last - start + lanes
                    z, slope = _z(l_row + at, at < body, scale, softcap, SCALED, SOFTCAP)
                    dz = _dz(
                        exp(z - top), z, slope, top, pull, hit, column, smooth, v, head + at,
                        (at < body) & (head + at < v), weight_ptr, dentropy, mean, HAS_WEIGHT, SMOOTH, SOFTCAP, ENTROPY,
                        PADDED,
                    )  # fmt: skip
                    tl.store(dl_row + at, dz.to(dl_ptr.dtype.element_ty), at < body)
                if ALIGN > 1:
                    end_cols, end_live = _ends(width, head, body, ALIGN, LANES)
                    end_z, end_slope = _z(l_row - head + end_cols, end_live, scale, softcap, SCALED, SOFTCAP)
                    end_dz = _dz(
                        exp(end_z - top), end_z, end_slope, top, pull, hit, column, smooth, v, end_cols, end_live,
                        weight_ptr, dentropy, mean, HAS_WEIGHT, SMOOTH, SOFTCAP, ENTROPY, PADDED,
                    )  # fmt: skip
                    tl.store(dl_row - head + end_cols, end_dz.to(dl_ptr.dtype.element_ty), end_live)


def launch_rows(
    logits, target, weight, ignore_index, label_smoothing, softcap, scale, *,
    classes=None, loss=None, stats, dloss=None, dlogits=None, entropy=None, dentropy=None,
):  # fmt: skip
    """Run the kernel over 2-D logits. ``loss`` given: write it and ``stats``; else ``stats`` are read. ``dlogits`` given:
    write the gradient (``dlogits is logits`` overwrites), for the upstream gradient ``dloss`` (m), or 1. Columns from
    ``classes`` on are padding: no logits, their gradient is zero. ``entropy`` given, with ``loss``: write that too, and add
    its part for the upstream gradient ``dentropy`` (m, fp32, contiguous) to the gradient."""
    m, width = logits.shape
    v = width if classes is None else classes
    if m == 0:
        return
    if v == 0:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no classes; a loss needs one at least")
    weight = None if weight is None else weight.contiguous()
    if ignore_index < NO_IGNORE:
        refuse_tracing()  # Inductor takes an integer for 32 bits wide unless it is too large for that
    given = loss is None
    out = logits if dlogits is None else dlogits
    align = 16 // logits.element_size()
    align = align if logits.stride(0) % align and logits.stride(0) == out.stride(0) else 1
    block, warps, each, stages = _plan(logits, align, given, dlogits is not None)
    programs = min(m, multiprocessors(logits) * each)
    launch(_rows_kernel, (programs,),
        logits, out, target, logits if weight is None else weight, stats if weight is None else weight.float().sum(),
        stats if given else loss, stats, stats if dloss is None else dloss,
        stats if entropy is None else entropy, stats if dentropy is None else dentropy, m, v, width, logits.stride(0),
        out.stride(0), 0 if dloss is None else dloss.stride(0), int(ignore_index), float(label_smoothing), float(softcap),
        float(scale), programs, HAS_WEIGHT=weight is not None, SMOOTH=label_smoothing > 0, SCALED=scale != 1,
        SOFTCAP=softcap > 0, STATS_GIVEN=given, GRADIENT=dlogits is not None, HAS_DLOSS=dloss is not None,
        ENTROPY=entropy is not None,
        BLOCK=block, EACH=min(_EACH, block), ALIGN=align, PADDED=width > v, STAGES=stages,
        UNIT=unit_of(width, logits.stride(0), out.stride(0)) if align == 1 else 1, num_warps=warps,
    )  # fmt: skip


def _plan(logits, align: int, given: bool, gradient: bool) -> tuple[int, int, int, int]:
    """Logits in one step of a program, warps, programs a multiprocessor, and stages; by what was fastest on an H200
    (``bench.tune``)."""
    m, width = logits.shape
    whole, rows = next_power_of_2(width), cdiv(m, multiprocessors(logits))
    if rows <= 2:
        plan = 16384, 32, 2, 1
    elif not gradient:
        plan = (2048, 4, 16, 1) if rows > 8 else (4096, 8, 8, 1)
    elif whole <= 8192:
        plan = (2048, 8, 8, 1) if given else (2048, 4, 16, 1)
    elif not given:
        plan = (8192, 8, 8, 1) if logits.element_size() == 2 else (16384, 32, 2, 1)
    else:
        plan = (4096, 4, 8, 3) if align > 1 else (16384, 16, 4, 1)
    block, warps, each, stages = plan
    if whole < block:
        block = max(whole, 2 * align * _EACH)
        warps = min(warps, max(4, block // 512))
    return block, warps, each, stages
