"""transformers' Trainer with ``torch_compile_backend="fx_fusion"``: accumulation, evaluation with metrics, save and resume."""

import subprocess
import sys

import pytest
import torch

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import slow_but, tiny_llama

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def texts(count, seed):
    ids = torch.randint(3, 256, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)} for row in ids]


def accuracy(prediction):
    logits, labels = (torch.as_tensor(t) for t in (prediction.predictions, prediction.label_ids))
    return {"accuracy": (logits.argmax(-1) == labels).float().mean().item(), "norm": logits.float().norm().item()}


def train(folder, *, compiled, bf16, checkpoints, steps, resume=False):
    arguments = transformers.TrainingArguments(
        str(folder), torch_compile=compiled, torch_compile_backend="fx_fusion" if compiled else None, bf16=bf16,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps, logging_steps=1, eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=2, report_to=[], learning_rate=1e-3, seed=0, disable_tqdm=True,
        use_cpu=True, gradient_checkpointing=checkpoints,
    )  # fmt: skip
    trainer = transformers.Trainer(
        tiny_llama(), arguments, train_dataset=texts(16, 0), eval_dataset=texts(4, 1), compute_metrics=accuracy
    )
    trainer.train(resume_from_checkpoint=resume)
    log = trainer.state.log_history
    losses = [entry["loss"] for entry in log if "loss" in entry]
    metrics = [(entry["eval_loss"], entry["eval_norm"]) for entry in log if "eval_norm" in entry]
    return torch.tensor([float(loss) for loss in losses]), torch.tensor(metrics)


SETTINGS = {
    "float32": {"bf16": False, "checkpoints": False},
    "bf16": {"bf16": True, "checkpoints": False},
    "bf16 and checkpoints": {"bf16": True, "checkpoints": True},  # accelerate enters autocast inside of the graph
}


@pytest.mark.parametrize("how", slow_but(("bf16 and checkpoints",), tuple(SETTINGS)))
def test_trainer(tmp_path, monkeypatch, how):
    torch._dynamo.list_backends()  # fills the registry from the entry points
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "fx_fusion", rewriting_backend())
    expected, metrics = train(tmp_path / "eager", compiled=False, **SETTINGS[how], steps=4)
    with fx_fusion.recording() as report:
        losses, our_metrics = train(tmp_path / "ours", compiled=True, **SETTINGS[how], steps=4)
    assert report.count("linear_cross_entropy") >= 1, str(report)
    assert report.count("causal_mask") >= 2, str(report)
    assert not any(s.status == "declined" and s.fusion in ("causal_mask", "repeat_kv") for s in report.sites), str(report)
    assert any(g.deferred for g in report.graphs), "logits are computed in training"
    close = {"rtol": 2e-2, "atol": 2e-2} if SETTINGS[how]["bf16"] else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(losses, expected, **close)
    torch.testing.assert_close(our_metrics, metrics, **close)
    resumed, _ = train(tmp_path / "ours", compiled=True, **SETTINGS[how], steps=6, resume=True)
    expected, _ = train(tmp_path / "eager", compiled=False, **SETTINGS[how], steps=6, resume=True)
    torch.testing.assert_close(resumed[4:], expected[4:], **close)
    assert len(resumed) == 6


