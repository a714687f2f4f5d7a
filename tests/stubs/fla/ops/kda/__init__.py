"""Kimi delta attention."""

from fla.ops.kda.chunk import chunk_kda

__all__ = ["chunk_kda"]
