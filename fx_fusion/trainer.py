"""What fx_fusion does during a run of transformers' Trainer: in its logs, and as a page beside its checkpoints.

    from fx_fusion.trainer import watch  # from here on, Trainer takes "fx_fusion"

    trainer = Trainer(model, TrainingArguments(..., torch_compile=True, torch_compile_backend="fx_fusion"), ...)
    report = watch(trainer)
    trainer.train()

Trainers that derive from it (TRL's) are watched in the same way.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

import fx_fusion.accelerate  # noqa: F401  without it accelerate refuses the name
from fx_fusion.report.facts import PAGE, facts
from fx_fusion.report.recording import recording_in
from fx_fusion.report.report import Report


def watch(trainer: Trainer) -> Report:
    """Record what is compiled while ``trainer`` trains. Every log (W&B, TensorBoard, its own history) gets the numbers of
    ``fx_fusion.report.facts``; the report is written to ``fx_fusion.html`` in the output folder with every checkpoint and at
    the end, be it an error. Returns it; of a trainer that is watched already, the same one.

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
    _tell_of_errors(trainer, watching)
    return watching.report


def _tell_of_errors(trainer: Trainer, watching: _Watching) -> None:
    """Callbacks are not told of what is raised: ``train()`` of this trainer tells ours."""
    theirs = trainer.train

    @functools.wraps(theirs)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return theirs(*args, **kwargs)
        except BaseException:
            watching.on_exception(trainer.args, trainer.state)
            raise

    trainer.train = train


class _Watching(TrainerCallback):
    def __init__(self) -> None:
        self.report, self._recording = Report(), ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recording.enter_context(recording_in((self.report,)))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        found = facts(self.report)
        if logs is not None:
            logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.report.to_html(folder / PAGE)

    def on_exception(self, args: Any, state: Any) -> None:
        """End the recording where ``train()`` raised. What it raised counts more than a page that can't be written."""
        self._recording.close()
        try:
            self.on_save(args, state, None)
        except OSError as error:
            warnings.warn(f"fx_fusion: {args.output_dir}/{PAGE} can't be written: {error}", stacklevel=2)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recording.close()
        self.on_save(args, state, control)
