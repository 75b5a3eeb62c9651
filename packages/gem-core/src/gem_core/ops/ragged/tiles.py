"""From rectangles to dense tiles (n, H, L, d): views of the large ones, gathered buckets of the small ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gem_core.ops.ragged.runs import Band, Run

SOLO = 32768  # scores from which a rectangle is worth a kernel call of its own
BUCKET = 131072  # scores of one bucket: few enough to stay in cache
WASTE = 16384  # scores of padding in a bucket that cost as much as one more bucket


class Solo:
    """One rectangle, on views of its rows: nothing is copied on the way in. n is 1."""

    n = 1

    def __init__(self, run: Run) -> None:
        self.q, self.n_q, self.k, self.n_k, self.band = run

    def rows(self, x: Tensor) -> Tensor:
        """The queries' part of x (sum T, H, ...) as (n, H, n_q, ...)."""
        return x[self.q : self.q + self.n_q].transpose(0, 1)[None]

    def keys(self, x: Tensor) -> Tensor:
        """The keys' part of x (sum T, H, d) as (n, H, n_k, d)."""
        return x[self.k : self.k + self.n_k].transpose(0, 1)[None]

    def put_rows(self, x: Tensor, value: Tensor) -> None:
        """Write (n, H, n_q, ...) to the queries' rows of x."""
        self.rows(x).copy_(value)

    def add_rows(self, x: Tensor, value: Tensor) -> None:
        """As `put_rows`, where x is still 0 and so is `value` in rows that only pad the tile."""
        self.rows(x).copy_(value)

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """Add (n, H, n_k, d) to the keys' rows of x, which other tiles may share; it is 0 in rows that only pad the tile."""
        self.keys(x).add_(value)

    def silence(self, x: Tensor) -> Tensor:
        """x (n, H, n_q, d) with 0 in rows that only pad the tile: here there are none."""
        return x

    def hidden(self) -> Tensor | None:
        """True where a query must not see a key, broadcast to (n, 1, n_q, n_k); None where it sees all."""
        return None if self.band is None else _outside(self.band, self.n_q, self.n_k)[None, None]


class Bucket:
    """Small rectangles of about one size, gathered; the smaller ones are filled up with rows that count for nothing."""

    def __init__(self, units: list[Run], heads: int) -> None:
        self.n, self.heads, self.band = len(units), torch.arange(heads)[:, None], units[0].band
        q, n_q, k, n_k = torch.tensor([unit[:4] for unit in units]).t().unsqueeze(2)
        self.n_q, self.pad_q, self.index_q = self._layout(q, n_q)
        same = torch.equal(q, k) and torch.equal(n_q, n_k)
        self.n_k, self.pad_k, self.index_k = (self.n_q, self.pad_q, self.index_q) if same else self._layout(k, n_k)

    def rows(self, x: Tensor) -> Tensor:
        """As `Solo.rows`, a copy."""
        return self._take(x, self.index_q, self.n_q)

    def keys(self, x: Tensor) -> Tensor:
        """As `Solo.keys`, a copy."""
        return self._take(x, self.index_k, self.n_k)

    def put_rows(self, x: Tensor, value: Tensor) -> None:
        """As `Solo.put_rows`."""
        index, value = self.index_q, value.reshape(-1, *value.shape[3:])
        if self.pad_q is not None:
            real = (~self.pad_q)[:, None].expand(-1, len(self.heads), -1).flatten().nonzero().squeeze(1)
            index, value = index[real], value[real]
        x.flatten(0, 1).index_copy_(0, index, value)

    def add_rows(self, x: Tensor, value: Tensor) -> None:
        """As `Solo.add_rows`."""
        x.flatten(0, 1).index_add_(0, self.index_q, value.reshape(-1, value.shape[-1]))

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """As `Solo.add_keys`."""
        x.flatten(0, 1).index_add_(0, self.index_k, value.reshape(-1, value.shape[-1]))

    def silence(self, x: Tensor) -> Tensor:
        """As `Solo.silence`, in place."""
        return x if self.pad_q is None else x.masked_fill_(self.pad_q[:, None, :, None], 0.0)

    def hidden(self) -> Tensor | None:
        """As `Solo.hidden`. Rows that only pad see whatever key is real, so that no softmax runs over nothing."""
        outside = None if self.band is None else _outside(self.band, self.n_q, self.n_k)[None, None]
        if outside is not None and self.pad_q is not None:
            outside = outside & ~self.pad_q[:, None, :, None]
        if self.pad_k is None:
            return outside
        pad = self.pad_k[:, None, None, :]
        return pad if outside is None else outside | pad

    def _layout(self, start: Tensor, size: Tensor) -> tuple[int, Tensor | None, Tensor]:
        """The longest length, where rows only pad (n, L), and the index of each (n, H, L) into (sum T * H)."""
        low, longest = (int(t) for t in torch.aminmax(size))
        position, pad = torch.arange(longest), None
        if low < longest:
            pad = position >= size
            position = position.expand(self.n, -1).masked_fill(pad, 0)  # a padding row reads its own rectangle's first row
        return longest, pad, ((start + position)[:, None] * len(self.heads) + self.heads).flatten()

    def _take(self, x: Tensor, index: Tensor, length: int) -> Tensor:
        return x.flatten(0, 1).index_select(0, index).view(self.n, len(self.heads), length, *x.shape[2:])


Tile = Solo | Bucket


def tiles(work: list[Run], heads: int) -> Iterator[Tile]:
    """All rectangles as tiles: the large ones alone, the small ones in buckets that waste less than they save."""
    small: dict[Band | None, list[Run]] = {}
    for run in work:
        if run.n_q * run.n_k * heads >= SOLO:
            yield Solo(run)
        else:
            small.setdefault(run.band, []).append(run)
    for units in small.values():
        yield from _buckets(units, heads)


def _buckets(units: list[Run], heads: int) -> Iterator[Tile]:
    units.sort(key=lambda unit: (unit.n_q, unit.n_k), reverse=True)
    bucket: list[Run] = []
    n_k = waste = 0
    for unit in units:  # n_q only falls, so the bucket's first rectangle has its largest
        n_q, n_k = (bucket or [unit])[0].n_q, max(n_k, unit.n_k)
        waste += (n_q * n_k - unit.n_q * unit.n_k) * heads
        if bucket and (waste > WASTE or n_q * n_k * heads * (len(bucket) + 1) > BUCKET):
            yield Bucket(bucket, heads)
            bucket, n_k, waste = [], unit.n_k, 0
        bucket.append(unit)
    yield Bucket(bucket, heads)


def _outside(band: Band, n_q: int, n_k: int) -> Tensor:
    distance = torch.arange(n_q)[:, None] + (band.left - torch.arange(n_k))
    return (distance < band.low) | (distance > band.high)
