"""Deferred tensors that other code gets: compiled, checkpointed, custom functions, code in C."""

import pytest
import torch

from fx_fusion.testing import rewriting_backend

head = torch.nn.Linear(8, 33, bias=False)


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


def test_a_custom_function_of_a_view_of_logits_changed_without_gradients(deferred):
    """What is written under no_grad has no part in the gradient's way: a view's grad_fn is made anew all the same."""
    x, (_, expected), (_, z) = deferred
    found = []
    for logits in (expected, z):
        view = logits.view(-1, 11)
        with torch.no_grad():
            logits.add_(1)
        found.append(torch.autograd.grad(Squares.apply(view), head.weight)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_two_outputs_of_one_head_behind_a_graph_break():
    """Dynamo tells the inputs of the next graph apart by identity: each deferred tensor gives it an object of its own."""

    def function(x, y):
        z = head(x)
        shifted = z[:, :-1].contiguous()
        loss = torch.nn.functional.cross_entropy(shifted.reshape(-1, 33), y[:, 1:].reshape(-1))
        torch._dynamo.graph_break()
        return loss, z * 2, shifted.contiguous()

    x, y = torch.randn(2, 5, 8, requires_grad=True), torch.randint(0, 33, (2, 5))
    compiled = torch.compile(function, backend=rewriting_backend())
    for _ in range(2):
        for ours, theirs in zip(compiled(x, y), function(x, y), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_as_another_subclass(deferred):
    """As fastai and torchvision have their images and masks."""

    class Named(torch.Tensor):
        pass

    x, (_, expected), (_, z) = deferred
    named = z.as_subclass(Named)
    assert type(named) is Named
    torch.testing.assert_close(named.as_subclass(torch.Tensor), expected)
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), head.weight)[0] for t in (named.as_subclass(torch.Tensor), expected)))
