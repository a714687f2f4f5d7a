"""Logits that wait, in programs that would otherwise get other numbers, or errors, than without the backend."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_fusion
from fx_fusion.kernels.logits import logit_chunks
from fx_fusion.rewrite import deferral, returned_logits
from fx_fusion.runtime import reads, speculate, steps, streams
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from tests.helpers import rewriting_backend, tiny_llama, tokens

B, H, V = 6, 8, 40
x = torch.randn(B, H, generator=torch.Generator().manual_seed(0))
y = torch.randint(0, V, (B,), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """A layer, a head and its loss, with the logits beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(H, H), nn.Linear(H, V, bias=False)

    def forward(self, x):
        logits = self.head(torch.tanh(self.layer(x)))
        return F.cross_entropy(logits, y), logits


def compiled_and_read(model):
    """The compiled model, in the habit of computing the logits beside the loss."""
    call = torch.compile(model, backend=rewriting_backend())
    for _ in range(3):
        call(x)[1].sum()
    return call


def test_a_second_derivative_of_logits_computed_beside_the_loss_raises():
    model = Model()
    call = compiled_and_read(model)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(call(x)[1].square().sum(), model.head.weight, create_graph=True)
    (found,) = torch.autograd.grad(call(x)[1].square().sum(), model.head.weight)
    torch.testing.assert_close(found, torch.autograd.grad(model(x)[1].square().sum(), model.head.weight)[0])


@pytest.mark.parametrize("reads", [0, 3])
def test_a_parameter_that_was_frozen_when_the_model_ran_has_no_gradient(reads):
    model = Model()
    model.head.weight.requires_grad_(False)
    call = compiled_and_read(model) if reads else torch.compile(model, backend=rewriting_backend())
    logits = call(x)[1]
    model.head.weight.requires_grad_(True)
    logits.square().sum().backward()
    assert model.head.weight.grad is None
    found = model.layer.weight.grad
    model.zero_grad()
    model(x)[1].square().sum().backward()
    torch.testing.assert_close(found, model.layer.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reads", [0, 3])
def test_a_parameter_that_is_frozen_while_logits_are_read_has_its_gradient(reads):
    """A discriminator is switched off for a moment: what the model computed before is differentiated as it was."""

    def grads(model, call):
        logits = call(x)[1]
        model.requires_grad_(False)
        loss = logits.square().mean()
        model.requires_grad_(True)
        return torch.autograd.grad(loss, list(model.parameters()))

    model = Model()
    call = compiled_and_read(model) if reads else torch.compile(model, backend=rewriting_backend())
    torch.testing.assert_close(grads(model, call), grads(model, model))


def test_a_parameter_that_is_frozen_while_the_loss_is_taken_has_its_gradient(monkeypatch):
    monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cpu": 1})
    monkeypatch.setattr(returned_logits, "_FEWEST_CLASSES", V)
    model = nn.Sequential(nn.Linear(H, H), nn.Linear(H, V, bias=False))

    def grads(call):
        logits = call(x)
        model.requires_grad_(False)
        loss = F.cross_entropy(logits, y)
        model.requires_grad_(True)
        return torch.autograd.grad(loss, list(model.parameters()))

    torch.testing.assert_close(grads(torch.compile(model, backend=rewriting_backend())), grads(model))


def test_a_slice_by_tensors_that_change():
    logits = torch.compile(Model(), backend=rewriting_backend())(x)[1]
    first, last = torch.tensor(0), torch.tensor(2)
    part = logits[first:last]
    first += 2
    last += 3
    torch.testing.assert_close(part + 0, Model()(x)[1][0:2])


@pytest.mark.parametrize("function", [lambda t: t.to(0), lambda t: t.to(device=0), lambda t: t.to(0, torch.float64)])
def test_a_gpu_by_its_number_is_no_cast(function):
    """There is none here: PyTorch's own error, of the logits themselves."""
    logits = torch.compile(Model(), backend=rewriting_backend())(x)[1]
    with pytest.raises((RuntimeError, AssertionError)) as found:
        function(logits)
    with pytest.raises((RuntimeError, AssertionError)) as expected:
        function(x)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


class Scaled(torch.optim.SGD):
    def step(self, scale, closure=None):
        return super().step(closure)


class OfAModel(torch.optim.SGD):
    def step(self, model, closure=None):
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        return closure.calls


def test_steps_that_take_something_else():
    """A hook of ours runs before every step of every optimizer: it changes nothing but a closure that it is sure of."""
    model = torch.nn.Linear(2, 2)

    def closure():
        closure.calls += 1
        model.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    closure.calls = 0
    assert Scaled(model.parameters(), lr=0.1).step(0.5, closure=closure) is not None
    OfAModel(model.parameters(), lr=0.1).step(model)
    assert Counting(model.parameters(), lr=0.1).step(closure) == 2
    assert Scaled(model.parameters(), lr=0.1).step(0.5, closure) is not None
    assert closure.calls == 3


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.LBFGS, torch.optim.SGD])
@pytest.mark.parametrize("how", ["by place", "by name"])
def test_a_closure_that_trains_the_model(optimizer, how):
    """What it leaves is what was there before the step changed the weights, evaluation after evaluation: as if it had been
    read in the closure. (LBFGS makes much of the roundings in which eager differs.)"""

    def train(at_once):
        torch._dynamo.reset()
        found, model = [], Model()
        call = torch.compile(model, backend=rewriting_backend())
        step = optimizer(model.parameters(), lr=0.01)

        def closure():
            step.zero_grad()
            loss, *rest = call(x)
            loss.backward()
            found[:] = [tensor + 0 for tensor in rest] if at_once else rest
            return loss

        for _ in range(2):
            step.step(closure) if how == "by place" else step.step(closure=closure)
        return [tensor + 0 for tensor in found]

    torch.testing.assert_close(train(False), train(True), rtol=0, atol=0)


