"""Losses of rows that a graph returns are computed outside of it, with the loss that is made of them."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.backend import compile_graph
from fx_fusion.kernels.logits import logit_chunks
from fx_fusion.options import parse
from fx_fusion.rewrite import returned_rows
from fx_fusion.runtime import recipe
from fx_fusion.testing import eager_rest
from tests.engine.test_loss_outside import (  # noqa: F401  a fixture
    B,
    H,
    L,
    V,
    compiled_of,
    ids,
    keeps_logits,
    products,
    small_sizes,
    some,
)  # fmt: skip

counted = some != -100
advantages = torch.linspace(-1, 1, B)[:, None]


class Rows(nn.Module):
    """A language model that returns numbers of each token, as trainers of policies want them."""

    def __init__(self, returned="rows"):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = nn.Embedding(V, H), nn.Linear(H, H), nn.Linear(H, V, bias=False)
        self.returned = returned

    def forward(self, ids, targets):
        if self.returned == "views":  # the size of a slice is none that comes in
            ids, targets = ids[:, :-1], targets[:, 1:]
        mask = targets != -100
        hidden = torch.tanh(self.layer(self.table(ids)))
        if self.returned == "flat":
            hidden, targets = hidden.reshape(-1, H), targets.reshape(-1)
        z = self.head(hidden).float() / 0.9
        log_p = z.log_softmax(-1)
        picked = log_p.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        picked = (picked.reshape(-1) if self.returned == "views" else picked).view(mask.shape).masked_fill(~mask, 0)
        entropy = -(log_p.exp() * log_p).sum(-1).view(mask.shape).masked_fill(~mask, 0)
        top = (z.argmax(-1) == targets).view(mask.shape).masked_fill(~mask, False)
        loss = -picked.sum() / mask.sum()
        if self.returned == "a number":
            return loss, top
        return (picked, z) if self.returned == "logits" else (picked, entropy, top, mask, loss)


def supervised(picked, entropy, top, mask, loss):
    own = -picked.sum() / mask.sum()
    return own, [(entropy.detach().sum() / mask.sum()).item(), (top.sum() / mask.sum()).item()]


def logged_first(picked, entropy, top, mask, loss):
    metrics = [(entropy.detach().sum() / mask.sum()).item(), (top.sum() / mask.sum()).item()]
    return -picked.sum() / mask.sum(), metrics


def preferred(picked, entropy, top, mask, loss):
    chosen, rejected = picked.sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected - 0.3)).mean(), [(entropy.detach().sum() / mask.sum()).item()]


def of_a_policy(picked, entropy, top, mask, loss):
    ratio = torch.exp(picked - picked.detach())
    each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.1 * entropy
    return (each * mask).sum() / mask.sum(), [(entropy * mask).sum().item(), picked.detach().mean().item()]


def the_models_own(picked, entropy, top, mask, loss):
    return loss, [picked.detach().mean().item()]


def read_in_between(picked, entropy, top, mask, loss):
    """The rows are read, and differentiated all the same."""
    numbers = picked.tolist()
    return (picked * torch.tensor(numbers)).mean() + entropy.mean(), [sum(map(sum, numbers))]


def step(model, call, loss_of, **modes):
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, **modes) if modes else torch.enable_grad():
        loss, metrics = loss_of(*call(ids, some))
    loss.backward()
    return [loss.item(), *metrics], [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("modes", [{}, {"enabled": True}], ids=["float32", "autocast"])
@pytest.mark.parametrize("loss_of", [supervised, logged_first, preferred, of_a_policy, the_models_own, read_in_between])
def test_as_in_eager(loss_of, modes):
    """Numbers, and gradients, in call after call: whatever becomes of the logits."""
    model = Rows()
    numbers, gradients = step(model, model, loss_of, **modes)
    compiled = compiled_of(model)
    for _ in range(4):
        found, ours = step(model, compiled, loss_of, **modes)
        torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, gradients, rtol=2e-2 if modes else 1e-4, atol=1e-3 if modes else 1e-6)


@pytest.mark.parametrize("loss_of", [supervised, the_models_own])
def test_three_products(loss_of, monkeypatch):
    """The gradient of each row is known from the loss, so the logits are neither kept nor made again; what a log reads is
    computed beside it."""
    times, model = keeps_logits(monkeypatch), Rows()
    compiled = compiled_of(model)
    with fx_fusion.recording() as report:
        step(model, compiled, loss_of)
    assert products(lambda: step(model, compiled, loss_of)) == 3
    assert not times
    report.assert_fused(linear_rows=1)
    assert "losses of rows that it returns are computed outside of it" in str(report)
    assert "not recognized" not in str(report)
    assert report.graphs[0].reads.calls_taken == 2


@pytest.mark.parametrize("returned", ["rows", "flat"])
@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("loss_of", [supervised, preferred, of_a_policy])
def test_hidden_rows_have_no_logits(loss_of, keeps, returned, monkeypatch):
    """Of prompts and padding neither logits nor gradients are made; what the loss adds for them stays."""
    times, model = keeps_logits(monkeypatch, wide=keeps), Rows(returned)
    monkeypatch.setattr(logit_chunks, "_WORTH_COUNTING", 0)
    numbers, gradients = step(model, model, loss_of)
    compiled = compiled_of(model)
    for _ in range(3):
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            found, ours = step(model, compiled, loss_of)
        torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    shapes = [e.input_shapes for e in profile.function_events if e.name in ("aten::mm", "aten::addmm")]
    rows = sum(next(n for n in shape[0] if n not in (V, H)) for shape in shapes if any(V in s for s in shape))
    assert rows == int(counted.sum()) * (3 if loss_of is supervised or keeps else 4)
    assert bool(times) == (keeps and loss_of is not supervised)


def test_a_gradient_that_comes_after_all_is_known_the_next_time():
    """The entropy, which a log reads, is the last number that nothing else is made of, and is not differentiated."""
    model = Rows()
    compiled = compiled_of(model)
    for _ in range(2):
        step(model, compiled, of_a_policy)
    assert products(lambda: step(model, compiled, of_a_policy)) == 4
    with fx_fusion.recording() as report:
        for _ in range(4):
            step(model, compiled, of_a_policy)
    assert not report.graphs  # nothing is compiled any more


def test_rows_whose_gradient_somebody_keeps():
    """It has to come through their values, so the logits are read. After two calls the graph as it was captured is run."""
    model, found = Rows(), []
    compiled = compiled_of(model)
    with fx_fusion.recording() as report:
        for call in (*[compiled] * 4, model):
            picked, entropy, *_ = call(ids, some)
            picked.retain_grad()
            (picked.square().sum() + entropy.sum()).backward()
            found.append(picked.grad)
    assert "while its deferred outputs are read in call after call" in str(report)
    assert report.graphs[0].reads.calls_at_once == 2
    for gradient in found[:-1]:
        torch.testing.assert_close(gradient, found[-1])


def test_a_gradient_of_rows_that_were_read_beside_a_loss():
    """It would lack the loss, and is refused. Asked for before, it is there."""
    model = Rows()
    expected = torch.autograd.grad((rows := model(ids, some))[0].square().sum(), rows[0])
    compiled = compiled_of(model)
    picked, *_ = compiled(ids, some)
    torch.testing.assert_close(torch.autograd.grad(picked.square().sum(), picked), expected)
    picked, *_ = compiled(ids, some)
    loss = picked.square().sum()
    loss.item()
    with pytest.raises(RuntimeError, match="a loss took"):
        torch.autograd.grad(loss, picked)


@pytest.mark.parametrize("returned", ["a number", "logits"])
def test_other_graphs_stay_whole(returned):
    """One that returns a loss knows its gradients; one that returns logits beside rows defers those alone."""
    model = Rows(returned)
    compiled = compiled_of(model)
    with fx_fusion.recording() as report:
        found = compiled(ids, some)
    assert not any(graph.outside for graph in report.graphs)
    torch.testing.assert_close(found[0], model(ids, some)[0])


def aot(gm, inputs, options):
    return aot_eager(gm, list(inputs))


@pytest.mark.parametrize("rest", [eager_rest, aot], ids=["eager", "aot"])
def test_sizes_that_change(rest):
    """The graph returns no sizes: what the calls need of them is made outside."""
    model = Rows("views")
    ours = torch.compile(model, backend=functools.partial(compile_graph, options=parse(None, {"select": "always", "strict": True}), rest=rest))
    for length in (5, 6, 7):
        given = ids[:, :length], some[:, :length]
        picked, entropy, _, mask, _ = ours(*given)
        found = torch.autograd.grad(-(picked + 0.1 * entropy).sum() / mask.sum(), list(model.parameters()))
        picked, entropy, _, mask, _ = model(*given)
        expected = torch.autograd.grad(-(picked + 0.1 * entropy).sum() / mask.sum(), list(model.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("why", ["hooks", "checkpoint", "gathered"])
def test_where_the_logits_cannot_wait_the_graph_is_whole(why, monkeypatch):
    """Under hooks on what is saved (offloading), in a checkpoint, and where FSDP gathers lm_head: nothing runs in eager."""
    model = Rows()
    if why == "gathered":
        monkeypatch.setattr(returned_rows, "owner_of", lambda t: t if t is model.head.weight else None)
    numbers, gradients = step(model, model, of_a_policy)
    compiled, reads = compiled_of(model), []
    monkeypatch.setattr(recipe.Recipe, "values", lambda self: reads.append(self))

    def call(*given):
        return checkpoint(compiled, *given, use_reentrant=False) if why == "checkpoint" else compiled(*given)

    hooks = torch.autograd.graph.save_on_cpu() if why == "hooks" else contextlib.nullcontext()
    with fx_fusion.recording() as report, hooks:
        found, ours = step(model, call, of_a_policy)
    torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    assert not reads
    assert len(report.graphs) == 2, str(report)


def test_nothing_is_differentiated():
    model = Rows()
    compiled = compiled_of(model)
    with torch.no_grad():
        found = compiled(ids, some)
        torch.testing.assert_close(found, model(ids, some))
    assert not any(type(t).__name__ == "DeferredTensor" for t in found)
