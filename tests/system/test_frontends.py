"""Front ends: what stands in a graph for calls of other libraries, and who sees it."""

import itertools
import sys
import textwrap

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fx_fusion
from fx_fusion import frontend
from fx_fusion.frontend import FrontEnd, Substitute, register_front_end, source_hash
from fx_fusion.testing import rewriting_backend
from tests.helpers import tiny_llama

names = itertools.count()
SOURCE = '''
    import torch

    @torch.compiler.disable
    def scaled(x, factor=2.0):
        """Multiply."""
        return x * factor  # by the factor

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            torch._dynamo.graph_break()
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * ctx.saved_tensors[0] * dy
    '''


def stands_for_scaled(x, factor=2.0):
    return x * factor


class StandsForSquared:
    @staticmethod
    def apply(x):
        return x * x


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module of a library that nobody has imported yet."""
    name = f"library_{next(names)}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(frontend, "_registered", list(frontend._registered))
    yield name
    sys.modules.pop(name, None)


def declared(name, known=None, within=""):
    """A front end of the library. ``known``: hashes of sources; those that it has unless given."""
    targets = (("scaled", stands_for_scaled), ("Squared", StandsForSquared))
    if known is None:
        known = {source_hash((f"{name}:{target}",)): "1.0" for target, _ in targets}
    return FrontEnd(
        name, name, tuple(Substitute(f"{name}:{t}", by, (f"{name}:{t}",), known, within) for t, by in targets)
    )


def model_of(library):
    def run(x):
        y = library.scaled(x.sin(), factor=3.0)
        return library.Squared.apply(y).cos()

    return run


def graphs_of(run, backend):
    """The numbers of graphs under a backend, whose results are eager's."""
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 7, requires_grad=True)
    expected = run(x)
    found = torch.compile(run, backend=backend)(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))


def test_calls_that_end_a_graph_are_part_of_it(library):
    """Under this backend alone, whenever the library was imported; eager and other backends call the library."""
    front_end = declared(library)
    register_front_end(front_end)
    module = sys.modules[library]
    run = model_of(module)
    with fx_fusion.recording() as report:
        graphs_of(run, rewriting_backend())
    assert len(report.graphs) == 1
    assert report.graphs[0].front_ends == (library,)
    assert f"calls of {library} are part of it" in str(report)
    counter = CompileCounter()
    graphs_of(run, counter)
    assert counter.frame_count > 1
    assert module.scaled is not stands_for_scaled


def test_before_the_library_is_imported(library):
    known = {source_hash((f"{library}:scaled",)): "1.0"}
    del sys.modules[library]
    register_front_end(
        FrontEnd(library, library, (Substitute(f"{library}:scaled", stands_for_scaled, (f"{library}:scaled",), known),))
    )
    module = __import__(library)
    with fx_fusion.recording() as report:
        graphs_of(lambda x: module.scaled(x.sin()).cos(), rewriting_backend())
    assert len(report.graphs) == 1


@pytest.mark.parametrize("off", ["option", "environment"])
def test_switched_off(library, off, monkeypatch):
    register_front_end(declared(library))
    if off == "environment":
        monkeypatch.setenv("FX_FUSION_FRONT_ENDS", "0")
    with fx_fusion.recording() as report:
        graphs_of(model_of(sys.modules[library]), rewriting_backend(**({"front_ends": False} if off == "option" else {})))
    assert len(report.graphs) > 1
    assert not any(graph.front_ends for graph in report.graphs)


def test_a_source_that_is_not_known_is_left_alone(library):
    """And the report says so where the graph ends."""
    register_front_end(declared(library, known={"0" * 16: "0.9"}))
    __import__(library)
    with fx_fusion.recording() as report:
        graphs_of(model_of(sys.modules[library]), rewriting_backend())
    assert len(report.graphs) > 1
    said = f"the source of {library}:scaled in {library} of no version is none of those that are known (0.9)"
    assert any(said in graph.broke for graph in report.graphs), [graph.broke for graph in report.graphs]


