"""`Jagged` and `Batch`: plain tensors in a pytree, the only thing that crosses the border between data and model.

Shape letters: B rows (one ad shown), Q requests (one user at one time; its rows share it), T events of a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Jagged:
    """Ragged sequences: segment i is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: (sum of lengths, ...).
        offsets: (n + 1,) int64, from 0, non-decreasing, last = len(values).
        max_length: longest segment that the schema allows (not the longest of this batch).
    """

    values: Tensor
    offsets: Tensor
    max_length: int

    def lengths(self) -> Tensor:
        """(n,) int64."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return self.offsets.numel() - 1


@dataclass(frozen=True)
class Batch:
    """B rows of Q requests. Rows of one request are adjacent and share its request-level features and events.

    Attributes:
        dense: (B, n) float32, columns in the schema's order of row-level dense features; missing values are NaN.
        ids: row-level sparse features, each a `Jagged` of B segments of int64 ids (0 missing, 1 unseen, 2.. known).
        vectors: row-level vector features, each (B, width) float32.
        request_dense, request_ids, request_vectors: the same at request level (Q instead of B).
        events: per event type and field a `Jagged` of Q segments, newest event first; every type has the field
            `time` (int64 seconds); sparse fields are int64 ids, dense fields float32. Fields of a type share offsets.
        request: (B,) int64, the request of each row, non-decreasing.
        request_time: (Q,) int64 seconds.
        user: (Q,) int64, a stable key of the user (for per-user metrics and stores, not a table id).
        surface: (B,) int64 index into the schema's surfaces.
        row_id: (B,) int64.
        labels, masks, weights: per head (`Schema.heads`) (B,) float32; a label counts where its mask is 1, with its weight.
        rates: per task with `correction: shift` (B,) float32, the rate at which negatives were kept.
    """

    dense: Tensor
    ids: dict[str, Jagged]
    vectors: dict[str, Tensor]
    request_dense: Tensor
    request_ids: dict[str, Jagged]
    request_vectors: dict[str, Tensor]
    events: dict[str, dict[str, Jagged]]
    request: Tensor
    request_time: Tensor
    user: Tensor
    surface: Tensor
    row_id: Tensor
    labels: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    rates: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """B."""
        return self.request.numel()

    @property
    def requests(self) -> int:
        """Q."""
        return self.request_time.numel()

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with `fn` applied to every tensor."""
        out: Batch = pytree.tree_map_only(Tensor, fn, self)
        return out

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return self.map(lambda t: t.to(device, non_blocking=True))


def _jagged(leaves: Iterable[Tensor], max_length: int) -> Jagged:
    values, offsets = leaves
    return Jagged(values, offsets, max_length)


def _with_keys(node: object, names: Iterable[str]) -> list[tuple[pytree.KeyEntry, object]]:
    # As keys, not attributes: torch.export's guards take `request` for a part of `request_time`.
    return [(pytree.MappingKey(name), getattr(node, name)) for name in names]


def _register() -> None:
    pytree.register_pytree_node(
        Jagged,
        lambda j: ([j.values, j.offsets], j.max_length),
        _jagged,
        flatten_with_keys_fn=lambda j: (_with_keys(j, ("values", "offsets")), j.max_length),
        serialized_type_name="gem_core.Jagged",
        to_dumpable_context=str,
        from_dumpable_context=int,
    )
    names = [f.name for f in dataclasses.fields(Batch)]
    pytree.register_pytree_node(
        Batch,
        lambda b: ([getattr(b, n) for n in names], None),
        lambda leaves, _: Batch(*leaves),
        flatten_with_keys_fn=lambda b: (_with_keys(b, names), None),
        serialized_type_name="gem_core.Batch",
    )


_register()
