"""lm_head and any loss that treats tokens one by one -> kernels/linear_rows.py, in chunks of logits.

The part of the graph that treats rows one by one is found by its dims, not by its spelling (``graph/rows_of_logits``). It
runs on one chunk of logits at a time. What follows reads one number a row and stays in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.devices import device_type
from fx_fusion.graph.dtypes import computed_in
from fx_fusion.graph.linear import Linear, linear_of
from fx_fusion.graph.rows_of_logits.finder import region_of
from fx_fusion.graph.rows_of_logits.values import CLASS, FEW, Input, Made, Opaque, Region, Rows, Seam
from fx_fusion.graph.size_hints import elements, expected
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.linear_rows import linear_rows as op
from fx_fusion.kernels.logits.logit_chunks import again_takes_longer, padded_classes
from fx_fusion.kernels.logits.row_programs import RowProgram, registered
from fx_fusion.patterns.sites.head import why_small
from fx_fusion.patterns.sites.row_heads import FrozenHead, differentiated, frozen_head, trained_in
from fx_fusion.patterns.sites.row_tail import cotangents_of
from fx_fusion.rewrite.deferral import deferrable_outputs, sharing_memory
from fx_fusion.rewrite.editor import Editor, Mismatch
from fx_fusion.rewrite.replace import insertion_point
from fx_fusion.torch_internals.aten import RESHAPES
from fx_fusion.torch_internals.containers import tree_map
from fx_fusion.torch_internals.fakes import constant
from fx_fusion.torch_internals.standalone import Operand

_FEWEST_CLASSES = 4096
# What mixes the columns of its operand: a linear layer below one of these makes no logits.
_MIXES = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention", "conv1d", "conv2d"}


def linear_then_rows(x, lm_head, bias, values, kind):
    z, t = F.linear(x, lm_head, bias).float(), values.float()
    log_p, log_q = torch.log_softmax(z, -1), torch.log_softmax(t, -1)
    if kind == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    if kind == "norm_of_rows":  # Its gradient depends on the loss of each row: the backward makes the logits again.
        return (log_p - log_q).square().mean(-1).norm()
    if kind == "total_variation":
        return (log_p.exp() - log_q.exp()).abs().sum(-1).mean() / 2
    mixture = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    return ((log_p.exp() * (log_p - mixture) + log_q.exp() * (log_q - mixture)).sum(-1) / 2).mean()


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        linear = linear_of(view, node)
        if linear is None or not _makes_logits(view, node, example(linear.weight).shape[1]):
            continue
        try:
            region = region_of(view, node, may_return=search.may_defer)
        except Opaque as opaque:
            if opaque.node is not None and opaque.node is not node:
                yield NearMiss("linear_rows", node, opaque.node, opaque.reason)
            continue
        outputs = sorted([*region.ends, *region.rest], key=lambda n: view.order[n])
        if not outputs or _is_a_teacher(region):
            continue
        heads = {given: head for given in region.inputs if (head := frozen_head(view, region, given)) is not None}
        given = {"x": linear.x, "lm_head": linear.weight, "bias": linear.bias}
        sources = [n for n in given.values() if n is not None]
        deferred, between = (), ()
        if region.returned:
            chain = [node, *(n for n in region.nodes if n in region.returned)]
            deferred, between = deferrable_outputs(search, chain, {node, *region.nodes}, sources)
            why = None if set(region.returned) <= set(deferred) else "it is returned by the graph, and may not wait"
            if not _are_made_of_logits(region, sources):
                why = "it is returned by the graph, and made of more than the logits"
            if why is not None:
                yield NearMiss("linear_rows", node, region.returned[0], why)
                continue
        yield Match(
            fusion="linear_rows",
            outputs=(outputs[-1], *outputs[:-1]),
            nodes=frozenset((node, *region.nodes, *between)),
            inputs={name: n for name, n in given.items() if n is not None},
            others={n.name: n for n in (*_leaves(region), *(n for head in heads.values() for n in head.operands))},
            rounded=frozenset((node, *region.nodes)),
            reading=(region, linear, heads),
            deferred=deferred,
            unmade={"logits": node},
        )


def _is_a_teacher(region: Region) -> bool:
    """Return True if nothing is trained through the logits, but through others that the body reads."""
    others = any(given.typed.has_classes and given.typed.node in trained_in(region, given) for given in region.inputs)
    logits = next(iter(region.body.find_nodes(op="placeholder")))
    return others and not (example(region.root).requires_grad and logits in differentiated(region.body))


def _makes_logits(view: View, node: fx.Node, width: Any) -> bool:
    """Return True if a linear layer has many classes, more than columns, and no other product reads what is made of them,
    and if the graph returns something that is."""
    classes = example(node).shape[-1]
    if not isinstance(classes, int) or classes < max(_FEWEST_CLASSES, expected(width) + 1) or example(node).dim() < 2:
        return False
    seen, waiting = set(), list(node.users)
    while waiting:
        user = waiting.pop()
        if view.name(user) in _MIXES:
            return False
        if user not in seen:
            seen.add(user)
            waiting += user.users
    return any(user.op == "output" for user in seen)


def _are_made_of_logits(region: Region, sources: list[fx.Node]) -> bool:
    """Return True if values that the graph returns are made of its inputs and of what makes the logits alone."""
    seen, waiting = {region.root}, list(region.returned)
    while waiting:
        node = waiting.pop()
        if node in seen or node in sources or node.op == "placeholder":
            continue
        if node not in region.nodes:
            return False
        seen.add(node)
        waiting += node.all_input_nodes
    return True


def _leaves(region: Region) -> list[fx.Node]:
    """Return the nodes of the graph that the body, and what follows a seam, read."""
    below = region.nodes_below([*(given.source for given in region.inputs), *region.rest.values()])
    return [node for node in below if not _is_number_of_the_cpu(example(node), region)]


def _makes_them_slowly_again(x: Tensor) -> bool:
    return again_takes_longer(expected(x.shape[-1]), computed_in(x), device_type(x))


def _is_number_of_the_cpu(tensor: Tensor, region: Region) -> bool:
    """Return True for a tensor without dims that a GPU's ops read from the CPU (``torch.tensor(0.5)``)."""
    return tensor.dim() == 0 and tensor.device.type == "cpu" and example(region.root).device.type != "cpu"


