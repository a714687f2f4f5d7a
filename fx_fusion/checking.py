"""``check(fusion)``: whether a fusion is found, gives the right numbers in every layout, and keeps what its op promises.

What is checked needs nothing but the declaration: its cases without ``bench`` are the sizes, its pattern in float64 is the
oracle. On a machine without a GPU kernels run in Triton's interpreter, if ``TRITON_INTERPRET=1`` was set before triton was
imported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import opcheck

from fx_fusion.backend import compile_graph
from fx_fusion.fusion.declaration import Case, Fusion
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.ops.library import NAMESPACE, names
from fx_fusion.ops.on_cpu import kernels_on_cpu
from fx_fusion.options import parse
from fx_fusion.report.recording import recording
from fx_fusion.testing import (
    eager_nearby,
    gradients_for,
    make_inputs,
    rewriting_backend,
    run,
    run_oracle,
    worst_excess,
)
from fx_fusion.torch_internals import dispatch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(fusion: Fusion, *, device: str | None = None, dtypes: Sequence[torch.dtype] = DTYPES) -> str:
    """Check a registered fusion; returns what was checked, raises AssertionError with every problem that was found.

    Each small case, variant and dtype: the pattern is found once, and outputs and gradients are at most twice as far from
    float64 as eager's plus two roundings. Each variant: the same with operands and gradients that are strided or transposed
    in memory; ``torch.library.opcheck`` of the ops that it calls. And with no rows. Forgets what torch.compile has compiled
    in this process."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for kind, label, found in _questions(fusion, dtypes, device):
        torch.compiler.reset()
        counts[kind] += 1
        problems += [f"{kind}: {label}: {problem}" for problem in found]
    ran = "kernels ran" if device != "cpu" or interpretable() else "references only: TRITON_INTERPRET=1 was not set"
    summary = f"{fusion.name} on {device}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}; {ran}"
    if problems:
        raise AssertionError("\n".join([summary, *problems]))
    return summary


def _questions(fusion: Fusion, dtypes: Sequence[torch.dtype], device: str) -> Iterator[tuple[str, str, Iterator[str]]]:
    """Kind, label, and the problems, which are looked for when they are asked for."""
    for case in fusion.cases:
        for variant in fusion.variants:
            if not case.bench and variant.items() >= {k: v for k, v in case.statics.items() if k in variant}.items():
                statics = {**variant, **case.statics}
                for dtype in dtypes:
                    label = ", ".join([case.name, *([str(statics)] if statics else []), str(dtype).removeprefix("torch.")])
                    yield "cases", label, of_case(fusion, case, statics, dtype, device)
    for variant_at in range(len(fusion.variants)):
        for layout, lay in LAYOUTS.items():
            yield "layouts", f"{layout}, variant {variant_at}", of_layout(fusion, variant_at, lay, device)
        if fusion.name in names():
            yield "ops", f"variant {variant_at}", of_ops(fusion, variant_at, device)
    for dim in ("m", "b"):
        if dim in fusion.dims:
            yield "empty", f"{dim} = 0", of_nothing(fusion, dim, device)


def interpretable() -> bool:
    """Return True if kernels were made for Triton's interpreter."""
    return not isinstance(triton.language.sum, triton.JITFunction)


def compiled(fusion: Fusion, function: Callable[..., Any]) -> Callable[..., Any]:
    """Only this fusion: a smaller one may be a part of its reference."""
    return torch.compile(function, backend=rewriting_backend(fusions=[fusion.name]), dynamic=False)


# -- one case --------------------------------------------------------------------------------------------------------
def of_case(
    fusion: Fusion, case: Case, statics: Mapping[str, Any], dtype: torch.dtype, device: str
) -> Iterator[str]:  # fmt: skip
    """Yield what is wrong at one case, with the reference of the op, which shows the rewrite, and with its kernels."""
    function = reference_of(fusion, statics)
    inputs = make_inputs(fusion, case, statics, dtype, device)
    call = compiled(fusion, function)
    found = {}
    forms = ["reference", "kernel"] if device == "cpu" else ["kernel"]
    if device == "cpu" and not interpretable():
        forms.remove("kernel")
    with recording() as report:
        for ran in forms:
            with kernels_on_cpu(ran == "kernel"):
                found[ran] = run(call, inputs, frozen=fusion.frozen)
    refusal = None if fusion.guard is None else fusion.guard(**{**dict.fromkeys(fusion.inputs), **inputs, **statics})
    expected = "fused" if refusal is None else "declined"
    if (count := report.count(fusion.name, expected)) != 1:
        yield f"{count} sites are {expected}, 1 was expected:\n{report}"
    eager = run(function, inputs, frozen=fusion.frozen)
    oracle = run_oracle(function, inputs, frozen=fusion.frozen)
    for ran, ours in found.items():
        name, used = worst_excess(ours, eager, oracle, dtype)
        if not used <= 1:
            yield f"{ran}: {name} uses {used:.2f} times the allowed error"
        for key, wanted in eager.values.items():
            made = ours.values[key]
            if (made.dtype, made.shape) != (wanted.dtype, wanted.shape):
                yield f"{ran}: {key} is {made.dtype} {tuple(made.shape)}, eager's {wanted.dtype} {tuple(wanted.shape)}"