def test_logits_read_under_an_autocast_around_several_steps():
    """Its cache of casts is that of the reader: what is cast for a deferred tensor is not left there."""

    model = Model()
    call, optimizer = torch.compile(model, backend=rewriting_backend()), torch.optim.SGD(model.parameters(), lr=5.0)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            loss, logits = call(x)
            torch.testing.assert_close(F.cross_entropy(logits.float(), y), loss, rtol=2e-2, atol=2e-2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Unread(torch.autograd.Function):
    """Takes logits without reading them."""

    @staticmethod
    def forward(ctx, z):
        return torch.zeros(())

    @staticmethod
    def backward(ctx, dy):
        return dy * torch.ones(B, V)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_hook_that_was_removed_is_not_called(is_kept):
    seen = []
    logits = torch.compile(Model(), backend=rewriting_backend())(x)[1]
    hook = logits.register_hook(seen.append)
    loss = Unread.apply(logits)
    kept = logits if is_kept else None
    del logits
    hook.remove()
    loss.backward()
    assert not seen
    del kept


def capture(monkeypatch, is_on=True):
    for module in (deferral, reads, speculate):
        monkeypatch.setattr(module, "is_capturing", lambda: is_on)


def test_nothing_waits_while_a_cuda_graph_is_captured(monkeypatch):
    """Each replay has to make what is read behind it."""
    call = torch.compile(Model(), backend=rewriting_backend())
    assert type(call(x)[1]) is DeferredTensor
    capture(monkeypatch)
    logits = call(x)[1]
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, Model()(x)[1])


def test_a_step_beside_results_of_a_cuda_graph_that_ran_again():
    """torch raises where one asks for the address of such a result: nobody does, before somebody reads it."""
    model = Model()
    call = torch.compile(model, backend=rewriting_backend())
    with torch.no_grad():
        kept = call(x)[1]
    waiting = steps.waiting()[0]
    hidden = next(o for o in waiting.operands if o is not model.head.weight)
    torch._C._set_throw_on_mutable_data_ptr(hidden)
    with pytest.raises(RuntimeError, match="data pointer"):
        hidden.data_ptr()
    model(x)[0].backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert waiting.stepped
    with pytest.raises(RuntimeError, match="data pointer"):
        kept.sum()


