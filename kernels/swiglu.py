"""``silu(gate) · up``: formulas, shapes, dtypes and traffic in ``lib/glu``."""

import torch

from fx_fusion.kernels.lib.glu import glu_bwd, glu_fwd
from fx_fusion.ops.fused_op import fused_op

swiglu = fused_op(
    "swiglu",
    ("(Tensor gate, Tensor up) -> Tensor y", lambda gate, up: glu_fwd(gate, up, "silu")),
    (
        "(Tensor dy, Tensor gate, Tensor up, bool[] needs) -> (Tensor dgate, Tensor dup)",
        lambda dy, gate, up, needs: glu_bwd(dy, gate, up, "silu"),
    ),
    fake=lambda gate, up: torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
    grads=("gate", "up"),
    cheap=True,
)
