"""SwiGLU and GEGLU beside float8 linears: one kernel computes and quantizes, the backward's hands out y as well."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from bench.trained_models import with_lora
from fx_fusion.cost import select
from fx_fusion.float8 import norms, rewrite
from fx_fusion.float8.linears import FORWARD, OF_INPUT
from fx_fusion.fusion.search import Search
from fx_fusion.graph.view import View
from fx_fusion.memory import candidates
from fx_fusion.options import parse
from fx_fusion.pipeline import Fuel
from fx_fusion.pipeline import rewrite as rewrite_graph
from fx_fusion.rewrite.editor import Editor
from tests import zoo
from tests.helpers import printed_without_interpreter, tiny_llama, tokens
from tests.partitioned import partitioned

RECIPES = ["rowwise_gw_hp", "rowwise"]
FAMILIES = [("Llama", "swiglu", 2), *(pytest.param(*f, marks=pytest.mark.slow) for f in [("Gemma2", "geglu", 2), ("T5", "geglu", 4)])]


def both(monkeypatch, model, batch, recipe, memory="speed", **options):
    """A step whose gates quantize, and one where a kernel behind them does."""
    found = partitioned(model, batch, memory, float8=recipe, **options)
    with monkeypatch.context() as patched:
        patched.setattr(rewrite, "quantize_in_gates", lambda *given: None)
        behind = partitioned(model, batch, memory, float8=recipe, **options)
    assert found.gradients.keys() == behind.gradients.keys()
    assert [n for n, gradient in found.gradients.items() if not torch.equal(gradient, behind.gradients[n])] == []
    assert not found.linears.trouble
    return found, behind


def of_a_llama():
    ids = tokens()
    return tiny_llama(num_hidden_layers=2).bfloat16(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("memory", ["speed", "min"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("family", "op", "gates"), FAMILIES)
def test_families(monkeypatch, family, op, gates, recipe, memory):
    """The same bits; y is handed out by the backward, neither saved nor computed by a kernel of its own."""
    found, behind = both(monkeypatch, zoo.build(family).bfloat16(), zoo.batch(), recipe, memory)
    assert found.backward["quantize_glu_bwd"] == gates
    assert found.backward[op] == found.backward[f"{op}_bwd"] == 0
    assert behind.backward[f"{op}_bwd"] == gates
    rows = [behind.backward[name] - found.backward[name] for name in ("quantize_rows", "quantize_rows_together")]
    assert rows == ([0, gates] if recipe == "rowwise_gw_hp" else [2 * gates, 0])
    quantized = family != "T5"  # where a dropout of nothing stands in between
    assert found.bytes < behind.bytes if quantized and memory == "speed" else found.bytes <= behind.bytes


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointed_layers(monkeypatch, recipe):
    model, batch = of_a_llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, _ = both(monkeypatch, model, batch, recipe)
    assert found.backward["quantize_glu_bwd"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_who_else_reads_them(monkeypatch, recipe):
    """LoRA's factors multiply in bfloat16 what the frozen linears multiply in float8: y, dgate and dup are stored too."""
    torch.manual_seed(0)
    model, batch = of_a_llama()
    with_lora(model)
    found, _ = both(monkeypatch, model.bfloat16(), batch, recipe, float8_keep=["*.a", "*.b"])
    assert found.backward["quantize_glu_bwd"] == 2
    assert found.backward["swiglu"] == 0


class Gated(nn.Module):
    """An MLP of which ``ends`` makes a loss: of the module, x and y."""

    def __init__(self, ends, gates=None):
        super().__init__()
        self.gate, self.up, self.down, self.down2 = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.ends, self.gates = ends, gates or self.gated

    def gated(self, x):
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x):
        return self.ends(self, x, self.gates(x)).float().square().mean()


def one_up_is_frozen(module):
    return lambda x: F.silu(module.gate(x)) * module.up(x).detach()


ENDS = {  # what y is read by besides, so that the backward of the gate needs it or is no one's
    "y in the gradient of y": lambda m, x, y: m.down(y) + y.float().pow(3),
    "a norm of y": lambda m, x, y: m.down(F.rms_norm(y, (64,))) + m.down2(y),
    "a sigmoid of y": lambda m, x, y: x + m.down(y) * torch.sigmoid(y),
}


