"""Losses over classes of which each of two processes has a part, in several chunks of rows: every rank's gradient of the input is
the sum over the ranks, of every chunk, and that of lm_head is its own part's."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ranks import on_ranks

M, V, H, CHUNK = 100, 37, 24, 16
WAYS = ("mean", "none", "rows without a target", "log-probabilities and entropy")


def worker(rank, way):
    """By name, how far gradients are from float64's, and how many chunks were added up."""
    from fx_fusion.kernels import linear_cross_entropy as loss
    from fx_fusion.kernels import token_log_probs as logp
    from fx_fusion.kernels.logits import logit_chunks

    logit_chunks.chunk_plan = lambda m, *rest: logit_chunks.Plan(rows=CHUNK, rounded_chunks=0)
    sent = []
    logit_chunks.add_up = lambda rows, group, add_up=logit_chunks.add_up: (sent.append(rows.shape[0]), add_up(rows, group))
    torch.manual_seed(0)
    x, w, b = torch.randn(M, H), torch.randn(V, H) / 4, torch.randn(V)
    target, upstream = torch.randint(0, V, (M,)), torch.randn(M)
    if way == "rows without a target":
        logit_chunks._WORTH_COUNTING = 1
        target[:30] = -100
    most = -(-V // 2)
    own = slice(rank * most, min(V, (rank + 1) * most))
    part = dist.group.WORLD.group_name, own.start, V, 2
    options, needs = (-100, 0.0, 0.0, 1.0), [True] * 3
    if way == "none":
        found = loss._bwd_rows(upstream, x, w[own], b[own], target, None, *options, needs, False, *part)
    elif "log" in way:
        found = logp._bwd_of_part(upstream, upstream.flip(0), x, w[own], b[own], target, 0.0, 1.0, *part, needs)
    else:
        _, factors, dx, dw, db, _ = loss._fwd(x, w[own], b[own], target, None, "mean", *options, needs, False, False, *part)
        found = dx * factors[0], dw * factors[1], db * factors[0]
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    logs = F.log_softmax(F.linear(*exact), -1)
    losses = F.nll_loss(logs, target, reduction="none")
    entropy = -(logs.exp() * logs).sum(-1)
    total = {
        "none": lambda: losses @ upstream.double(),
        "log-probabilities and entropy": lambda: -losses @ upstream.double() + entropy @ upstream.flip(0).double(),
    }.get(way, lambda: losses.sum() / (target >= 0).sum())
    total().backward()
    wanted = exact[0].grad, exact[1].grad[own], exact[2].grad[own]
    errors = [float((got - right).norm() / right.norm()) for got, right in zip(found, wanted, strict=True)]
    return dict(zip(("x", "lm_head", "bias"), errors, strict=True)), sent


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_several_chunks(way):
    rows = 70 if way == "rows without a target" else M
    for errors, sent in on_ranks(worker, way).values():
        assert all(error < 2e-6 for error in errors.values()), errors
        assert sum(sent) == rows
        assert len(sent) == -(-rows // CHUNK)
