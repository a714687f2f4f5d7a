"""Losses and metrics of logits under ``no_grad``, computed outside of the model: of an evaluation, of a reference model."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from tests.engine.test_loss_outside import (  # noqa: F401  a fixture
    LOSSES,
    Model,
    V,
    check,
    compiled_of,
    ids,
    products,
    small_sizes,
    some,
    trained,
)  # fmt: skip

READ = {
    "loss": LOSSES["rows"],
    "loss and accuracy": lambda z: (LOSSES["shifted"](z), (z[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()),
    "predictions": lambda z: z.argmax(dim=-1),
    "log-probabilities": lambda z: z.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).masked_fill(some == -100, 0).sum(-1),
    "entropy": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
}


@pytest.mark.parametrize("name", READ)
def test_without_logits(name):
    """In call after call."""
    model, read = Model(), READ[name]
    compiled = compiled_of(model)
    with torch.no_grad(), fx_fusion.recording() as report:
        for _ in range(3):
            found, expected = read(compiled(ids)), read(model(ids))
            torch.testing.assert_close(*[[t + 0 for t in made] if isinstance(made, tuple) else made + 0 for made in (found, expected)])
    assert report.graphs[0].reads.calls_taken == 3, str(report)
    assert report.graphs[0].reads.calls_read == 0, str(report)


@pytest.mark.parametrize("how", ["read", "cat", "numpy", "topk"])
def test_logits_that_are_read(how):
    """They are the model's. After two calls they are made at once."""
    model = Model()
    compiled = compiled_of(model)
    with torch.no_grad(), fx_fusion.recording() as report:
        for _ in range(4):
            z = compiled(ids)
            found = {"read": lambda z: z + 0, "cat": lambda z: torch.cat([z, z]), "numpy": lambda z: torch.from_numpy(z.numpy()),
                     "topk": lambda z: z.topk(2).values}[how]  # fmt: skip
            torch.testing.assert_close(found(z), found(model(ids)))
        assert products(lambda: found(compiled(ids))) == 1
    assert report.graphs[0].reads.calls_at_once >= 2


def test_predictions_that_are_collected_keep_nothing():
    """They are computed when a model is called again, and what they are made of is freed."""
    model = Model(more=True)
    compiled, hidden, predictions = compiled_of(model), [], []
    with torch.no_grad():
        for _ in range(4):
            logits, made = compiled(ids)
            hidden.append(weakref.ref(made.untyped_storage()))
            predictions.append(logits.argmax(-1))
            del logits, made
        gc.collect()
        assert [alive() is not None for alive in hidden] == [False, False, False, True]
        torch.testing.assert_close(torch.stack(predictions), model(ids)[0].argmax(-1).expand(4, *ids.shape))


def test_a_gradient_is_wanted_of_what_has_none():
    with torch.no_grad():
        z = compiled_of(Model())(ids)
    loss = F.cross_entropy(z.view(-1, V), ids.view(-1))
    assert not loss.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_a_teacher_outside_leaves_the_logits_of_the_student_alone():
    """A teacher's logits are read, once a step; the student's loss takes what its own are made of."""
    model, teacher = Model(), Model(bias=True)
    of_teacher = teacher

    def loss_of(z):
        with torch.no_grad():
            t = of_teacher(ids)
        return F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="batchmean") + F.kl_div(
            z.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean"
        )

    expected, gradients = trained(model, model, loss_of)
    call, of_teacher = compiled_of(model), compiled_of(teacher)
    for _ in range(4):
        found, ours = trained(model, call, loss_of)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    assert products(lambda: trained(model, call, loss_of)) == 4  # three of the student, one of the teacher


def test_a_reference_model_of_a_preference():
    """Log-probabilities of both models, as a loop of one's own computes them for DPO."""
    model, reference = Model(), Model(bias=True)

    def log_p(z):
        return z.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).masked_fill(some == -100, 0).sum(-1)

    def loss_of(z):
        with torch.no_grad():
            before = log_p(call_reference(ids))
        gain = log_p(z) - before
        return -F.logsigmoid(gain[:1] - gain[1:2]).mean()

    call_reference = reference
    expected, gradients = trained(model, model, loss_of)
    call_reference = compiled_of(reference)
    with fx_fusion.recording() as report:
        found, ours = trained(model, compiled_of(model), loss_of)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    taken = [graph.reads.calls_taken for graph in report.graphs if graph.deferred]
    assert taken == [1, 1], str(report)