def test_what_a_trainer_logs(tmp_path, monkeypatch):
    """Counts and shares in every log, before the loggers see it, and the page beside the checkpoints."""
    from fx_fusion.trainer import PAGE, watch

    class Logger(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(dict(logs))

    torch._dynamo.list_backends()
    torch._dynamo.reset()
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "fx_fusion", rewriting_backend())
    arguments = transformers.TrainingArguments(
        str(tmp_path), torch_compile=True, torch_compile_backend="fx_fusion", per_device_train_batch_size=2, max_steps=3,
        logging_steps=1, save_strategy="steps", save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    logger, data = Logger(), texts(8, 0)
    for row in data[4:]:
        row["attention_mask"][-4:] = 0  # half of them are padded
    trainer = transformers.Trainer(tiny_llama(), arguments, train_dataset=data, callbacks=[logger])
    report = watch(trainer)
    trainer.train()
    assert report.count("rms_norm") >= 1
    first = logger.seen[0]
    assert first["fx_fusion/fused"] >= 10
    assert first["fx_fusion/graphs"] >= 1
    assert first["fx_fusion/logits_read"] == 0
    assert logger.seen[-1]["fx_fusion/assumption_held"] == pytest.approx(1 / 3)  # two of three batches have a padded row
    assert "fx_fusion/fused" in trainer.state.log_history[0]
    assert "rms_norm" in (tmp_path / PAGE).read_text()
    assert not any(report is recorded for recorded in fx_fusion.report.recording.recordings())


class Stops(RuntimeError):
    pass


def stopping(rows, after):
    """Rows of which the last can't be read."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 10 * rows

        def __getitem__(self, index):
            self.given = getattr(self, "given", 0) + 1
            if self.given > after:
                raise Stops("a file is gone")
            return texts(rows, 0)[index % rows]

    return Rows()


def test_a_trainer_that_raises(tmp_path, monkeypatch):
    """The page is there, nothing goes on recording, and the error is the user's."""
    from fx_fusion.trainer import PAGE, watch

    torch._dynamo.list_backends()
    torch._dynamo.reset()
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "fx_fusion", rewriting_backend())
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), torch_compile=True, torch_compile_backend="fx_fusion", per_device_train_batch_size=2, max_steps=9,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(tiny_llama(), arguments, train_dataset=stopping(4, after=6))
    report = watch(trainer)
    assert watch(trainer) is report
    assert sum(type(callback).__name__ == "_Watching" for callback in trainer.callback_handler.callbacks) == 1
    with pytest.raises(Stops):
        trainer.train()
    assert report.graphs
    assert not any(report is recorded for recorded in fx_fusion.report.recording.recordings())
    assert "rms_norm" in (tmp_path / "out" / PAGE).read_text()
    (tmp_path / "file").write_text("")
    trainer.args.output_dir = str(tmp_path / "file" / "out")
    with pytest.warns(UserWarning, match="fx_fusion.html can't be written"), pytest.raises(Stops):
        trainer.train()


def watched(tmp_path, monkeypatch, **more):
    from fx_fusion.trainer import watch

    torch._dynamo.list_backends()
    torch._dynamo.reset()
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "fx_fusion", rewriting_backend())
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), torch_compile=True, torch_compile_backend="fx_fusion", per_device_train_batch_size=2, max_steps=2,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, **more,
    )  # fmt: skip
    trainer = transformers.Trainer(tiny_llama(), arguments, train_dataset=texts(4, 0), eval_dataset=texts(4, 1))
    return trainer, watch(trainer)


def test_the_metrics_of_an_evaluation_are_its_own(tmp_path, monkeypatch):
    """A search for hyperparameters minimizes the sum of all that is no loss, or the loss where there is nothing else."""
    from transformers.trainer_utils import default_compute_objective

    trainer, report = watched(tmp_path, monkeypatch, eval_strategy="steps", eval_steps=1, logging_steps=1)
    found = []
    monkeypatch.setattr(trainer, "_report_to_hp_search", lambda trial, step, metrics: found.append(dict(metrics)))
    trainer.train()
    assert len(found) == 2
    for metrics in found:
        assert default_compute_objective(dict(metrics)) == metrics["eval_loss"]
    assert "fx_fusion/fused" in next(log for log in trainer.state.log_history if "loss" in log)
    assert report.graphs


