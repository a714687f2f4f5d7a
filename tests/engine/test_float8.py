"""Linears in float8: which products, how exact, what is saved for the backward, and what is said of those that stay."""

import contextlib
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fusion
from fx_fusion.errors import OptionError
from fx_fusion.float8 import choice, rewrite, writer
from fx_fusion.float8.linears import FORWARD, OF_INPUT, OF_WEIGHT, Linears
from fx_fusion.float8.products import Product, WeightGradient
from fx_fusion.options import parse
from tests import zoo
from tests.helpers import slow_but, tiny_llama, tokens
from tests.partitioned import partitioned

RECIPE, ALL_THREE = "rowwise_gw_hp", "rowwise"
RECIPES = [RECIPE, ALL_THREE]


def decibels(true, found):
    true, found = true.double(), found.double()
    return (20 * torch.log10(true.norm() / (true - found).norm().clamp(min=1e-300))).item()


def both(model, batch, recipe=RECIPE, **options):
    """A step in bfloat16 and one in float8, partitioned as under Inductor."""
    return partitioned(model, batch, "speed", **options), partitioned(model, batch, "speed", float8=recipe, **options)


def in_float8(found, kind):
    return [module for module, k, reason, _ in found.linears.products if k == kind and not reason]


def why(found):
    return {(module, kind): reason for module, kind, reason, _ in found.linears.products if reason}


# -- whole models -----------------------------------------------------------------------------------------------------
FAMILIES = ["Llama", "Qwen3", "Gemma2", "Gemma3", "Olmo2", "Mixtral", "GPT2", "Bert", "T5", "GPTNeoX", "Cohere", "Granite"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_is_exact_enough(family):
    """20 dB and more against float64, all three products (torchao's bar for a linear's output is 18)."""
    torch.manual_seed(0)
    stats = fx_fusion.float8_stats(zoo.build(family), **zoo.batch())
    assert {s.product for s in stats} == {FORWARD, OF_INPUT, OF_WEIGHT}
    assert stats[0].sqnr >= 20, str(stats)
    assert stats == sorted(stats, key=lambda s: s.sqnr)


def test_outliers_show():
    """What makes SwiGLU's output spike (arXiv:2409.12517) lets the small numbers of its rows underflow, and it shows."""
    torch.manual_seed(0)
    model, ids = tiny_llama(num_hidden_layers=1), tokens()
    batch = {"input_ids": ids, "labels": ids}
    name = "model.layers.0.mlp.down_proj.weight"
    found = []
    for spike in (1.0, 3e4):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3].mul_(spike)
        (stats,) = [s for s in fx_fusion.float8_stats(model, **batch) if s.weight == name and s.product == FORWARD]
        found.append(stats)
    assert found[1].underflow > 10 * found[0].underflow + 0.01
    assert found[1].amax > 100 * found[0].amax
    assert found[1].spread > found[0].spread
    assert name in str(fx_fusion.float8_stats(model, **batch))


def test_stats_leave_gradients_and_see_every_spelling():
    model = SPELLINGS["einsum"].float()
    x = torch.randn(2, 8, 64, requires_grad=True)
    model.weight.grad = given = torch.ones_like(model.weight)
    stats = fx_fusion.float8_stats(model, x)
    expected = {("weight", product) for product in (FORWARD, OF_INPUT, OF_WEIGHT)}
    assert {(s.weight, s.product) for s in stats} == expected
    assert model.weight.grad is given
    with torch.autocast("cpu", torch.bfloat16):
        assert {(s.weight, s.product) for s in fx_fusion.float8_stats(model, x)} == expected
    with pytest.raises(ValueError, match="needs the loss of a step"):
        fx_fusion.float8_stats(nn.Linear(16, 16), torch.randn(4, 16))


