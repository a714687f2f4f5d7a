"""What a deferred tensor does: logits that nobody reads are never computed, and reading them is exact."""

import copy
import io
import pickle

import pytest
import torch

import fx_fusion
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.testing import rewriting_backend
from tests.helpers import tiny_llama, tokens

ids = tokens()


@pytest.fixture
def pair():
    """An eager model and a compiled one with the same parameters."""
    eager = tiny_llama()
    return eager, torch.compile(copy.deepcopy(eager), backend=rewriting_backend())


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


def test_training_never_computes_it(pair):
    _, out = outputs(pair)
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


def test_gradients_through_late_read_logits_are_exact(pair):
    expected, out = outputs(pair)
    (expected.loss + expected.logits.pow(2).mean()).backward()
    (out.loss + out.logits.pow(2).mean()).backward()
    for ours, theirs in zip(pair[1].parameters(), pair[0].parameters(), strict=True):
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


def test_a_stale_read_is_one_clear_error(pair):
    _, model = pair
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    with pytest.raises(fx_fusion.StaleTensorError, match=r"changed in place.*defer_outputs"):
        out.logits + 1
    assert "DeferredTensor" in repr(out.logits)
    assert "changed in place" in repr(out.logits)
    assert out.logits.shape == (2, 16, 256), "its type is still known"


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


def test_a_graph_break_right_after_the_model(pair):
    eager, compiled = pair

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
    assert leaf.grad is not None


WRITES = {
    "hidden": lambda h, w, b: h.add_(1), "weight": lambda h, w, b: w.mul_(0.5),
    "bias": lambda h, w, b: b.mul_(0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_logits_whose_sources_the_graph_changes_are_not_deferred(name):
    def function(h, w, b, t):
        h = h * 1
        logits = torch.nn.functional.linear(h, w) + b
        loss = torch.nn.functional.cross_entropy(logits, t)
        WRITES[name](h, w, b)
        return loss, logits

    tensors = torch.randn(4, 8), torch.randn(12, 8), torch.randn(12), torch.tensor([1, 2, 3, 4])
    expected = function(*(t.clone() for t in tensors))
    found = torch.compile(function, backend=rewriting_backend())(*(t.clone() for t in tensors))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours + 0, theirs)


@pytest.mark.parametrize("mode", ["no_grad", "autocast"])
def test_the_region_of_the_head_counts(mode):
    def function(h, w, t):
        context = torch.no_grad() if mode == "no_grad" else torch.autocast("cpu", dtype=torch.bfloat16)
        with context:
            logits = torch.nn.functional.linear(h, w)
            return torch.nn.functional.cross_entropy(logits.float(), t), logits

    h, w, t = torch.randn(4, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True), torch.tensor([1, 2, 3, 4])
    (_, expected), (_, found) = function(h, w, t), torch.compile(function, backend=rewriting_backend())(h, w, t)
    assert found.requires_grad == expected.requires_grad
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found + 0, expected)
    assert (found + 0).dtype == expected.dtype


def test_handed_straight_to_other_compiled_code(pair):
    """As between the buckets of DDP: no Dynamo in between that would ask what kind of tensor it is."""
    from fx_fusion.rewrite.deferral import read_deferred_inputs

    seen = []
    read_deferred_inputs([1])(lambda a, b: seen.append(type(b)))(1, outputs(pair)[1].logits)
    assert seen == [torch.Tensor]


def test_switched_off():
    model = torch.compile(tiny_llama(), backend=rewriting_backend(defer_outputs=False))
    out = model(input_ids=ids, labels=ids)
    assert type(out.logits) is torch.Tensor


def test_symbolic_lengths():
    model = tiny_llama()
    compiled = torch.compile(model, backend=rewriting_backend(), dynamic=True)
    for length in (5, 9, 16):
        out, expected = (
            compiled(input_ids=ids[:, :length], labels=ids[:, :length]),
            model(input_ids=ids[:, :length], labels=ids[:, :length]),
        )
        assert isinstance(out.logits, DeferredTensor)
        assert out.logits.shape == (2, length, 256)
        torch.testing.assert_close(out.logits + 0, expected.logits, rtol=1e-5, atol=1e-6)


