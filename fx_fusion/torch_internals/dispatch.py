"""The dispatcher and autograd, below their public interfaces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._python_dispatch as python_dispatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def autograd_inside_an_op() -> Iterator[None]:
    """Switch autograd on again inside the body of an op, which the dispatcher runs below it. Gone: raises when the op runs,
    on CPU tensors only."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    for key in (torch._C.DispatchKey.AutogradCUDA, torch._C.DispatchKey.ADInplaceOrView):
        keys = keys | torch._C.DispatchKeySet(key)
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - keys
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def is_freed_after_this_backward(saved: Tensor) -> bool:
    """Return True if a tensor that a forward saved is a plain one with values, nobody traces, and the backward that runs
    frees its graph (no ``retain_graph=True``). Gone: False."""
    if torch.compiler.is_compiling():  # by compiled autograd, which would end its graph at the question below
        return False
    is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    modes = getattr(python_dispatch, "_get_current_dispatch_mode_stack", None)
    if is_kept is None or modes is None or type(saved) is not Tensor or saved.is_meta:
        return False
    return not modes() and not is_kept()


@contextlib.contextmanager
def calls_of(namespace: str) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Record the ops of ``namespace`` that are called inside, with copies of their arguments. Gone: this can't be
    imported."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Remember(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op.namespace == namespace:
                calls.append((op, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
            return op(*args, **(kwargs or {}))

    with Remember():
        yield calls


@dataclass
class Phase:
    """A phase of a step: whether its backward runs."""

    backward: bool = False


@contextlib.contextmanager
def products_with_parameters(
    parameters: Mapping[str, Tensor], tell: Callable[[str, str, Tensor, Tensor], None]
) -> Iterator[Phase]:
    """Call ``tell(when, name, a, b)`` inside for every product a @ b in which b is a parameter, or a view or a cast of
    one, and with an empty name for every other one of a backward. ``when``: "forward", "again" (a forward that is
    checkpointed, in the backward), or "backward". Gone: this can't be imported."""
    aten = torch.ops.aten
    kept: list[Tensor] = []  # casts: their memory must not be another tensor's meanwhile
    names = {p.untyped_storage()._cdata: name for name, p in parameters.items()}
    phase = Phase()

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            first = args[0] if args and isinstance(args[0], Tensor) else None
            if op is aten._to_copy.default and first is not None and (name := name_of(first)):
                kept.append(result)
                names[result.untyped_storage()._cdata] = name
            if op in (aten.mm.default, aten.addmm.default, aten.bmm.default):
                a, b = args[-2:]
                if op is aten.bmm.default:
                    if len(a) != 1:
                        return result
                    a, b = a[0], b[0]
                when = "forward" if not phase.backward else "again" if torch.is_grad_enabled() else "backward"
                if not name_of(a) and a.numel() and ((name := name_of(b)) or when == "backward"):
                    tell(when, name or "", a, b)
            return result

    def name_of(tensor: Tensor) -> str | None:
        return names.get(tensor.untyped_storage()._cdata)

    with Listen():
        yield phase


def steps_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Return True if something waits for the gradient of one of the parameters to be there, to make a step with it, perhaps.
    Gone: nothing does."""
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd takes a tensor for a view of another."""
    return tensor._is_view()


def parameter_names(overload: Any) -> list[str]:
    """The names of an op's parameters, in order."""
    return [argument.name for argument in overload._schema.arguments]


def optional_parameters(overload: Any) -> list[str]:
    """The names of the parameters that may be None."""
    return [argument.name for argument in overload._schema.arguments if str(argument.type).startswith("Optional")]


def result_names(overload: Any) -> list[str]:
    """The names of an op's results, in order."""
    return [result.name for result in overload._schema.returns]


def schema_of(overload: Any) -> str:
    """The schema of an op as text."""
    return str(overload._schema)


def computation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elementwise ops compute on tensors of ``dtype``. Gone: float32 for 16-bit floats."""
    try:
        from torch._prims_common import get_computation_dtype
    except ImportError:
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return get_computation_dtype(dtype)


def foreach(name: str) -> Any:
    """``torch._foreach_<name>``, None where this torch has no such op."""
    return getattr(torch, f"_foreach_{name}", None)


def saved_tensor_hooks_are_enabled() -> bool:
    """Return True if hooks on saved tensors may be set. Gone: True."""
    enabled = getattr(getattr(torch._C, "_autograd", None), "_saved_tensors_hooks_is_enabled", None)
    return True if enabled is None else enabled()


def without_saved_tensor_hooks() -> contextlib.AbstractContextManager[Any]:
    """Keep what is computed inside away from ambient hooks on saved tensors. ``checkpoint`` counts what a function saves;
    what is computed once, or while a graph is compiled, is not saved again when the function runs again."""
    if not saved_tensor_hooks_are_enabled():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def has_saved_tensor_hooks() -> bool:
    """Return True if hooks are set on what autograd saves, as ``checkpoint`` sets them. Gone: True."""
    top = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return True if top is None else top(False) is not None


DispatchMode = TorchDispatchMode


def decomposed(op: Any, args: Any, kwargs: Any, mode: TorchDispatchMode, *, composite_only: bool = False) -> Any:
    """Return what an op's decomposition makes, under ``mode``; NotImplemented for an op that has none. Gone
    (``torch._decomp``): only composite ops are decomposed."""
    table = {} if composite_only else getattr(getattr(torch, "_decomp", None), "decomposition_table", {})
    with mode:
        return table[op](*args, **kwargs) if op in table else op.decompose(*args, **kwargs)


def is_in_functorch() -> bool:
    """Return True inside of a function that ``torch.func`` or ``torch.vmap`` transforms. Gone: False."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and active()


def outside_of_functorch() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no transform of ``torch.func`` is active. Gone: raises inside of a transform."""
    if not is_in_functorch():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


# -- tensors without memory --------------------------------------------------------------------------------------------
def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """A context in which ``__torch_function__`` of subclasses is not called."""
    return torch._C.DisableTorchFunctionSubclass()


def wrapper(kind: type, like: Tensor, device: torch.device) -> Any:
    """A tensor of class ``kind`` with the shape, strides and dtype of ``like``, and no memory."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
    )


def throw_on_data_ptr(tensor: Tensor) -> None:
    """Make code in C++ that asks for the memory of a tensor that has none get an error. Gone: it gets a null pointer."""
    throw = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
    if throw is not None:
        throw(tensor)


def history_of(value: Tensor) -> Any:
    """Return what changes when a value is changed in place while gradients are recorded: its grad_fn; that of its base, if
    it is a view, because a view's own is made anew whenever the base is written to, under ``no_grad`` too."""
    base = value._base if is_view(value) else None
    return (value if base is None else base).grad_fn


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place; -1 for an inference tensor, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def preserved_version(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which writes to a tensor are not counted. Gone: they are, and a custom Function that saved the
    tensor before raises."""
    preserve = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    return contextlib.nullcontext() if preserve is None else preserve(tensor)


def has_backward_hooks(tensor: Tensor) -> bool:
    """Return True if the user registered hooks on a tensor's gradient."""
    return bool(tensor._backward_hooks)
