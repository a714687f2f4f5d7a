"""A loss outside of the compiled model, ``defer_outputs="all"``: F.cross_entropy of logits that nobody has read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_fusion
from fx_fusion.errors import OptionError, StaleTensorError
from fx_fusion.kernels.logits import logit_chunks
from fx_fusion.rewrite import loss_outside
from tests.helpers import rewriting_backend, tiny_llama, tokens

B, L, H, V = 3, 8, 16, 4100
ids = torch.randint(0, V, (B, L), generator=torch.Generator().manual_seed(1))
some = ids.masked_fill(torch.arange(L) < 3, -100)
of_classes = torch.rand(V, generator=torch.Generator().manual_seed(2)) + 0.5


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Few logits are many, and are made in chunks of a few rows."""
    monkeypatch.setattr(loss_outside, "_FEWEST_LOGITS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", {"cpu": (5 * V * 4,) * 2, "cuda": (5 * V * 4,) * 2})


class Model(nn.Module):
    """An embedding, a layer and a head; ``wide``: the model itself casts the logits to float32."""

    def __init__(self, bias=False, wide=False, more=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = nn.Embedding(V, H), nn.Linear(H, H), nn.Linear(H, V, bias=bias)
        self.wide, self.more = wide, more

    def forward(self, ids):
        hidden = torch.tanh(self.layer(self.table(ids)))
        logits = self.head(hidden)
        logits = logits.float() if self.wide else logits
        return (logits, hidden) if self.more else logits


def compiled_of(model, **options):
    return torch.compile(model, backend=rewriting_backend(defer_outputs="all", **options))


def trained(model, call, loss_of, dtype=None):
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = loss_of(call(ids))
    loss.sum().backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def check(model, loss_of, *, taken=1, read=0, rtol=1e-5, atol=1e-6, dtype=None, call=None):
    """As eager; whether the loss took what the logits are made of, and whether they were read."""
    expected, gradients = trained(model, call or model, loss_of, dtype)
    torch._dynamo.reset()
    with fx_fusion.recording() as report:
        found, ours = trained(model, compiled_of(model), loss_of, dtype)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=rtol, atol=atol)
    graph = report.graphs[0]
    assert (graph.reads.calls_taken, graph.reads.calls_read) == (taken, read), str(report)
    assert len(graph.deferred) == 1
    return report


LOSSES = {
    "rows": lambda z: F.cross_entropy(z.view(-1, V), ids.view(-1)),
    "module": lambda z: nn.CrossEntropyLoss(ignore_index=-100)(z.reshape(-1, z.size(-1)), some.reshape(-1)),
    "shifted": lambda z: F.cross_entropy(z[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1)),
    "as transformers": lambda z: F.cross_entropy(z.float()[..., :-1, :].contiguous().view(-1, V), some[..., 1:].reshape(-1)),
    "last": lambda z: F.cross_entropy(z[:, -1], ids[:, -1]),
    "transposed": lambda z: F.cross_entropy(z.transpose(1, 2), some),
    "permuted": lambda z: F.cross_entropy(z.permute(0, 2, 1), ids, reduction="none"),
    "sum": lambda z: F.cross_entropy(z.flatten(0, 1), some.flatten(), reduction="sum") / 7,
    "none": lambda z: (F.cross_entropy(z.view(-1, V), ids.view(-1), reduction="none") * torch.linspace(0, 1, B * L)).sum(),
    "smoothing": lambda z: F.cross_entropy(z.view(-1, V), some.view(-1), label_smoothing=0.1),
    "weights": lambda z: F.cross_entropy(z.view(-1, V), ids.view(-1), of_classes, ignore_index=5),
    "input by name": lambda z: F.cross_entropy(input=z.view(-1, V), target=ids.view(-1)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_spellings(name):
    check(Model(), LOSSES[name])


@pytest.mark.parametrize("kind", [{"bias": True}, {"wide": True}], ids=["bias", "float32 in the model"])
def test_heads(kind):
    report = check(Model(**kind), LOSSES["module"])
    assert f"{L}, {V}]" not in report.graphs[0].after, "no logits"
    assert "a loss outside took what they are made of in 1" in str(report)


def test_bfloat16_and_autocast():
    check(Model().bfloat16(), LOSSES["rows"], rtol=2e-2, atol=2e-3)
    check(Model(), LOSSES["rows"], rtol=2e-2, atol=2e-3, dtype=torch.bfloat16)


def test_another_result_of_the_model_is_there():
    check(Model(more=True), lambda results: LOSSES["rows"](results[0]) + results[1].square().mean())


def test_transformers_without_labels():
    model, given = tiny_llama(vocab_size=V), tokens(2, 12, V)

    def loss_of(out):
        return F.cross_entropy(out.logits[:, :-1].reshape(-1, V), given[:, 1:].reshape(-1))

    model.zero_grad()
    expected = loss_of(model(input_ids=given))
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with fx_fusion.recording() as report:
        compiled = compiled_of(model, select="always")
        for _ in range(2):
            model.zero_grad()
            loss = loss_of(compiled(input_ids=given))
            loss.backward()
    torch.testing.assert_close(loss, expected)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
    assert report.graphs[0].reads.calls_taken == 2
    assert report.count("add_rms_norm") == 4, "the input of the head is made by an op of ours"


READS = {
    "log_softmax": lambda z: -z.log_softmax(-1)[..., 0].mean(),
    "temperature": lambda z: F.cross_entropy((z / 2).view(-1, V), ids.view(-1)),
    "narrower": lambda z: F.cross_entropy(z.half().float().view(-1, V), ids.view(-1)),
    "float64": lambda z: F.cross_entropy(z.double().view(-1, V), ids.view(-1)),
    "some classes": lambda z: F.cross_entropy(z[..., :4000].reshape(-1, 4000), ids.clamp(max=3999).view(-1)),
    "rows by indices": lambda z: F.cross_entropy(z.view(-1, V)[torch.tensor([1, 3])], ids.view(-1)[[1, 3]]),
    "classes as rows": lambda z: F.cross_entropy(z.reshape(-1, B * L), torch.zeros(V, dtype=torch.long)),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, V), F.one_hot(ids.view(-1), V).float()),
    "old arguments": lambda z: F.cross_entropy(z.view(-1, V), ids.view(-1), size_average=False),
    "written to": lambda z: F.cross_entropy(z.mul(2).view(-1, V), ids.view(-1)),
}


