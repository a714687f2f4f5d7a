"""``gelu(gate) · up`` with the exact, the tanh and the quick GELU: formulas in ``lib/glu``."""

import torch

from fx_fusion.kernels.lib.glu import glu_bwd, glu_fwd
from fx_fusion.ops.fused_op import fused_op

geglu = fused_op(
    "geglu",
    ("(Tensor gate, Tensor up, str kind) -> Tensor y", glu_fwd),
    (
        "(Tensor dy, Tensor gate, Tensor up, str kind, bool[] needs) -> (Tensor dgate, Tensor dup)",
        lambda dy, gate, up, kind, needs: glu_bwd(dy, gate, up, kind),
    ),
    fake=lambda gate, up, kind: torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
    grads=("gate", "up"),
    cheap=True,
)
