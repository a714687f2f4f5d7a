"""Deferred outputs that are read in call after call: a version of the graph that computes them beside the loss."""

import contextlib
import gc
import weakref
from functools import partial

import pytest
import torch

import fx_fusion
from fx_fusion.backend import compile_graph
from fx_fusion.errors import StaleTensorError
from fx_fusion.options import parse
from fx_fusion.runtime.reads import HABIT
from fx_fusion.testing import eager_rest, rewriting_backend
from tests.helpers import SmallModel, tiny_llama

B, S = 2, 16
VOCABULARY = 256
ids = torch.randint(0, VOCABULARY, (B, S), generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def products():
    """Counts the products with the lm_head, those inside of our op included."""
    found = []
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        yield found
    for event in profile.function_events:
        if event.name in ("aten::mm", "aten::addmm") and any(VOCABULARY in shape for shape in event.input_shapes):
            found.append(event.name)


def evaluated(model, read=True, x=ids):
    with torch.no_grad():
        out = model(input_ids=x, labels=x)
        return out.loss, out.logits * 1 if read else None


def test_an_evaluation_makes_the_logits_once():
    model = SmallModel().eval()
    with fx_fusion.recording() as report:
        compiled = torch.compile(model, backend=rewriting_backend())
        loss, logits = evaluated(model)
        for call in range(6):
            compiled_before = len(report.graphs)
            with products() as made:
                ours = evaluated(compiled)
            if len(report.graphs) == compiled_before:  # a compilation multiplies too
                assert len(made) == (2 if call < HABIT else 1), call
            torch.testing.assert_close(ours, (loss, logits))
    first, second = report.graphs
    assert (second.instead_of, second.computed, first.deferred) == (first.index, ("logits",), ("logits",))
    assert first.reads.calls == first.reads.calls_read == 6
    assert "logits; read in 6 of 6 calls" in str(report)
    assert "computed beside the loss: logits" in str(report)


def test_it_goes_back_when_nobody_reads_and_compiles_nothing_twice():
    model = SmallModel().eval()
    habits = [True] * 4 + [False] * 4 + [True] * 4 + [True, False] * 3
    with fx_fusion.recording() as report:
        compiled = torch.compile(model, backend=rewriting_backend())
        evaluated(compiled)
        for call, read in enumerate(habits):
            compiled_before, in_the_habit = len(report.graphs), all([False, True, *habits][call : call + HABIT])
            with products() as made:
                evaluated(compiled, read=read)
            if len(report.graphs) == compiled_before:
                assert len(made) == (1 if in_the_habit or not read else 2), (call, read)
    assert len(report.graphs) == 2
    assert report.graphs[0].reads.calls == len(habits) + 1
    assert report.graphs[0].reads.calls_read == sum(habits) + 1


def test_one_look_compiles_nothing():
    compiled = torch.compile(SmallModel(), backend=rewriting_backend())
    with fx_fusion.recording() as report:
        for read in (False, True, False, False, True, False):
            evaluated(compiled, read=read)
    assert len(report.graphs) == 1


def gradients(model, call, extra, forward=None):
    """Loss and gradients of a step that reads the logits; with ``extra`` a second loss is made of them."""
    model.zero_grad()
    x = ids.roll(call, 1)
    out = (model if forward is None else forward)(input_ids=x, labels=x)
    right = (out.logits.argmax(-1) == x).float().mean()
    loss = out.loss + (out.logits.float().logsumexp(-1).square().mean() if extra else 0)
    loss.backward()
    return {"right": right, "loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"backend": "fx_fusion", "options": {"select": "always"}}, marks=pytest.mark.slow),
        {"backend": rewriting_backend()},
    ],
    ids=["inductor", "eager"],
)
def test_a_training_that_logs_accuracy(given):
    """Sometimes the logits have a part in the loss: gradients come through them, whichever version ran."""
    model = SmallModel()
    with fx_fusion.recording() as report:
        compiled = torch.compile(model, **given)
        for call in range(6):
            extra = call in (1, 3, 4)
            expected = gradients(model, call, extra)
            torch.testing.assert_close(gradients(model, call, extra, compiled), expected, rtol=1e-4, atol=1e-5)
    assert len(report.graphs) == 2
    assert report.count("linear_cross_entropy") == 2, str(report)
    assert not any(g.fallback for g in report.graphs)


def in_the_habit(model, **options):
    compiled = torch.compile(model, backend=rewriting_backend(**options))
    for _ in range(HABIT):
        _ = compiled(input_ids=ids, labels=ids).logits * 1
    return compiled


