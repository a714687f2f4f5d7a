"""Show what fx_fusion does during a run of Lightning: in its logs, and as a page beside its checkpoints.

    from fx_fusion.lightning import Watch

    self.model = torch.compile(model, backend="fx_fusion")  # in the LightningModule: its log() cannot be compiled
    lightning.Trainer(callbacks=[Watch()]).fit(module, loader)
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

from fsspec.core import url_to_fs
from lightning.pytorch import Callback, LightningModule, Trainer

from fx_fusion.report.facts import PAGE, facts
from fx_fusion.report.recording import recording_in
from fx_fusion.report.report import Report


class Watch(Callback):
    """Records what is compiled while a model is fitted: ``report``. The trainer's loggers get the numbers of
    ``fx_fusion.report.facts`` (every ``log_every_n_steps``); the report is written to ``fx_fusion.html`` in the trainer's
    ``default_root_dir`` with every checkpoint and at the end, be it an error."""

    def __init__(self) -> None:
        self.report, self._recording = Report(), ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recording.enter_context(recording_in((self.report,)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.log_dict(facts(self.report), on_step=True, on_epoch=False)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recording.close()
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._recording.close()
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        """Write the page, in whatever file system the root is. A run counts more than a page that can't be written."""
        if not trainer.is_global_zero:
            return
        try:
            files, folder = url_to_fs(str(trainer.default_root_dir))
            files.makedirs(folder, exist_ok=True)
            with files.open(f"{folder}/{PAGE}", "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(self.report.to_html())
        except (OSError, ImportError, ValueError) as error:
            warnings.warn(f"fx_fusion: {trainer.default_root_dir}/{PAGE} can't be written: {error}", stacklevel=2)
