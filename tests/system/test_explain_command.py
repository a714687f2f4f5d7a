"""``python -m fx_fusion explain TARGET``: models of every kind, sizes, and a GPU that is not here."""

import contextlib
import json
import re
import subprocess
import sys

import pytest
import torch

import fx_fusion
from fx_fusion.backend import compile_graph
from fx_fusion.commands import explain_command
from fx_fusion.cost import gpus
from fx_fusion.cost.table import rates_of_tables, tables_for
from fx_fusion.errors import OptionError, TargetError
from fx_fusion.graph.devices import planning_for
from fx_fusion.targets import target_of
from fx_fusion.transformers_models import Sizes

pytest.importorskip("transformers")
NOTHING = {"batch": None, "length": None, "layers": None, "tiny": False, "dtype": None, "mask": None}
OUTPUT = {"html": None, "json": None, "diff": False, "fusion": None, "why": None, "require": ()}
ON_A_GPU = {"device": "cuda", "gpu": None} if not torch.cuda.is_available() else {"device": None, "gpu": "h200"}


def explained(capsys, name, options=None, output=None, **given):
    where = {name: given.pop(name, None) for name in ("device", "gpu")} | {"download": given.pop("download", False)}
    code = explain_command(name, sizes={**NOTHING, **given}, options=options or {}, output={**OUTPUT, **(output or {})}, **where)
    return code, capsys.readouterr()


def test_planned_for_a_gpu_that_is_not_here(capsys, tmp_path):
    file = tmp_path / "report.json"
    code, said = explained(capsys, "llama", layers=2, output={"json": str(file)}, **ON_A_GPU)
    assert code == 0
    assert "planned for NVIDIA H200, by its table" in said.out
    assert "on CPU" not in said.out
    assert re.search(r"^fused +add_rms_norm +4 +0\.\d+ ", said.out, re.M), "the column of what is saved"
    sites = json.loads(file.read_text())["sites"]
    norms = [site["estimate"] for site in sites if site["fusion"] == "add_rms_norm" and site["status"] == "fused"]
    assert len(norms) == 4
    assert all(estimate["source"] == "table" for estimate in norms)
    formulas = [s["estimate"] for s in sites if s["estimate"].get("source") == "formula"]
    assert all(estimate["ours"] < 1000 for estimate in formulas), "as fast as a GPU's memory, not a CPU's"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_one_is_planned_for(capsys):
    """Plan for a GPU: who asks what a model would gain trains it on one."""
    _, said = explained(capsys, "llama", layers=1)
    assert "there is no GPU here: planned for an H200" in said.err
    assert "planned for NVIDIA H200" in said.out
    _, said = explained(capsys, "llama", layers=1, device="cpu")
    assert "planned" not in said.out + said.err
    assert "on CPU Inductor compiles this as well" in said.out