def test_computed_outputs_may_be_read_after_an_optimizer_step_but_not_differentiated():
    model = SmallModel()
    compiled, optimizer = in_the_habit(model), torch.optim.SGD(model.parameters(), 0.1)
    expected = model(input_ids=ids, labels=ids).logits.detach().clone()
    out = compiled(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    torch.testing.assert_close(out.logits.detach() * 1, expected)
    with pytest.raises(StaleTensorError, match="optimizer step"):
        (out.logits * 1).sum().backward()


def test_an_output_written_to_is_the_readers_own():
    model = SmallModel().eval()
    with torch.no_grad():
        compiled = in_the_habit(model)
        for _ in range(2):
            out, expected = compiled(input_ids=ids, labels=ids), model(input_ids=ids, labels=ids)
            out.logits.div_(2.0)
            torch.testing.assert_close(out.logits * 2, expected.logits)
            torch.testing.assert_close(out.loss, expected.loss)


def test_nothing_is_kept_alive():
    import gc
    import weakref

    compiled = in_the_habit(SmallModel())
    out = compiled(input_ids=ids, labels=ids)
    value = weakref.ref(out.logits.materialize())
    del out
    gc.collect()
    assert value() is None


def test_padded_and_full_batches_each_have_their_habit():
    model, mask = tiny_llama().eval(), torch.ones(B, S, dtype=torch.long)
    padded = mask.clone()
    padded[1, 9:] = 0
    with fx_fusion.recording() as report, torch.no_grad():
        compiled = torch.compile(model, backend=rewriting_backend())
        for given in (mask, padded, mask, padded, mask, padded, mask, padded):
            ours, expected = (m(input_ids=ids, labels=ids, attention_mask=given) for m in (compiled, model))
            torch.testing.assert_close(ours.logits * 1, expected.logits)
            torch.testing.assert_close(ours.loss, expected.loss)
    kinds = sorted((bool(g.assumes), bool(g.computed)) for g in report.graphs)
    assert kinds == [(False, False), (False, True), (True, False), (True, True)], str(report)


def test_what_cannot_be_handed_out_stays_deferred():
    """Logits whose last position is cut off before the loss: the op makes the others only."""

    def function(x, head, target):
        logits = torch.nn.functional.linear(x, head)
        shifted = logits[:, :-1].reshape(-1, head.shape[0])
        return torch.nn.functional.cross_entropy(shifted, target.reshape(-1)), logits

    given = torch.randn(2, 9, 16), torch.randn(5000, 16), torch.randint(0, 5000, (2, 8))
    with fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend(select="always"))
        for _ in range(4):
            for ours, expected in zip(compiled(*given), function(*given), strict=True):
                torch.testing.assert_close(ours * 1, expected)
    assert len(report.graphs) == 1
    assert report.graphs[0].deferred


def test_floats_that_change_are_numbers_of_the_other_version_too():
    """Dynamo hands them in as tensors, and the graph takes them out with ``.item()``."""
    model = tiny_llama().eval()
    with fx_fusion.recording() as report:
        compiled = torch.compile(model, backend=rewriting_backend(), dynamic=True)
        for x in (ids[:, :n].contiguous() for n in (5, 9, 13, 11)):
            torch.testing.assert_close(evaluated(compiled, x=x), evaluated(model, x=x))
    assert len(report.graphs) == 2
    assert not any(g.broke or g.fallback for g in report.graphs), str(report)


def test_a_version_compiled_in_the_middle_of_a_run_keeps_nothing_alive():
    """An exception that a compiler caught and kept in a cycle has the frames of all its callers, and what they hold."""

    def keeping_an_exception(gm, example_inputs, options):
        try:
            raise ValueError
        except ValueError as error:
            kept = error
        assert kept.__traceback__ is not None
        gc.collect()  # as in a long compilation: what survived is old, and Dynamo collects the young when it is done
        return eager_rest(gm, example_inputs, options)

    parsed = parse(None, {"select": "always", "strict": True})
    model = torch.compile(SmallModel().eval(), backend=partial(compile_graph, options=parsed, rest=keeping_an_exception))
    alive = []

    def evaluate():
        with torch.no_grad():
            logits = model(input_ids=ids, labels=ids).logits * 1
        alive.append(weakref.ref(logits))
        return logits.sum()

    evaluate(), gc.collect()
    gc.disable()
    try:
        with fx_fusion.recording() as report:
            for _ in range(HABIT + 1):
                evaluate()
    finally:
        gc.enable()
    assert len(report.graphs) == 1, "the version that computes logits beside the loss"
    assert [reference() for reference in alive[1:]] == [None] * (HABIT + 1)
