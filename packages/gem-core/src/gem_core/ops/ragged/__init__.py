"""The default backend on processors, "ragged": the work is cut into dense tiles that follow the real lengths.

A long sequence is one kernel call on views of its rows; short ones of about the same length are gathered into one call. Nothing is
padded to the batch's maximum, and shared keys are never copied for the rows that share them.
"""

from gem_core.ops.ragged.pointwise import RaggedFfn, RaggedGdpa, RaggedHstu
from gem_core.ops.ragged.rotary import RaggedRote
from gem_core.ops.ragged.softmax import RaggedBlock, RaggedJagged, RaggedSeed

__all__ = ["RaggedBlock", "RaggedFfn", "RaggedGdpa", "RaggedHstu", "RaggedJagged", "RaggedRote", "RaggedSeed"]