@pytest.mark.parametrize(
    ("name", "gpu", "table"),
    [
        ("h200", "NVIDIA H200", "NVIDIA H200"), ("NVIDIA H200", "NVIDIA H200", "NVIDIA H200"),
        ("nvidia_h200", "NVIDIA H200", "NVIDIA H200"), ("h100", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"), ("a100", "NVIDIA A100 80GB", "NVIDIA H100 80GB HBM3"),
        ("a10", "NVIDIA A10", "NVIDIA H100 80GB HBM3"), ("rtx4090", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3"),
        ("B200", "NVIDIA B200", "NVIDIA H200"), ("RTX-4090", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3"),
    ],
)  # fmt: skip
def test_gpus_by_name(name, gpu, table):
    assert gpus.named(name, rates_of_tables()) == gpu
    assert tables_for(gpu, torch.device("meta"))[0] == table


@pytest.mark.parametrize("name", ["", "a", "40", "v100", "gb200"])
def test_no_gpu_by_a_part_of_a_word(name):
    with pytest.raises(OptionError, match="no GPU is known as"):
        gpus.named(name, rates_of_tables())


def test_a_gpu_without_a_table(capsys):
    """Its neighbor's decides, and times are of its own memory: half as fast, twice as long."""
    _, said = explained(capsys, "llama", layers=1, gpu="a100")
    assert "planned for NVIDIA A100 80GB, by the table of an NVIDIA H100 80GB HBM3" in said.out
    saved = {}
    for gpu in ("a100", "h200"):
        _, said = explained(capsys, "llama", layers=1, gpu=gpu)
        saved[gpu] = float(re.search(r"about ([\d.]+) ms a step less", said.out)[1])
    assert 1.8 < saved["a100"] / saved["h200"] < 3
    with pytest.raises(OptionError, match=r"no GPU is known as 'z99'.*NVIDIA H100 .*, NVIDIA H200"):
        explained(capsys, "llama", gpu="z99")
    with pytest.raises(OptionError, match="one of them"):
        explained(capsys, "llama", gpu="h200", device="cpu")


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("none", "mask: causal (k <= q)"), ("ones", "assumes, and checks at run time: attention_mask is all ones"),
        ("padded", "mask: causal, keys shown by attention_mask"), ("packed", "mask: documents of packed_sequence_mask"),
    ],
)  # fmt: skip
def test_masks(mask, said, capsys):
    assert said in explained(capsys, "llama", layers=1, gpu="h200", mask=mask)[1].out


def test_a_mask_that_a_model_does_not_take(capsys):
    with pytest.raises(TargetError, match=r"^--mask ones: ViTForImageClassification takes no attention_mask$"):
        explained(capsys, "vit", layers=1, mask="ones")
    with pytest.raises(TargetError, match=r"^--mask is for models of transformers; train.py:make gives its own arguments$"):
        explained(capsys, "train.py:make", mask="padded")
    assert "not assumed, as it did not hold" in explained(capsys, "bert", tiny=True, mask="padded", length=64)[1].out


@pytest.mark.parametrize(("kind", "shape"), [("llama", (4, 2048)), ("gpt2", (4, 1024)), ("vit", (4, 3, 224, 224))])
def test_usual_sizes(kind, shape):
    target = target_of(kind, Sizes(None, None, 1, False), device="cpu", dtype=torch.bfloat16)
    assert next(iter(target.kwargs.values())).shape == shape


def test_a_model_of_the_hub(capsys, monkeypatch):
    """Its config is enough; the local cache is asked first, and nothing is fetched unless that was allowed."""
    asked = []

    def get_config_dict(name, *, local_files_only):
        asked.append((name, local_files_only))
        if name.startswith("nobody"):
            raise OSError("it is not a local folder")
        return {"model_type": "llama", "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}, {}

    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", get_config_dict)
    assert "model.layers.{0-1}" in explained(capsys, "meta-llama/Llama-3.2-1B", gpu="h200")[1].out
    with pytest.raises(TargetError, match=r"its config is not in the local cache; --download fetches it: .*not a local folder"):
        explained(capsys, "nobody/nothing")
    with pytest.raises(TargetError, match="it could not be downloaded"):
        explained(capsys, "nobody/nothing", download=True)
    assert asked == [("meta-llama/Llama-3.2-1B", True), ("nobody/nothing", True), ("nobody/nothing", False)]


def test_what_is_planned_is_not_run(monkeypatch):
    """Ops for a GPU that is not here: the model's own ones run. And nothing can be measured on it."""
    norm = torch.nn.RMSNorm(4096)
    x = torch.randn(64, 4096)

    def not_for_this_machine(*arguments):
        compile_graph(*arguments)

        def run(*inputs):
            raise AssertionError("what is planned was run")

        return run

    monkeypatch.setattr("fx_fusion.explaining.compile_graph", not_for_this_machine)
    with planning_for("NVIDIA H200"):
        report = fx_fusion.explain(norm, x, options={"select": "always"})
        assert report.count("rms_norm") == 1
        with pytest.raises(OptionError, match="times this machine"):
            fx_fusion.explain(norm, x, options={"select": "measure"})
    assert report.graphs[0].planned_for == "NVIDIA H200"
    again = fx_fusion.Report.from_json(report.to_json())
    assert again.graphs[0].planned_for == "NVIDIA H200"
    with pytest.raises(AssertionError, match="was run"):
        fx_fusion.explain(norm, x, options={"select": "always"})
    monkeypatch.undo()
    assert fx_fusion.explain(norm, x).graphs[0].planned_for == ""


# The main input of each, and the class that is taken where there are several.
KINDS = {
    "gpt2": ("GPT2LMHeadModel", "input_ids"), "bert": ("BertForMaskedLM", "input_ids"),
    "t5": ("T5ForConditionalGeneration", "input_ids"), "vit": ("ViTForImageClassification", "pixel_values"),
    "resnet": ("ResNetForImageClassification", "pixel_values"),
    "whisper": ("WhisperForConditionalGeneration", "input_features"),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "input_values"), "mamba": ("MambaForCausalLM", "input_ids"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind):
    """Small, with memory: what it is called with gives a loss. Full size: as many layers as asked for, without memory."""
    name, main = KINDS[kind]
    tiny = target_of(kind, Sizes(2, 16, None, True), device="cpu", dtype=torch.float32, fake=False)
    assert type(tiny.call).__name__ == name
    assert sum(p.numel() for p in tiny.call.parameters()) < 2e6
    assert set(tiny.kwargs) == {main, "labels"}
    loss = tiny.call(**tiny.kwargs).loss
    assert loss.isfinite()
    full = target_of(kind, Sizes(1, 32, 1, False), device="cpu", dtype=torch.bfloat16)
    with full.mode or contextlib.nullcontext():
        report = fx_fusion.explain(full.call, **full.kwargs, options={"select": "always"})
    assert report.graphs
    assert sum(p.numel() for p in full.call.parameters()) > 1e6


def test_the_class_that_a_config_names(tmp_path):
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_labels": 3, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = target_of(str(tmp_path), Sizes(4, 16, None, True), device="cpu", dtype=torch.float32, fake=False)
    assert type(target.call).__name__ == "BertForSequenceClassification"
    assert target.kwargs["labels"].tolist() == [0, 1, 2, 0]
    full = target_of(str(tmp_path / "config.json"), Sizes(1, 16, None, False), device="cpu", dtype=torch.float32)
    assert full.call.config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("kind", "most", "tiny"),
    [("gpt2", 1024, False), ("gpt2", 64, True), ("bert", 512, False), ("roberta", 510, False), ("opt", 2048, False), ("gptj", 2048, False)],
)
def test_a_length_that_a_model_has_no_positions_for(kind, most, tiny, capsys, monkeypatch):
    """In one line, before anything is captured: at full size a table without memory would give rows that are not there."""
    monkeypatch.setattr("fx_fusion.commands.explain", lambda *given, **named: pytest.fail("it began to work"))
    with pytest.raises(TargetError, match=rf"^--length: must be at most {most} for \w+, .*; got {most + 1}$") as raised:
        explained(capsys, kind, length=most + 1, layers=1, tiny=tiny)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["llama", "t5", "gptj", "roberta"])
