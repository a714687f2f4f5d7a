"""Gather what a package imports that brings fusions of its own (docs/plugins.md).

    from fx_fusion.plugin import Fusion, case, check, fused_op, launch, register

A plug-in is tried like a built-in fusion: ``explain``, options, the report, the compile caches and ``bench.run`` know it. It
is there when ``register(FUSION)`` has run, or always where its package names it as an entry point of the group
``fx_fusion.fusions``. Declaration and kernel may stand in one file.
"""

from fx_fusion.checking import check
from fx_fusion.errors import DeclarationError
from fx_fusion.frontend import FrontEnd, Substitute, register_front_end
from fx_fusion.fusion.declaration import Case, Fusion, case
from fx_fusion.fusion.guards import unlike, wrong_dtype
from fx_fusion.fusion.registry import register
from fx_fusion.graph.size_hints import too_small
from fx_fusion.kernels.lib.column_sums import column_sums
from fx_fusion.kernels.lib.device import multiprocessors
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.lib.rows import as_rows
from fx_fusion.ops.fused_op import FusedOp, fused_op
from fx_fusion.ops.launch import launch

__all__ = [
    "Case", "DeclarationError", "FrontEnd", "FusedOp", "Fusion", "Plan", "Substitute", "as_rows", "case", "cdiv", "check",
    "column_sums", "fused_op", "launch", "multiprocessors", "next_power_of_2", "planner", "register", "register_front_end",
    "too_small", "unlike", "wrong_dtype",
]  # fmt: skip
