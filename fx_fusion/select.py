"""Whether a legal fusion pays here. A kept site is reported with the sentence that decided."""

from __future__ import annotations

from fx_fusion import measure, tables
from fx_fusion.canonicalize import is_tensor, value
from fx_fusion.fusion import Fusion
from fx_fusion.legality import arguments_of
from fx_fusion.match import Match
from fx_fusion.options import Options


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
    tensor = next(value(v) for v in match.inputs.values() if is_tensor(v))
    if tensor.device.type == "cpu" and not fusion.on_cpu:
        return "on CPU Inductor compiles this as well"
    if fusion.pays is not None and (sentence := fusion.pays(**arguments_of(fusion, match))) is not None:
        return sentence
    return tables.why_slower(fusion, match)
