"""One model class: built, trained a step in eager and through the backend, compared, its sites counted two ways.

What there is to find is counted without the matcher: modules by hooks and functions by wrappers in an eager run, and nodes
in the graphs as Dynamo captured them, each as often as its graph runs (one graph may serve every layer). The difference of
the two is code that Dynamo left in eager. A node that is still there after the rewrite needs a row of the report about it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import fx_fusion
from fx_fusion.backend import compile_graph
from fx_fusion.options import parse
from fx_fusion.tiny_configs import shrunk
from tests.coverage.inputs import inputs_of
from tests.coverage.others import diffusers_model, timm_model
from tests.coverage.places import Place, modules_of_a_kind, places, written_out_norm
from tests.structured_masks import structures_on_cpu

# The fusions that speak for a kind of place. Those of the second table show in no single call.
KINDS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("rms_norm", "add_rms_norm", "gated_rms_norm"),
    "layer_norm": ("layer_norm", "add_layer_norm"),
    "group_norm": ("group_norm", "group_norm_swish"),
    "embedding": ("embedding",),
    "loss": ("linear_cross_entropy", "cross_entropy"),
    "masked attention": ("causal_mask", "block_sparse_attention", "biased_attention"),
    "dense_mask": ("dense_mask", "causal_mask", "block_sparse_attention", "biased_attention"),
    "attention": ("attention", "flex_attention"),
    "repeat_kv": ("repeat_kv", "block_sparse_attention", "biased_attention"),
    "swish": (
        "swish", "swiglu", "gated_rms_norm", "group_norm_swish", "evonorm_s0", "evonorm_b0", "causal_conv1d", "moe_combine",
        "routed_experts",
    ),
}
IN_NO_CALL: dict[str, tuple[str, ...]] = {
    "rotary": ("rope", "complex_rope"),
    "gated": ("swiglu", "geglu", "moe_combine", "routed_experts"),
    "evonorm": ("evonorm_s0", "evonorm_b0"),
}
STATUSES = ("fused", "kept", "declined", "near")
SPREAD = 8  # runs of eager that tell how far its results spread, where one run was not enough
_ROTARY = re.compile(r"apply_.*rot|apply_rope")
_GATED = ({"gate_proj", "up_proj"}, {"w1", "w3"}, {"wi_0", "wi_1"}, {"gate_up_proj"})


def kind_of(module: torch.nn.Module) -> str | None:
    """Return what a module is, by its type or by what its class is called: nothing that the matcher looks at."""
    name = type(module).__name__
    if isinstance(module, torch.nn.LayerNorm):
        return "layer_norm"
    if isinstance(module, torch.nn.GroupNorm):
        return "group_norm"
    if type(module) is torch.nn.Embedding:
        return "embedding"
    if (norm := written_out_norm(name)) is not None:
        return norm
    if "EvoNorm" in name:  # timm's without an activation is a scale and a shift
        return "evonorm" if getattr(module, "apply_act", True) else None
    children = {n for n, _ in module.named_children()}
    activation = next(
        (type(getattr(module, n)).__name__.lower() for n in ("act_fn", "act", "activation_fn") if hasattr(module, n)), ""
    )
    gated = any(names <= children for names in _GATED) and "relu" not in activation
    return "gated" if gated else None


@contextlib.contextmanager
def counting(model: torch.nn.Module) -> Iterator[collections.Counter[str]]:
    """Count, while eager runs: modules by kind, and calls of the functions that rotate queries and keys."""
    seen: collections.Counter[str] = collections.Counter()
    hooks = [m.register_forward_hook(lambda *_, k=k: seen.update([k])) for m in model.modules() if (k := kind_of(m))]
    with contextlib.ExitStack() as stack:
        for module in {sys.modules[type(m).__module__] for m in model.modules()}:
            for name, function in list(vars(module).items()):
                if callable(function) and _ROTARY.match(name):
                    stack.enter_context(mock.patch.object(module, name, _counted(function, seen)))
        yield seen
    for hook in hooks:
        hook.remove()


def _counted(function: Callable[..., Any], seen: collections.Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = seen["rotary"]
        rotated = function(*args, **kwargs)
        seen["rotary"] = before + (len(rotated) if isinstance(rotated, tuple) else 1)  # not what it calls itself
        return rotated

    return call


def step(model: torch.nn.Module, call: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One step from the buffers as they are, which are put back: every tensor of the output, gradient and buffer."""
    before = [(m, dict(m._buffers), {n: b.clone() for n, b in m._buffers.items() if b is not None}) for m in model.modules()]
    model.zero_grad()
    torch.manual_seed(0)
    out = call(**inputs)
    out.loss.backward()
    found = {"loss": out.loss.detach() + 0, "logits": out.logits.detach() + 0, **dict(tensors(out, "output"))}
    found.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    found.update({f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()})
    for module, buffers, contents in before:
        module._buffers.clear()
        module._buffers.update(buffers)
        for name, content in contents.items():
            if not torch.equal(buffers[name], content):  # what is only read may be a view that can't be written
                buffers[name].detach().copy_(content)
    return found


