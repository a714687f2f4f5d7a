"""What makes a match a legal rewrite. Every check returns None, or the sentence that the report shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.matcher import Match
from fx_fusion.graph.dtypes import keeps_values, name
from fx_fusion.graph.effects import entered
from fx_fusion.graph.terms import same_shape
from fx_fusion.graph.view import View, is_tensor, value


def why_not(fusion: Fusion, match: Match, view: View) -> str | None:
    """The first reason why ``match`` may not be rewritten, or None."""
    for check in _CHECKS:
        reason = check(fusion, match, view)
        if reason is not None:
            return reason
    return None


def follows_dtype_policy(fusion: Fusion, match: Match, view: View) -> str | None:
    """The graph computes and rounds where the pattern does, given the dtypes of its inputs."""
    if match.pattern is None:
        return None
    dtypes = {n: value(match.inputs[n]).dtype for n in match.pattern.tensors()}
    device = value(match.inputs[match.pattern.tensors()[0]]).device.type
    policy = match.pattern.policy(dtypes, device, view.effects.region[match.root])
    for node, term in match.pairs.items():
        found, wanted = value(term).dtype, policy.results[node]
        if found != wanted:
            return f"{term.op} is computed in {name(found)}; the kernel computes it in {name(wanted)}"
    for (node, i), found_roundings in match.edges.items():
        wanted_roundings = policy.operands[node, i]
        if found_roundings != wanted_roundings:
            at = f"before {match.pairs[node].op}"
            if found_roundings and not wanted_roundings:
                return f"a cast to {name(found_roundings[0])} rounds {at}; the kernel does not round there"
            if wanted_roundings and not found_roundings:
                return f"nothing rounds to {name(wanted_roundings[0])} {at}; the kernel does"
            return f"{name(found_roundings[0])} {at} where the kernel rounds to {name(wanted_roundings[0])}"
    return None


def has_the_shapes_of_its_pattern(fusion: Fusion, match: Match, view: View) -> str | None:
    """Every view of the match has the shape that the pattern gives it for these inputs: one view is not another."""
    if match.pattern is None or match.views_read or not match.pattern.reads_shapes:
        return None
    wanted = match.pattern.values({n: value(match.inputs[n]) for n in match.pattern.parameters})
    for node, term in match.pairs.items():
        found = value(term)
        if not same_shape(found, wanted[node]):
            return f"{term.op} makes shape {tuple(found.shape)}; the pattern's makes {tuple(wanted[node].shape)}"
    return None


def crosses_no_rounding(fusion: Fusion, match: Match, view: View) -> str | None:
    """No cast that a finder stepped over rounds, but for those that it says its kernel makes too. (What a pattern steps over
    is compared with the pattern's own casts: ``follows_dtype_policy``.)"""
    if match.pattern is not None:
        return None
    computed, waiting = set(match.crossed), list(match.outputs)
    while waiting:  # outputs that are deferred are computed as the graph has them
        node = waiting.pop()
        if node not in computed:
            computed.add(node)
            waiting += [n for n in node.all_input_nodes if n in match.nodes]
    for node in sorted(computed - match.rounded, key=lambda n: view.order.get(n, 0)):
        below = view.transparent(node)
        if below is not None and not keeps_values(value(below).dtype, value(node).dtype):
            return f"{node.name} rounds to {name(value(node).dtype)}; the kernel does not round there"
    return None


def is_contained(fusion: Fusion, match: Match, view: View) -> str | None:
    """Inner values are used only inside; the outputs may have any users."""
    for node in match.nodes:
        if node in match.outputs:
            continue
        for user in node.users:
            if user.op == "output" and node in match.deferred:
                continue
            if user.op == "output" and user not in match.nodes:
                return f"{node.name} is also returned by the graph"
            if user not in match.nodes:
                return f"{node.name} is also used outside the pattern, by {user.name}"
    return None


def is_in_one_region(fusion: Fusion, match: Match, view: View) -> str | None:
    """Grad mode and autocast are the same at every matched node."""
    region = view.effects.region
    if any(isinstance(entry, str) for entry in region[match.root]):
        return f"{match.root.name} is inside a functorch transform or inference mode; ops have no rule for it"
    for node in match.nodes:
        if region[node] == region[match.root]:
            continue
        # accelerate casts the results of a model behind its autocast; a cast or a view is the same in any autocast region.
        neutral = view.transparent(node) is not None or view.name(node) in ("view", "reshape", "getitem")
        if not (node in match.deferred and neutral and region[node][0] == region[match.root][0]):
            return f"{node.name} is in another grad-mode or autocast region than {match.root.name}"
    return None


def is_free_of_writes(fusion: Fusion, match: Match, view: View) -> str | None:
    """Nothing writes to an input or an inner value between the first matched node and the root."""
    nodes = {*match.nodes, *match.crossed, match.root}
    bound = {v for v in match.inputs.values() if isinstance(v, fx.Node)}
    order = view.order
    first, last = min(order[n] for n in nodes), max(order[n] for n in (match.root, *match.nodes))
    write = view.effects.writes_between(first, last, nodes | bound)
    if write is not None and write not in match.nodes:
        return f"{write.name} changes a value of the pattern in place, in between"
    return None


def keeps_saved_values(fusion: Fusion, match: Match, view: View) -> str | None:
    """Nothing writes, after the op, to what its backward reads: eager may save other values than the op does."""
    kept = [v for v in (*match.inputs.values(), *match.outputs[1:]) if is_tensor(v)]
    if not any(value(v).requires_grad for v in kept):
        return None
    write = view.effects.written_after(view.order[match.root], kept)
    if write is not None and write not in match.nodes:
        return f"{write.name} later changes a value in place that the backward reads"
    return None


def has_plain_tensors(fusion: Fusion, match: Match, view: View) -> str | None:
    """Every input is an ordinary strided tensor, all on one device, of a dtype that kernels know."""
    devices = set()
    for parameter, node in match.inputs.items():
        if not is_tensor(node):
            continue
        tensor = value(node)
        if type(tensor) not in (FakeTensor, torch.nn.Parameter, torch.Tensor) and not _is_fake_parameter(tensor):
            return f"{parameter} is a {type(tensor).__name__}; kernels take plain tensors"
        if tensor.layout is not torch.strided:
            return f"{parameter} has the layout {tensor.layout}; kernels take strided tensors"
        devices.add(tensor.device)
    if len(devices) > 1:
        return f"its inputs are on several devices: {', '.join(sorted(map(str, devices)))}"
    return None


def _is_fake_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and type(tensor).__name__ in ("Parameter", "Buffer", "FakeTensor")


# Numbers that sites were compiled with, by source line and parameter. Under ``dynamic=True`` every float is symbolic; one
# that is another number the second time is one that changes.
_NUMBERS: dict[tuple[str, str, str], Any] = {}


def takes_constants(fusion: Fusion, match: Match, view: View) -> str | None:
    """No number of the site changes between calls: the op takes it as a constant, and would be compiled for each value."""
    for parameter, bound in match.inputs.items():
        number = value(bound)
        if not isinstance(number, (float, torch.SymFloat)):
            continue
        hint = getattr(number.node, "hint", None) if isinstance(number, torch.SymFloat) else number
        known = _NUMBERS.setdefault((match.root.meta.get("stack_trace") or "", fusion.name, parameter), hint)
        if isinstance(number, torch.SymFloat) and (hint is None or known != hint):
            return f"{parameter} changes between calls; the kernel would be compiled for each value"
    return None


def has_the_declared_dims(fusion: Fusion, match: Match, view: View) -> str | None:
    """The dims of ``Fusion.inputs`` unify; sizes are compared without adding a guard."""
    if match.pattern is None:
        return None
    sizes: dict[str, int | torch.SymInt] = {}
    for parameter in match.pattern.tensors():
        spec, shape = str(fusion.inputs[parameter]).split(), value(match.inputs[parameter]).shape
        named = [t for t in spec if t != "..."]
        if all(may_be_broadcast(t) for t in named) and len(shape) < len(named):
            named = named[len(named) - len(shape) :]  # missing dims are broadcast too
            spec = named
        if len(shape) < len(named) or ("..." not in spec and len(shape) != len(named)):
            return f"{parameter} has shape {tuple(shape)}; the kernel takes ({' '.join(spec)})"
        at = spec.index("...") if "..." in spec else 0  # any number of dims there
        pinned = (*shape[:at], *shape[len(shape) - len(named) + at :])
        for token, size in zip(named, pinned, strict=True):
            dim = token.removesuffix("|1")
            if token != dim and statically_known_true(size == 1):
                continue
            if not statically_known_true(sizes.setdefault(dim, size) == size):
                return f"{parameter} has shape {tuple(shape)}; its {dim} must be {sizes[dim]}"
    return None


def may_be_broadcast(token: str) -> bool:
    """Whether a dim of ``Fusion.inputs`` (``s|1``) may be 1 or missing."""
    return token.endswith("|1")


def passes_the_guard(fusion: Fusion, match: Match, view: View) -> str | None:
    if fusion.guard is None:
        return None
    with entered(view.effects.region[match.root]):
        return fusion.guard(**arguments_of(fusion, match))


def arguments_of(fusion: Fusion, match: Match) -> dict[str, Any]:
    """Example values and statics by parameter, for a guard or a cost rule; None for what the match has not."""
    bound = {n: match.example(n) for n in match.inputs if n in fusion.inputs}
    return {**dict.fromkeys((*fusion.inputs, *fusion.statics())), **bound, **match.statics}


_CHECKS: tuple[Callable[[Fusion, Match, View], str | None], ...] = (
    takes_constants,
    has_the_declared_dims,
    follows_dtype_policy,
    crosses_no_rounding,
    has_the_shapes_of_its_pattern,
    is_contained,
    is_in_one_region,
    is_free_of_writes,
    keeps_saved_values,
    has_plain_tensors,
    passes_the_guard,
)