def test_lengths_that_can_be(kind, capsys):
    """Angles go on, far tokens share a distance, and RoBERTa takes as many as it has rows behind the padding's."""
    length = {"roberta": 62}.get(kind, 64)
    assert explained(capsys, kind, length=length, tiny=True)[0] == 0
    if kind in ("llama", "t5"):
        assert explained(capsys, kind, length=100, tiny=True)[0] == 0


def test_large_models_say_what_is_quicker(capsys):
    _, said = explained(capsys, "llama", layers=6)
    assert "billion parameters, without memory; --layers 2 is quicker" in said.err
    _, said = explained(capsys, "llama", tiny=True)
    assert "billion" not in said.err


def test_values_that_nobody_has(tmp_path, capsys, monkeypatch):
    """A model at full size whose code asks a tensor for a value."""
    import transformers

    forward = transformers.LlamaForCausalLM.forward

    def asks(self, input_ids, labels):
        if input_ids.sum().item() > 0:
            labels = labels + 0
        return forward(self, input_ids, labels=labels)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", asks)
    with pytest.raises(TargetError, match="take --tiny"):
        explained(capsys, "llama", layers=1)
    assert explained(capsys, "llama", tiny=True)[0] == 0


def test_a_script_is_run(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.compile(torch.nn.RMSNorm(8))(torch.randn(2, 8))\nprint('it ran')\n")
    found = subprocess.run(
        [sys.executable, "-m", "fx_fusion", "explain", str(script), "--select", "always", "--require", "rms_norm=1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "it ran" in found.stdout
    assert f"`python -m fx_fusion run {script}`" in found.stderr
    with pytest.raises(TargetError, match="is a script"):
        explain_command(str(script), sizes={**NOTHING, "layers": 2}, options={}, output=OUTPUT, device=None, gpu=None)


def test_a_name_is_no_model():
    with pytest.raises(TypeError, match="takes a module or a function"):
        fx_fusion.explain("gpt2")
