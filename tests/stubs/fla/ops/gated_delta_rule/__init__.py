"""The gated delta rule."""

from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
