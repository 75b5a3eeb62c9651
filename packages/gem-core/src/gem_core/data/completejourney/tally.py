"""Counts per key that advance week by week: what is read is always of strictly earlier weeks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gem_core.data.completejourney.log import Ints

Counts = NDArray[np.int32]


class Tally:
    """Occurrences per slot: in total, in the last `windows` weeks, in how many weeks, first and last week.

    One slot more than `size`: the last is for keys that never occur, and stays zero.
    """

    def __init__(self, size: int, windows: Sequence[int] = ()) -> None:
        self.total: Counts = np.zeros(size + 1, np.int32)
        self.weeks: Counts = np.zeros(size + 1, np.int32)
        self.first: Counts = np.zeros(size + 1, np.int32)
        self.last: Counts = np.zeros(size + 1, np.int32)
        self.recent: dict[int, Counts] = {w: np.zeros(size + 1, np.int32) for w in windows}
        self._past: dict[int, tuple[Ints, Counts]] = {}

    def add(self, week: int, slots: Ints) -> tuple[Ints, Counts]:
        """Count the occurrences of `week`, and forget what leaves the windows; the distinct slots and their counts."""
        unique, occurrences = np.unique(slots, return_counts=True)
        counts = occurrences.astype(np.int32)
        new = unique[self.total[unique] == 0]
        self.first[new] = week
        self.last[unique] = week
        self.total[unique] += counts
        self.weeks[unique] += 1
        self._past[week] = unique, counts
        for window, recent in self.recent.items():
            recent[unique] += counts
            if week - window in self._past:
                gone, past = self._past[week - window]
                recent[gone] -= past
        self._past.pop(week - max(self.recent, default=0), None)
        return unique, counts


class Pairs:
    """Slots for the pairs (a, b) that ever occur; pairs of one `a` are adjacent."""

    def __init__(self, a: Ints, b: Ints, width: int) -> None:
        self.width = width
        self.keys, slots = np.unique(a * width + b, return_inverse=True)
        self.slots = slots.reshape(-1)  # of the occurrences given

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, a: Ints, b: Ints) -> Ints:
        """Slots of pairs; `len(self)` for one that never occurs."""
        if not len(self.keys):
            return np.zeros(len(a), np.int64)
        key = a * self.width + b
        at = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where(self.keys[at] == key, at, len(self.keys))

    def span(self, a: Ints) -> tuple[Ints, Ints]:
        """First slot and number of slots of each `a`."""
        start = np.searchsorted(self.keys, a * self.width)
        return start, np.searchsorted(self.keys, (a + 1) * self.width) - start


def ranges(start: Ints, count: Ints) -> Ints:
    """The concatenation of `start[i] ... start[i] + count[i] - 1`."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(start - ends + count, count)