def test_nothing_is_compiled_while_a_cuda_graph_is_captured(monkeypatch):
    """The version for padding, not compiled before, runs as it is, with a warning; so it is the next call that compiles it."""
    model, ids = tiny_llama(), tokens()
    mask = torch.ones_like(ids)
    call = torch.compile(model, backend=rewriting_backend(strict=False))
    padded = {"input_ids": ids, "labels": ids, "attention_mask": mask.clone()}
    padded["attention_mask"][0, 5:] = 0
    call(**{**padded, "attention_mask": mask})
    expected = model(**padded).loss
    with fx_fusion.recording() as report:
        capture(monkeypatch)
        with pytest.warns(UserWarning, match="call the model with a padded batch before; .* it runs uncompiled"):
            torch.testing.assert_close(call(**padded).loss, expected)
        assert not report.graphs
        capture(monkeypatch, False)
        torch.testing.assert_close(call(**padded).loss, expected)
        assert len(report.graphs) == 1


def test_a_habit_of_reading_compiles_nothing_while_a_cuda_graph_is_captured(monkeypatch):
    call = torch.compile(Model(), backend=rewriting_backend())
    with fx_fusion.recording() as report:
        for _ in range(2):
            call(x)[1].sum()
        capture(monkeypatch)
        torch.testing.assert_close(call(x)[1], Model()(x)[1])
        assert len(report.graphs) == 1


class OfEightBits(torch.Tensor):
    """A weight as packages for quantization make them: products are all that it is for."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, strides=values.stride(), dtype=scale.dtype)
        made.values, made.scale = values, scale
        return made

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(func(args[0].values), args[0].scale)
        if func is torch.ops.aten.mm.default:
            return func(*(a.values * a.scale if isinstance(a, cls) else a for a in args))
        return NotImplemented


def test_a_head_of_another_kind_of_tensor_does_not_wait(monkeypatch):
    monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cpu": 1})
    monkeypatch.setattr(returned_logits, "_FEWEST_CLASSES", V)
    layer, weight = nn.Linear(H, H), OfEightBits(torch.randint(-127, 127, (V, H), dtype=torch.int8), torch.tensor(0.01))

    def run(given):
        return F.linear(torch.tanh(layer(given)), weight)

    with fx_fusion.recording() as report:
        logits = torch.compile(run, backend=rewriting_backend())(x)
    assert type(logits) is torch.Tensor, str(report)
    F.cross_entropy(logits, y).backward()
    found, layer.weight.grad = layer.weight.grad, None
    F.cross_entropy(run(x), y).backward()
    torch.testing.assert_close(found, layer.weight.grad)


def test_all_ranks_take_the_same_chunks(monkeypatch):
    """Also where one has a GPU so small that its chunks would be smaller."""
    rows = []
    plan = logit_chunks.chunk_plan
    monkeypatch.setattr(logit_chunks, "chunk_plan", lambda *given: rows.append(given[4]) or plan(*given))
    monkeypatch.setattr(logit_chunks, "memory_of_device", lambda tensor: 24 << 30)

    class Part:
        largest, group = V, ""

        def rows(self, *given):
            return logit_chunks.loss_of_rows(*given)

    monkeypatch.setattr(logit_chunks, "add_up", lambda rows, group: None)
    monkeypatch.setattr(logit_chunks, "arrived", lambda dx: dx)
    for part in (None, Part()):
        given = x, torch.randn(V, H), None, y, None, (-100, 0.0, 0.0, 1.0), None, (True, False, False), torch.empty(B)
        logit_chunks.each_chunk(*given, part=part)
    assert rows == [True, False]


class Square(torch.autograd.Function):
    """Differentiates what it is given, and never reads it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * dy * x


CHANGING_NOTHING = {
    "float": lambda z: z.float(), "to": lambda z: z.to(torch.float32), "contiguous": lambda z: z.contiguous(),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGING_NOTHING)
