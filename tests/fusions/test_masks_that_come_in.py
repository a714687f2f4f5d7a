"""Masks of attention calls that a graph gets as tensors: taken for what they are by value, checked when the graph runs."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.graph.masks.assumed import KINDS
from fx_fusion.runtime import mask_values
from fx_fusion.runtime.mask_values import is_of_kind
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.fuzz.judge import ours
from tests.helpers import tiny_llama, tokens
from tests.structured_masks import S, positions, tensors

Q, K = positions(S)
CAUSAL = (K <= Q)[None, None]
ALL = torch.ones(1, 1, S, S, dtype=torch.bool)
SHOWN = (torch.arange(S) < torch.tensor([[S], [317]]))[:, None, None, :]
LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "causal": (CAUSAL, {"causal", "causal_keys"}),
    "causal_of_two": (CAUSAL.expand(2, 1, S, S), {"causal", "causal_keys"}),
    "none": (ALL, {"none", "keys"}),
    "keys": (SHOWN.expand(2, 1, S, S), {"keys"}),
    "causal_keys": (CAUSAL & SHOWN, {"causal_keys"}),
    "left_padding": (CAUSAL & SHOWN.flip(-1), {"causal_keys"}),
    "nothing": (~ALL, {"keys", "causal_keys"}),
    "window": (CAUSAL & (K > Q - 9), set()),
    "later": ((K > Q)[None, None], set()),
    "additive": (torch.zeros(S, S).masked_fill(~CAUSAL, float("-inf")), {"causal"}),
    "additive_lowest": (torch.zeros(1, 1, S, S).masked_fill(~CAUSAL, LOWEST), {"causal"}),
    "additive_none": (torch.zeros(1, 1, S, S), {"none"}),
    "additive_padding": (torch.zeros(2, 1, S, S).masked_fill(~(CAUSAL & SHOWN), LOWEST), set()),
    "alibi": (-(Q - K).abs()[None, None].float().masked_fill(~CAUSAL, float("inf")), set()),
    "nearly_lowest": (torch.zeros(1, 1, S, S).masked_fill(~CAUSAL, -1e4), set()),
    "not_a_number": (torch.zeros(1, 1, S, S).masked_fill(~CAUSAL, float("nan")), set()),
}


def kinds_of(mask):
    return {kind for kind in KINDS if is_of_kind(mask, kind)}


@pytest.mark.parametrize("name", MASKS)
def test_the_kinds_of_a_mask(name, device):
    mask, kinds = MASKS[name]
    mask = mask.view(-1, 1, S, S).to(device)
    assert kinds_of(mask) == kinds
    assert kinds <= set(KINDS)


def test_heads_of_their_own_have_no_keys_in_common():
    assert kinds_of((CAUSAL & SHOWN)[:1].expand(1, 2, S, S)) == {"causal"}
    assert kinds_of((CAUSAL & SHOWN)[1:].expand(1, 2, S, S)) == set()


def test_a_mask_that_is_written_to_is_read_again(device):
    mask = CAUSAL.clone().to(device)
    assert "causal" in kinds_of(mask)
    mask[0, 0, 5, 0] = False
    assert not kinds_of(mask)


def attend(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def with_gradients(function, inputs, mask):
    leaves = [t.clone().requires_grad_() for t in inputs.values()]
    out = function(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


FUSED = {"causal": "causal_mask", "none": "causal_mask", "keys": "block_sparse_attention", "causal_keys": "block_sparse_attention"}


@pytest.mark.parametrize("name", MASKS)
def test_attention_runs_as_its_mask_is(name, on_cpu):
    """The version that is taken is the one for what the mask is; the numbers are eager's, whatever it is."""
    mask, kinds = MASKS[name]
    inputs, mask = tensors(), mask.view(-1, 1, S, S).clone()
    with fx_fusion.recording() as report:
        compiled = torch.compile(attend, backend=rewriting_backend(), dynamic=False)
        for _ in range(2):
            found = with_gradients(compiled, inputs, mask)
    expected = with_gradients(attend, inputs, mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    last = report.graphs[-1]
    best = next((kind for kind in KINDS if kind in kinds), None)
    fired = [s.fusion for s in report.sites if s.graph == last.index and s.status == "fused"]
    assert fired == ([FUSED[best]] if best else []), str(report)
    assert len(report.graphs) == 1, str(report)
    assert report.graphs[0].unassumed == (() if best == "causal" else ("mask hides what comes later",))
    assert not any(g.fallback for g in report.graphs)


def test_one_program_many_masks(on_cpu):
    order = ["causal", "causal_keys", "none", "causal", "window", "left_padding", "keys", "causal_of_two", "window", "none"]
    with fx_fusion.recording() as report:
        compiled = torch.compile(attend, backend=rewriting_backend(), dynamic=False)
        for name in order:
            inputs = {**tensors(), "mask": MASKS[name][0].expand(2, 1, S, S).contiguous()}
            fused = run(compiled, inputs)
            assert worst_excess(fused, run(attend, inputs), run_oracle(attend, inputs), torch.float32)[1] <= 1, name
    assert len(report.graphs) == 5  # causal; padded causal; none; keys; neither
    assert (report.graphs[0].calls.assumed, report.graphs[0].calls.otherwise) == (3, 7)
    assert "mask hides what comes later; held in 3 of 10 calls" in str(report)


def each_of_the_batch(q, k, v, mask):
    return torch.cat([attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask[i : i + 1]) for i in range(2)])


def in_checkpointed_bodies(q, k, v, mask):
    for _ in range(2):
        q = checkpoint(lambda q: attend(q.sin(), k, v, mask), q, use_reentrant=False)
    return q


