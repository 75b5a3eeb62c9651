"""Rows and requests that stand twice, and splits that are not apart."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from gem_core.data.check.findings import Finding
from gem_core.data.check.log import Log, attempt, filled_keys, mixed, row_hashes
from gem_core.data.columns import Bools, Ints
from gem_core.data.readers.base import TableReader


def find(log: Log, reader: TableReader) -> Iterator[Finding]:
    """Findings of the rows' identities and of the splits."""
    yield from _duplicates(log, reader)
    yield from _repeated_ids(log)
    yield from _requests(log)
    yield from _overlaps(log)


def _firsts(keys: Ints) -> Ints:
    """(n,) the first row with each row's key."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    out: Ints = first[inverse]
    return out


def _duplicates(log: Log, reader: TableReader) -> Iterator[Finding]:
    split = reader.split
    by = None if split is None else split.column
    without = {name for name in (by, log.schema.row_id) if name is not None}
    hashes = attempt(lambda: row_hashes(log.table, log.source, without))
    if hashes is None:
        return
    first = _firsts(hashes.view(np.int64))
    again = first < np.arange(len(first))
    across = again & (log.part != log.part[first])
    yield from _say(log, "duplicate-rows", again & ~across, first, "a row that differs from all before")
    yield from _say(log, "rows-across-splits", across, first, "a row that no earlier split has")


def _repeated_ids(log: Log) -> Iterator[Finding]:
    name = log.schema.row_id
    ids = None if name is None else log.column(name, "row id")
    known = None if ids is None else attempt(ids.ids)
    if known is None:
        return
    first = _firsts(filled_keys(known))
    yield from _say(log, "repeated-row-ids", first < np.arange(len(first)), first, "a row id of its own")


def _requests(log: Log) -> Iterator[Finding]:
    key = mixed(log.user, log.time, log.before)
    name = log.schema.request
    ids = None if name is None else log.column(name, "request")
    if ids is not None:
        known = attempt(ids.ids)
        key = key if known is None else filled_keys(known)
    first = _firsts(key)
    other = log.part != log.part[first]
    yield from _say(log, "requests-across-splits", other, first, "a request with all rows in one split")


def _say(log: Log, kind: str, bad: Bools, first: Ints, expected: str) -> Iterator[Finding]:
    if not bad.any():
        return
    i = int(bad.argmax())
    other = int(first[i])
    places = [f"{log.source.at(row)} of split {log.splits[log.part[row]]}" for row in (i, other)]
    yield Finding(kind, int(bad.sum()), f"{places[0]}: expected {expected}, found {places[1]}")


def _overlaps(log: Log) -> Iterator[Finding]:
    for earlier in range(len(log.splits)):
        mine = log.part == earlier
        later = log.part > earlier
        if not mine.any() or not later.any():
            continue
        begin = int(log.time[later].min())
        late = mine & (log.time > begin)
        if late.any():
            i = int(late.argmax())
            split = log.splits[log.part[int(np.flatnonzero(later)[log.time[later].argmin()])]]
            yield Finding(
                "split-overlap",
                int(late.sum()),
                f'{log.source.at(i)}, column "{log.schema.time}": expected a row of split {log.splits[earlier]} to be no '
                f"later than {_date(begin)}, when split {split} begins, found {_date(int(log.time[i]))}",
            )


def _date(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")
