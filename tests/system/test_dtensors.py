"""Two CPU processes: RoPE and embeddings of DTensors, where every activation is one, as in plans without local outputs."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import worst_of
from tests.ranks import on_ranks, whole

V, D = 257, 16  # rows of the table, columns of a head; two ranks do not divide the first


class Attention(torch.nn.Module):
    """An embedding, rotated queries and keys, attention and its products."""

    def __init__(self, style, padding):
        super().__init__()
        torch.manual_seed(0)
        self.style = style
        self.table = torch.nn.Embedding(V, 64, padding_idx=padding)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(64, n, bias=False) for n in (64, 64, 64, 64))

    def rotated(self, x, cos, sin):
        if self.style == "pairs":  # a result that is contiguous, however x lies
            turned = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        else:
            turned = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
        return x * cos + turned * sin

    def forward(self, ids, cos, sin):
        x = self.table(ids)
        q, k, v = (f(x).view(*ids.shape, -1, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        y = F.softmax(q @ k.transpose(2, 3), -1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


SETUPS = {  # how the table lies, whether the ids lie on the ranks by rows, the rotation, padding_idx
    "rows of the table": ("rows", False, "halves", None),
    "rows of the table, padding": ("rows", False, "pairs", 200),
    "columns of the table": ("columns", False, "halves", 3),
    "ids": (None, True, "pairs", 3),
    "nothing": (None, False, "halves", None),
}


def build(setup):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    cut, by_rows, style, padding = SETUPS[setup]
    mesh, model = init_device_mesh("cpu", (2,)), Attention(style, padding)
    ids = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[0, 3:6] = 200
    tables = torch.randn(2, 1, 1, 12, D, generator=torch.Generator().manual_seed(2))
    cos, sin = (distribute_tensor(t, mesh, [Replicate()]) for t in tables)
    if by_rows:  # every parameter whole on each rank, batches on the ranks
        plan = {}
        for name, p in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(distribute_tensor(p.data, mesh, [Replicate()])))
    else:
        columns = ColwiseParallel(use_local_output=False)
        rows = RowwiseParallel(use_local_output=False)
        plan = {"q": columns, "k": columns, "v": columns, "o": rows}
        cuts = {"rows": RowwiseParallel, "columns": ColwiseParallel}
        if cut:
            # Its result plain: torch can't turn a gradient that is a sum into the masked sum that the rows are.
            plan["table"] = cuts[cut](input_layouts=Replicate(), output_layouts=Replicate())
        else:
            weight = distribute_tensor(model.table.weight.data, mesh, [Replicate()])
            model.table.weight = torch.nn.Parameter(weight)
    ids = ids if cut else distribute_tensor(ids, mesh, [Shard(0) if by_rows else Replicate()])
    return parallelize_module(model, mesh, plan) if plan else model, (ids, cos, sin)


def step(setup, how):
    import fx_fusion

    torch._dynamo.reset()
    model, inputs = build(setup)
    with fx_fusion.recording() as report:
        y = (torch.compile(model, **how) if how else model)(*inputs)
        loss = (y * y).sum()
        (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).backward()
    grads = {n: whole(p.grad) for n, p in model.named_parameters()}
    placements = {n: (str(p.grad.placements), str(p.placements)) for n, p in model.named_parameters()}
    return {"y": whole(y).detach(), **grads}, placements, report


def alone(setup):
    """The same in one process."""
    _, _, style, padding = SETUPS[setup]
    model = Attention(style, padding)
    _, (ids, cos, sin) = build(setup)
    y = model(*(whole(t) for t in (ids, cos, sin)))
    (y * y).sum().backward()
    return {"y": y.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def on_one_rank(rank):
    from fx_fusion.testing import rewriting_backend

    options = {"select": "always", "strict": True}
    found = {}
    for setup in SETUPS:
        eager, placements, _ = step(setup, None)
        for name, how in (
            ("rewritten", {"backend": rewriting_backend()}),
            ("inductor", {"backend": "fx_fusion", "options": options}),
        ):
            ours, our_placements, report = step(setup, how)
            scale = {n: t.abs().max().item() for n, t in eager.items()}
            errors = {n: (ours[n] - t).abs().max().item() / scale[n] for n, t in eager.items()}
            errors |= {f"{n}, alone": (ours[n] - t).abs().max().item() / scale[n] for n, t in alone(setup).items()}
            fused = sorted(s.fusion for s in report.sites if s.status == "fused")
            fallbacks = [g.fallback for g in report.graphs if g.fallback]
            found[setup, name] = errors, placements, our_placements, fused, fallbacks, str(report)
    return found


@pytest.fixture(scope="module")
def found():
    return on_ranks(on_one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["rewritten", "inductor"])
@pytest.mark.parametrize("setup", SETUPS)
def test_rotations_and_embeddings_of_dtensors(setup, backend, found):
    for of_rank in found.values():
        errors, placements, our_placements, fused, fallbacks, said = of_rank[setup, backend]
        assert not fallbacks
        assert fused == ["embedding", "rope"], said
        assert worst_of(errors.values()) < 2e-5, errors
        for name, (lies, parameter) in our_placements.items():  # eager gathers the gradient of a table cut by rows
            assert lies in (placements[name][0], parameter), f"{name}: {lies}, in eager {placements[name][0]}"


def ids_and_table_by_rows(rank):
    """Return what is not legal says why."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import fx_fusion
    from fx_fusion.testing import rewriting_backend

    mesh = init_device_mesh("cpu", (2,))
    table = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]).requires_grad_()
    ids = distribute_tensor(torch.arange(8).view(2, 4), mesh, [Shard(0)])
    with fx_fusion.recording() as report:
        y = torch.compile(lambda: F.embedding(ids, table), backend=rewriting_backend())()
    assert torch.equal(whole(y), whole(table)[whole(ids)])
    return [(s.fusion, s.status, s.reason) for s in report.sites]


