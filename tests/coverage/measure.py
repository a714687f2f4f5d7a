"""One model class: built, trained a step in eager and through the backend, compared, its sites counted two ways.

What there is to find is counted without the matcher: modules by hooks and functions by wrappers in an eager run, and calls
in the graphs as Dynamo captured them, each as often as its graph runs (one graph may serve every layer). The difference of
the two is code that Dynamo left in eager.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import fx_fusion
from fx_fusion import backend
from fx_fusion.options import parse
from tests.coverage.configs import shrunk
from tests.coverage.inputs import inputs_of
from tests.coverage.others import diffusers_model, timm_model

# How a kind shows in a graph (None: in no single call), and the fusions that speak for it.
KINDS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "rms_norm": (r"rsqrt\(|rms_norm\(", ("rms_norm", "add_rms_norm", "gated_rms_norm")),
    "layer_norm": (r"\blayer_norm\(", ("layer_norm", "add_layer_norm")),
    "group_norm": (r"\bgroup_norm\(", ("group_norm", "group_norm_swish")),
    "embedding": (r"= embedding\(", ("embedding",)),
    "loss": (r"cross_entropy\(|nll_loss\(", ("linear_cross_entropy", "cross_entropy")),
    "masked attention": (
        r"scaled_dot_product_attention\([^\n]*attn_mask=(?!None)",
        ("causal_mask", "block_sparse_attention"),
    ),
    "rotary": (None, ("rope", "complex_rope")),
    "gated": (None, ("swiglu", "geglu")),
    "evonorm": (None, ("evonorm_s0", "evonorm_b0")),
}
SPREAD = 8  # runs of eager that tell how far its results spread, where one run was not enough
_ROTARY = re.compile(r"apply_.*rot|apply_rope")
_GATED = ({"gate_proj", "up_proj"}, {"w1", "w3"}, {"wi_0", "wi_1"}, {"gate_up_proj"})


def kind_of(module: torch.nn.Module) -> str | None:
    """What a module is, by its type or by what its class is called: nothing that the matcher looks at."""
    name = type(module).__name__
    if isinstance(module, torch.nn.LayerNorm):
        return "layer_norm"
    if isinstance(module, torch.nn.GroupNorm):
        return "group_norm"
    if type(module) is torch.nn.Embedding:
        return "embedding"
    if "RMSNorm" in name or name in ("T5LayerNorm", "MT5LayerNorm", "LlamaNorm"):
        return "rms_norm"
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
    model.zero_grad()
    torch.manual_seed(0)
    out = call(**inputs)
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach() + 0}
    found.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


class Counted:
    """A backend that rewrites, runs eagerly, and counts how often each graph runs. With ``rewriting=False``: only counts."""

    def __init__(self, *, rewriting: bool = True):
        self.rewriting = rewriting
        self.runs: collections.Counter[int] = collections.Counter()
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        if not self.rewriting:
            return gm.forward
        return backend.compile_graph(gm, example_inputs, parse(None, {"select": "always", "strict": True}), self.rest)

    def rest(self, gm: torch.fx.GraphModule, example_inputs: Any, options: Any) -> Callable[..., Any]:
        index = backend._graphs_seen - 1

        def run(*args: Any) -> Any:
            self.runs[index] += 1
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
    plain = Counted(rewriting=False)
    try:
        step(model, torch.compile(model, backend=plain, dynamic=False), inputs)
    except Exception as error:  # Dynamo's own: there is nothing to rewrite
        return {**row, "status": "not captured", "error": f"{type(error).__name__}: {error}"[:300]}
    torch._dynamo.reset()
    ours = Counted()
    try:
        with fx_fusion.recording() as report:
            found = step(model, torch.compile(model, backend=ours, dynamic=False), inputs)
    except Exception as error:  # a crash of ours is what the suite looks for
        return {**row, "status": "crash", "error": f"{type(error).__name__}: {error}"[:1500]}
    row["more_graphs"] = max(0, ours.graphs - plain.graphs)
    row.update(counts(report, ours.runs, seen))
    row["worst"] = worst = compare(model, inputs, eager, found, dtype)
    row["status"] = "wrong" if worst[0] > 1 else "ok"
    return row


def built(name: str, kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small random model in training, and a call that makes it return a loss."""
    if kind in ("timm", "diffusers"):
        model, inputs = {"timm": timm_model, "diffusers": diffusers_model}[kind](name)
        return model.to(dtype).train(), {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
    import transformers

    model_class = getattr(transformers, name)
    model = model_class(shrunk(model_class.config_class, kind)).to(dtype).train()
    return model, inputs_of(model, kind)


def counts(report: Any, runs: collections.Counter[int], seen: collections.Counter[str]) -> dict[str, Any]:
    """Sites by fusion and status; for each kind: seen in eager, in the graphs, and what the sites say of those."""
    sites: collections.Counter[str] = collections.Counter()
    for site in report.sites:
        tensors = 2 if site.fusion == "rope" and "k" in site.shapes else 1  # rotary counts tensors
        sites[f"{site.fusion}/{site.status}"] += tensors * runs[site.graph]
    kinds: dict[str, dict[str, int]] = {}
    for kind, (pattern, fusions) in KINDS.items():
        said = {
            status: sum(sites[f"{fusion}/{status}"] for fusion in fusions)
            for status in ("fused", "kept", "declined", "near")
        }  # fmt: skip
        in_graphs = sum(said.values())
        if pattern is not None:
            in_graphs = sum(len(re.findall(pattern, g.before)) * runs[g.index] for g in report.graphs)
            if kind in seen:  # the reciprocal square root of something that is no module is no norm
                in_graphs = min(seen[kind], in_graphs)
            elif kind not in ("loss", "masked attention"):
                in_graphs = 0
        kinds[kind] = {"seen": seen[kind], "in_graphs": in_graphs, "missing": max(0, in_graphs - sum(said.values())), **said}
    # Where everything else that was seen is in graphs, so is what shows in no single call.
    complete = all(k["in_graphs"] >= k["seen"] for name, k in kinds.items() if KINDS[name][0] is not None)
    for name in ("rotary", "gated", "evonorm"):
        if complete:
            kinds[name]["in_graphs"] = kinds[name]["seen"]
            kinds[name]["missing"] = max(
                0, kinds[name]["seen"] - sum(kinds[name][s] for s in ("fused", "kept", "declined", "near"))
            )
    reasons = sorted({f"{s.fusion}/{s.status}: {s.reason}"[:200] for s in report.sites if s.status != "fused"})
    kinds = {k: v for k, v in kinds.items() if v["seen"] or v["in_graphs"]}
    return {"sites": dict(sites), "kinds": kinds, "reasons": reasons}


def compare(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], eager: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor], dtype: torch.dtype,
) -> tuple[float, str]:  # fmt: skip
    """How much of the allowed error is used, and by what: twice the error of eager against float64, plus two epsilons.
    Where a float32 run agrees with eager to 1e-5 no float64 run is needed; where there is none, eager is the truth."""
    if eager.keys() != found.keys():
        return float("inf"), f"not the same results: {sorted(eager.keys() ^ found.keys())[:3]}"
    if dtype == torch.float32:
        difference = max((_difference(found[n], truth), n) for n, truth in eager.items())
        if difference[0] <= 1e-5:
            return difference[0], difference[1]
    try:
        oracle = copy.deepcopy(model).double()
        wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
        exact = step(oracle, oracle, wide)
        usual = {n: _difference(eager[n], exact[n]) for n in eager}
    except Exception:  # some models have operations without float64
        exact, usual = eager, dict.fromkeys(eager, 1e-3 if dtype == torch.float32 else 3e-2)
    epsilon = torch.finfo(dtype).eps
    worst = max((_difference(found[n], exact[n]) / (2 * usual[n] + 2 * epsilon), n) for n in eager)
    if worst[0] <= 1:
        return worst
    # One run of eager may be lucky: a router or a maximum that is nearly tied falls as in float64 in one rounding and not
    # in another. Its error is the largest over runs whose weights differ by less than a rounding.
    for seed in range(SPREAD):
        again = step(nearby := _nudged(model, epsilon, seed), nearby, inputs)
        usual = {n: max(usual[n], _difference(again[n], exact[n])) for n in eager}
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
    if not truth.numel():
        return 0.0
    unit = max(truth.abs().max().item(), 1e-3)
    return (found.double() - truth.double()).nan_to_num().abs().max().item() / unit
