"""Models as people compile them: default options, planned for a GPU. Other tests force their fusions on, and never ask the
rules that choose."""

import pytest
import torch

import fx_fusion
from fx_fusion.graph.devices import planning_for

transformers = pytest.importorskip("transformers")
WRITTEN_OUT = ("bloom", "mpt", "gpt_neo", "gpt_neox_japanese", "xlnet", "ctrl", "openai-gpt", "deberta-v2", "fnet")
CALLED = ("llama", "gemma2", "mixtral", "gpt_oss", "bert", "t5", "bart", "whisper", "vit", "convnext", "qwen3_next", "mamba2")


@pytest.mark.parametrize("kind", [*WRITTEN_OUT, *CALLED])
def test_nothing_falls_back(kind):
    from fx_fusion.transformers_models import Sizes, built, config_of

    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    model, given, _ = built(*config_of(kind), Sizes(batch=2, length=32, layers=None, tiny=True), "cpu", torch.float32, False)
    with planning_for("NVIDIA H200"):
        report = fx_fusion.explain(model, **given)
    assert report.graphs
    assert [graph.fallback for graph in report.graphs if graph.fallback] == []
