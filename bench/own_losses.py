"""Losses of one's own around an unmodified language model, compiled with it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WithZLoss(nn.Module):
    """The loss of a language model and 1e-4 times the squared logsumexp of its logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.model(input_ids=input_ids).logits[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss + 1e-4 * logits.logsumexp(-1).square().mean())


class WithMaskedLoss(nn.Module):
    """The mean loss of the second half of each sequence, by a mask."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.model(input_ids=input_ids).logits[:, :-1]
        each = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        mask = (torch.arange(labels.shape[1] - 1, device=labels.device) >= labels.shape[1] // 2).float()
        return SimpleNamespace(loss=(each * mask).sum() / (mask.sum() * labels.shape[0]))


class Distilled(nn.Module):
    """Half the loss of a model, half its divergence from a frozen teacher at a temperature of 2."""

    def __init__(self, student: nn.Module, teacher: nn.Module, temperature: float = 2.0):
        super().__init__()
        self.student, self.teacher, self.temperature = student, teacher.requires_grad_(False), temperature

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        student = self.student(input_ids=input_ids, labels=labels)
        with torch.no_grad():
            target = self.teacher(input_ids=input_ids).logits
        log_probs = F.log_softmax(student.logits / self.temperature, dim=-1)
        divergence = F.kl_div(log_probs, F.softmax(target / self.temperature, dim=-1), reduction="none").sum(-1).mean()
        return SimpleNamespace(loss=0.5 * student.loss + 0.5 * self.temperature**2 * divergence)


# -- outside of what is compiled, of logits (rows, length, classes) and labels ----------------------------------------------
def clipped(z: Tensor, y: Tensor) -> Tensor:
    """A clipped ratio to the policy before, with an entropy bonus: PPO."""
    log_probs = torch.log_softmax(z.float() / 0.9, dim=-1)
    now, entropy = log_probs.gather(-1, y[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)
    advantage = (y % 7 - 3).float()
    ratio = (now - now.detach()).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() - 0.01 * entropy.mean()


def odds(z: Tensor, y: Tensor) -> Tensor:
    """The loss of the answers and the odds of a sequence, whose gradient depends on the mean of its tokens: ORPO."""
    log_p = z.float().log_softmax(-1).gather(-1, y[..., None])[..., 0]
    mean = log_p.mean(-1)
    return -log_p.mean() - 0.1 * F.logsigmoid(mean - torch.log1p(-mean.exp())).mean()


def with_accuracy(z: Tensor, y: Tensor) -> Tensor:
    """The usual loss, with how many tokens are right beside it."""
    loss = F.cross_entropy(z.flatten(0, 1).float(), y.flatten())
    return loss + 0 * (z.argmax(-1) == y).float().mean()


def in_chunks(z: Tensor, y: Tensor) -> Tensor:
    """The usual loss, eight parts of each sequence one after the other, to save memory."""
    parts = zip(z.chunk(8, 1), y.chunk(8, 1), strict=True)
    sums = [F.cross_entropy(p.flatten(0, 1).float(), t.flatten(), reduction="sum") for p, t in parts]
    return torch.stack(sums).sum() / y.numel()


def sequence_by_sequence(z: Tensor, y: Tensor) -> Tensor:
    """The mean of the mean losses of sequences."""
    return torch.stack([F.cross_entropy(p.float(), t) for p, t in zip(z, y, strict=True)]).mean()
