"""Test what the backward computes again: how much is saved then, that nothing else changes, and what is said of it."""

import dataclasses
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.backend import compile_graph
from fx_fusion.inductor import compile as joint_passes
from fx_fusion.memory import candidates, cost, recompute
from fx_fusion.options import OptionError, parse
from tests import zoo
from tests.helpers import CountsCalls, printed_without_interpreter, slow_but, tiny_llama, tokens
from tests.partitioned import partitioned


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The models are tiny."""
    monkeypatch.setattr(candidates, "_SMALLEST", 1)


@pytest.fixture
def fresh_cache():
    """Nothing was compiled before."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


# -- how much -----------------------------------------------------------------------------------------------------------
# Bytes that are saved with memory="min", of those with "speed". A value that is saved anew makes these red. Tables of RoPE
# are saved: inputs that they are made of are not (of these tiny models half a percent).
SHARES = {
    "Llama": 0.78, "Qwen3": 0.80, "Gemma2": 0.73, "Gemma3": 0.81, "Olmo2": 0.82, "Mixtral": 0.78, "GPT2": 0.72, "Bert": 0.73,
    "T5": 0.79, "GPTNeoX": 0.69, "Cohere": 0.82, "Granite": 0.78,
}  # fmt: skip


@pytest.mark.parametrize("family", slow_but(("Llama", "GPT2", "T5"), SHARES))
def test_families(family):
    """Less is saved, and every gradient is the same to the last bit."""
    model = zoo.build(family)
    before, after = (partitioned(model, zoo.batch(), memory) for memory in ("speed", "min"))
    assert not before.again()
    assert after.bytes <= SHARES[family] * before.bytes, (after.bytes / before.bytes, after.again())
    for name, gradient in before.gradients.items():
        assert torch.equal(after.gradients[name], gradient), name


def test_recomputing_takes_at_most_half_of_what_the_fusions_gain(monkeypatch):
    """The gain is an estimate: where it is twice too high, the step still takes no longer than Inductor's."""
    model, ids = tiny_llama(intermediate_size=192), tokens()
    batch = {"input_ids": ids, "labels": ids}
    every = sum(v.seconds for v in partitioned(model, batch, "min", step=False).decisions.values if v.again)
    monkeypatch.setattr(recompute, "_SHARE", 1.0)
    spent = {}
    for gain in (0.0, every, 4 * every):

        def decide(graph, memory, decisions, gain=gain):
            decisions.gained = gain  # estimates are of GPUs
            recompute.decide(graph, memory, decisions)

        monkeypatch.setattr(joint_passes, "decide", decide)
        found = partitioned(model, batch, "auto", step=False).decisions
        spent[gain] = sum(v.seconds for v in found.values if v.again)
    assert spent[0.0] == 0
    assert 0 < spent[every] <= every / 2
    assert spent[4 * every] == pytest.approx(every)


def test_what_of_a_llama_is_saved():
    """gate and up without their product, h without the norm's result."""
    model, ids = tiny_llama(intermediate_size=192), tokens()
    batch = {"input_ids": ids, "labels": ids}
    before, after = (partitioned(model, batch, memory, fusions=["-swiglu", "-swish"]) for memory in ("speed", "min"))
    wide = [sum(n for (shape, _), n in found.saved.items() if shape[-1:] == (192,)) for found in (before, after)]
    assert wide[1] * 3 == wide[0] * 2
    assert after.again()["norm of a sum"] == 3
    assert after.again()["rms_norm"] == 1
    assert after.again()["mul"] >= 2
    assert {v.module.split(".")[-1] for v in after.decisions.values if v.kind == "mul"} >= {"mlp"}


def test_rows_of_experts_are_made_again_rather_than_the_norm_that_they_are_of():
    """They are several for each token, and while they are made again the norm's result is saved."""
    values = partitioned(zoo.build("Mixtral"), zoo.batch(), "min").decisions.values
    rows = [v for v in values if v.kind == "moe_dispatch"]
    assert len(rows) == 2
    assert all(v.again for v in rows)
    assert {v.kind for v in values if not v.again} == {"norm of a sum"}