def test_a_cast_that_changes_nothing_is_the_tensor_itself(name):
    """With its gradient, also where it is made under ``no_grad``."""
    found = []
    for call in (torch.compile(model := Model(), backend=rewriting_backend()), model):
        model.zero_grad()
        loss, logits = call(x)
        with torch.no_grad():
            z = CHANGING_NOTHING[name](logits)
        assert z is logits
        assert z.requires_grad
        (loss + Square.apply(z).mean()).backward()
        found.append(model.head.weight.grad.clone())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_hook_is_in_no_cycle():
    """FSDP sets one on every output, and large runs switch the collector off."""

    class Owner:
        pass

    call, alive = torch.compile(Model(), backend=rewriting_backend()), []
    call(x)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            owner, logits = Owner(), call(x)[1]
            logits.register_hook(lambda dy, owner=owner: None)
            alive.append(weakref.ref(owner))
            del owner, logits
        assert [reference() for reference in alive] == [None] * 3
    finally:
        gc.enable()


def test_a_step_asks_each_parameter_once(monkeypatch):
    """Before it and behind it the parameters are the same."""
    model, asked = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, logits = torch.compile(model, backend=rewriting_backend())(x)
    loss.backward()
    real = steps._changed_by
    monkeypatch.setattr(steps, "_changed_by", lambda optimizer: asked.append(optimizer) or real(optimizer))
    optimizer.step()
    assert asked == [optimizer]
    assert not steps._CHANGING
    torch.testing.assert_close(logits + 0, logits)


def test_memory_of_tensors_that_are_not_contiguous():
    whole = torch.zeros(8, 8)
    assert steps.Spans([whole[:, 2]]).overlap(whole[7])
    assert not steps.Spans([whole[:, 2][:4]]).overlap(whole[4:])
    assert steps.Spans([whole.t()]).overlap(whole[7, 7:])


def test_what_is_read_on_another_stream_is_computed_on_the_models(monkeypatch):
    """Operands are freed and written to in the order of the stream that the model ran on."""
    said = []

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def entered(stream):
        said.append(f"on {stream.name}")
        yield

    model, reader = Stream("model's"), Stream("reader's")
    monkeypatch.setattr(streams, "stream_of", lambda device: reader)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    with streams.on_stream(model):
        said.append("computed")
    assert said == ["model's waits for reader's", "on model's", "computed", "reader's waits for model's"]
    said.clear()
    with streams.on_stream(reader), streams.on_stream(None):
        said.append("computed")
    monkeypatch.setattr(streams, "stream_of", lambda device: None)  # while a CUDA graph is captured
    with streams.on_stream(model):
        said.append("captured")
    assert said == ["computed", "captured"]


