"""Losses of one's own in another graph than the lm_head: behind a graph break, or compiled by themselves."""

import pytest
import torch
from torch import nn

import fx_fusion
from fx_fusion.rewrite import returned_logits
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.testing import rewriting_backend
from tests.rows import B, H, T, V, of_labels, rows_kl, small_chunks  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(returned_logits, "_FEWEST_CLASSES", 100)
    monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cuda": 0, "cpu": 0})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lm_head = nn.Embedding(50, H), nn.Linear(H, V, bias=False)

    def forward(self, ids):
        return self.lm_head(self.table(ids).tanh())


def clipped(z, t, y):
    """PPO with a term of all classes."""
    gain = (of_labels(z, y) - t[..., 0]).exp().clamp(0.8, 1.2) * t[..., 1] - 1e-3 * z.square().mean(-1)
    mask = (y > 1000).float()
    return -((gain * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


LOSSES = {
    "reverse KL": lambda z, t, y: rows_kl(z, t).mean(),
    "shifted": lambda z, t, y: (z[:, :-1].float().softmax(-1) - t[:, 1:].softmax(-1)).abs().sum(-1).mean(),
    "clipped": clipped,
    "with accuracy": lambda z, t, y: (rows_kl(z, t).sum() / 7, (z.argmax(-1) == y).float().mean()),
}
LEFT = {  # What mixes rows gets the logits.
    "over rows": lambda z, t, y: z.softmax(1).square().mean(),
    "written to": lambda z, t, y: z.mul_(2).square().mean(),
}


def results_of(model, loss_of, ids, t, y):
    model.zero_grad()
    found = loss_of(model(ids), t, y)
    found = found if isinstance(found, tuple) else (found,)
    found[0].backward()
    return [*(f.detach() for f in found), *(p.grad.clone() for p in model.parameters())]


class Broken(nn.Module):
    def __init__(self, model, loss_of):
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, ids, t, y):
        logits = self.model(ids)
        torch._dynamo.graph_break()
        return self.loss_of(logits, t, y)


@pytest.mark.parametrize("where", ["compiled by itself", "behind a break"])
@pytest.mark.parametrize("name", [*LOSSES, *LEFT])
def test_loss_in_another_graph(name, where):
    torch.manual_seed(0)
    loss_of = {**LOSSES, **LEFT}[name]
    model, t = Model(), torch.randn(B, T, V)
    backend = rewriting_backend(select="always")
    with fx_fusion.recording() as report:
        if where == "behind a break":
            broken = torch.compile(Broken(model, loss_of), backend=backend)
            model_of, ours = (lambda ids: ids), lambda ids, t, y: broken(ids, t, y)
        else:
            model_of, ours = torch.compile(model, backend=backend), torch.compile(loss_of, backend=backend)
        for _ in range(3):
            ids, y = torch.randint(0, 50, (B, T)), torch.randint(0, V, (B, T))
            model.zero_grad()
            found = ours(model_of(ids), t, y)
            found = found if isinstance(found, tuple) else (found,)
            found[0].backward()
            found = [*(f.detach() for f in found), *(p.grad.clone() for p in model.parameters())]
            torch.testing.assert_close(found, results_of(model, loss_of, ids, t, y), rtol=1e-4, atol=1e-6)
    assert report.count("linear_rows") == (name in LOSSES), str(report)
    assert ("with the lm_head of the graph that made its logits" in str(report)) == (name in LOSSES)
    if name in LOSSES:
        (graph,) = (g for g in report.graphs if "linear_rows(" in g.after)
        assert "cotangents=[]" not in graph.after


def test_logits_that_the_loss_returns():
    """They wait, as a model's own do."""
    model, t, ids = Model(), torch.randn(B, T, V), torch.randint(0, 50, (B, T))
    backend = rewriting_backend(select="always")
    compiled = torch.compile(model, backend=backend)
    loss_of = torch.compile(lambda z: (rows_kl(z, t).mean(), z.float() * 2), backend=backend)
    with fx_fusion.recording() as report:
        loss, doubled = loss_of(compiled(ids))
    assert report.count("linear_rows") == 1, str(report)
    assert type(doubled) is DeferredTensor
    torch.testing.assert_close(doubled + 0, model(ids) * 2)
    torch.testing.assert_close(loss, rows_kl(model(ids), t).mean())
