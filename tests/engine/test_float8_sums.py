"""Gradients of one input by several linears in float8: one product makes their sum, where nothing reads them by themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.trained_models import with_lora
from fx_fusion.float8 import choice, rewrite, writer
from fx_fusion.float8.linears import OF_INPUT, OF_WEIGHT
from tests import zoo
from tests.helpers import tiny_llama, tokens
from tests.partitioned import partitioned

RECIPES = ["rowwise_gw_hp", "rowwise"]
SLOW = [("Qwen3", 2), ("Gemma2", 2), ("Olmo2", 2), ("Bert", 1), ("GPT2", 0)]
FAMILIES = [("Llama", 2), *(pytest.param(*family, marks=pytest.mark.slow) for family in SLOW)]


class Linears(nn.Module):
    """Linears of one input h of 64, the output of another one; ``ends`` makes a loss of their results and h."""

    def __init__(self, ends, widths, bias=False):
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.linears = nn.ModuleList(nn.Linear(64, n, bias) for n in widths)
        self.ends = ends

    def forward(self, x):
        h = self.first(x)
        return self.ends(h, *(linear(h) for linear in self.linears)).float().square().mean()


def cube(h, *ys):
    """A loss by which each has a gradient of its own."""
    return sum(y.float().pow(i + 1).sum(-1) for i, y in enumerate(ys))


def run(monkeypatch, model, batch, recipe, **options):
    """A step, one without such sums, and the number of products that were made of several."""
    with monkeypatch.context() as patched:
        patched.setattr(rewrite, "sums", lambda *given: ())
        apart = partitioned(model, batch, "speed", float8=recipe, **options)
    found = partitioned(model, batch, "speed", float8=recipe, **options)
    assert not found.linears.trouble
    assert apart.backward["quantize_columns_together"] == 0
    assert found.linears.products == apart.linears.products, "the report lists every linear"
    assert found.bytes <= apart.bytes
    return found, apart, found.backward["quantize_columns_together"]


def alike(found, apart, least=24):
    """Gradients differ by the scales of rows and by where they are rounded."""
    assert found.gradients.keys() == apart.gradients.keys()
    for name, wanted in apart.gradients.items():
        if name.endswith("key.bias"):
            continue  # adds one number to all scores of a row: its gradient is 0, and what is left of it is noise
        error = (found.gradients[name].double() - wanted.double()).norm() / wanted.double().norm()
        assert -20 * torch.log10(error) >= least, name


def given(rows=(4, 8)):
    torch.manual_seed(0)
    return {"x": torch.randn(*rows, 64).bfloat16()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("widths", "sums", "products"), [((64,), 0, 0), ((64, 32), 1, 2), ((64, 16, 16), 1, 3), ((16,) * 4, 1, 3), ((32,) * 5, 2, 5)]
)
def test_as_many_as_there_are(monkeypatch, widths, sums, products, recipe):
    model = Linears(cube, widths).bfloat16()
    found, apart, made = run(monkeypatch, model, given(), recipe)
    assert made == found.backward["quantize_rows_together"] == sums
    assert apart.backward["quantize_columns"] - found.backward["quantize_columns"] == products
    alike(found, apart)


@pytest.mark.parametrize("recipe", RECIPES)
def test_with_biases_and_rows_of_one_dim(monkeypatch, recipe):
    found, apart, made = run(monkeypatch, Linears(cube, (64, 32, 32), bias=True).bfloat16(), given((32,)), recipe)
    assert made == 1
    alike(found, apart)


def test_one_that_is_kept(monkeypatch):
    found, _, made = run(monkeypatch, Linears(cube, (64, 32)).bfloat16(), given(), "rowwise", float8_keep=["linears.1"])
    assert made == 0
    assert len([p for p in found.linears.products if p[1] == OF_INPUT and not p[2]]) == 1


def test_inputs_of_their_own(monkeypatch):
    """Nothing is summed where each has another input."""

    class Two(Linears):
        def forward(self, x):
            h, k = self.first(x), self.first(x.roll(1, 0)).tanh()
            return self.ends(h, self.linears[0](h), self.linears[1](k)).float().square().mean()

    assert run(monkeypatch, Two(cube, (64, 64)).bfloat16(), given(), "rowwise")[2] == 0


def test_a_gradient_that_is_read_by_itself(monkeypatch):
    """The input of one passes through a hook, which reads its gradient: no sum may swallow it."""

    class Hooked(Linears):
        def forward(self, x):
            h = self.first(x)
            k = Doubled.apply(h)
            return self.ends(h, self.linears[0](h), self.linears[1](k)).float().square().mean()

    found, apart, made = run(monkeypatch, Hooked(cube, (64, 64)).bfloat16(), given(), "rowwise")
    assert made == 0
    alike(found, apart)


class Doubled(torch.autograd.Function):
    """Itself, with twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def test_a_term_that_is_no_product(monkeypatch):
    """The residual's gradient stays a term of the sum."""
    model = Linears(lambda h, *ys: cube(h, *ys) + h.float().square().sum(-1), (64, 64)).bfloat16()
    found, apart, made = run(monkeypatch, model, given(), "rowwise")
    assert made == 1
    alike(found, apart)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("family", "each"), FAMILIES)
