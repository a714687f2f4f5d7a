"""DTensors as inputs: which placements are fused part by part, and what is said of the others."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fx_fusion.errors import DeclarationError
from fx_fusion.fusion.registry import all_fusions
from tests.helpers import reasons, rewritten

FUSIONS = {fusion.name: fusion for fusion in all_fusions()}


@pytest.fixture(scope="module")
def mesh():
    """Two ranks, of which this process is one and the other is made up."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def norm(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def gated(gate, up):
    return torch.nn.functional.silu(gate) * up


def lying(mesh, shape, placement):
    local = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return DTensor.from_local(local, mesh, [placement], run_check=False)


@pytest.mark.parametrize(
    ("x", "fused"),
    [(Shard(0), True), (Shard(1), True), (Replicate(), True), (Shard(2), False), (Shard(-1), False), (Partial(), False)],
)
def test_a_norm_of_rows_on_two_ranks(mesh, x, fused):
    given = lying(mesh, (2, 4, 8), x), lying(mesh, (8,), Shard(0) if x in (Shard(2), Shard(-1)) else Replicate())
    result, report = rewritten(norm, *given)
    assert report.count("rms_norm") == int(fused), str(report)
    if not fused and x != Partial():  # DTensor sums a Partial itself, before the graph goes on
        assert "is sharded along dim " in reasons(report, "rms_norm")
    expected = norm(*given)
    assert result.placements == expected.placements
    torch.testing.assert_close(result.to_local(), expected.to_local())


@pytest.mark.parametrize(
    ("gate", "up", "fused"), [(Shard(2), Shard(2), True), (Shard(1), Shard(1), True), (Shard(1), Replicate(), False)]
)
def test_a_gate_in_parts(mesh, gate, up, fused):
    shape = (2, 4, 8)
    given = lying(mesh, shape, gate), lying(mesh, shape if up != Replicate() else (2, 8, 8), up)
    result, report = rewritten(gated, *given)
    assert report.count("swiglu") == int(fused), str(report)
    if not fused:
        assert report.count("swish") == 1, "of the gate alone, which lies in parts"
    torch.testing.assert_close(result.to_local(), gated(*given).to_local())


def test_plain_tensors_and_dtensors_are_not_mixed(mesh):
    from fx_fusion.fusion.placements import why_not_in_parts

    class Match:
        inputs: dict = {}  # noqa: RUF012
        others: dict = {}  # noqa: RUF012

    graph = torch.fx.Graph()
    for name, tensor in (("x", lying(mesh, (2, 8), Shard(0))), ("weight", torch.randn(8))):
        Match.inputs[name] = graph.placeholder(name)
        Match.inputs[name].meta["example_value"] = tensor
    assert why_not_in_parts(FUSIONS["rms_norm"], Match) == "weight is a plain tensor, and others are DTensors"
    assert why_not_in_parts(FUSIONS["embedding"], Match) is None, "legality says so"


def test_parallel_names_dims():
    import dataclasses

    with pytest.raises(DeclarationError, match="parallel names rows"):
        dataclasses.replace(FUSIONS["rms_norm"], parallel=("rows",))
