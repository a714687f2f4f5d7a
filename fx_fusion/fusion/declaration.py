"""The declaration of a fusion: everything that the rest of fx_fusion needs to know about it, in one value.

**The pattern is the reference.** One PyTorch function is traced to be matched, run in float64 to be the oracle of the
tests, compiled by Inductor to be the baseline of the benchmark, and run as it is where the kernel can't run. Guard and
kernel take the same parameters, by name. What can't work is an error when the file is imported (``checks``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fx_fusion.fusion.checks import check
from fx_fusion.fusion.dims import Spec, parse
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.view import View
from fx_fusion.ops.fused_op import FusedOp

Inputs = Mapping[str, str | int | float]
Reason = str | None  # a sentence that says why not, None where nothing speaks against it


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
    """One fusion. Raises DeclarationError where the fields contradict each other.

    Attributes:
        name: also the name of the pattern file and of the kernel file.
        pattern: the reference function. Tensor parameters come first, then scalars, then static parameters.
        inputs: for each parameter that binds something of the graph, in order: dims for a tensor (``fusion.dims``:
            ``"... n"``, ``"b c ..."``, ``"n|1"``), a number for a scalar (the value that tests use).
        source: the paper, as author year, identifier.
        instead: what to write in a model for the fusion to read it: one expression. The report says it beside a near miss.
        hints: what the report says of a near miss instead of two names of ops, by them: that of the pattern, and the one
            found in its place. The report adds no ``instead`` to a hint, because another op may be meant.

        kernel: the op that replaces a match: same parameters. Required unless there is an ``emit``.
        emit: writes the replacement into the graph, given an editor and a match; without it the kernel is called.
        finish: changes what ``emit`` made by who reads it, once all is replaced: given an editor, the match, its nodes.
            It may return a sentence for the report.

        variants: values of the static parameters, one mapping a variant, tried in this order.
        spellings: other functions of the same parameters, for what no canonical form can merge. A spelling returns
            NotImplemented for a variant that it does not have; the pattern has all of them where there is a kernel.
        find: finds matches that a function can't describe. Called instead of matching ``pattern``.
        read: reads what a traced function can't say off a match (a number of groups), and compares the shapes of its views;
            returns the completed match, or None if it is none.
        unread: finds what does the same and is not read, near misses: the report has them where no site names their root.
        join: combines two neighboring matches that share inputs (q and k of RoPE) into one, or returns None.

        guard: same parameters, given example values: why the kernel can't take them, or None.
        why_keep: same parameters: why Inductor is as good here, or None. A sentence keeps the site.
        traffic: bytes that the kernels and Inductor's code move for forward + backward, as formulas over the dims (``m``:
            the product of what ``...`` stands for) and ``bytes``, those of an element: what decides where no table speaks.
        parallel: dims along which a part of the inputs gives that part of the result (``...`` of a norm): DTensors that are
            sharded along them are fused part by part, on each rank its own.
        on_cpu: whether it pays on CPU tensors.
        of_logits: whether it is a loss: a graph that reads logits of another one for it alone begins with their lm_head.
        float8: whether its kernels can write their results in float8 (``float8.gates``): then it pays beside float8 linears.
        before: names of fusions that are tried after this one, since they may want nodes of its matches.

        integers: tensors of class indices: parameter to the dim that bounds them.
        ignored: tensors of class indices: parameter to the static parameter that holds the index without a class.
        complex_inputs: tensors of complex numbers (complex64, of absolute value 1).
        images: tensors (images, channels, positions ...) that may lie channels last.
        frozen: tensors that have no gradient.
        positive: tensors of positive numbers.
        shared: dims ``n|1`` that are 1 in tests and benchmarks.
        of_variant: changes the inputs that tests and benchmarks make, for variants whose inputs look otherwise.
        cases: sizes for tests and benchmarks.
    """

    name: str
    pattern: Callable[..., Any]
    inputs: Inputs
    source: str = ""
    instead: str = ""
    hints: Mapping[tuple[str, str], str] = field(default_factory=dict)

    kernel: FusedOp | None = None
    emit: Callable[[Any, Match], None] | None = None
    finish: Callable[[Any, Match, Sequence[fx.Node]], str | None] | None = None

    variants: tuple[Mapping[str, Any], ...] = ({},)
    spellings: tuple[Callable[..., Any], ...] = ()
    find: Callable[[Search], Iterable[Match | NearMiss]] | None = None
    read: Callable[[Match], Match | None] | None = None
    unread: Callable[[View], Iterable[NearMiss]] | None = None
    join: Callable[[View, Match, Match], Match | None] | None = None

    guard: Callable[..., Reason] | None = None
    why_keep: Callable[..., Reason] | None = None
    traffic: tuple[str, str] | None = None
    parallel: tuple[str, ...] = ()
    on_cpu: bool = False
    of_logits: bool = False
    float8: bool = False
    before: tuple[str, ...] = ()

    integers: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    complex_inputs: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    of_variant: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    cases: tuple[Case, ...] = ()

    def __post_init__(self) -> None:
        check(self)

    @functools.cached_property
    def specs(self) -> dict[str, Spec]:
        """The dims of each tensor."""
        return {name: parse(self.name, name, spec) for name, spec in self.inputs.items() if isinstance(spec, str)}

    @functools.cached_property
    def dims(self) -> tuple[str, ...]:
        """The names of the sizes of all inputs, in order of appearance, ``m`` last."""
        names = dict.fromkeys(name for spec in self.specs.values() for name in spec.names)
        return (*(n for n in names if n != "m"), *(n for n in names if n == "m"))

    @functools.cached_property
    def sized(self) -> frozenset[str]:
        """The dims whose sizes every case gives."""
        dims = [dim for spec in self.specs.values() for dim in spec.dims]
        named = {d.name for d in dims if not (d.broadcast or d.several or d.like or d.name == "1")}
        rows = any(d.several for spec in self.specs.values() if not any(d.optional for d in spec.dims) for d in spec.dims)
        return frozenset({*named, "m"} if rows else named)

    @functools.cached_property
    def static_names(self) -> tuple[str, ...]:
        """The names of the static parameters that bind nothing of the graph."""
        return tuple({key: None for variant in self.variants for key in variant if key not in self.inputs})

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the inputs that are tensors."""
        return tuple(self.specs)

    @property
    def small_case(self) -> Case:
        """The first case for tests without a dim of size 1; the first of all where there is none."""
        return next((c for c in self.cases if not c.bench and min(c.sizes.values()) > 1), self.cases[0])
