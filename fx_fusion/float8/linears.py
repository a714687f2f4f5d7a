"""Record what became of the linears of a graph, for the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FORWARD, OF_INPUT, OF_WEIGHT = "forward", "gradient of the input", "gradient of the weight"
_SEVERAL = {FORWARD: "forward of", OF_INPUT: "gradients of inputs of", OF_WEIGHT: "gradients of weights of"}


@dataclass
class Linears:
    """The fate of the products of linears of one joint graph. ``asked``, but not ``made``: torch's cache had the compiled
    graph already. ``products``: of each its module, which of the three it is, why it stays in bfloat16, empty for one in
    float8, and the seconds that float8 gains there, by formula. Gradients of weights that the recipe leaves out are not
    listed."""

    recipe: str = "off"
    asked: bool = False
    made: bool = False
    products: list[tuple[str, str, str, float]] = field(default_factory=list)
    trouble: str = ""  # why all others stay in bfloat16, if something raised or the device has no float8

    @property
    def any(self) -> bool:
        """Return True if a product runs in float8."""
        return any(not reason for _, _, reason, _ in self.products)

    def sentences(self) -> list[str]:
        """Return what runs in float8; what does not, and why."""
        if not self.asked:
            return []
        if self.trouble:
            return [f"float8 {self.recipe}: {'the rest' if self.any else 'all'} in bfloat16: {self.trouble}"]
        if not self.made:
            return [f"float8 {self.recipe}: from torch's compile cache, decided when it was compiled"]
        said = []
        for kind, several in _SEVERAL.items():
            names = Counter(_leaf(m) for m, found, reason, _ in self.products if found == kind and not reason)
            said += [f"{several} {_listed(names)}"] if names else []
        gained = sum(seconds for *_, reason, seconds in self.products if not reason)
        said += [f"about {1e3 * gained:.2g} ms gained, by formula"] if gained else []
        found = [f"float8 {self.recipe}: {'; '.join(said) or 'nothing'}"]
        kept = Counter((_leaf(m), kind, reason) for m, kind, reason, _ in self.products if reason)
        for (name, kind, reason), count in kept.items():
            found.append(f"float8 {self.recipe}: in bfloat16: {kind} of {count} x {name}: {reason}")
        return found


def _leaf(module: str) -> str:
    return next((part for part in reversed(module.split(".")) if not part.isdigit()), "") or "a function"


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in names.items())
