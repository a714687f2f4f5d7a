"""Programs that compute the part of a loss that treats rows of logits one by one, on one chunk of rows at a time.

    seams = body(z, inputs)                  z: (rows, v), the logits of a chunk;  one or a few numbers a row each
    dz, d_inputs = vjp of body, at the cotangents of the seams

A program is registered when a graph is rewritten, in every process, by a key that is a hash of its body. Ops name it by that
key, so compile caches find graphs that call it. On a CPU the body runs uncompiled.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from fx_fusion.graph.rows_of_logits.hidden import Hiding, hiding
from fx_fusion.torch_internals.dispatch import autograd_inside_an_op, without_saved_tensor_hooks
from fx_fusion.torch_internals.standalone import Operand, compiled_for_rows

_PROGRAMS: dict[str, "RowProgram"] = {}
_SOME_ROWS = 7919  # a size that no other dim has


class RowProgram:
    """One body and its gradient.

    Args:
        body: takes the logits and ``inputs``, returns a tuple of seams.
        logits: the dtype and strides of a chunk.
        inputs: of the body.
        wants: which inputs need a gradient.
        seams: shape of one row, and dtype, of each result.
    """

    def __init__(
        self, body: fx.GraphModule, logits: Operand, inputs: Sequence[Operand], wants: Sequence[bool],
        seams: Sequence[tuple[tuple[int, ...], torch.dtype]],
    ):  # fmt: skip
        self.body, self.logits, self.inputs, self.wants, self.seams = body, logits, tuple(inputs), tuple(wants), tuple(seams)
        described = (body.code, logits, self.inputs, self.wants, self.seams)
        self.key = hashlib.sha256(repr(described).encode()).hexdigest()[:32]
        self._values: Callable[..., Any] | None = None
        self._gradients: Callable[..., Any] | None = None

    def values(self, z: Tensor, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the seams of a chunk."""
        return (self._values if self._values is not None and len(z) > 1 else self._value_of)(z, *inputs)

    def gradients(self, z: Tensor, *operands: Tensor) -> Sequence[Tensor]:
        """Write dz over ``z``. Return the seams, and the gradients of the inputs that want one.

        ``operands``: a cotangent for each seam, then the inputs."""
        return (self._gradients if self._gradients is not None and len(z) > 1 else self._gradient_of)(z, *operands)

    def _value_of(self, z, *inputs):
        return self.body(z, *inputs)

    def _gradient_of(self, z, *operands):
        cotangents, inputs = operands[: len(self.seams)], operands[len(self.seams) :]
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            given = [i.detach().requires_grad_(want) for i, want in zip(inputs, self.wants, strict=True)]
            seams = self.body(leaf, *given)
            wanted = [leaf, *(i for i, want in zip(given, self.wants, strict=True) if want)]
            pairs = [(s, c.to(s.dtype)) for s, c in zip(seams, cotangents, strict=True) if s.requires_grad]
            found = torch.autograd.grad([s for s, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
        dz, *rest = (torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True))
        z.copy_(dz)
        return (*(s.detach() for s in seams), *rest)

    @functools.cached_property
    def _placeholders(self) -> list[fx.Node]:
        """Return those of the inputs, in order."""
        return self.body.graph.find_nodes(op="placeholder")[1:]

    @functools.cached_property
    def seams_of_inputs(self) -> list[set[int]]:
        """Return which seams each input is read for."""
        read: dict[fx.Node, set[int]] = {p: set() for p in self._placeholders}
        for i, seam in enumerate(self.body.graph.output_node().args[0]):
            waiting, seen = [seam], set()
            while waiting:
                node = waiting.pop()
                if node not in seen:
                    seen.add(node)
                    waiting += node.all_input_nodes
            for p in read.keys() & seen:
                read[p].add(i)
        return [read[p] for p in self._placeholders]

    @functools.cached_property
    def hiding(self) -> Hiding | None:
        """Return which rows need no logits; None where each does."""
        inputs = list(zip(self._placeholders, self.inputs, self.wants, strict=True))
        masks = [p for p, of, _ in inputs if of.per_row and of.dtype == torch.bool and not of.shape]
        return hiding(self.body.graph, masks, [p for p, _, want in inputs if want])

    def hidden(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return which rows the mask among the inputs hides."""
        assert self.hiding is not None
        mask = inputs[self._placeholders.index(self.hiding.mask)]
        return mask if self.hiding.value else ~mask

    def hidden_values(self, inputs: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Return the seams of so many rows, as if all were hidden."""
        assert self.hiding is not None
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, inputs, strict=False))
        for node in self.hiding.steps:
            if node in self.hiding.chosen:
                some, dtype = self._types[node]
                shape = tuple(rows if size == _SOME_ROWS else size for size in some)
                made = fx.map_arg(self.hiding.chosen[node], values.__getitem__)
                values[node] = torch.as_tensor(made, device=self.logits.device).to(dtype).expand(shape)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [values[seam] for seam in self.body.graph.output_node().args[0]]  # type: ignore[union-attr]

    @functools.cached_property
    def _types(self) -> dict[fx.Node, tuple[tuple[int, ...], torch.dtype]]:
        """The shape, for some rows, and the dtype of each tensor that the body computes."""
        def meta(of: Operand) -> Tensor:
            shape = (_SOME_ROWS, *of.shape) if of.per_row else of.shape
            return torch.empty(shape, dtype=of.dtype, device="meta")

        ShapeProp(self.body).propagate(*map(meta, (self.logits, *self.inputs)))
        known = ((node, node.meta.get("tensor_meta")) for node in self.body.graph.nodes)
        return {node: (tuple(of.shape), of.dtype) for node, of in known if isinstance(of, TensorMetadata)}

    def compile(self) -> None:
        """Compile both programs, where they run on a GPU."""
        if self.logits.device.type == "cpu" or self._values is not None:
            return
        cotangents = [Operand(shape, dtype, self.logits.device, per_row=True) for shape, dtype in self.seams]
        self._values = compiled_for_rows(self._value_of, [self.logits, *self.inputs])
        self._gradients = compiled_for_rows(self._gradient_of, [self.logits, *cotangents, *self.inputs])


def registered(program: RowProgram) -> str:
    """Compile a program, unless an equal one is known; return the key by which ops call it."""
    _PROGRAMS.setdefault(program.key, program).compile()
    return program.key


def program(key: str) -> RowProgram:
    """Return the program of a key. Raises RuntimeError where no graph of this process has registered it."""
    if key not in _PROGRAMS:
        raise RuntimeError(
            f"fx_fusion::linear_rows was called with the unknown program {key}. Programs are made when a graph is compiled: "
            "compile the model in this process."
        )
    return _PROGRAMS[key]


def in_an_op(program: RowProgram, z: Tensor, *operands: Tensor) -> Sequence[Tensor]:
    """``program.gradients`` below the dispatcher, where autograd is off. Hooks of a checkpoint around it see nothing."""
    with autograd_inside_an_op(), without_saved_tensor_hooks():
        return program.gradients(z, *operands)
