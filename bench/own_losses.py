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
