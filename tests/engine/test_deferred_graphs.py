"""Test which results of a graph are deferred, and which are not."""

import pytest
import torch

import fx_fusion
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.testing import rewriting_backend
from tests.helpers import tiny_llama, tokens

ids = tokens()

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
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, theirs)


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


def test_symbolic_lengths_under_autocast():
    """The type is the one that autocast gives, also to another compiled function that takes the logits."""
    h, w = torch.randn(32, 8), torch.randn(12, 8, requires_grad=True)

    def loss_and_logits(h, w, t):
        logits = h @ w.T
        return torch.nn.functional.cross_entropy(logits, t), logits

    backend = rewriting_backend()
    compiled, reader = (torch.compile(f, backend=backend) for f in (loss_and_logits, lambda z: z.float().softmax(-1)))
    for rows in (4, 9, 16):
        given = h[:rows], w, torch.arange(rows) % 12
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (_, expected), (_, found) = loss_and_logits(*given), compiled(*given)
            assert isinstance(found, DeferredTensor)
            assert found.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(reader(found), expected.float().softmax(-1))


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


def test_an_output_that_is_a_view_of_an_input_is_no_deferred_one():
    def function(x, y, like):
        z = head(x)
        return torch.nn.functional.cross_entropy(z, y), like.view_as(z)

    x, y, like = torch.randn(4, 8), torch.randint(0, 33, (4,)), torch.zeros(4 * 33)
    _, view = torch.compile(function, backend=rewriting_backend())(x, y, like)
    like.fill_(3)
    assert (view == 3).all()


class Head(torch.nn.Module):
    """Its logits are nobody's local variable of that name."""

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(8, 12)

    def forward(self, h, t):
        result = self.lm_head(h)
        return torch.nn.functional.cross_entropy(result, t), result.to(torch.bfloat16)


def with_cast(h, w, t):
    logits = torch.nn.functional.linear(h, w)
    return torch.nn.functional.cross_entropy(logits, t), logits.to(torch.bfloat16)


@pytest.mark.parametrize("model", ["module", "function"])
def test_what_deferred_outputs_are_called(model):
    """By the name of what they are a cast of, with the module where that says nothing: people look for their logits."""
    h, t = torch.randn(4, 8), torch.tensor([1, 2, 3, 4])
    call, operands = (Head(), (h, t)) if model == "module" else (with_cast, (h, torch.randn(12, 8), t))
    with fx_fusion.recording() as report, torch.no_grad():
        _, late = torch.compile(call, backend=rewriting_backend())(*operands)
        name = report.graphs[0].deferred[0]
        assert name.endswith(" (of lm_head)") if model == "module" else name == "logits", name
        h.add_(1)
        with pytest.raises(fx_fusion.StaleTensorError, match="FX_FUSION_DEFER_OUTPUTS=0") as raised:
            late + 1
    assert str(raised.value).startswith(f"The deferred output `{name}`, bfloat16[4, 12], is computed when it is first read")
