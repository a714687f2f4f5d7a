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
    "explain",
    "recording",
]
__version__ = "0.1.0"


def explain(model: Any, *args: Any, options: Any = None, **kwargs: Any) -> Report:
    """What the backend would do with ``model(*args, **kwargs)``; see ``fx_fusion.explaining.explain``."""
    from fx_fusion.explaining import explain as explain_

    return explain_(model, *args, options=options, **kwargs)
