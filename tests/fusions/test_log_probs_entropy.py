"""Log-probabilities and entropy of logits that exist."""

import pytest
import torch
import torch.nn.functional as F

from tests import policies
from tests.helpers import pairwise, reasons, rewritten
from tests.policies import HEADS, SPELLINGS, exp_of_log, tensors


@pairwise(name=SPELLINGS, head=HEADS, dtype=[torch.float32, torch.bfloat16])
def test_spellings(name, head, dtype):
    policies.check_spelling("log_probs_entropy", name, head, dtype)


@pytest.mark.parametrize("function", [policies.after_the_entropy, policies.one_row, policies.by_keywords], ids=lambda f: f.__name__)
def test_what_is_fused_or_declined_but_never_breaks(function):
    policies.check_that_it_never_breaks(function, "log_probs_entropy")


def test_results_are_no_views():
    policies.check_that_results_are_no_views("log_probs_entropy")


@pytest.mark.parametrize("wanted", [0, 1], ids=["log_probs", "entropy"])
def test_only_one_of_both_has_a_gradient(wanted):
    policies.check_one_gradient_of_both(wanted, "log_probs_entropy")


def test_slices_of_logits_stay_where_they_lie():
    def function(x, w, t):
        return exp_of_log(F.linear(x, w)[:, :-1].float() / 0.7, t[:, 1:])

    _, report = rewritten(
        function, **tensors(torch.bfloat16), options={"fusions": ["log_probs_entropy"], "select": "always"}
    )
    assert report.count("log_probs_entropy") == 0
    assert "slice" in reasons(report, "log_probs_entropy")
