"""Fixtures of the tests of fusions."""

import pytest
import torch

from fx_fusion.patterns import block_sparse_attention as pattern
from tests.structured_masks import by_blocks


@pytest.fixture
def on_cpu(monkeypatch):
    """Without Inductor FlexAttention differentiates on CPU too."""
    guard = pattern.FUSION.guard

    def lenient(query, key, value):
        why = guard(query, key, value)
        return None if why is not None and "no backward" in why else why

    monkeypatch.setattr(pattern, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(pattern, "block_sparse_attention", by_blocks)
    object.__setattr__(pattern.FUSION, "guard", lenient)
    yield
    object.__setattr__(pattern.FUSION, "guard", guard)
