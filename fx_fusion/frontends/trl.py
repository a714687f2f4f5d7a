"""TRL's language-model head: the losses of SFT, DPO, KTO, GRPO and RLOO from hidden states.

TRL computes log-probabilities, entropies and what it logs of logits tile by tile, in an ``autograd.Function`` that ends the
graph. Here the same numbers are written in plain PyTorch. Logits are rounded to the dtype in which TRL multiplies, and all
that follows is in float32, as in its kernels.

On a GPU TRL first takes the rows that have a label, which ends the graph too. Its way for other devices scores every row and
zeroes what it returns of the others. That one is captured, and ``linear_rows`` leaves the others out.

Source: trl/kernels/chunked_logprob.py and add_fused_lm_head in trl/trainer/utils.py, TRL 1.16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fusion.frontend import FrontEnd, Substitute

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class LogProbs:
    """Stand for ``ChunkedLogProbFunction``."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> Outputs:
        """Return log-probabilities [N] of targets [N], and of each row the entropy, the logarithm of the sum of squared
        probabilities, the mean logit, and whether the target is the first of the largest logits; None for what is not
        among ``outputs``. hidden: [N, H], weight: [V, H], bias: [V]."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).float()
        if logit_scale != 1.0:
            logits = logits * logit_scale
        if final_logit_softcapping is not None:
            logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
        if temperature != 1.0:
            logits = logits / temperature
        log_p = logits.log_softmax(-1)
        picked = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) if "entropy" in outputs else None
        squares = (2 * log_p).logsumexp(-1).detach() if "log_sum_sq_probs" in outputs else None
        mean = logits.mean(-1).detach() if "mean_logits" in outputs else None
        top = logits.argmax(-1) == targets if "is_top1" in outputs else None
        return picked, entropy, squares, mean, top


def every_row(device: Any) -> bool:
    """Stand for ``_use_triton``, whose True makes TRL take the rows that have a label."""
    return False


SOURCES = "trl.kernels.chunked_logprob", "trl.trainer.utils:add_fused_lm_head"
KNOWN = {"a34ae513ba335e05": "1.16"}
FRONT_END = FrontEnd(
    library="trl",
    module="trl.trainer.utils",
    substitutes=(
        Substitute("trl.trainer.utils:_ChunkedLogProbFunction", LogProbs, SOURCES, KNOWN, within="trl.trainer.utils"),
        Substitute("trl.trainer.utils:_use_triton", every_row, SOURCES, KNOWN, within="trl.trainer.utils"),
    ),
)
