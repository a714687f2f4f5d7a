"""Cross-entropy of logits that exist: what fires, and in which dtype they are read."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import reasons, rewritten
from tests.losses import H, M, V, compare, head, target, x


def test_all_targets_ignored():
    nothing = torch.full((M,), -100)
    compare(lambda l, t: F.cross_entropy(l, t), x, nothing, expect=("cross_entropy",))


def test_no_logits():
    empty = torch.zeros(0, H)
    nothing = torch.zeros(0, dtype=torch.long)
    compare(lambda l, t: F.cross_entropy(l, t, reduction="sum"), empty, nothing, expect=("cross_entropy",))


def test_logits_used_in_the_graph_keep_them():
    def with_penalty(x, head, target):
        logits = F.linear(x, head)
        return F.cross_entropy(logits, target) + 1e-2 * logits.square().mean()

    report = compare(with_penalty, x, head, target, expect=("cross_entropy",))
    assert report.count("linear_cross_entropy") == 0


def test_accuracy_in_the_graph_keeps_them():
    def with_accuracy(x, head, target):
        logits = F.linear(x, head)
        return F.cross_entropy(logits, target), (logits.argmax(-1) == target).float().mean()

    (loss, accuracy), report = rewritten(with_accuracy, x, head, target)
    report.assert_fused(cross_entropy=1, linear_cross_entropy=0)
    expected = with_accuracy(x, head, target)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(accuracy, expected[1])


def test_logits_alone_are_read_in_their_own_dtype_through_views():
    """A graph that begins behind the lm_head (a break between it and the loss): no float32 copy of the logits."""

    def loss(logits, target):
        logits = logits.float()
        return F.cross_entropy(logits.view(-1, V), target.view(-1))

    logits = torch.randn(2, M // 2, V).bfloat16()
    report = compare(loss, logits, target.view(2, -1), expect=("cross_entropy",))
    assert f"float32[{M}, {V}]" not in report.graphs[0].after
    assert f"float32[2, {M // 2}, {V}]" not in report.graphs[0].after


def test_keyword_arguments_of_a_gathered_loss():
    def loss(logits, target):
        chosen = torch.squeeze(input=logits.gather(-1, target.unsqueeze(-1)), dim=-1)
        return chosen - torch.logsumexp(input=logits, dim=-1)

    logits = x @ head.t()
    found, report = rewritten(loss, logits, target, options={"select": "always"})
    assert report.count("cross_entropy") == 1, str(report)
    torch.testing.assert_close(found, loss(logits, target))


def test_a_slice_of_logits_is_left_to_inductor():
    def loss(logits, target):
        return F.cross_entropy(logits[:, :-1].float().reshape(-1, V), target[:, 1:].reshape(-1))

    logits = torch.randn(2, M // 2, V).bfloat16()
    report = compare(loss, logits, target.view(2, -1), expect=())
    assert "slice of larger logits" in reasons(report, "cross_entropy")


def test_a_log_softmax_that_widens_reads_logits_in_their_own_dtype():
    def loss(logits, target):
        return F.nll_loss(F.log_softmax(logits, -1, dtype=torch.float32), target)

    logits = torch.randn(M, V).bfloat16()
    report = compare(loss, logits, target, expect=("cross_entropy",))
    assert f"float32[{M}, {V}]" not in report.graphs[0].after


READ_OTHERWISE = {
    "weights of classes": lambda log_p, t: -(log_p * torch.linspace(0, 1, 4096)).sum(-1).mean(),
    "smoothed by hand": lambda log_p, t: (-log_p).gather(-1, t[:, None]).sum() - 0.1 * log_p.mean(),
    "two classes a row": lambda log_p, t: -log_p.gather(-1, torch.stack([t, t + 1], -1)).mean(),
}


@pytest.mark.parametrize("name", READ_OTHERWISE)
def test_log_probabilities_that_are_read_otherwise_are_named(name):
    def loss(logits, target):
        return READ_OTHERWISE[name](F.log_softmax(logits, -1), target)

    report = compare(loss, torch.randn(3, 4096), torch.tensor([1, 4000, 7]), expect=())
    assert [s.status for s in report.sites if s.fusion == "cross_entropy"] == ["near"]
    assert "reads all log-probabilities" in reasons(report, "cross_entropy")


def test_soft_targets_beside_logits_that_come_in_are_named_by_their_own_fusion():
    def loss(logits):
        log_p = F.log_softmax(logits, -1)
        return -(log_p * log_p.detach().exp()).sum(-1).mean()

    _, report = rewritten(loss, torch.randn(3, 4096, requires_grad=True))
    assert "expected linear, found an input" in reasons(report, "linear_soft_cross_entropy")
    assert not reasons(report, "cross_entropy")


def test_log_probabilities_that_a_loss_or_an_entropy_reads_are_not_named_again():
    def loss(logits, target):
        log_p = F.log_softmax(logits, -1)
        return log_p.gather(-1, target[:, None]).sum() + (log_p.exp() * log_p).sum(-1).mean()

    def divergence(logits, teacher):
        return F.kl_div(F.log_softmax(logits, -1), teacher.softmax(-1), reduction="batchmean")

    for function, other in ((loss, torch.tensor([1, 4000, 7])), (divergence, torch.randn(3, 4096))):
        _, report = rewritten(function, torch.randn(3, 4096, requires_grad=True), other)
        assert "reads all log-probabilities" not in reasons(report, "cross_entropy")
