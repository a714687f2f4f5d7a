"""The dims of an input, as a declaration writes them: ``"... n"``, ``"b h s d"``, ``"b|1 h|1 s|1 c|1"``, ``"(c)"``.

    n       a dim; the same name is the same size in all inputs
    n|1     may be 1 or, on the left, missing: it is broadcast
    n?      may be missing on the left
    t=s     a dim of its own; tests and benchmarks make it as long as s
    1       a dim of size 1
    ...     any number of dims, walked as they lie; their product is ``m``
    m       any number of dims that the kernel gets as one
    (c)     one dim; dims of size 1 around it are dropped before the kernel gets it
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.errors import DeclarationError

_DIM = re.compile(r"(?P<name>[a-z][a-z0-9_]*)(=(?P<like>[a-z][a-z0-9_]*))?(?P<may>\|1|\?)?")


@dataclass(frozen=True)
class Dim:
    """One entry of a spec."""

    name: str  # "..." for any number of dims, "1" for a dim of size 1
    broadcast: bool = False
    optional: bool = False
    like: str | None = None  # the dim that tests make it as long as

    @property
    def several(self) -> bool:
        """Return True if it stands for any number of dims."""
        return self.name in ("...", "m")


@dataclass(frozen=True)
class Spec:
    """The dims of one tensor."""

    text: str
    dims: tuple[Dim, ...]
    squeezed: bool = False

    @property
    def names(self) -> list[str]:
        """The names of its sizes: ``m`` for ``...``."""
        return ["m" if dim.name == "..." else dim.name for dim in self.dims if dim.name != "1"]

    def align(self, rank: int) -> list[tuple[Dim, slice]] | None:
        """Return which dims of a tensor of ``rank`` dims each entry stands for; None where it has too few or too many."""
        dims = list(self.dims)
        fixed = sum(not dim.several for dim in dims)
        while fixed > rank:
            leftmost = next(dim for dim in dims if not dim.several)
            if not (leftmost.broadcast or leftmost.optional):
                return None
            dims.remove(leftmost)
            fixed -= 1
        extra = rank - fixed
        if extra and not any(dim.several for dim in dims):
            return None
        places, at = [], 0
        for dim in dims:
            width = extra if dim.several else 1
            places.append((dim, slice(at, at + width)))
            at += width
        return places

    def why_not(self, parameter: str, shape: Sequence[Any], sizes: dict[str, Any]) -> str | None:
        """Return why a shape is not what the spec says, given the sizes of other inputs (this one's are added), or None.
        Symbolic sizes are compared without adding a guard."""
        if self.squeezed:
            shape = [n for n in shape if not statically_known_true(n == 1)] or [1]
        places = self.align(len(shape))
        if places is None:
            return f"{parameter} has shape {tuple(shape)}; the kernel takes ({self.text.strip('()')})"
        for dim, where in places:
            if dim.several:
                continue
            size = shape[where.start]
            if dim.broadcast and statically_known_true(size == 1):
                continue
            wanted = 1 if dim.name == "1" else sizes.setdefault(dim.name, size)
            if not statically_known_true(wanted == size):
                return f"{parameter} has shape {tuple(shape)}; its {dim.name} must be {wanted}"
        return None

    def sizes(self, shape: Sequence[float]) -> dict[str, float] | None:
        """Its sizes for a shape, without dims that are broadcast; None where the shape does not fit."""
        if self.squeezed:
            return {self.dims[0].name: math.prod(shape)}
        places = self.align(len(shape))
        if places is None:
            return None
        sizes: dict[str, float] = {}
        for dim, where in places:
            if dim.several:
                sizes["m"] = math.prod(shape[where])
            elif dim.name != "1" and not dim.broadcast:
                sizes[dim.name] = shape[where.start]
        return sizes

    def layout(self, strides: Sequence[float]) -> str:
        """The entries in the order in which they lie in memory: ``"b ... c"`` for ``"b c ..."`` with channels last."""
        places = self.align(len(strides)) or []
        largest = {dim.name: max(strides[where]) for dim, where in places if where.start < where.stop}
        return " ".join(sorted(largest, key=lambda name: -largest[name]))


def parse(fusion: str, parameter: str, text: str) -> Spec:
    """The spec that a declaration writes. Raises DeclarationError where it says nothing that can be checked."""
    squeezed = text.startswith("(") and text.endswith(")")
    dims = tuple(_dims(fusion, parameter, text[1:-1] if squeezed else text))
    several = [dim.name for dim in dims if dim.several]
    if len(several) > 1:
        raise _wrong(fusion, parameter, text, f"{' and '.join(several)} are both any number of dims; only one may be")
    if squeezed and (len(dims) != 1 or several or dims[0].broadcast or dims[0].name == "1"):
        raise _wrong(fusion, parameter, text, "parentheses hold the name of one dim, as in (c)")
    return Spec(text, dims, squeezed)


def _dims(fusion: str, parameter: str, text: str) -> Iterator[Dim]:
    for token in text.split():
        if token in ("...", "1"):
            yield Dim(token)
        elif (match := _DIM.fullmatch(token)) is not None:
            if match["name"] == "m" and match["may"]:
                raise _wrong(fusion, parameter, text, "m stands for any number of dims; it can't be broadcast or missing")
            yield Dim(match["name"], match["may"] == "|1", match["may"] == "?", match["like"])
        else:
            raise _wrong(fusion, parameter, text, f"{token!r} is no dim")


def _wrong(fusion: str, parameter: str, text: str, reason: str) -> DeclarationError:
    return DeclarationError(
        f"fusion {fusion!r}, input {parameter!r}: the dims {text!r} can't be read: {reason}. Write names between spaces: "
        "n (a dim), n|1 (may be broadcast), n? (may be missing), t=s (as long as s in tests), 1, ... or m (any number of "
        "dims), (c) (dims of size 1 around it)."
    )


def mismatch(specs: Mapping[str, Spec], tensors: Mapping[str, Any]) -> str | None:
    """Return why the shapes of a site's tensors are not what their specs say together, or None."""
    sizes: dict[str, Any] = {}
    for parameter, tensor in tensors.items():
        if (reason := specs[parameter].why_not(parameter, tensor.shape, sizes)) is not None:
            return reason
    return None
