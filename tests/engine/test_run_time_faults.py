"""Test what raises while a compiled model runs, out of memory above all: the error is the user's, nothing stays behind, and the
next call is right."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fx_fusion
from fx_fusion.ops.on_cpu import Reference
from fx_fusion.runtime import steps
from fx_fusion.testing import rewriting_backend
from tests.helpers import slow_but, tiny_llama, tokens

ids, padding = tokens(), torch.ones(2, 16, dtype=torch.long)
padding[1, 12:] = 0


def no_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture(params=slow_but(["eager"], ["eager", "inductor"]))
def pair(request):
    """A model compiled with everything fused, and called once; the same model in eager; the report."""
    options = {"select": "always", "strict": True}
    given = {"backend": "fx_fusion", "options": options} if request.param == "inductor" else {"backend": rewriting_backend()}
    eager, model = tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1)
    run = torch.compile(model, **given)
    with fx_fusion.recording() as report:
        same(run, model, eager)
    report.assert_fused(linear_cross_entropy=1, rms_norm=1, add_rms_norm=2, swiglu=1)
    return run, model, eager


def same(run, model, eager, **given):
    """A step of both: loss, gradients, and the logits when they are read."""
    model.zero_grad()
    eager.zero_grad()
    ours, theirs = (m(input_ids=ids, labels=ids, **given) for m in (run, eager))
    ours.loss.backward()
    theirs.loss.backward()
    torch.testing.assert_close(ours.loss, theirs.loss)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.logits + 0, theirs.logits, rtol=1e-4, atol=1e-5)


def failing_once(monkeypatch, op):
    """The next call of an op, or of its backward, finds no memory. (On a CPU most ops compute the pattern.)"""
    failed = []

    def once(real):
        def call(*args, **kwargs):
            asked = not isinstance(args[0], Reference) or args[0].where.endswith(f"patterns.{op}:FUSION.pattern")
            if asked and not failed:
                failed.append(True)
                raise no_memory()
            return real(*args, **kwargs)

        return call

    if op == "linear_cross_entropy":
        from fx_fusion.kernels import linear_cross_entropy

        monkeypatch.setattr(linear_cross_entropy, "each_chunk_that_counts", once(linear_cross_entropy.each_chunk_that_counts))
    else:
        monkeypatch.setattr(Reference, "__call__", once(Reference.__call__))
    return failed


def alive():
    """Return how many tensors there are, and how many deferred outputs wait to be read."""
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()), len(steps.waiting())


def nothing_stayed(before):
    """Return what earlier tests left may go meanwhile."""
    return all(now <= then for now, then in zip(alive(), before, strict=True))


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "swiglu", "linear_cross_entropy"])
def test_no_memory_in_the_forward(pair, monkeypatch, op):
    run, model, eager = pair
    model.zero_grad()
    eager.zero_grad()
    before = alive()
    failed = failing_once(monkeypatch, op)
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        run(input_ids=ids, labels=ids)
    assert failed
    assert nothing_stayed(before)
    same(run, model, eager)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu"])
def test_no_memory_in_the_backward(pair, monkeypatch, op):
    run, model, eager = pair
    model.zero_grad()
    eager.zero_grad()
    before = alive()
    out = run(input_ids=ids, labels=ids)
    failed = failing_once(monkeypatch, op)
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        out.loss.backward()
    assert failed
    del out
    model.zero_grad()
    assert nothing_stayed(before)
    same(run, model, eager)


class NoMemoryFor(TorchDispatchMode):
    """Inside, calls of an op of torch's raise."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is self.op:
            raise no_memory()
        return func(*args, **(kwargs or {}))


def test_no_memory_for_what_is_read(pair):
    """The logits can be read later, with the gradients they have."""
    run, model, eager = pair
    model.zero_grad()
    eager.zero_grad()
    before = alive()
    out = run(input_ids=ids, labels=ids)
    last = out.logits[:, -1]
    for _ in range(2):
        with NoMemoryFor(torch.ops.aten.mm), pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
            last.sum()
    expected = eager(input_ids=ids, labels=ids)
    torch.testing.assert_close(last + 0, expected.logits[:, -1], rtol=1e-4, atol=1e-5)
    (out.loss + out.logits.square().mean()).backward()
    (expected.loss + expected.logits.square().mean()).backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    del out, last, expected
    model.zero_grad()
    eager.zero_grad()
    assert nothing_stayed(before)
    same(run, model, eager)


def test_no_memory_in_the_first_padded_batch(pair, monkeypatch):
    """Which is when the version for padding is compiled, and run."""
    run, model, eager = pair
    same(run, model, eager, attention_mask=torch.ones_like(padding))
    failed = failing_once(monkeypatch, "swiglu")
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        run(input_ids=ids, labels=ids, attention_mask=padding)
    assert failed
    for mask in (padding, torch.ones_like(padding), padding):
        same(run, model, eager, attention_mask=mask)
