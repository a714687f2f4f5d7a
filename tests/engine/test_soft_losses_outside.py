"""Losses against distributions outside of the compiled model: distillation in a loop of one's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fx_fusion
from tests.engine.test_loss_behind_a_break import gradients, of_graphs
from tests.engine.test_loss_outside import B, L, Model, V, check, compiled_of, ids, small_sizes, trained  # noqa: F401
from tests.helpers import rewriting_backend

T = 2.0
teacher = torch.randn(B, L, V, generator=torch.Generator().manual_seed(3)) * 2


def shifted(z):
    return F.kl_div(F.log_softmax(z[:, :-1] / T, -1), F.softmax(teacher[:, :-1] / T, -1), reduction="batchmean") * T * T


TAKEN_LOSSES = {
    "batchmean": lambda z: F.kl_div(F.log_softmax(z / T, -1), F.softmax(teacher / T, -1), reduction="batchmean") * T * T,
    "module": lambda z: nn.KLDivLoss(reduction="batchmean")(z.log_softmax(-1).view(-1, V), teacher.softmax(-1).view(-1, V)),
    "mean": lambda z: F.kl_div(z.log_softmax(-1), teacher.softmax(-1)) * 1e3,
    "sum": lambda z: F.kl_div(torch.log_softmax(z.float(), -1), teacher.softmax(-1), reduction="sum") / 7,
    "log target": lambda z: F.kl_div(
        F.log_softmax(z / T, -1), F.log_softmax(teacher / T, -1), reduction="batchmean", log_target=True
    ),
    "shifted": shifted,
    "cross_entropy": lambda z: F.cross_entropy(z.view(-1, V), teacher.softmax(-1).view(-1, V)),
    "cross_entropy, sum": lambda z: F.cross_entropy((z / T).flatten(0, 1), teacher.softmax(-1).flatten(0, 1), reduction="sum") / 7,
}  # fmt: skip
READ_LOSSES = {
    "rows": lambda z: F.kl_div(z.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1).mean(),
    "smoothing": lambda z: F.cross_entropy(z.view(-1, V), teacher.softmax(-1).view(-1, V), label_smoothing=0.1),
    "broadcast": lambda z: F.kl_div(z.log_softmax(-1), teacher.softmax(-1)[:1], reduction="sum") / 7,
    "of probabilities": lambda z: F.kl_div(z.softmax(-1).log(), teacher.softmax(-1), reduction="batchmean"),
    "float64": lambda z: F.kl_div(z.log_softmax(-1), teacher.double().softmax(-1), reduction="batchmean"),
}


@pytest.mark.parametrize("name", TAKEN_LOSSES)
def test_spellings(name):
    report = check(Model(bias="sum" in name), TAKEN_LOSSES[name], rtol=1e-4, atol=1e-5)
    assert "a loss outside took what they are made of in 1" in str(report)


@pytest.mark.filterwarnings("ignore:.*the size of input")
@pytest.mark.parametrize("name", READ_LOSSES)
def test_what_reads_them(name):
    check(Model(), READ_LOSSES[name], taken=0, read=1, rtol=1e-4, atol=1e-5)


def test_bfloat16_and_autocast():
    for name in ("batchmean", "cross_entropy"):
        check(Model().bfloat16(), lambda z, f=TAKEN_LOSSES[name]: f(z.float()), rtol=5e-2, atol=5e-2)
        check(Model(), TAKEN_LOSSES[name], rtol=5e-2, atol=5e-2, dtype=torch.bfloat16)


def test_dtypes_of_results_are_eagers():
    """PyTorch promotes logits and probabilities, in autocast and outside of it."""
    q = teacher.softmax(-1).view(-1, V)
    for loss_of in (lambda z: F.cross_entropy(z.view(-1, V), q), lambda z: F.kl_div(z.log_softmax(-1).view(-1, V), q)):
        check(Model().bfloat16(), loss_of, rtol=5e-2, atol=5e-2)
        check(Model(), lambda z, f=loss_of: torch.autocast("cpu", enabled=False)(f)(z), rtol=5e-2, atol=5e-2, dtype=torch.bfloat16)


def test_an_error_of_pytorchs():
    for call in (Model(), compiled_of(Model())):
        z = call(ids).view(-1, V)
        with pytest.raises(RuntimeError, match="ignore_index is not supported"):
            F.cross_entropy(z, teacher.softmax(-1).view(-1, V), ignore_index=5)


@pytest.mark.parametrize("name", ["batchmean", "cross_entropy"])
def test_a_loss_that_is_checkpointed_alone(name):
    """What waited in the first run would be there in the second, which would save other tensors."""
    model, exact = Model(), Model()
    checkpoint(TAKEN_LOSSES[name], compiled_of(model)(ids), use_reentrant=False).backward()
    checkpoint(TAKEN_LOSSES[name], exact(ids), use_reentrant=False).backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_teacher_that_is_compiled_too():
    """Its logits are deferred, too, under no_grad; the softmax reads them."""
    student, wise = Model(), Model(bias=True)
    call, ask = compiled_of(student), compiled_of(wise)

    def loss_of(z, teach):
        with torch.no_grad():
            q = F.softmax(teach(ids) / T, -1)
        return F.kl_div(F.log_softmax(z / T, -1), q, reduction="batchmean")

    expected, gradients = trained(student, student, lambda z: loss_of(z, wise))
    with fx_fusion.recording() as report:
        found, ours = trained(student, call, lambda z: loss_of(z, ask))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    assert report.graphs[0].reads.calls_taken == 1


def test_a_teacher_with_a_gradient_reads():
    q = teacher.clone().requires_grad_()
    check(Model(), lambda z: F.kl_div(z.log_softmax(-1), q.softmax(-1), reduction="batchmean"), taken=0, read=1, rtol=1e-4)


def test_beside_the_usual_loss():
    """Two losses of the same logits: the second reads them, and after two such calls they are made at once."""

    def loss_of(z):
        return F.cross_entropy(z.view(-1, V), ids.view(-1)) + TAKEN_LOSSES["batchmean"](z)

    model = Model()
    call = compiled_of(model)
    for _ in range(4):
        expected, gradients = trained(model, model, loss_of)
        found, ours = trained(model, call, loss_of)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)


def beside_classes(z):
    return 0.5 * F.cross_entropy(z.view(-1, V), ids.view(-1)) + 0.5 * TAKEN_LOSSES["batchmean"](z)


@pytest.mark.parametrize("loss_of", [TAKEN_LOSSES["batchmean"], TAKEN_LOSSES["log target"], beside_classes], ids=["alone", "log", "both"])
def test_a_loss_that_is_compiled_by_itself(loss_of):
    """Its graph runs in a version that begins with lm_head's product, and the two fuse."""
    model = Model()
    with fx_fusion.recording() as report:
        compiled, loss = compiled_of(model), torch.compile(loss_of, backend=rewriting_backend())
        for _ in range(3):
            found = gradients(model, loss(compiled(ids)))
            torch.testing.assert_close(found, gradients(model, loss_of(model(ids))), rtol=1e-4, atol=1e-6)
    assert of_graphs(report) == (3, 0, 3), str(report)
    assert report.count("linear_soft_cross_entropy") == 1, str(report)