def test_in_the_code_of_one_module_alone(library):
    register_front_end(declared(library, within="another"))
    with fx_fusion.recording() as report:
        graphs_of(model_of(sys.modules[library]), rewriting_backend())
    assert len(report.graphs) > 1


def test_what_changes_a_hash(tmp_path, monkeypatch):
    """Code does; comments, docstrings and empty lines do not."""
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(source):
        name = f"hashed_{next(names)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return source_hash((name,)), source_hash((f"{name}:scaled", f"{name}:Squared"))

    plain = hashed(SOURCE)
    assert hashed(SOURCE.replace('"""Multiply."""', '"""Multiply\n\n        a number."""').replace("  # by the factor", "")) == plain
    other = hashed(SOURCE.replace("x * factor", "x / factor"))
    assert other[0] != plain[0]
    assert other[1] != plain[1]


def test_what_is_no_front_end_is_refused(library):
    with pytest.raises(fx_fusion.DeclarationError, match="takes a FrontEnd; got 3"):
        register_front_end(3)
    front_end = FrontEnd(library, library, ())
    register_front_end(front_end)
    register_front_end(front_end)
    with pytest.raises(fx_fusion.DeclarationError, match="has a front end already"):
        register_front_end(FrontEnd(library, "other", ()))


def test_a_failure_leaves_the_library_as_it_is(library, monkeypatch):
    register_front_end(declared(library))
    monkeypatch.setattr(frontend, "wants_front_ends", lambda options: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"), fx_fusion.recording() as report:
        graphs_of(model_of(sys.modules[library]), rewriting_backend())
    assert len(report.graphs) > 1


# -- TRL ---------------------------------------------------------------------------------------------------------------
OUTPUTS = {
    "SFT": ("log_probs", "entropy", "is_top1"),
    "DPO": ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs"),
    "GRPO": ("log_probs", "entropy"),
}


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"softcap": 5.0}, {"scale": 0.5}, {"cast_lm_head_to_fp32": True}],
                         ids=["plain", "temperature", "softcap", "scale", "float32"])  # fmt: skip
@pytest.mark.parametrize("trainer", OUTPUTS)
def test_the_head_of_trl(trainer, changes):
    """One graph; what TRL's tiles compute, gradients included. A sequence in which nothing is counted, too."""
    utils = pytest.importorskip("trl.trainer.utils")
    changes = dict(changes)
    model = tiny_llama()
    model.config.final_logit_softcapping = changes.pop("softcap", None)
    model.config.logit_scale = changes.pop("scale", None)
    utils.add_fused_lm_head(model, outputs=OUTPUTS[trainer], **changes)
    ids = torch.randint(3, model.config.vocab_size, (3, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(11) < torch.tensor([[3], [11], [0]]), -100)

    def found(call, report=None):
        torch._dynamo.reset()
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="cast_lm_head_to_fp32" in changes):
            out = call(input_ids=ids, labels=labels, fused_lm_head=True)
        rows = [getattr(out, name) for name in (*OUTPUTS[trainer], "label_mask")]
        (out.log_probs.mean() + out.entropy.square().mean()).backward()
        return [out.loss, *rows], [p.grad for p in model.parameters()], [t.requires_grad for t in rows]

    expected = found(model)
    with fx_fusion.recording() as report:
        ours = found(torch.compile(model, backend=rewriting_backend()))
    assert [graph.broke for graph in report.graphs] == [""]
    assert report.graphs[0].front_ends == ("trl",)
    wide = "cast_lm_head_to_fp32" in changes
    torch.testing.assert_close(ours[0], expected[0], rtol=3e-2 if wide else 1e-4, atol=3e-2 if wide else 1e-5)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-1 if wide else 1e-4, atol=2e-2 if wide else 1e-5)
    assert ours[2] == expected[2]
