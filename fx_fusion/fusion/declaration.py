"""The declaration of a fusion: everything that the rest of fx_fusion needs to know about it, in one value.

**The pattern is the reference.** One PyTorch function is traced to be matched, run in float64 to be the oracle of the
tests, compiled by Inductor to be the baseline of the benchmark, and run as it is where the kernel can't run. Guard and
kernel take the same parameters, by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fx_fusion.errors import DeclarationError
from fx_fusion.ops.fused_op import FusedOp

if TYPE_CHECKING:
    from fx_fusion.fusion.matcher import Match, NearMiss
    from fx_fusion.graph.view import View

Inputs = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Case:
    """One set of sizes at which a fusion is tested and, unless ``bench=False``, benchmarked."""

    name: str
    sizes: Mapping[str, int]
    bench: bool = True
    statics: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    order: Mapping[str, str] = field(default_factory=dict)


def case(
    name: str,
    *,
    bench: bool = True,
    statics: Mapping[str, Any] | None = None,
    scalars: Mapping[str, Any] | None = None,
    order: Mapping[str, str] | None = None,
    **sizes: int,
) -> Case:
    """``case("llama3_8b", m=8192, n=4096)``: sizes by dim name; ``statics`` picks a variant of the pattern, ``scalars``
    replaces the declared value of a scalar (and says ``"zipf"`` of indices that are not uniform), ``order`` lays a tensor
    out in memory in another order of its dims (``order={"x": "b h w c"}``: channels last)."""
    return Case(name, sizes, bench, statics or {}, scalars or {}, order or {})


@dataclass(frozen=True, eq=False)
class Fusion:
    """One fusion.

    Attributes:
        name: also the name of the pattern file and of the kernel file.
        pattern: the reference function. Tensor parameters come first, then scalars, then static parameters.
        inputs: for each parameter that binds something of the graph, in order: a string of dim names for a tensor
            (``"... n"``, ``"b c ..."``; ``"..."`` is any number of dims, ``n|1`` a dim that may be broadcast), a number
            for a scalar (the value that tests use).
        integers: tensors of class indices: parameter to the dim that bounds them.
        complex_inputs: tensors of complex numbers (complex64, of absolute value 1).
        variants: values of the static parameters, one mapping a variant, tried in this order.
        spellings: other functions of the same parameters, for what no canonical form can merge.
        kernel: the op that replaces it: same parameters.
        guard: same parameters, given example values; None accepts, a sentence declines.
        pays: same parameters; why Inductor is as good here (a sentence: the site is kept), or None (it is fused).
        traffic: bytes that the kernels and Inductor's code move for forward + backward, as formulas over the dims
            (``m``: the product of what ``...`` stands for) and ``bytes``, those of an element: what decides where no
            table speaks.
        find: finds matches that a function can't describe. Called instead of matching ``pattern``.
        read: reads what a traced function can't say off a match (a number of groups), before legality is asked; returns
            the completed match, or None if it is none.
        pair: combines matches that share inputs (q and k of RoPE) into one.
        priority: larger is tried first; a graph node belongs to one match.
        on_cpu: whether it pays on CPU tensors.
        cases: sizes for tests and benchmarks.
        source: the paper, as author year, identifier.
    """

    name: str
    pattern: Callable[..., Any]
    inputs: Inputs
    kernel: FusedOp | None = None
    integers: Mapping[str, str] = field(default_factory=dict)
    complex_inputs: tuple[str, ...] = ()
    variants: tuple[Mapping[str, Any], ...] = ({},)
    spellings: tuple[Callable[..., Any], ...] = ()
    guard: Callable[..., str | None] | None = None
    pays: Callable[..., str | None] | None = None
    find: Callable[[View], Iterator[Match | NearMiss]] | None = None
    read: Callable[[Match], Match | None] | None = None
    pair: Callable[[View, list[Match]], list[Match]] | None = None
    traffic: tuple[str, str] | None = None
    priority: int = 0
    on_cpu: bool = False
    cases: tuple[Case, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        statics = set(self.statics())
        for function in (self.pattern, *self.spellings, self.guard, self.pays):
            if function is None:
                continue
            parameters = list(inspect.signature(function).parameters)
            missing = [name for name in (*self.inputs, *statics) if name not in parameters]
            extra = [name for name in parameters if name not in self.inputs and name not in statics]
            if missing or extra:
                raise DeclarationError(
                    f"fusion {self.name!r}: {function.__name__}({', '.join(parameters)}) does not take the declared "
                    f"inputs and statics ({', '.join((*self.inputs, *sorted(statics)))}). Pattern, guard and kernel "
                    "share one signature: rename the parameters to match."
                )
        if isinstance(self.kernel, FusedOp):
            self.kernel.reference = self.pattern
        for c in self.cases:
            unknown = set(c.sizes) - set(self.dims())
            if unknown:
                raise DeclarationError(
                    f"fusion {self.name!r}, case {c.name!r}: {sorted(unknown)} are no dims of its inputs "
                    f"({', '.join(self.dims())})."
                )

    def dims(self) -> list[str]:
        """The names of the dims of all inputs, in order of appearance."""
        names: dict[str, None] = {}
        for spec in self.inputs.values():
            if isinstance(spec, str):
                names.update({token.removesuffix("|1"): None for token in spec.split() if token != "..."})
        return [*names, "m"] if any(isinstance(s, str) and "..." in s for s in self.inputs.values()) else list(names)

    def statics(self) -> list[str]:
        """The names of the static parameters that bind nothing of the graph."""
        return list({key: None for variant in self.variants for key in variant if key not in self.inputs})

    def tensors(self) -> list[str]:
        return [name for name, spec in self.inputs.items() if isinstance(spec, str)]
