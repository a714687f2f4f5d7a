"""A loss outside of the compiled model: F.cross_entropy of logits that nobody has read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.errors import OptionError, StaleTensorError
from fx_fusion.kernels import linear_rows as linear_rows_kernel
from fx_fusion.kernels.logits import logit_chunks
from fx_fusion.patterns import linear_rows
from fx_fusion.patterns.sites import head
from fx_fusion.rewrite import returned_logits
from fx_fusion.runtime import reads
from tests.helpers import rewriting_backend, tiny_llama, tokens

B, L, H, V = 3, 8, 16, 4100
ids = torch.randint(0, V, (B, L), generator=torch.Generator().manual_seed(1))
some = ids.masked_fill(torch.arange(L) < 3, -100)
of_classes = torch.rand(V, generator=torch.Generator().manual_seed(2)) + 0.5


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Few logits are many, and are made in chunks of a few rows."""
    monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(returned_logits, "_FEWEST_CLASSES", V)
    monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", {"cpu": (5 * V * 4,) * 2, "cuda": (5 * V * 4,) * 2})


def keeps_logits(monkeypatch, wide=True):
    """Let x be wide: losses of rows whose gradients are not known keep the logits. Returns a list with an item for each."""
    kept, run = [], linear_rows_kernel._kept
    for module in (linear_rows, head):
        monkeypatch.setattr(module, "again_takes_longer", lambda *given: wide)
    monkeypatch.setattr(linear_rows_kernel, "_kept", lambda *given: kept.append(1) or run(*given))
    return kept


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
    return torch.compile(model, backend=rewriting_backend(**options))


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


def z_loss(z):
    return z.logsumexp(-1).square().mean()


def unread(z):
    """A product with the logits reads them."""
    return (z.float() @ of_classes / V).square().mean()


