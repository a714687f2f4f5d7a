"""fx_fusion: a torch.compile backend that recognises what a model means and trains it with fused kernels.

model = torch.compile(model, backend="fx_fusion")
with fx_fusion.recording() as report:
    model(**batch).loss.backward()
print(report)
"""

from typing import Any

from fx_fusion.errors import DeclarationError, FusionError, OptionError, StaleTensorError
from fx_fusion.report.recording import recording
from fx_fusion.report.report import Report
from fx_fusion.report.site import Site

__all__ = [
    "DeclarationError",
    "FusionError",
    "OptionError",
    "Report",
    "Site",
    "StaleTensorError",
    "compile",
    "explain",
    "recording",
]
__version__ = "0.1.0"


def compile(model: Any, *, options: Any = None, **kwargs: Any) -> Any:
    """``torch.compile(model, backend="fx_fusion", options=options, **kwargs)``, with the options checked now.

    torch.compile itself asks a backend at the first call, and takes a mode or options: ``options={"mode": ...}`` has both.

    Raises:
        OptionError: an option or mode that nobody knows.
    """
    import torch

    from fx_fusion.options import parse

    parse(kwargs.get("mode"), options)
    return torch.compile(model, backend="fx_fusion", options=options, **kwargs)


def explain(model: Any, *args: Any, options: Any = None, **kwargs: Any) -> Report:
    """What the backend would do with ``model(*args, **kwargs)``; see ``fx_fusion.explaining.explain``."""
    from fx_fusion.explaining import explain as explain_

    return explain_(model, *args, options=options, **kwargs)
