"""Compute what ``ChunkKDAFunction`` of fla 0.6 takes, saves and returns, token by token."""

import torch

from fla.ops.gated_delta_rule.chunk import ChunkGatedDeltaRuleFunction


class ChunkKDAFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state=False, use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, lower_bound=None, chunk_size=64, disable_recompute=False,
        return_intermediate_states=False, cp_context=None, use_graph=False, max_num_seqs=None,
    ):  # fmt: skip
        class Inner:
            def save_for_backward(self, *tensors):
                self.saved = tensors

        inner = Inner()
        results = ChunkGatedDeltaRuleFunction.forward(
            inner, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        q, q_rstd, k, k_rstd, v, sums, _, beta, inverse, *_ = inner.saved
        ctx.save_for_backward(
            q, q_rstd, k, k_rstd, v, sums, g, beta, beta, A_log, dt_bias, inverse, inverse.clone(), *(None,) * 6,
            initial_state, cu_seqlens, None, None,
        )  # fmt: skip
        ctx.scale, ctx.use_qk_l2norm_in_kernel = scale, use_qk_l2norm_in_kernel
        return results

    @staticmethod
    def backward(ctx, dy, dstate):
        q, q_rstd, k, k_rstd, v, sums, g, beta, _, _, _, inverse, _, *_, initial_state, _, _, _ = ctx.saved_tensors

        class Inner:
            scale, use_qk_l2norm_in_kernel = ctx.scale, ctx.use_qk_l2norm_in_kernel
            saved_tensors = (q, q_rstd, k, k_rstd, v, sums, beta, beta, inverse, initial_state)

        gradients = ChunkGatedDeltaRuleFunction.backward(Inner, dy, dstate)[:5]
        return *(d.to(x.dtype) for d, x in zip(gradients, (q, k, v, g, beta), strict=True)), *(None,) * 20


@torch.compiler.disable
def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"{v.shape[2]} heads of values for {q.shape[2]} heads")
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    return ChunkKDAFunction.apply(
        q, k, v, g, beta, None, None, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
    )  # fmt: skip
