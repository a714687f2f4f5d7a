"""Log-probabilities and entropy from one lm_head: spellings, casts, shifts, and what must not match."""

import pytest
import torch
import torch.nn.functional as F

from tests import policies
from tests.helpers import pairwise, rewritten
from tests.policies import HEADS, SPELLINGS, V, chosen, exp_of_log, softmax_times_log, tensors


@pairwise(name=SPELLINGS, head=HEADS, dtype=[torch.float32, torch.bfloat16])
def test_spellings(name, head, dtype):
    policies.check_spelling("token_log_probs", name, head, dtype)


@pytest.mark.parametrize("function", [policies.after_the_entropy, policies.one_row, policies.by_keywords], ids=lambda f: f.__name__)
def test_what_is_fused_or_declined_but_never_breaks(function):
    policies.check_that_it_never_breaks(function, "token_log_probs")


def test_results_are_no_views():
    policies.check_that_results_are_no_views("token_log_probs")


@pytest.mark.parametrize("wanted", [0, 1], ids=["log_probs", "entropy"])
def test_only_one_of_both_has_a_gradient(wanted):
    policies.check_one_gradient_of_both(wanted, "token_log_probs")


def test_the_shift_and_logits_that_are_returned():
    def function(x, w, t):
        logits = F.linear(x, w)
        log_p, entropy = exp_of_log(logits[:, :-1].float(), t[:, 1:])
        return log_p, entropy, logits

    inputs = tensors(torch.bfloat16)
    (log_p, entropy, logits), report = rewritten(function, **inputs)
    assert report.count("token_log_probs") == 1, str(report)
    assert report.graphs[0].deferred == ("logits",), str(report)
    expected = function(**inputs)
    torch.testing.assert_close(log_p, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected[2])


NOT_ENTROPY = {
    "of other logits": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.sin().softmax(-1) * l.log_softmax(-1)).sum(-1)),
    "at another temperature": lambda l, t: (chosen((l / 0.7).log_softmax(-1), t), exp_of_log(l / 0.8, t)[1]),
    "rows in another order": lambda l, t: (
        chosen(l.reshape(-1, V).log_softmax(-1), t.reshape(-1)), exp_of_log(l.transpose(0, 1).reshape(-1, V), t.reshape(-1))[1],
    ),
    "written between": lambda l, t: (chosen((l / 0.7).log_softmax(-1), t), exp_of_log(l.mul_(2) / 0.7, t)[1]),
    "over rows": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.softmax(-1) * l.log_softmax(-1)).sum(1)),
    "softmax over rows": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.softmax(1) * l.log_softmax(-1)).sum(-1)),
    "squared": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.log_softmax(-1) * l.log_softmax(-1)).sum(-1)),
    "energy": lambda l, t: (chosen(l.log_softmax(-1), t), (l.softmax(-1) * l).sum(-1)),
    "dim kept": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.softmax(-1) * l.log_softmax(-1)).sum(-1, keepdim=True)),
    "in float64": lambda l, t: (chosen(l.log_softmax(-1), t), -(l.softmax(-1) * l.log_softmax(-1)).sum(-1, dtype=torch.float64)),
    "probabilities too": lambda l, t: (chosen(l.log_softmax(-1), t), softmax_times_log(l, t)[1] * l.softmax(-1)[..., 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ENTROPY)
def test_what_is_no_entropy(name):
    def function(x, w, t):
        return NOT_ENTROPY[name](F.linear(x, w), t)

    inputs = tensors()
    found, report = rewritten(function, **inputs)
    assert report.count("token_log_probs") == 0, str(report)
    for ours, expected in zip(found, function(**inputs), strict=True):
        torch.testing.assert_close(ours, expected)


def test_an_entropy_without_a_gradient_stays_beside_the_loss():
    def function(x, w, t):
        logits = F.linear(x, w)
        with torch.no_grad():
            entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return chosen(logits.log_softmax(-1), t), entropy

    inputs = tensors()
    inputs["w"].requires_grad_()
    found, report = rewritten(function, **inputs)
    assert report.count("token_log_probs") == 0
    for ours, expected in zip(found, function(**inputs), strict=True):
        torch.testing.assert_close(ours, expected)
    assert not found[1].requires_grad
