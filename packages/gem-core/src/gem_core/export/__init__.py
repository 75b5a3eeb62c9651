"""Export: a trained model with its tables as one program over plain tensors, for other processes and machines."""

from gem_core.export.exported import Exported, load
from gem_core.export.parity import Parity
from gem_core.export.write import FORMATS, Written, export

__all__ = ["FORMATS", "Exported", "Parity", "Written", "export", "load"]
