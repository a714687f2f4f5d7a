"""Whether a legal fusion pays here. A kept site is reported with the sentence that decided."""

from __future__ import annotations

from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion import measure, tables
from fx_fusion.canonicalize import is_tensor, value
from fx_fusion.fusion import Fusion
from fx_fusion.legality import arguments_of
from fx_fusion.match import Match
from fx_fusion.options import Options
from fx_fusion.sizes import expected


def why_keep(fusion: Fusion, match: Match, options: Options) -> str | None:
    """Why Inductor keeps this site, or None: the fused op replaces it."""
    if fusion.name not in options.fusions:
        return "switched off by options"
    if options.select == "always":
        return None
    if options.select == "never":
        return 'options={"select": "never"}'
    if options.select == "measure":
        known, sentence = measure.why_slower(fusion, match)
        if known:
            return sentence
    name = next(n for n, v in match.inputs.items() if is_tensor(v))
    tensor, spec = value(match.inputs[name]), str(fusion.inputs[name]).split()
    if tensor.device.type == "cpu" and not fusion.on_cpu:
        return "on CPU Inductor compiles this as well"
    rows = spec[0] == "..." and len(spec) > 1 and expected(tensor.shape[-1]) > 1
    if rows and statically_known_true(tensor.stride(-1) != 1):
        return "its rows are no rows in memory; the kernel would need a copy"
    if fusion.pays is not None and (sentence := fusion.pays(**arguments_of(fusion, match))) is not None:
        return sentence
    return tables.why_slower(fusion, match)
