"""CUDA graphs, captured by hand and by Inductor: replays read no masks, run no Python, and write where they wrote before."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from tests.helpers import tiny_llama

pytestmark = pytest.mark.gpu
LENGTH = 64


def batches(n, length=LENGTH):
    return [torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(i)).cuda() for i in range(n)]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_logits_and_gradients_behind_each_replay_of_a_captured_step():
    """As people capture a training step: some steps before, on another stream; then new values in the same tensors."""
    model = tiny_llama(max_position_embeddings=LENGTH).cuda()
    call, ids = torch.compile(model, backend="fx_fusion", options={"select": "always"}), batches(1)[0]

    def step(of):
        out = of(input_ids=ids, labels=ids)
        out.loss.backward()
        return out.loss, out.logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with fx_fusion.recording() as report, torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad()
            step(call)
    torch.cuda.current_stream().wait_stream(stream)
    assert report.count("linear_cross_entropy") >= 1, str(report)
    assert not any(g.fallback for g in report.graphs), str(report)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, logits = step(call)
    for other in batches(3):
        ids.copy_(other)
        graph.replay()  # assigns the gradients
        found = loss.clone(), logits.clone(), gradients(model)
        kept = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        expected = *step(model), gradients(model)
        torch.testing.assert_close(found, tuple(expected), rtol=1e-3, atol=1e-4)
        for name, p in model.named_parameters():
            p.grad = kept[name]  # where the next replay writes


@pytest.mark.parametrize("reads", [False, True])
def test_evaluations_between_steps_under_reduce_overhead(reads):
    """An evaluation's logits are kept over a step that runs the same CUDA graphs again, and read before it or never."""
    model, plain = (tiny_llama(max_position_embeddings=LENGTH).cuda() for _ in range(2))
    options = {"fused": True, "lr": 1e-2}
    optimizers = [torch.optim.AdamW(m.parameters(), **options) for m in (model, plain)]
    call = torch.compile(model, backend="fx_fusion", mode="reduce-overhead")
    for ids in batches(6):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            kept, expected = call(input_ids=ids).logits, plain(input_ids=ids).logits
        if reads:
            torch.testing.assert_close(kept.clone(), expected, rtol=1e-3, atol=1e-3)
        losses = []
        for of, optimizer in zip((call, plain), optimizers, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            loss = of(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
        del kept


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_mask_that_a_replay_writes_into_again(mode):
    """Three causal masks, one with a hole: a replay writes it where the others were, and PyTorch is not told."""

    def function(query, key, value, padding):
        length = torch.arange(query.shape[2], device="cuda")
        mask = (length <= length[:, None]) & padding[:, None, None, :].bool()
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    query, key, value = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ones = torch.ones(2, 256, dtype=torch.long, device="cuda")
    hole = ones.clone()
    hole[0, 100:200] = 0
    call = torch.compile(function, backend="fx_fusion", mode=mode)
    with torch.no_grad(), fx_fusion.recording() as report:
        for padding in (ones, ones, ones, hole, ones, hole, hole, hole, ones):
            torch.compiler.cudagraph_mark_step_begin()
            found = call(query, key, value, padding.clone())
            torch.testing.assert_close(found, function(query, key, value, padding), rtol=2e-2, atol=2e-2)
    assert report.count("causal_mask") >= 1, str(report)


def test_attention_reads_one_row_of_a_padded_mask():
    """Of a mask (batch, 1, queries, keys) that comes in: by the kernels of a GPU."""
    length = torch.arange(256, device="cuda")
    mask = (length <= length[:, None]) & (length < torch.tensor([[256], [90]], device="cuda"))[:, None, None, :]

    def function(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[1])

    given = [torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with fx_fusion.recording() as report:
        found = torch.compile(function, backend="fx_fusion", options={"select": "always"})(*given, mask)
    expected = function(*given, mask)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    grads = [torch.autograd.grad(y.float().square().sum(), given) for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2)
    assert report.count("block_sparse_attention") == 1, str(report)
