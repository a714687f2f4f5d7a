"""A site as a small program: its fusion's pattern, on random inputs of the site's shapes and dtypes."""

from __future__ import annotations

import math

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.report.site import Site


def snippet(fusion: Fusion, site: Site) -> str:
    """The program: it explains the pattern alone. Scalars have the values of the fusion's tests, static parameters those of
    its first variant. Of a near miss no shapes are known: those of the fusion's smallest case are taken."""
    statics = fusion.variants[0]
    shapes = {name: shape for name, shape in site.shapes.items() if name in fusion.specs}
    lines = [f"# {' '.join(f'{site.status}: {site.fusion} {site.module} ({site.location}) {site.reason}'.split())}"]
    lines += ["import torch", "", "import fx_fusion", *_import_of(fusion), ""]
    if not shapes:
        lines += [
            "from fx_fusion.testing import make_inputs", "",
            f"statics = {dict(statics)!r}",
            f"given = make_inputs({fusion.name}.FUSION, {fusion.name}.FUSION.small_case, statics, torch.float32, 'cpu')",
            "given.update(statics)",
        ]  # fmt: skip
    else:
        lines += ["given = dict("]
        for name, declared in fusion.inputs.items():
            if name in statics:
                continue
            if name in fusion.specs:
                lines.append(f"    {name}={_tensor(fusion, name, shapes[name]) if name in shapes else None},")
            else:
                lines.append(f"    {name}={declared!r},")
        lines += [*(f"    {name}={value!r}," for name, value in statics.items()), ")"]
    lines += [
        f'options = {{"select": "always", "fusions": ["{fusion.name}"]}}',
        f"print(fx_fusion.explain({fusion.name}.FUSION.pattern, options=options, **given))",
    ]
    return "\n".join(lines) + "\n"


def _import_of(fusion: Fusion) -> list[str]:
    room, _, name = fusion.pattern.__module__.rpartition(".")
    return [f"from {room} import {name}" + f" as {fusion.name}" * (name != fusion.name)]


def _tensor(fusion: Fusion, name: str, shape: str) -> str:
    """``bfloat16[8, 2048]`` -> the call that makes one; sizes that are symbols are 8."""
    dtype, _, sizes = shape.removesuffix("]").partition("[")
    given = [int(size) if size.isdigit() else 8 for size in sizes.split(", ") if size]
    dims = fusion.specs[name].dims
    if len(given) > len(dims) and not any(dim.name == "..." for dim in dims):  # a finder takes rows of any shape
        given = [math.prod(given[: len(given) - len(dims) + 1]), *given[len(given) - len(dims) + 1 :]]
    numbers = ", ".join(map(str, given))
    if name in fusion.integers:
        return f"torch.randint(0, 2, ({numbers},), dtype=torch.{dtype})"
    if dtype == "bool":
        return f"torch.rand({numbers}) > 0.5"
    if name in fusion.complex_inputs:
        return f"torch.polar(torch.ones({numbers}), torch.randn({numbers}))"
    learns = "" if name in fusion.frozen else ", requires_grad=True"
    return f"torch.randn({numbers}, dtype=torch.{dtype}{learns})"
