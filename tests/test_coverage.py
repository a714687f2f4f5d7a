"""A few classes of the coverage suite that between them hold spellings no other test has; ``make coverage`` runs them all."""

import pytest

from tests.coverage.measure import measure

CLASSES = {
    "GPTJForCausalLM": "causal", "CTRLLMHeadModel": "causal", "CodeGenForCausalLM": "causal", "CohereForCausalLM": "causal",
    "DeepseekV3ForCausalLM": "causal", "MPNetForMaskedLM": "masked", "SqueezeBertForMaskedLM": "masked",
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_class(name):
    row = measure(name, CLASSES[name])
    assert row["status"] == "ok", row
    assert not row["more_graphs"], row
    assert not any(kind["missing"] for kind in row["kinds"].values()), row
