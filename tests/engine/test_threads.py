"""Several threads compile, and run what was compiled, at once: different models, and one model."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.runtime import mask_values
from fx_fusion.testing import rewriting_backend
from tests.helpers import tiny_llama, tokens

THREADS = 4


@pytest.fixture(autouse=True)
def often_interrupted():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(work, count=THREADS):
    """Return what ``work(n)`` returns in each of several threads, which start together."""
    start = threading.Barrier(count)

    def run(n):
        start.wait()
        return work(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


FUNCTIONS = {
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w).sin(),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w).cos(),
    "swiglu": lambda x, w: F.silu(x * w) * x,
    "cross_entropy": lambda x, w: F.cross_entropy(x * w, torch.arange(6) % 8),
}


def test_different_functions():
    def work(n):
        name, function = list(FUNCTIONS.items())[n]
        x, w = torch.randn(6, 8), torch.randn(8, requires_grad=True)
        with fx_fusion.recording() as report:
            found = torch.compile(function, backend=rewriting_backend())(x, w)
        report.assert_fused(**{name: 1})
        assert {site.fusion for site in report.sites if site.status == "fused"} == {name}
        torch.testing.assert_close(found, function(x, w))
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), w)[0] for y in (found, function(x, w))))

    at_once(work)


def test_one_model():
    """Compiled by whoever comes first; padded and full batches, logits read by some: each thread gets its own numbers."""
    model = tiny_llama(num_hidden_layers=1)
    run = torch.compile(model, backend=rewriting_backend())

    def work(n):
        generator = torch.Generator().manual_seed(n)
        for step in range(6):
            ids = torch.randint(0, 256, (2, 16), generator=generator)
            mask = torch.ones(2, 16, dtype=torch.long)
            mask[0, 16 - (n + step) % 3 * 4 :] = 0
            given = {"input_ids": ids, "attention_mask": mask, "labels": ids}
            ours, theirs = run(**given), model(**given)
            torch.testing.assert_close(ours.loss, theirs.loss)
            found, expected = (torch.autograd.grad(out.loss, list(model.parameters())) for out in (ours, theirs))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            if n % 2:
                torch.testing.assert_close(ours.logits + 0, theirs.logits, rtol=1e-4, atol=1e-5)

    at_once(work)


def test_logits_that_two_threads_read():
    """Whoever comes first computes them; both get all of them."""
    model, ids = tiny_llama(num_hidden_layers=1), tokens()
    run = torch.compile(model, backend=rewriting_backend())
    expected = model(input_ids=ids, labels=ids).logits
    ways = (lambda y, last: y + 0, lambda y, last: last + 0, lambda y, last: y.float()[:, -1] + 0, lambda y, last: y.view(32, -1) + 0)
    for _ in range(20):
        logits = run(input_ids=ids, labels=ids).logits
        made = at_once(lambda n, logits=logits, last=logits[:, -1]: ways[n](logits, last))
        for found, right in zip(made, (expected, expected[:, -1], expected[:, -1], expected.view(32, -1)), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), model.lm_head.weight, retain_graph=True)[0] for y in (made[0], expected)))


def test_padding_that_another_thread_has_read(monkeypatch):
    """As on a GPU, where the answer for one call is read in the next: between a look whether there is one and the reading,
    another thread may have read it."""

    answers = [lambda: False]

    class Interrupted(mask_values.Padding):
        @property
        def _unread(self):
            return answers.pop() if answers else None

        @_unread.setter
        def _unread(self, answer):
            pass

    monkeypatch.setattr(mask_values, "reading_waits", lambda mask: True)
    assert Interrupted().is_absent(torch.ones(4))