def test_stats_of_checkpointed_layers():
    """What the backward computes again of the forward is no gradient, and no second forward."""
    torch.manual_seed(0)
    model, ids = tiny_llama(num_hidden_layers=2).train(), tokens()
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        stats = fx_fusion.float8_stats(model, input_ids=ids, labels=ids)
        found.append(Counter((s.weight, s.product) for s in stats))
    assert found[0] == found[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", slow_but(["Llama", "GPT2"], ["Llama", "Mixtral", "GPT2", "Bert", "T5", "GPTNeoX"]))
def test_families(family, recipe):
    """Linears of every family are found, forwards and gradients. Nothing more is saved than a number a weight, and for
    gradients of weights one a row."""
    torch.manual_seed(0)
    model = zoo.build(family).bfloat16()
    before, after = both(model, zoo.batch(), recipe)
    assert len(in_float8(after, FORWARD)) >= 8, after.linears.sentences()
    assert in_float8(after, OF_INPUT)
    of_weights = in_float8(after, OF_WEIGHT)
    assert sorted(of_weights) == (sorted(in_float8(after, OF_INPUT)) if recipe == ALL_THREE else [])
    rows = zoo.batch()["input_ids"].numel()
    assert after.bytes <= before.bytes + 4 * len(in_float8(after, OF_INPUT)) + 4 * rows * len(of_weights)
    for name, gradient in before.gradients.items():
        if any(name == f"{module}.weight" for module in of_weights):
            assert decibels(gradient, after.gradients[name]) >= 10, name  # what comes into it from above is in float8 too


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_llama(recipe):
    torch.manual_seed(0)
    ids = tokens()
    before, after = both(tiny_llama(num_hidden_layers=1).bfloat16(), {"input_ids": ids, "labels": ids}, recipe)
    names = [
        f"model.layers.0.{n}"
        for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                  "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip
    assert in_float8(after, FORWARD) == names
    assert sorted(in_float8(after, OF_INPUT)) == sorted(names)
    assert sorted(in_float8(after, OF_WEIGHT)) == (sorted(names) if recipe == ALL_THREE else [])
    for name, gradient in before.gradients.items():
        assert decibels(gradient, after.gradients[name]) >= 20, name
    assert after.linears.sentences()[0].startswith(f"float8 {recipe}: forward of 1 x q_proj, 1 x k_proj")
    assert after.backward["turn_rows"] == (11 if recipe == ALL_THREE else 0)  # seven dy; x of q, k, v is one, of gate, up too
    columns = after.backward["quantize_columns"], after.backward["quantize_columns_together"]
    only_qkv = recipe == ALL_THREE  # q, k, v are one product, and gate, up, whose kernel writes no other rows for their weights
    assert columns == ((4, 1) if only_qkv else (2, 2)), "the weights turned, in the backward: they are not saved"
    assert before.backward["mm"] == after.backward["mm"] + (2 if only_qkv else 3), "emulated products, and gradients of weights"


# -- spellings --------------------------------------------------------------------------------------------------------
class Spelled(nn.Module):
    """``weight`` is (out, in), or (in, out) where ``turned``."""

    def __init__(self, product, bias=False, turned=False):
        super().__init__()
        self.product, self.weight = product, nn.Parameter(torch.randn(*((64, 32) if turned else (32, 64))) / 8)
        self.bias = nn.Parameter(torch.randn(32)) if bias else None

    def forward(self, x):
        return self.product(x, self.weight, self.bias).square().mean()


SPELLINGS = {
    "linear": Spelled(lambda x, w, b: F.linear(x, w)),
    "linear_bias": Spelled(F.linear, bias=True),
    "matmul": Spelled(lambda x, w, b: torch.matmul(x, w.t())),
    "einsum": Spelled(lambda x, w, b: torch.einsum("bsk,nk->bsn", x, w)),
    "addmm": Spelled(lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.t()), bias=True),
    "conv1d_of_gpt2": Spelled(lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w), bias=True, turned=True),
    "turned": Spelled(lambda x, w, b: x @ w, turned=True),
    "plus_bias": Spelled(lambda x, w, b: x @ w.mT + b, bias=True),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, recipe):
    """All products of each, results and gradients of all three operands."""
    torch.manual_seed(0)
    model = SPELLINGS[name].bfloat16()
    batch = {"x": torch.randn(2, 8, 64).bfloat16().requires_grad_()}
    gradients = []
    for float8 in ("off", recipe):
        batch["x"].grad = None
        found = partitioned(model, batch, "speed", float8=float8)
        gradients.append((batch["x"].grad.clone(), found))
    (dx, before), (dx8, after) = gradients
    assert [len(in_float8(after, kind)) for kind in (FORWARD, OF_INPUT, OF_WEIGHT)] == [1, 1, int(recipe == ALL_THREE)]
    assert decibels(dx, dx8) >= 20
    for parameter, gradient in before.gradients.items():
        assert decibels(gradient, after.gradients[parameter]) >= 20, parameter


