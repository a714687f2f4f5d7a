"""Replace one match: by what its fusion emits, or by one call of its kernel."""

from __future__ import annotations

from torch import fx

from fx_fusion.fusion.declaration import Fusion, Reason
from fx_fusion.fusion.match import Match
from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.ops.layouts import any_layout, channels_last, is_channels_last
from fx_fusion.rewrite.editor import Editor, Mismatch
from fx_fusion.rewrite.parts import own, whole


def replace(fusion: Fusion, match: Match, editor: Editor) -> Reason:
    """Replace one match; the reason if its replacement does not fit (nothing is changed then)."""
    before = set(editor.graph.nodes)
    try:
        if fusion.emit is not None:
            fusion.emit(editor, match)
        else:
            call_kernel(fusion, match, editor)
    except Mismatch as mismatch:
        for node in reversed(list(editor.graph.nodes)):
            if node not in before and node.op != "placeholder":  # a body keeps the operand that it was given
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
            if parameter in match.parts:
                bound[parameter] = own(editor, match, parameter)
            elif parameter in match.channels_last:
                bound[parameter] = editor.call(channels_last, (node,), like=match.root)
            elif is_tensor(node) and fusion.specs[parameter].squeezed and example(node).dim() > 1:
                bound[parameter] = editor.method("reshape", (node, -1), like=match.root)
        arguments = tuple(bound.get(parameter) for parameter in kernel.parameters)
        call = editor.call(kernel.overload, arguments, like=match.root)
        several = isinstance(example(call), (tuple, list))
        results = [editor.item(call, i, like=o) if several else call for i, o in enumerate(match.outputs)]
        if match.parts:
            new = [_of_all_ranks(editor, match, node, o) for node, o in zip(results, match.outputs, strict=True)]
        else:
            new = [_as_the_graph_has_it(editor, node, o) for node, o in zip(results, match.outputs, strict=True)]
        editor.check(match.outputs, new)
    for output, node in zip(match.outputs, new, strict=True):
        editor.replace(output, node)


def _of_all_ranks(editor: Editor, match: Match, node: fx.Node, output: fx.Node) -> fx.Node:
    """A rank's part of a result as the DTensor that it replaces, which lies as the input of the same shape does."""
    alike = [name for name in match.parts if same_shape(example(match.inputs[name]), example(output))]
    if not alike:
        raise Mismatch(f"no input has the shape {tuple(example(output).shape)} of {output.name}, whose parts lie over ranks")
    return whole(editor, match, node, output, lies_as=alike[0])


def _as_the_graph_has_it(editor: Editor, node: fx.Node, output: fx.Node) -> fx.Node:
    """A result of a kernel in the shape and layout of what it replaces."""
    if example(node).dim() < example(output).dim():
        node = editor.method("view", (node, *example(output).shape), like=output)
    if is_channels_last(example(node)) and example(output).is_contiguous():
        # Inductor gives a result of the graph the strides it must have, but not a view of one that it was left to lay out.
        kept = editor.view.effects.returned(output)
        node = editor.method("contiguous", (node,), like=output) if kept else editor.call(any_layout, (node,), like=output)
    return node


def insertion_point(match: Match, editor: Editor) -> fx.Node:
    """Before the first matched node that makes an output: nothing uses an output earlier. Every input must exist by
    then; where one does not, the op goes right behind the last input, if no user of an output comes before that. What is
    of the graph around this one (padding that a checkpointed body reads) is handed in."""
    order = editor.view.order
    first = min(match.outputs, key=lambda n: order[n])
    late = [n for n in match.operands.values() if isinstance(n, fx.Node) and order.get(n, 0) > order[first]]
    if not late:
        return first
    last = behind = max(late, key=lambda n: order[n])
    region = editor.view.effects.region
    while region.get(behind) != region[match.root]:  # what is made in a no_grad or autocast block is read outside of it
        behind = behind.next
        if behind.op == "output":
            raise Mismatch(f"{last.name} is made in another grad-mode or autocast region")
    place = {node: i for i, node in enumerate(editor.graph.nodes)}  # other rewrites have inserted nodes since
    for output in match.outputs:
        for user in output.users:
            if user not in match.nodes and place[user] <= place[behind]:
                raise Mismatch(f"{last.name} does not exist yet where {user.name} needs a result")
    return behind.next