@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_a_trainer_that_only_evaluates(what, tmp_path, monkeypatch):
    """It compiles the model for that, and the report and the page say what became of it."""
    from fx_fusion.trainer import PAGE

    trainer, report = watched(tmp_path, monkeypatch)
    assert not any("fx_fusion" in name for name in trainer.evaluate(metric_key_prefix="train"))
    found = trainer.evaluate() if what == "evaluate" else trainer.predict(texts(4, 1)).metrics
    assert not any(name.startswith("fx_fusion") for name in found)
    assert report.count("rms_norm") >= 1
    assert "rms_norm" in (tmp_path / "out" / PAGE).read_text()
    assert not any(report is recorded for recorded in fx_fusion.report.recording.recordings())


@pytest.mark.parametrize("given", [None, "out"])
def test_what_is_no_trainer(given):
    from fx_fusion.trainer import watch

    with pytest.raises(TypeError, match=rf"^watch\(\) takes a Trainer of transformers, .*; got {given!r}$"):
        watch(given)


def test_lightning_that_raises(tmp_path):
    lightning = pytest.importorskip("lightning")
    from fx_fusion.lightning import PAGE, Watch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.compile(torch.nn.RMSNorm(8), backend=rewriting_backend())

        def training_step(self, batch, index):
            if index:
                raise Stops("a file is gone")
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    watching = Watch()
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[watching], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(Stops):
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2))
    assert watching.report.count("rms_norm") == 1
    assert "rms_norm" in (tmp_path / PAGE).read_text()
    assert not any(watching.report is recorded for recorded in fx_fusion.report.recording.recordings())


class Fitted:
    """A run of Lightning of three steps."""

    def __init__(self, root, *callbacks, step=None, **more):
        lightning = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = torch.compile(more.pop("model", torch.nn.RMSNorm(8)), backend=rewriting_backend())

            def training_step(self, batch, index):
                return self.model(batch).square().mean() if step is None else step(self.model, batch)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=0.1)

        self.module, data = Module(), more.pop("data", torch.randn(8, 8))
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=False, default_root_dir=root, callbacks=list(callbacks),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(self.module, torch.utils.data.DataLoader(data, batch_size=2))


def test_lightning_in_another_file_system(tmp_path, monkeypatch):
    """The page is where the checkpoints are, and nothing is left in the working directory."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("lightning")
    from fx_fusion.lightning import PAGE, Watch

    monkeypatch.chdir(tmp_path)
    Fitted("memory://bucket/run", Watch())
    assert b"rms_norm" in fsspec.filesystem("memory").cat(f"/bucket/run/{PAGE}")
    assert not any("memory" in path.name for path in tmp_path.iterdir())


def test_lightning_where_the_page_cannot_be_written(tmp_path):
    pytest.importorskip("lightning")
    from fx_fusion.lightning import PAGE, Watch

    (tmp_path / PAGE).mkdir()
    with pytest.warns(UserWarning, match="fx_fusion.html can't be written"):
        Fitted(tmp_path, Watch())


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(500, 16), torch.nn.Linear(16, 500, bias=False)

    def forward(self, ids):
        logits = self.head(self.table(ids)).float()
        return torch.nn.functional.cross_entropy(logits.view(-1, 500), ids.view(-1)), logits


def test_lightning_reads_logits_behind_the_step(tmp_path):
    """Its optimizers train the model in a closure of ``step()``: the logits are those of the weights before it."""
    lightning = pytest.importorskip("lightning")

    def sums(model):
        found = []

        class Reader(lightning.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, index):
                found.append(outputs["logits"].square().sum().item())

        Fitted(tmp_path, Reader(), model=model, data=ids, step=lambda model, batch: dict(zip(("loss", "logits"), model(batch), strict=True)))
        return found

    ids = torch.arange(32).view(8, 4)
    torch.manual_seed(3)
    ours = sums(Head())
    torch.manual_seed(3)
    expected = []
    model, data = Head(), ids.split(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in data[:3]:
        loss, logits = model(batch)
        expected.append(logits.square().sum().item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ours == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_watching_makes_the_name_known():
    code = "import fx_fusion.trainer; from accelerate.utils import DynamoBackend; print(DynamoBackend('FX_FUSION').value)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "FX_FUSION", found.stderr
