"""The same inputs give the same bits, from call to call and under ``torch.use_deterministic_algorithms``."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fx_fusion.checking import calls_of
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.kernels.float8.quantize import quantize_columns, quantize_rows
from fx_fusion.kernels.float8.turn import turn_rows
from fx_fusion.ops import library
from fx_fusion.ops.on_cpu import kernels_on_cpu

KERNELS = Path(__file__).parents[2] / "kernels"
WITH_OPS = [f for f in all_fusions() if f.name in library.names()]


@pytest.fixture
def deterministic_algorithms():
    """Memory that nobody wrote to is NaN, or the largest integer, as long as that is asked for."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


def bits(op, args):
    """Return what a call returns and what it wrote to, as bytes. Its arguments are copies."""
    args = tree_map_only(Tensor, lambda t: t.detach().clone(), args)
    made = [t for t in tree_leaves((op(*args), args)) if isinstance(t, Tensor)]
    return [t.contiguous().flatten().view(torch.uint8) for t in made]


def check_same_bits(op, args, ask):
    first, again = bits(op, args), bits(op, args)
    ask()
    asked = bits(op, args)
    torch.use_deterministic_algorithms(False)
    for a, b, c in zip(first, again, asked, strict=True):
        assert torch.equal(a, b), f"{op}: another result in the second call"
        assert torch.equal(a, c), f"{op}: reads memory that nobody wrote to, or computes otherwise when asked"


@pytest.mark.kernel
@pytest.mark.parametrize("ran", ["kernel", "reference"])
@pytest.mark.parametrize(
    "fusion",
    [pytest.param(f, marks=pytest.mark.slow if f.name in ("token_log_probs", "linear_cross_entropy") else ()) for f in WITH_OPS],
    ids=lambda fusion: fusion.name,
)
def test_ops(fusion, ran, device, deterministic_algorithms):
    """Forward and backward; on a GPU there is the kernel only."""
    if device != "cpu" and ran == "reference":
        pytest.skip("what runs on a CPU")
    with kernels_on_cpu(ran == "kernel"):
        for variant in {0, len(fusion.variants) - 1}:
            calls = calls_of(fusion, variant, device)
            assert calls
            for op, args in calls:
                check_same_bits(op, args, deterministic_algorithms)


@pytest.mark.kernel
@pytest.mark.parametrize("quantize", [quantize_rows, quantize_columns])
def test_quantizers(quantize, device, deterministic_algorithms):
    check_same_bits(quantize, (torch.randn(300, 33, dtype=torch.bfloat16, device=device),), deterministic_algorithms)


@pytest.mark.kernel
def test_turned_rows(device, deterministic_algorithms):
    x, scale = torch.randn(300, 33, device=device), torch.rand(300, 1, device=device) + 0.1
    check_same_bits(turn_rows, (x, scale), deterministic_algorithms)


def test_no_kernel_adds_atomically():
    """The order of atomic additions is another one in every run. A maximum of integers does not depend on it."""
    found = {
        (file.relative_to(KERNELS).as_posix(), node.func.attr)
        for file in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "atomic" in node.func.attr
    }
    assert found == {("float8/quantize.py", "atomic_max")}
