"""``fused_op``: a forward and a backward launcher become one differentiable torch op.

Where a launcher only allocates and launches, and sizes are static, AOTAutograd traces it: Inductor sees the kernels and
launches them as its own, without a dispatch into Python for every op (some 70 us forward, 130 us backward on the host of
an H200). With host work (chunk loops around cuBLAS), symbolic sizes, or layouts that need a copy back, the op stays opaque
and Inductor calls it.

On a CPU tensor an op runs its reference, the pattern function; with ``TRITON_INTERPRET=1`` it runs its kernel in
Triton's interpreter, which is how kernels are checked on a machine without a GPU.

**The save list is the signature of the backward**: after the gradients of the outputs, each of its parameters is an
input of the forward or one of its statistics. Anything else is an error when the file is imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from fx_fusion.errors import DeclarationError
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.kernels.lib.launch import NotTraceable, traced

NAMESPACE = "fx_fusion"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_DEVICES = ("CPU", "CUDA")
_DEFINED: list[torch._ops.OpOverload] = []
PLAIN_FUNCTIONS: list[str] = []
_LOWERINGS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's own ops that rewritten graphs call. AOTAutograd's cache takes graphs with it because it is
    named here (``PLAIN_FUNCTIONS``): what it does is in our part of the key."""
    PLAIN_FUNCTIONS.append(f"{function.__module__}.{function.__qualname__}")
    return function


class FusedOp:
    """A differentiable op. Calling it returns its outputs, without the statistics that its backward needs."""

    def __init__(self, name: str, overload: torch._ops.OpOverload, outputs: Sequence[str]):
        self.name, self.overload, self.outputs = name, overload, tuple(outputs)
        self.parameters = [a.name for a in overload._schema.arguments]
        self.reference: Callable[..., Any] | None = None  # set by the Fusion that declares this op as its kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self.overload(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        return results[0] if len(self.outputs) == 1 else results[: len(self.outputs)]

    def __repr__(self) -> str:
        return f"<fused op {self.overload._schema}>"