def test_softcapped_logits_are_deferred_with_the_cap():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, final_logit_softcapping=5.0, use_cache=False,
    ))  # fmt: skip
    with fx_fusion.recording() as report:
        out = torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids)
    report.assert_fused(linear_cross_entropy=1)
    expected = model(input_ids=ids, labels=ids)
    assert isinstance(out.logits, DeferredTensor)
    torch.testing.assert_close(out.logits + 0, expected.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.loss, expected.loss)


ALIASES = {
    "last position": lambda z: z[:, -1], "view": lambda z: z.view(4, 2, -1), "float": lambda z: z.float(),
    "contiguous": lambda z: z.contiguous(), "detach": lambda z: z.detach(), "transposed": lambda z: z.transpose(0, 1),
    "twice": lambda z: z.view(-1, 33).view(4, 2, -1),
}  # fmt: skip
head = torch.nn.Linear(8, 33, bias=False)


@pytest.mark.parametrize("first", [False, True], ids=["view_first", "logits_first"])
@pytest.mark.parametrize("name", ALIASES)
def test_outputs_that_share_memory_still_do(name, first):
    def function(x, y):
        z = head(x)
        loss, other = torch.nn.functional.cross_entropy(z.view(-1, 33), y), ALIASES[name](z)
        return (loss, z, other) if first else (loss, other, z)

    x, y = torch.randn(2, 4, 8), torch.randint(0, 33, (8,))
    with torch.no_grad(), fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend())
        for written in (1, 2):
            found, expected = compiled(x, y), function(x, y)
            assert all(type(t) is DeferredTensor for t in found[1:]) == (name != "detach"), "a detached one may not wait"
            for outs in (found, expected):
                outs[written].mul_(2)
                outs[written].select(0, 0).fill_(7.0)
            for ours, theirs in zip(found[1:], expected[1:], strict=True):
                torch.testing.assert_close(ours + 0, theirs)
    report.assert_fused(**{"cross_entropy" if name == "detach" else "linear_cross_entropy": 1})


def test_gradients_of_outputs_that_share_memory():
    def function(x, y):
        z = head(x)
        return torch.nn.functional.cross_entropy(z, y), z, z[:, :5], z.float()

    x, y = torch.randn(4, 8, requires_grad=True), torch.randint(0, 33, (4,))
    gradients = []
    for f in (function, torch.compile(function, backend=rewriting_backend())):
        loss, z, part, same = f(x, y)
        gradients.append(torch.autograd.grad(loss + (z * 2).sum() + part.square().sum() + same.mean(), [x, head.weight]))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.fixture
def deferred():
    def function(x, y):
        z = head(x)
        return torch.nn.functional.cross_entropy(z, y), z

    x, y = torch.randn(4, 8, requires_grad=True), torch.randint(0, 33, (4,))
    return x, function(x, y), torch.compile(function, backend=rewriting_backend())(x, y)


WRITES_BEHIND = {
    "a view that is no step": lambda z: z.mT.zero_(), "numpy": lambda z: z.numpy().fill(0), "out": lambda z: torch.mul(z, 0, out=z),
    "foreach": lambda z: torch._foreach_mul_([z], 0), "data": lambda z: z.data.zero_(), "iterated": lambda z: [r.zero_() for r in z],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES_BEHIND)
def test_a_cast_keeps_its_values_whatever_way_the_logits_are_written_to(name, deferred):
    _, (_, expected), (_, z) = deferred
    with torch.no_grad():
        z, expected = z.detach(), expected.detach()
        copy, exact = z.double(), expected.double()
        WRITES_BEHIND[name](z)
        torch.testing.assert_close(copy + 0, exact, rtol=1e-5, atol=1e-6)
        assert not z.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_handed_to_a_checkpointed_function(reentrant, deferred):
    from torch.utils.checkpoint import checkpoint

    x, *both = deferred
    found = []
    for loss, z in both:
        extra = checkpoint(lambda z: z.softmax(-1).pow(2).sum(), z, use_reentrant=reentrant)
        x.grad = head.weight.grad = None
        (loss + extra).backward()
        found.append((x.grad, head.weight.grad))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_code_in_c_gets_an_error_not_a_null_pointer(deferred):
    _, (_, expected), (_, z) = deferred
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(z.detach())
    values = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(z.detach().clone()))
    torch.testing.assert_close(values, expected.detach())
    torch.testing.assert_close(torch.from_dlpack(z.detach()), expected.detach())  # asks the tensor, not its pointer


