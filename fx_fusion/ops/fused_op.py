"""``fused_op``: a forward and a backward launcher become one differentiable torch op.

Where a launcher only allocates and launches, AOTAutograd traces it: Inductor sees the kernels and launches them as its
own, without a dispatch into Python for every op (some 70 us forward, 130 us backward on the host of an H200). With host work
(chunk loops around cuBLAS), symbolic sizes that a launcher does not take, or layouts that need a copy back, the op stays
opaque and Inductor calls it.

On a CPU tensor an op runs its reference, the pattern function; with ``TRITON_INTERPRET=1`` it runs its kernel in
Triton's interpreter, which is how kernels are checked on a machine without a GPU.

**The save list is the signature of the backward**: after the gradients of the outputs, each of its parameters is an
input of the forward or one of its statistics. Anything else is an error when the file is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fusion.errors import DeclarationError
from fx_fusion.ops.library import DEVICES, LIBRARY, NAMESPACE, define, on_its_device, register_autograd, trace_launches
from fx_fusion.ops.on_cpu import Reference, as_tuple, interpreting
from fx_fusion.torch_internals.dispatch import (
    autograd_inside_an_op,
    is_view,
    optional_parameters,
    parameter_names,
    result_names,
    schema_of,
)


class FusedOp:
    """A differentiable op. Calling it returns its outputs, without the statistics that its backward needs.

    Attributes:
        overload: the op in ``torch.ops.fx_fusion``; ``backward``, if it has one, computes its gradients.
        outputs: the names of its results without statistics.
        parameters: the names of its parameters; ``optional`` those that may be None.
        reference: the function that it computes.
        module: the name of the module that has its launcher.
    """

    def __init__(
        self, name: str, overload: Any, outputs: Sequence[str], reference: Reference, module: str, backward: Any = None
    ):  # fmt: skip
        self.name, self.overload, self.backward = name, overload, backward
        self.outputs, self.reference = tuple(outputs), reference
        self.module = module
        self.parameters, self.optional = parameter_names(overload), optional_parameters(overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = as_tuple(self.overload(*args, **kwargs))
        return results[0] if len(self.outputs) == 1 else results[: len(self.outputs)]

    def __repr__(self) -> str:
        return f"<fused op {schema_of(self.overload)}>"


def fused_op(
    name: str,
    forward: tuple[str, Callable[..., Any]],
    backward: tuple[str, Callable[..., Any]],
    *,
    reference: str | None = None,
    fake: Callable[..., Any],
    stats: Sequence[str] = (),
    constants: Sequence[str] = (),
    grads: Sequence[str | tuple[str, ...]],
    depends_on: Mapping[str, Sequence[str]] | None = None,
    backward_reference: Callable[..., Any] | None = None,
    cheap: bool = False,
    symbolic: bool = False,
) -> FusedOp:
    """Define ``fx_fusion::name`` and ``fx_fusion::name_bwd`` and connect them.

    Args:
        forward: schema ``"(Tensor x, float eps) -> (Tensor y, Tensor rstd)"`` and its launcher.
        backward: schema and launcher. Parameters: one gradient an output (``Tensor?`` where it may be missing; none for
            ``constants``), then what it needs of the forward by name, then ``bool[] needs``, whether each entry of
            ``grads`` is wanted.
            It returns one tensor an entry of ``grads``; an unwanted one may be empty.
        reference: the function that the op computes, as ``"package.module:function"``; by default the pattern of the
            fusion of this name, and of a plug-in that of the ``FUSION`` in the launcher's module.
        fake: the forward on fake tensors, same parameters: allocates every result.
        stats: results of the forward that only the backward reads.
        constants: outputs that have no gradient, behind those that have one.
        grads: for each result of the backward, the input that it is the gradient of. Where several inputs share one
            gradient: ``(template, input, input)``, the template being the saved value that it looks like.
        depends_on: the inputs that an output is computed from, for outputs that some inputs do not reach; without a gradient
            for any of them the output requires none, as in eager.
        backward_reference: the backward on CPU; needed only where the backward doesn't take all inputs of the forward
            (then the reference can't be differentiated).
        cheap: whether the op takes little longer than to read its inputs and write its outputs, and draws no random numbers:
            then the backward may compute outputs again that were to be saved (``fx_fusion.memory``).
        symbolic: whether the launchers can be traced with symbolic sizes: they choose by none, and refuse those that they
            need as a number (``ops.launch.refuse_symbols``).
    """
    op, bwd = define(name, forward[0]), define(f"{name}_bwd", backward[0])
    parameters, results = parameter_names(op), result_names(op)
    outputs = [r for r in results if r not in stats]
    differentiable = len([o for o in outputs if o not in constants])
    of_backward = parameter_names(bwd)
    needed = of_backward[differentiable:-1]
    unknown = [n for n in needed if n not in parameters and n not in results]
    if unknown:
        raise DeclarationError(
            f"the backward of {name} takes {', '.join(unknown)}; after the gradients of {', '.join(outputs)} it takes "
            f"inputs ({', '.join(parameters)}) or results ({', '.join(results)}) of the forward, by their names there."
        )
    if of_backward[-1] != "needs":
        last = of_backward[-1]
        raise DeclarationError(f"the backward of {name} ends with {last!r}; its last parameter is `bool[] needs`.")
    templates = [entry if isinstance(entry, str) else entry[0] for entry in grads]
    targets = [(entry,) if isinstance(entry, str) else entry[1:] for entry in grads]
    gradient_of = {n: i for i, names in enumerate(targets) for n in names}
    if strange := [n for n in dict.fromkeys((*gradient_of, *templates)) if n not in (*parameters, *results)]:
        raise DeclarationError(
            f"grads of {name} names {', '.join(strange)}; it names inputs of the forward ({', '.join(parameters)}), one for "
            "each result of the backward."
        )
    sources = depends_on or {}
    if strange := [n for o, of in sources.items() for n in (o, *of) if n not in (*parameters, *outputs)]:
        raise DeclarationError(
            f"depends_on of {name} names {', '.join(strange)}; it gives outputs ({', '.join(outputs)}) the inputs "
            f"({', '.join(parameters)}) that they are computed from."
        )
    if backward_reference is None and not set(parameters) <= set(needed):
        raise DeclarationError(
            f"the backward of {name} doesn't take {sorted(set(parameters) - set(needed))}, so its reference can't be "
            "differentiated on CPU: take them, or give a backward_reference."
        )
    module = forward[1].__module__
    declared_in = f"fx_fusion.patterns.{name}" if module.startswith("fx_fusion.") else module
    fused = FusedOp(name, op, outputs, Reference(reference or f"{declared_in}:FUSION.pattern"), module, bwd)

    def forward_reference(*args: Any) -> Any:
        produced = fused.reference(dict(zip(parameters, args, strict=True)))
        allocated = as_tuple(fake(*args))
        # Autograd refuses writes to a view that an op returns.
        own = [p.clone() if is_view(p) else p for p in produced]
        full = tuple(p.contiguous() for p in own) + tuple(a.zero_() for a in allocated[len(outputs) :])
        # Outputs take the strides that the fake promised to the compiler.
        full = tuple(a.copy_(f) if a.stride() != f.stride() else f for a, f in zip(allocated, full, strict=True))
        return full if len(full) > 1 else full[0]

    def differentiate_reference(*args: Any) -> Any:
        """Differentiate the reference itself: no second set of formulas."""
        dys, needs = args[:differentiable], args[-1]
        bound = dict(zip(needed, args[differentiable:-1], strict=True))
        wanted = {n for n, i in gradient_of.items() if needs[i] and bound[n] is not None}
        with autograd_inside_an_op():
            leaves = {n: bound[n].detach().requires_grad_() for n in wanted}
            ys = fused.reference({n: leaves.get(n, bound[n]) for n in parameters})
            pairs = [(y, dy) for y, dy in zip(ys, dys, strict=False) if dy is not None]  # constants are behind
            found = torch.autograd.grad(
                [y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs], allow_unused=True
            )
        by_name = dict(zip(leaves, found, strict=True))
        made = []
        for template, (first, *_) in zip(templates, targets, strict=True):
            gradient = by_name.get(first)
            if gradient is not None:
                made.append(torch.empty_like(bound[template]).copy_(gradient))
            else:
                made.append(first_of(dys).new_zeros(bound[template].shape if first in wanted else 0))
        return tuple(made) if len(made) > 1 else made[0]

    def backward_like_fake(*args: Any) -> Any:
        """The launcher's gradients as the fake promised them: in the layouts of what they are gradients of, and empty where
        they are not wanted."""
        made, needs = as_tuple(backward[1](*args)), args[-1]
        bound = dict(zip(needed, args[differentiable:-1], strict=True))
        wanted = [n and bound[t] is not None for n, t in zip(needs, templates, strict=True)]
        laid = tuple(
            _laid_out(g, bound[t]) if w else g.new_empty(0) for g, t, w in zip(made, templates, wanted, strict=True)
        )  # fmt: skip
        return laid if len(laid) > 1 else laid[0]

    for target_name, launcher, on_cpu in (
        (name, forward[1], forward_reference),
        (f"{name}_bwd", backward_like_fake, backward_reference or differentiate_reference),
    ):
        for device in DEVICES:
            LIBRARY.impl(target_name, _on_device(device, launcher, on_cpu), device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)

    def fake_backward(*args: Any) -> Any:
        dys, needs = args[:differentiable], args[-1]
        bound = dict(zip(needed, args[differentiable:-1], strict=True))
        made = []
        for template, needed_here in zip(templates, needs, strict=True):
            like = bound[template] if needed_here else None
            made.append(first_of(dys).new_empty(0) if like is None else torch.empty_like(like))
        return tuple(made) if len(made) > 1 else made[0]

    torch.library.register_fake(f"{NAMESPACE}::{name}_bwd", fake_backward, lib=LIBRARY)
    trace_launches(op, forward[1], cheap=cheap, symbolic=symbolic)
    trace_launches(bwd, backward_like_fake, symbolic=symbolic)

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        bound = {**dict(zip(parameters, inputs, strict=True)), **dict(zip(results, as_tuple(output), strict=True))}
        ctx.set_materialize_grads(False)
        frozen = [n for n, of in sources.items() if not any(ctx.needs_input_grad[parameters.index(i)] for i in of)]
        ctx.mark_non_differentiable(*(bound[s] for s in (*constants, *stats, *frozen)))
        ctx.save_for_backward(*(bound[n] for n in needed if isinstance(bound[n], Tensor)))
        ctx.plain = {n: bound[n] for n in needed if not isinstance(bound[n], Tensor)}
        ctx.dtypes = {n: bound[n].dtype for n in gradient_of if bound[n] is not None}

    def differentiate(ctx: Any, *dys: Any) -> Any:
        dys = dys[:differentiable]
        if all(dy is None for dy in dys):
            return (None,) * len(parameters)
        saved = iter(ctx.saved_tensors)
        bound = {n: ctx.plain[n] if n in ctx.plain else next(saved) for n in needed}
        wanted = {n: ctx.needs_input_grad[i] for i, n in enumerate(parameters)}
        needs = [any(wanted[n] for n in names) for names in targets]
        made = as_tuple(bwd(*dys, *bound.values(), needs))
        # A shared gradient (both operands of an add) has the dtype of the sum; each operand gets its own.
        return tuple(made[gradient_of[n]].to(ctx.dtypes[n]) if n in gradient_of and wanted[n] else None for n in parameters)

    register_autograd(name, differentiate, setup_context)
    return fused


def _on_device(device: str, launcher: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    if device == "CUDA":
        return on_its_device(launcher)
    return lambda *args: launcher(*args) if interpreting() else reference(*args)


def _laid_out(gradient: Tensor, like: Tensor | None) -> Tensor:
    if like is None or gradient.shape != like.shape:
        return gradient
    if like.is_contiguous():
        return gradient.contiguous()
    wanted = torch.empty_like(like)
    return gradient if gradient.stride() == wanted.stride() else wanted.copy_(gradient)


def first_of(dys: Sequence[Any]) -> Tensor:
    """The first gradient that exists."""
    return next(dy for dy in dys if dy is not None)