@pytest.mark.parametrize("memory", ["speed", "min"])
@pytest.mark.parametrize("name", ENDS)
def test_nothing_more_is_saved(monkeypatch, name, memory):
    """Where the backward can't hand y out, it is neither saved where it was not, nor computed by one kernel more."""
    monkeypatch.setattr(candidates, "_SMALLEST", 1)
    torch.manual_seed(0)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    found, behind = both(monkeypatch, Gated(ENDS[name]).bfloat16(), {"x": x}, "rowwise", memory)
    assert found.bytes <= behind.bytes
    assert found.backward["swiglu"] <= behind.backward["swiglu"]


def test_a_backward_that_is_not_quantized(monkeypatch):
    """up needs no gradient: the forward stays as it is, too, or y would be computed once more."""
    torch.manual_seed(0)
    model = Gated(lambda m, x, y: m.down(y))
    model.gates = one_up_is_frozen(model)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    found, behind = both(monkeypatch, model.bfloat16(), {"x": x}, "rowwise")
    assert (found.backward["swiglu"], found.backward["quantize_glu_bwd"]) == (behind.backward["swiglu"], 0)


@pytest.mark.parametrize("policy", [None, torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE])
def test_a_checkpoint_around_the_gate_alone(monkeypatch, policy):
    """What the user has computed again is not saved, and what the user has saved is."""
    def of(ctx, op, *given, **rest):
        saved = "swiglu" in str(op)
        return policy if saved else torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {} if policy is None else {
        "context_fn": functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, of)
    }  # fmt: skip
    torch.manual_seed(0)
    model = Gated(ENDS["a sigmoid of y"])
    model.gates = lambda x: torch.utils.checkpoint.checkpoint(model.gated, x, use_reentrant=False, **contexts)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    found, behind = both(monkeypatch, model.bfloat16(), {"x": x}, "rowwise")
    assert found.bytes == behind.bytes


