"""TRL's SFTTrainer on a generated text set: the losses and metrics of eager, with fusions firing. (Runs where trl is.)

TRL computes log-probabilities in code of its own, for which a front end stands: one graph, with the head."""

import pytest
import torch

import fx_fusion
from fx_fusion.patterns import linear_rows
from fx_fusion.rewrite import returned_logits
from fx_fusion.testing import rewriting_backend
from tests.helpers import slow_but, tiny_llama

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(250))]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def texts():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 30, (32,), generator=generator).tolist()
    return datasets.Dataset.from_dict(
        {"text": [" ".join(f"w{i}" for i in torch.randint(0, 250, (n,), generator=generator).tolist()) for n in lengths]}
    )


def train(folder, *, compiled, packing, loss):
    torch._dynamo.reset()
    given = trl.SFTConfig(
        str(folder), torch_compile=compiled, torch_compile_backend="fx_fusion" if compiled else None, bf16=False,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, logging_steps=1, report_to=[],
        learning_rate=1e-3, seed=0, disable_tqdm=True, use_cpu=True, max_length=32, packing=packing, save_strategy="no",
        loss_type=loss,
    )  # fmt: skip
    trainer = trl.SFTTrainer(tiny_llama(), given, train_dataset=texts(), processing_class=tokenizer())
    trainer.train()
    log = trainer.state.log_history
    return torch.tensor([[e["loss"], e["entropy"], e["mean_token_accuracy"]] for e in log if "loss" in e])


@pytest.mark.parametrize("large", slow_but([True], [False, True]), ids=["small logits", "large logits"])
@pytest.mark.parametrize("loss", slow_but(["nll"], ["nll", "dft"]))
@pytest.mark.parametrize("packing", slow_but([False], [False, True]), ids=["padded", "packed"])
def test_sft_trainer(tmp_path, monkeypatch, packing, loss, large):
    """Large logits wait for TRL's loss, and what it logs; small ones are made in the graph."""
    if large:
        monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cpu": 1})
        monkeypatch.setattr(returned_logits, "_FEWEST_CLASSES", 256)
        monkeypatch.setattr(linear_rows, "_FEWEST_CLASSES", 256)
    torch._dynamo.list_backends()
    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "fx_fusion", rewriting_backend())
    expected = train(tmp_path / "eager", compiled=False, packing=packing, loss=loss)
    with fx_fusion.recording() as report:
        found = train(tmp_path / "ours", compiled=True, packing=packing, loss=loss)
    assert len(found) == 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for fusion in ("rms_norm", "add_rms_norm", "rope", "swiglu"):
        assert report.count(fusion) >= 2, str(report)
    assert not any(graph.broke for graph in report.graphs), str(report)
    assert report.graphs[0].front_ends == ("trl",)
    assert bool(report.graphs[0].outside) == large
    if large:
        assert report.count("linear_rows") >= 1
        assert all(graph.reads.calls_read == 0 for graph in report.graphs), str(report)
