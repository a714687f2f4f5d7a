"""Classes of the coverage suite that between them hold every spelling; ``make coverage`` runs them all."""

import pytest

from tests.coverage.measure import measure

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