def each_of(z, y=some, *more, **options):
    return F.cross_entropy(z.view(-1, V), y.view(-1), *more, reduction="none", **options)


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
    "temperature": lambda z: F.cross_entropy((z / 2).view(-1, V), ids.view(-1)),
    "scale": lambda z: F.cross_entropy((3 * z.mul(0.5)).float().view(-1, V), ids.view(-1)),
    "a tensor as temperature": lambda z: F.cross_entropy((z / torch.tensor(2.0)).view(-1, V), ids.view(-1)),
    "some classes": lambda z: F.cross_entropy(z[..., :4000].reshape(-1, 4000), ids.clamp(max=3999).view(-1)),
    "old arguments": lambda z: F.cross_entropy(z.view(-1, V), ids.view(-1), size_average=False) / 7,
    "z-loss": lambda z: z_loss(z),
    "with a z-loss": lambda z: F.cross_entropy(z.view(-1, V), ids.view(-1)) + 1e-2 * z_loss(z),
    "focal": lambda z: ((1 - (-each_of(z)).exp()) ** 2 * each_of(z)).mean(),
    "smoothing, weights": lambda z: each_of(z, some, of_classes, label_smoothing=0.1).mean(),
    "rows in chunks": lambda z: sum(F.cross_entropy(z[:, i : i + 2].flatten(0, 1), ids[:, i : i + 2].flatten()) for i in (0, 2, 4, 6)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_spellings(name):
    check(Model(), LOSSES[name])


def of_sequences(each):
    """Its gradient depends on the losses of all rows of a sequence, as that of preferences does."""
    return -F.logsigmoid(each.view(B, L).sum(1) / 10).mean()


OF_ROWS = {
    "none": lambda z: of_sequences(each_of(z, ids)),
    "some": lambda z: of_sequences(each_of(z)),
    "transposed": lambda z: of_sequences(F.cross_entropy(z.transpose(1, 2), ids, reduction="none")),
    "smoothing, weights": lambda z: of_sequences(each_of(z, some, of_classes, label_smoothing=0.1)),
    "temperature": lambda z: of_sequences(each_of(z / 2, ids)),
    "log-probabilities": lambda z: of_sequences(-z.log_softmax(-1).gather(-1, ids[..., None])),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ROWS)
def test_losses_of_rows_whose_logits_are_kept(name, monkeypatch):
    """What a GPU does where lm_head is wide: one product less than to make them again."""
    kept = keeps_logits(monkeypatch)
    check(Model(bias="some" in name), OF_ROWS[name], rtol=1e-4, atol=1e-5)
    assert kept == [1]


def test_only_one_of_several_losses_keeps_the_logits(monkeypatch):
    kept = keeps_logits(monkeypatch)
    check(Model(), lambda z: sum(OF_ROWS["none"](z) for _ in range(3)), rtol=1e-4, atol=1e-5)
    assert kept == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_class_weights_of_another_dtype_are_an_error_as_in_eager(dtype):
    for call in (Model(), compiled_of(Model())):
        z = call(ids)
        with pytest.raises(RuntimeError, match="expected scalar type"):
            F.cross_entropy(z.view(-1, V), ids.view(-1), of_classes.to(dtype))


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


@pytest.mark.parametrize("weighed", [False, True], ids=["mean", "num_items_in_batch"])
def test_a_head_that_is_compiled_alone(weighed):
    """All else is eager, transformers' loss too."""
    model, given = tiny_llama(vocab_size=V), tokens(2, 12, V)
    more = {"num_items_in_batch": torch.tensor(17)} if weighed else {}
    expected = model(input_ids=given, labels=given, **more).loss
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.lm_head.forward = torch.compile(model.lm_head.forward, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        loss = model(input_ids=given, labels=given, **more).loss
        loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients, rtol=1e-4, atol=1e-6)
    assert report.graphs[0].reads.calls_taken == 1


READS = {
    "a product": lambda z: unread(z),
    "float64": lambda z: F.cross_entropy(z.double().view(-1, V), ids.view(-1)),
    "rows by indices": lambda z: F.cross_entropy(z.view(-1, V)[torch.tensor([1, 3])], ids.view(-1)[[1, 3]]),
    "classes as rows": lambda z: F.cross_entropy(z.reshape(-1, B * L), torch.zeros(V, dtype=torch.long)),
    "written to": lambda z: F.cross_entropy(z.mul_(2).view(-1, V), ids.view(-1)),
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
    check(model, loss_of)


def test_two_losses_of_the_same_logits():
    check(Model(), lambda z: LOSSES["rows"](z) + z_loss(z), rtol=1e-4)
    check(Model(), lambda z: z_loss(z) + LOSSES["rows"](z), rtol=1e-4)
    check(Model(), lambda z: LOSSES["rows"](z) + unread(z), taken=0, read=1, rtol=1e-4)
    check(Model(), lambda z: unread(z) + LOSSES["rows"](z), taken=0, read=1, rtol=1e-4)
    check(Model(), lambda z: LOSSES["rows"](z) + LOSSES["shifted"](z), taken=0, read=1)


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


def test_a_loss_after_the_step_is_that_of_the_logits():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    logits = compiled_of(model)(ids)
    expected = LOSSES["rows"](model(ids)).detach()
    LOSSES["rows"](logits).backward()
    optimizer.step()
    loss = LOSSES["rows"](logits)
    torch.testing.assert_close(loss.detach(), expected)
    with pytest.raises(RuntimeError, match=r"call backward\(\) before step\(\)"):
        loss.backward()


def test_errors_are_those_of_pytorch():
    logits = compiled_of(Model())(ids)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(logits.view(-1, V), ids.view(-1)[1:])
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(logits.view(-1, V), ids.view(-1) + V)


@pytest.mark.parametrize("why", ["switched off", "inference mode", "small", "few classes", "read in the graph"])
def test_logits_are_there_at_once(why, monkeypatch):
    if why == "small":
        monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cpu": 2**24})
    if why == "few classes":
        monkeypatch.setattr(returned_logits, "_FEWEST_CLASSES", V + 1)
    model = Model()
    function = (lambda i: model(i) * 2) if why == "read in the graph" else model
    options = {"defer_outputs": False} if why == "switched off" else {}
    with fx_fusion.recording() as report, torch.inference_mode(why == "inference mode"):
        logits = torch.compile(function, backend=rewriting_backend(**options))(ids)
    assert type(logits) is torch.Tensor
    assert why == "inference mode" or not report.graphs[0].deferred


def test_a_linear_layer_of_one_number_is_no_head():
    """``F.linear`` of two vectors has no dims, and no classes."""
    x, w = torch.randn(8), torch.randn(8, requires_grad=True)
    found = torch.compile(lambda x, w: F.linear(x, w), backend=rewriting_backend())(x, w)
    torch.testing.assert_close(found, torch.dot(x, w))


def test_lengths_that_change():
    model = Model()
    compiled = torch.compile(model, backend=rewriting_backend(), dynamic=True)
    for length in (8, 5, 3):
        given = ids[:, :length]
        loss = F.cross_entropy(compiled(given).reshape(-1, V), given.reshape(-1))
        torch.testing.assert_close(loss, F.cross_entropy(model(given).reshape(-1, V), given.reshape(-1)))


def test_an_option_that_is_none_of_these():
    with pytest.raises(OptionError, match="defer_outputs"):
        torch.compile(Model(), backend="fx_fusion", options={"defer_outputs": "all"})(ids)


WANTED = {
    "another loss": (unread, 0),
    "a loss that is compiled": (None, 6),
    "a second one": (lambda z: LOSSES["rows"](z) + z_loss(z), 6),
    "a second one that reads": (lambda z: LOSSES["rows"](z).clone() + unread(z), 2),
    "rows twice": (lambda z: LOSSES["rows"](z) + LOSSES["shifted"](z), 0),
    "not again": (LOSSES["rows"], 6),
    "accuracy": (lambda z: LOSSES["rows"](z) + (z.argmax(-1) == 0).sum() * 0, 6),
    "rows in two parts": (lambda z: LOSSES["last"](z) + F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, :-1].flatten()), 6),
}