def fused_op(
    name: str,
    forward: tuple[str, Callable[..., Any]],
    backward: tuple[str, Callable[..., Any]],
    *,
    fake: Callable[..., Any],
    stats: Sequence[str] = (),
    constants: Sequence[str] = (),
    grads: Sequence[str | tuple[str, ...]],
    backward_reference: Callable[..., Any] | None = None,
) -> FusedOp:
    """Define ``fx_fusion::name`` and ``fx_fusion::name_bwd`` and connect them.

    Args:
        forward: schema ``"(Tensor x, float eps) -> (Tensor y, Tensor rstd)"`` and its launcher.
        backward: schema and launcher. Parameters: one gradient an output (``Tensor?`` where it may be missing; none for
            ``constants``), then what it needs of the forward by name, then ``bool[] needs``, whether each entry of
            ``grads`` is wanted.
            It returns one tensor an entry of ``grads``; an unwanted one may be empty.
        fake: the forward on fake tensors, same parameters: allocates every result.
        stats: results of the forward that only the backward reads.
        constants: outputs that have no gradient, behind those that have one.
        grads: for each result of the backward, the input that it is the gradient of. Where several inputs share one
            gradient: ``(template, input, input)``, the template being the saved value that it looks like.
        backward_reference: the backward on CPU; needed only where the backward doesn't take all inputs of the forward
            (then the reference can't be differentiated).
    """
    op = _define(name, *forward)
    bwd = _define(f"{name}_bwd", *backward)
    parameters = [a.name for a in op._schema.arguments]
    results = [r.name for r in op._schema.returns]
    outputs = [r for r in results if r not in stats]
    differentiable = len([o for o in outputs if o not in constants])
    needed = [a.name for a in bwd._schema.arguments][differentiable:-1]
    unknown = [n for n in needed if n not in parameters and n not in results]
    if unknown or bwd._schema.arguments[-1].name != "needs":
        raise DeclarationError(
            f"the backward of {name} takes {unknown or 'no needs'}; after the gradients of {outputs} it takes inputs "
            f"({', '.join(parameters)}) or results ({', '.join(results)}) of the forward, and last `bool[] needs`."
        )
    templates = [entry if isinstance(entry, str) else entry[0] for entry in grads]
    targets = [(entry,) if isinstance(entry, str) else entry[1:] for entry in grads]
    gradient_of = {n: i for i, names in enumerate(targets) for n in names}
    if backward_reference is None and not set(parameters) <= set(needed):
        raise DeclarationError(
            f"the backward of {name} doesn't take {sorted(set(parameters) - set(needed))}, so its reference can't be "
            "differentiated on CPU: take them, or give a backward_reference."
        )
    fused = FusedOp(name, op, outputs)

    def reference(named: dict[str, Any]) -> tuple[Any, ...]:
        """The pattern, on inputs of one dtype where that loses nothing: kernels read each in its own, PyTorch's norms on
        CPU refuse a narrower weight."""
        assert fused.reference is not None, f"no fusion declares the op {name}"
        dtype = next(v.dtype for v in named.values() if isinstance(v, Tensor) and v.is_floating_point())
        return _as_tuple(fused.reference(**{n: _widened(v, dtype) for n, v in named.items()}))

    def forward_reference(*args: Any) -> Any:
        produced = reference(dict(zip(parameters, args, strict=True)))
        allocated = _as_tuple(fake(*args))
        # Autograd refuses writes to a view that an op returns.
        own = [p.clone() if p._is_view() else p for p in produced]
        full = tuple(p.contiguous() for p in own) + tuple(a.zero_() for a in allocated[len(outputs) :])
        # Outputs take the strides that the fake promised to the compiler.
        full = tuple(a.copy_(f) if a.stride() != f.stride() else f for a, f in zip(allocated, full, strict=True))
        return full if len(full) > 1 else full[0]

    def differentiate_reference(*args: Any) -> Any:
        """Differentiate the reference itself: no second set of formulas."""
        dys, needs = args[:differentiable], args[-1]
        bound = dict(zip(needed, args[differentiable:-1], strict=True))
        wanted = {n for n, i in gradient_of.items() if needs[i] and bound[n] is not None}
        with _autograd_inside_an_op():
            leaves = {n: bound[n].detach().requires_grad_() for n in wanted}
            ys = reference({n: leaves.get(n, bound[n]) for n in parameters})
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
        made, needs = _as_tuple(backward[1](*args)), args[-1]
        bound = dict(zip(needed, args[differentiable:-1], strict=True))
        wanted = [n and bound[t] is not None for n, t in zip(needs, templates, strict=True)]
        laid = tuple(
            _laid_out(g, bound[t]) if w else g.new_empty(0) for g, t, w in zip(made, templates, wanted, strict=True)
        )  # fmt: skip
        return laid if len(laid) > 1 else laid[0]

    for target, launcher, on_cpu in (
        (op, forward[1], forward_reference),
        (bwd, backward_like_fake, backward_reference or differentiate_reference),
    ):
        for device in _DEVICES:
            _LIBRARY.impl(target._opname, _on_device(device, launcher, on_cpu), device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)

    def fake_backward(*args: Any) -> Any:
        dys, needs = args[:differentiable], args[-1]
        bound = dict(zip(needed, args[differentiable:-1], strict=True))
        made = []
        for template, needed_here in zip(templates, needs, strict=True):
            like = bound[template] if needed_here else None
            made.append(first_of(dys).new_empty(0) if like is None else torch.empty_like(like))
        return tuple(made) if len(made) > 1 else made[0]

    torch.library.register_fake(f"{NAMESPACE}::{name}_bwd", fake_backward, lib=_LIBRARY)
    trace_launches(op, forward[1])
    trace_launches(bwd, backward_like_fake)

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        bound = {**dict(zip(parameters, inputs, strict=True)), **dict(zip(results, _as_tuple(output), strict=True))}
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(bound[s] for s in (*constants, *stats)))
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
        made = _as_tuple(bwd(*dys, *bound.values(), needs))
        # A shared gradient (both operands of an add) has the dtype of the sum; each operand gets its own.
        return tuple(made[gradient_of[n]].to(ctx.dtypes[n]) if n in gradient_of and wanted[n] else None for n in parameters)

    register_autograd(name, differentiate, setup_context)
    return fused


