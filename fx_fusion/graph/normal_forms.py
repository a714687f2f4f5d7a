"""The normal forms: one rule a spelling family, from a call with bound arguments to its term."""

from __future__ import annotations

from fx_fusion.graph import arithmetic_forms, norm_forms, shape_forms
from fx_fusion.graph.forms import Rules, plain

__all__ = ["RULES", "plain"]

RULES = Rules({**arithmetic_forms.RULES, **norm_forms.RULES, **shape_forms.RULES})
