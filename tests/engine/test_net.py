"""Whatever of ours raises, the graph is compiled by Inductor as Dynamo wrote it, with the user's options, and a warning."""

import contextlib
import inspect
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
import fx_fusion.backend
from fx_fusion.fusion import registry
from fx_fusion.testing import eager_rest, rewriting_backend

x, w = torch.randn(4, 8), torch.randn(8, requires_grad=True)
table, ids = torch.randn(64, 8, requires_grad=True), torch.randint(64, (2, 6))


def norm(x, w):
    return F.rms_norm(x, (8,), w).sin()


def language_model(ids, table, w):
    """An embedding, a norm, attention under a mask that is causal, a gate, a head with its loss, whose logits are returned."""
    x = F.rms_norm(F.embedding(ids, table), (8,), w)
    heads = x.view(2, 6, 2, 4).transpose(1, 2)
    mask = torch.arange(6)[None, :] <= torch.arange(6)[:, None]
    x = x + F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).reshape(2, 6, 8)
    x = F.rms_norm(x + F.silu(x) * x.sin(), (8,), w)
    logits = F.linear(x, table)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits


GRAPHS = {"norm": (norm, (x, w)), "language_model": (language_model, (ids, table, w))}


OPTIONS = {"select": "always", "max_autotune": False}
# The net itself, and what stands behind it: without these nothing is compiled at all. And what the body of an op
# calls, on a CPU the pattern: an error there is one of the compiled function.
THE_NET = {
    "pow_mean_rsqrt", "scaled", "keeps_values", "first_of", "silu_times_up",
    "fx_fusion", "compile_graph", "rewrite", "as_dynamo_wrote_it", "tell", "where_raised", "plain_inductor", "inductors_own",
    "compile_with", "fx_fusion.torch_internals.inductor.compile_graph",
}  # fmt: skip


def called_by_a_compilation(graph):
    """Every function and method of ours that the backend calls while it compiles a graph: module, name, function."""
    found = {}

    def note(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("fx_fusion.") and not module.startswith(("fx_fusion.kernels", "fx_fusion.testing")):
            found.setdefault((module, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)), frame.f_code)

    def backend(gm, inputs):
        sys.setprofile(note)
        try:
            return fx_fusion.backend.fx_fusion(gm, inputs, options={"select": "always"})
        finally:
            sys.setprofile(None)

    registry.all_fusions()
    torch._dynamo.reset()
    function, given = GRAPHS[graph]
    torch.compile(function, backend=backend)(*given)
    return {f"{m}:{name}": code for (m, name), code in sorted(found.items()) if _may_break(m, name)}


def _may_break(module, name):
    plain = all(part.isidentifier() for part in name.split("."))  # no closure, lambda or comprehension
    special = name.split(".")[-1].startswith("__")
    return plain and not special and name not in THE_NET and f"{module}.{name}" not in THE_NET


def function_of(where):
    """The function object behind ``module:Class.name``, below decorators."""
    module, _, name = where.partition(":")
    owner = sys.modules[module]
    for part in name.split("."):
        owner = inspect.getattr_static(owner, part)
        owner = owner.fget if isinstance(owner, property) else getattr(owner, "func", owner)
        owner = getattr(owner, "__func__", owner)
    return inspect.unwrap(owner)


@contextlib.contextmanager
def broken(where):
    """One function of ours raises, whoever holds it: its code is exchanged. Yields a list that tells whether it was called."""
    happened = sys.fx_fusion_broke = []

    def raising(*args, **kwargs):
        import sys

        sys.fx_fusion_broke.append(True)
        raise AssertionError("a bug of ours")

    function = function_of(where)
    code = function.__code__
    function.__code__ = raising.__code__
    try:
        yield happened
    finally:
        function.__code__ = code


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "others", "fewest"), [("norm", None, 120), ("language_model", "norm", 100)])
def test_each_function_of_ours_broken_in_turn(subtests, graph, others, fewest):
    """A graph in which something would have been fused, in training; of the second graph what the first has not called.
    What hands the graph to Inductor is broken with Inductor behind it, everything before with the graph run as it is: the
    net is the same, and faster to test."""
    functions, known = called_by_a_compilation(graph), called_by_a_compilation(others) if others else {}
    function, given = GRAPHS[graph]
    trained = [t for t in given if t.requires_grad]
    expected = results_of(function, given, trained)
    reached = 0
    for where, code in functions.items():
        if where in known or code.co_freevars or function_of(where).__code__ is not code:
            continue  # a wrapper of contextlib or functools: what it wraps stands for it
        with subtests.test(where), broken(where) as happened, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch._dynamo.reset()
            rooms = ("inductor", "ops", "torch_internals", "options", "memory")
            by_inductor = where.startswith(tuple(f"fx_fusion.{room}" for room in rooms))
            way = {"backend": "fx_fusion", "options": OPTIONS} if by_inductor else {"backend": rewritten_or_not}
            torch.testing.assert_close(results_of(torch.compile(function, **way), given, trained), expected)
            reached += bool(happened)
            if happened:
                said = [str(w.message) for w in told]  # FX adds the node to the message of an error
                net = "the graph goes to Inductor unchanged", "torch's choice alone"  # the whole, or what it saves
                assert any("a bug of ours" in s and any(sentence in s for sentence in net) for s in said), said
    assert reached > fewest  # the others are asked once a process


