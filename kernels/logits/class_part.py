"""Cross-entropy of rows of logits whose classes lie on several ranks: every rank has all rows and a part of the columns.

    top   = max over the ranks of top_r                    top_r, total_r: of a rank's own columns, see ``logit_rows``
    total = Σ over the ranks of total_r · exp(top_r − top)
    loss  = log total + top − z_t                          z_t from the rank that has the target's column
    dz_c  = dloss · (exp(z_c − top) / total − [c = t])     for the rank's own columns

Two reductions a chunk of logits: the maximum (m), and totals and targets' logits together (2, m), in fp32. The gradient of
the rows' input is a sum over the ranks that the caller forms. Without class weights and label smoothing.

Source     Shoeybi et al. 2019, arXiv:1909.08053, section 3 (parallel cross-entropy).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.kernels.logits.logit_rows import launch_rows
from fx_fusion.ops.on_cpu import interpreting
from fx_fusion.torch_internals.collectives import reduced


@dataclass(frozen=True)
class ClassPart:
    """Columns ``first``, ``first + 1``, ... of ``classes``, of a rank of a process group, by the group's name. ``largest``:
    the most columns that a rank has; chunks are chosen by it, since all ranks have to take the same."""

    group: str
    first: int
    classes: int
    largest: int

    def rows(self, logits, v, target, options, loss, dloss, dlogits):
        """Fill ``loss`` of one chunk, whose ``logits`` (m, at least v) are this rank's; and ``dlogits``, which may be the
        chunk itself or None. ``target`` counts from the first class of all; one outside of 0..classes-1 gives NaN."""
        ignore_index, _, softcap, scale = options
        counts, known = target != ignore_index, (target >= 0) & (target < self.classes)
        own = (target >= self.first) & (target < self.first + v)
        column = torch.where(own, target - self.first, 0)
        elsewhere = torch.where(counts, torch.where(own, column, -1), -2)  # -2: ignored
        z_target = _z(logits.gather(1, column[:, None])[:, 0], softcap, scale)
        stats = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
        on_gpu = logits.is_cuda or interpreting()
        kernel_options = (-2, 0.0, softcap, scale)
        if on_gpu:
            launch_rows(logits, elsewhere, None, *kernel_options, classes=v, loss=torch.empty_like(loss), stats=stats)
        else:
            z = _z(logits[:, :v], softcap, scale)
            torch.amax(z, 1, out=stats[0])
            stats[1] = (z - stats[0][:, None]).exp_().sum(1)
        top = reduced(stats[0], "max", self.group)
        own_total = stats[1] * (stats[0] - top).exp_()
        own_total = torch.where(stats[0] == -float("inf"), 0.0, own_total)  # all of this rank's classes are masked
        of_all = torch.stack([own_total, torch.where(own, z_target, 0.0)])
        total, z_target = reduced(of_all, "sum", self.group)
        loss.copy_(torch.where(counts, torch.where(known, total.log() + (top - z_target), float("nan")), 0.0))
        if dlogits is None:
            return
        upstream = torch.where(known, 1.0 if dloss is None else dloss.float(), float("nan"))
        stats = torch.stack([top, total])
        if on_gpu:
            launch_rows(
                logits, elsewhere, None, *kernel_options, classes=v, stats=stats, dloss=upstream, dlogits=dlogits,
                elsewhere=True,
            )  # fmt: skip
            return
        dz = (z - top[:, None]).exp_().div_(total[:, None])
        dz.scatter_add_(1, column[:, None], -own[:, None].float())
        if softcap:
            dz *= 1 - (z / softcap) ** 2
        dz.mul_((upstream * scale)[:, None])
        # where, not a product: an ignored row has no gradient even if its probabilities are NaN.
        dlogits[:, :v].copy_(torch.where(counts[:, None], dz, 0))
        dlogits[:, v:].zero_()


def class_part(group: str, first: int, classes: int, ranks: int) -> ClassPart | None:
    """None without a group: all classes are here."""
    return ClassPart(group, first, classes, cdiv(classes, ranks)) if group else None


def _z(logits, softcap, scale):
    z = logits.float() * scale
    return softcap * torch.tanh(z / softcap) if softcap else z
