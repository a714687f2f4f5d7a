"""``fx_fusion.verify``: right models are right, a wrong replacement is found and named, and nothing is left behind."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fx_fusion
from fx_fusion import verifying
from tests import zoo
from tests.helpers import CountsCalls, a_little_more, detached, sabotaged, slow_but, tiny_llama, tokens

ALWAYS = {"select": "always"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_is_right(dtype):
    found = fx_fusion.verify(tiny_llama(dtype), input_ids=tokens(), labels=tokens(), options=ALWAYS)
    assert found.ok, str(found)
    assert found.blame is None
    assert found.report.count("linear_cross_entropy") == 1
    assert {row.name for row in found.rows} >= {"loss", "logits", "gradient of model.embed_tokens.weight"}
    # The oracle is one: eager's errors are those of the dtype, not 0 and not its own.
    usual = next(row.usual for row in found.rows if row.name == "gradient of model.layers.0.mlp.up_proj.weight")
    assert 0.01 * torch.finfo(dtype).eps < usual < 100 * torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPT2", "Bert", "T5", "Gemma2", "GPTNeoX"])
def test_families(family):
    found = fx_fusion.verify(zoo.build(family), **zoo.batch(), options=ALWAYS)
    assert found.ok, str(found)
    assert not found.nothing_replaced


@pytest.mark.parametrize("change", slow_but([detached], [a_little_more, detached]))
def test_a_wrong_replacement_is_named(monkeypatch, change):
    """In the values, or in the gradients alone."""
    with sabotaged(monkeypatch, "swiglu", 2, change):
        found = fx_fusion.verify(tiny_llama(), input_ids=tokens(), labels=tokens(), options=ALWAYS)
    assert not found.ok
    assert (found.blame.fusion, found.blame.module) == ("swiglu", "model.layers.1.mlp")
    assert "right without swiglu in model.layers.1.mlp" in str(found)
    assert 'options={"fusions": ["-swiglu"]}' in str(found)


def bisected():
    """Return what torch's bisector finds where a swiglu is wrong."""
    from torch._inductor.compiler_bisector import CompilerBisector

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("FX_FUSION_SELECT", "always")
    model, ids = tiny_llama(), tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}

    def is_right():
        torch._dynamo.reset()
        model.zero_grad()
        torch.compile(model, backend="fx_fusion")(input_ids=ids, labels=ids).loss.backward()
        return all(torch.allclose(p.grad, expected[name], atol=1e-4) for name, p in model.named_parameters())

    with sabotaged(monkeypatch, "swiglu", 2, a_little_more):
        return CompilerBisector.do_bisect(is_right)


@pytest.mark.slow
def test_torchs_own_bisector_names_it():
    """It tries one backend after the other, ours last, and then our replacements one by one.

    In a process of its own: it ends when a local of do_bisect is freed, and whatever keeps a frame of a compilation keeps that.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        found = own.submit(bisected).result(timeout=1800)
    assert (found.backend, found.subsystem) == ("fx_fusion", "replacements")
    assert found.debug_info.startswith("swiglu in model.layers.1.mlp (")


def test_what_is_wrong_without_any_replacement(monkeypatch):
    """Torch's own mistakes are no fusion's."""
    real = verifying.compile_graph

    def wrong(gm, examples, *, options):
        compiled = real(gm, examples, options=options)
        return lambda *given: tuple(o * 1.01 for o in compiled(*given))

    monkeypatch.setattr(verifying, "compile_graph", wrong)
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.RMSNorm(8))
    found = fx_fusion.verify(model, torch.randn(4, 8), options=ALWAYS)
    assert not found.ok
    assert found.blame is None
    assert "wrong without any replacement too" in str(found)


def test_nothing_is_left_behind():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.norm(x))

    model, x = Model(), torch.randn(6, 8)
    model.out.weight.grad = gradient = torch.ones_like(model.out.weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert fx_fusion.verify(model, x).ok
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.out.weight.grad is gradient
    assert model.out.bias.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_that_counts_its_calls():
    """Every run starts from the same buffers."""
    model = CountsCalls()
    assert fx_fusion.verify(model, torch.randn(6, 8)).ok
    assert model.calls == 0


def test_where_nothing_was_replaced_it_says_so():
    """All right, but of Inductor: a bug of a fusion would not be seen."""
    norm, x = nn.RMSNorm(64), torch.randn(4, 64)
    said = str(fx_fusion.verify(norm, x, options={"select": "never"}))
    assert "0 sites fused: all right" in said
    assert said.splitlines()[-1].startswith("nothing was replaced: 1 site kept with Inductor; options={\"select\": \"always\"}")
    assert "nothing was replaced" not in str(fx_fusion.verify(norm, x, options=ALWAYS))
    said = str(fx_fusion.verify(nn.Linear(8, 8), torch.randn(2, 8), options=ALWAYS))
    assert said.splitlines()[-1].startswith("nothing was replaced, not even by options={\"select\": \"always\"}")


def test_outputs_in_a_dataclass():
    @dataclass
    class Out:
        loss: torch.Tensor
        logits: torch.Tensor

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(64)

        def forward(self, x):
            y = self.norm(x)
            return Out(y.mean(), y)

    assert str(fx_fusion.verify(Model(), torch.randn(4, 64), options=ALWAYS)).startswith("3 outputs and gradients, 1 site fused: all right")


def test_one_output_is_one():
    norm = nn.RMSNorm(64, elementwise_affine=False)
    assert str(fx_fusion.verify(norm, torch.randn(4, 64), options=ALWAYS)).startswith("1 output, 1 site fused: all right\n")


@pytest.mark.parametrize("given", ["llama", torch.tanh], ids=["a name", "a function"])
def test_what_is_no_module(given):
    with pytest.raises(TypeError, match=r"^verify\(\) takes a module \(torch.nn.Module\), and what it is called with; got "):
        fx_fusion.verify(given, torch.randn(2, 2))


def test_names_of_a_compiled_model():
    """As the model has them; and eager's step is eager's."""

    def never(gm, inputs):
        raise AssertionError("it was compiled as the user does")

    inner = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.RMSNorm(8), backend="eager"))
    found = fx_fusion.verify(torch.compile(inner, backend=never), torch.randn(4, 8), options=ALWAYS)
    assert {row.name for row in found.rows} == {"output", "gradient of 0.weight", "gradient of 0.bias", "gradient of 1.weight"}


def test_a_wrong_model_without_a_path_is_named(monkeypatch):
    with sabotaged(monkeypatch, "rms_norm", 1, a_little_more):
        found = fx_fusion.verify(nn.RMSNorm(64), torch.randn(4, 64), options=ALWAYS)
    assert "right without rms_norm in the model itself (" in str(found)


def test_what_cant_be_compared():
    with pytest.raises(fx_fusion.VerificationError, match=r"draws random numbers: call model.eval\(\)"):
        fx_fusion.verify(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), torch.randn(4, 8))
    with pytest.raises(fx_fusion.VerificationError, match="no floating-point output"):
        fx_fusion.verify(nn.Flatten(), torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(fx_fusion.OptionError, match="Did you mean 'select'"):
        fx_fusion.verify(nn.Linear(2, 2), torch.ones(2, 2), options={"selct": "always"})
    assert fx_fusion.verify(nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval(), torch.randn(4, 8)).ok
