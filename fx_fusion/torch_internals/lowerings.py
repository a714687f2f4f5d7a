"""Tell Inductor how to lower ops of ours: as calls, or from its IR."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch


def register(overloads: Iterable[Any], own: Mapping[Any, Callable[..., Any]]) -> None:
    """Register each op without a lowering: with the one in ``own``, or as a call that Inductor leaves as it is, exactly as
    Inductor does by itself when it first meets one. Only, torch 2.11 then formats a log line with all operands, each printed
    with all of its operands: the time for that line doubles with every layer of a model (16 layers of a Llama: no end in
    sight). Gone: raises, and the graph goes to Inductor unchanged."""
    from torch._inductor.lowering import lowerings, make_fallback, register_lowering, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for overload in overloads:
        if overload in lowerings:
            continue
        if overload in own:
            register_lowering(overload, type_promotion_kind=None)(own[overload])
        else:
            tag = get_layout_constraint_tag(overload, with_default=True)
            make_fallback(overload, layout_constraint=tag_to_layout_constraint(tag), warn=False)


def is_a_library_call(op: Any) -> bool:
    """Return True if Inductor calls a library, or the op itself, for an op of the dispatcher. For all others it generates a
    kernel, which may compute other ops too. Gone: False."""
    try:
        from torch._inductor.lowering import fallbacks
    except ImportError:
        return False
    aten = torch.ops.aten
    products = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten._scaled_mm, aten._int_mm)
    known = op.namespace in ("aten", "prims") and op._opname != "inductor_seeds"
    return not known or op in fallbacks or op.overloadpacket in products


def lower_channels_last(x: Any) -> Any:
    """The lowering of ``channels_last(x)``: x itself where it lies so, else a copy. Gone: raises while Inductor compiles,
    and the graph goes to it unchanged."""
    from torch._inductor.ir import ExternKernel, as_storage_and_layout
    from torch._inductor.virtualized import V

    rank = len(x.get_size())
    order = [rank - 1, 0, *range(rank - 2, 0, -1)]
    laid_out = ExternKernel.require_stride_order(x, order)
    kept = any(user.op == "output" for user in V.current_node.users)
    if kept and as_storage_and_layout(laid_out)[0].get_name() in V.graph.graph_inputs:
        # Saved for the backward, and the caller may write to it meanwhile.
        return ExternKernel.require_stride_order(ExternKernel.copy_input(x), order)
    return laid_out


def lower_in_memory(x: Any) -> Any:
    """The lowering of ``in_memory(x)``: x itself, with the strides that it has in the graph. Gone: raises while Inductor
    compiles, and the graph goes to it unchanged."""
    from torch._inductor.ir import ExternKernel
    from torch._inductor.virtualized import V

    return ExternKernel.require_exact_strides(x, V.current_node.meta["val"].stride())


def scaled_in_place(x: Any, factor: Any, kernel: Any, programs: int, block: int) -> Any:
    """The lowering of ``scaled(x, factor)``: a launch of ``kernel(x_ptr, factor_ptr, n, BLOCK)`` over x's own memory where
    that was saved for this backward alone and the result is returned, else a product, which Inductor fuses with what reads
    it. CUDA graphs stay with the product: they are not made of graphs that write to their inputs. Gone: a product."""
    from torch._inductor.lowering import lowerings

    if _is_donated(x) and _is_not_computed_with():
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

        constants = kernel_side_table.add_constant_args({"n": math.prod(map(int, x.get_size())), "BLOCK": block})
        lowerings[triton_kernel_wrapper_mutation](
            kernel_idx=kernel_side_table.add_kernel(kernel), constant_args_idx=constants, grid=[(programs, 1, 1)],
            tma_descriptor_metadata={}, kwargs={"x_ptr": x, "factor_ptr": factor},
        )  # fmt: skip
        return x
    cast, mul = lowerings[torch.ops.prims.convert_element_type.default], lowerings[torch.ops.aten.mul.Tensor]
    return cast(mul(cast(x, torch.float32), factor), x.get_dtype())


def _is_donated(x: Any) -> bool:
    try:
        from torch._inductor import config
        from torch._inductor.ir import DonatedBuffer
        from torch._inductor.virtualized import V
    except ImportError:
        return False
    made = getattr(getattr(x, "data", None), "data", None)
    if not isinstance(made, DonatedBuffer) or config.triton.cudagraphs or V.graph.cpp_wrapper or V.graph.aot_mode:
        return False
    return on_gpu(x) and all(isinstance(n, (int, sympy.Integer)) for n in x.get_size())


def _is_not_computed_with() -> bool:
    """Return True if the node that is lowered is returned, or written to by a kernel, and nothing else."""
    from torch._inductor.virtualized import V

    kernels = torch.ops.higher_order.triton_kernel_wrapper_mutation
    return all(user.op == "output" or user.target is kernels for user in V.current_node.users)


def on_gpu(x: Any) -> bool:
    """Return True if a value of Inductor's IR lies on a GPU."""
    return bool(x.get_device().type == "cuda")


def trace_instead(
    overload: Any,
    applies: Callable[[tuple[Any, ...]], bool],
    launcher: Callable[..., Any],
    refusal: type[Exception],
    library: Any,
) -> None:
    """Let AOTAutograd trace ``launcher`` where a call of ``overload`` has operands to which it ``applies``; where the
    launcher raises ``refusal``, the call stays.

    Gone: raises at import of the op."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    parameters = overload._schema.arguments

    def decompose(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        operands = (*args, *(kwargs.get(a.name, a.default_value) for a in parameters[len(args) :]))
        if applies(operands):
            try:
                with mode:
                    return launcher(*operands)
            except refusal:  # what was traced so far is dead code
                pass
        return mode.__torch_dispatch__(func, types, args, kwargs)

    torch.library.register_torch_dispatch(overload, FunctionalTensorMode, decompose, lib=library)
