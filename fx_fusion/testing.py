"""For tests and benchmarks of fusions: inputs of a case, the oracle, the rule that decides what is accurate.

The rule: the error of the fused function against the reference in float64 is at most twice the error of the reference
run eagerly in the same dtype, plus two epsilons of the dtype, in units of max(|oracle|, |dy|). No other tolerance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.accuracy import Double, doubled, nudged, same_kinds
from fx_fusion.backend import compile_graph
from fx_fusion.fusion.declaration import Case, Fusion
from fx_fusion.fusion.dims import Dim
from fx_fusion.ops.on_cpu import kernels_on_cpu
from fx_fusion.options import Options, parse
from fx_fusion.torch_internals.dynamo import when_dynamo_is_reset

__all__ = [
    "Run", "eager_nearby", "eager_rest", "gradients_for", "kernels_on_cpu", "make_inputs", "nudged", "rewriting_backend",
    "run", "run_oracle", "to_double", "worst_excess", "zipf",
]  # fmt: skip


def eager_rest(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Return what Inductor is to the backend, without compiling: run the rewritten graph as it is."""
    return gm.forward


def rewriting_backend(**options: Any) -> Callable[..., Any]:
    """A torch.compile backend that rewrites and then runs eagerly: seconds faster than Inductor, the same rewrites."""
    parsed = parse(None, {"select": "always", "strict": True, **options})
    backend = functools.partial(compile_graph, options=parsed, rest=eager_rest)
    backend.reset = when_dynamo_is_reset  # type: ignore[attr-defined]
    return backend


def make_inputs(
    fusion: Fusion, case: Case, statics: Mapping[str, Any], dtype: torch.dtype, device: str, seed: int = 0
) -> dict[str, Any]:
    """Random inputs of the declared shapes; parameters that a variant fixes are left out."""
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[str, Any] = {}
    for name, declared in fusion.inputs.items():
        if name in statics:
            continue
        spec = fusion.specs.get(name)
        if spec is None:
            made[name] = case.scalars.get(name, declared)
            continue
        shape: list[int] = []
        dims: dict[str, list[int]] = {}  # which dims of the tensor an entry stands for
        for dim in spec.dims:
            start = len(shape)
            shape += _sizes(dim, fusion, case)
            dims[dim.name] = list(range(start, len(shape)))
        if name in fusion.integers:
            bound = case.sizes[fusion.integers[name]]
            if case.scalars.get(name) == "zipf":
                target = zipf(math.prod(shape), bound, device, generator).view(shape)
            else:
                target = torch.randint(0, bound, shape, generator=generator, device=device)
            if target.numel() > 2 and name in fusion.ignored:
                target[1] = statics[fusion.ignored[name]]
            made[name] = target
            continue
        tensor = torch.randn(shape, generator=generator, device=device)
        if name in fusion.complex_inputs:
            made[name] = torch.polar(torch.ones_like(tensor), tensor)
            continue
        if name in fusion.positive:
            tensor = tensor.abs() + 0.1
        if name in case.order:
            order = [d for token in case.order[name].split() for d in dims[token]]
            back = sorted(range(len(order)), key=order.__getitem__)
            tensor = tensor.permute(order).contiguous().permute(back)
        made[name] = tensor.to(dtype)
    return made if fusion.of_variant is None else fusion.of_variant(made, statics)


def zipf(count: int, bound: int, device: str, generator: torch.Generator | None = None) -> Tensor:
    """``(count,)`` indices below ``bound``, as words are distributed: i is there 1 / (i + 1) times as often as 0."""
    often = 1 / torch.arange(1.0, bound + 1, device=device)
    return torch.multinomial(often, count, replacement=True, generator=generator)


def _sizes(dim: Dim, fusion: Fusion, case: Case) -> list[int]:
    """The sizes that one entry of a spec stands for."""
    if dim.name == "1" or (dim.broadcast and dim.name in fusion.shared):
        return [1]
    if dim.name == "...":
        return _two_dims(case.sizes["m"]) if "m" in case.sizes else []
    return [case.sizes.get(dim.name, case.sizes.get(dim.like or "", 1))]