def test_families(monkeypatch, family, each, recipe):
    """Of each layer q, k, v and gate, up; GPT-2 has q, k, v in one."""
    model = zoo.build(family).bfloat16()
    found, apart, made = run(monkeypatch, model, zoo.batch(), recipe)
    gates = each == 2 and recipe == "rowwise"  # these have rows of their own for the gradients of their weights
    assert made == (each - gates) * model.config.num_hidden_layers
    alike(found, apart, 12)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointed_layers_and_lora(monkeypatch, recipe):
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2).bfloat16()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, apart, made = run(monkeypatch, model, batch, recipe)
    assert made == (2 if recipe == "rowwise" else 4)
    alike(found, apart, 12)
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2).bfloat16()
    with_lora(model)
    found, _, made = run(monkeypatch, model.bfloat16(), batch, recipe, float8_keep=["*.a", "*.b"])
    assert made == 3, "of the first layer's q, k, v the input needs none"
    assert not [p for p in found.linears.products if p[1] == OF_WEIGHT and not p[2]]


def test_one_weight_twice(monkeypatch):
    """Layers that share their weights (ALBERT)."""

    class Shared(Linears):
        def forward(self, x):
            h = self.first(x)
            for _ in range(2):
                h = F.silu(self.linears[0](h)) * self.linears[1](h)
            return h.float().square().mean()

    found, apart, made = run(monkeypatch, Shared(cube, (64, 64)).bfloat16(), given(), "rowwise_gw_hp")
    assert found.backward["quantize_glu_bwd"] == 2
    assert made == 1, "the weights are the same"
    alike(found, apart, 20)


def test_linears_without_anything_between_them(monkeypatch):
    """Rows of one dim: no reshape stands between a product and the next, which reads what has replaced it."""
    found, apart, made = run(monkeypatch, Linears(cube, (64, 64)).bfloat16(), given((32,)), "rowwise")
    assert made == 1
    alike(found, apart)


def test_narrow_keys_and_values(monkeypatch):
    """Llama 1B's are 512 wide: their gradients gain by themselves nothing, beside the queries' they do. (lm_head is small here.)"""
    monkeypatch.setattr(rewrite, "without_support", lambda device: "")
    monkeypatch.setattr(choice, "flops_per_second", lambda device, dtype: 990e12)
    monkeypatch.setattr(choice, "bytes_per_second", lambda device: 4.1e12)

    def planned():
        with torch.device("meta"):
            model = tiny_llama(
                torch.bfloat16, num_hidden_layers=1, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
                num_key_value_heads=8, head_dim=64,
            )  # fmt: skip
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            model.tie_weights()
            ids = torch.zeros(8, 2048, dtype=torch.long)
            found = partitioned(model, {"input_ids": ids, "labels": ids}, step=False, float8="rowwise_gw_hp", select="auto")
        kept = {place for place, kind, reason, _ in found.linears.products if kind == OF_INPUT and "float8 would cost" in reason}
        return found.backward["quantize_columns_together"], {place.split(".")[-1] for place in kept}

    with monkeypatch.context() as patched:
        patched.setattr(rewrite, "pays_together", lambda group, slow: False)
        assert planned() == (1, {"k_proj", "v_proj", "lm_head"})
    assert planned() == (2, {"lm_head"})


# -- one gradient of several products -----------------------------------------------------------------------------------
class Two(nn.Module):
    """Linears of h and of z, which are two others' results; ``loss`` makes one of their lists of linears, h and z."""

    def __init__(self, loss, count=3):
        super().__init__()
        self.f, self.g = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.of_h, self.of_z = (nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(count)) for _ in range(2))
        self.loss = loss

    def forward(self, x):
        return self.loss(self.of_h, self.of_z, self.f(x), self.g(x.roll(1, 0))).float().square().mean()


def in_another_order(u, v, h, z):
    a, b = u[0](h), u[1](h)
    b2, a2 = v[0](z), v[1](z)
    return ((a + a2).float().pow(2) + (b + b2).float().pow(3)).sum(-1)


def gru(u, v, h, z):
    xr, xz, xn = (linear(h) for linear in u)
    hr, hz, hn = (linear(z) for linear in v)
    r, s = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    return (1 - s) * torch.tanh(xn + r * hn) + s * z


def one_alone(u, v, h, z):
    a, b = u[0](h), u[1](h)
    return (a + v[0](z)).float().pow(2).sum(-1) + b.float().pow(3).sum(-1)


def some_of_them(u, v, h, z):
    r, s = v[0](z), v[1](z)
    return (u[0](h) + r).float().pow(2).sum(-1) + (u[1](h) + s).float().pow(3).sum(-1) + u[2](h).float().sum(-1)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("loss", [in_another_order, gru, one_alone, some_of_them], ids=lambda loss: loss.__name__)
