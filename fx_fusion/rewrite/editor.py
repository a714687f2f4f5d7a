"""Edit the graph. The only module that does.

A match becomes one call of its op. The node that takes the root's place also takes its name and its metadata, so the
graph before and after can be compared line by line and AOTAutograd's cache keeps working. Only nodes that the match
itself made dead are erased: global dead-code elimination would also drop in-place writes that have no users.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.matcher import Match
from fx_fusion.graph import signatures
from fx_fusion.graph.effects import entered
from fx_fusion.graph.size_hints import expected
from fx_fusion.graph.view import View, is_tensor, value
from fx_fusion.ops.layouts import any_layout, channels_last, is_channels_last
from fx_fusion.rewrite.deferral import Deferral, cut_off, sharing_memory

_COPIED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "recompute", "ac_graph_id")


class Editor:
    """Inserts nodes with example values, replaces values, erases what became dead. Knows what replaced what."""

    def __init__(self, view: View):
        self.view, self.graph = view, view.graph
        self.deferrals: list[Deferral] = []
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._shared: dict[Any, Any] = {}
        # The mode that the graph was traced with: while a backend runs, the tracing context may already hold another.
        fakes = (value(n) for n in self.graph.nodes)
        self.fake_mode = next((v.fake_mode for v in fakes if isinstance(v, FakeTensor)), None)

    def now(self, item: Any) -> Any:
        """The node that holds this value after the rewrites so far."""
        while isinstance(item, fx.Node) and item in self._replaced:
            item = self._replaced[item]
        return item

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, like: fx.Node) -> fx.Node:
        """A new ``call_function`` node at the insertion point, with the metadata of ``like`` and its own example value."""
        args, kwargs = self._operands(args, like), self._operands(kwargs or {}, like)
        node = self.graph.call_function(target, args, kwargs)
        return self._describe(node, target, like)

    def method(self, name: str, args: tuple[Any, ...], *, like: fx.Node) -> fx.Node:
        """A new ``call_method`` node, likewise."""
        node = self.graph.call_method(name, self._operands(args, like))
        return self._describe(node, getattr(torch.Tensor, name), like)

    def _operands(self, items: Any, like: fx.Node) -> Any:
        """Nodes as they are after the rewrites so far, and symbolic sizes as nodes: a graph that holds a symbol itself can't
        be run as it is."""
        items = torch.utils._pytree.tree_map_only(fx.Node, self.now, items)
        tensors = [n for n in torch.utils._pytree.tree_leaves(items) if isinstance(n, fx.Node) and is_tensor(n)]
        return torch.utils._pytree.tree_map_only(torch.SymInt, lambda size: self._size(size, tensors, like), items)

    def _size(self, size: torch.SymInt, tensors: list[fx.Node], like: fx.Node) -> Any:
        """A node with the value of ``size``: read off one of the tensors beside it, or off an input of the graph."""
        for node in (*tensors, *self.graph.find_nodes(op="placeholder")):
            if isinstance(value(node), torch.SymInt) and statically_known_true(value(node) == size):
                return node
            for dim, known in enumerate(value(node).shape if is_tensor(node) else ()):
                if isinstance(known, torch.SymInt) and statically_known_true(known == size):
                    return self.method("size", (node, dim), like=like)
        return size  # a product of sizes: AOTAutograd knows it

    def _describe(self, node: fx.Node, target: Any, like: fx.Node) -> fx.Node:
        node.meta.update({k: like.meta[k] for k in _COPIED_META if k in like.meta})
        example_args, example_kwargs = torch.utils._pytree.tree_map_only(fx.Node, value, (node.args, node.kwargs))
        if self.fake_mode is None:
            raise RuntimeError("the graph has no fake tensors; it was not captured by Dynamo")
        with self.fake_mode, self._no_guards(), entered(self.view.effects.region[like]):
            try:
                node.meta["example_value"] = target(*example_args, **example_kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                raise Mismatch(f"{target} does not take these operands: {str(error).splitlines()[0]}") from error
        return node

    def _no_guards(self) -> Any:
        """What an example value is made of guards nothing: AOTAutograd traces what stays in the graph once more, and a
        replacement that was tried and declined must not cost a recompile."""
        assert self.fake_mode is not None
        shapes = self.fake_mode.shape_env
        return contextlib.nullcontext() if shapes is None else shapes.suppress_guards()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` inserts for the first site that asks with this key; the sites after it are handed the same nodes."""
        known = self._shared.get(key)
        if known is None or any(n._erased for n in torch.utils._pytree.tree_leaves(known) if isinstance(n, fx.Node)):
            known = self._shared[key] = make()
        return known

    def cast(self, node: Any, dtype: torch.dtype, *, like: fx.Node) -> Any:
        """``node.to(dtype)``, or the node itself where it has that dtype."""
        node = self.now(node)
        return node if value(node).dtype == dtype else self.method("to", (node, dtype), like=like)

    def item(self, node: fx.Node, i: int, *, like: fx.Node) -> fx.Node:
        """``node[i]`` of an op with several results."""
        return self.call(operator.getitem, (node, i), like=like)

    def check(self, old: Iterable[fx.Node], new: Iterable[fx.Node]) -> None:
        """Raise Mismatch unless each new node looks like the one it is to replace."""
        for before, after in zip(old, new, strict=True):
            if (why := differs(value(before), value(after))) is not None:
                raise Mismatch(f"the op's result {why}")

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """``new`` takes the place of ``old`` at every user, and its name."""
        self.check([old], [new])
        name = old.name
        old.replace_all_uses_with(new)
        old._rename(f"{name}_unfused")
        new._rename(name)
        self._replaced[old] = new

    def lay_out(self, node: fx.Node, wanted: Any, *, like: fx.Node) -> fx.Node:
        """A copy of ``node`` behind it, with the strides of the tensor ``wanted``; every other user reads the copy."""
        order = sorted(range(wanted.dim()), key=lambda d: -expected(wanted.stride(d)))
        back = sorted(range(wanted.dim()), key=order.__getitem__)
        users = list(node.users)
        with self.graph.inserting_after(node):
            permuted = self.method("permute", (node, order), like=like)
        with self.graph.inserting_after(permuted):
            dense = self.method("contiguous", (permuted,), like=like)
        with self.graph.inserting_after(dense):
            copy = self.method("permute", (dense, back), like=like)
        if (why := differs(wanted, value(copy))) is not None:
            raise Mismatch(f"the call's result {why}")
        for user in users:
            user.replace_input_with(node, copy)
        self._replaced[node] = copy  # what was written to the node is written to the copy
        return copy

    def change_call(self, node: fx.Node, *, lay_out: bool = False, **changes: Any) -> None:
        """Change named arguments of a call in place; its result must keep its type. With ``lay_out`` a result with other
        strides is copied into the old ones (a copy that Inductor merges with what follows)."""
        name = self.view.name(node)
        assert name is not None
        bound = signatures.bind(name, node.args, dict(node.kwargs))
        assert bound is not None
        before = value(node)
        bound.update({k: self.now(v) for k, v in changes.items()})
        positional = [p for p in bound if p in ("query", "key", "value", "input")]
        old = node.args, node.kwargs
        node.args = tuple(bound[p] for p in positional)
        node.kwargs = {k: v for k, v in bound.items() if k not in positional}
        try:
            self._describe(node, node.target, node)
            if (why := differs(before, value(node))) is not None:
                if not lay_out:
                    raise Mismatch(f"the call's result {why}")
                self.lay_out(node, before, like=node)
        except Mismatch:
            node.args, node.kwargs = old
            node.meta["example_value"] = before
            raise

    def defer(self, outputs: Iterable[fx.Node], cuts: Iterable[fx.Node], *, like: fx.Node) -> None:
        """``outputs`` leave the results of the graph; they will be computed from ``cuts`` when one of them is read, in the
        grad mode and autocast region of ``like``."""
        sources, region = [self.now(cut) for cut in cuts], self.view.effects.region[like]
        self.deferrals += [cut_off(group, sources, region) for group in sharing_memory(outputs)]

    def erase(self, nodes: Iterable[fx.Node]) -> None:
        """Erase those of ``nodes`` that nothing uses any more."""
        for node in sorted(nodes, key=lambda n: self.view.order.get(n, 0), reverse=True):
            if not node._erased and not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)