READS = {  # and how many of its calls read the padding of the mask
    "the first row for all": (lambda q, k, v, mask: attend(q, k, v, mask[0]), 1),
    "the second row for all": (lambda q, k, v, mask: attend(q, k, v, mask[1]), 1),
    "a row each": (each_of_the_batch, 2),
    "a part of it": (lambda q, k, v, mask: attend(q[:, :, :90], k[:, :, :90], v[:, :, :90], mask[:, :, :90, :90]), 0),
    "in checkpointed bodies": (in_checkpointed_bodies, 2),
}


@pytest.mark.parametrize("of", [SHOWN.expand(2, 1, S, S), CAUSAL & SHOWN], ids=["keys", "causal_keys"])
@pytest.mark.parametrize("name", READS)
def test_what_is_read_of_a_padded_mask(name, of, on_cpu):
    function, calls = READS[name]
    inputs, mask = tensors(), of.clone()
    with fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend(), dynamic=False)
        found = with_gradients(compiled, inputs, mask)
    torch.testing.assert_close(found, with_gradients(function, inputs, mask), rtol=1e-4, atol=1e-5)
    assert report.count("block_sparse_attention") == calls, str(report)
    assert not any(g.fallback for g in report.graphs), str(report)


class Layered(torch.nn.Module):
    """A mask that is built in one graph and read in others: a break between layers, as FSDP2 makes."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())

    def forward(self, **given):
        return self.model(**given)


@pytest.mark.parametrize("padding", ["ones", "right", "none"])
def test_a_model_with_a_break_before_each_layer(padding, on_cpu):
    model = Layered(tiny_llama(num_hidden_layers=3))
    ids = tokens()
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[0, ids.shape[1] // 2 :] = 0
    given = {"input_ids": ids, "labels": ids} | ({} if padding == "none" else {"attention_mask": mask})
    expected = model(**given).loss
    expected.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with fx_fusion.recording() as report:
        compiled = torch.compile(model, backend=rewriting_backend())
        for _ in range(2):
            model.zero_grad()
            loss = compiled(**given).loss
            loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, grads, rtol=1e-3, atol=1e-4)
    assert len(report.graphs) > 2
    layers = [g for g in report.graphs if "scaled_dot_product" in g.before]
    fired = {s.fusion for g in layers for s in report.sites if s.graph == g.index and s.status == "fused"}
    wanted = "block_sparse_attention" if padding == "right" else "causal_mask"
    assert wanted in fired, str(report)


@pytest.fixture
def read(monkeypatch):
    """The masks whose values are read, as on a GPU, where the host has to wait for them."""
    masks, holds = [], mask_values._holds
    monkeypatch.setattr(mask_values, "reading_waits", lambda mask: True)
    monkeypatch.setattr(mask_values, "_holds", lambda mask, kind: masks.append(mask) or holds(mask, kind))
    return masks


BUILT = {
    "causal": lambda padding, q, k: k <= q,
    "of the padding too": lambda padding, q, k: (k <= q) & padding[:, None, None, :].bool(),
    "returned and written to": lambda padding, q, k: k <= q,
    "none": lambda padding, q, k: k >= 0,
    "window": lambda padding, q, k: (k <= q) & (k > q - 9),
    "later": lambda padding, q, k: k > q,
}


@pytest.mark.parametrize("name", BUILT)
def test_what_a_graph_hands_on_is_eagers(name, read, on_cpu):
    """A mask whose formula the graph that builds it has is not read where it is used, in a bucket of DDP or behind a break."""

    def function(query, key, value, padding):
        length = torch.arange(S)
        mask = BUILT[name](padding, length[:, None], length[None]).expand(2, 1, S, S).contiguous()
        torch._dynamo.graph_break()
        if name == "returned and written to":
            mask[1, :, :, 100:200] = False
        torch._dynamo.graph_break()
        return attend(query, key, value, mask)

    compiled = torch.compile(function, backend=rewriting_backend(), dynamic=False)
    for lengths in ([S, S], [S, 317], [S, S]):
        padding = (torch.arange(S) < torch.tensor(lengths)[:, None]).long()
        given = *tensors().values(), padding
        torch.testing.assert_close(compiled(*given), function(*given), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert bool(read) is (name not in ("causal", "none"))


def test_nothing_is_assumed_where_it_is_switched_off():
    inputs = {**tensors(), "mask": CAUSAL}
    with fx_fusion.recording() as report:
        found = torch.compile(attend, backend=rewriting_backend(speculate=False))(**inputs)
    assert report.count("causal_mask") == 0
    assert not report.graphs[0].assumes
    assert torch.equal(found, attend(**inputs))


def test_a_write_through_data_in_a_version_of_its_own():
    """Dynamo's own form of ``q.data`` ends the graph where it is captured again; AOTAutograd refuses what comes then."""

    def function(q, k, v, bias):
        q.data.add_(1)
        return (q @ k.mT / 4 + bias).softmax(-1) @ v

    compiled = torch.compile(function, backend=ours("aot_eager"))
    with fx_fusion.recording() as report:
        causal = torch.zeros(1, 2, 5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        for bias in (causal, torch.randn(1, 2, 5, 5)):
            q, k, v = (torch.randn(2, 2, 5, 16, requires_grad=True) * 1 for _ in range(3))
            expected = function(q.detach().clone(), k, v, bias)
            torch.testing.assert_close(compiled(q, k, v, bias), expected, rtol=1e-4, atol=1e-5)
    assert len(report.graphs) == 2, str(report)  # the version that assumes a mask, and this one, whole
