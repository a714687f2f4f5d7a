"""A padding mask assumed to be all ones: never a wrong result, whatever comes."""

import copy

import torch

import fx_fusion
from fx_fusion.speculate import AllOnes
from fx_fusion.testing import rewriting_backend
from tests.helpers import tiny_llama, tokens

ids = tokens()
ones = torch.ones(2, 16, dtype=torch.long)
padded = torch.tensor([[1] * 16, [1] * 10 + [0] * 6])
left_padded = padded.flip(1)


def models(**options):
    eager = tiny_llama()
    ours = copy.deepcopy(eager)
    return eager, ours, torch.compile(ours, backend=rewriting_backend(**options))


def same_step(eager, ours, compiled, mask):
    labels = ids.masked_fill(mask == 0, -100)
    expected = eager(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss = compiled(input_ids=ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_padded_batches_in_the_middle_of_training_and_accumulation():
    eager, ours, compiled = models()
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (eager, ours)]
    with fx_fusion.recording() as report:
        for mask in (ones, ones.clone(), padded, left_padded, ones, padded.bool().long()):
            same_step(eager, ours, compiled, mask)  # gradients accumulate over the calls
    assert report.count("causal_mask") == 2
    assert any("all ones" in a for g in report.graphs for a in g.assumes)
    for optimizer in optimizers:
        optimizer.step()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    same_step(eager, ours, compiled, ones)


def test_the_padded_batch_first():
    same_step(*models(), padded)


def test_a_boolean_mask():
    eager, ours, compiled = models()
    same_step(eager, ours, compiled, ones.bool())
    same_step(eager, ours, compiled, padded.bool())


def test_a_mask_changed_in_place_is_read_again():
    eager, ours, compiled = models()
    mask = ones.clone()
    same_step(eager, ours, compiled, mask)
    mask[1, 10:] = 0
    same_step(eager, ours, compiled, mask)
    mask.fill_(1)
    same_step(eager, ours, compiled, mask)


def test_a_mask_of_twos_is_not_ones():
    check = AllOnes()
    assert not check(ones * 2)
    assert check(ones)
    assert check(ones.bool())
    assert not check(ones.float() * 0.5)


def test_the_same_tensor_is_read_once_on_a_gpu_and_always_on_a_cpu(device):
    check, mask, other = AllOnes(), ones.clone().to(device), padded.to(device)
    for _ in range(5):
        assert check(mask)
    assert check.checks == (1 if device == "cuda" else 5)
    assert not check(other)
    mask[0, 0] = 0
    assert not check(mask)


def test_memory_shared_with_numpy():
    check, array = AllOnes(), ones.numpy().copy()
    mask = torch.from_numpy(array)
    assert check(mask)
    array[0, 0] = 0
    assert not check(mask)


def test_switched_off():
    eager, ours, compiled = models(speculate=False)
    with fx_fusion.recording() as report:
        same_step(eager, ours, compiled, ones)
    report.assert_fused(causal_mask=0)
    assert not report.graphs[0].assumes


def test_evaluation_under_inference_mode():
    eager, ours, compiled = models()
    with torch.inference_mode():
        for mask in (ones, padded, ones):
            expected, out = (m(input_ids=ids, attention_mask=mask) for m in (eager, compiled))
            torch.testing.assert_close(out.logits + 0, expected.logits, rtol=1e-4, atol=1e-5)


def test_symbolic_lengths():
    eager, ours, _ = models()
    compiled = torch.compile(ours, backend=rewriting_backend(), dynamic=True)
    for length, mask in ((16, ones), (12, padded), (9, ones), (16, padded)):
        cut = {"input_ids": ids[:, :length], "attention_mask": mask[:, :length], "labels": ids[:, :length]}
        torch.testing.assert_close(compiled(**cut).loss, eager(**cut).loss)


def test_through_inductor():
    """The same through Inductor, which compiles both versions."""
    eager = tiny_llama(num_hidden_layers=1)
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours, backend="fx_fusion", options={"strict": True})
    for mask in (ones, padded, ones):
        same_step(eager, ours, compiled, mask)