class Mismatch(Exception):
    """The replacement would not look like what it replaces: the site is declined and nothing was changed."""


def differs(old: Any, new: Any) -> str | None:
    """The first difference in dtype, device, shape or stride between two example values, or None."""
    if old.dtype != new.dtype:
        return f"is {new.dtype} where the graph has {old.dtype}"
    if old.device != new.device:
        return f"is on {new.device} where the graph has {old.device}"
    for what, before, after in (("shape", old.shape, new.shape), ("stride", old.stride(), new.stride())):
        if len(before) != len(after) or not all(
            statically_known_true(b == a) or (what == "stride" and statically_known_true(old.shape[i] <= 1))
            for i, (b, a) in enumerate(zip(before, after, strict=True))
        ):
            return f"has {what} {tuple(after)} where the graph has {tuple(before)}"
    return None


def rewrite(fusion: Fusion, match: Match, editor: Editor) -> str | None:
    """Replace one match; the reason if its replacement does not fit (nothing is changed then)."""
    before = list(editor.graph.nodes)
    try:
        if match.emit is not None:
            match.emit(editor, match)
        else:
            call_kernel(fusion, match, editor)
    except Mismatch as mismatch:
        known = set(before)
        for node in reversed(list(editor.graph.nodes)):
            if node not in known and node.op != "placeholder":  # a body keeps the operand that it was given
                editor.graph.erase_node(node)
        return str(mismatch)
    editor.erase(match.nodes)
    return None


