"""A generated ads log of any size with a planted truth: the best possible NE is known, so a model's gap to it is too.

`GeneratedReader` makes it in memory, `write` as Parquet files; `world` has the formulas of the truth.
"""

from gem_core.data.generated.config import Conversion, GeneratedConfig
from gem_core.data.generated.files import measure, write
from gem_core.data.generated.log import Block, Log
from gem_core.data.generated.oracle import Oracle
from gem_core.data.generated.reader import GeneratedReader

__all__ = ["Block", "Conversion", "GeneratedConfig", "GeneratedReader", "Log", "Oracle", "measure", "write"]
