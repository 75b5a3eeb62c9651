"""The ops of GEM: ragged attention, GDPA, rotations and norms, each one public function over interchangeable backends.

Ragged layout: values (sum T, H, d), offsets (B + 1) int64, and a declared maximum length; no padding is stored or computed. Backends are
picked per call: `set_backends` or `use_backend`, else the environment variable GEM_OPS_BACKEND, else the first by priority that supports it.
This package imports torch and the standard library only.
"""

from gem_core.ops.activations import ACTIVATIONS
from gem_core.ops.dispatch import (
    OpBackend,
    OpSpec,
    Saved,
    register_backend,
    registered,
    set_backends,
    unregister_backend,
    use_backend,
)
from gem_core.ops.jagged import gather_segments, lengths, positions, segment_ids, segment_mean, segment_sum
from gem_core.ops.masks import MASKS
from gem_core.ops.norms import layer_norm, rms_norm
from gem_core.ops.pointwise import gdpa, gdpa_ffn, hstu_attention
from gem_core.ops.rotary import rote
from gem_core.ops.softmax import block_attention, jagged_attention, seed_attention

_REFERENCES = {
    "jagged_attention": "JaggedReference",
    "block_attention": "BlockReference",
    "seed_attention": "SeedReference",
    "gdpa": "GdpaReference",
    "gdpa_ffn": "FfnReference",
    "hstu_attention": "HstuReference",
    "rote": "RoteReference",
}
for _op, _name in _REFERENCES.items():
    register_backend(_op, "reference", f"gem_core.ops.reference:{_name}", priority=0)

__all__ = [
    "ACTIVATIONS",
    "MASKS",
    "OpBackend",
    "OpSpec",
    "Saved",
    "block_attention",
    "gather_segments",
    "gdpa",
    "gdpa_ffn",
    "hstu_attention",
    "jagged_attention",
    "layer_norm",
    "lengths",
    "positions",
    "register_backend",
    "registered",
    "rms_norm",
    "rote",
    "seed_attention",
    "segment_ids",
    "segment_mean",
    "segment_sum",
    "set_backends",
    "unregister_backend",
    "use_backend",
]
