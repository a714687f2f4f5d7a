"""Cross-entropy of rows of logits whose classes lie on several ranks: every rank has all rows and a part of the columns.

A rank sums over its own columns, and every rank gets what the others found. The rows of a large chunk are sent in two
halves: while the sums of one are on their way, the logits of the other are read.

    top_r, total_r, mean_r    of ``logit_rows``, over the columns of rank r; H_r = log total_r − mean_r is what is sent
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

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.kernels.logits.class_sums import launch_class_sums
from fx_fusion.kernels.logits.logit_rows import Elsewhere, launch_rows
from fx_fusion.ops.on_cpu import interpreting
from fx_fusion.torch_internals.collectives import arrived, gather

_WORTH_HALVES = 1 << 26  # logits of a rank: to read half of them takes an H200 16 µs and more, about what a collective takes


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
        weights = None if weight is None else weight.float().contiguous()
        sent = []
        for part in self._halves(logits):
            factors = None if z_factor is None else z_factor[part]
            found = self._found(logits[part], v, target[part], weights, options, entropy is not None, factors)
            sent.append((part, found, gather(found, self.ranks, self.group)))
        for part, found, gathering in sent:
            upstream, h, dh, z = (None if t is None else t[part] for t in (dloss, entropy, dentropy, z_factor))
            stats = self._combine(arrived(gathering), found.shape, target[part], weights, options, loss[part], h, z)
            if dlogits is not None:
                given = logits[part], v, target[part], weights, options, stats
                self._backward(*given, upstream, dlogits[part], h, dh, z)

    def forward(self, logits, v, target, weight, options, with_entropy=False, z_factor=None):
        """Returns the loss (m), top and total over all ranks (2, m), and the entropy (m) or None."""
        weights = None if weight is None else weight.float().contiguous()
        found = self._found(logits, v, target, weights, options, with_entropy, z_factor)
        gathering = gather(found, self.ranks, self.group)
        loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(loss) if with_entropy else None
        stats = self._combine(arrived(gathering), found.shape, target, weights, options, loss, entropy, z_factor)
        return loss, stats, entropy

    def backward(
        self, logits, v, target, weight, options, stats, dloss, dlogits, entropy=None, dentropy=None, z_factor=None
    ):  # fmt: skip
        """Fill ``dlogits``, which may be ``logits``; ``stats`` and ``entropy`` are those of all ranks."""
        weights = None if weight is None else weight.float().contiguous()
        self._backward(logits, v, target, weights, options, stats, dloss, dlogits, entropy, dentropy, z_factor)

    def _halves(self, logits) -> Iterator[slice]:
        """The rows of a chunk in one or two parts, the same on all ranks."""
        m = logits.shape[0]
        step = cdiv(m, 2) if m * self.largest >= _WORTH_HALVES else max(m, 1)
        yield from (slice(start, min(start + step, m)) for start in range(0, max(m, 1), step))

    def _found(self, logits, v, target, w, options, with_entropy: bool, z_factor) -> Tensor:
        """Returns what is known of this rank's columns (3 to 5, m): top_r, total_r, z_r, with smoothing y_r, and H_r. A row
        that is ignored needs none of it unless it has a z-loss."""
        ignore_index, smoothing, softcap, scale = options
        k = 3 + (smoothing > 0) + with_entropy
        found = torch.zeros(k, logits.shape[0], dtype=torch.float32, device=logits.device)
        if logits.is_cuda or interpreting():
            launch_rows(
                logits, target, self._own(w, v), ignore_index, smoothing, softcap, scale, classes=v, stats=found[:2],
                loss=found[2:], entropy=found[k - 1] if with_entropy else None, elsewhere=self._elsewhere(w),
                z_factor=z_factor,
            )  # fmt: skip
            return found
        z = _z(logits[:, :v], softcap, scale)
        torch.amax(z, 1, out=found[0])
        shifted = z - found[0][:, None]
        powers = shifted.exp()
        found[1] = powers.sum(1)
        column, own, *_ = self._columns(target, v, ignore_index)
        found[2] = torch.where(own, z.gather(1, column[:, None])[:, 0], 0.0)
        if smoothing:
            found[3] = z.sum(1) if w is None else z @ self._own(w, v)
        if with_entropy:
            found[k - 1] = found[1].log() - torch.where(powers > 0, powers * shifted, 0.0).sum(1) / found[1]
        return found

    def _combine(self, gathered, shape, target, w, options, loss, entropy, z_factor) -> Tensor:
        """Fill ``loss`` (and ``entropy``) from what all ranks found, each of ``shape``; returns top and total (2, m)."""
        ignore_index, smoothing, *_ = options
        found = gathered.view(self.ranks, *shape)
        stats = torch.empty(2, shape[1], dtype=torch.float32, device=loss.device)
        if loss.is_cuda or interpreting():
            launch_class_sums(
                found, target, w, None if w is None else w.sum(), self.classes, ignore_index, smoothing, loss=loss,
                stats=stats, entropy=entropy, z_factor=z_factor,
            )  # fmt: skip
            return stats
        _, _, counts, known = self._columns(target, 0, ignore_index)
        tops, totals, z_targets, *rest = found.unbind(1)
        torch.amax(tops, 0, out=stats[0])
        # where, not a product: a rank whose classes are all masked has a total of NaN.
        shares = torch.where(tops == -float("inf"), 0.0, totals * (tops - stats[0]).exp())
        torch.sum(shares, 0, out=stats[1])
        top, total = stats
        lse = total.log() + top
        row_loss = self._weight_of(target, w, known) * (total.log() + (top - z_targets.sum(0)))
        if smoothing:
            over_classes = lse * (self.classes if w is None else w.sum()) - rest[0].sum(0)
            row_loss = (1 - smoothing) * row_loss + smoothing / self.classes * over_classes
        row_loss = torch.where(counts, torch.where(known, row_loss, float("nan")), 0.0)
        if z_factor is not None:
            row_loss += torch.where(counts | (z_factor != 0), z_factor * lse.square(), 0.0)
        loss.copy_(row_loss)
        if entropy is not None:
            products = shares * (totals.log() - rest[-1] + tops - top)
            entropy.copy_(total.log() - torch.where(shares > 0, products, 0.0).sum(0) / total)
        return stats

    def _backward(self, logits, v, target, w, options, stats, dloss, dlogits, entropy, dentropy, z_factor) -> None:
        ignore_index, smoothing, softcap, scale = options
        if logits.is_cuda or interpreting():
            launch_rows(
                logits, target, self._own(w, v), ignore_index, smoothing, softcap, scale, classes=v, stats=stats,
                dloss=dloss, dlogits=dlogits, entropy=entropy, dentropy=dentropy, z_factor=z_factor,
                elsewhere=self._elsewhere(w),
            )  # fmt: skip
            return
        column, own, counts, known = self._columns(target, v, ignore_index)
        has_loss = counts if z_factor is None else counts | (z_factor != 0)
        upstream = torch.where(known | ~counts, 1.0 if dloss is None else dloss.float(), float("nan"))
        z, share = _z(logits[:, :v], softcap, scale), smoothing / self.classes
        powers = (z - stats[0][:, None]).exp() / stats[1][:, None]
        q_target = torch.where(counts, (1 - smoothing) * self._weight_of(target, w, known), 0.0)
        q_sum = q_target + counts * share * (self.classes if w is None else w.sum()) if smoothing else q_target
        if z_factor is not None:
            q_sum = q_sum + 2 * z_factor * (stats[0] + stats[1].log())
        dz = powers * q_sum[:, None]
        dz.scatter_add_(1, column[:, None], -torch.where(own, q_target, 0.0)[:, None])
        if smoothing:
            smooth = share * (1.0 if w is None else self._own(w, v))
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

    def _own(self, w, v):
        """The weights of this rank's classes, of all."""
        return None if w is None else w[self.first : self.first + v]

    def _elsewhere(self, w) -> Elsewhere:
        return Elsewhere(self.classes, self.first, None if w is None else w.sum())

    def _columns(self, target, v, ignore_index):
        """Returns each row's column of its target here or 0, and whether the target is this rank's, counts, is a class."""
        counts, known = target != ignore_index, (target >= 0) & (target < self.classes)
        own = (target >= self.first) & (target < self.first + v)
        return torch.where(own, target - self.first, 0), own, counts, known

    def _weight_of(self, target, w, known):
        """Returns the class weight (m) of each row's target: 1 without weights, 0 without a target."""
        if w is None:
            return torch.ones(target.shape, dtype=torch.float32, device=target.device)
        return torch.where(known, w[torch.where(known, target, 0)], 0.0)


def class_part(group: str, first: int, classes: int, ranks: int) -> ClassPart | None:
    """None without a group: all classes are here."""
    return ClassPart(group, first, classes, ranks) if group else None


def _z(logits, softcap, scale):
    z = logits.float() * scale
    return softcap * torch.tanh(z / softcap) if softcap else z