def _two_dims(m: int) -> list[int]:
    """Return what "..." stands for: m as the product of two dims, or one where m is a prime (or 1)."""
    first = next((d for d in range(2, m) if m % d == 0), m)
    return [first, m // first] if first < m else [m]


@dataclass(frozen=True)
class Run:
    """Outputs of one function, and the gradients of its floating-point inputs, by name."""

    values: dict[str, Tensor]


def run(
    function: Callable[..., Any],
    inputs: Mapping[str, Any],
    dys: Sequence[Tensor] | None = None,
    frozen: Sequence[str] = (),
) -> Run:
    """Call, then differentiate by ``dys`` (random, fixed by the output's shape, if None)."""
    leaves = {
        n: v.detach().clone().requires_grad_(n not in frozen) if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in inputs.items()
    }
    out = function(**leaves)
    outs = out if isinstance(out, tuple) else (out,)
    values = {f"out{i}": o.detach() for i, o in enumerate(outs)}
    dys = gradients_for(outs) if dys is None else dys
    pairs = [(o, dy.to(o.dtype)) for o, dy in zip(outs, dys, strict=True) if o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [dy for _, dy in pairs])
    for name, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            values[f"d{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return Run(values)


def gradients_for(outs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.randn(o.shape, generator=torch.Generator(o.device).manual_seed(7), device=o.device) for o in outs]


def run_oracle(
    function: Callable[..., Any],
    inputs: Mapping[str, Any],
    dys: Sequence[Tensor] | None = None,
    frozen: Sequence[str] = (),
) -> Run:
    """``run`` in float64 throughout."""
    with Double():
        return run(function, to_double(inputs), dys, frozen)


def to_double(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {n: doubled(v) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def eager_nearby(
    function: Callable[..., Any],
    inputs: Mapping[str, Any],
    oracle: Run,
    dys: Sequence[Tensor] | None = None,
    frozen: Sequence[str] = (),
) -> Run:
    """Eager's worst error over this input and 16 perturbations of half an ulp and more: for nearly tied maxima (EvoNorm-B0)
    a single run under-estimates it. Inputs more than a rounding away are compared with float64 there, not here."""
    runs = [run(function, inputs, dys, frozen)]
    for seed in range(8):
        runs.append(run(function, nudged(inputs, seed), dys, frozen))
        further = nudged(inputs, seed, together=4)
        found, exact = run(function, further, dys, frozen), run_oracle(function, further, dys, frozen)
        runs.append(Run({n: t + (found.values[n].double() - exact.values[n]) for n, t in oracle.values.items()}))
    return Run({n: max((r.values[n] for r in runs), key=lambda t: _error(t, exact)) for n, exact in oracle.values.items()})


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest difference; 0 where there is nothing."""
    apart = (found.double() - exact.double()).nan_to_num().abs()
    return apart.max().item() if apart.numel() else 0.0


def worst_excess(fused: Run, eager: Run, oracle: Run, dtype: torch.dtype) -> tuple[str, float]:
    """The output or gradient that uses most of what the rule allows, and how much: above 1 it fails."""
    worst = ("", 0.0)
    for name, exact in oracle.values.items():
        exact = exact.double()
        unit = max(exact.abs().max().item() if exact.numel() else 0.0, 1.0 if name.startswith("d") else 0.0) or 1.0
        found, usual = fused.values[name].double(), eager.values[name].double()
        if not same_kinds(found, exact):
            return name, float("inf")
        if not exact.numel():
            continue
        # Where eager overflows and float64 does not, nothing is known of its error: a difference of 0 is taken for it.
        error = _error(found, exact) / unit
        allowed = 2 * _error(torch.where(usual.isfinite(), usual, exact), exact) / unit + 2 * torch.finfo(dtype).eps
        if error / allowed > worst[1]:
            worst = (name, error / allowed)
    return worst