@pytest.mark.parametrize("name", WANTED)
def test_logits_that_no_loss_takes_once_are_made_at_once(name):
    """From the third call on; their products are then those of the model as it is."""
    (loss_of, taken), model = WANTED[name], Model()
    loss_of = loss_of or torch.compile(LOSSES["rows"], backend=rewriting_backend())
    with fx_fusion.recording() as report:
        compiled = compiled_of(model)
        for call in range(6):
            expected = trained(model, model, WANTED[name][0] or LOSSES["rows"])
            kinds = []
            found = trained(model, lambda i, kinds=kinds: [y := compiled(i), kinds.append(type(y))][0], loss_of)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            assert (kinds == [torch.Tensor]) == (taken < 6 and call >= 2), call
    counted = next(graph for graph in report.graphs if graph.deferred).reads
    assert (counted.calls_taken, counted.calls_at_once) == (taken, 4 if taken < 6 else 0), str(report)
    assert ("made at once in 4" in str(report)) == (taken < 6)


def products(step):
    """The large products of a step."""
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        step()
    names = ("aten::mm", "aten::addmm")
    return sum(e.name in names and any(V in shape for shape in e.input_shapes) for e in profile.function_events)


def test_no_product_is_made_twice():
    """From the third call on, whatever the loss: one forward and two backward a call, of one call and of two with one loss."""
    compiled = compiled_of(Model())

    def both():
        one, other = compiled(ids), compiled(ids)
        (LOSSES["rows"](one) + LOSSES["rows"](other) + (one - other).square().mean()).backward()

    both()
    assert products(both) == 6
    torch._dynamo.reset()
    compiled = compiled_of(Model())
    loss_of = torch.compile(unread, backend="eager")
    for _ in range(2):
        loss_of(compiled(ids)).backward()
    assert products(lambda: loss_of(compiled(ids)).backward()) == 3


def test_it_is_tried_again_whether_a_loss_takes_them(monkeypatch):
    monkeypatch.setattr(reads, "AT_ONCE", 3)
    compiled, kinds = compiled_of(Model()), []
    for call in range(10):
        z = compiled(ids)
        kinds.append(type(z) is torch.Tensor)
        (unread if call < 4 else LOSSES["rows"])(z).backward()
    assert kinds == [False] * 2 + [True] * 3 + [False] * 5


