"""Rows of logits against a distribution for each row: cross-entropy or Kullback-Leibler divergence, and their gradient.

    z_c  = scale · l_c,  lse = log Σ_c exp(z_c),  p_c = exp(z_c − lse)
    q_c  = t_c                     of "probabilities" t, of any sum and sign
         = exp(t_c)                of "log_probabilities" t
         = exp(s·t_c) / Σ exp(s·t_c)   of "logits" t, with a scale s of their own
    soft = Σ_c q_c · (lse − z_c)  [+ Σ_c q_c log q_c, with ``divergence``; 0 log 0 = 0]

and, where there are classes y too, the usual cross-entropy of the same logits, with a scale of its own:

    x_c  = hard_scale · l_c,  hard = log Σ_c exp(x_c) − x_y

The gradient is that of w_soft · soft + w_hard · hard, w a weight of the row; a loss whose w is 0 is 0, too:

    dl_c = w_soft · scale · (p_c · Σ q − q_c) + w_hard · hard_scale · (exp(x_c − log Σ exp(x)) − [c = y])

Shapes     logits: (m, at least v), unit stride along the classes; values t: (.., v) of up to two dims before the classes, of
           any strides but the last; rows: (k) int64, those of t that the k rows of logits belong to; w, y: of all rows of t;
           losses: (k, 2), soft and hard.
Dtypes     logits, t: bf16 | fp16 | fp32, gradient as logits; w and losses in fp32; y int64; arithmetic in fp32. A class y
           outside of 0..v-1 gives NaN where w_hard is not 0.
Traffic    logits and t read twice, the second time from the end of a row; dl written.
Source     Hinton et al. 2015, arXiv:1503.02531 (distillation); Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fx_fusion.kernels.lib.device import multiprocessors
from fx_fusion.kernels.lib.fast_math import exp
from fx_fusion.kernels.lib.integers import next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.logits.logit_math import add_exp
from fx_fusion.ops.launch import launch
from fx_fusion.ops.on_cpu import interpreting

KINDS = ("probabilities", "log_probabilities", "logits")
_EACH = 8  # logits that a lane adds in one step


@planner
def soft_rows_plan(v: int) -> Plan:
    """Choose BLOCK classes a step by ``v``. Returns BLOCK, EACH of a lane, ``num_warps``, ``programs_per_sm``."""
    block = min(4096, max(64, next_power_of_2(v)))
    return Plan(BLOCK=block, EACH=_EACH, num_warps=max(4, min(8, block // 512)), programs_per_sm=8)


@triton.jit
def _add_weighted(tops, sums, products, logs, t, z, live, LANES: tl.constexpr, EACH: tl.constexpr):
    """Update each lane's maximum ``tops`` and sum ``sums`` of e = exp(t − tops), and Σ e·z and Σ e·t; rescale once."""
    new_tops = tl.maximum(tops, tl.max(tl.reshape(t, (LANES, EACH)), 1))
    base = tl.where(new_tops == -float("inf"), 0.0, new_tops)
    factor = exp(tops - base)
    e = exp(tl.reshape(t, (LANES, EACH)) - base[:, None])
    products = products * factor + tl.sum(e * tl.reshape(tl.where(live, z, 0.0), (LANES, EACH)), 1)
    logs = logs * factor + tl.sum(tl.where(e > 0, e * tl.reshape(t, (LANES, EACH)), 0.0), 1)
    return new_tops, sums * factor + tl.sum(e, 1), products, logs


