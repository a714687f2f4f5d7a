"""Options: names, modes, what goes through to Inductor."""

import re
from pathlib import Path

import pytest
import torch

import fx_fusion
from fx_fusion.options import _OURS, VARIABLES, parse
from fx_fusion.testing import rewriting_backend
from tests.helpers import tiny_llama, tokens


def test_fuel_stops_after_n_replacements(monkeypatch):
    model, ids = tiny_llama(), tokens()
    for fuel in (0, 1, 5):
        monkeypatch.setenv("FX_FUSION_FUEL", str(fuel))
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            out = torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids)
        assert sum(s.status == "fused" for s in report.sites) == fuel
        torch.testing.assert_close(out.loss, model(input_ids=ids, labels=ids).loss)
    monkeypatch.setenv("FX_FUSION_FUEL", "many")
    with pytest.raises(fx_fusion.OptionError, match="FX_FUSION_FUEL='many' must be a number"):
        parse(None, None)


@pytest.mark.parametrize(("options", "fragment"), [
    ({"slect": "always"}, "Did you mean 'select'"),
    ({"nonsense": 1}, "Valid: select, fusions, defer_outputs, speculate, memory, float8, float8_keep, verify, front_ends, layers, experts, strict"),
    ({"max_autotun": True}, "Did you mean 'max_autotune'"),
    ({"triton.cudagraph": True}, "Did you mean 'triton.cudagraphs'"),
    ({3: True}, "options.3. is known neither"),
    ({"select": "allways"}, "Did you mean 'always'"),
    ({"fusions": ["rmsnorm"]}, "Did you mean 'rms_norm'"),
    ({"fusions": ["-swigloo"]}, "Did you mean 'swiglu'"),
    ({"strict": 1}, "must be a bool"),
    ({"fusions": "rms_norm"}, "must be a list"),
])  # fmt: skip
def test_unknown_options_are_named(options, fragment):
    with pytest.raises(fx_fusion.OptionError, match=fragment):
        parse(None, options)


def test_modes_and_options_of_inductor_pass_through():
    assert parse("reduce-overhead", None).inductor == {"triton.cudagraphs": True}
    parsed = parse("max-autotune-no-cudagraphs", {"select": "always", "shape_padding": True, "epilogue-fusion": False})
    assert parsed.inductor["max_autotune"] is True
    assert parsed.inductor["shape_padding"] is True
    assert parsed.inductor["epilogue_fusion"] is False
    with pytest.raises(fx_fusion.OptionError, match="Did you mean 'max-autotune'"):
        parse("max-autotun", None)
    with pytest.raises(fx_fusion.OptionError, match=r"Unexpected type of attr shape_padding, got str should be bool"):
        parse(None, {"shape_padding": "yes"})


def test_a_mode_beside_options():
    parsed = parse(None, {"mode": "reduce-overhead", "memory": "min"})
    assert parsed.cuda_graphs
    assert parsed.memory == "min"
    with pytest.raises(fx_fusion.OptionError, match="give one of them"):
        parse("default", {"mode": "default"})
    with pytest.raises(fx_fusion.OptionError, match="Did you mean 'max-autotune'"):
        parse(None, {"mode": "max-autotun"})


def test_variables_as_people_write_them(monkeypatch):
    written = {"VERIFY": "True", "FUSIONS": "rope, swiglu,", "FLOAT8_KEEP": "*.down_proj, lm_head", "FUEL": "", "STRICT": "false"}
    for name, value in written.items():
        monkeypatch.setenv(f"FX_FUSION_{name}", value)
    parsed = parse(None, None)
    assert parsed.verify is True
    assert parsed.fusions == {"rope", "swiglu"}
    assert parsed.float8_keep == ("*.down_proj", "lm_head")
    assert parsed.fuel is None
    assert not parsed.strict


@pytest.mark.parametrize(("name", "value"), [("SELECT", "bogus"), ("FUSIONS", "ropes"), ("MEMORY", "little"), ("VERIFY", "frist")])
def test_an_error_names_the_variable_that_has_it(name, value, monkeypatch):
    monkeypatch.setenv(f"FX_FUSION_{name}", value)
    with pytest.raises(fx_fusion.OptionError, match=f"^FX_FUSION_{name} .*{value}"):
        parse(None, None)


def test_what_torch_compile_takes_out_of_the_options():
    def keep_all(guards):
        return [True for _ in guards]

    compiled = fx_fusion.compile(lambda x: x * 2, options={"guard_filter_fn": keep_all, "select": "never"})
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(fx_fusion.OptionError, match="names 1"):
        fx_fusion.compile(lambda x: x, options={"fusions": [1]})