@pytest.mark.parametrize("name", READS)
def test_what_else_reads_them_gets_the_models_own(name):
    check(Model(), READS[name], taken=0, read=1, rtol=1e-4)


def test_without_its_gradient_nothing_is_trained():
    """A loss of detached logits has none."""
    model = Model()
    loss = F.cross_entropy(compiled_of(model)(ids).detach().view(-1, V), ids.view(-1))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, LOSSES["rows"](model(ids)).detach())


def test_accuracy_beside_the_loss():
    def loss_of(z):
        loss = LOSSES["rows"](z)
        assert (z.argmax(-1) == model(ids).argmax(-1)).all()
        return loss

    model = Model()
    check(model, loss_of, read=1)


def test_two_losses_of_the_same_logits():
    check(Model(), lambda z: LOSSES["rows"](z) + LOSSES["shifted"](z))
    check(Model(), lambda z: LOSSES["rows"](z) + z.logsumexp(-1).square().mean(), read=1, rtol=1e-4)
    check(Model(), lambda z: z.logsumexp(-1).square().mean() + LOSSES["rows"](z), taken=0, read=1, rtol=1e-4)


def test_micro_batches_and_steps_of_an_optimizer():
    losses = []
    for ours in (False, True):
        model = Model()
        call = compiled_of(model) if ours else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            for rows in (slice(0, 2), slice(2, 3)):
                loss = F.cross_entropy(call(ids[rows]).flatten(0, 1), some[rows].flatten()) / 2
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(torch.stack(losses[:6]), torch.stack(losses[6:]))


def test_a_loss_after_the_step_says_so():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    logits = compiled_of(model)(ids)
    LOSSES["rows"](logits).backward()
    optimizer.step()
    with pytest.raises(StaleTensorError, match="before an optimizer step"):
        LOSSES["rows"](logits)


def test_errors_are_those_of_pytorch():
    logits = compiled_of(Model())(ids)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(logits.view(-1, V), ids.view(-1)[1:])
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(logits.view(-1, V), ids.view(-1) + V)


@pytest.mark.parametrize("why", ["default", "no gradient", "small", "read in the graph"])
def test_logits_are_there_at_once(why, monkeypatch):
    if why == "small":
        monkeypatch.setattr(loss_outside, "_FEWEST_LOGITS", {"cpu": 2**24})
    model = Model()
    function = (lambda i: model(i) * 2) if why == "read in the graph" else model
    options = {} if why == "default" else {"defer_outputs": "all"}
    with fx_fusion.recording() as report, torch.set_grad_enabled(why != "no gradient"):
        logits = torch.compile(function, backend=rewriting_backend(**options))(ids)
    assert type(logits) is torch.Tensor
    assert not report.graphs[0].deferred
    assert ("returns logits, which nothing in it reads" in str(report)) == (why == "default"), str(report)


def test_a_linear_layer_of_one_number_is_no_head():
    """``F.linear`` of two vectors has no dims, and no classes."""
    x, w = torch.randn(8), torch.randn(8, requires_grad=True)
    found = torch.compile(lambda x, w: F.linear(x, w), backend=rewriting_backend())(x, w)
    torch.testing.assert_close(found, torch.dot(x, w))


def test_lengths_that_change():
    model = Model()
    compiled = torch.compile(model, backend=rewriting_backend(defer_outputs="all"), dynamic=True)
    for length in (8, 5, 3):
        given = ids[:, :length]
        loss = F.cross_entropy(compiled(given).reshape(-1, V), given.reshape(-1))
        torch.testing.assert_close(loss, F.cross_entropy(model(given).reshape(-1, V), given.reshape(-1)))


def test_a_loss_that_is_compiled_by_itself_reads_them():
    """Its graph begins with logits."""
    model = Model()
    loss_of = torch.compile(LOSSES["rows"], backend=rewriting_backend())
    check(model, loss_of, taken=0, read=1, call=model)


def test_an_option_that_is_none_of_these():
    with pytest.raises(OptionError, match="defer_outputs"):
        torch.compile(Model(), backend="fx_fusion", options={"defer_outputs": "some"})(ids)
