"""Rules of cost that read sizes."""

import torch

from fx_fusion.cost import select
from fx_fusion.fusion.match import Match
from fx_fusion.fusion.registry import fusion_named
from fx_fusion.options import parse
from fx_fusion.torch_internals.fakes import set_example

x, w = torch.randn(4, 8), torch.randn(8, 8)


def test_auto_keeps_what_is_too_small_for_an_op():
    """The cost rules read sizes, also symbolic ones, and add no guard."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from fx_fusion.graph.size_hints import elements

    gated, norm, loss = (fusion_named(n).why_keep for n in ("gated_rms_norm", "rms_norm", "cross_entropy"))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    few, many = (mode.from_tensor(torch.empty(n, 3), symbolic_context=context).shape[0] for n in (64, 16384))
    assert isinstance(few, torch.SymInt)
    with mode:
        small, large, static = (torch.empty(n, 2048, device="cuda") for n in (few, many, 64))
        assert "below 2^24" in gated(small, small, None, 1e-6, True, True, True, 1, "input")
        assert gated(large, large, None, 1e-6, True, True, True, 1, "input") is None
        assert gated(static, static, None, 1e-6, True, True, True, 1, "input") is None  # Inductor launches the kernels itself
        assert norm(small, None, 1e-6, 0.0, True) is None  # with a symbolic number of rows, too
        assert "below 2^24" in norm(small.t(), None, 1e-6, 0.0, True)  # of columns it does not
        assert "classes" in loss(torch.empty(2**20, 1000, device="cuda"), None, None, -100, 0.0, 0.0, 1.0)
        assert loss(torch.empty(8192, 128256, device="cuda"), None, None, -100, 0.0, 0.0, 1.0) is None
        assert "below 2^24" in of_the_host("gated_rms_norm", x=small, gate=small)
        assert of_the_host("gated_rms_norm", x=static, gate=static) is None  # to be measured
    seen = []

    def backend(gm, inputs):
        seen.extend(elements(i) for i in inputs if isinstance(i, torch.Tensor))
        return gm.forward

    run = torch.compile(lambda x: x + 1, backend=backend, dynamic=True)
    for n in (5, 7, 9):
        run(torch.ones(n, 3))
    assert seen == [15], "one graph for all lengths: reading a size as a hint guards nothing"


def of_the_host(name, **given):
    """Return why a site is kept under ``select="measure"`` whatever its kernels take."""
    graph, fusion = torch.fx.Graph(), fusion_named(name)
    inputs = {n: graph.placeholder(n) for n in given}
    for n, node in inputs.items():
        set_example(node, given[n])
    statics = {"weight": None, "eps": 1e-6, "before": True, "silu": True, "round_first": True, "groups": 1}
    match = Match(name, tuple(inputs.values())[:1], frozenset(), inputs, statics=statics)
    return select._by_the_host(fusion, match, parse(None, {"select": "measure"}))