def test_ids_and_table_on_the_same_ranks():
    for sites in on_ranks(ids_and_table_by_rows).values():
        assert [(fusion, status) for fusion, status, _ in sites] == [("embedding", "near")]
        assert "the ids lie as S(0) where the table lies as S(0)" in sites[0][2]


def one_key_head_for_two_ranks(rank):
    """torch gives rotated keys to both ranks then, where the queries lie on one each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import fx_fusion
    from fx_fusion.testing import rewriting_backend

    def rotate(q, k, cos, sin):
        def rotated(x):
            return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

        return rotated(q), rotated(k)

    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(1)
    tensors = [torch.randn(2, heads, 12, D, generator=generator) for heads in (4, 1)]
    tables = [torch.randn(1, 1, 12, D, generator=generator) for _ in range(2)]
    q, k = (distribute_tensor(t, mesh, [Shard(1)]) for t in tensors)
    cos, sin = (distribute_tensor(t, mesh, [Replicate()]) for t in tables)
    with fx_fusion.recording() as report:
        made = torch.compile(rotate, backend=rewriting_backend())(q, k, cos, sin)
    errors = [(whole(a) - b).abs().max().item() for a, b in zip(made, rotate(*tensors, *tables), strict=True)]
    return errors, sorted(s.status for s in report.sites if s.fusion == "rope")


def test_queries_are_fused_where_keys_lie_otherwise():
    for errors, sites in on_ranks(one_key_head_for_two_ranks).values():
        assert worst_of(errors) < 1e-5
        assert sites == ["declined", "fused"]


def rows_that_are_read_before_they_are_summed(rank):
    """As Gemma scales them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import fx_fusion
    from fx_fusion.testing import rewriting_backend

    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(1)
    plain, scale = torch.randn(V, 8, generator=generator), torch.tensor(3.0)
    table = torch.nn.Parameter(distribute_tensor(plain, mesh, [Shard(0)]))
    ids = torch.randint(V, (2, 12), generator=generator)
    spread = distribute_tensor(ids, mesh, [Replicate()])

    def scaled():
        return (F.embedding(spread, table) * scale).to_local()

    with fx_fusion.recording() as report:
        rows = torch.compile(scaled, backend=rewriting_backend())()
    torch.testing.assert_close(rows, F.embedding(ids, plain) * 3)
    return [(s.fusion, s.status, s.reason) for s in report.sites]


def test_rows_that_are_read_before_they_are_summed():
    for sites in on_ranks(rows_that_are_read_before_they_are_summed).values():
        assert [(fusion, status) for fusion, status, _ in sites] == [("embedding", "near")]
        assert "not summed yet where mul reads them" in sites[0][2], sites
