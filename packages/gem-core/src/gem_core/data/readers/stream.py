"""One pass over a split in bounded memory: pools of row groups, each encoded, shuffled and cut into batches by itself.

The row groups of a training split are put in an order drawn from seed and epoch (else: as stored) and cut into pools of
whole row groups with at least `pool_rows` rows. The pools are dealt to the ranks in turn, and those of a rank to its
workers; a pool is one turn of `Reader.turn`. What is in a pool, the order of its requests (drawn from seed, epoch and
pool) and its batches depend on no number of ranks or workers, so neither does a position (`gem_core.data.position`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gem_core.data.batch import Batch
from gem_core.data.columns import Ints
from gem_core.data.position import Position
from gem_core.data.readers.rowgroups import Pieces, RowGroups
from gem_core.data.rows import EncodedRows
from gem_core.errors import DataError


class Stream:
    """How a split is streamed.

    Args:
        groups: its row groups.
        read: the tables of one row group.
        encode: tables to rows.
    """

    def __init__(
        self,
        groups: RowGroups,
        read: Callable[[int], Pieces],
        encode: Callable[[Pieces], EncodedRows],
        split: str,
        seed: int,
        pool_rows: int,
    ) -> None:
        self.groups, self.read, self.encode = groups, read, encode
        self.split, self.seed, self.pool_rows = split, seed, pool_rows

    def position(self, state: Mapping[str, Any] | None, rank: int, world: int) -> Position:
        """The position that a state names; at the beginning of its epoch if it names no more.

        Raises:
            DataError: it is one of other data, of another seed or pool size, or of another rank.
        """
        state = {"epoch": 0} if state is None else state
        begin = Position(int(state["epoch"]), self.seed, self.groups.digest, self.pool_rows, rank, world)
        if begin.epoch < 0:
            raise DataError(f'cannot resume split "{self.split}": no position {dict(state)}')
        if set(state) == {"epoch"}:
            return begin
        if "deals" not in state:
            raise DataError(
                f'cannot resume split "{self.split}" at a saved position: it is one in a split held in memory, and this '
                "one is streamed (reader option hold_mib)"
            )
        found = Position.of(state)
        reasons = {
            "log": "the files differ from those of the saved run",
            "seed": "the seed differs from that of the saved run",
            "pool_rows": "reader option pool_rows differs from that of the saved run",
            "world": "give the states of all ranks to gem_core.data.position.redistribute",
            "rank": "the state is another rank's",
        }
        for name, reason in reasons.items():
            expected, here = getattr(found, name), getattr(begin, name)
            if expected != here:
                raise DataError(
                    f'cannot resume split "{self.split}" at a saved position: expected {name} {expected}, found {here}; '
                    f"{reason}"
                )
        return found

    def pools(self, epoch: int) -> list[Ints]:
        """The row groups of each pool."""
        order = np.arange(len(self.groups))
        if self.split == "train":
            order = np.random.default_rng([self.seed, epoch]).permutation(len(order))
        out, start, rows = [], 0, 0
        for i, group in enumerate(order):
            rows += int(self.groups.rows[group])
            if rows >= self.pool_rows or i == len(order) - 1:
                out.append(order[start : i + 1])
                start, rows = i + 1, 0
        return out

    def whole(self) -> Iterator[EncodedRows]:
        """All rows in the order stored, a pool at a time; at least one, which may have no rows."""
        try:
            for pool in self.pools(0) or [np.zeros(0, np.int64)]:
                yield self._encoded(np.sort(pool))
        finally:
            self.groups.close()

    def _encoded(self, pool: Ints) -> EncodedRows:
        return self.encode(self._pieces(pool))

    def _pieces(self, pool: Ints) -> Pieces:
        """The tables of a pool; one without rows if there are none."""
        piece = None
        for group in pool:
            for piece in self.read(int(group)):
                yield piece
        if piece is None:
            yield self.groups.empty()

    def batches(
        self, begin: Position, worker: int, workers: int, batch_rows: int
    ) -> Iterator[tuple[Batch, tuple[int, bool], Position]]:
        """A worker's batches from a position on, with what `Reader.turn` says of each and the position after it."""
        pools = self.pools(begin.epoch)
        items = begin.items(len(pools))
        try:
            for turn in range(worker, len(items), workers):
                pool, first = items[turn]
                rows = self._encoded(pools[pool])
                order = np.arange(rows.requests)
                if self.split == "train":
                    order = np.random.default_rng([self.seed, begin.epoch, pool]).permutation(rows.requests)
                ends = even_ends(rows.offsets, order, batch_rows)
                ends = ends[ends > first]
                for start, end in zip([first, *ends][: len(ends)], ends, strict=True):
                    last = end == ends[-1]
                    finished = begin.finished + turn + int(last)
                    after = replace(begin, finished=finished, request=0 if last else int(end))
                    yield rows.batch(order[start:end]), (turn, bool(last)), after
                del rows  # before the next pool is read
        finally:
            self.groups.close()


def even_ends(offsets: Ints, order: Ints, batch_rows: int) -> Ints:
    """Ends (n,) of batches of about equally many rows: as few as there must be for `batch_rows` each, of whole requests.

    So no pool leaves a batch of a few rows behind. A batch has at most one request more than fits in `batch_rows`.
    """
    total = np.cumsum(offsets[order + 1] - offsets[order])
    if not len(total):
        return np.zeros(0, np.int64)
    count = -(-int(total[-1]) // batch_rows)
    wanted = total[-1] * np.arange(1, count + 1) // count
    ends: Ints = np.unique(np.searchsorted(total, wanted) + 1)
    return ends
