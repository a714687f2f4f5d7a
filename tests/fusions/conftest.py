"""Fixtures of the tests of fusions."""

import pytest
import torch

from tests.structured_masks import structures_on_cpu


@pytest.fixture
def on_cpu():
    """Without Inductor FlexAttention differentiates on CPU too."""
    with structures_on_cpu((torch.float32,)):
        yield
