"""The ops of GEM: ragged attention, GDPA, rotations and norms, each one public function over interchangeable backends.

Ragged layout: values (sum T, H, d), offsets (B + 1) int64, and a declared maximum length; no padding is stored or computed. Backends are
picked per call: `set_backends` or `use_backend`, else the environment variable GEM_OPS_BACKEND, else the first by priority that supports it.
This package imports torch and the standard library only.
"""

import gem_core.ops.flops  # noqa: F401 - registers the formulas of torch.utils.flop_counter
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

for _op, _class in {
    "jagged_attention": "Jagged",
    "block_attention": "Block",
    "seed_attention": "Seed",
    "gdpa": "Gdpa",
    "gdpa_ffn": "Ffn",
    "hstu_attention": "Hstu",
    "rote": "Rote",
}.items():
    register_backend(_op, "reference", f"gem_core.ops.reference:{_class}Reference", priority=0)
    register_backend(_op, "ragged", f"gem_core.ops.ragged:Ragged{_class}", priority=10)

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