def call_kernel(fusion: Fusion, match: Match, editor: Editor) -> None:
    """One call of the kernel, where its last input exists and its first result is needed."""
    kernel = fusion.kernel
    assert kernel is not None, f"fusion {fusion.name} has neither a kernel nor emit"
    bound = {**match.inputs, **match.statics}
    with editor.graph.inserting_before(insertion_point(match, editor)):
        for parameter, node in match.inputs.items():
            if parameter in match.channels_last:
                bound[parameter] = editor.call(channels_last, (node,), like=match.root)
            elif is_tensor(node) and value(node).dim() > 1 and len(str(fusion.inputs[parameter]).split()) == 1:
                bound[parameter] = editor.method("reshape", (node, -1), like=match.root)  # (1, c, 1, 1): one a channel
        arguments = tuple(bound.get(parameter) for parameter in kernel.parameters)
        call = editor.call(kernel.overload, arguments, like=match.root)
        several = isinstance(value(call), (tuple, list))
        made = [editor.item(call, i, like=o) if several else call for i, o in enumerate(match.outputs)]
        new = [_as_the_graph_has_it(editor, node, o) for node, o in zip(made, match.outputs, strict=True)]
        editor.check(match.outputs, new)
    for output, node in zip(match.outputs, new, strict=True):
        editor.replace(output, node)


def _as_the_graph_has_it(editor: Editor, node: fx.Node, output: fx.Node) -> fx.Node:
    """A result of a kernel in the shape and layout of what it replaces."""
    if value(node).dim() < value(output).dim():
        node = editor.method("view", (node, *value(output).shape), like=output)
    if is_channels_last(value(node)) and value(output).is_contiguous():
        # Inductor gives a result of the graph the strides it must have, but not a view of one that it was left to lay out.
        kept = editor.view.effects.returned(output)
        node = editor.method("contiguous", (node,), like=output) if kept else editor.call(any_layout, (node,), like=output)
    return node


def insertion_point(match: Match, editor: Editor) -> fx.Node:
    """Before the first matched node that makes an output: nothing uses an output earlier. Every input must exist by
    then; where one does not, the op goes right behind the last input, if no user of an output comes before that."""
    order = editor.view.order
    first = min(match.outputs, key=lambda n: order[n])
    late = [n for n in match.inputs.values() if isinstance(n, fx.Node) and order[n] > order[first]]
    if not late:
        return first
    last = behind = max(late, key=lambda n: order[n])
    region = editor.view.effects.region
    while region.get(behind) != region[match.root]:  # what is made in a no_grad or autocast block is read outside of it
        behind = behind.next
        if behind.op == "output":
            raise Mismatch(f"{last.name} is made in another grad-mode or autocast region")
    at = order[behind]
    for output in match.outputs:
        for user in output.users:
            if user not in match.nodes and order.get(user, at + 1) <= at:
                raise Mismatch(f"{last.name} does not exist yet where {user.name} needs a result")
    return behind.next