def _detach_untrained(region: Region) -> None:
    """Let the body have no gradient of seams that nothing trained is made of (an entropy that is only logged)."""
    if region.rest:
        return  # it reads seams, too
    output, trained = region.body.output_node(), []
    for node, seam in region.ends.items():
        if any(not is_tensor(user) or example(user).requires_grad for user in node.users):
            trained.append(seam)
    with region.body.inserting_before(output):
        output.args = (tuple(
            node if seam in trained else region.body.call_function(torch.ops.aten.detach.default, (node,))
            for node, seam in zip(output.args[0], region.seams, strict=True)
        ),)


def emit(editor: Editor, match: Match) -> None:
    region, linear, heads = match.reading
    waiting = sharing_memory(match.deferred)
    if any(example(n).requires_grad != example(group[0]).requires_grad for group in waiting for n in group):
        raise Mismatch("the graph returns the logits with a gradient and without, in the same memory")
    point = insertion_point(match, editor)
    _detach_untrained(region)
    with editor.graph.inserting_before(point):
        builder = _Builder(editor, match.root, region, point)
        x, lm_head, bias = builder.operands(linear, region.selected, example(region.root).dtype)
        logits, *placeholders = region.body.find_nodes(op="placeholder")
        grad = editor.view.effects.region[region.root][0] and logits in differentiated(region.body)
        needs = [bool(grad and n is not None and example(n).requires_grad) for n in (x, lm_head, bias)]
        cotangents, skips, keep = None, False, False
        if any(needs) or any(given.typed.node in trained_in(region, given) for given in region.inputs):
            known = not region.float16
            found = cotangents_of(editor, match, region, lambda seam: builder.zeros(seam, x), point) if known else None
            cotangents, skips = (None, False) if found is None else found
            slowly = cotangents is None and not editor.saves_memory and _makes_them_slowly_again(example(x))
            keep = slowly and editor.eager
            if slowly and not keep:
                raise Mismatch(
                    "the gradient of a row is not known before its loss: the backward would make the logits again, which "
                    'takes longer than keeping them (options={"memory": "min"} does it)'
                )
            heads = heads if cotangents is not None else {}  # a backward would make them once more
        for given in heads:  # behind the other inputs
            placeholders[-1].append(given.typed.node)
        others = [given for given in region.inputs if given not in heads]
        inputs = [builder.flat(given) for given in others]
        of_heads = [n for head in heads.values() for n in builder.of_head(head)]
        program = builder.program(x, dict(zip(others, inputs, strict=True)), heads)
        given = (x, lm_head, bias, inputs, of_heads, cotangents or [])
        arguments = (*given, registered(program), needs, editor.saves_memory, skips, *([True] if keep else []))
        call = editor.call(op, arguments, like=match.root)
        for i, seam in enumerate(region.seams):
            flat = editor.item(call, i, like=match.root)
            builder.seams[seam] = editor.method("view", (flat, *without_symbols(seam.tensor.shape)), like=match.root)
        made = {node: builder.seams[seam] for node, seam in region.ends.items()}
        made |= {node: builder.again(how) for node, how in region.rest.items()}
        for node, new in made.items():
            if example(new).requires_grad and not example(node).requires_grad:  # detached, or of classes
                made[node] = editor.method("detach", (new,), like=match.root)
        editor.check(list(made), made.values())
    sources = [n for n in (linear.x, linear.weight, linear.bias) if n is not None]
    for group in waiting:
        editor.defer(group, sources, like=region.root, grad=example(group[0]).requires_grad)
    for old, new in made.items():
        editor.replace(old, new)
    editor.erase(match.nodes)
    editor.erase(node for head in heads.values() for node in head.nodes)