def results_of(function, given, trained):
    """Results and gradients."""
    made = function(*given)
    made = made if isinstance(made, tuple) else (made,)
    return [t.detach() for t in made], torch.autograd.grad(made[0].sum(), trained)


def rewritten_or_not(gm, example_inputs):
    """The backend with what it rewrote run as it is, in place of Inductor."""
    from fx_fusion import backend, fallback

    try:
        parsed = backend.parse(None, OPTIONS)
    except Exception as error:
        fallback.tell(error, strict=False)
        return gm.forward
    return backend.compile_graph(gm, example_inputs, parsed, eager_rest)


@pytest.mark.parametrize(
    "where",
    ["ops.library:register_lowerings", "graph.snapshot:snapshot", "report.recording:publish", "options:parse"],
)
def test_strict_says_so(where):
    compiled = torch.compile(norm, backend="fx_fusion", options={"select": "always", "strict": True})
    with broken(f"fx_fusion.{where}"), pytest.raises(Exception, match="a bug of ours"):
        compiled(x, w)


def test_the_fallback_is_in_the_report_and_keeps_the_options(monkeypatch):
    given = []

    def compile_fx(gm, inputs, patches):
        given.append((len(gm.graph.nodes), patches))
        return gm.forward

    monkeypatch.setattr("fx_fusion.inductor.compile.compile_graph", compile_fx)
    with broken("fx_fusion.ops.library:register_lowerings"), fx_fusion.recording() as report, pytest.warns(UserWarning, match="failed"):
        torch.compile(norm, backend="fx_fusion", options={"select": "always", "max_autotune": True})(x, w)
    (graph,) = report.graphs
    assert "a bug of ours" in graph.fallback
    assert not report.sites
    assert given == [(graph.nodes_before, {"max_autotune": True})]


def test_errors_of_inductor_are_inductors():
    """Where nothing of ours is in the graph, its error is raised as it is."""

    def failing(gm, inputs, options):
        raise ZeroDivisionError("a bug of theirs")

    from fx_fusion.backend import compile_graph
    from fx_fusion.options import parse

    def backend(gm, inputs):
        return compile_graph(gm, inputs, parse(None, {}), failing)

    with pytest.raises(Exception, match="a bug of theirs"):
        torch.compile(lambda x: x + 1, backend=backend)(x)


def test_the_first_call_inside_a_checkpoint():
    """Hooks on saved tensors are active while the backend runs: what it computes for itself is none of theirs."""
    from torch.utils.checkpoint import checkpoint

    layer, given = torch.nn.RMSNorm(8), torch.randn(2, 6, 8, requires_grad=True)
    compiled = torch.compile(lambda x: layer(x) * 2, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        checkpoint(compiled, given, use_reentrant=False).sum().backward()
    report.assert_fused(rms_norm=1)
    found, given.grad = given.grad, None
    (layer(given) * 2).sum().backward()
    torch.testing.assert_close(found, given.grad)


@pytest.mark.parametrize("wide", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["group_norm", "layer_norm"])
def test_weights_of_another_dtype_on_a_cpu(name, wide):
    functions = {
        "group_norm": lambda x, w, b: F.group_norm(x, 2, w.to(x.dtype), b.to(x.dtype)),
        "layer_norm": lambda x, w, b: F.layer_norm(x.transpose(1, 2), (8,), w.to(x.dtype), b.to(x.dtype)),
    }
    given = torch.randn(4, 8, 5).to(wide), torch.randn(8).bfloat16(), torch.randn(8)
    compiled = torch.compile(functions[name], backend="fx_fusion", options={"select": "always"})
    torch.testing.assert_close(compiled(*given), functions[name](*given))
