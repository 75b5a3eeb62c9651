"""The reference of every op: plain PyTorch, float64 capable, correctness before speed. Registered as backend "reference"."""

from gem_core.ops.reference.pointwise import FfnReference, GdpaReference, HstuReference
from gem_core.ops.reference.rotary import RoteReference
from gem_core.ops.reference.softmax import BlockReference, JaggedReference, SeedReference

__all__ = [
    "BlockReference",
    "FfnReference",
    "GdpaReference",
    "HstuReference",
    "JaggedReference",
    "RoteReference",
    "SeedReference",
]
