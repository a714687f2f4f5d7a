"""Cross-entropy of rows of logits, with softcap, scale, class weights, label smoothing and ignored targets.

    z_c  = scale · l_c                        softcap > 0:  z_c = softcap · tanh(scale · l_c / softcap)
    top  = max z,  total = Σ_c exp(z_c − top),  lse = top + log total,  p_c = exp(z_c − top) / total
    q_c  = (1 − ε) · w_t · [c = t] + (ε / V) · w_c        t the target, ε the smoothing; w = 1 without class weights
    loss = Σ_c q_c · (lse − z_c)
    dz_c = dloss · (p_c · Σ q − q_c)
    dl_c = dz_c · scale · (1 − (z_c / softcap)²)          the last factor with a softcap only

and the entropy, where it is asked for:

    H    = −Σ_c p_c log p_c = log total − mean,  mean = Σ_c p_c (z_c − top)
    dz_c = dloss · (p_c · Σ q − q_c) − dH · p_c · (z_c − top − mean)

and the z-loss, with a factor f for each row:

    loss = Σ_c q_c · (lse − z_c) + f · lse²
    dz_c = dloss · (p_c · (Σ q + 2 · f · lse) − q_c)

Shapes     logits: (m, v), v > 0, unit stride along v; target: (m); weight: (v), any stride; loss: (m); stats: (2, m),
           top and total.
Dtypes     logits bf16 | fp16 | fp32, gradient alike; arithmetic, loss and stats in fp32. target int64. p is computed
           from top and total, not from lse: a rounded lse would scale a whole row of p by the same error.
-inf       0 · log 0 = 0: a logit of -inf adds nothing to the entropy. Eager's entropy of such a row is NaN.
Ignored    A row whose target is ignore_index has loss 0 and gradient 0, but for its z-loss where f is not 0. A target
           outside 0..v-1 gives a loss and a gradient of NaN.
Saved      logits, target, weight, stats.
Traffic    forward m·v read, backward m·v read and m·v written: 94-97 % of the copy rate. One launch for loss and
           gradient (linear_cross_entropy) reads a row twice, the second time from its end: 32000 logits of 16 bits are
           then still in the L2 (12 % faster than two kernels), 128256 are not.
Source     Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax); label smoothing as torch.nn.functional; z-loss:
           Chowdhery et al. 2022, arXiv:2204.02311, section 5.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fx_fusion.kernels.lib.device import multiprocessors
from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.fast_math import exp
from fx_fusion.kernels.logits.logit_math import add_exp, add_exp_and_products, dz_of, end_columns, load_z, weighted_z
from fx_fusion.kernels.logits.logit_plan import logit_rows_plan
from fx_fusion.ops.launch import launch, refuse_tracing

NO_IGNORE = -(2**31)  # no target has this index; the least that fits an argument (see launch_rows)


@triton.jit
def _cross_entropy_rows_kernel(
    l_ptr, dl_ptr, target_ptr, weight_ptr, weight_sum_ptr, loss_ptr, stats_ptr, dloss_ptr, entropy_ptr, dentropy_ptr,
    z_factor_ptr, m, v, first, all_classes, width, l_stride, dl_stride, dloss_stride, ignore_index, smoothing,
    softcap, scale, programs,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    READ_STATS: tl.constexpr, GRADIENT: tl.constexpr, HAS_DLOSS: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, ELSEWHERE: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """Compute rows pid, pid + programs, ...: the loss unless READ_STATS, and with GRADIENT dl, which may overwrite l.
    Each lane keeps its own maximum and sum; they are combined once a row. ELSEWHERE: the columns are classes ``first``,
    ``first`` + 1, ... of ``all_classes``; for the loss, what is known of these columns alone is stored: z_t and, with
    SMOOTH, Σ_c w_c z_c a row of numbers behind it.

    A row of odd length may start at any column: with ALIGN > 1 wide loads and stores cover its ``body``, which begins at
    the first multiple of ALIGN, column ``head``; the ``end_columns`` are loaded and stored separately."""
    tl.static_assert(ALIGN == 1 or not PADDED, "padded rows are aligned")
    width, l_stride, dl_stride = multiple(width, UNIT), multiple(l_stride, UNIT), multiple(dl_stride, UNIT)
    smoothing = tl.cast(smoothing, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    scale = tl.cast(scale, tl.float32)
    lanes = tl.arange(0, BLOCK)
    LANES: tl.constexpr = BLOCK // EACH
    for row in range(tl.program_id(0).to(tl.int64), m, programs):
        named = tl.load(target_ptr + row)
        head = 0
        body = width
        if ALIGN > 1:
            head = tl.minimum((ALIGN - (row * l_stride % ALIGN).to(tl.int32)) % ALIGN, width)
            body = tl.multiple_of((width - head) // ALIGN * ALIGN, ALIGN)
        l_row = l_ptr + tl.multiple_of(row * l_stride + head, ALIGN)  # column ``head``
        dl_row = dl_ptr + tl.multiple_of(row * dl_stride + head, ALIGN)
        counts = named != ignore_index
        z_factor = 0.0
        if Z_LOSS:
            z_factor = tl.load(z_factor_ptr + row)
        if not counts and z_factor == 0.0:
            if not READ_STATS:
                tl.store(loss_ptr + row, 0.0)
                if ELSEWHERE and SMOOTH:
                    tl.store(loss_ptr + m + row, 0.0)
                tl.store(stats_ptr + row, 0.0)
                tl.store(stats_ptr + m + row, 1.0)
            if GRADIENT:
                zeros = tl.zeros((BLOCK,), dl_ptr.dtype.element_ty)
                for start in range(0, body, BLOCK):
                    tl.store(dl_row + start + lanes, zeros, start + lanes < body)
                if ALIGN > 1:
                    end_cols, end_live = end_columns(width, head, body, ALIGN, LANES)
                    tl.store(dl_row - head + end_cols, tl.zeros((LANES,), dl_ptr.dtype.element_ty), end_live)
        else:
            target = named
            known = (named >= 0) & (named < all_classes)
            if ELSEWHERE:
                target = named - first
            valid = (target >= 0) & (target < v)
            w_target = 1.0
            if HAS_WEIGHT:  # those of the other ranks' classes lie before and behind
                w_target = tl.load(weight_ptr + target, known, 0.0).to(tl.float32)
            w_sum = all_classes * 1.0
            if HAS_WEIGHT and SMOOTH:
                w_sum = tl.load(weight_sum_ptr)
            wz = 0.0
            mean = 0.0
            if READ_STATS:
                top = tl.load(stats_ptr + row)
                total = tl.load(stats_ptr + m + row)
                if ENTROPY:
                    mean = tl.log(total) - tl.load(entropy_ptr + row)
            else:
                tops = tl.full((LANES,), -float("inf"), tl.float32)
                sums = tl.zeros((LANES,), tl.float32)
                wz_sums = tl.zeros((BLOCK,), tl.float32)
                products = tl.zeros((LANES,), tl.float32)
                if ALIGN > 1:  # the first value of each lane
                    end_cols, end_live = end_columns(width, head, body, ALIGN, LANES)
                    end_z, end_slope = load_z(l_row - head + end_cols, end_live, scale, softcap, SCALED, SOFTCAP)
                    if SMOOTH:
                        wz += tl.sum(weighted_z(weight_ptr, end_cols, end_live, end_z, HAS_WEIGHT), 0)
                    tops = end_z
                    sums = tl.where(tops == -float("inf"), 0.0, 1.0)
                for start in tl.range(0, body, BLOCK, num_stages=STAGES):
                    at = start + lanes
                    cols = head + at
                    z, _ = load_z(l_row + at, at < body, scale, softcap, SCALED, SOFTCAP)
                    if PADDED:
                        z = tl.where(cols < v, z, -float("inf"))
                    if SMOOTH:
                        wz_sums += weighted_z(weight_ptr, cols, (at < body) & (cols < v), z, HAS_WEIGHT)
                    if ENTROPY:
                        tops, sums, products = add_exp_and_products(tops, sums, products, z, LANES, EACH)
                    else:
                        tops, sums = add_exp(tops, sums, z, LANES, EACH)
                top = tl.max(tops, 0)
                of_lanes = sums * exp(tops - top)
                if ELSEWHERE:  # 0 of a row of -inf only, which other ranks may have classes for
                    of_lanes = tl.where(sums == 0.0, 0.0, of_lanes)
                total = tl.sum(of_lanes, 0)  # else NaN there, as in PyTorch
                if SMOOTH:
                    wz += tl.sum(wz_sums, 0)
                if ENTROPY:  # each lane's Σ exp(z - top) · (z - top)
                    shifted = tl.where(sums > 0, (products + (tops - top) * sums) * exp(tops - top), 0.0)
                    mean = tl.sum(shifted, 0) / total
            if not READ_STATS:
                tl.store(stats_ptr + row, top)
                tl.store(stats_ptr + m + row, total)
                if ENTROPY:
                    tl.store(entropy_ptr + row, tl.log(total) - mean)
            if ELSEWHERE and not READ_STATS:
                z_target, _ = load_z(l_row - head + target, valid, scale, softcap, SCALED, SOFTCAP)
                tl.store(loss_ptr + row, tl.where(valid, z_target, 0.0))
                if SMOOTH:
                    tl.store(loss_ptr + m + row, wz)
            elif not READ_STATS:
                z_target, _ = load_z(l_row - head + target, valid, scale, softcap, SCALED, SOFTCAP)
                loss = w_target * (tl.log(total) + (top - z_target))
                if SMOOTH:
                    over_classes = (top + tl.log(total)) * w_sum - wz
                    loss = (1.0 - smoothing) * loss + smoothing / all_classes * over_classes
                loss = tl.where(valid, loss, float("nan"))
                if Z_LOSS:
                    loss = tl.where(counts, loss, 0.0)
                    lse = top + tl.log(total)
                    loss += z_factor * lse * lse
                tl.store(loss_ptr + row, loss)
            if GRADIENT:
                dloss = 1.0
                if HAS_DLOSS:
                    dloss = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
                dloss = tl.where(known | (named == ignore_index), dloss, float("nan"))  # so that no optimizer steps with it
                dentropy = 0.0
                if ENTROPY:
                    dentropy = tl.load(dentropy_ptr + row) / total
                if not READ_STATS:
                    tl.debug_barrier()  # the target's logit is read before any lane overwrites it
                q_target = (1.0 - smoothing) * w_target
                q_sum = q_target
                if SMOOTH:
                    q_sum += smoothing / all_classes * w_sum
                factor = dloss * scale
                smooth = smoothing / all_classes * factor
                if Z_LOSS:
                    q_target = tl.where(counts, q_target, 0.0)
                    smooth = tl.where(counts, smooth, 0.0)
                    q_sum = tl.where(counts, q_sum, 0.0) + 2.0 * z_factor * (top + tl.log(total))
                q_sum = q_sum / total * factor
                q_target *= factor
                dentropy *= scale
                column = tl.where(valid, target, -1).to(tl.int32)
                last = (body - 1) // BLOCK * BLOCK
                for start in tl.range(0, body, BLOCK, num_stages=STAGES):
                    if READ_STATS:
                        at = start + lanes
                    else:  # from the end: the columns read last are still in the L2
                        at = last - start + lanes
                    z, slope = load_z(l_row + at, at < body, scale, softcap, SCALED, SOFTCAP)
                    dz = dz_of(
                        exp(z - top), z, slope, top, q_sum, q_target, column, smooth, v, head + at,
                        (at < body) & (head + at < v), weight_ptr, dentropy, mean, HAS_WEIGHT, SMOOTH, SOFTCAP, ENTROPY,
                        PADDED,
                    )  # fmt: skip
                    tl.store(dl_row + at, dz.to(dl_ptr.dtype.element_ty), at < body)
                if ALIGN > 1:
                    end_cols, end_live = end_columns(width, head, body, ALIGN, LANES)
                    end_z, end_slope = load_z(l_row - head + end_cols, end_live, scale, softcap, SCALED, SOFTCAP)
                    end_dz = dz_of(
                        exp(end_z - top), end_z, end_slope, top, q_sum, q_target, column, smooth, v, end_cols, end_live,
                        weight_ptr, dentropy, mean, HAS_WEIGHT, SMOOTH, SOFTCAP, ENTROPY, PADDED,
                    )  # fmt: skip
                    tl.store(dl_row - head + end_cols, end_dz.to(dl_ptr.dtype.element_ty), end_live)


@dataclass(frozen=True)
class Elsewhere:
    """The values that the rows of one rank have to know of all ``classes``, of which it has those from ``first`` on:
    ``w_sum``, the sum of all class weights."""

    classes: int
    first: int
    w_sum: Tensor | None = None


def launch_rows(
    logits, target, weight, ignore_index, label_smoothing, softcap, scale, *,
    classes=None, loss=None, stats, dloss=None, dlogits=None, entropy=None, dentropy=None, elsewhere=None, z_factor=None,
):  # fmt: skip
    """Launch the kernel over 2-D ``logits``.

    loss       (m): written, with ``stats``. None: ``stats`` are read.
    dlogits    written: dl for the upstream gradient ``dloss`` (m), or for 1. ``dlogits is logits`` overwrites them.
    classes    v; columns behind it are padding, with a gradient of zero.
    entropy    (m): H, written with ``loss``, else read; ``dlogits`` then includes the part of ``dentropy`` (m, fp32,
               contiguous).
    elsewhere  other ranks have more classes: ``loss`` (m, or 2 m with smoothing) gets z_t, 0 where the target is theirs,
               and Σ_c w_c z_c; ``weight`` is the slice of these classes of the weights of all, of unit stride; gradients
               are those of all classes.
    z_factor   (m), fp32, contiguous: f of the z-loss; an ignored row has it too unless its f is 0."""
    m, width = logits.shape
    v = width if classes is None else classes
    if m == 0:
        return
    if v == 0:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no classes; a loss needs one at least")
    weight = None if weight is None else weight.contiguous()  # a slice of unit stride as it is
    if ignore_index < NO_IGNORE:
        refuse_tracing()  # Inductor takes an integer for 32 bits wide unless it is too large for that
    reads_stats, gradient = loss is None, dlogits is not None
    out, out_stride = (dlogits, dlogits.stride(0)) if gradient else (stats, logits.stride(0))
    align = 16 // logits.element_size()
    align = align if logits.stride(0) % align and logits.stride(0) == out_stride else 1
    sms = multiprocessors(logits)
    plan = logit_rows_plan(
        m, width, logits.element_size(), sms, align=align, reads_stats=reads_stats, gradient=gradient
    )  # fmt: skip
    programs = min(m, sms * plan.programs_per_sm)
    w_sum = out  # it stands for all that is not there
    if elsewhere is not None and elsewhere.w_sum is not None:
        w_sum = elsewhere.w_sum
    elif weight is not None:
        w_sum = weight.float().sum()
    launch(_cross_entropy_rows_kernel, (programs,),
        logits, out, target, out if weight is None else weight, w_sum, out if reads_stats else loss, stats,
        *(out if t is None else t for t in (dloss, entropy, dentropy, z_factor)),
        m, v, *((0, v) if elsewhere is None else (elsewhere.first, elsewhere.classes)), width, logits.stride(0), out_stride,
        0 if dloss is None else dloss.stride(0), int(ignore_index), float(label_smoothing), float(softcap), float(scale),
        programs, HAS_WEIGHT=weight is not None, SMOOTH=label_smoothing > 0, SCALED=scale != 1, SOFTCAP=softcap > 0,
        READ_STATS=reads_stats, GRADIENT=gradient, HAS_DLOSS=dloss is not None, ENTROPY=entropy is not None, ALIGN=align,
        PADDED=width > v, UNIT=unit_of(width, logits.stride(0), out_stride) if align == 1 else 1,
        ELSEWHERE=elsewhere is not None, Z_LOSS=z_factor is not None, **plan.meta(),
    )  # fmt: skip