class _Builder:
    """Inserts what a region reads, and what follows its seams."""

    def __init__(self, editor: Editor, like: fx.Node, region: Region, at: fx.Node):
        self.editor, self.like, self.region, self.at = editor, like, region, at
        self.seams: dict[Seam, fx.Node] = {}
        self._known: dict[Made, fx.Node] = {}

    def of_head(self, head: FrozenHead) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return x (m, k), the weight and the bias of another head, without gradients; an empty tensor for no bias."""
        x, weight, bias = self.operands(head.linear, head.rows, example(head.nodes[0]).dtype)
        if bias is None:
            bias = self.editor.method("new_empty", (weight, (0,)), like=self.like)
        x, weight, bias = (self.editor.method("detach", (n,), like=self.like) for n in (x, weight, bias))
        return x, weight, bias

    def operands(
        self, linear: Linear, selected: fx.Node | None, dtype: torch.dtype
    ) -> tuple[fx.Node, fx.Node, fx.Node | None]:  # fmt: skip
        """Return x (m, h), the weight and the bias (v), in the dtype of the logits. ``selected``: takes some of the rows."""
        editor, width = self.editor, example(linear.weight).shape[1]
        x = linear.x
        if selected is not None:
            x = editor.call(operator.getitem, (x, selected.args[1]), like=self.like)
        x = editor.method("reshape", (x, -1, width), like=self.like)
        x, weight = (editor.cast(n, dtype, like=self.like) for n in (x, linear.weight))
        bias = linear.bias
        if bias is not None:
            bias = bias if example(bias).dim() == 1 else editor.method("reshape", (bias, -1), like=self.like)
            bias = editor.cast(bias, dtype, like=self.like)
        return x, weight, bias

    def again(self, how: fx.Node | Made | Seam) -> fx.Node:
        """Return the node of a tensor outside of the region."""
        if isinstance(how, fx.Node):
            return how
        if isinstance(how, Seam):
            return self.seams[how]
        if how not in self._known:
            args, kwargs = tree_map(self._operand, (how.args, how.kwargs))
            if how.op in RESHAPES:
                args = (args[0], without_symbols(args[1]), *args[2:])
            node = self.editor.call(how.op, args, kwargs, like=self.like)
            self._known[how] = node if how.item is None else self.editor.item(node, how.item, like=self.like)
        return self._known[how]

    def _operand(self, item: Any) -> Any:
        if isinstance(item, Seam):
            return self.seams[item]
        if not isinstance(item, Tensor):
            return item
        made = self.region.made_by(item)
        if made is None:
            raise Mismatch("an operand of the loss comes from nowhere")
        return self.again(made)

    def flat(self, given: Input) -> fx.Node:
        """Return an input of the body for rows in one dim."""
        node, labels, rows = self.again(given.source), given.typed.labels, self.region.rows
        if _is_number_of_the_cpu(example(node), self.region):
            order = self.editor.view.order
            if isinstance(given.source, fx.Node) and order.get(given.source, 0) > order[self.at]:
                raise Mismatch(f"{given.source.name} does not exist yet")
            node = self.editor.method("to", (node, example(self.region.root).device), like=self.like)
        at = [i for i, label in enumerate(labels) if isinstance(label, Rows)]
        inner = [i for i, label in enumerate(labels) if label in (CLASS, FEW)]
        sizes = [constant(example(node).shape[i]) for i in inner]
        if not all(isinstance(n, int) for n in sizes):
            raise Mismatch(f"{node.name} has a size that changes beside its rows")
        dims = [*at, *inner, *(i for i in range(len(labels)) if i not in at and i not in inner)]
        if dims != sorted(dims):
            node = self.editor.method("permute", (node, dims), like=self.like)
        if not at:  # a tensor with dims keeps one: by type promotion a tensor without dims is a number
            return self.editor.method("reshape", (node, sizes or [1] * min(len(labels), 1)), like=self.like)
        covered = [axis for i in at for axis in range(labels[i].first, labels[i].last)]  # type: ignore[union-attr]
        missing = [i for i, n in enumerate(rows) if i not in covered and not (isinstance(n, int) and n == 1)]
        if missing:
            shape = [n if i in covered else 1 for i, n in enumerate(rows)]
            node = self.editor.method("reshape", (node, (*shape, *sizes)), like=self.like)
            node = self.editor.method("expand", (node, (*rows, *sizes)), like=self.like)
        return self.editor.method("reshape", (node, (-1, *sizes)), like=self.like)

    def zeros(self, seam: Seam, x: fx.Node) -> fx.Node:
        """Return zeros of the shape that the body has for a seam."""
        sizes = (example(x).shape[0], *_of_a_row(seam))
        return self.editor.method("new_zeros", (x, sizes), {"dtype": seam.tensor.dtype}, like=self.like)

    def program(self, x: fx.Node, inputs: dict[Input, fx.Node], heads: dict[Input, FrozenHead]) -> RowProgram:
        """Return the program of the region's body, whose inputs are nodes, and then logits that are made in chunks, too."""
        logits = example(self.region.root)
        classes, device = logits.shape[-1], logits.device
        stride = padded_classes(classes, logits.dtype, device.type == "cuda")
        of_logits = Operand((classes,), logits.dtype, device, per_row=True, stride=stride)
        in_chunks = [(given.tensor, example(head.nodes[0]).dtype) for given, head in heads.items()]
        described, wants, trained = [], [], differentiated(self.region.body)
        for given, node in inputs.items():
            tensor = example(node)
            shape = tuple(map(constant, tensor.shape[int(given.per_row) :]))
            described.append(Operand(shape, tensor.dtype, tensor.device, given.per_row))
            wants.append(bool(tensor.requires_grad) and given.typed.node in trained)
        for tensor, made_in in in_chunks:
            padded = padded_classes(tensor.shape[-1], made_in, device.type == "cuda")
            stride = padded if made_in == tensor.dtype else tensor.shape[-1]
            described.append(Operand((tensor.shape[-1],), tensor.dtype, device, per_row=True, stride=stride))
            wants.append(False)
        seams = [(_of_a_row(seam), seam.tensor.dtype) for seam in self.region.seams]
        return RowProgram(fx.GraphModule({}, self.region.body), of_logits, described, wants, seams)