def test_one_activation_is_quantized_once(monkeypatch):
    """q, k, v share one; o; gate, up share one; down. In the backward seven gradients, of which q, k, v and gate, up are two."""
    ids, made = tokens(), Counter()
    insert = writer.Writer._insert

    def counted(self, node, function, operands, after):
        made[function, "tangents" in str(ancestors(operands[0]))] += 1
        return insert(self, node, function, operands, after)

    monkeypatch.setattr(writer.Writer, "_insert", counted)
    found = partitioned(tiny_llama(num_hidden_layers=1).bfloat16(), {"input_ids": ids, "labels": ids}, "speed", float8=RECIPE)
    rows = (writer.quantize_rows, writer.quantize_rows_inline, *writer._ROWS_TOGETHER.values())
    assert [sum(made[f, backward] for f in rows) for backward in (False, True)] == [4, 4]
    assert len(in_float8(found, FORWARD)) == 7


def ancestors(node):
    found = [node]
    for member in found:
        found += [n for n in member.all_input_nodes if n not in found]
    return found


def test_a_gradient_whose_rows_differ():
    """By the twelfth power of ten, as padded and easy tokens do: what is small in the sum may be lost, and nothing else."""
    torch.manual_seed(0)
    model = Weighted().bfloat16()
    weights = torch.logspace(0, -12, 24).bfloat16()[:, None]
    batch = {"x": torch.randn(24, 64).bfloat16().requires_grad_(), "weights": weights}
    before, after = both(model, batch, ALL_THREE)
    assert in_float8(after, OF_WEIGHT) == ["linear"]
    assert decibels(before.gradients["linear.weight"], after.gradients["linear.weight"]) >= 20


@pytest.mark.parametrize("value", [0.0, 1e-30, float("inf"), float("nan")])
def test_gradients_that_are_no_usual_numbers(value):
    """All zero: the gradient of the weight is zero, and no NaN. Not finite: it is not finite either."""
    torch.manual_seed(0)
    x = torch.randn(24, 64).bfloat16().requires_grad_()
    after = partitioned(
        Weighted().bfloat16(), {"x": x, "weights": torch.full((24, 1), value).bfloat16()}, "speed", float8=ALL_THREE
    )
    gradient = after.gradients["linear.weight"]
    assert bool(gradient.isfinite().all()) == (value in (0.0, 1e-30))
    assert bool((gradient == 0).all()) == (value == 0.0)


