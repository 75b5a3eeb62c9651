"""From rectangles to dense tiles (n, H, L, d): views of the large ones, gathered packs of the small ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.ops.ragged.runs import Band, Run

SOLO = 16384  # scores from which a rectangle is worth a kernel call of its own
WASTE = 16384  # scores of padding in a part that cost as much as one more kernel call
PART = 262144  # scores of one part
PACK = 1024  # rows that are gathered at a time, so that the copies stay small


@dataclass(frozen=True)
class Part:
    """A dense piece of a tile's rows and keys: n rectangles of n_q queries and n_k keys, the smaller ones filled up."""

    q: int
    k: int
    n: int
    n_q: int
    n_k: int
    band: Band | None
    pad_q: Tensor | None = None  # (n, n_q), True in rows that only fill up
    pad_k: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        """The part of a tile's query rows (P, H, ...) as a view (n, H, n_q, ...)."""
        view: Tensor = x[self.q : self.q + self.n * self.n_q].unflatten(0, (self.n, self.n_q))
        return view.transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        """The part of a tile's key rows (P, H, d) as a view (n, H, n_k, d)."""
        view: Tensor = x[self.k : self.k + self.n * self.n_k].unflatten(0, (self.n, self.n_k))
        return view.transpose(1, 2)

    def hidden(self) -> Tensor | None:
        """True where a query must not see a key, (n or 1, 1, n_q or 1, n_k); None where it sees all.

        Rows that only fill up see whatever key is real, so that no softmax runs over nothing.
        """
        outside = None
        if self.band is not None:
            distance = torch.arange(self.n_q)[:, None] + (self.band.left - torch.arange(self.n_k))
            outside = ((distance < self.band.low) | (distance > self.band.high))[None, None]
            if self.pad_q is not None:
                outside = outside & ~self.pad_q[:, None, :, None]
        if self.pad_k is None:
            return outside
        pad = self.pad_k[:, None, None, :]
        return pad if outside is None else outside | pad


class Solo:
    """One rectangle on views: nothing is copied on the way in."""

    def __init__(self, run: Run) -> None:
        self.q, self.k = slice(run.q, run.q + run.n_q), slice(run.k, run.k + run.n_k)
        self.parts = [Part(0, 0, 1, run.n_q, run.n_k, run.band)]

    def rows(self, x: Tensor) -> Tensor:
        """The tile's query rows of x (sum T, H, ...)."""
        return x[self.q]

    def silent_rows(self, x: Tensor) -> Tensor:
        """As `rows`, with 0 in rows that only fill up."""
        return x[self.q]

    def keys(self, x: Tensor) -> Tensor:
        """The tile's key rows of x (sum T, H, d)."""
        return x[self.k]

    def put_rows(self, x: Tensor, value: Tensor) -> None:
        """Write the tile's query rows to x."""
        x[self.q].copy_(value)

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """Add to the tile's key rows of x, which other tiles may share; value is 0 in rows that only fill up."""
        x[self.k].add_(value)


class Pack:
    """Small rectangles, gathered: each part holds those of about one size."""

    def __init__(self, groups: list[list[Run]]) -> None:
        units = [unit for group in groups for unit in group]
        wide = [(max(u.n_q for u in group), max(u.n_k for u in group)) for group in groups]
        count = torch.tensor([len(group) for group in groups])
        first_q, size_q, first_k, size_k = torch.tensor([unit[:4] for unit in units]).t()
        wide_q, wide_k = torch.tensor(wide).repeat_interleave(count, 0).t()
        self.index_q, pad_q = _layout(first_q, size_q, wide_q)
        self.index_k, pad_k = _layout(first_k, size_k, wide_k)
        self.parts: list[Part] = []
        q = k = 0
        for group, (n_q, n_k) in zip(groups, wide, strict=True):
            n, band = len(group), group[0].band
            fill_q = pad_q[q : q + n * n_q].view(n, n_q) if any(u.n_q < n_q for u in group) else None
            fill_k = pad_k[k : k + n * n_k].view(n, n_k) if any(u.n_k < n_k for u in group) else None
            self.parts.append(Part(q, k, n, n_q, n_k, band, fill_q, fill_k))
            q, k = q + n * n_q, k + n * n_k
        self.filled = any(part.pad_q is not None for part in self.parts)
        self.pad = pad_q
        self.kept = (~pad_q).nonzero().squeeze(1)
        self.target = self.index_q[self.kept]

    def rows(self, x: Tensor) -> Tensor:
        """As `Solo.rows`, a copy."""
        return x.index_select(0, self.index_q)

    def silent_rows(self, x: Tensor) -> Tensor:
        """As `Solo.silent_rows`, a copy."""
        rows = self.rows(x)
        return rows.masked_fill_(self.pad[:, None, None], 0.0) if self.filled else rows

    def keys(self, x: Tensor) -> Tensor:
        """As `Solo.keys`, a copy."""
        return x.index_select(0, self.index_k)

    def put_rows(self, x: Tensor, value: Tensor) -> None:
        """As `Solo.put_rows`."""
        x.index_copy_(0, self.target, value.index_select(0, self.kept) if self.filled else value)

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """As `Solo.add_keys`."""
        x.index_add_(0, self.index_k, value)


Tile = Solo | Pack


def tiles(work: list[Run], heads: int) -> Iterator[Tile]:
    """All rectangles as tiles: the large ones alone, the small ones in packs."""
    small: dict[Band | None, list[Run]] = {}
    for run in work:
        if run.n_q * run.n_k * heads >= SOLO:
            yield Solo(run)
        else:
            small.setdefault(run.band, []).append(run)
    groups: list[list[Run]] = []
    rows = 0
    for group in (group for units in small.values() for group in _groups(units, heads)):
        if len(group) == 1:
            yield Solo(group[0])
            continue
        groups.append(group)
        rows += sum(max(unit.n_q, unit.n_k) for unit in group)
        if rows >= PACK:
            yield Pack(groups)
            groups, rows = [], 0
    if groups:
        yield Pack(groups)


def joined(pieces: list[Tensor]) -> Tensor:
    """The parts (n, H, L, ...) of a tile as its rows (P, H, ...)."""
    rows = [piece.transpose(1, 2).flatten(0, 1) for piece in pieces]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _groups(units: list[Run], heads: int) -> Iterator[list[Run]]:
    """Rectangles of about one size: filling them up to the largest wastes less than another kernel call costs."""
    units.sort(key=lambda unit: (unit.n_q, unit.n_k), reverse=True)
    group: list[Run] = []
    n_k = waste = 0
    for unit in units:  # n_q only falls, so the group's first rectangle has its largest
        n_q, n_k = (group or [unit])[0].n_q, max(n_k, unit.n_k)
        waste += (n_q * n_k - unit.n_q * unit.n_k) * heads
        if group and (waste > WASTE or n_q * n_k * heads * (len(group) + 1) > PART):
            yield group
            group, n_k, waste = [], unit.n_k, 0
        group.append(unit)
    yield group


def _layout(first: Tensor, size: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each place in a pack, where every rectangle takes `wide` places, and which places only fill up.

    Those read their rectangle's first row.
    """
    unit = torch.repeat_interleave(torch.arange(len(wide)), wide)
    position = torch.arange(len(unit)) - (wide.cumsum(0) - wide)[unit]
    pad = position >= size[unit]
    return first[unit] + position.masked_fill_(pad, 0), pad
