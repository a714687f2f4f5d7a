"""Losses over parts of the rows of one linear layer's logits, inside of a graph: each part has logits of its own."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from tests.helpers import rewriting_backend

B, L, H, V = 4, 9, 16, 4100
generator = torch.Generator().manual_seed(0)
x = torch.randn(B, L, H, generator=generator)
head = torch.randn(V, H, generator=generator) / 4
bias = torch.randn(V, generator=generator)
ids = torch.randint(0, V, (B, L), generator=generator)


def each(parts, targets):
    return sum(F.cross_entropy(p.flatten(0, -2).float(), t.flatten(), reduction="sum") for p, t in zip(parts, targets, strict=True))


def entropies(parts):
    return sum(-(p.softmax(-1) * p.log_softmax(-1)).sum() for p in parts)


def overlapping(z):
    return each([z[:, :6], z[:, 3:]], [ids[:, :6], ids[:, 3:]])


def other_class(z):
    return each([z[:, :3], z[:, 3:, :4000]], [ids[:, :3], ids[:, 3:] % 4000])


def written_where_a_reshape_copies(z):
    first, second = z[:, :3], z[:, 3:]
    rows = first.reshape(-1, V)
    loss = F.cross_entropy(rows, ids[:, :3].flatten())
    rows.mul_(0.0)
    return loss + each([first, second], [ids[:, :3], ids[:, 3:]])


def by_strides(z):
    first, second = z.split([3, 6], 1)
    return each([first, second], [ids[:, :3], ids[:, 3:]]) + torch.as_strided(first, (B, V), (L * V, 1)).square().mean()


def written(z):
    parts = z.chunk(2, 1)
    first = parts[0].sum() * 0
    with torch.no_grad():
        z.zero_()
    return first + each(parts, ids.chunk(2, 1))


FUSED = {
    "chunks": lambda z: each(z.chunk(3, 1), ids.chunk(3, 1)),
    "chunks of shifted logits": lambda z: each(z[:, :-1].chunk(4, dim=1), ids[:, 1:].chunk(4, 1)),
    "chunks, from the last dim": lambda z: each(z.chunk(3, -2), ids.chunk(3, 1)),
    "in float32": lambda z: each(z.float().split(5, 1), ids.split(5, 1)),
    "unequal": lambda z: each(torch.split(z, [2, 7], dim=1), ids.split([2, 7], 1)),
    "sequences": lambda z: each(list(z), list(ids)),
    "a sequence at a time": lambda z: each([z[i] for i in range(B)], ids),
    "unbind": lambda z: each(z.unbind(), ids.unbind()),
    "narrow and select": lambda z: each([z.narrow(0, 0, 2), z.select(0, 3)], [ids[:2], ids[3]]),
    "other losses": lambda z: entropies(z.chunk(3, 1)),
    "two losses of a part": lambda z: each(z.chunk(3, 1), ids.chunk(3, 1)) + entropies(z.chunk(3, 1)[:1]),
}
LEFT = {
    "read whole too": lambda z: each(z.chunk(3, 1), ids.chunk(3, 1)) + z.square().mean(),
    "rows that overlap": overlapping,
    "along the classes": lambda z: sum(p.square().sum() for p in z.split(2050, -1)),
    "fewer classes of a part": other_class,
    "a write to what a reshape may have copied": written_where_a_reshape_copies,
    "by strides": by_strides,
}


@pytest.mark.parametrize("name", [*FUSED, *LEFT])
def test_losses_of_parts(name):
    loss = (FUSED | LEFT)[name]

    def step(x, head, bias):
        return loss(F.linear(x, head, bias))

    leaves = [[t.clone().requires_grad_() for t in (x, head, bias)] for _ in range(2)]
    torch._dynamo.reset()
    with fx_fusion.recording() as report:
        ours = torch.compile(step, backend=rewriting_backend(select="always"))(*leaves[0])
    theirs = step(*leaves[1])
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    for a, b in zip(*leaves, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    count = sum(site.status == "fused" and site.fusion.startswith("linear_") for site in report.sites)
    assert (count > 1) is (name in FUSED), str(report)
    assert [graph.apart for graph in report.graphs] == [int(name in FUSED)]
    assert ("run once for each part" in str(report)) is (name in FUSED)


def test_nothing_of_the_graph_changes_where_no_part_is_fused():
    """Parts whose losses read other rows too: one product of all rows, as it was written."""

    def step(x, head):
        return sum((p / p.sum(1, keepdim=True)).square().sum() for p in F.linear(x, head).chunk(3, 1))

    torch._dynamo.reset()
    with fx_fusion.recording() as report:
        torch.compile(step, backend=rewriting_backend(select="always"))(x, head)
    assert report.graphs[0].apart == 0
    assert report.graphs[0].nodes_after == report.graphs[0].nodes_before


def test_a_write_to_the_logits_keeps_them_together():
    def step(x, head):
        return written(F.linear(x, head))

    torch._dynamo.reset()
    with fx_fusion.recording() as report:
        found = torch.compile(step, backend=rewriting_backend(select="always"))(x, head)
    torch.testing.assert_close(found, step(x, head))
    assert report.graphs[0].apart == 0


def test_a_layer_of_few_classes_or_many_parts_is_left():
    def few(x, head):
        return entropies(F.linear(x, head[:2000]).chunk(3, 1))

    def many(x, head):
        return entropies(F.linear(x.repeat(20, 1, 1), head).unbind())

    for step in (few, many):
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            torch.compile(step, backend=rewriting_backend(select="always"))(x, head)
        assert report.graphs[0].apart == 0


def test_parts_that_are_returned_share_their_memory():
    def step(x, head):
        first, second = F.linear(x, head).split([3, 6], 1)
        return each([first, second], [ids[:, :3], ids[:, 3:]]), first, second.transpose(0, 1)

    found = []
    for call in (step, torch.compile(step, backend=rewriting_backend(select="always", defer_outputs=False))):
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            found.append(call(x, head))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert report.graphs[0].apart == 0


def test_sites_of_parts_are_verified():
    def step(x, head):
        return each(F.linear(x, head).chunk(3, 1), ids.chunk(3, 1))

    torch._dynamo.reset()
    leaves = [t.clone().requires_grad_() for t in (x, head)]
    with fx_fusion.recording() as report:
        call = torch.compile(step, backend=rewriting_backend(select="always", verify="sample"))
        for _ in range(3):
            call(*leaves).backward()
    assert "verified in" in str(report), str(report)
    assert "not verified" not in str(report), str(report)
