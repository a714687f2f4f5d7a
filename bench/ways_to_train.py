"""Ways to train that ``bench.setups`` measures: a model, its batches, and what a step does with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench import own_losses
from bench.trained_models import (
    SIZES,
    bert,
    gemma2,
    llama,
    llama_with_cache,
    llama_written_out,
    t5,
    with_checkpointing,
    with_lora,
)

Batch = dict[str, Any]
IGNORED = -100
SHARES = (1.0, 0.75, 0.875, 0.53125, 0.9375, 0.8125, 0.65625, 1.0)  # of a row that is no padding; 0.82 in the mean


# -- batches ---------------------------------------------------------------------------------------------------------
def tokens(b: int, s: int, vocabulary: int = 0) -> Tensor:
    return torch.randint(5, vocabulary or SIZES.vocabulary, (b, s), device=SIZES.device)


def plain() -> list[Batch]:
    return [{"input_ids": ids, "labels": ids} for ids in (tokens(SIZES.batch, SIZES.length) for _ in range(4))]


def one_short_row() -> list[Batch]:
    return [{"input_ids": ids, "labels": ids} for ids in (tokens(1, SIZES.length // 4) for _ in range(4))]


def with_mask(ids: Tensor, lengths: list[int], *, left: bool = False) -> Batch:
    shown = torch.arange(ids.shape[1], device=SIZES.device) < torch.tensor(lengths, device=SIZES.device)[:, None]
    shown = shown.flip(-1) if left else shown
    return {"input_ids": ids, "labels": ids.masked_fill(~shown, IGNORED), "attention_mask": shown.long()}


def ones() -> list[Batch]:
    return [with_mask(tokens(SIZES.batch, SIZES.length), [SIZES.length] * SIZES.batch) for _ in range(4)]


def padded(left: bool = False) -> list[Batch]:
    """A fifth of the tokens is padding, other lengths in every batch."""
    rows = [[int(SIZES.length * SHARES[(i + b) % 8]) for b in range(SIZES.batch)] for i in range(8)]
    return [with_mask(tokens(SIZES.batch, SIZES.length), lengths, left=left) for lengths in rows]


def alternating() -> list[Batch]:
    return [batch for pair in zip(padded(), ones() + ones(), strict=True) for batch in pair]


def prompts() -> list[Batch]:
    """Instructions: the loss is on the answer, the last two fifths of each row."""
    made = ones()
    for batch in made:
        batch["labels"][:, : SIZES.length * 3 // 5] = IGNORED
    return made


def packed() -> list[Batch]:
    """Documents of other lengths behind each other, without a mask: position_ids begin anew."""
    lengths = [int(SIZES.length * share) for share in (0.5, 1.5, 0.25, 0.75, 1.0)]
    positions = torch.cat([torch.arange(n, device=SIZES.device) for n in lengths])[None]
    ids = [tokens(1, sum(lengths)) for _ in range(4)]
    return [{"input_ids": i, "labels": i, "position_ids": positions} for i in ids]


def other_lengths() -> list[Batch]:
    lengths = [int(SIZES.length * share) for share in SHARES]
    return [{k: v[:, :n].contiguous() for k, v in batch.items()} for batch, n in zip(plain() * 2, lengths, strict=True)]


def padded_to_the_longest() -> list[Batch]:
    """As collators pad: to the longest row of each batch, another length every step."""
    made = []
    for i, share in enumerate(SHARES):
        longest = int(SIZES.length * share)
        lengths = [longest, *(int(longest * SHARES[(i + b) % 8]) for b in range(1, SIZES.batch))]
        made.append(with_mask(tokens(SIZES.batch, longest), lengths))
    return made


def bert_batches(shortest: float) -> Callable[[], list[Batch]]:
    """64 rows of 512, lengths from this share of 512 to all of it; a sixth of the tokens is to be guessed."""

    def make() -> list[Batch]:
        made, b, s = [], SIZES.bert_batch, SIZES.bert_length
        for _ in range(4):
            lengths = torch.linspace(shortest * s, s, b).long()[torch.randperm(b)].tolist()
            batch = with_mask(tokens(b, s, SIZES.bert_vocabulary), lengths)
            batch["labels"] = batch["labels"].masked_fill(torch.rand(b, s, device=SIZES.device) > 0.15, IGNORED)
            made.append(batch)
        return made

    return make


def translations() -> list[Batch]:
    """Half as many rows as of BERT, a quarter of the tokens is padding; targets of a quarter of the length."""
    made, b, s = [], SIZES.bert_batch // 2, SIZES.bert_length
    for _ in range(4):
        lengths = torch.linspace(s // 2, s, b).long()[torch.randperm(b)]
        batch = with_mask(tokens(b, s, SIZES.t5_vocabulary), lengths.tolist())
        batch["labels"] = with_mask(tokens(b, s // 4, SIZES.t5_vocabulary), (lengths // 4).tolist())["labels"]
        made.append(batch)
    return made


# -- steps -----------------------------------------------------------------------------------------------------------
VARIABLES: dict[str, Tensor] = {}  # of a loop


def train(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def train_and_read(model: nn.Module, batch: Batch) -> Tensor:
    """As trainers that log how many tokens were right."""
    out = model(**batch)
    with torch.no_grad():
        right = (out.logits.argmax(-1) == batch["labels"]).float().mean()
    out.loss.backward()
    return out.loss.detach() + 0 * right


def accumulate(model: nn.Module, batch: Batch) -> Tensor:
    """Four micro-batches, as transformers' Trainer weighs them."""
    count = torch.tensor(4 * batch["labels"][:, 1:].numel(), device=SIZES.device)
    losses = []
    for _ in range(4):
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def train_outside(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    """As loops of one's own: the model gives logits, the loss is outside of what is compiled, and the variable that holds
    the logits is there until it is assigned again."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        labels = batch.pop("labels")
        VARIABLES["logits"] = logits = model(**batch).logits
        loss = loss_of(logits[:, :-1], labels[:, 1:])
        loss.backward()
        return loss.detach()

    return step


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z.flatten(0, 1).float(), y.flatten())


def of_log_probs(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(-1, y[..., None]).float().mean()


def of_rows(z: Tensor, y: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    counts = torch.arange(y.shape[1], device=y.device) >= y.shape[1] // 8  # the prompt has no loss
    return (each * counts).sum() / (counts.sum() * y.shape[0])


def smoothed(z: Tensor, y: Tensor) -> Tensor:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(0.1)({"logits": z}, y)


def written_out(z: Tensor, y: Tensor) -> Tensor:
    return (z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]).float().mean()


def evaluate(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(**batch).loss


def evaluate_and_read(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        out = model(**batch)
        return out.loss + 0 * (out.logits.argmax(-1) == batch["labels"]).float().mean()


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to train."""

    batches: Callable[[], list[Batch]]
    model: Callable[[int], nn.Module] = llama
    step: Callable[[nn.Module, Batch], Tensor] = train
    change: Callable[[nn.Module], None] | None = None  # of the model
    autocast: bool = False  # and float32 parameters
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of fx_fusion
    is_llama: bool = True

    @property
    def trains(self) -> bool:
        return self.step not in (evaluate, evaluate_and_read)


SETUPS = {
    "no-mask": Setup(plain),
    "use-cache": Setup(plain, llama_with_cache),
    "ones": Setup(ones),
    "padded": Setup(padded),
    "left-padded": Setup(lambda: padded(left=True)),
    "padded-written-out": Setup(padded, llama_written_out),
    "padded-gemma2": Setup(padded, gemma2, is_llama=False),
    "alternating": Setup(alternating),
    "prompts": Setup(prompts),
    "packed": Setup(packed),
    "small": Setup(one_short_row),
    "autocast": Setup(plain, autocast=True),
    "checkpoint": Setup(plain, change=with_checkpointing),
    "checkpoint-padded": Setup(padded, change=with_checkpointing),
    "lora": Setup(plain, change=with_lora),
    "dynamic": Setup(other_lengths),
    "dynamic-padded": Setup(padded_to_the_longest),
    "accumulate": Setup(plain, step=accumulate),
    "own-loss": Setup(plain, step=train_outside(cross_entropy)),
    "own-log-probs": Setup(plain, step=train_outside(of_log_probs)),
    "own-loss-read": Setup(plain, step=train_outside(written_out)),
    "own-loss-rows": Setup(plain, step=train_outside(of_rows)),
    **{
        f"own-{loss_of.__name__}": Setup(plain, step=train_outside(loss_of))
        for loss_of in (
            own_losses.clipped, own_losses.odds, own_losses.with_accuracy, own_losses.in_chunks,
            own_losses.sequence_by_sequence,
        )
    },
    "label-smoothing": Setup(plain, step=train_outside(smoothed)),
    "z-loss": Setup(plain, lambda layers: own_losses.WithZLoss(llama(layers))),
    "masked-loss": Setup(plain, lambda layers: own_losses.WithMaskedLoss(llama(layers))),
    "distilled": Setup(plain, lambda layers: own_losses.Distilled(llama(layers), llama(max(1, layers // 2)))),
    "evaluate": Setup(ones, step=evaluate),
    "evaluate-read": Setup(ones, step=evaluate_and_read),
    "evaluate-read-padded": Setup(padded, step=evaluate_and_read),
    "train-read": Setup(ones, step=train_and_read),
    "bert": Setup(bert_batches(1.0), bert(0.0), is_llama=False),
    "bert-padded": Setup(bert_batches(0.125), bert(0.0), is_llama=False),
    "t5-padded": Setup(translations, t5, is_llama=False),
    "bert-dropout": Setup(bert_batches(0.125), bert(0.1), is_llama=False),
}
