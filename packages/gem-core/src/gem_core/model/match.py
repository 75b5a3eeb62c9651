"""Match tokens: for each ad, when the user's events shared its item, type, brand, ... - exact target awareness, linear in
the number of events.

For every sparse event field and single-valued row feature that share a table, the events of a row's request that have
the row's id are counted per logarithmic bin of age. The counts have no gradient; a linear map makes tokens of them.

Shape letters: B rows, Q requests, T events, P (row, event) pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gem_core.data.batch import Batch
from gem_core.schema import FIRST_KNOWN, Schema


def matched_fields(schema: Schema) -> list[tuple[str, str, str]]:
    """(event type, field, row feature) of every pair that can match: one table, one value per row."""
    single = [name for name, f in schema.sparse.items() if f.level == "row" and not f.multi]
    return [
        (event, name, feature)
        for event, kind in schema.events.items()
        for name, field in kind.fields.items()
        if field.kind == "sparse"
        for feature in single
        if schema.table_of(feature) == schema.table_of(f"{event}.{name}")
    ]


class MatchCounts(nn.Module):
    """(B, fields * bins): log(1 + number of matching events) per field and bin of age; bins are geometric from
    `first` to `last` days, the outermost open."""

    edges: Tensor

    def __init__(self, schema: Schema, bins: int, first: float = 4.0, last: float = 365.0) -> None:
        super().__init__()
        self.fields = matched_fields(schema)
        ratio = (last / first) ** (1 / max(bins - 2, 1))
        edges = torch.tensor([math.log(first * 86400 * ratio**i) for i in range(bins - 1)])
        self.register_buffer("edges", edges, persistent=False)
        self.bins = bins
        self.width = len(self.fields) * bins

    def forward(self, batch: Batch) -> Tensor:
        rows_of = batch.request_offsets()
        counts = torch.zeros(batch.rows * self.width, device=batch.request.device)
        by_type: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for index, (event, field, feature) in enumerate(self.fields):
            events = batch.events[event]
            if event not in by_type:
                by_type[event] = self._age_bins(batch, event)
            bin_of, request_of, _ = by_type[event]
            row, at = match_pairs(batch.ids[feature].values, rows_of, events[field].values, request_of)
            cell = row * self.width + index * self.bins + bin_of[at]
            counts += torch.bincount(cell, minlength=counts.numel())
        return counts.log1p_().view(batch.rows, self.width)

    def _age_bins(self, batch: Batch, event: str) -> tuple[Tensor, Tensor, Tensor]:
        time = batch.events[event]["time"]
        request_of = torch.arange(batch.requests, device=time.values.device).repeat_interleave(
            time.lengths(), output_size=time.values.numel()
        )
        gaps = (batch.request_time[request_of] - time.values).clamp(min=1)
        return torch.bucketize(gaps.to(torch.float32).log(), self.edges), request_of, gaps


def match_pairs(row_ids: Tensor, rows_of: Tensor, event_ids: Tensor, request_of: Tensor) -> tuple[Tensor, Tensor]:
    """All (row, event) of one request with equal known ids, as two (P,) index tensors.

    A merge join: rows sorted by (request, id), each event finds its range of rows. Missing and unseen ids match nothing.
    """
    size = int(max(row_ids.max() if row_ids.numel() else 0, event_ids.max() if event_ids.numel() else 0)) + 1
    request_of_row = torch.arange(rows_of.numel() - 1, device=row_ids.device).repeat_interleave(
        rows_of.diff(), output_size=row_ids.numel()
    )
    keys, order = (request_of_row * size + row_ids).sort()
    wanted = request_of * size + event_ids
    low = torch.searchsorted(keys, wanted)
    count = torch.searchsorted(keys, wanted, right=True) - low
    count = torch.where(event_ids >= FIRST_KNOWN, count, 0)
    at = torch.arange(event_ids.numel(), device=row_ids.device).repeat_interleave(count)
    start = count.cumsum(0) - count
    within = torch.arange(at.numel(), device=row_ids.device) - start[at]
    return order[low[at] + within], at