class Returned(nn.Module):
    """An MLP that returns what it multiplies."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        y = F.silu(self.gate(x)) * self.up(x)
        return {"loss": self.down(y).square().mean() + y.float().mean(), "y": y}


def test_y_is_returned_too(monkeypatch):
    torch.manual_seed(0)
    found, _ = both(monkeypatch, Returned().bfloat16(), {"x": torch.randn(2, 16, 64).bfloat16().requires_grad_()}, "rowwise")
    assert found.backward["quantize_glu_bwd"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "kind", "there"),
    [("*.up_proj", OF_INPUT, {"swiglu_bwd": 2, "quantize_glu_bwd": 0}), ("*.down_proj", FORWARD, {"quantize_glu_bwd": 2})],
)
def test_one_of_them_stays_in_bfloat16(monkeypatch, keep, kind, there):
    """A backward writes both of its results in float8 or neither; its forward is another matter."""
    found, _ = both(monkeypatch, *of_a_llama(), "rowwise", float8_keep=[keep])
    assert {name: found.backward[name] for name in there} == there
    assert sum(k == kind and bool(reason) for _, k, reason, _ in found.linears.products) == 2


# -- as on a GPU ------------------------------------------------------------------------------------------------------
def traced_launches(*arguments):
    return printed_without_interpreter("tests.traced_launches", "float8", *arguments)


def launches(memory, *fusions):
    """Return what a Llama of one layer launches where AOTAutograd traces its kernels, by recipe."""
    found = traced_launches(memory, *fusions)
    assert not any(of["trouble"] or of["ops"] for of in found.values())
    return found


@pytest.mark.slow
def test_as_on_a_gpu():
    """AOTAutograd traces the kernels, those of rows whose op is called with its defaults too: Inductor launches them all."""
    found = launches("speed", "swiglu")
    for recipe, stored in (("rowwise_gw_hp", ": dgate, dup, y"), ("rowwise", ": y")):
        of = found[recipe]
        assert [name for name in of["forward"] if "glu" in name] == ["quantize_glu_kernel"]
        assert [name for name in of["backward"] if "glu" in name] == [f"quantize_glu_bwd_kernel{stored}"]
        assert of["forward"].count("quantize_rows_kernel") == 9, "the weights, lm_head's too, and what attention gives"
        assert of["backward"].count("quantize_rows_together_kernel") == 1, "of q, k and v"
        assert of["backward"].count("quantize_columns_together_kernel") == (2 if recipe == "rowwise_gw_hp" else 1)


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "stored"), [("speed", ": q, y"), ("min", ": q")])
def test_norms_as_on_a_gpu(memory, stored):
    """Their kernels quantize y and dx; y is stored only where it is saved, and handed out by the backward otherwise."""
    for recipe, of in launches(memory, "swiglu", "rms_norm", "add_rms_norm").items():
        norms = {way: [name for name in of[way] if name.startswith("row_norm")] for way in ("forward", "backward")}
        assert norms["forward"] == [f"row_norm_fwd_kernel{stored}"] * 3
        handed_out = ", y" if memory == "min" else ""
        last = "row_norm_bwd_kernel" + (": y" if handed_out else "")
        assert norms["backward"] == [f"row_norm_bwd_kernel: q{handed_out}"] * 2 + [last], (recipe, norms["backward"])
        assert of["forward"].count("quantize_rows_kernel") == 9, "the weights, lm_head's too, and what attention gives"
        assert of["backward"].count("quantize_rows_kernel") == 0


@pytest.mark.slow
def test_norms_as_on_a_gpu_without_a_gradient():
    """q, k and v read one norm: its y is stored for nobody, and nothing asks for it."""
    for of in launches("inference", "rms_norm", "add_rms_norm").values():
        assert [name for name in of["forward"] if name.startswith("row_norm")] == ["row_norm_fwd_kernel: q"] * 3


def test_what_only_the_backward_multiplies_is_not_saved_twice():
    forward, backward = traced_launches("later")
    assert forward == ["row_norm_fwd_kernel: y", "quantize_rows_kernel"], "the weight's rows"
    assert backward == ["quantize_rows_kernel", "row_norm_bwd_kernel"]


def test_a_slice_at_a_symbolic_place_is_no_norm_of_ours():
    """It has two inputs, the place is one."""
    graph = torch.fx.Graph()
    x, place = graph.placeholder("x"), graph.placeholder("place")
    part = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, place, place))
    x.meta["val"], part.meta["val"] = torch.empty(80, 64), torch.empty(16, 64)
    assert norms._as_it_lies(part) is part


def placed(reader, rows=4096, options=None):
    """The sites of ``reader(silu(x @ gate) * (x @ up))`` on a GPU, by fusion: their status and why."""
    def mlp(x, gate, up, down):
        return reader(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    with FakeTensorMode() as mode:
        shapes = (rows, 2048), (8192, 2048), (8192, 2048), (2048, 8192)
        module = torch.fx.symbolic_trace(mlp)
        FakeTensorProp(module, mode).propagate(*(torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes))
        graph = module.graph
        for node in graph.nodes:
            node.meta["example_value"] = node.meta["val"]
        view = View(graph)
        sites = rewrite_graph(Search(view), parse(None, options), Editor(view), Fuel(None), graph=0)
    return {site.fusion: (site.status, site.reason) for site in sites}


FLOAT8 = {"float8": "rowwise"}


def test_which_are_replaced():
    """Where a product reads the result of a large one; elsewhere Inductor keeps it, as without float8."""
    assert placed(F.linear, options=FLOAT8)["swiglu"][0] == "fused"
    assert placed(lambda y, w: F.linear(y.view(2, -1, 8192), w), options=FLOAT8)["swiglu"][0] == "fused"
    assert placed(F.linear)["swiglu"][0] == "kept"
    assert placed(F.linear, rows=256, options=FLOAT8)["swiglu"][0] == "kept"
    assert placed(lambda y, w: y * 2, options=FLOAT8)["swiglu"][0] == "kept"


def test_a_gpu_without_float8(monkeypatch):
    monkeypatch.setattr(select, "without_support", lambda device: "it has none")
    assert placed(F.linear, options=FLOAT8)["swiglu"][0] == "kept"