@triton.jit
def _soft_rows_kernel(
    l_ptr, dl_ptr, t_ptr, rows_ptr, y_ptr, soft_ptr, hard_ptr, loss_ptr, m, v, width, l_stride, dl_stride,
    inner, outer_stride, inner_stride, scale, hard_scale, t_scale, programs,
    KIND: tl.constexpr, DIVERGENCE: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Compute rows pid, pid + programs, ... KIND: 0, 1, 2 as in ``KINDS``. Row r of t lies at
    r // inner · outer_stride + r % inner · inner_stride. dl may overwrite l."""
    scale = tl.cast(scale, tl.float32)
    hard_scale = tl.cast(hard_scale, tl.float32)
    t_scale = tl.cast(t_scale, tl.float32)
    LANES: tl.constexpr = BLOCK // EACH
    lanes = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0).to(tl.int64), m, programs):
        at = tl.load(rows_ptr + row)
        t_row = t_ptr + at // inner * outer_stride + at % inner * inner_stride
        l_row = l_ptr + row * l_stride
        w_soft = tl.load(soft_ptr + at)
        tops = tl.full((LANES,), -float("inf"), tl.float32)
        sums = tl.zeros((LANES,), tl.float32)
        t_tops = tl.full((LANES,), -float("inf"), tl.float32)
        t_sums = tl.zeros((LANES,), tl.float32)
        products = tl.zeros((LANES,), tl.float32)
        logs = tl.zeros((LANES,), tl.float32)
        hard_tops = tl.full((LANES,), -float("inf"), tl.float32)
        hard_sums = tl.zeros((LANES,), tl.float32)
        for start in range(0, v, BLOCK):
            cols = start + lanes
            live = cols < v
            logit = tl.load(l_row + cols, live, -float("inf")).to(tl.float32)
            z = tl.where(live, logit * scale, -float("inf"))
            tops, sums = add_exp(tops, sums, z, LANES, EACH)
            if HARD:
                x = tl.where(live, logit * hard_scale, -float("inf"))
                hard_tops, hard_sums = add_exp(hard_tops, hard_sums, x, LANES, EACH)
            if KIND == 2:
                t = tl.load(t_row + cols, live, -float("inf")).to(tl.float32)
                t = tl.where(live, t * t_scale, -float("inf"))
                t_tops, t_sums, products, logs = _add_weighted(t_tops, t_sums, products, logs, t, z, live, LANES, EACH)
            else:
                t = tl.load(t_row + cols, live, 0.0).to(tl.float32)
                q = t
                if KIND == 1:
                    q = tl.where(live, exp(t), 0.0)
                t_sums += tl.sum(tl.reshape(q, (LANES, EACH)), 1)
                products += tl.sum(tl.reshape(tl.where(live, q * z, 0.0), (LANES, EACH)), 1)
                if DIVERGENCE:
                    log_q = t
                    if KIND == 0:
                        log_q = tl.log(tl.where(q == 0, 1.0, q))
                    logs += tl.sum(tl.reshape(tl.where(q != 0, q * log_q, 0.0), (LANES, EACH)), 1)
        top = tl.max(tops, 0)
        total = tl.sum(sums * exp(tops - top), 0)
        t_top = 0.0
        t_total = 1.0
        if KIND == 2:
            t_top = tl.max(t_tops, 0)
            of_lanes = exp(t_tops - t_top)
            t_total = tl.sum(t_sums * of_lanes, 0)
            product = tl.sum(products * of_lanes, 0) / t_total
            log = tl.sum(logs * of_lanes, 0) / t_total - (t_top + tl.log(t_total))
            q_sum = 1.0
        else:
            product = tl.sum(products, 0)
            log = tl.sum(logs, 0)
            q_sum = tl.sum(t_sums, 0)
        loss = (top + tl.log(total)) * q_sum - product
        if DIVERGENCE:
            loss += log
        tl.store(loss_ptr + 2 * row, tl.where(w_soft == 0.0, 0.0, loss))
        w_hard = 0.0
        hard_top = 0.0
        hard_total = 1.0
        y = tl.cast(-1, tl.int64)
        if HARD:
            w_hard = tl.load(hard_ptr + at)
            y = tl.load(y_ptr + at)
            known = (y >= 0) & (y < v)
            w_hard = tl.where(known | (w_hard == 0.0), w_hard, float("nan"))  # so that no optimizer steps with it
            hard_top = tl.max(hard_tops, 0)
            hard_total = tl.sum(hard_sums * exp(hard_tops - hard_top), 0)
            x_y = tl.load(l_row + y, known, 0.0).to(tl.float32) * hard_scale
            hard = tl.where(known, tl.log(hard_total) + (hard_top - x_y), float("nan"))
            tl.store(loss_ptr + 2 * row + 1, tl.where(w_hard == 0.0, 0.0, hard))
        if GRADIENT:
            tl.debug_barrier()  # the logit of y is read before any lane overwrites it
            p_factor = q_sum / total * w_soft * scale
            q_factor = w_soft * scale
            if KIND == 2:
                q_factor /= t_total
            hard_factor = w_hard * hard_scale
            last = (width - 1) // BLOCK * BLOCK
            for start in range(0, width, BLOCK):
                cols = last - start + lanes  # from the end: the columns read last are still in the L2
                live = cols < v
                logit = tl.load(l_row + cols, live, 0.0).to(tl.float32)
                if KIND == 2:
                    t = tl.load(t_row + cols, live, -float("inf")).to(tl.float32)
                    q = exp(tl.where(live, t * t_scale, -float("inf")) - t_top)
                else:
                    q = tl.load(t_row + cols, live, 0.0).to(tl.float32)
                    if KIND == 1:
                        q = exp(q)
                dz = exp(logit * scale - top) * p_factor - q * q_factor
                dz = tl.where(w_soft == 0.0, 0.0, dz)
                if HARD:
                    of_hard = exp(logit * hard_scale - hard_top) * (hard_factor / hard_total)
                    of_hard -= tl.where(cols == y, hard_factor, 0.0)
                    dz += tl.where(w_hard == 0.0, 0.0, of_hard)
                dz = tl.where(live, dz, 0.0)
                tl.store(dl_ptr + row * dl_stride + cols, dz.to(dl_ptr.dtype.element_ty), cols < width)


