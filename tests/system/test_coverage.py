"""Classes of the coverage suite that between them hold every spelling; ``make coverage`` runs them all."""

import json
from pathlib import Path

import pytest

from tests.coverage.measure import measure
from tests.coverage.run import slim

ROOT = Path(__file__).parents[2]

CLASSES = {
    "causal": (
        "GPT2LMHeadModel GPTJForCausalLM GPTNeoXForCausalLM LlamaForCausalLM MistralForCausalLM MixtralForCausalLM Qwen2ForCausalLM"
        " Qwen2MoeForCausalLM Qwen3NextForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM PhiForCausalLM"
        " Phi3ForCausalLM OlmoForCausalLM Olmo2ForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM GlmForCausalLM"
        " GraniteForCausalLM CohereForCausalLM FalconForCausalLM MambaForCausalLM Mamba2ForCausalLM JambaForCausalLM"
        " BambaForCausalLM BloomForCausalLM OPTForCausalLM CTRLLMHeadModel CodeGenForCausalLM Llama4ForCausalLM"
        " HunYuanDenseV1ForCausalLM NanoChatForCausalLM"
    ),
    "masked": "BertForMaskedLM RobertaForMaskedLM MPNetForMaskedLM SqueezeBertForMaskedLM ModernBertForMaskedLM",
    "seq2seq": "T5ForConditionalGeneration BartForConditionalGeneration",
    "speech": "WhisperForConditionalGeneration",
    "image": "ViTForImageClassification CLIPForImageClassification ConvNextForImageClassification",
}
FAST = {  # a class of each kind of block; the others run under make test-all
    "GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "DeepseekV3ForCausalLM",
    "CohereForCausalLM", "FalconForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration", "WhisperForConditionalGeneration",
    "ViTForImageClassification",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if name in FAST else [pytest.mark.slow])
        for kind, names in CLASSES.items()
        for name in names.split()
    ],
)
def test_class(name, kind):
    row = measure(name, kind)
    assert row["status"] == "ok", row
    assert not row["more_graphs"], row
    assert not any(numbers["missing"] for numbers in row["kinds"].values()), row


def test_the_page_is_of_the_rows_that_are_shipped():
    """And those are as they are written now: no zeros."""
    pytest.importorskip("matplotlib")
    from tests.coverage.summary import ordered, page

    rows = [json.loads(line) for line in (ROOT / "bench/results/coverage.jsonl").read_text().splitlines()]
    assert page(ordered(rows)) == (ROOT / "COVERAGE.md").read_text()
    assert [row for row in rows if slim(row) != row] == []


def test_a_class_is_one_line_and_says_what_differs():
    pytest.importorskip("matplotlib")
    from tests.coverage.summary import page

    found = {"sites": {"rope/fused": 2, "rope/near": 1}, "kinds": {"rotary": {"seen": 3, "in_graphs": 2, "missing": 1}}}
    rows = [
        {"class": "A", "kind": "causal", "dtype": "bfloat16", "status": "not built", "error": "ValueError: a|b\nmore"},
        {"class": "A", "kind": "causal", "dtype": "float32", "status": "ok", **found},
        {"class": "B", "kind": "causal", "dtype": "bfloat16", "status": "ok", "sites": {"rope/fused": 2}, "kinds": {"rotary": {"seen": 2, "in_graphs": 2}}},
    ]  # fmt: skip
    assert page(rows).split("### causal\n\n")[1].splitlines()[2:] == [
        "| A | not built / ok | 0 / 2 | ValueError: a/b / missing {'rotary': 1}; left in eager by Dynamo: {'rotary': 1} |",
        "| B | ok | 2 |  |",
    ]