def without_symbols(shape: Sequence[Any]) -> list[Any]:
    """Return a shape with -1 for its last symbolic size, which may be no single symbol."""
    shape = list(shape)
    symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if symbolic:
        shape[symbolic[-1]] = -1
    return shape


def _of_a_row(seam: Seam) -> tuple[int, ...]:
    return tuple(constant(n) for n, label in zip(seam.tensor.shape, seam.typed.labels, strict=True) if label == FEW)


def guard(x, lm_head, bias, values, kind):
    return wrong_dtype(x=x, lm_head=lm_head)


def why_keep(x, lm_head, bias, values, kind):
    return why_small(x, lm_head, elements(x) / max(expected(x.shape[-1]), 1))


FUSION = Fusion(
    name="linear_rows",
    instead="(p * (log_p - log_q)).sum(-1), p and log_p of F.linear(x, weight)",
    pattern=linear_then_rows,
    inputs={"x": "m h", "lm_head": "v h", "bias": "(v)", "values": "m v"},
    frozen=("values",),
    variants=tuple(
        {"kind": kind, **rest}
        for kind, rest in (
            ("reverse_kl", {"bias": None}),
            ("total_variation", {}),
            ("jensen_shannon", {"bias": None}),
            ("norm_of_rows", {}),
        )
    ),
    find=find,
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    before=("log_probs_entropy", "cross_entropy"),
    on_cpu=True,
    cases=(
        case("chunks", m=40, h=16, v=8500, bench=False),
        case("llama_1b", m=8192, h=2048, v=128256),
        case("llama_8b", m=8192, h=4096, v=128256),
    ),
    source="Hsu et al. 2024, arXiv:2410.10989 (losses in chunks), here found in the graph and for any loss",
)
