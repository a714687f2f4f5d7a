"""Check a declaration. Each check raises DeclarationError when the file that declares the fusion is imported,
and says what was found and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import sympy

from fx_fusion.errors import DeclarationError
from fx_fusion.fusion.tracing import results_of, trace
from fx_fusion.graph.signatures import names_of


def check(fusion: Any) -> None:
    """Check a ``Fusion``."""
    for part in (_signatures, _replacement, _fields, _patterns, _cases, _traffic):
        part(fusion)


def _error(fusion: Any, sentence: str) -> DeclarationError:
    return DeclarationError(f"fusion {fusion.name!r}: {sentence}")


def _signatures(fusion: Any) -> None:
    wanted = (*fusion.inputs, *fusion.static_names)
    for function in (fusion.pattern, *fusion.spellings, fusion.guard, fusion.why_keep):
        parameters = list(inspect.signature(function).parameters) if function is not None else list(wanted)
        if set(parameters) != set(wanted):
            raise _error(
                fusion,
                f"{function.__name__}({', '.join(parameters)}) does not take the declared inputs and statics "
                f"({', '.join(wanted)}). Pattern, guard, why_keep and kernel share one signature: rename the parameters.",
            )


def _replacement(fusion: Any) -> None:
    if fusion.kernel is None and fusion.emit is None:
        raise _error(fusion, "has neither a kernel nor an emit; one of them has to make the replacement.")
    if fusion.emit is None:
        _kernel(fusion)
    if fusion.find is not None and (fusion.spellings or fusion.read or fusion.join):
        raise _error(fusion, "has a find; spellings, read and join belong to fusions that are found by their pattern.")


def _kernel(fusion: Any) -> None:
    wanted, parameters = (*fusion.inputs, *fusion.static_names), fusion.kernel.parameters
    if set(parameters) != set(wanted):
        raise _error(
            fusion,
            f"its kernel takes ({', '.join(parameters)}), the fusion declares ({', '.join(wanted)}). A parameter that is "
            "named otherwise would get nothing: give both the same names, or write an emit.",
        )
    if fusion.kernel.reference.where not in _references(fusion):
        raise _error(
            fusion,
            f"its kernel is the op {fusion.kernel.name!r}, which computes {fusion.kernel.reference.where} on CPU. Give "
            "fusion, op and files one name, or the op a reference.",
        )
    absent = {n for variant in fusion.variants for n, given in variant.items() if given is None and n in fusion.inputs}
    if missing := sorted(absent - set(fusion.kernel.optional)):
        raise _error(
            fusion, f"a variant has no {', '.join(missing)}; declare it in the kernel's schema as `Tensor? {missing[0]}`."
        )


def _references(fusion: Any) -> set[str]:
    """Return where the op of a fusion may find what it computes."""
    module = fusion.pattern.__module__
    by_file = f"fx_fusion.patterns.{fusion.name}:FUSION.pattern"
    return {by_file, f"{module}:FUSION.pattern", f"{module}:{fusion.pattern.__name__}"}


def _fields(fusion: Any) -> None:
    specs = fusion.specs  # parses every spec
    for field in ("integers", "ignored", "complex_inputs", "images", "frozen", "positive"):
        if unknown := sorted(set(getattr(fusion, field)) - set(specs)):
            raise _error(fusion, f"{field} names {', '.join(unknown)}; its tensors are {', '.join(specs)}.")
    if unknown := sorted(set(fusion.integers.values()) - set(fusion.dims)):
        raise _error(fusion, f"integers bounds indices by {', '.join(unknown)}; its dims are {', '.join(fusion.dims)}.")
    if unknown := sorted(set(fusion.ignored.values()) - set(fusion.static_names)):
        raise _error(fusion, f"ignored names {', '.join(unknown)}; its statics are {', '.join(fusion.static_names)}.")
    entries = {dim.name for spec in specs.values() for dim in spec.dims}
    if unknown := sorted(set(fusion.parallel) - entries):
        raise _error(fusion, f"parallel names {', '.join(unknown)}; its dims are {', '.join(sorted(entries))}.")
    like = {dim.like for spec in specs.values() for dim in spec.dims if dim.like}
    if unknown := sorted(like - set(fusion.dims)):
        raise _error(fusion, f"a dim is as long as {', '.join(unknown)}; its dims are {', '.join(fusion.dims)}.")
    broadcast = {dim.name for spec in specs.values() for dim in spec.dims if dim.broadcast}
    if unknown := sorted(set(fusion.shared) - broadcast):
        raise _error(fusion, f"shared names {', '.join(unknown)}; the dims that may be broadcast are {sorted(broadcast)}.")


def _patterns(fusion: Any) -> None:
    if fusion.find is not None:
        return  # its pattern is a reference, and matched nowhere
    for function in (fusion.pattern, *fusion.spellings):
        for statics in fusion.variants:
            parameters = [name for name in fusion.inputs if name not in statics]
            try:
                graph = trace(function, parameters, statics)
            except Exception as error:
                raise _error(fusion, f"{function.__name__} can't be traced with {dict(statics)}: {error}") from error
            if graph is None:
                if function is fusion.pattern and fusion.emit is None:
                    raise _error(fusion, f"its pattern has no variant {dict(statics)}; on CPU the pattern itself runs.")
                continue
            _known_ops(fusion, function, graph.nodes)
            _one_tree(fusion, function, graph)


def _one_tree(fusion: Any, function: Any, graph: Any) -> None:
    """Matching walks down from the first result: it has to come past every input and every other result."""
    first, *others = results_of(graph)
    below: set[Any] = set()
    waiting = [first]
    while waiting:
        node = waiting.pop()
        if node not in below:
            below.add(node)
            waiting += node.all_input_nodes
    if unused := [str(n.target) for n in graph.nodes if n.op == "placeholder" and n not in below]:
        names = ", ".join(unused)
        raise _error(fusion, f"the first result of {function.__name__} does not depend on {names}; nothing would bind it.")
    if any(node not in below for node in others):
        raise _error(fusion, f"the first result of {function.__name__} is not made of the others: return the last first.")


def _known_ops(fusion: Any, function: Any, nodes: Iterable[Any]) -> None:
    for node in nodes:
        if node.op in ("placeholder", "output") or node.target is getattr or any(names_of(node)):
            continue
        if not any(n.op == "placeholder" for n in node.all_input_nodes) and _is_a_size(node):
            continue
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        raise _error(
            fusion,
            f"{function.__name__} calls {called}, which graph/signatures.py does not list: it would match nothing. Add a "
            "row there, write it with ops that are listed, or find its matches with a find.",
        )


def _is_a_size(node: Any) -> bool:
    """Return True if a node computes a number from sizes (``x.shape[-1] // 2``)."""
    return node.target is getattr or (bool(node.all_input_nodes) and all(map(_is_a_size, node.all_input_nodes)))


def _cases(fusion: Any) -> None:
    for case in fusion.cases:
        if unknown := sorted(set(case.sizes) - set(fusion.dims)):
            known = ", ".join(fusion.dims)
            raise _error(fusion, f"case {case.name!r} has sizes of {', '.join(unknown)}; its dims are {known}.")
        if missing := sorted(fusion.sized - set(case.sizes)):
            raise _error(fusion, f"case {case.name!r} has no size of {', '.join(missing)}.")


def _traffic(fusion: Any) -> None:
    for formula in fusion.traffic or ():
        symbols = {name: sympy.Symbol(name, positive=True) for name in (*fusion.dims, "bytes")}
        unknown = sorted(map(str, sympy.sympify(formula, locals=symbols).free_symbols - set(symbols.values())))
        if unknown:
            raise _error(fusion, f"the traffic {formula!r} names {', '.join(unknown)}; it has {', '.join(symbols)}.")