def traced(what):
    """Return what tests.traced_launches prints, in a process without Triton's interpreter."""
    return printed_without_interpreter("tests.traced_launches", what, flags=("-W", "error:Raw SymInt"))


def test_norms_are_stored_as_all_their_readers_read_them():
    """Two casts that are returned are two tensors, and so are one that is returned and one that a product saved: who writes to
    one does not write to the other."""
    assert traced("readers") == {
        "two products": 1, "one cast, returned": 1, "two casts, returned": 0, "a product, and a cast that is returned": 0,
        "parts of it, returned": 0, "chunks": 0, "its bits": 0, "float32 too": 0,
    }  # fmt: skip


def test_the_gradient_of_a_tied_table_is_added_to_the_other_one():
    """Wherever a sum alone reads that: a product's, a sum's, another lookup's; not one that is a part of a larger tensor."""
    assert traced("tables") == {
        "a product": 1, "another table's product": 0, "a product and a sum": 1, "two lookups and a product": 1, "two lookups": 1,
        "in other precision": 1, "by parts": 1, "half of a table": 0, "transposed": 1,
    }  # fmt: skip


@pytest.mark.parametrize("how", slow_but(["static"], ["static", "dynamic", "autocast"]))
def test_launches_that_are_traced(how):
    """As on a GPU: AOTAutograd traced the kernels, and the backward of each norm hands out its result; no call of
    an op is left, and no size is guarded. Under autocast the norms are stored in bfloat16, as the linear layers read them."""
    found = traced(how)
    assert found["again"] == {"norm of a sum": 3, "norm": 1, "mul": 2}
    assert found["narrowed"] == (4 if how == "autocast" else 0), "the last one is returned: deferred logits are made of it"
    assert found["launches"]["min"] == found["launches"]["speed"] == 4 + 1 + 2, "norms, their weights' sums, RoPE"
    assert found["handed_out"] == 4
    assert found["ops"] == ["scaled"], "which Inductor lowers to a launch or a product"
    assert found["guards"] == []
    assert found["bytes"]["min"] < 0.81 * found["bytes"]["speed"], "with tables of RoPE, which are made of inputs"


# -- which --------------------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(8, 32), nn.Linear(32, 8), activation

    def forward(self, x):
        return self.down(self.activation(self.up(x))).square().mean()