def test_options_of_the_environment(monkeypatch):
    for name, value in {"SELECT": "always", "FUSIONS": "-rope,-swiglu", "STRICT": "1", "SPECULATE": "0"}.items():
        monkeypatch.setenv(f"FX_FUSION_{name}", value)
    parsed = parse(None, {"select": "never"})
    assert parsed.select == "never"  # what is passed counts more
    assert parsed.strict
    assert not parsed.speculate
    assert not {"rope", "swiglu"} & parsed.fusions
    assert "rms_norm" in parsed.fusions
    monkeypatch.setenv("FX_FUSION_STRICT", "yes")
    with pytest.raises(fx_fusion.OptionError, match="FX_FUSION_STRICT='yes' must be 0 or 1"):
        parse(None, None)
    monkeypatch.setenv("FX_FUSION_STRICT", "")
    monkeypatch.setenv("FX_FUSION_MEMORY", "mni")
    with pytest.raises(fx_fusion.OptionError, match="Did you mean 'min'"):
        parse(None, None)


def test_a_variable_that_nobody_reads_is_said_once(monkeypatch, recwarn):
    """A typo chose nothing, and nobody was told."""
    monkeypatch.setattr("fx_fusion.options._warned", set())
    monkeypatch.setenv("FX_FUSION_FUZIONS", "-rope")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FX_FUSION_CACHE_DIR", "/tmp")
    for _ in range(3):
        parse(None, None)
    (said,) = [str(warning.message) for warning in recwarn if "FX_FUSION" in str(warning.message)]
    assert "the variable FX_FUSION_FUZIONS is read by nobody. Did you mean 'FX_FUSION_FUSIONS'?" in said


def test_every_variable_that_is_read_is_known():
    root = Path(fx_fusion.__file__).parent
    source = "\n".join(file.read_text() for file in root.rglob("*.py"))
    assert set(re.findall(r"""environ(?:\.get\(|\[)"(FX_FUSION_\w+)\"""", source)) | {f"FX_FUSION_{o.upper()}" for o in _OURS} == set(VARIABLES)


def test_compile_checks_options_at_once():
    with pytest.raises(fx_fusion.OptionError, match="Did you mean 'select'"):
        fx_fusion.compile(torch.nn.Linear(2, 2), options={"selct": "always"})
    compiled = fx_fusion.compile(torch.nn.Linear(2, 2), options={"mode": "default", "select": "never"}, dynamic=False)
    with fx_fusion.recording() as report:
        compiled(torch.randn(3, 2))
    assert len(report.graphs) == 1


@pytest.mark.parametrize(("given", "named", "error", "sentence"), [
    ("llama", {}, TypeError, "compile() takes a module or a function; got 'llama'"),
    (torch.tanh, {"select": "always", "memory": "min"}, TypeError,
     """memory is an option: compile(model, options={"memory": 'min', "select": 'always'})"""),
    (torch.tanh, {"backend": "inductor"}, TypeError, 'compile() is torch.compile with backend="fx_fusion": leave backend= out'),
    (torch.tanh, {"options": ["a"]}, fx_fusion.OptionError, """options must be a dictionary, as {"select": "always"}; got ['a']."""),
    (torch.tanh, {"options": "always"}, fx_fusion.OptionError, """options must be a dictionary, as {"select": "always"}; got 'always'."""),
])  # fmt: skip
def test_compile_says_what_to_write(given, named, error, sentence):
    with pytest.raises(error) as raised:
        fx_fusion.compile(given, **named)
    assert str(raised.value) == sentence


def test_compile_takes_a_mode_beside_options():
    compiled = fx_fusion.compile(torch.nn.Linear(2, 2), mode="default", options={"select": "never"})
    with fx_fusion.recording() as report:
        compiled(torch.randn(3, 2))
    assert len(report.graphs) == 1
    with pytest.raises(fx_fusion.OptionError, match="Did you mean 'max-autotune'"):
        fx_fusion.compile(torch.nn.Linear(2, 2), mode="max-autotun", options={"select": "never"})
    with pytest.raises(fx_fusion.OptionError, match="give one of them"):
        fx_fusion.compile(torch.nn.Linear(2, 2), mode="default", options={"mode": "default"})


@pytest.mark.parametrize("options", [{"selct": "always"}, {"max_autotune": "yes"}])
def test_an_error_in_options_is_not_buried_in_dynamos(options):
    """torch.compile asks the backend at the first call: what is raised there is an OptionError, and few frames."""
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="fx_fusion", options=options)
    with pytest.raises(fx_fusion.OptionError, match=r"Did you mean 'select'|Unexpected type of attr max_autotune") as caught:
        compiled(torch.randn(3, 2))
    assert len(caught.traceback) < 10
    assert caught.traceback[-1].name == "fx_fusion"


def test_without_dynamos_way_to_pass_errors_on(monkeypatch):
    from fx_fusion.torch_internals import dynamo

    monkeypatch.delattr(torch._dynamo.exc, "ShortenTraceback")
    error = fx_fusion.OptionError("as it is")
    assert dynamo.as_it_is(error, None) is error
