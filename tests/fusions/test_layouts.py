"""Fusions with operands and upstream gradients that lie in memory in other ways, and with nothing in them.
from tests.helpers import OF_INDUCTOR

A site may be declined where the kernel does not take what it is given; the numbers are eager's either way. Runs the kernels.
"""

import pytest
import torch

import fx_fusion
from fx_fusion.checking import LAYOUTS, compiled, of_layout, of_nothing, setting
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.testing import eager_nearby, gradients_for, run, run_oracle, worst_excess
from tests.helpers import OF_INDUCTOR

pytestmark = pytest.mark.kernel

FUSIONS = pytest.mark.parametrize(
    "fusion",
    [f for f in all_fusions() if f.name not in OF_INDUCTOR],
    ids=lambda fusion: fusion.name,
)


def variants_and_layouts():
    """Yield every variant in one layout, and in all of them if no variant before it has the same operands.

    Variants with the same operands differ in constants, which no layout changes.
    """
    for fusion in all_fusions():
        seen = []
        for i, variant in enumerate(fusion.variants if fusion.name not in OF_INDUCTOR else ()):
            missing = {name for name in variant if name in fusion.inputs}
            yield from ((fusion, i, layout) for at, layout in enumerate(LAYOUTS) if missing not in seen or i % len(LAYOUTS) == at)
            seen.append(missing)


def check(fusion, function, inputs, dys):
    """Numbers by the accuracy rule; the report."""
    frozen = fusion.frozen
    with fx_fusion.recording() as report:
        found = run(compiled(fusion, function), inputs, dys, frozen)
    assert report.sites, "nothing is said of the site"
    eager, exact = run(function, inputs, dys, frozen), run_oracle(function, inputs, dys, frozen)
    name, used = worst_excess(found, eager, exact, torch.float32)
    if used > 1:  # perhaps for elements that are nearly tied
        name, used = worst_excess(found, eager_nearby(function, inputs, exact, dys, frozen), exact, torch.float32)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"
    return report


@pytest.mark.parametrize(
    ("fusion", "variant", "layout"), list(variants_and_layouts()), ids=lambda given: str(getattr(given, "name", given))
)
def test_operands_and_gradients_in_any_layout(fusion, variant, layout, device):
    assert list(of_layout(fusion, variant, LAYOUTS[layout], device)) == []


@pytest.mark.parametrize("layout", ["every_other", "column", "expanded"])
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_weights_of_classes_in_any_layout(name, layout, device):
    """Every other one of more weights, a column of a table, one weight for all: the site fuses, the numbers are eager's."""
    fusion = next(f for f in all_fusions() if f.name == name)
    function, inputs = setting(fusion, device, variant=3)
    assert inputs["weight"] is not None
    if layout == "expanded":
        inputs["weight"] = inputs["weight"][:1] * 0 + 0.7

    def call(**given):
        w = given.pop("weight")
        classes = given["logits"].shape[-1] if name == "cross_entropy" else given["lm_head"].shape[0]
        if layout == "every_other":
            w = torch.stack((w, torch.full_like(w, 9.0)), -1).view(-1)[::2]
        elif layout == "column":
            w = torch.stack((w, torch.full_like(w, 9.0)), -1)[:, 0]
        else:
            w = w.expand(classes)
        return function(weight=w, **given)

    outs = call(**dict(inputs))
    report = check(fusion, call, inputs, gradients_for(outs if isinstance(outs, tuple) else (outs,)))
    assert report.count(name) == 1, str(report)


@FUSIONS
def test_a_gradient_that_is_one_number_expanded(fusion, device):
    """What ``y.sum().backward()`` hands to the last op."""
    function, inputs = setting(fusion, device)
    outs = function(**inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    report = check(fusion, function, inputs, [torch.full((), 0.5, device=device).expand(o.shape) for o in outs])
    assert report.count(fusion.name) == (fusion.name not in ("dense_mask", *(["repeat_kv"] if device == "cuda" else []))), (
        f"float32 is theirs only: {report}"
    )


@pytest.mark.parametrize(
    ("fusion", "dim"),
    [(f, dim) for f in all_fusions() if f.name not in OF_INDUCTOR for dim in ("m", "b") if dim in f.dims],
    ids=lambda given: str(getattr(given, "name", given)),
)
def test_nothing(fusion, dim, device):
    """No rows, images, positions, heads or channels: what eager makes of that, gradients of parameters included."""
    assert list(of_nothing(fusion, dim, device)) == []
