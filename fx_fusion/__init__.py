"""fx_fusion: a torch.compile backend that recognizes what a model means and trains it with fused kernels.

model = torch.compile(model, backend="fx_fusion")
with fx_fusion.recording() as report:
    model(**batch).loss.backward()
print(report)
"""

import importlib
import os
from typing import Any

from fx_fusion.after_import import after_import
from fx_fusion.torch_internals.backend_names import REGISTRY, add_ours

__version__ = "0.1.0"
for _name in ("kernels", "patterns"):  # links in a checkout, folders in a wheel
    if not os.path.isdir(_path := os.path.join(os.path.dirname(__file__), _name)):
        raise ImportError(
            f"{_path} has to be a folder, and is {'a file' if os.path.exists(_path) else 'missing'}: this copy of fx_fusion "
            "came without its symbolic links (a zip, or a file system that has none). Clone it with git, or, where its "
            "README is: ln -sfn ../kernels fx_fusion/kernels && ln -sfn ../patterns fx_fusion/patterns; then install it."
        )
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
# torch.compile knows the name without an installed entry point, and accelerate has a list of its own.
after_import(REGISTRY, add_ours)
after_import("accelerate.utils.dataclasses", lambda module: importlib.import_module("fx_fusion.accelerate"))


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'fx_fusion' has no attribute {name!r}")
    found = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted((*globals(), *_NAMES))