ACTIVATIONS = {
    "gelu": (F.gelu, ["gelu"]),
    "silu": (F.silu, ["silu"]),
    "relu": (F.relu, []),  # the backward reads the result, and not the input
    "squared_relu": (lambda x: F.relu(x).square(), ["pow"]),  # from the relu, which the backward reads
    "dropout": (lambda x: F.dropout(F.gelu(x), 0.5), ["native_dropout"]),  # with the mask that was drawn
    "double": (lambda x: F.gelu(x.double()).float(), ["_to_copy"]),
    "returned": (F.gelu, ["gelu"]),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    function, kinds = ACTIVATIONS[name]
    torch.manual_seed(0)
    model, x = Layer(function), torch.randn(6, 8)
    found = []
    for memory in ("speed", "min"):
        torch.manual_seed(1)
        found.append(partitioned(model, {"x": x}, memory, fusions=["-swish"]))
    before, after = found
    assert [kind.split(", ")[-1] for kind in after.again()] == kinds
    assert (after.bytes < before.bytes) == bool(kinds)
    assert all(torch.equal(after.gradients[n], g) for n, g in before.gradients.items())


def test_the_bias_of_attention_is_saved():
    """A learned one with the heads last, as T5's: computed again, its rows would lie as those of the table."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.qkv, self.out = nn.Parameter(torch.randn(8, 8, 4)), nn.Linear(16, 48), nn.Linear(16, 1)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            bias = (self.table.detach() * 0.5).permute(2, 0, 1)[None].contiguous()
            return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)).mean()

    found = partitioned(Biased(), {"x": torch.randn(2, 8, 16)}, "min")
    assert not [v for v in found.decisions.values if v.bytes == 4 * 8 * 8 * 4], found.again()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, *s).bfloat16()) for s in ((16, 64), (32, 16)))

    def forward(self, x, ends):
        gate, up = torch._grouped_mm(x, self.up, offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.down, offs=ends).float().square().mean()


EXPERTS = {"x": torch.randn(48, 16).bfloat16(), "ends": torch.tensor([13, 14, 30, 48], dtype=torch.int32)}


def test_what_a_grouped_product_reads_stays_as_it_lies():
    """Computed again in one with its transposition it would come out contiguous on a GPU, and groups of any size then end in
    an assertion of the kernel (gpt-oss, sizes of groups that are no multiples of 8)."""
    model = Experts()
    before, after = (partitioned(model, EXPERTS, memory, fusions=["-swiglu", "-swish"]) for memory in ("speed", "min"))
    assert [v for v in after.decisions.values if v.bytes == 2 * 48 * 32 and v.again], after.again()
    assert after.bytes < before.bytes
    assert all(torch.equal(after.gradients[n], g) for n, g in before.gradients.items())


def test_inductor_leaves_it_in_memory():
    """What its code hands to the products of the backward: rows of x, transposed as a view. The gradients are those of a
    saved value, to the last bit."""
    from torch._inductor.utils import run_and_get_code

    model, found = Experts(), {}
    for memory in ("speed", "min"):
        model.zero_grad()
        options = {"memory": memory, "fusions": ["-swiglu", "-swish"], "select": "always"}
        compiled = torch.compile(model, backend="fx_fusion", options=options)
        _, code = run_and_get_code(lambda compiled=compiled: compiled(**EXPERTS).backward())
        found[memory] = [p.grad.clone() for p in model.parameters()]
        torch._dynamo.reset()
    assert any("_grouped_mm(reinterpret_tensor(buf" in line for line in code[-1].splitlines())
    assert all(map(torch.equal, *found.values()))


def test_sums_are_saved():
    """What is small beside what it is made of."""

    class Sums(Layer):
        def forward(self, x):
            wide = self.up(x)
            weights = wide.square().sum(-1, keepdim=True).sqrt()  # (6, 1), read by the product's backward
            return (self.down(wide).mT @ weights).square().mean()

    model, x = Sums(None), torch.randn(6, 8)
    before, after = (partitioned(model, {"x": x}, memory) for memory in ("speed", "min"))
    assert not after.again()
    assert all(torch.equal(after.gradients[n], g) for n, g in before.gradients.items())


@pytest.mark.parametrize("memory", ["speed", "min"])
def test_what_is_written_to_in_place_meanwhile(memory):
    """A buffer that the forward changes after it was read, a running statistic, an input."""

    class Writes(Layer):
        def __init__(self):
            super().__init__(F.gelu)
            self.register_buffer("scale", torch.full((32,), 2.0))
            self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x):
            wide = self.activation(self.up(x.detach().clone())) + self.scale + x.sum(-1, keepdim=True)
            self.scale.add_(1.0)  # eager needs neither for the sum's backward, and the product reads the sum
            x.mul_(0.5)
            return self.out(self.norm(self.down(wide)) + self.scale[:8]).square().mean()

    torch.manual_seed(0)
    ours, eager = Writes(), Writes()
    eager.load_state_dict(ours.state_dict())
    x = torch.randn(6, 8)
    given = x.clone()
    found = partitioned(ours, {"x": given}, memory)
    theirs = x.clone()
    eager(theirs).backward()
    assert torch.equal(given, theirs)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    for (name, a), (_, b) in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("read", ["diagonal", "chunk", "unfold"])
@pytest.mark.parametrize("memory", recompute.MEMORY)
def test_a_part_of_a_buffer_that_is_written_to(read, memory):
    """What is computed of it is saved, as in eager; torch's list of views knows no diagonal."""
    parts = {
        "diagonal": lambda b: b.diagonal(), "chunk": lambda b: b.chunk(4)[1][:, :16].flatten(),
        "unfold": lambda b: b.unfold(1, 64, 1)[3, 0],
    }  # fmt: skip

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(64, 16))
            self.register_buffer("buffer", torch.zeros(16 if read == "chunk" else 64, 64))

        def forward(self, x):
            y = F.silu(x) * torch.sigmoid(parts[read](self.buffer))
            out = y @ self.weight
            self.buffer.add_(3.0)
            return out

    x = torch.randn(32, 64)
    results = []
    for call in (partitioned, None):
        model, given = Writes(), x.clone().requires_grad_()
        if call is None:
            model(given).sum().backward()
            results.append([model.weight.grad, given.grad])
        else:
            torch._dynamo.reset()
            found = partitioned(Summed(model), {"x": given}, memory)
            results.append([found.gradients["model.weight"], given.grad])
    torch.testing.assert_close(*results)