class Head(nn.Module):
    """A head whose loss is computed outside of the graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(H, H), nn.Linear(H, V)

    def forward(self, x):
        return self.head(self.layer(x))


GRADIENTS_OF_LOGITS = {
    "hook": lambda z, loss: z.register_hook(lambda g: g * 2),
    "retain_grad": lambda z, loss: z.retain_grad(),
    "autograd.grad": lambda z, loss: torch.autograd.grad(loss, z),
    "autograd.grad by keyword": lambda z, loss: torch.autograd.grad(loss, inputs=[z]),
    "backward(inputs=)": lambda z, loss: (loss.backward(inputs=[z]), z.grad),
}
READS = {
    "unread": lambda z, loss: loss,
    "a metric": lambda z, loss: (z.max(-1), loss)[1],
    "a second loss": lambda z, loss: loss + z.square().mean(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("how", GRADIENTS_OF_LOGITS)
def test_a_gradient_of_logits_that_a_loss_took_raises(how, read, monkeypatch):
    """It would lack the part of that loss. Whether something has read the logits then makes no difference."""
    monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cpu": 1})
    monkeypatch.setattr(returned_logits, "_FEWEST_CLASSES", V)
    model = Head()
    z = torch.compile(model, backend=rewriting_backend())(x)
    viewed = z.view(2, B // 2, V)
    taken = F.cross_entropy(viewed.flatten(0, 1), y)
    taken.item()
    assert z._value is None, "the loss read the logits: this tests nothing"
    loss = READS[read](z, taken)
    for logits in (z, viewed):
        with pytest.raises(RuntimeError, match=r"its gradient is not computed|computes no gradient of a deferred output"):
            GRADIENTS_OF_LOGITS[how](logits, loss)
    loss.backward()
    expected = Head()
    logits = expected(x)
    (F.cross_entropy(logits, y) + (logits.square().mean() if read == "a second loss" else 0)).backward()
    torch.testing.assert_close(model.head.bias.grad, expected.head.bias.grad, rtol=1e-4, atol=1e-6)


INDICES = {
    "tensors in a list": lambda t: ([0, 1], [t[0], t[1]]),
    "a tensor in a tuple in a list": lambda t: (slice(None), [t[1]]),
    "a list of lists": lambda t: ([[t[0]], [t[1]]],),
    "a slice of tensors": lambda t: (slice(t[0], t[1]),),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_changes_later_is_read_at_once(name):
    model = Model()
    found = []
    for call in (model, torch.compile(model, backend=rewriting_backend())):
        positions = torch.tensor([1, 4])
        chosen = call(x)[1][INDICES[name](positions)]
        positions -= 1
        found.append(chosen + 0)
    torch.testing.assert_close(*reversed(found), rtol=1e-5, atol=1e-6)


def test_a_write_under_inference_mode_is_no_write_to_logits():
    """PyTorch counts no writes to inference tensors: logits made of them do not wait."""

    class Hidden(Model):
        def forward(self, x):
            hidden = torch.tanh(self.layer(x))
            logits = self.head(hidden)
            return F.cross_entropy(logits, y), logits, hidden

    model = Hidden()
    with torch.inference_mode():
        _, logits, hidden = torch.compile(model, backend=rewriting_backend())(x)
        hidden[0, 1:3] = 50.0
        torch.testing.assert_close(logits + 0, model(x)[1], rtol=1e-5, atol=1e-6)


TRANSFORMS = {
    "vmap over labels": lambda z: torch.vmap(lambda y: F.cross_entropy(z.view(-1, V), y))(torch.stack([y, y.flip(0)])),
    "grad of a temperature": lambda z: torch.func.grad(lambda t: F.cross_entropy(z / t, y))(torch.tensor(1.5)),
    "a cast inside": lambda z: torch.vmap(lambda y: z.double()[0] * y)(y),
    "vmap over logits": lambda z: torch.vmap(lambda row: row.logsumexp(0))(z),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_logits_inside_of_a_functorch_transform(name):
    model = Model()
    logits = torch.compile(model, backend=rewriting_backend())(x)[1]
    torch.testing.assert_close(TRANSFORMS[name](logits), TRANSFORMS[name](model(x)[1]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits + 0, model(x)[1] + 0, rtol=1e-5, atol=1e-6)  # no wrapper of the transform is left


class ScaledInPlace(torch.autograd.Function):
    """Changes its input in place, as C++ extensions and activations do."""

    @staticmethod
    def forward(ctx, z):
        z.mul_(3)
        ctx.mark_dirty(z)
        return z

    @staticmethod
    def backward(ctx, dz):
        return 3 * dz


@pytest.mark.parametrize("of", [lambda z: z, lambda z: z.view(-1), lambda z: z[0]], ids=["logits", "view", "row"])
def test_reading_logits_that_a_custom_function_changed_raises(of):
    """Autograd knows no views among deferred tensors: their gradients would be others than eager's."""
    z = torch.compile(Model(), backend=rewriting_backend())(x)[1]
    with pytest.raises((RuntimeError, SystemError)):  # PyTorch may ask in the middle of its own call
        (ScaledInPlace.apply(of(z)).mean() + z.square().mean()).backward()
    found = []
    for logits in (torch.compile(Model(), backend=rewriting_backend())(x)[1], Model()(x)[1]):
        copy = logits.clone()
        ScaledInPlace.apply(of(copy))
        found.append(copy.square().mean())
    torch.testing.assert_close(*found)


def test_retained_gradients_in_a_transform_raise():
    z = torch.compile(Model(), backend=rewriting_backend())(x)[1]
    z.retain_grad()
    with pytest.raises(RuntimeError, match="changed in place, or given a hook"):
        torch.vmap(lambda row: row.logsumexp(0))(z).sum().backward()
