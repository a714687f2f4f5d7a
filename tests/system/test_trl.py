"""TRL's trainers of preferences and policies: what they log is what they log in eager, in one graph a model. (Runs where trl is.)"""

import pytest
import torch

import fx_fusion
from fx_fusion.patterns import linear_rows
from fx_fusion.rewrite import returned_logits
from fx_fusion.testing import rewriting_backend
from tests.helpers import tiny_llama
from tests.system.test_sft_trainer import tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
PROMPTS = [f"w{i} w{i + 1} w{i + 2}" for i in range(16)]


def preferences():
    return {"prompt": PROMPTS, "chosen": [f" w{i} w2 w3" for i in range(16)], "rejected": [" w4 w5"] * 16}


def examples():
    return {"prompt": PROMPTS, "completion": [f" w{i} w2 w3" for i in range(16)], "label": [i % 2 == 0 for i in range(16)]}


def length(completions, **_):
    return [float(len(set(text))) for text in completions]


TRAINERS = {
    "DPO": (preferences, {"max_length": 32}),
    "KTO": (examples, {"max_length": 32}),
    "GRPO": (lambda: {"prompt": PROMPTS}, {"num_generations": 4, "max_completion_length": 8, "num_iterations": 2}),
    "RLOO": (lambda: {"prompt": PROMPTS}, {"beta": 0.0, "num_generations": 4, "max_completion_length": 8, "num_iterations": 2}),
}


def train(name, folder, *, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    rows, given = TRAINERS[name]
    config = getattr(trl, f"{name}Config")(
        str(folder), torch_compile=compiled, torch_compile_backend="fx_fusion" if compiled else None, bf16=False, max_steps=4,
        per_device_train_batch_size=4, logging_steps=1, report_to=[], learning_rate=1e-3, seed=0, disable_tqdm=True, use_cpu=True,
        save_strategy="no", gradient_checkpointing=False, **given,
    )  # fmt: skip
    more = {"reward_funcs": length} if name in ("GRPO", "RLOO") else {"ref_model": tiny_llama()}
    data = datasets.Dataset.from_dict(rows())
    trainer = getattr(trl, f"{name}Trainer")(tiny_llama(), args=config, train_dataset=data, processing_class=tokenizer(), **more)
    trainer.train()
    timed = ("time", "runtime", "per_second", "flos", "epoch")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: v for k, v in entry.items() if isinstance(v, (int, float)) and not k.endswith(timed)} for entry in logs]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_as_in_eager(name, tmp_path, monkeypatch):
    monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cpu": 1})
    monkeypatch.setattr(returned_logits, "_FEWEST_CLASSES", 256)
    monkeypatch.setattr(linear_rows, "_FEWEST_CLASSES", 256)
    torch._dynamo.list_backends()
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "fx_fusion", rewriting_backend())
    expected = train(name, tmp_path / "eager", compiled=False)
    with fx_fusion.recording() as report:
        found = train(name, tmp_path / "ours", compiled=True)
    assert len(found) == len(expected) == 4
    for ours, eager in zip(found, expected, strict=True):
        assert ours.keys() == eager.keys()
        assert ours == pytest.approx(eager, rel=2e-3, abs=2e-3), name
    captured = [graph for graph in report.graphs if graph.front_ends]
    assert captured, str(report)
    assert not any(graph.broke for graph in report.graphs), str(report)
    assert any(graph.outside for graph in captured), str(report)
    assert all(graph.reads.calls_read == 0 for graph in captured), str(report)
