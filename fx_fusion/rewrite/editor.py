"""Edit a graph: the one class that inserts, replaces and erases nodes for a match.

The node that takes the root's place also takes its name and its metadata, so the graph before and after can be compared
line by line and AOTAutograd's cache keeps working. Only nodes that the match itself made dead are erased: global dead-code
elimination would also drop in-place writes that have no users.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph import signatures
from fx_fusion.graph.effects import entered
from fx_fusion.graph.masks.assumed import Assumed
from fx_fusion.graph.size_hints import expected
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.ops.library import is_op
from fx_fusion.rewrite.assumptions import Assumptions
from fx_fusion.rewrite.deferral import Deferral, cut_off, sharing_memory
from fx_fusion.torch_internals.containers import map_nodes, tree_leaves, tree_map_only
from fx_fusion.torch_internals.fakes import fake_mode_of, set_example, without_guards, without_tracing_context
from fx_fusion.torch_internals.nodes import is_erased, take_name

_VIEWS = ("transpose", "permute", "mT", "unsqueeze", "getitem", "split", "chunk", "view", "unflatten", "to", "type_as")
_COPIED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "recompute", "ac_graph_id")


class Mismatch(Exception):
    """The replacement would not look like what it replaces: the site is declined and nothing was changed."""


class Editor:
    """Inserts nodes with example values, replaces values, erases what became dead. Knows what replaced what.

    Args:
        view: of the graph, as it was before the first edit.
        assumptions: where rewrites say what they take for granted about the graph's inputs.
        outputs_are_read: whether outputs that could wait had better be computed, because somebody reads them.
        saves_memory: whether the least memory is asked for, at the expense of some time.
        eager: whether the graph will run op by op, and nobody plans its memory.
    """

    def __init__(
        self,
        view: View,
        assumptions: Assumptions | None = None,
        *,
        outputs_are_read: bool = False,
        saves_memory: bool = False,
        eager: bool = False,
    ):
        self.view, self.graph = view, view.graph
        self.outputs_are_read, self.saves_memory, self.eager = outputs_are_read, saves_memory, eager
        self.assumptions = Assumptions.none() if assumptions is None else assumptions
        self.deferrals: list[Deferral] = []
        self.tails: dict[fx.Node, tuple[str, ...]] = {}  # by the root of a match, the names of nodes that it counts on
        self.made: list[fx.Node] = []  # in this order, those that were erased again too
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._shared: dict[Any, Any] = {}
        # The mode that the graph was traced with: while a backend runs, the tracing context may already hold another.
        modes = (fake_mode_of(example(n)) for n in self.graph.nodes)
        self.fake_mode = next((mode for mode in modes if mode is not None), None)

    def now(self, item: Any) -> Any:
        """The node that holds this value after the rewrites so far."""
        while isinstance(item, fx.Node) and item in self._replaced:
            item = self._replaced[item]
        return item

    def replaced_by(self, node: fx.Node) -> fx.Node | None:
        """Return the node of the captured graph that a node took the place of."""
        return next((old for old, new in self._replaced.items() if new is node), None)

    # -- inserting -----------------------------------------------------------------------------------------------
    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, like: fx.Node) -> fx.Node:
        """A new ``call_function`` node at the insertion point, with the metadata of ``like`` and its own example value."""
        args, kwargs = self._operands(args, like), self._operands(kwargs or {}, like)
        node = self.graph.call_function(target, args, kwargs)
        return self._describe(node, target, like)

    def method(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, like: fx.Node
    ) -> fx.Node:  # fmt: skip
        """A new ``call_method`` node, likewise."""
        node = self.graph.call_method(name, self._operands(args, like), self._operands(kwargs or {}, like))
        return self._describe(node, getattr(torch.Tensor, name), like)

    def cast(self, node: Any, dtype: torch.dtype, *, like: fx.Node) -> Any:
        """``node.to(dtype)``, or the node itself where it has that dtype."""
        node = self.now(node)
        return node if example(node).dtype == dtype else self.method("to", (node, dtype), like=like)

    def item(self, node: fx.Node, i: int, *, like: fx.Node) -> fx.Node:
        """``node[i]`` of an op with several results."""
        return self.call(operator.getitem, (node, i), like=like)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` inserts for the first site that asks with this key; the sites after it are handed the same
        nodes."""
        known = self._shared.get(key)
        if known is None or any(is_erased(n) for n in tree_leaves(known) if isinstance(n, fx.Node)):
            known = self._shared[key] = make()
        return known

    def once_between_writes(self, key: Any, root: fx.Node, make: Callable[[], Any]) -> Any:
        """``once`` for the sites that are in the grad mode of ``root``, and between the same two writes of the graph."""
        effects, order = self.view.effects, self.view.order
        before = sum(order[write] < order[root] for write in effects.writes)
        return self.once((key, effects.region[root], before), make)

    def _operands(self, items: Any, like: fx.Node) -> Any:
        """Nodes as they are after the rewrites so far, and symbolic sizes as nodes: a graph that holds a symbol itself can't
        be run as it is."""
        items = map_nodes(self.now, items)
        gone = next((n for n in tree_leaves(items) if isinstance(n, fx.Node) and is_erased(n)), None)
        if gone is not None:  # a region of rows reads what its graph does not read there
            raise Mismatch(f"{gone.name} is part of another fusion")
        tensors = [n for n in tree_leaves(items) if isinstance(n, fx.Node) and is_tensor(n)]
        return tree_map_only(torch.SymInt, lambda size: self._size(size, tensors, like), items)

    def _size(self, size: torch.SymInt, tensors: list[fx.Node], like: fx.Node) -> Any:
        """A node with the value of ``size``: read off one of the tensors beside it, or off an input of the graph."""
        for node in (*tensors, *self.graph.find_nodes(op="placeholder")):
            if isinstance(example(node), torch.SymInt) and statically_known_true(example(node) == size):
                return node
            for dim, known in enumerate(example(node).shape if is_tensor(node) else ()):
                if isinstance(known, torch.SymInt) and statically_known_true(known == size):
                    return self.method("size", (node, dim), like=like)
        return size  # a product of sizes: AOTAutograd knows it

    def _describe(self, node: fx.Node, target: Any, like: fx.Node) -> fx.Node:
        """Give a node the metadata of ``like`` and the example value of its call. That adds no guard: AOTAutograd traces
        what stays in the graph once more, and a replacement that was tried and declined must not cost a recompile."""
        self.made.append(node)
        node.meta.update({k: like.meta[k] for k in _COPIED_META if k in like.meta})
        return self._evaluate(node, target, like)

    def _evaluate(self, node: fx.Node, target: Any, like: fx.Node) -> fx.Node:
        """Give a node the example value of its call, in the grad mode and autocast region of ``like``."""
        args, kwargs = map_nodes(example, (node.args, node.kwargs))
        if self.fake_mode is None:
            raise RuntimeError("the graph has no fake tensors; it was not captured by Dynamo")
        region = self.view.effects.region[like]
        with self.fake_mode, without_guards(self.fake_mode), without_tracing_context(), entered(region):
            try:
                set_example(node, target(*args, **kwargs))
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                raise Mismatch(f"{target} does not take these operands: {str(error).splitlines()[0]}") from error
        return node

    # -- replacing -----------------------------------------------------------------------------------------------
    def check(self, old: Iterable[fx.Node], new: Iterable[fx.Node]) -> None:
        """Raise Mismatch unless each new node looks like the one it is to replace."""
        for before, after in zip(old, new, strict=True):
            if (why := differs(example(before), example(after))) is not None:
                raise Mismatch(f"the op's result {why}")

    def replace(self, old: fx.Node, new: fx.Node, *, any_strides: bool = False) -> None:
        """``new`` takes the place of ``old`` at every user, and its name. ``any_strides``: the caller knows that nothing
        that reads old depends on how it lies in memory."""
        if (why := differs(example(old), example(new), strides=not any_strides)) is not None:
            raise Mismatch(f"the op's result {why}")
        old.replace_all_uses_with(new)
        take_name(new, old)
        self._replaced[old] = new

    def restride(self, node: fx.Node, wanted: Any, *, like: fx.Node) -> fx.Node:
        """A copy of ``node`` behind it, with the strides of the tensor ``wanted``; every other user reads the copy."""
        order, back = _order_of_memory(wanted)
        users = list(node.users)
        with self.graph.inserting_after(node):
            permuted = self.method("permute", (node, order), like=like)
        with self.graph.inserting_after(permuted):
            dense = self.method("contiguous", (permuted,), like=like)
        with self.graph.inserting_after(dense):
            copy = self.method("permute", (dense, back), like=like)
        if (why := differs(wanted, example(copy))) is not None:
            raise Mismatch(f"the call's result {why}")
        for user in users:
            user.replace_input_with(node, copy)
        self._replaced[node] = copy  # what was written to the node is written to the copy
        return copy

    def without_copy(self, copy: fx.Node, source: fx.Node, *, like: fx.Node) -> bool:
        """Let what reads ``copy`` read ``source``, which has the same values in other strides, if ops of ours alone read it,
        maybe through views: they take any strides. Return True where they do, and their results stay what they were."""
        changed, readers = _views_and_readers(self.view, copy)
        if not readers or not all(is_op(reader.target) for reader in readers):
            return False
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        known = {node: example(node) for node in sorted((*changed, *readers), key=order.__getitem__)}
        copy.replace_all_uses_with(source)
        try:
            for node, before in known.items():
                self._evaluate(node, getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target, like)
                if node in readers and any(map(differs, tree_leaves(before), tree_leaves(example(node)))):
                    raise Mismatch(f"{node.name} has another result")
        except Mismatch:
            for reader in [user for user in source.users if user in known]:
                reader.replace_input_with(source, copy)
            for node, before in known.items():
                set_example(node, before)
            return False
        self._replaced = {old: source if new is copy else new for old, new in self._replaced.items() if old is not source}
        return True

    def change_call(self, node: fx.Node, *, restride: bool = False, **changes: Any) -> None:
        """Change named arguments of a call in place; its result must keep its type. With ``restride`` a result with other
        strides is copied into the old ones (a copy that Inductor merges with what follows)."""
        name = self.view.name(node)
        assert name is not None
        bound = signatures.bind(name, node)  # as it is now: another site may have changed it
        assert bound is not None
        before = example(node)
        bound.update({k: self.now(v) for k, v in changes.items()})
        positional = [p for p in bound if p in ("query", "key", "value", "input")]
        old = node.args, node.kwargs
        node.args = tuple(bound[p] for p in positional)
        node.kwargs = {k: v for k, v in bound.items() if k not in positional}
        try:
            self._describe(node, node.target, node)
            if (why := differs(before, example(node))) is not None:
                if not restride:
                    raise Mismatch(f"the call's result {why}")
                self.restride(node, before, like=node)
        except Mismatch:
            node.args, node.kwargs = old
            set_example(node, before)
            raise

    def change_results(self, node: fx.Node, args: tuple[Any, ...], *, like: fx.Node) -> None:
        """Give an op with several results other arguments, and its results the types that they have then. Who reads these
        has to take them."""
        node.args = args
        for changed in (node, *node.users):
            self._describe(changed, changed.target, like)

    def assume(self, inputs: Iterable[Assumed]) -> None:
        """From now on the graph is right only if these inputs of it are what they are taken for, checked at run time."""
        self.assumptions.assume(inputs)

    def defer(
        self, outputs: Iterable[fx.Node], cuts: Iterable[fx.Node], *, like: fx.Node, can_compute: bool = False,
        of_linear: torch.dtype | None = None, grad: bool = True,
    ) -> None:  # fmt: skip
        """``outputs`` leave the results of the graph; they will be computed from ``cuts`` when one of them is read, in the
        grad mode and autocast region of ``like``. ``can_compute``: whether ``compute`` could make them. ``of_linear``: the
        dtype of the linear layer whose result, or a cast of it, they are (``returned_logits``). ``grad``: False where
        they are detached."""
        sources, region = [self.now(cut) for cut in cuts], self.view.effects.region[like]
        region = region if grad else (False, *region[1:])
        self.deferrals += [
            cut_off(group, sources, region, can_compute=can_compute, of_linear=of_linear)
            for group in sharing_memory(outputs)
        ]

    def compute(self, outputs: Iterable[fx.Node], cuts: Iterable[fx.Node], changed: fx.Node, value: fx.Node) -> None:
        """``outputs`` stay results of the graph, computed at the insertion point from ``value``, which has no gradient, in
        the place of ``changed``; their gradients will be computed from ``cuts``, if somebody asks for them."""
        outputs, cuts, region = list(outputs), list(cuts), self.view.effects.region[changed]
        sources = [self.now(cut) for cut in cuts]
        self.deferrals += [replace(cut_off([output], sources, region), computed=True) for output in outputs]
        copies = {**dict(zip(cuts, sources, strict=True)), changed: value}

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies and node.op != "placeholder":
                operands = {operand: copy(operand) for operand in node.all_input_nodes}
                copies[node] = self.graph.node_copy(node, operands.__getitem__)
            return copies.get(node, node)

        for output in outputs:
            made = copy(output)
            for user in [user for user in output.users if user.op == "output"]:
                user.replace_input_with(output, made)
            self._replaced[output] = made

    def erase(self, nodes: Iterable[fx.Node]) -> None:
        """Erase those of ``nodes`` that nothing uses any more."""
        for node in sorted(nodes, key=lambda n: self.view.order.get(n, 0), reverse=True):
            if not is_erased(node) and not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)


