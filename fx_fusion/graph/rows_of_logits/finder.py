"""Follow the logits of a linear layer along the graph, up to the first ops that mix rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.effects import entered, storages
from fx_fusion.graph.indices import index_of
from fx_fusion.graph.rows_of_logits.hidden import hiding
from fx_fusion.graph.rows_of_logits.reader import Reader, is_elementwise
from fx_fusion.graph.rows_of_logits.values import Opaque, Region, Split, Typed, is_plain_call
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.torch_internals.containers import map_nodes, tree_leaves
from fx_fusion.torch_internals.fakes import fake_mode_of, without_guards, without_tracing_context

# Ops that are linear in the losses of rows, if what they take beside them does not depend on these.
LINEAR = {
    "mul", "div", "neg", "add", "sub", "where", "masked_fill", "to", "float", "type_as", "half", "bfloat16",
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous",
}  # fmt: skip


_BEFORE_A_SELECTION = {"to", "float", "contiguous", "mul", "div", "neg", "exp", "log", "log_softmax", "softmax"}


def region_of(view: View, root: fx.Node, *, may_return: bool = False) -> Region:
    """Return the region of the logits that ``root`` makes. Raises Opaque, with the node that decided.

    A mask that hides rows of all that the region computes is part of it. Other masks and weights of rows are not.

    Args:
        may_return: allow that the graph returns values with classes (``Region.returned``).
    """
    if any(view.name(node) in ("where", "masked_fill") for node in view.graph.nodes):
        try:
            region = _region_with_masks(view, root, may_return)
        except Opaque:
            pass  # without masks it may be another
        else:
            masks = [i.typed.node for i in region.inputs if i.per_row and not i.typed.inner and i.tensor.dtype == torch.bool]
            trained = [i.typed.node for i in region.inputs if i.tensor.requires_grad]
            if hiding(region.body, masks, trained) is not None:
                return region
    return _finder(view, root, may_return, with_masks=False).region


def _region_with_masks(view: View, root: fx.Node, may_return: bool) -> Region:
    """Return a region that goes on behind views which split its rows: masks may be there."""
    finder = _finder(view, root, may_return, with_masks=True)
    while finder.split is not None:
        finder = _finder(view, root, may_return, with_masks=True, splits=(*finder.splits, finder.split))
    return finder.region


def _finder(
    view: View, root: fx.Node, may_return: bool, with_masks: bool, splits: tuple[Split, ...] = ()
) -> _Finder:  # fmt: skip
    """Return the finder of a region whose row axes are as many as views of its logits have."""
    try:
        return _Finder(view, root, may_return, with_masks, splits)
    except Split as split:
        return _finder(view, root, may_return, with_masks, (*splits, split))


class _Finder:
    """Runs the nodes that read the logits, on fake tensors, and sorts them: inside, at the seam, behind it."""

    def __init__(self, view: View, root: fx.Node, may_return: bool, with_masks: bool, splits: tuple[Split, ...]):
        """``splits``: of row axes, one after the other."""
        self.view, self.may_return, self.with_masks, self.splits = view, may_return, with_masks, splits
        self.split: Split | None = None  # the first one at which values without classes leave the region
        self.masks: list[fx.Node] = []  # booleans from outside, equal ones once
        selected = _selection(view, root, may_return)
        logits = _rows_of(example(root), selected[0]) if selected else example(root)
        axes = _axes(logits, splits)
        self.reader = Reader(logits, axes)
        rows = tuple(itertools.chain.from_iterable(axes))
        of = selected[0] if selected else None
        self.region = Region(root, rows, self.reader.body, of, made_by=self.reader.made_by)
        self.values: dict[fx.Node, Any] = {root: logits}  # of nodes inside
        self.after: set[fx.Node] = set()  # nodes that are computed from seams
        self.classes = logits.shape[-1]
        for node in list(view.graph.nodes):
            if node is root or node.op in ("output", "get_attr"):
                continue
            if node in selected:  # the logits are those of the rows that it takes
                self.values[node] = self.values[node.args[0]]  # type: ignore[index]
                self.region.nodes.add(node)
                continue
            reads_logits = any(n in self.values and self._is_reached(n) for n in node.all_input_nodes)
            try:
                if node.op == "placeholder" or not reads_logits:
                    self._feed(node)
                else:
                    self._follow(node)
            except Opaque as opaque:
                opaque.node = opaque.node or node
                raise
        self._close()

    def _is_reached(self, node: fx.Node) -> bool:
        return any(typed.reached for typed in self._typed(self.values[node]))

    def _typed(self, value: Any) -> Iterator[Typed]:
        found = (self.reader.typed.get(id(t)) for t in tree_leaves(value) if isinstance(t, Tensor))
        return (typed for typed in found if typed is not None)

    def _feed(self, node: fx.Node) -> None:
        """Take in a node that the logits do not reach, if it makes a tensor as large as they are, or reads one."""
        tensor = example(node)
        if any(n in self.after for n in node.all_input_nodes):
            self.after.add(node)
            return
        if not self._is_large(tensor) and not any(n in self.values for n in node.all_input_nodes):
            return
        value = None
        if node.op != "placeholder" and self.view.is_pure(node):
            try:
                value = self._run(node)
            except Opaque:
                value = None
        known = [] if value is None else list(self._typed(value))
        hidden = self._drops_gradients(node)
        if known and len(known) == len([t for t in tree_leaves(value) if isinstance(t, Tensor)]):
            self.values[node] = self.reader.detached(value) if hidden else value
        elif self._is_large(tensor):
            labels = self.reader.labels_like_logits(tensor)
            if labels is not None:
                made = self.reader.outside.get(id(value)) if isinstance(value, Tensor) and not hidden else None
                self.values[node] = self.reader.take(tensor, labels, made if is_elementwise(made) else node)

    def _is_large(self, tensor: Any) -> bool:
        large = isinstance(tensor, Tensor) and tensor.dim() >= 2
        return large and statically_known_true(tensor.shape[-1] == self.classes)

    def _follow(self, node: fx.Node) -> None:
        """Run a node that reads values of the region."""
        has_classes = any(t.has_classes for n in node.all_input_nodes for t in self._typed(self.values.get(n)))
        if any(n in self.after for n in node.all_input_nodes) and not has_classes:
            self.after.add(node)
            return
        if any(n in self.after for n in node.all_input_nodes):
            raise Opaque("a value with classes meets a number that was made of all rows")
        before = len(self.region.seams)
        try:
            value = self._run(node)
        except Opaque as opaque:
            if has_classes:
                raise
            if isinstance(opaque, Split) and self.split is None:
                self.split = opaque
            del self.region.seams[before:]
            self.after.add(node)
            return
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        typed = list(self._typed(value))
        if not tensors:
            return  # a size: it needs no values
        if len(typed) == len(tensors):
            self.values[node] = self.reader.detached(value) if self._drops_gradients(node) else value
            self.region.nodes.add(node)
        elif not has_classes:
            del self.region.seams[before:]
            self.after.add(node)
        elif not typed and len(tensors) == 1 and isinstance(value, Tensor):
            self.region.rest[node] = self.reader.made(value)
            self.region.nodes.add(node)
            self.after.add(node)
        else:
            raise Opaque("only some of its results treat rows one by one")

    def _drops_gradients(self, node: fx.Node) -> bool:
        region = self.view.effects.region
        return not region[node][0] and region[self.region.root][0]

    def _run(self, node: fx.Node) -> Any:
        reader = self.reader

        def operand(n: fx.Node) -> Any:
            if n in self.values:
                return self.values[n]
            n = self._first_equal(n)
            known = example(n)
            if isinstance(known, Tensor):
                reader.sources[id(known)] = n
            return known

        args, kwargs = map_nodes(operand, (node.args, node.kwargs))
        target: Callable[..., Any] = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target  # type: ignore[assignment]
        mode = fake_mode_of(example(self.region.root))
        if mode is None or node.op not in ("call_method", "call_function") or not is_plain_call(node):
            raise Opaque(f"{node.name} is no call of a function")
        around = self.view.effects.region[node]
        reader.region = self.region
        reader.begin()
        try:
            with entered((False, *around[1:])), mode, without_guards(mode), without_tracing_context(), reader:
                return target(*args, **kwargs)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise Opaque(f"{node.name} could not be run on tensors without values: {str(error).splitlines()[0]}") from error

    def _first_equal(self, node: fx.Node) -> fx.Node:
        """Return the first mask of those known that is what a node is (``~mask``, written twice), or the node."""
        if not is_tensor(node) or example(node).dtype != torch.bool:
            return node
        for known in self.masks:
            if self.view.same_value(known, node):
                return known
        self.masks.append(node)
        return node

    def _close(self) -> None:
        """Every value that is read outside is a seam."""
        region = self.region
        self._leave_out_weights()
        self._leave_out_views()
        if not region.nodes:
            raise Opaque("nothing that treats rows one by one reads the logits")
        for node in [region.root, *region.nodes]:
            if node in region.rest or not self._is_reached(node):
                continue
            if all(user in region.nodes for user in node.users):
                continue
            value = self.values[node]
            if any(t.has_classes for t in self._typed(value)):
                self._note_whole(node)
                continue
            if isinstance(value, Tensor):
                region.ends[node] = self.reader.seam(value)
            elif any(user not in region.nodes for user in node.users):
                raise Opaque(f"{node.name} has several results that are read outside")
        region.float16 = self.reader.float16
        self.reader.body.output(tuple(_in_own_memory(self.reader.body, seam.typed.node) for seam in region.seams))
        _remove_dead(self.reader.body)
        used = {n for n in self.reader.body.nodes if n.users}
        region.inputs = [given for given in self.reader.inputs if given.typed.node in used]
        for given in self.reader.inputs:
            if given not in region.inputs:
                self.reader.body.erase_node(given.typed.node)
        self._check_writes()

    def _leave_out_weights(self) -> None:
        """Let the region end before its losses are weighed by values that the logits do not reach.

        The op sees then which rows have no weight, and leaves them out.
        """
        waiting = [node for node in self.region.nodes if self._ends_at(node)]
        while waiting:
            node = waiting.pop()
            if node in self.region.nodes and self._ends_at(node) and self._has_a_weight(node) and self._is_cut_before(node):
                self.region.nodes.discard(node)
                waiting += self._operands_reached(node)

    def _leave_out_views(self) -> None:
        """Let views of losses that are read outside, too, be made of these: they share memory."""
        while True:
            known: dict[int, fx.Node] = {}
            for node in (n for n in self.view.graph.nodes if n in self.region.nodes and self._is_read_outside(n)):
                first = min((known.setdefault(memory, node) for memory in storages(node)), key=self.view.order.__getitem__)
                below = self._operands_reached(node)
                if first is not node and len(below) == 1 and not self._have_classes(below) and self._is_cut_before(node):
                    self.region.nodes.discard(node)
                    break
            else:
                return

    def _is_read_outside(self, node: fx.Node) -> bool:
        plain = node not in self.region.rest and self._is_reached(node) and isinstance(self.values[node], Tensor)
        return plain and any(user not in self.region.nodes for user in node.users)

    def _have_classes(self, nodes: Iterable[fx.Node]) -> bool:
        return any(typed.has_classes for n in nodes for typed in self._typed(self.values[n]))

    def _ends_at(self, node: fx.Node) -> bool:
        """Return True for a number a row that is read outside of the region alone."""
        plain = node not in self.region.rest and self._is_reached(node) and isinstance(self.values[node], Tensor)
        return plain and bool(node.users) and not any(user in self.region.nodes for user in node.users)

    def _operands_reached(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in self.region.nodes and self._is_reached(n)]

    def _has_a_weight(self, node: fx.Node) -> bool:
        """Return True if losses of rows are weighed at a node, or below it by way of ops that are linear in them."""
        name, reached = self.view.name(node), self._operands_reached(node)
        if name not in LINEAR or self._have_classes(reached):
            return False
        bound = self.view.arguments(node) or {}
        if name in ("where", "masked_fill") and self.with_masks:
            return False
        if name in ("where", "masked_fill") and bound.get("condition", bound.get("mask")) not in reached:
            return True
        if name in ("mul", "div") and (len(reached) != 1 or (name == "div" and bound.get("input") not in reached)):
            return False
        if name == "mul" and any(is_tensor(n) and example(n).dim() and n not in reached for n in node.all_input_nodes):
            return True
        return name not in ("where", "masked_fill") and any(map(self._has_a_weight, reached))

    def _is_cut_before(self, node: fx.Node) -> bool:
        """Make seams of the operands of a node. Returns False where their dims are not the rows in order."""
        before = len(self.region.seams)
        try:
            for operand in self._operands_reached(node):
                self.reader.seam(self.values[operand])
        except Opaque:
            del self.region.seams[before:]
            return False
        del self.region.seams[before:]  # those that stay are made again
        return True

    def _note_whole(self, node: fx.Node) -> None:
        """Note a value with classes that the graph returns. Raises Opaque for one that something else reads outside."""
        for user in node.users:
            if user in self.region.nodes or _asks_for_a_size(user):
                continue
            if user.op != "output":
                raise Opaque(f"{node.name} is read by {user.name}, as a whole", node)
            if not self.may_return:
                raise Opaque(f"{node.name} is returned by the graph, as a whole", node)
            self.region.returned.append(node)

    def _check_writes(self) -> None:
        effects = self.view.effects
        read = {given.source for given in self.region.inputs if isinstance(given.source, fx.Node)}
        involved = {*self.values, *read, self.region.root}
        memory = {storage for node in involved for storage in storages(node)}
        for write in effects.writes:
            written = effects.mutated(write)
            if any(n in involved or memory.intersection(storages(n)) for n in written):
                raise Opaque(f"{write.name} changes a value in place", write)


def _selection(view: View, root: fx.Node, may_return: bool) -> list[fx.Node]:
    """Return the calls through which alone the logits are read, if all take the same rows. Casts may come before, and ops
    that make values with classes of one tensor: if they mixed rows, the reader would say so."""

    def readers(node: fx.Node) -> list[fx.Node]:
        returned = may_return and any(user.op == "output" for user in node.users)
        return [u for u in node.users if not _asks_for_a_size(u) and not (returned and u.op == "output")]

    def is_before(node: fx.Node) -> bool:
        return view.name(node) in _BEFORE_A_SELECTION and len(node.all_input_nodes) == 1

    node = root
    while len(users := readers(node)) == 1 and is_before(users[0]):
        node = users[0]
    if not users or any(view.name(user) != "getitem" or user.args[0] is not node for user in users):
        return []
    index = index_of(users[0].args[1], example(node).dim())
    plain = index is not None and index.takes_rows
    return users if plain and all(user.args[1] == users[0].args[1] for user in users) else []


def _axes(logits: Tensor, splits: Iterable[Split]) -> list[list[Any]]:
    """Return the sizes of the row axes that each dim of the logits holds."""
    axes = [[size] for size in logits.shape[:-1]]
    for split in splits:
        dim, at = [(i, j) for i, of in enumerate(axes) for j in range(len(of))][split.axis]
        axes[dim][at : at + 1] = split.sizes
    return axes


def _rows_of(logits: Tensor, selected: fx.Node) -> Tensor:
    """Return logits without values, of the rows that a call takes."""
    mode = fake_mode_of(logits)
    if mode is None:
        raise Opaque("the logits have values")
    with mode, without_guards(mode), torch.no_grad():
        return logits.new_empty(example(selected).shape)


def _asks_for_a_size(node: fx.Node) -> bool:
    return not is_tensor(node) and isinstance(example(node), (int, torch.SymInt, torch.Size))


_VIEWS = {
    "alias", "detach", "view", "_unsafe_view", "select", "slice", "squeeze", "unsqueeze", "expand", "permute", "transpose",
}  # fmt: skip


def _in_own_memory(body: fx.Graph, node: fx.Node) -> fx.Node:
    """Return a seam, or a copy of one that is a view of the logits, over which their gradient is written."""
    below = node
    while getattr(below.target, "_opname", "") in _VIEWS:
        below = below.all_input_nodes[0]
    return node if below is not next(iter(body.nodes)) else body.call_function(torch.ops.aten.clone.default, (node,))


def _remove_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
