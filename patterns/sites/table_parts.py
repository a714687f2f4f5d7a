"""Embeddings of which the table or the ids are DTensors: which rows a rank looks up, and how they lie over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fx_fusion.graph.terms import example
from fx_fusion.graph.walk import NotThis
from fx_fusion.patterns.sites.shards import is_call


@dataclass(frozen=True)
class TableParts:
    """The lookup of a rank in its part of a table.

    Attributes:
        gradients: how the gradients of ``ids`` (none) and of ``weight`` lie over the mesh.
        rows: how the rows that come out lie: sharded as the ids, or along the columns, or a sum that waits.
        summed: the ``redistribute`` that sums them, where they wait: another op may not read them as they are here, since
            torch's rows wait in a way of their own, which it turns into whole rows first.
        first: the first of all rows of the table that is this rank's.
        own: how many of them are; None where all are: an id of another rank's row adds nothing to the sum.
    """

    gradients: dict[str, tuple[Any, ...]]
    rows: tuple[Any, ...]
    first: int = 0
    own: int | None = None
    summed: fx.Node | None = None


def table_parts(node: fx.Node, ids: fx.Node, weight: fx.Node) -> TableParts | None:
    """Return the lookup of an embedding ``node``; None where both are plain tensors. Raises NotThis where a rank's part of
    the operands does not give its part of the result."""
    table, indices = example(weight), example(ids)
    if not hasattr(table, "placements") and not hasattr(indices, "placements"):
        return None
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not hasattr(table, "placements") or not hasattr(indices, "placements"):
        raise NotThis(node, "one of ids and table is a DTensor, the other a plain tensor")
    mesh = table.device_mesh
    if indices.device_mesh != mesh:
        raise NotThis(node, "ids and table lie on several meshes")
    gradient: list[Any] = []
    rows: list[Any] = []
    cut: int | None = None  # the dim of the mesh along which the table's rows lie
    for i, (of_ids, of_table) in enumerate(zip(indices.placements, table.placements, strict=True)):
        if type(of_ids) is Shard and type(of_table) is Replicate:
            gradient.append(Partial())
            rows.append(Shard(of_ids.dim % indices.dim()))
        elif type(of_ids) is Replicate and type(of_table) is Replicate:
            gradient.append(Replicate())
            rows.append(Replicate())
        elif type(of_ids) is Replicate and type(of_table) is Shard and of_table.dim % 2 == 1:
            gradient.append(Shard(1))
            rows.append(Shard(indices.dim()))
        elif type(of_ids) is Replicate and type(of_table) is Shard and cut is None:
            cut = i
            gradient.append(Shard(0))
            rows.append(Partial())
        else:
            raise NotThis(node, f"the ids lie as {of_ids} where the table lies as {of_table}")
    gradients = {"ids": tuple(Replicate() for _ in rows), "weight": tuple(gradient)}
    if cut is None:
        return TableParts(gradients, tuple(rows))
    total = table.shape[0]
    if not isinstance(total, int):
        raise NotThis(node, "the number of the table's rows, which lie on several ranks, changes between calls")
    most = -(-total // mesh.size(cut))
    first = min(most * mesh.get_local_rank(cut), total)
    if first == total:
        raise NotThis(node, f"{total} rows leave one of {mesh.size(cut)} ranks without any")
    readers = list(node.users)
    if len(readers) != 1 or not is_call(readers[0], "redistribute"):
        names = ", ".join(reader.name for reader in readers)
        raise NotThis(node, f"the ranks' rows are not summed yet where {names} reads them; expected one redistribute")
    return TableParts(gradients, tuple(rows), first, min(most, total - first), readers[0])