def tensors(out: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model's output by where it is in there; caches and other objects are passed by."""
    if isinstance(out, torch.Tensor):
        yield name, out.detach() + 0  # computed now, if it was put off until somebody reads it
    elif isinstance(out, Mapping):
        for key, item in out.items():
            yield from tensors(item, f"{name}.{key}")
    elif isinstance(out, (tuple, list)):
        for i, item in enumerate(out):
            yield from tensors(item, f"{name}.{i}")


@dataclass
class Captured:
    """A graph: its places as it was captured (None: not known), the names of those that were left, and how often it ran."""

    before: list[Place] | None
    left: list[Place]
    modules: list[Place]  # those of kinds that show in no single call
    published: list[Any]  # the graphs of the report when this one was not yet in it
    runs: int = 0
    index: int | None = None


class Counted:
    """A backend that rewrites, runs eagerly, and counts how often each graph runs. Without a report: only counts."""

    def __init__(self, report: fx_fusion.Report | None = None, classes: Mapping[str, str] | None = None):
        self.report, self.classes = report, classes or {}
        self.captured: list[Captured] = []
        self.graphs = 0
        self._before: list[Place] | None = None
        self._modules: list[Place] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        if self.report is None:
            return gm.forward
        self._before, self._modules = places(gm), modules_of_a_kind(gm, self.classes)
        try:
            return compile_graph(gm, example_inputs, parse(None, {"select": "always", "strict": True}), self.rest)
        finally:
            self._before, self._modules = None, []  # an exact graph that is compiled later is not this one

    def rest(self, gm: torch.fx.GraphModule, example_inputs: Any, options: Any) -> Callable[..., Any]:
        graph = Captured(self._before, places(gm), self._modules, list(self.report.graphs))
        self.captured.append(graph)

        def run(*args: Any) -> Any:
            if graph.index is None:  # it is published after it was compiled, so the first that is new is this one
                graph.index = next(g.index for g in self.report.graphs if not any(g is old for old in graph.published))
            graph.runs += 1
            return gm.forward(*args)

        return run


def measure(class_name: str, kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The row of one class: status, differences, what there is to find and what the report says."""
    row: dict[str, Any] = {"class": class_name, "kind": kind, "dtype": str(dtype)[6:]}
    try:
        torch.manual_seed(0)
        model, inputs = built(class_name, kind, dtype)
        with counting(model) as seen:
            eager = step(model, model, inputs)
    except Exception as error:  # the class can't be built or trained so small: not our subject, and reported as such
        return {**row, "status": "not built", "error": f"{type(error).__name__}: {error}"[:300]}
    torch._dynamo.reset()
    plain = Counted()
    try:
        step(model, torch.compile(model, backend=plain, dynamic=False), inputs)
    except Exception as error:  # Dynamo's own: there is nothing to rewrite
        return {**row, "status": "not captured", "error": f"{type(error).__name__}: {error}"[:300]}
    torch._dynamo.reset()
    try:
        with fx_fusion.recording() as report, structures_on_cpu(any_head_dim=True):
            ours = Counted(report, classes_of_a_kind(model))
            found = step(model, torch.compile(model, backend=ours, dynamic=False), inputs)
    except Exception as error:  # a crash of ours is what the suite looks for
        return {**row, "status": "crash", "error": f"{type(error).__name__}: {error}"[:1500]}
    row["more_graphs"] = max(0, ours.graphs - plain.graphs)
    row.update(counts(report, ours.captured, seen))
    row["worst"] = worst = compare(model, inputs, eager, found, dtype)
    row["status"] = "wrong" if worst[0] > 1 else "ok"
    return row


def classes_of_a_kind(model: torch.nn.Module) -> dict[str, str]:
    """Names of classes whose modules all are of a kind that shows in no single call. (An EvoNorm without an activation is
    of none: its class says nothing then.)"""
    kinds: dict[str, set[str | None]] = collections.defaultdict(set)
    for module in model.modules():
        kinds[type(module).__name__].add(kind_of(module))
    return {name: kind for name, found in kinds.items() if len(found) == 1 and (kind := next(iter(found))) in IN_NO_CALL}


def built(name: str, kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small random model in training, and a call that makes it return a loss."""
    if kind in ("timm", "diffusers"):
        model, inputs = {"timm": timm_model, "diffusers": diffusers_model}[kind](name)
        return model.to(dtype).train(), {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
    import transformers

    model_class = getattr(transformers, name)
    model = model_class(shrunk(model_class.config_class, kind)).to(dtype).train()
    return model, inputs_of(model, kind)


def counts(report: Any, captured: list[Captured], seen: collections.Counter[str]) -> dict[str, Any]:
    """Sites by fusion and status; for each kind: seen in eager, in the graphs, and what became of each of those."""
    graphs = [graph for graph in captured if graph.runs]
    runs: collections.Counter[int] = collections.Counter()
    for graph in graphs:
        runs[graph.index] += graph.runs
    sites: collections.Counter[str] = collections.Counter()
    for site in report.sites:
        sites[f"{site.fusion}/{site.status}"] += _tensors(site) * runs[site.graph]
    kinds = {kind: _zeros(seen[kind]) for kind in (*KINDS, *IN_NO_CALL)}
    for graph in graphs:
        rows = [site for site in report.sites if site.graph == graph.index]
        for kind, fusions in KINDS.items():
            for status, n in became(kind, fusions, graph, rows).items():
                kinds[kind][status] += n * graph.runs
                kinds[kind]["in_graphs"] += n * graph.runs
    # Where everything else that was seen is in graphs, so is what shows in no single call.
    complete = all(kinds[kind]["in_graphs"] >= kinds[kind]["seen"] for kind in KINDS)
    for kind, fusions in IN_NO_CALL.items():
        for status, n in _said(fusions, report.sites, runs).items():
            kinds[kind][status] += n
        said = sum(kinds[kind][status] for status in STATUSES)
        silent = sum(
            graph.runs * (not any(s.graph == graph.index and s.fusion in fusions and s.module == place.module for s in report.sites))
            for graph in graphs for place in graph.modules if place.kind == kind
        )  # fmt: skip
        kinds[kind]["missing"] = max(silent, seen[kind] - said if complete else 0)
        kinds[kind]["in_graphs"] = max(said + silent, seen[kind] if complete else 0)
    reasons = sorted({f"{s.fusion}/{s.status}: {s.reason}"[:200] for s in report.sites if s.status != "fused"})
    kinds = {k: v for k, v in kinds.items() if v["seen"] or v["in_graphs"]}
    return {"sites": dict(sites), "kinds": kinds, "reasons": reasons}


def _zeros(seen: int) -> dict[str, int]:
    return {"seen": seen, "in_graphs": 0, "missing": 0, **dict.fromkeys(STATUSES, 0)}


def _tensors(site: Any) -> int:
    """Rotary is counted in tensors."""
    return 2 if site.fusion == "rope" and "k" in site.shapes else 1


def became(kind: str, fusions: tuple[str, ...], graph: Captured, rows: list[Any]) -> collections.Counter[str]:
    """Return what became of each place of one kind in one run of a graph: ``fused`` if it is gone and so many fusions say
    so, what a row at this place says if it is still there, and else ``missing``."""
    found: collections.Counter[str] = collections.Counter()
    fused = sum(row.status == "fused" and row.fusion in fusions for row in rows)
    left = [place for place in graph.left if place.kind == kind]
    if graph.before is None:  # the graph without an assumption: nobody saw it before it was rewritten
        gone = fused
    else:
        before, still = [p for p in graph.before if p.kind == kind], {p.name for p in left}
        gone = sum(p.name not in still for p in before)
        left = [p for p in before if p.name in still]
    found["fused"], found["missing"] = min(gone, fused), max(0, gone - fused)
    found.update(said_of(left, [row for row in rows if row.status != "fused" and row.fusion in fusions]))
    return +found


def said_of(left: list[Place], rows: list[Any]) -> list[str]:
    """For each place the status of a row about it, or ``missing``: a row of its line, or else of its module, or of the
    one around or within that. A row speaks for one place, and two fusions' rows of one line for the same one."""
    spots: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        spots.setdefault((row.module, row.location), {}).setdefault(row.fusion, []).append(row.status)
    free = [(*spot, status) for spot, by in spots.items() for status in max(by.values(), key=len)]
    said: dict[Place, str] = {}
    for near in (_same_line, _same_module, _next_module):
        for place in left:
            row = next((row for row in free if near(place, row)), None)
            if place not in said and row is not None:
                free.remove(row)
                said[place] = row[2]
    return [said.get(place, "missing") for place in left]


def _same_line(place: Place, row: tuple[str, str, str]) -> bool:
    return (place.module, place.location) == row[:2]


def _same_module(place: Place, row: tuple[str, str, str]) -> bool:
    return place.module == row[0]


def _next_module(place: Place, row: tuple[str, str, str]) -> bool:
    return place.module.rpartition(".")[0] == row[0] or row[0].rpartition(".")[0] == place.module


def _said(fusions: tuple[str, ...], sites: list[Any], runs: collections.Counter[int]) -> collections.Counter[str]:
    """Rows by status, those of several fusions about one line of one module once."""
    spots: dict[tuple[int, str, str], dict[str, list[Any]]] = {}
    found: collections.Counter[str] = collections.Counter()
    for site in sites:
        if site.fusion in fusions and site.status == "fused":
            found["fused"] += _tensors(site) * runs[site.graph]
        elif site.fusion in fusions:
            spots.setdefault((site.graph, site.module, site.location), {}).setdefault(site.fusion, []).append(site)
    for (graph, *_), by in spots.items():
        for site in max(by.values(), key=len):
            found[site.status] += _tensors(site) * runs[graph]
    return found


def compare(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], eager: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor], dtype: torch.dtype,
) -> tuple[float, str]:  # fmt: skip
    """Return how much of the allowed error is used, and by what: twice the error of eager against float64, plus two
    epsilons. Where a float32 run agrees with eager to 1e-5 no float64 run is needed; where there is none, eager is the
    truth."""
    if eager.keys() != found.keys():
        return float("inf"), f"not the same results: {sorted(eager.keys() ^ found.keys())[:3]}"
    if dtype == torch.float32:
        difference = max((_difference(found[n], truth), n) for n, truth in eager.items())
        if difference[0] <= 1e-5:
            return difference[0], difference[1]
    default = 1e-3 if dtype == torch.float32 else 3e-2
    try:
        oracle = copy.deepcopy(model).double()
        wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
        exact = step(oracle, oracle, wide)
        usual = {n: _difference(eager[n], exact[n]) for n in eager}
    except Exception:  # some models have operations without float64
        exact, usual = eager, dict.fromkeys(eager, default)
    for name in [n for n, error in usual.items() if error == float("inf")]:  # what is no number is what eager says it is
        exact, usual = exact | {name: eager[name]}, usual | {name: default}
    epsilon = torch.finfo(dtype).eps
    worst = max((_difference(found[n], exact[n]) / (2 * usual[n] + 2 * epsilon), n) for n in eager)
    if worst[0] <= 1:
        return worst
    # One run of eager may be lucky: a router or a maximum that is nearly tied falls as in float64 in one rounding and not
    # in another. Its error is the largest over runs whose weights differ by less than a rounding.
    for seed in range(SPREAD):
        again = step(nearby := _nudged(model, epsilon, seed), nearby, inputs)
        again = {n: _difference(again[n], exact[n]) for n in eager}
        usual = {n: max(usual[n], error) if (error := again[n]) < float("inf") else usual[n] for n in eager}
    return max((_difference(found[n], exact[n]) / (2 * usual[n] + 2 * epsilon), n) for n in eager)


def _nudged(model: torch.nn.Module, epsilon: float, seed: int) -> torch.nn.Module:
    """A copy whose weights differ by up to half a rounding (as float32 sees it: some go to the next number)."""
    generator = torch.Generator().manual_seed(seed)
    nudged = copy.deepcopy(model)
    with torch.no_grad():
        for weight in nudged.parameters():
            noise = torch.rand(weight.shape, generator=generator) - 0.5
            weight.copy_(weight.float() * (1 + epsilon * noise))
    return nudged


def _difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference, in units of the largest number; infinite where one of the two is NaN or infinite and the
    other is not the same."""
    if found.shape != truth.shape:
        return float("inf")
    if not truth.numel():
        return 0.0
    found, truth = (torch.view_as_real(t).double() if t.is_complex() else t.double() for t in (found, truth))
    numbers = found.isfinite() & truth.isfinite()
    same = (found == truth) | (found.isnan() & truth.isnan())
    if not (numbers | same).all():
        return float("inf")
    if not numbers.any():
        return 0.0
    unit = max(truth[numbers].abs().max().item(), 1e-3)
    return (found - truth)[numbers].abs().max().item() / unit
