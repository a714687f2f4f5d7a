"""flash-linear-attention's delta rules: Qwen3.5, Qwen3-Next, OLMo hybrid (gated), Kimi Linear (KDA), where fla is installed.

fla hides its entry points from Dynamo, so each layer ends a graph. Here an op around fla's own ``autograd.Function`` stands
for the call: the same kernels, bit for bit, saving what it saves. What the op does not take is left to fla, and ends the
graph as before: states that are given, context parallelism, gates in the kernel.

Source: fla/ops/gated_delta_rule/chunk.py of flash-linear-attention 0.5.1 to 0.6.0, fla/ops/kda/chunk.py of 0.6.0.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Rule:
    """A delta rule: the module and the name of its function, and where it keeps what its forward computes.

    Attributes:
        layout: a word for each tensor that its forward saves: an operand, ``q_rstd`` and ``k_rstd``, ``computed``, or ``-``
            for None.
        squares: how many (b, t, value heads, 64) it computes besides the sums of g, which come first.
        absent: parameters of its forward that have no default and are None here.
    """

    name: str
    module: str
    function: str
    layout: str
    squares: int
    absent: tuple[str, ...] = ()

    def forward(self, q, k, v, g, beta, scale, final, normed, cu_seqlens):
        """Return y, the last states or an empty tensor, and what the backward needs besides the operands."""
        ctx, none = _Context(), v.new_empty(0)
        y, state = self._load().forward(
            ctx, q, k, v, g, beta, scale=scale, initial_state=None, output_final_state=final, cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=normed, **dict.fromkeys(self.absent),
        )  # fmt: skip
        by_word = list(zip(self.layout.split(), ctx.saved_tensors, strict=True))
        wanted = ("q", "q_rstd", "k", "k_rstd", "computed") if normed else ("computed",)
        return y, none if state is None else state, [tensor for word, tensor in by_word if word in wanted]

    def fake(self, q, k, v, g, beta, scale, final, normed, cu_seqlens):
        """Return empty tensors like the results of ``forward``."""
        b, t, heads, n = v.shape
        numbers: dict[str, Any] = {"dtype": torch.float32}
        sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = v.new_empty((sequences, heads, k.shape[3], n), **numbers) if final else v.new_empty(0)
        of_norms = [of for x in (q, k) for of in (x.new_empty(x.shape), x.new_empty(x.shape[:3], **numbers))]
        squares = [k.new_empty((b, t, heads, _CHUNK)) for _ in range(self.squares)]
        kept = [*(of_norms if normed else ()), g.new_empty(g.shape, **numbers), *squares]
        return v.new_empty(v.shape, dtype=q.dtype), state, kept

    def backward(self, dy, dstate, q, k, v, g, beta, kept, scale, normed, cu_seqlens):
        """Return the gradients of the operands."""
        ctx = _Context(
            scale=scale, chunk_size=_CHUNK, use_qk_l2norm_in_kernel=normed, use_beta_sigmoid_in_kernel=False,
            allow_neg_eigval=False, cp_context=None, state_v_first=False, use_gate_in_kernel=False, safe_gate=False,
            lower_bound=None, disable_recompute=False, use_graph=False, _fwd_used_autocast=False,
            _dtype=torch.get_autocast_dtype(v.device.type),
        )  # fmt: skip
        operands = {name: x.contiguous() for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
        if normed:
            operands |= dict(zip(("q", "q_rstd", "k", "k_rstd"), kept[:4], strict=True))
        operands |= {"cu_seqlens": cu_seqlens, "chunk_indices": _indices(cu_seqlens)}
        computed = iter(kept[4:] if normed else kept)
        words = self.layout.split()
        ctx.save_for_backward(*(next(computed) if word == "computed" else operands.get(word) for word in words))
        return self._load().backward(ctx, dy, dstate)[:5]

    def _load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.function)


def _indices(cu_seqlens: Tensor | None) -> Tensor | None:
    if cu_seqlens is None:
        return None
    from fla.ops.utils.index import prepare_chunk_indices

    return prepare_chunk_indices(cu_seqlens, _CHUNK)


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"


def _define(rule: _Rule) -> None:
    """Define the op of a rule, its backward, and the connection of both."""
    plain_op(
        rule.name,
        f"({_OPERANDS}, float scale, bool final, bool normed, Tensor? cu_seqlens)"
        " -> (Tensor y, Tensor state, Tensor[] kept)",
        rule.forward,
        rule.fake,
    )
    bwd = plain_op(
        f"{rule.name}_bwd",
        f"(Tensor dy, Tensor? dstate, {_OPERANDS}, Tensor[] kept, float scale, bool normed, Tensor? cu_seqlens)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta)",
        rule.backward,
        lambda dy, dstate, *operands: tuple(x.new_empty(x.shape) for x in operands[:5]),
    )

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        *operands, ctx.scale, ctx.final, ctx.normed, cu_seqlens = inputs
        ctx.save_for_backward(*operands, *output[2], cu_seqlens)

    def backward(ctx: Any, dy: Tensor, dstate: Tensor, *_: Any) -> Any:
        q, k, v, g, beta, *kept, cu_seqlens = ctx.saved_tensors
        gradients = bwd(
            dy, dstate if ctx.final else None, q, k, v, g, beta, kept, ctx.scale, ctx.normed, cu_seqlens
        )
        return *gradients, None, None, None, None

    register_autograd(rule.name, backward, save)


_define(
    _Rule(
        "fla_gated_delta_rule", "fla.ops.gated_delta_rule.chunk", "ChunkGatedDeltaRuleFunction",
        "q q_rstd k k_rstd v computed beta beta computed - cu_seqlens chunk_indices - - -", 1,
    )
)  # fmt: skip
_define(
    _Rule(
        "fla_kda", "fla.ops.kda.chunk", "ChunkKDAFunction",
        "q q_rstd k k_rstd v computed g beta beta - - computed computed - - - - - - - cu_seqlens chunk_indices -", 2,
        ("A_log", "dt_bias"),
    )
)  # fmt: skip


@torch.compiler.disable
def _by_fla(kda: bool, *operands: Any, **named: Any) -> Any:
    if kda:
        from fla.ops.kda import chunk_kda as original
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as original
    return original(*operands, **named)


def _called(
    kda, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, *more,
    cu_seqlens=None, **others,
):  # fmt: skip
    final, normed = output_final_state, use_qk_l2norm_in_kernel
    grouped = q.shape[2] == k.shape[2] and v.shape[2] % q.shape[2] == 0 and (cu_seqlens is None or q.shape[0] == 1)
    unusual = more or initial_state is not None or any(x is not None and x is not False for x in others.values())
    if not grouped or unusual:
        return _by_fla(
            kda, q, k, v, g, beta, scale, initial_state, final, normed, *more, cu_seqlens=cu_seqlens, **others
        )  # fmt: skip
    op = torch.ops.fx_fusion.fla_kda if kda else torch.ops.fx_fusion.fla_gated_delta_rule
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    y, state, _ = op(q, k, v, g, beta, scale, final, normed, cu_seqlens)
    return y, state if final else None


def chunk_gated_delta_rule(*operands: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """Stand for fla's function of this name.

    q, k: (b, t, heads, k); v: (b, t, value heads, v); g, beta: (b, t, value heads); cu_seqlens: (sequences + 1).
    Returns y like v, and the last states (sequences, value heads, k, v) in float32, or None."""
    return _called(False, *operands, **named)


def chunk_kda(*operands: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """Stand for fla's function of this name: ``chunk_gated_delta_rule`` with a decay for each channel, g: (b, t, value
    heads, k)."""
    return _called(True, *operands, **named)


SOURCES, SOURCES_OF_KDA = ("fla.ops.gated_delta_rule.chunk",), ("fla.ops.kda.chunk",)
KNOWN = {"0b059519e7f36054": "0.5.1", "3bab739a601e6830": "0.5.2", "28fb34e56e50bcbd": "0.6.0"}
KNOWN_OF_KDA = {"f13810036b4055e4": "0.6.0"}
FRONT_END = FrontEnd(
    library="flash-linear-attention",
    module="fla.ops.gated_delta_rule",
    substitutes=(
        Substitute(
            "fla.ops.gated_delta_rule:chunk_gated_delta_rule", chunk_gated_delta_rule, SOURCES, KNOWN, unless="flash_qla"
        ),
        Substitute("fla.ops.kda:chunk_kda", chunk_kda, SOURCES_OF_KDA, KNOWN_OF_KDA, unless="flash_kda"),
    ),
    written_out=("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"),
)