class Summed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **given):
        return self.model(**given).sum()


def test_an_input_is_not_saved_anew():
    """The caller may refill it between forward and backward: eager saved what was computed of it."""

    class Bytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(32, 4)

        def forward(self, x):
            return self.out(x.float() / 255).square().sum()

    model, x = Bytes(), torch.randint(0, 255, (64, 32), dtype=torch.uint8)
    model(x).backward()
    expected = model.out.weight.grad.clone()
    model.zero_grad()
    torch._dynamo.reset()
    given = x.clone()
    loss = torch.compile(model, backend="fx_fusion", options={"memory": "min", "strict": True})(given)
    given.zero_()
    loss.backward()
    torch.testing.assert_close(model.out.weight.grad, expected)


@pytest.mark.parametrize("memory", recompute.MEMORY)
def test_a_buffer_that_counts_calls(memory):
    """torch 2.13 computes calls + 1 in the backward again, where calls was written to: twice the gradient."""

    model, x = CountsCalls(), torch.randn(6, 8)
    model(x).sum().backward()
    expected = model.out.bias.grad.clone()
    model.zero_grad()
    model.calls.zero_()
    torch._dynamo.reset()
    torch.compile(model, backend="fx_fusion", options={"memory": memory, "strict": True})(x).sum().backward()
    torch.testing.assert_close(model.out.bias.grad, expected)


def test_a_view_of_an_input_that_is_written_to():
    """The copy that AOTAutograd makes of it is saved, and repeated again in the backward: the input itself is another by
    then. Found by the fuzzer, 1199."""

    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(16, 1)

        def forward(self, q, k, v):
            repeated = [t.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v)]
            k.transpose(0, -1).add_(1)
            return self.out(F.scaled_dot_product_attention(q, *repeated)).square().mean()

    q, k, v = (torch.randn(2, heads, 6, 16) for heads in (4, 2, 2))
    model = Repeats()
    found = partitioned(model, {"q": q, "k": k.clone().requires_grad_() * 1, "v": v}, dynamic=True)
    assert found.again()["clone"] == 1, "of the copy of k; v itself is not saved for it, an input that its caller may refill"
    assert found.saved[(2, 2, 6, 16), torch.float32]
    model.zero_grad()
    model(q, k.clone(), v).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)


class Casts(nn.Module):
    """As autocast casts weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 8))

    def forward(self, x, bias):
        return F.linear((x + bias).bfloat16(), self.weight.bfloat16()).float().square().mean()


def test_a_parameter_is_in_memory_anyway_and_another_input_is_not():
    model, x = Casts(), torch.randn(6, 8, requires_grad=True)
    found = partitioned(model, {"x": x, "bias": torch.randn(6, 8, requires_grad=True)})
    values = [(v.kind, v.bytes) for v in found.decisions.values]
    assert ("_to_copy", 64 * 8 * 2) in values, "the weight in bfloat16"
    assert len(values) == 1, "x and bias would be kept for their sum"


def test_auto_leaves_casts_of_parameters():
    """Which may change between forward and backward then: one network's step between the passes of another."""
    x, bias = (torch.randn(6, 8, requires_grad=True) for _ in range(2))
    assert not partitioned(Casts(), {"x": x, "bias": bias}, "auto").decisions.values


def test_a_value_that_is_returned_is_in_memory_anyway():
    class Returns(Layer):
        def forward(self, x):
            wide = self.activation(self.up(x))
            return {"loss": self.down(wide).square().mean(), "wide": wide}

    model = Returns(F.gelu)
    assert not partitioned(model, {"x": torch.randn(6, 8)}).again()


