from fx_fusion.errors import DeclarationError as DeclarationError
from fx_fusion.errors import FusionError as FusionError
from fx_fusion.errors import OptionError as OptionError
from fx_fusion.errors import StaleTensorError as StaleTensorError
from fx_fusion.errors import VerificationError as VerificationError
from fx_fusion.explaining import compile as compile
from fx_fusion.explaining import explain as explain
from fx_fusion.float8.stats import float8_stats as float8_stats
from fx_fusion.fusion.registry import register as register
from fx_fusion.report.recording import recording as recording
from fx_fusion.report.report import Report as Report
from fx_fusion.report.site import Site as Site
from fx_fusion.verifying import verify as verify

__version__: str
