"""``options={"verify": ...}``: in calls of a training run, every replaced site also runs as the model wrote it, on the same
inputs, in the model's dtype and in float64; results and gradients have to pass the rule (``fx_fusion.accuracy``).

The inputs come from running the graph that Dynamo captured once more, in eager and without gradients. A site is what the
replaced nodes computed from them, and what the rewritten graph computes in their place: replaced outputs keep their names,
so both are cut out of their graphs by name. Its backward gets a random gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.errors import VerificationError
from fx_fusion.graph.effects import Effects
from fx_fusion.graph.outside import views_of
from fx_fusion.graph.terms import example
from fx_fusion.rewrite.verify_site import NotComparable, SiteCheck, compared, complaint, reproducer
from fx_fusion.runtime.capture import is_capturing
from fx_fusion.torch_internals.fakes import FakeTensor
from fx_fusion.torch_internals.nodes import checkpointed_body

WHEN: dict[Any, Callable[[int], bool]] = {
    False: lambda call: False,
    "first": lambda call: call == 1,
    "graph": lambda call: call == 1,
    "sample": lambda call: call == 1 or call % 1000 == 0,
    True: lambda call: True,
}


@dataclass
class Verified:
    """The state of the checks so far: calls, checks, why sites were not, and the one that used most of what is allowed;
    ``step``: which part of it the whole graph used, where that was compared."""

    calls: int = 0
    checked: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    worst: str = ""
    used: float = 0.0
    step: float | None = None

    def sentences(self) -> Iterator[str]:
        """Yield what the report says."""
        if self.calls:
            worst = f"; the worst used {self.used:.2f} of what is allowed ({self.worst})" if self.worst else ""
            yield f"verified in {self.calls} call(s): {self.checked} checks of sites{worst}"
        if self.step is not None:
            yield f"verified as a whole, with its gradients: it used {self.step:.2f} of what is allowed"
        for place, reason in self.skipped.items():
            yield f"not verified: {place}: {reason}"


# -- cutting a site out ------------------------------------------------------------------------------------------------
def site_checks(
    before: fx.GraphModule, after: fx.GraphModule, sites: Sequence[Any], verified: Verified
) -> list[SiteCheck]:  # fmt: skip
    """A check for each fused site of one graph, in the order of the graph; why there is none is noted in ``verified``."""
    old = {node.name: node for node in before.graph.nodes}
    new = {node.name: node for node in after.graph.nodes}
    order = {name: i for i, name in enumerate(old)}
    found, gone, covered = list[SiteCheck](), dict[str, set[str]](), set[str]()
    for site in sites:
        if site.status != "fused":
            continue
        place = f"{site.fusion} in {site.module} ({site.location})"
        own = {name for name in (*site.nodes, *site.tail) if name in old}
        outputs = tuple(n for n in old if n in own and n in new and any(u.name not in own for u in old[n].users))
        if not outputs:
            gone[place] = own
            continue
        reads_after = _Slice(after, outputs, lambda node: node.name in old and node.name not in own)  # noqa: B023
        ends = {old[name] for name in reads_after.inputs if name in old}
        if strange := [name for name in reads_after.inputs if name not in old]:
            verified.skipped[place] = f"it reads {strange[0]}, which the captured graph does not have"
            continue
        # What the model makes of those inputs before the site begins (casts that change nothing) belongs to it.
        made_of = _made_of(before, ends)
        reads_before = _Slice(before, outputs, lambda n: n in ends or (n.name not in own and n not in made_of))  # noqa: B023
        covered.update(node.name for node in reads_before.nodes)
        inputs = tuple(dict.fromkeys((*reads_before.inputs, *reads_after.inputs)))
        tensors = [example(old[name]) for name in inputs]
        differentiated = frozenset(name for name in outputs if _is_differentiated(old[name], own))
        trained = frozenset(n for n, t in zip(inputs, tensors, strict=True) if differentiated and _needs_gradient(t))
        at = max((*own, *inputs), key=order.__getitem__)
        found.append(SiteCheck(
            place, site.fusion, reads_before.function(inputs), reads_after.function(inputs), inputs, outputs,
            trained, differentiated, at,
        ))  # fmt: skip
    for place, own in gone.items():  # a norm that its rotation took in is checked with it
        if not own <= covered:
            verified.skipped[place] = "no result of it stays in the graph"
    return found


def _is_differentiated(output: fx.Node, own: set[str]) -> bool:
    """Return True if a gradient comes back to a result of a site: not so inside of ``no_grad``, nor where it is only
    detached."""
    users = [user for user in output.users if user.name not in own]
    return _needs_gradient(example(output)) and any(u.op == "output" or _may_need_gradient(example(u)) for u in users)


def _may_need_gradient(value: Any) -> bool:
    return value.requires_grad if isinstance(value, Tensor) else True


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _made_of(gm: fx.GraphModule, ends: set[fx.Node]) -> set[fx.Node]:
    """Every node that depends on one of ``ends``."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if any(operand in ends or operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