def test_random_numbers_are_drawn_once():
    model = Layer(lambda x: F.dropout(F.gelu(x), 0.5))
    found = partitioned(model, {"x": torch.randn(6, 8)})
    assert not [op for op in found.backward if "rand" in op or "bernoulli" in op]


def test_checkpointed_layers_are_the_users():
    plain, checkpointed = tiny_llama(), tiny_llama()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    assert partitioned(plain, batch).again()["norm of a sum"] == 3
    found = partitioned(checkpointed, batch)
    assert found.again()["norm of a sum"] <= 1, "the final norm"
    assert found.bytes < partitioned(plain, batch).bytes


@pytest.mark.parametrize("how", ["compiled", "reentrant"])
def test_what_a_checkpoint_reads_is_saved_once(how):
    """A norm's result that the user's checkpoint computes again from: it is saved anyway."""

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.a, self.b = nn.RMSNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x, r):
            h = self.a(x) + r
            h = h + checkpoint(lambda y: torch.tanh(self.b(torch.tanh(self.b(y)))), self.norm(h), use_reentrant=how == "reentrant")
            return h.square().mean()

    given = {"x": torch.randn(64, 32), "r": torch.randn(64, 32)}
    before, after = (partitioned(Inside(), given, memory) for memory in ("speed", "min"))
    assert not after.again(), after.again()
    assert after.bytes == before.bytes
    assert "rms_norm" not in after.backward


def test_of_two_values_that_are_made_of_each_other_one_is_computed_again():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.norm, self.b, self.c = nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
            self.p = nn.Parameter(torch.randn(32))

        def forward(self, x, r):
            y = self.norm(self.a(x) + r)
            return (torch.tanh(self.b(y)) + self.c(y * self.p)).square().mean()

    given = {"x": torch.randn(64, 32), "r": torch.randn(64, 32)}
    before, after = (partitioned(Both(), given, memory) for memory in ("speed", "min"))
    assert before.bytes - after.bytes == sum(v.bytes for v in after.decisions.values if v.again) == 64 * 32 * 4


def test_no_more_is_saved_than_without():
    """Of the sign of a relu a byte an element is saved, not the relu's result beside its cast."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 8).bfloat16()

        def forward(self, x):
            return self.b(F.relu(self.a(x)).bfloat16()).float().square().mean()

    before, after = (partitioned(Cast(), {"x": torch.randn(64, 32)}, memory) for memory in ("speed", "min"))
    assert after.bytes <= before.bytes


@pytest.mark.parametrize("where", ["config", "region"])
def test_a_budget_of_the_user_runs_attention_and_the_loss_once(where):
    model, ids = tiny_llama(), tokens()
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if where == "region" and region is None:
        pytest.skip("from torch 2.13 on")

    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_llama()

        def forward(self, **given):
            with region(0.1):
                return self.model(**given)

    model = Region() if where == "region" else model
    with torch._functorch.config.patch(activation_memory_budget=1.0 if where == "region" else 0.1):
        found = partitioned(model, {"input_ids": ids, "labels": ids})
    again = [op for op in found.backward if "attention" in op and "backward" not in op]
    assert not again
    assert "linear_cross_entropy" not in found.backward


# -- how much of it -----------------------------------------------------------------------------------------------------
def test_auto_takes_what_frees_most_a_second_up_to_its_share_of_a_step(monkeypatch):
    model, batch = zoo.build("Llama"), zoo.batch()
    every = partitioned(model, batch, "min").decisions.values
    assert all(v.seconds > 0 for v in every)
    allowed = sum(v.seconds for v in every) / 2
    monkeypatch.setattr(recompute, "seconds_of_step", lambda joint: allowed / recompute._SHARE)
    some = partitioned(model, batch, "auto").decisions.values
    taken, left = ([v for v in some if v.again is again] for again in (True, False))
    assert taken
    assert left
    assert sum(v.seconds for v in taken) <= allowed
    assert not partitioned(model, batch, "speed").again()


def test_the_time_of_a_step_counts_every_product(monkeypatch):
    monkeypatch.setattr(cost, "bytes_per_second", lambda device: float("inf"))
    model, batch = zoo.build("Llama"), zoo.batch()
    found = partitioned(model, batch)
    rows, layers = batch["input_ids"].numel(), 2
    weights = sum(p.numel() for n, p in model.named_parameters() if "proj" in n) + 128 * 32
    products = 6 * rows * weights
    attention = 3.5 * 4 * layers * batch["input_ids"].shape[1] * rows * 32
    counted = found.decisions.step * 0.6 * 5e10 * torch.get_num_threads()
    assert products <= counted * (1 + 1e-9)
    assert counted <= products + 1.2 * attention


def test_the_time_of_a_step_counts_what_other_kernels_move(monkeypatch):
    """Of gelu between two products: its argument and its result in the forward; argument, both gradients in the backward."""
    monkeypatch.setattr(cost, "_REACHED", float("inf"))
    found = partitioned(Layer(F.gelu), {"x": torch.randn(600, 8)})
    wide, narrow = 600 * 32 * 4, 600 * 8 * 4
    moved = found.decisions.step * cost.bytes_per_second(torch.device("cpu"))
    assert 5 * wide + 2 * narrow <= moved <= 6 * wide + 8 * narrow


def test_a_value_that_is_needed_before_its_sources_are_read_is_a_kernel_of_its_own():
    """A convolution's backward is one op, which needs silu(x) for the gradient that silu's derivative is multiplied with. Of a
    linear layer it is two products, and the derivative's kernel stands between them."""

    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 3)

        def forward(self, x):
            return self.down(F.silu(self.up(x))).square().mean()

    found = partitioned(Convolution(), {"x": torch.randn(2, 4, 6, 6)}, fusions=["-swish"])
    linear = partitioned(Layer(F.silu), {"x": torch.randn(6, 8)}, fusions=["-swish"])
    (value,), (other,) = found.decisions.values, linear.decisions.values
    speed = cost.bytes_per_second(torch.device("cpu"))
    assert value.seconds * speed == pytest.approx(2 * value.bytes)
    assert other.seconds * speed == pytest.approx(other.bytes)


