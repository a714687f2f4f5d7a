"""Test what a deferred tensor does: logits that nobody reads are never computed, and reading them is exact."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.runtime import steps
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.testing import rewriting_backend
from tests.helpers import SmallModel, tiny_llama, tokens

ids = tokens()


def pair_of(eager):
    """Return an eager model and a compiled one with the same parameters."""
    return eager, torch.compile(copy.deepcopy(eager), backend=rewriting_backend())


@pytest.fixture
def pair():
    return pair_of(SmallModel())


@pytest.fixture
def llamas():
    return pair_of(tiny_llama())


def outputs(pair, **kwargs):
    eager, compiled = pair
    return eager(input_ids=ids, labels=ids, **kwargs), compiled(input_ids=ids, labels=ids, **kwargs)


def test_it_is_a_tensor_of_the_right_type(pair):
    expected, out = outputs(pair)
    assert isinstance(out.logits, DeferredTensor)
    assert isinstance(out.logits, torch.Tensor)
    for question in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda"):
        assert getattr(out.logits, question) == getattr(expected.logits, question)
    assert out.logits.size() == expected.logits.size()
    assert out.logits.size(-1) == 256
    assert out.logits.dim() == 3
    assert len(out.logits) == 2
    assert out.logits.numel() == expected.logits.numel()
    assert out.logits.is_floating_point()
    assert out.logits._value is None, "none of this reads it"


def test_training_never_computes_it(llamas):
    _, out = outputs(llamas)
    out.loss.backward()
    assert out.logits._value is None


@pytest.mark.parametrize("read", [
    lambda t: t + 0, lambda t: t[:, -1], lambda t: t.argmax(-1), lambda t: t.float().softmax(-1), lambda t: t.detach().view(-1, 256),
    lambda t: torch.cat([t, t]), lambda t: torch.stack([t[0], t[1]]), lambda t: t.detach().to(torch.bfloat16), lambda t: t.mT,
    lambda t: t.data, lambda t: t.transpose(0, 1)[3], lambda t: torch.as_tensor(t.detach().numpy()), lambda t: t.unsqueeze(0).squeeze(0),
    lambda t: next(iter(t)), lambda t: torch.topk(t, 3).values, lambda t: t[..., 0] > 0, lambda t: t.clone(), lambda t: t.cpu(),
    lambda t: torch.nn.functional.log_softmax(t, -1), lambda t: t.max().item() * torch.ones(1), lambda t: t.type(torch.float64),
], ids=lambda _: "")  # fmt: skip
def test_every_way_to_read_it_is_exact(pair, read):
    expected, out = outputs(pair)
    torch.testing.assert_close(read(out.logits), read(expected.logits), rtol=1e-5, atol=1e-6)


def test_casts_and_views_stay_deferred(pair):
    _, out = outputs(pair)
    later = out.logits.float().detach()[:, :-1].reshape(-1, 256)
    assert isinstance(later, DeferredTensor)
    assert out.logits._value is None
    assert later.shape == (30, 256)
    assert not later.requires_grad


def test_gradients_through_late_read_logits_are_exact(llamas):
    expected, out = outputs(llamas)
    (expected.loss + expected.logits.pow(2).mean()).backward()
    (out.loss + out.logits.pow(2).mean()).backward()
    for ours, theirs in zip(llamas[1].parameters(), llamas[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_read_under_no_grad_first_then_with_gradient(pair):
    expected, out = outputs(pair)
    with torch.no_grad():
        accuracy = (out.logits.argmax(-1) == ids).float().mean()
    assert accuracy == (expected.logits.argmax(-1) == ids).float().mean()
    expected.logits.sum().backward()
    out.logits.sum().backward()
    torch.testing.assert_close(pair[1].lm_head.weight.grad, pair[0].lm_head.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(pair, mode):
    for model in pair:
        model.eval()
    with mode():
        expected, out = outputs(pair)
        assert not out.logits.requires_grad
        torch.testing.assert_close(out.logits.argmax(-1), expected.logits.argmax(-1))
        torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(out.logits.float() + 0, expected.logits.float() + 0, rtol=1e-5, atol=1e-6)


def test_a_metric_before_and_after_the_step(pair):
    _, model = pair
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = model(input_ids=ids, labels=ids)
    before = (out.logits.argmax(-1) == ids).float().mean()
    out.loss.backward()
    optimizer.step()
    assert (out.logits.argmax(-1) == ids).float().mean() == before, "computed once, kept"


WRITES = {
    "in place": lambda weight: weight.sub_(0.1 * weight.grad),
    "through .data": lambda weight: weight.data.add_(weight.grad, alpha=-0.1),
    "another .data": lambda weight: setattr(weight, "data", weight - 0.1 * weight.grad),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_stale_read_is_one_clear_error(pair, name):
    """Of a loop that has no optimizer of torch."""
    _, model = pair
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            WRITES[name](parameter)
    with pytest.raises(fx_fusion.StaleTensorError, match=r"changed in place.*defer_outputs"):
        out.logits + 1
    assert "DeferredTensor" in repr(out.logits)
    assert "changed in place" in repr(out.logits)
    assert out.logits.shape == (2, 16, 256), "its type is still known"


def test_not_a_number_is_no_change(pair):
    _, model = pair
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    assert (model(input_ids=ids, labels=ids).logits + 1).isnan().any()


def test_print_pickle_save_deepcopy(pair):
    expected, out = outputs(pair)
    torch.testing.assert_close(
        pickle.loads(pickle.dumps(out.logits.detach())), expected.logits.detach(), rtol=1e-5, atol=1e-6
    )
    file = io.BytesIO()
    torch.save({"logits": out.logits.detach()}, file)
    file.seek(0)
    loaded = torch.load(file)["logits"]
    assert type(loaded) is torch.Tensor
    torch.testing.assert_close(loaded, expected.logits.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(copy.deepcopy(out.logits.detach()), expected.logits.detach(), rtol=1e-5, atol=1e-6)
    assert repr(out.logits.detach()).startswith("tensor(")


def test_in_place_on_it_changes_it(pair):
    expected, out = outputs(pair)
    logits, reference = out.logits.detach(), expected.logits.detach()
    logits.div_(2)
    logits[0, 0] = 0
    reference.div_(2)
    reference[0, 0] = 0
    torch.testing.assert_close(logits + 0, reference, rtol=1e-5, atol=1e-6)


def test_a_graph_break_right_after_the_model(llamas):
    eager, compiled = llamas

    def step(model, breaks):
        out = model(input_ids=ids, labels=ids)
        if breaks:
            torch._dynamo.graph_break()
        return out.loss + out.logits.float().square().mean(), out.logits

    expected, expected_logits = step(eager, False)
    both = torch.compile(lambda: step(compiled._orig_mod, True), backend=rewriting_backend())
    loss, logits = both()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits + 0, expected_logits, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(compiled.lm_head.weight.grad, eager.lm_head.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_second_compiled_region(pair):
    expected, out = outputs(pair)
    metric = torch.compile(lambda logits: (logits.float().softmax(-1) ** 2).sum(), backend=rewriting_backend())
    value = metric(out.logits)
    reference = (expected.logits.float().softmax(-1) ** 2).sum()
    torch.testing.assert_close(value, reference)
    value.backward()
    reference.backward()
    torch.testing.assert_close(pair[1].lm_head.weight.grad, pair[0].lm_head.weight.grad, rtol=1e-4, atol=1e-6)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def test_a_custom_autograd_function_gets_its_gradients(pair):
    expected, out = outputs(pair)
    (expected.loss + Double.apply(expected.logits).square().mean()).backward()
    (out.loss + Double.apply(out.logits).square().mean()).backward()
    for ours, theirs in zip(pair[1].parameters(), pair[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    expected, out = outputs(pair)
    for model, result in zip(pair, (expected, out), strict=True):
        model.zero_grad()
        Double.apply(result.logits[:, 1:].float()).square().mean().backward()
    torch.testing.assert_close(pair[1].lm_head.weight.grad, pair[0].lm_head.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_cast_taken_before_an_in_place_change_keeps_the_old_values(pair):
    expected, out = outputs(pair)
    early, logits = out.logits.double(), out.logits.detach()
    rows = [0, 1]
    picked = out.logits[rows]
    rows[0] = 1
    logits.mul_(0)
    torch.testing.assert_close(early + 0, expected.logits.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(picked + 0, expected.logits, rtol=1e-5, atol=1e-6)


def test_requires_grad_of_a_detached_copy(pair):
    _, out = outputs(pair)
    leaf = out.logits.detach().requires_grad_()
    assert leaf.requires_grad
    leaf.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * out.logits.detach())


def test_handed_straight_to_other_compiled_code(pair):
    """As between the buckets of DDP: no Dynamo in between that would ask what kind of tensor it is."""
    from fx_fusion.rewrite.deferral import read_deferred_inputs

    seen = []
    read_deferred_inputs([1])(lambda a, b: seen.append(type(b)))(1, outputs(pair)[1].logits)
    assert seen == [torch.Tensor]


head = torch.nn.Linear(8, 33, bias=False)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_logits_that_are_read_after_a_step_are_those_of_the_model_that_ran(optimizer, fused, pair):
    """Fused optimizers do not touch the version counters of the parameters that they change."""
    _, model = pair
    step = optimizer(model.parameters(), 0.1, fused=fused)
    read, unread, other = (model(input_ids=ids, labels=ids) for _ in range(3))
    before = read.logits.detach() + 0
    (read.loss + unread.loss + other.loss).backward()
    step.step()
    step.step()
    torch.testing.assert_close(read.logits.detach() + 0, before)
    later = unread.logits[:, -1]
    torch.testing.assert_close(later.detach() + 0, before[:, -1])
    with pytest.raises(RuntimeError, match=r"call backward\(\) before step\(\)"):
        later.sum().backward()
    model(input_ids=ids, labels=ids)
    with pytest.raises(fx_fusion.StaleTensorError, match="the model ran again since"):
        other.logits + 1
    torch.testing.assert_close(unread.logits.detach() + 0, before)


class Small(torch.nn.Module):
    """Its loss and logits. All models of the class share a graph."""

    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(33, 8), torch.nn.Linear(8, 33)

    def forward(self, tokens):
        logits = self.head(torch.tanh(self.table(tokens)))
        return F.cross_entropy(logits, tokens), logits


def test_another_model_that_runs_is_not_the_one_whose_logits_wait():
    torch.manual_seed(0)
    first, second = Small(), Small()
    tokens = torch.arange(33)
    expected, steps_of = first(tokens)[1].detach() + 0, torch.optim.SGD(first.parameters(), 0.1)
    with fx_fusion.recording() as report:
        backend = rewriting_backend()
        compiled = [torch.compile(model, backend=backend) for model in (first, second)]
        loss, read = compiled[0](tokens)
        _, late = compiled[0](tokens)
        loss.backward()
        steps_of.step()
        compiled[1](tokens)
        torch.testing.assert_close(read.detach() + 0, expected)
        compiled[0](tokens)
        with pytest.raises(fx_fusion.StaleTensorError, match="the model ran again since"):
            late + 1
    assert len(report.graphs) == 1, "they share it"


def test_a_step_copies_what_somebody_can_still_read(pair, monkeypatch):
    _, model = pair
    copied = []
    monkeypatch.setattr(steps.Kept, "apply", lambda parameter: copied.append(parameter) or parameter.detach().clone())
    step = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    step.step()
    assert not copied, "the logits are gone"
    both = [model(input_ids=ids, labels=ids) for _ in range(2)]
    (both[0].loss + both[1].loss).backward()
    step.step()
    assert len(copied) == 1, "once for two calls"
    both[0].logits + 1
    step.step()
    assert len(copied) == 1, "copies do not change"


def test_without_memory_for_a_copy_a_read_says_so(pair, monkeypatch):
    def fails(parameter):
        raise torch.OutOfMemoryError

    _, model = pair
    step = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    monkeypatch.setattr(steps.Kept, "apply", fails)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    step.step()
    with pytest.raises(fx_fusion.StaleTensorError, match="an optimizer step changed one"):
        out.logits + 1


def test_a_compiled_step_keeps_nothing_and_a_read_says_so(pair):
    _, model = pair
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend="eager")
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    step()
    with pytest.raises(fx_fusion.StaleTensorError, match="optimizer step"):
        out.logits + 1


@pytest.mark.parametrize("name", ["double", "slice"])
def test_read_under_inference_mode_and_differentiated_later(name, pair):
    """A metric in inference mode, then a second loss: the cast or view still has its gradient."""
    made = []
    for model in pair:
        out = model(input_ids=ids, labels=ids)
        y = out.logits.double() if name == "double" else out.logits[:, :-1]
        with torch.inference_mode():
            y.argmax(-1)
        (out.loss + y.logsumexp(-1).pow(2).mean()).backward()
        made.append(model.lm_head.weight.grad)
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-6)


def test_what_was_read_keeps_nothing_of_the_graph_alive():
    """A logger that keeps a detached slice a step keeps that, not the activations in front of it."""
    import weakref

    kept, graphs = [], []

    class Token(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = type("Token", (), {})()
            graphs.append(weakref.ref(ctx.token))
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy

    def function(x, y):
        z = head(x.tanh())
        return torch.nn.functional.cross_entropy(z, y), z

    compiled = torch.compile(function, backend=rewriting_backend())
    for _ in range(3):
        loss, z = compiled(Token.apply(torch.randn(4, 8, requires_grad=True)), torch.randint(0, 33, (4,)))
        d = z.detach()
        d.sum()
        kept.append(d)
        del loss, z, d
    assert not any(g() is not None for g in graphs)


def hooked(read, order):
    """The gradient of the lm_head with a hook on the logits that doubles theirs, and what the hook was given."""
    model, ids, seen = SmallModel(), tokens(), []
    out = torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids) if order != "eager" else model(
        input_ids=ids, labels=ids
    )  # fmt: skip
    if order == "read first":
        out.logits.sum()
    handle = out.logits.register_hook(lambda dy: seen.append(dy.sum().item()) or 2 * dy)
    removed = out.logits.register_hook(lambda dy: seen.append("removed"))
    removed.remove()
    loss = out.loss + (out.logits.square().mean() if read else 0)
    loss.backward()
    assert hasattr(handle, "remove")
    return model.lm_head.weight.grad, seen, out


@pytest.mark.parametrize("order", ["hook first", "read first"])
def test_a_hook_on_logits_runs_when_they_have_a_gradient(order):
    _, given, _ = hooked(True, "eager")
    torch._dynamo.reset()
    found, seen, _ = hooked(True, order)
    # The gradient of the loss never passes through the logits here, in eager it does.
    assert len(seen) == len(given) == 1
    model = SmallModel()
    out = model(input_ids=ids, labels=ids)
    of_loss, of_squares = (
        torch.autograd.grad(t, model.lm_head.weight, retain_graph=True)[0] for t in (out.loss, out.logits.square().mean())
    )
    torch.testing.assert_close(found, of_loss + 2 * of_squares, rtol=1e-4, atol=1e-6)


def test_a_hook_alone_reads_nothing():
    """As FSDP2 does with every output of a module."""
    with fx_fusion.recording() as report:
        _, seen, out = hooked(False, "hook first")
    assert out.logits._value is None
    assert seen == []
    assert "read in" not in str(report) or "read in 0 of" in str(report)
    assert out.logits._base is None
    assert out.logits._value is None


QUESTIONS = ("requires_grad", "is_leaf", "grad", "_version", "T", "data", "__str__")  # the last three read it


def asking(question, answers):
    def asks(module, args, out):
        torch._dynamo.graph_break()
        value = getattr(out.logits, question)
        answers.append(value() if callable(value) else value)

    return asks


def test_our_own_methods_are_not_captured():
    """Behind a break Dynamo looks at all that runs: hooks on the model's result, a call of ``print``."""
    found = []
    for ours in (False, True):
        torch._dynamo.reset()
        model, answers = SmallModel(), []
        for question in QUESTIONS:
            model.register_forward_hook(asking(question, answers))
        call = torch.compile(model, backend=rewriting_backend()) if ours else model
        for _ in range(3):
            call(input_ids=ids, labels=ids)
        found.append(answers)
    for question, one, other in zip(QUESTIONS * 3, *found, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one)
        else:
            assert question == "__str__" or other == one, question