# -- layouts ---------------------------------------------------------------------------------------------------------
def every_other(tensor: Tensor) -> Tensor:
    """Each element is the second of two."""
    return torch.stack((torch.zeros_like(tensor), tensor), -1)[..., 1]


def turned(tensor: Tensor) -> Tensor:
    """The last dim is the outermost in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


LAYOUTS = {"every_other": every_other, "turned": turned}


def setting(
    fusion: Fusion, device: str, variant: int = 0, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The reference of a variant, and inputs of its small case with some sizes changed."""
    case = fusion.small_case
    small = {dim: min(n, 24) for dim, n in case.sizes.items()} if case.bench else case.sizes
    case = dataclasses.replace(case, sizes={**small, **sizes})
    statics = {**case.statics, **fusion.variants[variant]} if variant else {**fusion.variants[0], **case.statics}
    return reference_of(fusion, statics), make_inputs(fusion, case, statics, dtype, device)


def of_layout(fusion: Fusion, variant: int, lay: Callable[[Tensor], Tensor], device: str) -> Iterator[str]:
    """Yield what is wrong with operands and upstream gradients in this layout; a site may be declined there."""
    function, inputs = setting(fusion, device, variant)

    def moved(**inputs: Any) -> Any:
        return function(**{n: lay(t) if isinstance(t, Tensor) and t.dim() else t for n, t in inputs.items()})

    try:
        outs = moved(**inputs)
    except RuntimeError:
        return  # eager can't do it
    dys = [lay(dy) if dy.dim() else dy for dy in gradients_for(outs if isinstance(outs, tuple) else (outs,))]
    frozen = fusion.frozen
    with recording() as report, kernels_on_cpu(interpretable()):
        found = run(compiled(fusion, moved), inputs, dys, frozen)
    if not report.sites:
        yield "nothing is said of the site"
    eager, exact = run(moved, inputs, dys, frozen), run_oracle(moved, inputs, dys, frozen)
    name, used = worst_excess(found, eager, exact, torch.float32)
    if used > 1:  # perhaps for elements that are nearly tied
        name, used = worst_excess(found, eager_nearby(moved, inputs, exact, dys, frozen), exact, torch.float32)
    if not used <= 1:
        yield f"{name} uses {used:.2f} times the allowed error"


def of_nothing(fusion: Fusion, dim: str, device: str) -> Iterator[str]:
    """Yield what is wrong where a size is 0: results and gradients have to be eager's. Sums over nothing are 0; where
    PyTorch has NaN for them, either will do."""
    function, inputs = setting(fusion, device, **{dim: 0})
    try:
        expected = run(function, inputs, frozen=fusion.frozen)
    except RuntimeError:
        return  # eager can't do it
    with kernels_on_cpu(interpretable()):
        found = run(compiled(fusion, function), inputs, frozen=fusion.frozen)
    for name, wanted in expected.values.items():
        made = torch.where(wanted.isnan(), found.values[name].nan_to_num(), found.values[name])
        if not torch.allclose(made, wanted.nan_to_num()):
            yield f"{name} is {made}, eager's {wanted}"


# -- what an op promises to torch.library ----------------------------------------------------------------------------
def calls_of(
    fusion: Fusion, variant: int, device: str, dtype: torch.dtype = torch.float32, **sizes: int
) -> list[tuple[Any, tuple[Any, ...]]]:
    """The ops that a variant calls, forward and backward, with their arguments: from all outputs, then from each alone."""
    torch.compiler.reset()
    function, inputs = setting(fusion, device, variant, dtype, **sizes)
    captured = []

    def rest(graph: Any, example_inputs: Any, options: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            captured.append((graph, args))
            return graph(*args)

        return call

    options = parse(None, {"select": "always", "strict": True, "fusions": [fusion.name], "defer_outputs": False})
    backend = functools.partial(compile_graph, options=options, rest=rest)
    run(torch.compile(function, backend=backend, dynamic=False), inputs, frozen=fusion.frozen)
    ((graph, args),) = captured
    with dispatch.calls_of(NAMESPACE) as seen:  # Dynamo compiles nothing in there
        outs = [out for out in graph(*args) if out.requires_grad]
        for some in [outs, *([out] for out in outs if len(outs) > 1)]:
            torch.autograd.backward(some, [torch.randn_like(out) for out in some], retain_graph=True)
    return seen


def keeps_its_promises(op: Any, args: Sequence[Any]) -> None:
    """Run ``torch.library.opcheck``; raises what it raises."""
    tests = ["test_schema", "test_faketensor"]
    if not op.name().endswith("_bwd"):
        tests.append("test_autograd_registration")
        args = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    opcheck(op, tuple(args), test_utils=tests)


def of_ops(fusion: Fusion, variant: int, device: str) -> Iterator[str]:
    """Yield what ``opcheck`` says of the ops of a variant: schema, gradient, what the fake says of the results."""
    with kernels_on_cpu(interpretable()):
        seen = calls_of(fusion, variant, device)
        if not seen:
            yield "its op is not called"
        for op, args in seen:
            try:
                keeps_its_promises(op, args)
            except Exception as error:
                yield f"{op}: {type(error).__name__}: {error}"
