"""Cross-entropy of rows of logits whose classes lie on several ranks: every rank has all rows and a part of the columns.

A rank sums over its own columns, and every rank gets what the others found, in one collective a chunk of logits:

    top_r, total_r, mean_r    of ``logit_rows``, over the columns of rank r
    z_r                       z_t if column t, the target, is the rank's, else 0
    y_r = Σ_c w_c z_c         with label smoothing only
    f_r = total_r · exp(top_r − top) / total

    top   = max_r top_r,  total = Σ_r total_r · exp(top_r − top),  lse = log total + top
    loss  = (1 − ε) · w_t · (lse − Σ_r z_r) + (ε / V) · (lse · Σ_c w_c − Σ_r y_r) + f · lse², f as in ``logit_rows``
    H     = log total − mean,  mean = Σ_r f_r · (mean_r + top_r − top)
    dl_c  as in ``logit_rows``, for the rank's own columns

The class weights w of all V classes are on every rank. The gradient of the rows' input is a sum over the ranks that the
caller forms. Traffic: 3 to 5 numbers a row and rank, in fp32.

Source     Shoeybi et al. 2019, arXiv:1909.08053, section 3 (parallel cross-entropy).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.kernels.logits.logit_rows import Elsewhere, launch_rows
from fx_fusion.ops.on_cpu import interpreting
from fx_fusion.torch_internals.collectives import gathered

_IGNORED = -2  # as a target; -1 is another rank's


@dataclass(frozen=True)
class ClassPart:
    """Columns ``first``, ``first + 1``, ... of ``classes``, of one of the ``ranks`` of a process group, by the group's name.
    Targets count from the first class of all; one outside of 0..classes-1 gives NaN. Class weights are those of all."""

    group: str
    first: int
    classes: int
    ranks: int

    @property
    def largest(self) -> int:
        """The most columns that a rank has; chunks are chosen by it, since all ranks have to take the same."""
        return cdiv(self.classes, self.ranks)

    def rows(self, logits, v, target, weight, options, loss, dloss, dlogits, entropy=None, dentropy=None, z_factor=None):
        """Fill ``loss`` of one chunk, whose ``logits`` (m, at least v) are this rank's, and ``entropy`` where it is there;
        and ``dlogits``, which may be the chunk itself or None."""
        given = logits, v, target, weight, options
        row_loss, stats, of_row = self.forward(*given, with_entropy=entropy is not None, z_factor=z_factor)
        loss.copy_(row_loss)
        if entropy is not None:
            entropy.copy_(of_row)
        if dlogits is not None:
            self.backward(*given, stats, dloss, dlogits, entropy, dentropy, z_factor)

    def forward(self, logits, v, target, weight, options, with_entropy=False, z_factor=None):
        """Returns the loss (m), top and total over all ranks (2, m), and the entropy (m) or None."""
        ignore_index, smoothing, softcap, scale = options
        column, at, own, counts, known = self._columns(target, v, ignore_index)
        stats = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
        means, weighted = torch.zeros_like(stats[0]), torch.zeros_like(stats[0])
        w = None if weight is None else weight.float()[self.first : self.first + v]
        if logits.is_cuda or interpreting():
            launch_rows(
                logits, at, w, _IGNORED, smoothing, softcap, scale, classes=v, loss=weighted, stats=stats,
                entropy=means if with_entropy else None, elsewhere=Elsewhere(self.classes), z_factor=z_factor,
            )  # fmt: skip
            means = stats[1].log() - means if with_entropy else means
        else:
            z = _z(logits[:, :v], softcap, scale)
            torch.amax(z, 1, out=stats[0])
            shifted = z - stats[0][:, None]
            powers = shifted.exp()
            stats[1] = powers.sum(1)
            if with_entropy:
                means = torch.where(powers > 0, powers * shifted, 0.0).sum(1) / stats[1]
            if smoothing:
                weighted = z.sum(1) if w is None else z @ w
        z_target = torch.where(own, _z(logits.gather(1, column[:, None])[:, 0], softcap, scale), 0.0)
        found = torch.stack([*stats, z_target, *([weighted] if smoothing else []), *([means] if with_entropy else [])])
        tops, totals, z_targets, *rest = gathered(found, self.ranks, self.group).view(self.ranks, *found.shape).unbind(1)
        top = tops.amax(0)
        # where, not a product: a rank whose classes are all masked has a total of NaN.
        totals = torch.where(tops == -float("inf"), 0.0, totals * (tops - top).exp())
        total = totals.sum(0)
        lse = total.log() + top
        loss = self._weight_of(target, weight, known) * (total.log() + (top - z_targets.sum(0)))
        if smoothing:
            over_classes = lse * (self.classes if weight is None else weight.float().sum()) - rest[0].sum(0)
            loss = (1 - smoothing) * loss + smoothing / self.classes * over_classes
        loss = torch.where(counts, torch.where(known, loss, float("nan")), 0.0)
        if z_factor is not None:
            loss += torch.where(counts | (z_factor != 0), z_factor * lse.square(), 0.0)
        entropy = None
        if with_entropy:
            entropy = total.log() - torch.where(totals > 0, totals * (rest[-1] + tops - top), 0.0).sum(0) / total
        return loss, torch.stack([top, total]), entropy

    def backward(
        self, logits, v, target, weight, options, stats, dloss, dlogits, entropy=None, dentropy=None, z_factor=None
    ):  # fmt: skip
        """Fill ``dlogits``, which may be ``logits``; ``stats`` and ``entropy`` are those of all ranks."""
        ignore_index, smoothing, softcap, scale = options
        column, at, own, counts, known = self._columns(target, v, ignore_index)
        has_loss = counts if z_factor is None else counts | (z_factor != 0)
        upstream = torch.where(known | ~counts, 1.0 if dloss is None else dloss.float(), float("nan"))
        w = None if weight is None else weight.float()
        own_w = None if w is None else w[self.first : self.first + v]
        w_target = self._weight_of(target, weight, known)
        if logits.is_cuda or interpreting():
            launch_rows(
                logits, at, own_w, _IGNORED, smoothing, softcap, scale, classes=v, stats=stats, dloss=upstream,
                dlogits=dlogits, entropy=entropy, dentropy=dentropy, z_factor=z_factor,
                elsewhere=Elsewhere(self.classes, None if w is None else w_target, None if w is None else w.sum()),
            )  # fmt: skip
            return
        z, share = _z(logits[:, :v], softcap, scale), smoothing / self.classes
        powers = (z - stats[0][:, None]).exp() / stats[1][:, None]
        q_target = torch.where(counts, (1 - smoothing) * w_target, 0.0)
        q_sum = q_target + counts * share * (self.classes if w is None else w.sum()) if smoothing else q_target
        if z_factor is not None:
            q_sum = q_sum + 2 * z_factor * (stats[0] + stats[1].log())
        dz = powers * q_sum[:, None]
        dz.scatter_add_(1, column[:, None], -torch.where(own, q_target, 0.0)[:, None])
        if smoothing:
            smooth = share * (1.0 if own_w is None else own_w)
            dz -= smooth if z_factor is None else smooth * counts[:, None]  # rows that are ignored may have a z-loss
        dz *= upstream[:, None]
        if entropy is not None:
            shifted = z - (stats[0] + stats[1].log() - entropy)[:, None]
            dz -= torch.where(powers > 0, powers * shifted, 0.0) * dentropy[:, None]
        if softcap:
            dz *= 1 - (z / softcap) ** 2
        # where, not a product: an ignored row has no gradient even if its probabilities are NaN.
        dlogits[:, :v].copy_(torch.where(has_loss[:, None], dz.mul_(scale), 0))
        dlogits[:, v:].zero_()

    def _columns(self, target, v, ignore_index):
        """Returns, for each row, its target's column here or 0, the same for the kernel, and whether the target is this
        rank's, whether it counts, and whether it is a class."""
        counts, known = target != ignore_index, (target >= 0) & (target < self.classes)
        own = (target >= self.first) & (target < self.first + v)
        column = torch.where(own, target - self.first, 0)
        return column, torch.where(counts, torch.where(own, column, -1), _IGNORED), own, counts, known

    def _weight_of(self, target, weight, known):
        """Returns the class weight (m) of each row's target: 1 without weights, 0 without a target."""
        if weight is None:
            return torch.ones(target.shape, dtype=torch.float32, device=target.device)
        return torch.where(known, weight.float()[torch.where(known, target, 0)], 0.0)


def class_part(group: str, first: int, classes: int, ranks: int) -> ClassPart | None:
    """None without a group: all classes are here."""
    return ClassPart(group, first, classes, ranks) if group else None


def _z(logits, softcap, scale):
    z = logits.float() * scale
    return softcap * torch.tanh(z / softcap) if softcap else z
