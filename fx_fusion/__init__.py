"""fx_fusion: a torch.compile backend that recognises what a model means and trains it with fused kernels.

model = torch.compile(model, backend="fx_fusion")
with fx_fusion.recording() as report:
    model(**batch).loss.backward()
print(report)
"""

import importlib
from typing import Any

__version__ = "0.1.0"
# Where each name is. Imported at first use: ``python -m fx_fusion --help`` needs no torch. Types: ``__init__.pyi``.
_NAMES = {
    "DeclarationError": "fx_fusion.errors",
    "FusionError": "fx_fusion.errors",
    "OptionError": "fx_fusion.errors",
    "Report": "fx_fusion.report.report",
    "Site": "fx_fusion.report.site",
    "StaleTensorError": "fx_fusion.errors",
    "VerificationError": "fx_fusion.errors",
    "compile": "fx_fusion.explaining",
    "explain": "fx_fusion.explaining",
    "float8_stats": "fx_fusion.float8.stats",
    "recording": "fx_fusion.report.recording",
    "register": "fx_fusion.fusion.registry",
    "verify": "fx_fusion.verifying",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'fx_fusion' has no attribute {name!r}")
    found = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted((*globals(), *_NAMES))