class _Slice:
    """The nodes that lead to some outputs, up to nodes of which ``ends`` says that they are inputs, and the graph's own.
    What writes to a tensor in between belongs to it."""

    def __init__(self, gm: fx.GraphModule, outputs: Sequence[str], ends: Callable[[fx.Node], bool]):
        self.gm = gm
        self.outputs = [node for name in outputs for node in gm.graph.nodes if node.name == name]
        inside: set[fx.Node] = set()
        reads: set[fx.Node] = set()
        waiting = list(self.outputs)
        effects = Effects(gm.graph, {node: i for i, node in enumerate(gm.graph.nodes)})
        while waiting:
            node = waiting.pop()
            if node in inside or node in reads:
                continue
            if node.op == "placeholder" or (node.op != "get_attr" and ends(node)):
                reads.add(node)
            else:
                inside.add(node)
                writes = {write for write in effects.writes if node in effects.mutated(write)} - inside
                inside |= writes
                waiting += [n for reader in (node, *writes) for n in reader.all_input_nodes]
        self.nodes = [node for node in gm.graph.nodes if node in inside]
        self.inputs = [node.name for node in gm.graph.nodes if node in reads]

    def function(self, inputs: Sequence[str]) -> fx.GraphModule:
        """The outputs as a function of ``inputs``."""
        graph = fx.Graph()
        made = {name: graph.placeholder(name) for name in inputs}
        for node in self.nodes:
            made[node.name] = graph.node_copy(node, lambda n: made[n.name])
            made[node.name].meta = {}
        graph.output(tuple(made[node.name] for node in self.outputs))
        return fx.GraphModule(self.gm, graph)


def verifying(
    gm: fx.GraphModule,
    untouched: fx.GraphModule,
    sites_of: Mapping[fx.GraphModule, Sequence[Any]],
    when: bool | str,
    verified: Verified,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The layer around the compiled graph that checks the sites of ``gm``, rewritten, against ``untouched``, as captured.

    Args:
        sites_of: the sites of each graph, bodies of higher-order ops included.
        when: a key of ``WHEN``.
    """
    if not when:
        return lambda compiled: compiled
    captured, names = dict(untouched.named_modules()), {module: name for name, module in gm.named_modules()}
    checks = {}
    for module, sites in sites_of.items():
        before = captured[names[module]]
        assert isinstance(before, fx.GraphModule)
        checks[before] = site_checks(before, module, sites, verified)
    written = written_inputs(untouched)
    return lambda compiled: verified_calls(compiled, untouched, checks, written, when, verified)


def written_inputs(gm: fx.GraphModule) -> list[int]:
    """Positions of the arguments that a captured graph writes to."""
    written = views_of(gm)[gm].effects.written_inputs()
    return [i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node in written]


# -- running -----------------------------------------------------------------------------------------------------------
def verified_calls(
    compiled: Callable[..., Any],
    untouched: fx.GraphModule,
    checks: Mapping[fx.GraphModule, Sequence[SiteCheck]],
    written: Sequence[int],
    when: Any,
    verified: Verified,
) -> Callable[..., Any]:
    """Before calls that ``when`` names, check every site; raises VerificationError at the first that is wrong.

    Args:
        checks: by the graph of ``untouched`` that they are in, its own or that of a checkpointed block.
        written: positions of the arguments that the graph writes to.
    """
    if not any(checks.values()):
        return compiled
    count = 0

    def run(*args: Any) -> Any:
        nonlocal count
        tensors = [a for a in args if isinstance(a, Tensor)]
        if can_compare(tensors):
            count += 1
            if WHEN[when](count):
                verified.calls += 1
                own = [a.clone() if i in written else a for i, a in enumerate(args)]
                with torch.random.fork_rng(gpus(tensors)), torch.no_grad():
                    _Walk(untouched, checks, verified).run(*own)
        return compiled(*args)

    return run


def can_compare(tensors: Sequence[Tensor]) -> bool:
    """Return True if a call has real inputs and is not captured into a CUDA graph."""
    if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        return False
    return not (gpus(tensors) and is_capturing())


def gpus(tensors: Sequence[Tensor]) -> list[int]:
    """The numbers of the GPUs that tensors are on."""
    return sorted({t.get_device() for t in tensors if t.is_cuda})


class _Walk(fx.Interpreter):
    """Runs a captured graph in eager, and checks each site when its inputs are there."""

    def __init__(self, gm: fx.GraphModule, checks: Mapping[fx.GraphModule, Sequence[SiteCheck]], verified: Verified):
        super().__init__(gm)
        self.extra_traceback = False  # an error says itself where it is
        self.checks, self.verified = checks, verified
        self.waiting: dict[str, list[SiteCheck]] = {}
        self.wanted: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        for check in checks.get(gm, ()):
            self.waiting.setdefault(check.at, []).append(check)
            for name in check.inputs:
                self.wanted[name] = self.wanted.get(name, 0) + 1

    def run_node(self, node: fx.Node) -> Any:
        found = super().run_node(node)
        if node.name in self.wanted:
            self.values[node.name] = found
        for check in self.waiting.get(node.name, ()):
            verify_site(check, {name: self.values[name] for name in check.inputs}, self.verified)
            for name in check.inputs:
                self.wanted[name] -= 1
                if not self.wanted[name]:
                    del self.values[name]
        return found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        body = checkpointed_body(target, args)
        if body is None or not self.checks.get(body):
            return super().call_function(target, args, kwargs)
        return _Walk(body, self.checks, self.verified).run(*args[1:])


def verify_site(check: SiteCheck, inputs: Mapping[str, Any], verified: Verified) -> None:
    """Check one site on these inputs. Raises VerificationError if it is wrong; what keeps it from being checked is noted."""
    try:
        rows = compared(check, inputs)
    except NotComparable as why:
        verified.skipped[check.place] = str(why)
        return
    verified.checked += 1
    verified.skipped.pop(check.place, None)
    worst = rows[0]
    if worst.used > verified.used:
        verified.used, verified.worst = worst.used, check.place
    if not worst.ok:
        raise VerificationError(complaint(check, rows, reproducer(check, inputs)))