def test_hooks_see_the_gradient_once():
    for loss_of in (LOSSES["rows"], z_loss, torch.compile(z_loss, backend="eager")):
        found = []
        for ours in (False, True):
            torch._dynamo.reset()
            model, seen = Model(), []
            model.head.weight.register_hook(lambda d: 2 * d)
            z = (compiled_of(model) if ours else model)(ids)
            z.register_hook(hook=lambda d, seen=seen: seen.append(d.float().norm()) or 3 * d)
            loss_of(z).backward()
            found.append((seen, [p.grad for p in model.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_step_of_another_model_changes_nothing():
    model, other = Model(), Model()
    optimizer = torch.optim.AdamW(other.parameters(), 0.1, fused=True)
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    z, before = compiled_of(model)(ids), model(ids)
    optimizer.step()
    LOSSES["rows"](z).backward()
    torch.testing.assert_close(z.detach() + 0, before.detach())


@pytest.mark.parametrize("fused", [False, True])
def test_a_head_that_is_a_view_of_a_parameter(fused):
    table = nn.Parameter(torch.randn(V + 4, H))
    layer = nn.Linear(H, H)
    compiled = torch.compile(lambda x: F.linear(torch.tanh(layer(x)), table[:V]), backend=rewriting_backend())
    optimizer = torch.optim.AdamW([table, *layer.parameters()], 0.1, fused=fused)
    x = torch.randn(B, L, H)
    z, expected = compiled(x), F.linear(torch.tanh(layer(x)), table[:V]).detach()
    LOSSES["rows"](z).backward()
    optimizer.step()
    torch.testing.assert_close(z.detach() + 0, expected)


def test_a_frozen_head_needs_no_copy():
    model = Model()
    model.head.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    compiled = compiled_of(model)
    z, expected = compiled(ids), model(ids).detach()
    LOSSES["rows"](z).backward()
    optimizer.step()
    compiled(ids)
    torch.testing.assert_close(z.detach() + 0, expected)


def test_a_step_by_hand_is_noticed():
    """Through ``.data``, by a read and by a loss; also in front of a step of an optimizer."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = compiled_of(model)
    for then in ("read", "loss", "step"):
        z = compiled(ids)
        LOSSES["rows"](z).backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
        if then == "step":
            optimizer.step()
        with pytest.raises(StaleTensorError):
            LOSSES["rows"](z) if then == "loss" else z + 0


def test_checkpoints_run_twice_alike():
    """Two checkpointed parts share a backward, and read their logits otherwise than by the loss."""
    expected = []
    for ours in (False, True):
        model = Model()
        call = compiled_of(model) if ours else model
        for _ in range(3):
            model.zero_grad()
            part = lambda i: LOSSES["rows"](call(i)) + z_loss(call(i))  # noqa: B023, E731
            sum(checkpoint(part, ids, use_reentrant=False) for _ in range(2)).backward()
        expected.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*expected, rtol=1e-4, atol=1e-6)


def test_a_second_derivative_raises():
    model = Model()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(Unread.apply(compiled_of(model)(ids)), model.head.weight, create_graph=True)


def test_two_heads_are_one_call():
    """A second head's logits are read in every call, and the first one's taken: both are wanted from the third call on."""
    model, other = Model(), nn.Linear(H, V)

    def run(i):
        hidden = torch.tanh(model.layer(model.table(i)))
        return model.head(hidden), other(hidden)

    compiled, kinds = torch.compile(run, backend=rewriting_backend()), []
    with fx_fusion.recording() as report:
        for _ in range(4):
            one, two = compiled(ids)
            kinds.append((type(one) is torch.Tensor, type(two) is torch.Tensor))
            (unread(two) + LOSSES["rows"](one)).backward()
    assert kinds == [(False, False)] * 2 + [(True, True)] * 2
    counted = report.graphs[0].reads
    assert (counted.calls, counted.calls_taken, counted.calls_at_once) == (4, 2, 2)


def test_a_hook_on_transposed_logits():
    found = []
    for ours in (False, True):
        model = Model()
        z = (compiled_of(model) if ours else model)(ids).transpose(1, 2)
        z.register_hook(lambda d: 2 * d)
        F.cross_entropy(z, some).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


class Unread(torch.autograd.Function):
    """Its gradient does not depend on the values."""

    @staticmethod
    def forward(ctx, z):
        return z.new_zeros(()) if type(z) is torch.Tensor else torch.zeros(())

    @staticmethod
    def backward(ctx, dy):
        return dy * torch.linspace(0, 1, B * L * V).view(B, L, V)


def test_hooks_on_logits_that_are_gone_when_the_gradient_comes():
    found = []
    for ours in (False, True):
        model = Model()
        z = (compiled_of(model) if ours else model)(ids)
        z.register_hook(lambda d: 2 * d)
        loss = Unread.apply(z)
        del z
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_logits_that_were_written_to_and_are_gone_when_the_gradient_comes():
    """A compiled loss reads them, and its gradient would be that of the unchanged logits. Under torch 2.11 the loss has none
    of their shape, and autograd refuses it first."""
    refused = "changed in place" if torch.__version__ >= "2.12" else "changed in place|invalid gradient"
    z = compiled_of(Model())(ids)
    z.div_(2.0)
    loss = torch.compile(z_loss, backend="aot_eager")(z)
    del z
    with pytest.raises(RuntimeError, match=refused):
        loss.backward()


@pytest.mark.parametrize("loss_of", [LOSSES["rows"], z_loss], ids=["taken", "read"])
def test_a_head_that_was_frozen_when_the_model_ran(loss_of):
    grads = []
    for call in (compiled_of, lambda model: model):
        model = Model()
        model.head.requires_grad_(False)
        z = call(model)(ids)
        model.head.requires_grad_(True)
        loss_of(z).backward()
        assert model.head.weight.grad is None
        grads.append(model.layer.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_a_loss_in_autocast_of_float32_logits():
    model = Model()
    z, expected = compiled_of(model)(ids), model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss, exact = LOSSES["rows"](z), LOSSES["rows"](expected)
    assert loss.dtype == exact.dtype
    torch.testing.assert_close(loss, exact)
    loss.backward()
    gradient = model.head.weight.grad.clone()
    model.zero_grad()
    exact.backward()
    torch.testing.assert_close(gradient, model.head.weight.grad)


def flat(model):
    """The parameters in one memory."""
    memory = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = memory[at : at + p.numel()].view_as(p)
        at += p.numel()
    return model


@pytest.mark.parametrize("in_one_memory", [False, True])
def test_a_step_that_leaves_the_head_alone(in_one_memory):
    """It has no gradient yet, or is not the optimizer's."""
    model = flat(Model()) if in_one_memory else Model()
    parameters = model.layer.parameters() if in_one_memory else model.parameters()
    optimizer = torch.optim.SGD(parameters, 0.1)
    for p in model.layer.parameters():
        p.grad = torch.ones_like(p)
    z, hidden = compiled_of(model)(ids), torch.tanh(model.layer(model.table(ids))).detach()
    expected = LOSSES["rows"](F.linear(hidden, model.head.weight)).detach()
    optimizer.step()
    loss = LOSSES["rows"](z)
    torch.testing.assert_close(loss.detach(), expected)
    torch.autograd.grad(loss, model.head.weight)


def test_parameters_without_strides_are_stepped():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    z = compiled_of(Model())(ids)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    LOSSES["rows"](z).backward()


def test_a_loss_that_is_checkpointed_alone():
    model = Model()
    z = compiled_of(model)(ids)
    loss = checkpoint(LOSSES["rows"], z, use_reentrant=False)
    z.argmax(-1)
    loss.backward()
    expected = Model()
    LOSSES["rows"](expected(ids)).backward()
    torch.testing.assert_close(model.head.weight.grad, expected.head.weight.grad)


def test_another_head_beside_logits_that_are_read():
    """A loss in the graph, of which the logits are read in each call: they are computed beside it from the third call on, also
    where the graph returns another head's."""
    model, other = Model(), nn.Linear(H, V)

    def run(i):
        hidden = torch.tanh(model.layer(model.table(i)))
        z = model.head(hidden)
        return F.cross_entropy(z.view(-1, V), i.view(-1)), z, other(hidden)

    compiled = torch.compile(run, backend=rewriting_backend())

    def step():
        loss, z, more = compiled(ids)
        z.max(-1)
        (loss + LOSSES["rows"](more)).backward()

    with fx_fusion.recording() as report:
        for _ in range(4):
            step()
    assert products(step) == 6, "three for each head"
    graphs = [graph for graph in report.graphs if graph.deferred or graph.computed]
    assert [graph.computed != () for graph in graphs] == [False, True]
    assert [(g.reads.calls_at_once, g.reads.calls_taken) for g in graphs] == [(0, 5)] * 2, "one count for both versions"


@pytest.mark.parametrize("read", ["inside", "outside"])
@pytest.mark.parametrize("what", ["both", "logits", "loss"])
def test_a_reentrant_checkpoint_around_the_model(what, read):
    """It runs the model without gradients, and gives its outputs one; what is read of them had none."""
    found = []
    for ours in (False, True):
        model = Model()

        def function(ids, model=model):
            z = model(ids)
            return z, LOSSES["rows"](z)

        call = torch.compile(function, backend=rewriting_backend()) if ours else function

        def segment(ids, anchor, call=call):
            z, loss = call(ids)
            assert read == "outside" or not z.isnan().any()
            return z, loss

        z, loss = checkpoint(segment, ids, torch.ones(1, requires_grad=True), use_reentrant=True)
        extra = z.pow(2).mean()
        {"both": loss + extra, "logits": extra, "loss": loss}[what].backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_step_that_is_compiled_with_the_model():
    """It returns logits of the weights that it has changed since."""
    found = []
    for ours in (False, True):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)

        def step(ids, model=model, optimizer=optimizer):
            z = model(ids)
            loss = LOSSES["rows"](z)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), z.detach()

        call = torch.compile(step, backend=rewriting_backend()) if ours else step
        for _ in range(3):
            found.append([t + 0 for t in call(ids)])
    torch.testing.assert_close(found[:3], found[3:], rtol=1e-4, atol=1e-6)
