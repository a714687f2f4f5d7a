"""Check that a match is a legal rewrite, whoever found it. Every check returns the sentence that the report shows, or
None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fx_fusion.errors import DeclarationError
from fx_fusion.fusion.declaration import Fusion, Reason
from fx_fusion.fusion.dims import mismatch
from fx_fusion.fusion.match import Match
from fx_fusion.fusion.placements import why_not_in_parts
from fx_fusion.graph.dtypes import keeps_values, name
from fx_fusion.graph.effects import entered
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.torch_internals.fakes import FakeTensor, hint_of
from fx_fusion.torch_internals.nodes import is_an_attribute, sets_a_hook


def why_not(fusion: Fusion, match: Match, view: View) -> Reason:
    """The first reason why ``match`` may not be rewritten, or None."""
    for check in _CHECKS:
        reason = check(fusion, match, view)
        if reason is not None:
            return reason
    return None


def differs_from_the_kernel(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return where the graph computes or rounds in another dtype than the kernel, as matching found."""
    return match.differs


def crosses_a_rounding(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return which cast that the match steps over rounds, although the kernel does not round there (``Match.rounded``)."""
    computed, waiting = set(match.crossed), list(match.outputs)
    while waiting:  # outputs that are deferred are computed as the graph has them
        node = waiting.pop()
        if node not in computed:
            computed.add(node)
            waiting += [n for n in node.all_input_nodes if n in match.nodes]
    for node in sorted(computed - match.rounded, key=lambda n: view.order.get(n, 0)):
        below = view.transparent(node)
        if below is not None and not keeps_values(example(below).dtype, example(node).dtype):
            return f"{node.name} rounds to {name(example(node).dtype)}; the kernel does not round there"
    return None


def escapes(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return which inner value is used outside; the outputs may have any users."""
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


def takes_a_hooked_gradient(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return which value that the match steps over has a hook: its gradient is not computed by itself any more."""
    for node in match.crossed:
        hook = next((user for user in node.users if sets_a_hook(user)), None)
        if hook is not None:
            return f"{hook.name} sets a hook on {node.name}, whose gradient would not be computed"
    return None


def is_differentiated_inside(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return which call of the graph differentiates by a value that the match steps over, or differentiates twice."""
    for call in view.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        by = next((node for node in call.all_input_nodes if node in match.crossed), None)
        if by is not None:
            return f"{call.name} differentiates by {by.name}, which the op would not read"
        if call.kwargs.get("create_graph"):
            return f"{call.name} makes a gradient that is differentiated too; ops have first derivatives only"
    return None


def crosses_regions(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return which matched node is in another grad mode or autocast region than the root."""
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


def is_written_between(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return what writes to an input or an inner value between the first matched node and the root."""
    nodes = {*match.nodes, *match.crossed, match.root}
    bound = {v for v in match.operands.values() if isinstance(v, fx.Node)}
    order = view.order
    first, last = min(order[n] for n in nodes), max(order[n] for n in (match.root, *match.nodes))
    write = view.effects.writes_between(first, last, nodes | bound, but=match.nodes)
    if write is not None:
        return f"{write.name} changes a value of the pattern in place, in between"
    return None


def is_overwritten_later(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return what writes, after the op, to a value that its backward reads: eager may save other values than the op does."""
    kept = [v for v in (*match.operands.values(), *match.outputs[1:]) if is_tensor(v)]
    if not any(example(v).requires_grad for v in kept):
        return None
    write = view.effects.written_after(view.order[match.root], kept)
    if write is not None and write not in match.nodes:
        return f"{write.name} later changes a value in place that the backward reads"
    return None


def is_not_plain(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return which input is no ordinary strided tensor (or a DTensor that the finder knows), or on another device than the
    rest."""
    if not match.parts and (reason := why_not_in_parts(fusion, match)) is not None:
        return reason
    devices = set()
    for parameter, node in match.operands.items():
        if not is_tensor(node):
            continue
        tensor = example(node)
        devices.add(tensor.device)
        if parameter in match.sharded or parameter in match.parts:
            continue
        if (reason := why_not_plain(tensor)) is not None:
            return f"{parameter} {reason}"
    if len(devices) > 1:
        return f"its inputs are on several devices: {', '.join(sorted(map(str, devices)))}"
    return None


def why_not_plain(tensor: torch.Tensor) -> Reason:
    """Return what a tensor is where it is no ordinary strided one."""
    if type(tensor) not in (FakeTensor, torch.nn.Parameter, torch.Tensor) and not _is_fake_parameter(tensor):
        return f"is a {type(tensor).__name__}; kernels take plain tensors"
    return None if tensor.layout is torch.strided else f"has the layout {tensor.layout}; kernels take strided tensors"


def _is_fake_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and type(tensor).__name__ in ("Parameter", "Buffer", "FakeTensor")


# Numbers that sites were compiled with, by source line and parameter, for the whole process. Under ``dynamic=True`` every
# float is symbolic; one that is another number the second time is one that changes. A module's may be another module's.
_NUMBERS: dict[tuple[str, str, str], set[Any]] = {}
_MODULES = 4  # of one line, with numbers of their own


def takes_a_changing_number(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return which number changes between calls: the op takes it as a constant, and would be compiled for each value."""
    for parameter, bound in match.inputs.items():
        number = example(bound)
        if not isinstance(number, (float, torch.SymFloat)):
            continue
        hint = hint_of(number)
        known = _NUMBERS.setdefault((match.root.meta.get("stack_trace") or "", fusion.name, parameter), set())
        room = len(known) < (_MODULES if isinstance(bound, fx.Node) and is_an_attribute(bound) else 1)
        if isinstance(number, torch.SymFloat) and (hint is None or not (room or hint in known)):
            return f"{parameter} changes between calls; the kernel would be compiled for each value"
        if room:
            known.add(hint)
    return None


def has_other_dims(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return which input does not have the dims that ``Fusion.inputs`` declares."""
    for parameter in match.inputs:
        if parameter not in fusion.inputs:
            raise DeclarationError(
                f"fusion {fusion.name!r}: a match binds {parameter}, which is no input ({', '.join(fusion.inputs)}). "
                "Declare it, or hand it over as Match.others."
            )
    return mismatch(fusion.specs, {n: example(v) for n, v in match.inputs.items() if n in fusion.specs and is_tensor(v)})


def is_refused_by_its_guard(fusion: Fusion, match: Match, view: View) -> Reason:
    """Return what the fusion's guard says, in the grad mode and autocast region of the site."""
    with entered(view.effects.region[match.root]):
        return asked(fusion, "guard", match)


def asked(fusion: Fusion, rule: str, match: Match) -> Reason:
    """Return what ``guard`` or ``why_keep`` of a fusion says of a match. Raises DeclarationError for anything but a sentence
    or None."""
    function: Callable[..., Any] | None = getattr(fusion, rule)
    reason = None if function is None else function(**arguments_of(fusion, match))
    if reason is not None and (not isinstance(reason, str) or not reason):
        raise DeclarationError(
            f"fusion {fusion.name!r}: {rule} returned {reason!r}. It returns a sentence that says why not, or None where "
            "nothing speaks against the fusion."
        )
    return reason


def arguments_of(fusion: Fusion, match: Match) -> dict[str, Any]:
    """Example values and statics by parameter, for a guard or a cost rule; None for what the match has not."""
    bound = {n: match.example(n) for n in match.inputs}
    return {**dict.fromkeys((*fusion.inputs, *fusion.static_names)), **bound, **match.statics}


_CHECKS: tuple[Callable[[Fusion, Match, View], Reason], ...] = (
    takes_a_changing_number,
    has_other_dims,
    differs_from_the_kernel,
    crosses_a_rounding,
    escapes,
    takes_a_hooked_gradient,
    is_differentiated_inside,
    crosses_regions,
    is_written_between,
    is_overwritten_later,
    is_not_plain,
    is_refused_by_its_guard,
)
