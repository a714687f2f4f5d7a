"""Show what fx_fusion does during a run of transformers' Trainer: in its logs, and as a page beside its checkpoints.

    from fx_fusion.trainer import watch  # from here on, Trainer takes "fx_fusion"

    trainer = Trainer(model, TrainingArguments(..., torch_compile=True, torch_compile_backend="fx_fusion"), ...)
    report = watch(trainer)
    trainer.train()

Trainers that derive from it (TRL's) are watched in the same way.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from fx_fusion.report.facts import PAGE, facts
from fx_fusion.report.recording import recording_in
from fx_fusion.report.report import Report


def watch(trainer: Trainer) -> Report:
    """Record what is compiled while ``trainer`` trains, evaluates and predicts. Every log of its training (W&B, TensorBoard,
    its own history) gets the numbers of ``fx_fusion.report.facts``; the report is written to ``fx_fusion.html`` in the
    output folder with every checkpoint and at the end, be it an error. Returns it; of a trainer that is watched already, the
    same one.

    Raises:
        TypeError: ``trainer`` is no Trainer of transformers.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"watch() takes a Trainer of transformers, as watch(Trainer(model, ...)); got {trainer!r}")
    callbacks = trainer.callback_handler.callbacks
    known = next((callback for callback in callbacks if isinstance(callback, _Watching)), None)
    if known is not None:
        return known.report
    watching = _Watching()
    # In front of those that log: what they are given is one dictionary.
    callbacks.insert(0, watching)
    for name in ("train", "evaluate", "predict"):
        _record(trainer, name, watching)
    return watching.report


def _record(trainer: Trainer, name: str, watching: _Watching) -> None:
    """Let a method of this trainer record. (Callbacks are told of no beginning of an evaluation, and of no error.)"""
    theirs = getattr(trainer, name)

    @functools.wraps(theirs)
    def run(*args: Any, **kwargs: Any) -> Any:
        with recording_in((watching.report,)):
            watching.depth += 1
            try:
                return theirs(*args, **kwargs)
            finally:
                watching.depth -= 1
                watching.trains = watching.trains and name != "train"
                if watching.depth == 0:  # an evaluation while it trains ends nothing
                    watching.write(trainer.args, trainer.state)

    setattr(trainer, name, run)


class _Watching(TrainerCallback):
    def __init__(self) -> None:
        self.report, self.depth, self.trains = Report(), 0, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trains = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        found = facts(self.report)
        # The logs of an evaluation are its metrics, which a search for hyperparameters adds up.
        if logs is not None and ("loss" in logs or "train_loss" in logs) and self.trains:
            logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.write(args, state)

    def write(self, args: Any, state: Any) -> None:
        """Write the page. A run counts more than a page that can't be written."""
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.report.to_html(folder / PAGE)
        except OSError as error:
            warnings.warn(f"fx_fusion: {folder / PAGE} can't be written: {error}", stacklevel=2)
