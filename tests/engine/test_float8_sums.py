"""Gradients of one input by several linears in float8: one product makes their sum, where nothing reads them by themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.ways_to_train import with_lora
from fx_fusion.float8 import choice, rewrite, writer
from fx_fusion.float8.linears import OF_INPUT, OF_WEIGHT
from tests import zoo
from tests.helpers import tiny_llama, tokens
from tests.partitioned import partitioned

RECIPES = ["rowwise_gw_hp", "rowwise"]


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
        patched.setattr(writer, "sums", lambda found: ())
        apart = partitioned(model, batch, "speed", float8=recipe, **options)
    found = partitioned(model, batch, "speed", float8=recipe, **options)
    assert not found.linears.trouble
    assert apart.backward["quantise_columns_together"] == 0
    assert found.linears.products == apart.linears.products, "the report lists every linear"
    assert found.bytes <= apart.bytes
    return found, apart, found.backward["quantise_columns_together"]


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
    assert made == sums
    rows = found.backward["quantise_rows_together"]
    assert rows == sums
    assert apart.backward["quantise_columns"] - found.backward["quantise_columns"] == products
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
@pytest.mark.parametrize(("family", "each"), [("Llama", 2), ("Qwen3", 2), ("Gemma2", 2), ("Olmo2", 2), ("Bert", 1), ("GPT2", 0)])
def test_families(monkeypatch, family, each, recipe):
    """Of each layer q, k, v and gate, up; GPT-2 has q, k, v in one."""
    model = zoo.build(family).bfloat16()
    found, apart, made = run(monkeypatch, model, zoo.batch(), recipe)
    assert made == each * model.config.num_hidden_layers
    alike(found, apart, 12)


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointed_layers_and_lora(monkeypatch, recipe):
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2).bfloat16()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, apart, made = run(monkeypatch, model, batch, recipe)
    assert made == 4
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

    found, apart, made = run(monkeypatch, Shared(cube, (64, 64)).bfloat16(), given(), "rowwise")
    assert found.backward["quantise_glu_bwd"] == 2
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
        return found.backward["quantise_columns_together"], {place.split(".")[-1] for place in kept}

    with monkeypatch.context() as patched:
        patched.setattr(rewrite, "pays_together", lambda group, slow: False)
        assert planned() == (1, {"k_proj", "v_proj", "lm_head"})
    assert planned() == (2, {"lm_head"})
