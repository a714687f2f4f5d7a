"""Test which linears are taken for float8 where a weight, a bias, a hook or a size is none of the usual ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_fusion
from fx_fusion.float8.linears import FORWARD, OF_INPUT, OF_WEIGHT
from tests import partitioned as on_cpu
from tests.engine.test_float8 import in_float8, why
from tests.partitioned import partitioned

x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def step(model, batch=None, **options):
    batch = {"x": x.clone().requires_grad_()} if batch is None else batch
    return partitioned(model.bfloat16(), batch, "speed", **{"float8": "rowwise", **options})


class WithBias(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.ones(*shape))

    def forward(self, x):
        bias = self.bias[:, 0] if self.bias.dim() == 2 else self.bias
        return F.linear(x, self.weight, bias).square().mean()


@pytest.mark.parametrize("shape", [(32, 2), (1,)], ids=["strided", "one number"])
def test_a_bias_that_is_no_dense_vector(shape):
    """The product in float8 reads it by its address."""
    found = step(WithBias(*shape))
    assert any("its bias has the shape" in reason and "must be 32 dense numbers" in reason for reason in why(found).values())
    assert in_float8(step(WithBias(32)), FORWARD) == [""]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, False), nn.Linear(64, 64, False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(F.gelu(self.a(x))).square().mean()


@pytest.mark.parametrize("kept", ["a", "b"])
def test_a_module_is_kept_by_its_own_name(kept):
    """Gradients by a weight that two modules share stay with the one that is kept."""
    found = step(Tied(), float8_keep=[kept])
    assert in_float8(found, FORWARD) == [{"a": "b", "b": "a"}[kept]]
    assert not in_float8(found, OF_INPUT)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 36864, False), nn.Linear(36864, 64, False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))).square().mean()


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64, False), nn.Linear(64, 36864, False)

    def forward(self, x):
        return self.head(self.body(x)).float().logsumexp(-1).mean()


def test_a_wide_mlp_is_no_vocabulary():
    """That of Gemma 2 27B has 36864 units, of Llama 405B 53248."""
    assert in_float8(step(MLP()), FORWARD) == ["up", "down"]
    found = step(Classes(), fusions=["-linear_rows"])  # which would take the classes and their loss
    assert in_float8(found, FORWARD) == ["body"]
    assert why(found)["head", FORWARD] == why(found)["head", OF_INPUT] == "36864 outputs are taken for a vocabulary's"


class First(nn.Module):
    """Its input has no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x).square().mean()


def test_a_gradient_without_that_of_the_input_is_named():
    found = step(First(), {"x": x})
    assert in_float8(found, FORWARD) == ["linear"]
    assert "its input has no gradient" in why(found)["linear", OF_WEIGHT]
    assert not any("no gradient" in reason for reason in why(step(First())).values())


class Unknown(nn.Module):
    """Rows that are chosen in the graph, in a batch of products beside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, False)

    def forward(self, x, chosen):
        rows = self.linear(x)[chosen]
        return torch.bmm(rows, rows.mT).square().sum()


def test_batches_of_a_size_that_nobody_knows():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        batch = {"x": x.view(4, 8, 64), "chosen": torch.tensor([True, False, True, True])}
        assert in_float8(step(Unknown(), batch), FORWARD) == ["linear"]


class Queue(nn.Module):
    """A frozen teacher's result goes into a buffer, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(32, 64))

    def forward(self, x, z):
        with torch.no_grad():
            self.queue.copy_(self.teacher(z))
        return self.student(x).square().mean()


def test_what_only_reaches_a_buffer_is_of_the_forward(monkeypatch):
    """Inductor keeps the write in the graph, where it is no output."""
    original = on_cpu.aot_module_simplified

    def keeping(*args, **kwargs):
        return original(*args, **{**kwargs, "keep_inference_input_mutations": True})

    monkeypatch.setattr(on_cpu, "aot_module_simplified", keeping)
    found = step(Queue(), {"x": x.clone().requires_grad_(), "z": x})
    assert sorted(in_float8(found, FORWARD)) == ["student", "teacher"]
    assert in_float8(found, OF_INPUT) == ["student"]


class Shapes(nn.Module):
    """One weight and one input, in two shapes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        other = F.linear(x.view(16, 128), self.weight.view(32, 128))
        return F.linear(x, self.weight).square().mean() + other.square().mean()


def test_a_weight_in_two_shapes():
    assert len(in_float8(step(Shapes()), FORWARD)) == 2


def test_a_layer_without_inputs():
    model = nn.Sequential(nn.Linear(0, 64), nn.Linear(64, 64))
    found = partitioned(Loss(model).bfloat16(), {"x": x[:, :0]}, "speed", float8="rowwise")
    assert any("0 -> 64" in reason for reason in why(found).values()) or len(in_float8(found, FORWARD)) == 1


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


# -- float8_stats -------------------------------------------------------------------------------------------------------
class LowRank(nn.Module):
    """A fresh adapter: its second matrix is zero."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64, False).requires_grad_(False)
        self.a, self.b = nn.Linear(64, 16, False), nn.Linear(16, 64, False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return (self.base(x) + self.b(self.a(x))).square().mean()


def test_an_exact_product_is_exact():
    stats = fx_fusion.float8_stats(LowRank().bfloat16(), x.clone().requires_grad_())
    assert min(s.sqnr for s in stats) > 20, str(stats)
    assert max(s.sqnr for s in stats) == float("inf")
    assert not any(s.weight == "base.weight" and s.product == OF_WEIGHT for s in stats), "no step computes it"


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, q, kv):
        return self.attention(q, kv, kv, need_weights=False)[0].square().mean()


def test_a_gradient_belongs_to_the_input_that_it_is_of():
    """The memory of cross attention needs no gradient itself; a teacher of the same weights runs without any."""
    torch.manual_seed(0)
    q, kv = torch.randn(2, 8, 64).bfloat16().requires_grad_(), torch.randn(2, 24, 64).bfloat16()
    stats = fx_fusion.float8_stats(Cross().bfloat16(), q, kv)
    assert sum(s.product == OF_WEIGHT for s in stats) == 3, str(stats)  # of queries, of keys and values, of the output

    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, z):
            y = self.linear(x)
            with torch.no_grad():
                y_of_z = self.linear(z)
            return (y - y_of_z).square().mean()

    large = 100 * torch.randn(32, 64).bfloat16()
    found = fx_fusion.float8_stats(Teacher().bfloat16(), x.clone().requires_grad_(), large)
    assert sum(s.product == OF_WEIGHT for s in found) == 1
    assert min(s.sqnr for s in found) > 20


def test_a_step_in_the_backward_is_not_made():
    model = First().bfloat16()
    weight, before = model.linear.weight, model.linear.weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda p: (optimizer.step(), optimizer.zero_grad())[1])
    stats = fx_fusion.float8_stats(model, x.clone().requires_grad_())
    assert {s.product for s in stats} == {FORWARD, OF_INPUT, OF_WEIGHT}
    assert torch.equal(weight, before)
