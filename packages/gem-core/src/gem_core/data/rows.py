"""Encoded rows and stored events as flat arrays, and the assembly of batches from them.

A batch of 2,048 rows costs a few gathers: nothing here loops over rows, requests or events. The arrays are plain numpy,
so that forked reader processes share them with their parent without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from gem_core.data.batch import Batch, Jagged
from gem_core.data.columns import Ints

Array = npt.NDArray[np.generic]
Dense = npt.NDArray[np.float32]
Kind = TypeVar("Kind", bound=np.generic)


def joined(parts: Sequence[Array], kind: type[np.generic] = np.generic) -> Any:
    """All parts in one array; of type `kind` if there are none."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, kind)


def spread(start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Indices start[i] .. start[i] + length[i] - 1 of all i in a row, and their (n + 1,) offsets."""
    offsets = np.zeros(len(length) + 1, np.int64)
    np.cumsum(length, out=offsets[1:])
    return np.repeat(start - offsets[:-1], length) + np.arange(offsets[-1]), offsets


def spread_back(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Indices end[i] - 1 down to start[i] of all i in a row, and their (n + 1,) offsets."""
    offsets = np.zeros(len(start) + 1, np.int64)
    np.cumsum(end - start, out=offsets[1:])
    return np.repeat(end - 1 + offsets[:-1], end - start) - np.arange(offsets[-1]), offsets


def _tensor(values: Array) -> torch.Tensor:
    """As a tensor; narrow stored ids become int64."""
    return torch.from_numpy(values.astype(np.int64) if values.dtype == np.int32 else values)


def by_column(columns: int, rows: int, kind: type[Kind]) -> npt.NDArray[Kind]:
    """An empty (columns, rows) array to fill by columns, for `by_row`."""
    # Columns a power of two apart would share a few lines of the cache when they are turned round.
    return np.empty((columns, rows + 16), kind)[:, :rows]


def by_row(parts: Sequence[npt.NDArray[Kind]]) -> npt.NDArray[Kind]:
    """(sum of rows, columns) of parts (columns, rows of it): one copy joins them and turns them round."""
    out = np.empty((sum(part.shape[1] for part in parts), len(parts[0])), parts[0].dtype)
    first = 0
    for part in parts:
        out[first : first + part.shape[1]] = part.T
        first += part.shape[1]
    return out


@dataclass(frozen=True)
class IdColumn:
    """Ids of n rows in segments: those of row i are offsets[i] .. offsets[i + 1] - 1."""

    values: npt.NDArray[np.int32]
    offsets: Ints
    max_length: int

    @staticmethod
    def concat(parts: Sequence[IdColumn]) -> IdColumn:
        """One column of the rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        values = np.concatenate([p.values for p in parts])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(p.offsets) for p in parts]))])
        return IdColumn(values, offsets, parts[0].max_length)

    def take(self, index: Ints) -> Jagged:
        """The segments of rows `index`."""
        start = self.offsets[index]
        inner, offsets = spread(start, self.offsets[index + 1] - start)
        return Jagged(_tensor(self.values.take(inner)), torch.from_numpy(offsets), self.max_length)


@dataclass(frozen=True)
class Ids:
    """The sparse features of n rows.

    Attributes:
        names: all, in the schema's order.
        single: (n, features with one id a row) their ids, in the order of `names`.
        several: the features that may have several ids a row.
    """

    names: tuple[str, ...]
    single: npt.NDArray[np.int32]
    several: dict[str, IdColumn]

    def of(self, name: str) -> npt.NDArray[np.int32]:
        """(n,) ids of a feature with one id a row."""
        one: npt.NDArray[np.int32] = self.single[:, [n for n in self.names if n not in self.several].index(name)]
        return one

    def take(self, index: Ints) -> dict[str, Jagged]:
        """All features of rows `index`."""
        edges = torch.arange(len(index) + 1)
        single = iter(torch.from_numpy(self.single.take(index, 0).T.astype(np.int64, order="C")))
        return {
            name: self.several[name].take(index) if name in self.several else Jagged(next(single), edges, 1)
            for name in self.names
        }


@dataclass(frozen=True)
class UserEvents:
    """Stored events of one type: those of user i are offsets[i] .. offsets[i + 1] - 1, in time order.

    `users`: sorted keys; `fields`: encoded ids (int32) or numbers (float32) of each event; `time`: int64 seconds.
    """

    users: Ints
    offsets: Ints
    time: Ints
    fields: dict[str, Array]

    @staticmethod
    def of(user: Ints, time: Ints, fields: Mapping[str, Array]) -> UserEvents:
        """Sort events by user and time; those of one user and time keep their order."""
        order = np.lexsort((time, user))
        users, first = np.unique(user[order], return_index=True)
        return UserEvents(users, np.append(first, len(user)), time[order], {n: v[order] for n, v in fields.items()})

    def spans(self, user: Ints, before: Ints, limit: int) -> tuple[Ints, Ints]:
        """Start and end of each request's newest `limit` events of `user` that are strictly earlier than `before`."""
        if not len(self.users):
            return np.zeros_like(user), np.zeros_like(user)
        place = np.minimum(np.searchsorted(self.users, user), len(self.users) - 1)
        known = self.users[place] == user
        first = np.where(known, self.offsets[place], 0)
        low, high = first.copy(), np.where(known, self.offsets[place + 1], 0)
        open_ = np.flatnonzero(low < high)
        while len(open_):  # binary search of all requests at once
            middle = (low[open_] + high[open_]) // 2
            earlier = self.time[middle] < before[open_]
            low[open_] = np.where(earlier, middle + 1, low[open_])
            high[open_] = np.where(earlier, high[open_], middle)
            open_ = open_[low[open_] < high[open_]]
        return np.maximum(first, low - limit), low


@dataclass(frozen=True)
class EventLog:
    """The users' stored events by type, and per lookup key ("<type>.<field>") the counts of its ids."""

    types: dict[str, UserEvents]
    counts: dict[str, IdCounts] = field(default_factory=dict)


@dataclass(frozen=True)
class IdCounts:
    """Ids of one lookup key: all, without a value, and outside the vocabulary."""

    values: int = 0
    missing: int = 0
    unseen: int = 0

    def __add__(self, other: IdCounts) -> IdCounts:
        return IdCounts(self.values + other.values, self.missing + other.missing, self.unseen + other.unseen)


@dataclass(frozen=True)
class EncodedRows:
    """B rows of Q requests, encoded once; `batch` assembles any of its requests.

    Attributes:
        offsets: (Q + 1,) rows of request q are offsets[q] .. offsets[q + 1] - 1.
        time, user: (Q,) request time in seconds and user key.
        spans: per event type (start, end), each (Q,): the request's events in `log`, oldest first.
        log: the stored events that `spans` point into.
        labels, masks, weights: per head (B,) float32; rates: per task with `correction: shift`.
        identity: (B rows) what the log itself calls a row: `row_id` (where the schema names none, the row's place, from
            0), `request` (where the schema names it) and `user`, as integers or text.
        counts: per lookup key, what was missing or unseen.
    """

    offsets: Ints
    time: Ints
    user: Ints
    spans: dict[str, tuple[Ints, Ints]]
    log: EventLog
    max_lengths: dict[str, int]
    dense: Dense
    request_dense: Dense
    ids: Ids
    request_ids: Ids
    vectors: dict[str, Dense]
    request_vectors: dict[str, Dense]
    surface: npt.NDArray[np.int32]
    row_id: Ints
    labels: dict[str, Dense]
    masks: dict[str, Dense]
    weights: dict[str, Dense]
    rates: dict[str, Dense]
    identity: pa.Table
    counts: dict[str, IdCounts]

    @property
    def rows(self) -> int:
        """B."""
        return int(self.offsets[-1])

    @property
    def requests(self) -> int:
        """Q."""
        return len(self.time)

    def batch(self, requests: Ints) -> Batch:
        """The rows of these requests, in this order."""
        start = self.offsets[requests]
        lengths = self.offsets[requests + 1] - start
        rows, _ = spread(start, lengths)
        events: dict[str, dict[str, Jagged]] = {}
        for name, (first, end) in self.spans.items():
            stored, limit = self.log.types[name], self.max_lengths[name]
            index, offsets = spread_back(first[requests], end[requests])
            edges = torch.from_numpy(offsets)
            events[name] = {"time": Jagged(torch.from_numpy(stored.time.take(index)), edges, limit)} | {
                f: Jagged(_tensor(values.take(index)), edges, limit) for f, values in stored.fields.items()
            }

        def of_rows(columns: Mapping[str, Dense]) -> dict[str, torch.Tensor]:
            return {name: torch.from_numpy(values.take(rows, 0)) for name, values in columns.items()}

        return Batch(
            dense=torch.from_numpy(self.dense.take(rows, 0)),
            ids=self.ids.take(rows),
            vectors=of_rows(self.vectors),
            request_dense=torch.from_numpy(self.request_dense.take(requests, 0)),
            request_ids=self.request_ids.take(requests),
            request_vectors={n: torch.from_numpy(v[requests]) for n, v in self.request_vectors.items()},
            events=events,
            request=torch.from_numpy(np.repeat(np.arange(len(requests)), lengths)),
            request_time=torch.from_numpy(self.time[requests]),
            user=torch.from_numpy(self.user[requests]),
            surface=_tensor(self.surface[rows]),
            row_id=torch.from_numpy(self.row_id[rows]),
            labels=of_rows(self.labels),
            masks=of_rows(self.masks),
            weights=of_rows(self.weights),
            rates=of_rows(self.rates),
        )

    def batches(self, order: Ints, batch_rows: int) -> Ints:
        """Ends (n,) of the batches of `order`: each has as many whole requests as fit in `batch_rows` rows, or one."""
        total = np.concatenate([[0], np.cumsum(self.offsets[order + 1] - self.offsets[order])])
        ends, place = [], 0
        while place < len(order):
            place = max(place + 1, int(np.searchsorted(total, total[place] + batch_rows, side="right")) - 1)
            ends.append(place)
        return np.array(ends, np.int64)
