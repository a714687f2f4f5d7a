"""flash-linear-attention's gated delta rule: Qwen3.5, Qwen3-Next, OLMo hybrid and others, where fla is installed.

fla hides its entry points from Dynamo, so each layer ends a graph. Here an op around fla's own ``autograd.Function`` stands
for the call: the same kernels, bit for bit, saving what it saves. What the op does not take is left to fla, and ends the
graph as before: states that are given, context parallelism, gates in the kernel.

Source: fla/ops/gated_delta_rule/chunk.py, flash-linear-attention 0.5.1 to 0.6.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fx_fusion.frontend import FrontEnd, Substitute
from fx_fusion.ops.library import plain_op, register_autograd

_CHUNK = 64


class _Context:
    """The values that fla's ``autograd.Function`` saves in its forward and reads in its backward."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def __init__(self, **attributes: Any):
        self.__dict__.update(attributes)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def _function() -> Any:
    from fla.ops.gated_delta_rule.chunk import ChunkGatedDeltaRuleFunction

    return ChunkGatedDeltaRuleFunction


def _fwd(q, k, v, g, beta, scale, final, normed, cu_seqlens):
    ctx, none = _Context(), v.new_empty(0)
    y, state = _function().forward(
        ctx, q, k, v, g, beta, scale=scale, initial_state=None, output_final_state=final, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=normed,
    )  # fmt: skip
    saved_q, q_rstd, saved_k, k_rstd, _, sums, _, _, inverse, *_ = ctx.saved_tensors
    of_norms = (saved_q, q_rstd, saved_k, k_rstd) if normed else (none.clone() for _ in range(4))
    return y, none if state is None else state, *of_norms, sums, inverse


def _fake(q, k, v, g, beta, scale, final, normed, cu_seqlens):
    b, t, heads, n = v.shape
    sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    none, numbers = v.new_empty(0), {"dtype": torch.float32}
    state = v.new_empty((sequences, heads, k.shape[3], n), **numbers) if final else none
    of_norms = [of for x in (q, k) for of in (x.new_empty(x.shape), x.new_empty(x.shape[:3], **numbers))]
    of_norms = of_norms if normed else [v.new_empty(0) for _ in range(4)]
    sums, inverse = g.new_empty(g.shape, **numbers), k.new_empty((b, t, heads, _CHUNK))
    return v.new_empty(v.shape, dtype=q.dtype), state, *of_norms, sums, inverse


def _bwd(dy, dstate, q, k, v, g, beta, of_norms, sums, inverse, scale, normed, cu_seqlens):
    indices = None
    if cu_seqlens is not None:
        from fla.ops.utils.index import prepare_chunk_indices

        indices = prepare_chunk_indices(cu_seqlens, _CHUNK)
    ctx = _Context(
        scale=scale, chunk_size=_CHUNK, use_qk_l2norm_in_kernel=normed, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, cp_context=None, state_v_first=False, use_gate_in_kernel=False,
        _fwd_used_autocast=False, _dtype=torch.get_autocast_dtype(v.device.type),
    )  # fmt: skip
    q, q_rstd, k, k_rstd = of_norms if normed else (q.contiguous(), None, k.contiguous(), None)
    v, beta = v.contiguous(), beta.contiguous()
    ctx.save_for_backward(q, q_rstd, k, k_rstd, v, sums, beta, beta, inverse, None, cu_seqlens, indices, None, None, None)
    return _function().backward(ctx, dy, dstate)[:5]


def _fake_bwd(dy, dstate, q, k, v, g, beta, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), g.new_empty(g.shape), beta.new_empty(beta.shape)


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_op = plain_op(
    "fla_gated_delta_rule",
    f"({_OPERANDS}, float scale, bool final, bool normed, Tensor? cu_seqlens)"
    " -> (Tensor y, Tensor state, Tensor saved_q, Tensor q_rstd, Tensor saved_k, Tensor k_rstd, Tensor sums,"
    " Tensor inverse)",
    _fwd,
    _fake,
)
_op_bwd = plain_op(
    "fla_gated_delta_rule_bwd",
    f"(Tensor dy, Tensor? dstate, {_OPERANDS}, Tensor[] of_norms, Tensor sums, Tensor inverse, float scale, bool normed,"
    " Tensor? cu_seqlens) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta)",
    _bwd,
    _fake_bwd,
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *operands, ctx.scale, ctx.final, ctx.normed, cu_seqlens = inputs
    ctx.save_for_backward(*operands, *output[2:], cu_seqlens)


def _backward(ctx: Any, dy: Tensor, dstate: Tensor, *_: Any) -> Any:
    q, k, v, g, beta, *of_norms, sums, inverse, cu_seqlens = ctx.saved_tensors
    dstate = dstate if ctx.final else None
    gradients = _op_bwd(dy, dstate, q, k, v, g, beta, of_norms, sums, inverse, ctx.scale, ctx.normed, cu_seqlens)
    return *gradients, None, None, None, None


register_autograd("fla_gated_delta_rule", _backward, _save)


@torch.compiler.disable
def _by_fla(*operands: Any, **named: Any) -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as original

    return original(*operands, **named)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand for fla's function of this name.

    q, k: (b, t, heads, k); v: (b, t, value heads, v); g, beta: (b, t, value heads); cu_seqlens: (sequences + 1).
    Returns y like v, and the last states (sequences, value heads, k, v) in float32, or None."""
    grouped = q.shape[2] == k.shape[2] and v.shape[2] % q.shape[2] == 0 and (cu_seqlens is None or q.shape[0] == 1)
    if not grouped or initial_state is not None or any(x is not None and x is not False for x in others.values()):
        return _by_fla(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
            **others,
        )  # fmt: skip
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    y, state, *_ = torch.ops.fx_fusion.fla_gated_delta_rule(
        q, k, v, g, beta, scale, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )
    return y, state if output_final_state else None


SOURCES = ("fla.ops.gated_delta_rule.chunk",)
KNOWN = {"0b059519e7f36054": "0.5.1", "3bab739a601e6830": "0.5.2", "28fb34e56e50bcbd": "0.6.0"}
FRONT_END = FrontEnd(
    library="flash-linear-attention",
    module="fla.ops.gated_delta_rule",
    substitutes=(
        Substitute(
            "fla.ops.gated_delta_rule:chunk_gated_delta_rule", chunk_gated_delta_rule, SOURCES, KNOWN, unless="flash_qla"
        ),
    ),
    written_out=("torch_chunk_gated_delta_rule",),
)