@pytest.mark.parametrize("backend", ["count", "aot_eager", "inductor", "fx_fusion"])
def test_another_compiled_function_takes_it_as_one_graph(backend, deferred):
    x, *both = deferred
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def spread(z):
        p = z.float().softmax(-1)
        return -(p * torch.log(p + 1e-9)).sum(-1).mean()

    compiled = torch.compile(spread, backend=count if backend == "count" else backend, fullgraph=True)
    (loss, expected), (ours, z) = both
    theirs = torch.autograd.grad(loss + spread(expected), [x, head.weight])
    for found, exact in zip(torch.autograd.grad(ours + compiled(z), [x, head.weight]), theirs, strict=True):
        torch.testing.assert_close(found, exact)
    assert backend != "count" or len(graphs) == 1


def test_another_compiled_function_call_after_call():
    """Other logits, other sizes, a step of the optimizer in between: what is read belongs to the call."""
    layer = torch.nn.Linear(8, 33)

    def function(x, y):
        z = layer(x)
        return torch.nn.functional.cross_entropy(z, y), z

    compiled = torch.compile(function, backend=rewriting_backend())
    metric = torch.compile(lambda z: z.float().softmax(-1).square().sum(), backend=rewriting_backend())
    for n in (4, 4, 5, 7):
        x, y = torch.randn(n, 8), torch.randint(0, 33, (n,))
        found, expected = metric(compiled(x, y)[1]), function(x, y)[1].softmax(-1).square().sum()
        torch.testing.assert_close(found, expected)
        found.backward()
        with torch.no_grad():
            layer.weight -= 0.1 * layer.weight.grad


def test_an_output_that_is_a_view_of_an_input_is_no_deferred_one():
    def function(x, y, like):
        z = head(x)
        return torch.nn.functional.cross_entropy(z, y), like.view_as(z)

    x, y, like = torch.randn(4, 8), torch.randint(0, 33, (4,)), torch.zeros(4 * 33)
    _, view = torch.compile(function, backend=rewriting_backend())(x, y, like)
    like.fill_(3)
    assert (view == 3).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_no_step_of_an_optimizer_goes_unnoticed(optimizer, fused, pair):
    """Fused ones do not touch the version counters of the parameters that they change."""
    _, model = pair
    step = optimizer(model.parameters(), 0.1, fused=fused)
    read, unread = (model(input_ids=ids, labels=ids) for _ in range(2))
    before = read.logits.detach() + 0
    (read.loss + unread.loss).backward()
    step.step()
    torch.testing.assert_close(read.logits.detach() + 0, before)
    with pytest.raises(fx_fusion.StaleTensorError, match="optimizer step"):
        unread.logits + 1


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


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


CHANGES = {
    "product": lambda z: z.mul_(3), "view": lambda z: z[:, :2].mul_(3), "hook": lambda z: z.register_hook(lambda d: d * 0),
    "detached": lambda z: z.detach_(),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_custom_function_of_changed_logits_is_never_wrong(name, deferred):
    """It differentiates without reading: the gradient is eager's, or there is one clear error."""
    x, (_, expected), (_, z) = deferred
    CHANGES[name](z)
    with pytest.raises(RuntimeError, match="changed in place, or given a hook"):
        torch.autograd.grad(Squares.apply(z), head.weight)
    CHANGES[name](expected)
    ours, theirs = (torch.autograd.grad(Squares.apply(t * 1) + head.weight.sum(), head.weight)[0] for t in (z, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