def test_formulas_that_refuse_a_shape(monkeypatch):
    """Torch 2.11 has none for attention with fewer heads of keys: its time is left out, and the rest is decided."""

    def refuse(*args, **kwargs):
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setitem(cost.flop_registry, op, refuse)
    found = partitioned(zoo.build("Llama"), zoo.batch())
    assert found.backward["_scaled_dot_product_flash_attention_for_cpu_backward"]
    assert found.again()
    assert found.decisions.step > 0


def test_the_peak_of_a_gpu(monkeypatch):
    """In FLOPs a second, dense, beside those of data sheets."""
    peaks = {(9, 0, 132): 989e12, (8, 0, 108): 312e12, (8, 9, 142): 362e12, (10, 0, 148): 2250e12, (7, 0, 80): 125e12}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for (major, minor, processors), peak in peaks.items():
        known = SimpleNamespace(major=major, minor=minor, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, known=known: known)
        ours = cost.flops_per_second(torch.device("cuda"), torch.bfloat16)
        assert 0.9 * peak <= ours <= 1.1 * peak, (major, minor)


def test_the_peak_in_float32_by_torchs_new_setting_of_tf32():
    """Behind it torch raises where the old one is asked."""
    gpu = torch.device("cuda")
    assert cost.flops_per_second(gpu, torch.float32) < cost.flops_per_second(gpu, torch.bfloat16) / 2
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert cost.flops_per_second(gpu, torch.float32) == cost.flops_per_second(gpu, torch.bfloat16) / 2
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("memory", recompute.MEMORY)
def test_small_chunks_of_logits(memory):
    """Are asked for with min alone."""
    asked = []

    def rest(gm, examples, options):
        calls = gm.graph.find_nodes(op="call_function", target=torch.ops.fx_fusion.linear_cross_entropy.default)
        asked.extend(call.args[-1] for call in calls)
        return gm.forward

    options = parse(None, {"select": "always", "memory": memory, "strict": True})
    torch._dynamo.reset()
    torch.compile(tiny_llama(), backend=lambda gm, given: compile_graph(gm, given, options, rest))(
        input_ids=tokens(), labels=tokens()
    )
    assert asked == [memory == "min"]