def test_groups_that_share_gradients(monkeypatch, loss, recipe):
    """One dy is of several products, in groups of other members or in another order, and by itself."""
    torch.manual_seed(0)
    found, apart, made = run(monkeypatch, Two(loss).bfloat16(), given(), recipe)
    assert made >= 1
    alike(found, apart, 18)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_lora_without_a_scale(monkeypatch, recipe):
    """``base(x) + b(a(x))``: base and b have one dy."""

    class LowRank(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(base.in_features, 16, False), nn.Linear(16, base.out_features, False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=1)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, LowRank(child))
    ids = tokens()
    found, apart, _ = run(monkeypatch, model.bfloat16(), {"input_ids": ids, "labels": ids}, recipe)
    alike(found, apart, 14)


def test_an_exception_between_members_leaves_the_sum(monkeypatch):
    """Where something raises before all of a group is written, its members are as they were."""
    sum_of = writer.Writer._sum

    def raises(self, product, group):
        sum_of(self, product, group)
        raise RuntimeError("gone")

    torch.manual_seed(0)
    model = Linears(cube, (64, 32, 32)).bfloat16()
    whole = partitioned(model, given(), "speed")
    monkeypatch.setattr(writer.Writer, "_sum", raises)
    with pytest.warns(UserWarning, match="not every linear is in float8: RuntimeError: gone"):
        found = partitioned(model, given(), "speed", float8="rowwise_gw_hp", strict=False)
    alike(found, whole, 16)


# -- nothing more is saved, nothing underflows ----------------------------------------------------------------------------
def router_first(self, h):
    r = self.router(h).softmax(-1)
    return self.down(F.silu(self.gate(h)) * self.up(h)) * r


def parallel_block(self, h):
    q, k, v, gate, up = self.q(h), self.k(h), self.v(h), self.gate(h), self.up(h)
    return F.scaled_dot_product_attention(q, k, v) + self.down(F.silu(gate) * up)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("block", [router_first, parallel_block], ids=lambda block: block.__name__)
def test_both_halves_of_a_gate_are_by_themselves(monkeypatch, block, recipe):
    """Beside others of one input: the gate's backward quantizes and hands y out as without them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(64, 64, bias=False)
            for name in ("router", "q", "k", "v", "gate", "up", "down"):
                setattr(self, name, nn.Linear(64, 64, bias=False))

        def forward(self, x):
            return block(self, self.f(x)).float().square().mean()

    torch.manual_seed(0)
    found, apart, made = run(monkeypatch, Block().bfloat16(), given(), recipe)
    assert found.backward["quantize_glu_bwd"] == apart.backward["quantize_glu_bwd"] == 1
    assert made >= (block is parallel_block) + (recipe == "rowwise_gw_hp")
    alike(found, apart, 18)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("small", [1e-4, 1e-6])
def test_a_small_one_beside_a_large_one(monkeypatch, small, recipe):
    """The gradient of its weight has rows of its own: what adds next to nothing to the sum still moves its weight."""
    model = Linears(lambda h, y, z: y.float().square().sum(-1) + small * z.float().square().sum(-1), (64, 64)).bfloat16()
    whole = partitioned(model, given(), "speed")
    found, _, made = run(monkeypatch, model, given(), recipe)
    assert made == 1
    alike(found, whole, 20)


@pytest.mark.parametrize("large", range(3))
def test_parts_of_one_parameter(monkeypatch, large):
    """The largest magnitude is one of each part, not of the last that was read."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(64, 64, bias=False)
            self.weight = nn.Parameter(torch.randn(192, 64) / 8)
            with torch.no_grad():
                self.weight[64 * large : 64 * large + 64] *= 50

        def forward(self, x):
            h = self.f(x)
            return cube(h, *(F.linear(h, self.weight[64 * i : 64 * i + 64]) for i in range(3))).square().mean()

    torch.manual_seed(0)
    model = Parts().bfloat16()
    whole = partitioned(model, given(), "speed")
    for groups in (True, False):
        found = run(monkeypatch, model, given(), "rowwise_gw_hp")[not groups]
        alike(found, whole, 14)


@pytest.mark.parametrize("how", ["linear", "einsum", "autocast"])
def test_the_largest_of_a_weight_is_known_in_the_backward(how):
    """From the scales of its rows in the forward, however it is spelled: the backward makes no pass for it."""

    class Spelled(Linears):
        def forward(self, x):
            h = self.first(x)
            y = torch.einsum("bsk,nk->bsn", h, self.linears[0].weight) if how == "einsum" else self.linears[0](h)
            return y.float().square().mean()

    torch.manual_seed(0)
    model = Spelled(cube, (64,))
    model = model if how == "autocast" else model.bfloat16()
    asked = []
    insert = writer.Writer._insert

    def counted(self, product, function, operands, after):
        asked.extend(len(operands) for _ in range(function is writer.quantize_columns))
        return insert(self, product, function, operands, after)

    with pytest.MonkeyPatch.context() as patched, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        patched.setattr(writer.Writer, "_insert", counted)
        partitioned(model, {"x": given()["x"].float() if how == "autocast" else given()["x"]}, "speed", float8="rowwise_gw_hp")
    assert asked == [2], "the weight, and its largest magnitude"