def plain_op(
    name: str,
    schema: str,
    launcher: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    lowering: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """An op without a gradient of its own (``fx_fusion::name``), for launchers that an autograd formula calls.
    ``lowering``: what Inductor makes of it, from its IR, instead of a call."""
    overload = _define(name, schema, launcher)
    if lowering is not None:
        _LOWERINGS[overload] = lowering
    for device in _DEVICES:
        _LIBRARY.impl(overload._opname, _guarded(launcher), device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return overload


def trace_launches(op: torch._ops.OpOverload, launcher: Callable[..., Any]) -> None:
    """Let AOTAutograd trace the op's launcher on CUDA tensors of static size, instead of leaving a call of the op."""

    def decompose(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        schema = op._schema.arguments
        given = (*args, *(kwargs[a.name] for a in schema[len(args) :] if a.name in kwargs))
        if len(given) == len(schema) and all(_is_static_cuda(a) for a in given if isinstance(a, Tensor)):
            try:
                with mode, traced():
                    return launcher(*given)
            except NotTraceable:  # what was traced so far is dead code
                pass
        return mode.__torch_dispatch__(func, types, args, kwargs)

    torch.library.register_torch_dispatch(op, FunctionalTensorMode, decompose, lib=_LIBRARY)


def _is_static_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))


def register_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., Any], *, twice: bool = False
) -> None:  # fmt: skip
    """Connect an op with its gradient. ``twice``: the gradient is made of differentiable ops, and has a gradient itself;
    otherwise a backward with ``create_graph=True`` is an error (it would find zeros, or a part of the truth)."""
    once = backward if twice else _first_derivatives_only(name, backward)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", once, setup_context=setup_context, lib=_LIBRARY)


def _first_derivatives_only(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    def run(ctx: Any, *dys: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"fx_fusion::{name} has first derivatives only, and this backward is to be differentiated "
                "(create_graph=True). Run what needs second derivatives outside of the compiled function."
            )
        return backward(ctx, *dys)

    return run


def _define(name: str, schema: str, launcher: Callable[..., Any]) -> torch._ops.OpOverload:
    _LIBRARY.define(name + schema)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _DEFINED.append(overload)
    return overload


def tell_inductor() -> None:
    """Register every op without a lowering of its own as a call that Inductor leaves as it is, exactly as Inductor does by
    itself when it first meets one. Only, torch 2.11 then formats a log line with all operands, each printed with all of
    its operands: the time for that line doubles with every layer of a model (16 layers of a Llama: no end in sight)."""
    from torch._inductor.lowering import lowerings, make_fallback, register_lowering, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for overload in _DEFINED:
        if overload in lowerings:
            continue
        if overload in _LOWERINGS:
            register_lowering(overload, type_promotion_kind=None)(_LOWERINGS[overload])
        else:
            tag = get_layout_constraint_tag(overload, with_default=True)
            make_fallback(overload, layout_constraint=tag_to_layout_constraint(tag), warn=False)


def _on_device(device: str, launcher: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    if device == "CUDA":
        return _guarded(launcher)
    return lambda *args: launcher(*args) if interpreting() else reference(*args)


def _guarded(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the device of the first tensor, not on the current one."""

    def launch(*args: Any) -> Any:
        device = next(a.device for a in args if isinstance(a, Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launcher(*args)
        with torch.cuda.device(device):
            return launcher(*args)

    return launch


@contextlib.contextmanager
def _autograd_inside_an_op() -> Any:
    """The dispatcher runs an op's body below autograd; here it is switched on again."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    for key in (torch._C.DispatchKey.AutogradCUDA, torch._C.DispatchKey.ADInplaceOrView):
        keys = keys | torch._C.DispatchKeySet(key)
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - keys
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _laid_out(gradient: Tensor, like: Tensor | None) -> Tensor:
    if like is None or like.is_contiguous() or gradient.shape != like.shape:
        return gradient
    wanted = torch.empty_like(like)
    return gradient if gradient.stride() == wanted.stride() else wanted.copy_(gradient)


def _widened(item: Any, dtype: torch.dtype) -> Any:
    """A tensor in ``dtype`` if that has all of its values; anything else as it is."""
    narrower = isinstance(item, Tensor) and item.is_floating_point() and keeps_values(item.dtype, dtype)
    return item.to(dtype) if narrower else item


def first_of(dys: Sequence[Any]) -> Tensor:
    """The first gradient that exists."""
    return next(dy for dy in dys if dy is not None)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
