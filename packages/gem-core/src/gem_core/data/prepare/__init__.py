"""Raw event logs, larger than memory, to impressions with labels, as-of counts and event tables."""

from gem_core.data.prepare.options import Options
from gem_core.data.prepare.run import Prepared, prepare

__all__ = ["Options", "Prepared", "prepare"]