class Weighted(nn.Module):
    """A linear, the rows of whose gradient are multiples of ``weights``; an odd number of rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 32, bias=False)

    def forward(self, x, weights):
        return (self.linear(x) * weights).sum()


# -- what stays, and why ----------------------------------------------------------------------------------------------
class Two(nn.Module):
    def __init__(self, n=64, k=64, bias=False):
        super().__init__()
        self.first, self.second = nn.Linear(64, k, bias), nn.Linear(k, n, bias)

    def forward(self, x):
        return self.second(F.gelu(self.first(x))).square().mean()


@pytest.mark.parametrize(
    ("model", "dtype", "options", "reasons"),
    [
        (Two(), torch.bfloat16, {"float8_keep": ["second"]}, {"second": "float8_keep names it"}),
        (Two(), torch.bfloat16, {"float8_keep": ["*"]}, {"first": "float8_keep names it", "second": "float8_keep names it"}),
        (Two(n=40), torch.bfloat16, {}, {"second": "must be multiples of 16"}),
        (Two(n=32000), torch.bfloat16, {"fusions": ["-linear_rows"]}, {"second": "32000 outputs are taken for a vocabulary's"}),
        (Two(), torch.float32, {}, {"first": "only bfloat16 has such products", "second": "only bfloat16"}),
        (Two(), torch.float16, {}, {"first": "only bfloat16 has such products", "second": "only bfloat16"}),
    ],
    ids=["named", "all_named", "multiples", "vocabulary", "float32", "float16"],
)
def test_what_stays(model, dtype, options, reasons):
    found = partitioned(model.to(dtype), {"x": torch.randn(8, 64, dtype=dtype)}, "speed", float8=RECIPE, **options)
    said = why(found)
    assert {module for module, _ in said} == set(reasons)
    for (module, _), reason in said.items():
        assert reasons[module] in reason
    assert set(in_float8(found, FORWARD)) == {"first", "second"} - set(reasons)
    assert all(any(reason in sentence for sentence in found.linears.sentences()) for reason in said.values())


def test_a_weight_that_the_graph_writes_to():
    """As with weights that are clamped in front of every product: what is multiplied is no parameter any more."""

    class Written(Two):
        def forward(self, x):
            with torch.no_grad():
                self.second.weight.clamp_(-0.05, 0.05)
            return super().forward(x)

    torch.manual_seed(0)
    model, batch = Written().bfloat16(), {"x": torch.randn(8, 64).bfloat16()}
    before, after = both(model, batch)
    assert in_float8(after, FORWARD) == ["first"]
    assert decibels(before.gradients["second.weight"], after.gradients["second.weight"]) >= 20


def test_a_product_of_two_activations_stays():
    x = torch.randn(8, 32, 32).bfloat16().requires_grad_()
    found = partitioned(Products(), {"x": x}, "speed", float8=RECIPE)
    assert found.linears.products == []


class Products(nn.Module):
    def forward(self, x):
        return (x[0] @ x[1]).square().mean()


@pytest.mark.parametrize("select", ["auto", "never"])
def test_a_cpu_has_none(select):
    """Unless emulation was asked for: one warning, all in bfloat16, the same gradients to the last bit."""
    model, batch = Two().bfloat16(), {"x": torch.randn(8, 64).bfloat16()}
    before = partitioned(model, batch, "speed", select=select)
    with pytest.warns(UserWarning, match="all is in bfloat16: a CPU has none"):
        after = partitioned(model, batch, "speed", select=select, float8=RECIPE)
    assert after.linears.sentences() == [
        f"float8 {RECIPE}: all in bfloat16: a CPU has none: select='always' emulates it"
    ]
    assert all(torch.equal(after.gradients[n], g) for n, g in before.gradients.items())


def test_a_gradient_of_a_weight_stays_with_its_forward():
    found = partitioned(
        Two().bfloat16(), {"x": torch.randn(8, 64).bfloat16().requires_grad_()}, "speed", float8=ALL_THREE, float8_keep=["first"]
    )
    assert in_float8(found, OF_WEIGHT) == ["second"]
    assert why(found)["first", OF_WEIGHT] == "its forward, or the gradient of its input, is in bfloat16"
    assert f"float8 {ALL_THREE}: in bfloat16: gradient of the weight of 1 x first: its forward" in "\n".join(found.linears.sentences())


def test_recipes_differ_only_where_a_gradient_of_a_weight_is_taken(monkeypatch):
    """Scales that are powers of two are for these alone: GPT-2, whose gradients of weights are too small, rounds as before."""
    monkeypatch.setattr(rewrite, "why_not", lambda product, *_, **__: "of no gain" if product.backward else None)
    model, x = Two().bfloat16(), torch.randn(8, 64).bfloat16()
    found = [partitioned(model, {"x": x.clone().requires_grad_()}, "speed", float8=recipe) for recipe in RECIPES]
    assert all(sorted(in_float8(each, FORWARD)) == ["first", "second"] for each in found)
    assert not in_float8(found[1], OF_WEIGHT)
    assert all(torch.equal(found[0].gradients[name], g) for name, g in found[1].gradients.items())


def product_of(m, n, k, *, backward=False, source=None):
    """A product as ``choice`` sees one, on a GPU that is not here."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(m, k, dtype=torch.bfloat16, device="cuda"), torch.empty(n, k, dtype=torch.bfloat16, device="cuda")]
        a, b = graph.placeholder("a"), graph.placeholder("b")
        turned = torch.empty(k, n, dtype=torch.bfloat16, device="cuda")
        a.meta["val"], b.meta["val"] = values[0], turned if backward else values[1].t()
    return Product(a, a, b, None, b, source or a, backward)


@pytest.mark.skipif(torch.cuda.is_available(), reason="by the figures of an H200")
def test_by_time():
    """A large one gains; a small one does not; one that shares its activation gains where it would not alone."""
    assert not choice.slower([product_of(16384, 8192, 2048)])
    small = product_of(512, 256, 256)
    assert choice.slower([small])[small].startswith("float8 would cost")
    thin = product_of(16384, 16, 2048)  # LoRA's first factor
    wide = product_of(16384, 8192, 2048, source=thin.source)
    assert set(choice.slower([thin, wide])) == {thin}
    alone = product_of(4096, 768, 768)
    assert alone in choice.slower([alone])