def _views_and_readers(view: View, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the views of a node and of its views, and what reads any of them and is none."""
    views: list[fx.Node] = []
    readers: list[fx.Node] = []
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if view.name(user) in _VIEWS and not view.effects.mutated(user):
            views.append(user)
            waiting += user.users
        elif user not in readers:
            readers.append(user)
    return views, readers


def _order_of_memory(tensor: Any) -> tuple[list[int], list[int]]:
    """Return the dims from the largest stride to the smallest, and the permutation back."""
    order = sorted(range(tensor.dim()), key=lambda d: -expected(tensor.stride(d)))
    return order, sorted(range(tensor.dim()), key=order.__getitem__)


def without_gaps(tensor: Any) -> Any:
    """Return a tensor without values whose dims lie in the same order in memory, one behind the other."""
    order, back = _order_of_memory(tensor)
    return tensor.new_empty([tensor.shape[d] for d in order]).permute(back)


def differs(old: Any, new: Any, *, strides: bool = True) -> str | None:
    """The first difference in dtype, device, shape, stride or placement between two example values, or None."""
    if old.dtype != new.dtype:
        return f"is {new.dtype} where the graph has {old.dtype}"
    if old.device != new.device:
        return f"is on {new.device} where the graph has {old.device}"
    alike = (("shape", old.shape, new.shape), ("stride", old.stride(), new.stride()))
    for what, before, after in alike if strides else alike[:1]:
        if len(before) != len(after) or not all(
            statically_known_true(b == a) or (what == "stride" and statically_known_true(old.shape[i] <= 1))
            for i, (b, a) in enumerate(zip(before, after, strict=True))
        ):
            return f"has {what} {tuple(after)} where the graph has {tuple(before)}"
    if (lies := getattr(new, "placements", None)) != (wanted := getattr(old, "placements", None)):
        return f"lies over the ranks as {lies} where the graph has {wanted}"
    return None