def test_an_unknown_name():
    with pytest.raises(OptionError, match="Did you mean 'min'"):
        parse(None, {"memory": "minimum"})


# -- what is said -------------------------------------------------------------------------------------------------------
def compiled_step(model, **options):
    torch._dynamo.reset()
    ids = tokens()
    with fx_fusion.recording() as report:
        call = torch.compile(model, backend="fx_fusion", options={"select": "always", "fusions": ["-swiglu"], **options})
        call(input_ids=ids, labels=ids).loss.backward()
    return report


@pytest.mark.slow
def test_through_inductor(fresh_cache):
    model = tiny_llama(num_hidden_layers=1)
    sizes = []
    for memory in ("speed", "min"):
        model.zero_grad()
        report = compiled_step(model, memory=memory)
        sizes.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(torch.equal(sizes[0][n], g) for n, g in sizes[1].items())
    assert "computed again in the backward, not saved: " in str(report)
    assert "1 x norm of a sum in post_attention_layernorm" in str(report)
    (graph,) = json.loads(report.to_json())["graphs"]
    assert Counter(v["kind"] for v in graph["memory"]["values"])["norm of a sum"] == 1


def test_modules_that_differ_from_their_like_are_named():
    def value(layer, again):
        return recompute.Value("mul", f"model.layers.{layer}.mlp", 2**20, 1e-4, again)

    alone = recompute.Value("norm", "model.norm", 2**20, 1e-4, again=False)
    again, saved = recompute.Decisions(values=[value(0, True), value(1, True), value(2, False), alone], made=True).sentences()
    assert "2 x mul in mlp (2.0 MiB)" in again
    assert "1 x mul in model.layers.2.mlp (1.0 MiB), 1 x norm in norm (1.0 MiB)" in saved


def test_a_pass_of_the_user_runs_too(fresh_cache):
    seen = []
    with torch._inductor.config.patch(joint_custom_post_pass=lambda graph: seen.append(graph)):
        report = compiled_step(tiny_llama(num_hidden_layers=1), memory="min")
    assert seen
    assert "computed again in the backward" in str(report)


def test_a_graph_from_the_cache_says_so(fresh_cache):
    model = tiny_llama(num_hidden_layers=1)
    compiled_step(model, memory="min")
    assert "from torch's compile cache" in str(compiled_step(model, memory="min"))


@pytest.mark.slow
def test_what_fails_is_told_and_nothing_else_changes(monkeypatch, fresh_cache):
    def fails(joint):
        raise ZeroDivisionError("as a test")

    monkeypatch.setattr(recompute, "candidates", fails)
    with pytest.warns(UserWarning, match="torch's choice alone: ZeroDivisionError: as a test"):
        report = compiled_step(tiny_llama(num_hidden_layers=1))
    assert report.count("linear_cross_entropy") == 1
    assert "torch's choice alone: ZeroDivisionError: as a test" in str(report)
    assert not report.graphs[0].fallback


def test_where_the_partitioner_refuses_our_choice_it_chooses_alone(monkeypatch, tmp_path, fresh_cache):
    """A node that can neither be saved nor computed again."""
    monkeypatch.chdir(tmp_path)  # torch writes the graph to a file
    from fx_fusion.memory.joint_graph import JointGraph
    from fx_fusion.torch_internals import partitioner

    def refused(joint: JointGraph):
        (found, *_) = [c for c in original(joint) if c.kind == "norm of a sum"]
        (attention,) = [n for n in joint.forward if "attention" in str(n.target)]
        results = [n for n in attention.users if n.args[1] == 0]
        return [dataclasses.replace(found, apply=lambda: [partitioner.compute_again(n) for n in results])]

    original = recompute.candidates
    monkeypatch.setattr(recompute, "candidates", refused)
    with pytest.warns(UserWarning, match="torch's choice alone: with ours Inductor raised"):
        report = compiled_step(tiny_llama(num_hidden_layers=1), memory="min")
    assert report.count("linear_cross_entropy") == 1
    assert not report.graphs[0].fallback
