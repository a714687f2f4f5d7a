"""Define what ``ChunkGatedDeltaRuleFunction`` of fla 0.6 takes, saves and returns, computed token by token."""

import torch


def token_by_token(q, k, v, g, beta, scale, state=None):
    """Return y like v and the last state."""
    several = v.shape[2] // q.shape[2]
    q, k = (x.float().repeat_interleave(several, 2) for x in (q, k))
    v, g, beta = v.float(), g.float(), beta.float()
    b, t, heads, n = v.shape
    state = v.new_zeros(b, heads, k.shape[3], n) if state is None else state
    made = []
    for now in range(t):
        decay = g[:, now].exp()
        state = state * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
        change = beta[:, now, :, None] * (v[:, now] - (state * k[:, now, ..., None]).sum(-2))
        state = state + k[:, now, ..., None] * change[..., None, :]
        made.append((state * q[:, now, ..., None]).sum(-2) * scale)
    return torch.stack(made, 1), state


class ChunkGatedDeltaRuleFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first=False, cu_seqlens=None,
        cu_seqlens_cpu=None, chunk_indices=None, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
        dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, cp_context=None, chunk_size=64,
    ):  # fmt: skip
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        q_rstd = k_rstd = None
        if use_qk_l2norm_in_kernel:
            q_rstd, k_rstd = ((x.float().square().sum(-1) + 1e-6).rsqrt() for x in (q, k))
            q, k = (x * r[..., None].to(x.dtype) for x, r in ((q, q_rstd), (k, k_rstd)))
        y, state = token_by_token(q, k, v, g, beta, scale, initial_state)
        inverse = k.new_zeros(*v.shape[:3], chunk_size)
        ctx.save_for_backward(
            q, q_rstd, k, k_rstd, v, g.float().clone(), beta, beta, inverse, initial_state, cu_seqlens, chunk_indices, None, None, None
        )
        ctx.scale, ctx.use_qk_l2norm_in_kernel = scale, use_qk_l2norm_in_kernel
        return y.to(q.dtype), state if output_final_state else None

    @staticmethod
    def backward(ctx, dy, dstate):
        q, q_rstd, k, k_rstd, v, g, _, beta, _, initial_state, *_ = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        with torch.enable_grad():
            y, state = token_by_token(*leaves, ctx.scale, initial_state)
            total = (y * dy).sum() + (0 if dstate is None else (state * dstate).sum())
            gradients = list(torch.autograd.grad(total, leaves))
        if ctx.use_qk_l2norm_in_kernel:
            for i, (x, r) in enumerate(((q, q_rstd), (k, k_rstd))):
                d = gradients[i]
                gradients[i] = ((d - (d * x).sum(-1, keepdim=True) * x) * r[..., None]).to(x.dtype)
        return *gradients, *(None,) * 15


@torch.compiler.disable
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"{v.shape[2]} heads of values for {q.shape[2]} heads")
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    return ChunkGatedDeltaRuleFunction.apply(
        q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu, chunk_indices,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip


@torch.compiler.disable
def fused_recurrent_gated_delta_rule(*args, **kwargs):
    raise NotImplementedError
