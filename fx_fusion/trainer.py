"""What fx_fusion does during a run of transformers' Trainer: in its logs, and as a page beside its checkpoints.

    from fx_fusion.trainer import watch  # from here on, Trainer takes "fx_fusion"

    trainer = Trainer(model, TrainingArguments(..., torch_compile=True, torch_compile_backend="fx_fusion"), ...)
    report = watch(trainer)
    trainer.train()

Trainers that derive from it (TRL's) are watched in the same way.
"""

from __future__ import annotations

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
    the end. Returns it."""
    watching = _Watching()
    # In front of those that log: what they are given is one dictionary.
    trainer.callback_handler.callbacks.insert(0, watching)
    return watching.report


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

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recording.close()
        self.on_save(args, state, control)
