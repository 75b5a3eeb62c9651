"""Match tokens: for each ad, when the user's events shared its item, type, brand, ... - exact target awareness, linear in
the number of events.

For every sparse event field and single-valued row feature that share a table, the events of a row's request that have
the row's id are counted per logarithmic bin of age. The counts have no gradient; a linear map makes tokens of them.

Shape letters: B rows, Q requests, T events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError, nearest
from gem_core.schema import FIRST_KNOWN, Schema

DAY = 86400.0


def matched_fields(schema: Schema, chosen: Sequence[str] | None) -> list[tuple[str, str, str]]:
    """(event type, field, row feature) of every pair that can match: one table, one value per row.

    Args:
        chosen: "<event type>.<field>" of those wanted, None for all.

    Raises:
        ConfigError: a field chosen cannot match, or none can.
    """
    single = [name for name, f in schema.sparse.items() if f.level == "row" and not f.multi]
    possible: dict[str, list[tuple[str, str, str]]] = {}
    for key in schema.sparse_keys():
        event, _, name = key.partition(".")
        pairs = [(event, name, feature) for feature in single if schema.table_of(feature) == schema.table_of(key)]
        if name and pairs:
            possible[key] = pairs
    for key in chosen or ():
        if key not in possible:
            raise ConfigError(
                f'model.match_fields: "{key}" is no event field that shares a table with a row feature'
                f"{nearest(key, possible)}"
            )
    if not possible:
        raise ConfigError("model.match_bins: no event field shares a table with a row feature, so nothing can match")
    return [pair for key in (possible if chosen is None else chosen) for pair in possible[key]]


class MatchCounts(nn.Module):
    """(B, fields * bins): log(1 + number of matching events) per field and bin of age; bins are geometric from
    `first` to `last` days, the outermost open."""

    edges: Tensor

    def __init__(
        self, schema: Schema, bins: int, fields: Sequence[str] | None, first: float = 4.0, last: float = 365.0
    ) -> None:
        super().__init__()
        self.fields = matched_fields(schema, fields)
        ratio = (last / first) ** (1 / max(bins - 2, 1))
        edges = torch.tensor([math.log(first * DAY * ratio**i) for i in range(bins - 1)])
        self.register_buffer("edges", edges, persistent=False)
        self.bins = bins
        self.known = {feature: schema.table_rows(schema.table_of(feature)) for _, _, feature in self.fields}
        self.width = len(self.fields) * bins

    def forward(self, batch: Batch) -> Tensor:
        counts: list[Tensor] = []
        bins: dict[str, tuple[Tensor, Tensor]] = {}
        for event, field, feature in self.fields:
            if event not in bins:
                bins[event] = self._age_bins(batch, event)
            request, age = bins[event]
            ids, known = batch.events[event][field].values, self.known[feature]
            counts.append(match_counts(batch.ids[feature].values, batch.request, ids, request, age, self.bins, known))
        return torch.cat(counts, 1).log1p_()

    def _age_bins(self, batch: Batch, event: str) -> tuple[Tensor, Tensor]:
        """The request and the bin of age of each event."""
        time = batch.events[event]["time"]
        request = torch.arange(batch.requests, device=time.values.device).repeat_interleave(
            time.lengths(), output_size=time.values.shape[0]
        )
        gaps = (batch.request_time[request] - time.values).clamp(min=1)
        return request, torch.bucketize(gaps.to(torch.float32).log(), self.edges)


def match_counts(
    row_ids: Tensor, row_request: Tensor, event_ids: Tensor, event_request: Tensor, age: Tensor, bins: int, known: int
) -> Tensor:
    """(B, bins): for each row, how many events of its request with its id (0 .. known - 1) fall in each bin of age.

    Events are sorted by (request, id, bin); a row's counts are the distances between its bins' places in that order, so
    the cost does not depend on how many events match. Missing and unseen ids match nothing.
    """
    keys = ((event_request * known + event_ids) * bins + age).sort().values
    wanted = (row_request * known + row_ids).unsqueeze(1) * bins + torch.arange(bins + 1, device=row_ids.device)
    counts = torch.searchsorted(keys, wanted).diff(dim=1)
    return counts.where((row_ids >= FIRST_KNOWN).unsqueeze(1), 0).to(torch.float32)