@dataclass(frozen=True)
class Soft:
    """Distributions ``values`` (.., v) of one of ``KINDS``, a weight w_soft of each row, and whether their own entropy is
    taken off (``divergence``); ``scale`` of the values, where they are logits. ``target``, ``hard_weights``,
    ``hard_scale``: classes y and w_hard of each row, or None."""

    values: Tensor
    weights: Tensor
    kind: str
    divergence: bool
    scale: float = 1.0
    target: Tensor | None = None
    hard_weights: Tensor | None = None
    hard_scale: float = 1.0

    def rows(self, logits, v, rows, weight, options, loss, dloss, dlogits, entropy=None, dentropy=None, z_factor=None):
        """Fill ``loss`` (k, 2) of one chunk of ``logits``, of the ``rows`` of the values, and ``dlogits``, which may be the
        chunk itself or None. The parameters are those of ``logit_chunks.loss_of_rows``; there are no class weights, no
        upstream gradients and no entropies; of the ``options`` the scale counts."""
        scale = options[3]
        if logits.is_cuda or interpreting():
            self._launch(logits, v, rows, scale, loss, dlogits)
        else:
            self._with_torch(logits, rows, scale, loss, dlogits)

    def _launch(self, logits, v, rows, scale, loss, dlogits):
        m, width = logits.shape
        if m == 0:
            return
        values = self.values if self.values.dim() <= 3 else self.values.reshape(-1, self.values.shape[-1])
        inner, outer_stride, inner_stride = 1, values.stride(0) if values.dim() > 1 else 0, 0
        if values.dim() == 3:
            inner, outer_stride, inner_stride = values.shape[1], values.stride(0), values.stride(1)
        plan = soft_rows_plan(v)
        programs = min(m, multiprocessors(logits) * plan.programs_per_sm)
        out = loss if dlogits is None else dlogits  # stands for what is not there
        hard = self.target is not None
        launch(
            _soft_rows_kernel, (programs,), logits, out, values, rows, rows if self.target is None else self.target,
            self.weights, loss if self.hard_weights is None else self.hard_weights, loss, m, v, width, logits.stride(0),
            0 if dlogits is None else dlogits.stride(0), inner, outer_stride, inner_stride, float(scale),
            float(self.hard_scale), float(self.scale), programs, KIND=KINDS.index(self.kind), DIVERGENCE=self.divergence,
            HARD=hard, GRADIENT=dlogits is not None, **plan.meta(),
        )  # fmt: skip

    def _with_torch(self, logits, rows, scale, loss, dlogits):
        values = self.values.reshape(-1, self.values.shape[-1])[rows].float()
        if self.kind == "logits":
            values = torch.log_softmax(values * self.scale, -1)
        q = values if self.kind == "probabilities" else values.exp()
        z = logits.float() * scale
        log_p = torch.log_softmax(z, -1)
        soft = -(q * log_p).sum(-1)
        if self.divergence:
            soft += (torch.xlogy(q, q) if self.kind == "probabilities" else torch.where(q == 0, 0.0, q * values)).sum(-1)
        weights = self.weights[rows]
        loss[:, 0] = torch.where(weights == 0, 0.0, soft)
        dl = None
        if dlogits is not None:
            dl = (log_p.exp_() * q.sum(-1, keepdim=True) - q) * (weights * scale)[:, None]
            dl = torch.where((weights == 0)[:, None], 0.0, dl)
        if self.target is not None and self.hard_weights is not None:
            log_p = torch.log_softmax(logits.float() * self.hard_scale, -1)
            weights, target = self.hard_weights[rows], self.target[rows]
            index = torch.where(weights == 0, 0, target)[:, None]  # an index error for a class out of range, as in PyTorch
            loss[:, 1] = torch.where(weights == 0, 0.0, -log_p.gather(1, index)[:, 0])
            if dl is not None:
                of_hard = log_p.exp_().scatter_add_(1, index, torch.full_like(weights, -1.0)[:, None])
                dl += torch.where((weights == 0)[:, None], 0.0, of_hard * (weights * self.hard_scale)[:, None])
        if dl is not None:
            dlogits.copy_(dl)