@pytest.mark.skipif(torch.cuda.is_available(), reason="by the figures of an H200")
def test_gradients_of_weights_by_time():
    def gradient(m, n, k):
        forward, back = product_of(m, n, k), product_of(m, k, n, backward=True)
        return WeightGradient(forward.node, forward.a, back.a, forward, back)

    large, small = gradient(16384, 8192, 2048), gradient(512, 256, 256)
    assert set(choice.slower_gradients([large, small])) == {small}
    assert choice.slower_gradients([small])[small].startswith("float8 would cost")


@pytest.mark.skipif(torch.cuda.is_available(), reason="by the figures of an H200")
def test_products_that_pay_together():
    """k and v of Llama 1B gain nothing by themselves (512 wide), beside q they do; of a few rows none does."""
    q, k, v = (product_of(16384, 2048, n, backward=True) for n in (2048, 512, 512))
    slow = choice.slower([q, k, v])
    assert set(slow) == {k, v}
    assert choice.pays_together((q, k, v), slow)
    few = [product_of(256, 2048, n, backward=True) for n in (2048, 512, 512)]
    assert not choice.pays_together(few, choice.slower(few))


@pytest.mark.skipif(torch.cuda.is_available(), reason="by the figures of an H200")
def test_what_is_gained():
    """Two products of one activation share what it costs; the sentence adds them up."""
    one = product_of(16384, 8192, 2048)
    two = product_of(16384, 8192, 2048, source=one.source)
    alone, both = choice.gained([one], [])[one], choice.gained([one, two], [])
    assert 1e-4 < alone < both[one] == both[two] < 1e-3
    linears = Linears(RECIPE, True, True, [("gate", FORWARD, "", both[one]), ("up", FORWARD, "", both[two]), ("k", FORWARD, "no", 0.0)])
    assert linears.sentences()[0] == f"float8 {RECIPE}: forward of 1 x gate, 1 x up; about {2e3 * both[one]:.2g} ms gained, by formula"


# -- beside what people do --------------------------------------------------------------------------------------------
def run(model, batch, *, context=contextlib.nullcontext, cache=fresh_cache, backward=True, **asked):
    """A step; what another test compiled is not found, as the report then does not say what became of the linears."""
    torch._dynamo.reset()
    model.zero_grad()
    options = {"select": "always", "strict": True, "float8": RECIPE, **asked.pop("options", {})}
    compiled = torch.compile(model, backend="fx_fusion", options=options, **asked)
    with cache(), fx_fusion.recording() as report:
        with context():
            out = compiled(**batch)
        if backward:
            out.loss.backward()
    return out.loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], report


WAYS = ("plain", "dynamic", "autocast", "checkpoint", "frozen", "memory_min")
SLOW = [*((way, ALL_THREE) for way in WAYS), ("frozen", RECIPE)]
CASES = [("plain", RECIPE), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("way", "recipe"), CASES)
def test_compiled(way, recipe):
    """By Inductor, as people train: the loss and the gradients, and the report says which products are in float8."""
    torch.manual_seed(0)
    model, ids = tiny_llama(num_hidden_layers=2), tokens()
    given = {}
    if way == "autocast":
        given["context"] = lambda: torch.autocast("cpu", torch.bfloat16)
    else:
        model = model.bfloat16()
    if way == "dynamic":
        given["dynamic"] = True
    if way == "checkpoint":
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if way == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    given["options"] = {"float8": recipe, "memory": "min" if way == "memory_min" else "auto"}
    batch = {"input_ids": ids, "labels": ids}
    off = {**given, "options": {**given["options"], "float8": "off"}}
    loss, before, _ = run(model, batch, cache=contextlib.nullcontext, **off)
    loss8, after, report = run(model, batch, **given)
    assert loss8.item() == pytest.approx(loss.item(), rel=2e-3)
    assert decibels(torch.cat([g.flatten() for g in before]), torch.cat([g.flatten() for g in after])) >= 20
    (linears,) = [graph.linears for graph in report.graphs if graph.linears.products]
    assert linears.any
    said = "\n".join(linears.sentences())
    assert "forward of 2 x q_proj" in said
    assert "gradients of inputs of 2 x down_proj" in said
    of_weights = "gradients of weights of 2 x down_proj" in said
    assert of_weights == (recipe == ALL_THREE and way != "frozen")
    assert said.splitlines()[0] in str(report)


@pytest.mark.slow
def test_without_gradients():
    model, ids = tiny_llama(num_hidden_layers=1).bfloat16().eval(), tokens()
    _, _, report = run(model, {"input_ids": ids, "labels": ids}, context=torch.no_grad, backward=False)
    said = "\n".join(graph_note for graph in report.graphs for graph_note in graph.notes())
    assert "forward of 1 x q_proj" in said
    assert "gradients of inputs" not in said


@pytest.mark.slow
def test_from_the_cache(tmp_path):
    """The second compilation finds the code of the first, and says so; another recipe or list does not find it."""
    model, ids = tiny_llama(num_hidden_layers=1).bfloat16(), tokens()
    batch = {"input_ids": ids, "labels": ids}
    with fresh_cache():
        reports = [run(model, batch, cache=contextlib.nullcontext, options=more)[2] for more in ({}, {}, {"float8_keep": ["*.q_proj"]})]
    first, second, third = ("\n".join(g.linears.sentences()[0] for g in r.graphs) for r in reports)
    assert "1 x q_proj" in first
    assert "from torch's compile cache" in second
    assert "1 x k_proj" in third
    assert "1 x q_proj" not in third.split(";")[0]


def test_an_error_leaves_the_graph_to_bfloat16(monkeypatch):
    """Warned of, reported, and the gradients are bfloat16's."""
    model, batch = Two().bfloat16(), {"x": torch.randn(8, 64).bfloat16()}
    before = partitioned(model, batch, "speed")

    def fails(*_):
        raise ValueError("made up")

    monkeypatch.setattr(rewrite, "products", fails)
    with pytest.warns(UserWarning, match="not every linear is in float8: ValueError: made up"):
        after = partitioned(model, batch, "speed", float8=RECIPE, strict=False)
    assert after.linears.sentences() == [f"float8 {RECIPE}: all in bfloat16: ValueError: made up"]
    assert all(torch.equal(after.gradients[n], g) for n, g in before.gradients.items())


def test_an_error_on_the_way_is_told_from_one_before(monkeypatch):
    """What is in float8 by then is not said to be in bfloat16; nor is the product that failed said to be in float8."""
    write, written = writer.Writer.write, []

    def second_fails(self, product):
        if written:
            raise ValueError("made up")
        written.append(product)
        write(self, product)

    monkeypatch.setattr(writer.Writer, "write", second_fails)
    with pytest.warns(UserWarning, match="not every linear is in float8"):
        found = partitioned(Two().bfloat16(), {"x": torch.randn(8, 64).bfloat16()}, "speed", float8=RECIPE, strict=False)
    assert [product[:3] for product in found.linears.products] == [("first", FORWARD, "")]
    assert found.linears.sentences() == [f"float8 {RECIPE}: the rest in bfloat16: ValueError: made up"]


@pytest.mark.slow
def test_the_document_keeps_what_became_of_linears():
    model, ids = tiny_llama(num_hidden_layers=1).bfloat16(), tokens()
    _, _, report = run(model, {"input_ids": ids, "labels": ids})
    again = type(report).from_json(report.to_json())
    assert [g.linears for g in again.graphs] == [g.linears for g in report.graphs]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"float8": "tensorwise"}, "rowwise_gw_hp"), ({"float8": True}, "must be a str"), ({"float8_keep": "*.q"}, "must be a list"),
     ({"float8_keep": [1]}, "must be a list of patterns"), ({"float8": RECIPE, "verify": "graph"}, "take 'sample'")],
)  # fmt: skip
def test_options(options, message):
    with pytest.raises(OptionError, match=message):
        parse(None, options)


def test_nothing_is_said_where_nobody_asked():
    model, ids = tiny_llama(num_hidden_layers=1).bfloat16(), tokens()
    _, _, report = run(model, {"input_ids": ids, "labels": ids}, options={"float8": "off"})
    assert "float8" not in str(report)


def test_the_scales_of_no_rows():
    """Rows that are chosen in the graph may be none: it is traced for any number."""
    for rows in (0, 3):
        scales, largest = writer.into_dy(torch.ones(rows, 1), torch.ones(rows, 1))
        assert scales.shape == (rows, 1)
        assert largest > 0
