"""From rectangles to dense tiles (n, H, L, d): views of long runs, gathered buckets of short ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gem_core.ops.ragged.runs import Band, Run

SOLO = 16384  # scores from which a run is worth a kernel call of its own (about 60 us of work)
BUCKET = 131072  # scores of one gathered tile


class Solo:
    """One run, on views of its rows; nothing is copied on the way in."""

    def __init__(self, run: Run) -> None:
        self.run, self.n, self.n_q, self.n_k, self.band = run, run.count, run.n_q, run.n_k, run.band

    def rows(self, x: Tensor) -> Tensor:
        """The queries' part of x (sum T, H, ...) as (n, H, n_q, ...)."""
        return self._view(x, self.run.q, self.n_q)

    def keys(self, x: Tensor) -> Tensor:
        """The keys' part of x (sum T, H, d) as (n, H, n_k, d)."""
        return self._view(x, self.run.k, self.n_k)

    def put_rows(self, x: Tensor, value: Tensor) -> None:
        """Write (n, H, n_q, ...) to the queries' rows of x."""
        self._view(x, self.run.q, self.n_q).copy_(value)

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """Add (n, H, n_k, d) to the keys' rows of x; runs and rectangles may share keys."""
        if self.n == 1 or self.run.step >= self.n_k:
            self._view(x, self.run.k, self.n_k).add_(value)
            return
        for i in range(self.n):
            start = self.run.k + i * self.run.step
            x[start : start + self.n_k].add_(value[i].transpose(0, 1))

    def silence(self, x: Tensor) -> Tensor:
        """x (n, H, n_q, d) with 0 in rows that only pad the tile: here there are none."""
        return x

    def hidden(self) -> Tensor | None:
        """True where a query must not see a key, broadcast to (n, 1, n_q, n_k); None where it sees all."""
        return None if self.band is None else _outside(self.band, self.n_q, self.n_k)[None, None]

    def _view(self, x: Tensor, start: int, length: int) -> Tensor:
        if self.n == 1:
            return x[start : start + length].transpose(0, 1)[None]
        s, h, *rest = x.stride()
        shape = (self.n, x.shape[1], length, *x.shape[2:])
        return x.as_strided(shape, (self.run.step * s, h, s, *rest), x.storage_offset() + start * s)


class Bucket:
    """Short rectangles of about one size, gathered; the shorter ones are filled up with rows that count for nothing."""

    def __init__(self, units: list[Run], heads: int) -> None:
        self.n, self.band, self.heads = len(units), units[0].band, torch.arange(heads)[:, None]
        table = torch.tensor([(u.q, u.n_q, u.k, u.n_k) for u in units])
        self.q, self.size_q, self.k, self.size_k = table.t().unsqueeze(2)
        self.n_q, self.n_k = int(self.size_q.max()), int(self.size_k.max())
        self.pad_q = self._padding(self.size_q, self.n_q)
        self.pad_k = self._padding(self.size_k, self.n_k)
        self.index_q = self._index(self.q, self.pad_q, self.n_q)
        self.index_k = self._index(self.k, self.pad_k, self.n_k)

    def rows(self, x: Tensor) -> Tensor:
        """As `Solo.rows`, a copy."""
        return self._take(x, self.index_q, self.n_q)

    def keys(self, x: Tensor) -> Tensor:
        """As `Solo.keys`, a copy."""
        return self._take(x, self.index_k, self.n_k)

    def put_rows(self, x: Tensor, value: Tensor) -> None:
        """As `Solo.put_rows`."""
        index, value = self._real(self.index_q, self.pad_q, value)
        _flat(x).index_copy_(0, index, value)

    def add_keys(self, x: Tensor, value: Tensor) -> None:
        """As `Solo.add_keys`."""
        index, value = self._real(self.index_k, self.pad_k, value)
        _flat(x).index_add_(0, index, value)

    def silence(self, x: Tensor) -> Tensor:
        """As `Solo.silence`, in place."""
        return x if self.pad_q is None else x.masked_fill_(self.pad_q[:, None, :, None], 0.0)

    def hidden(self) -> Tensor | None:
        """As `Solo.hidden`. Rows that only pad see whatever is real, so that no softmax runs over nothing."""
        outside = None if self.band is None else _outside(self.band, self.n_q, self.n_k)[None, None]
        if outside is not None and self.pad_q is not None:
            outside = outside & ~self.pad_q[:, None, :, None]
        if self.pad_k is None:
            return outside
        pad = self.pad_k[:, None, None, :]
        return pad if outside is None else outside | pad

    def _padding(self, size: Tensor, longest: int) -> Tensor | None:
        pad = torch.arange(longest) >= size
        return pad if pad.any() else None

    def _index(self, start: Tensor, pad: Tensor | None, longest: int) -> Tensor:
        rows = start + torch.arange(longest)  # (n, L); a padding row reads its own sequence's first row
        if pad is not None:
            rows = torch.where(pad, start, rows)
        return (rows[:, None] * len(self.heads) + self.heads).flatten()

    def _take(self, x: Tensor, index: Tensor, length: int) -> Tensor:
        return _flat(x).index_select(0, index).view(self.n, len(self.heads), length, *x.shape[2:])

    def _real(self, index: Tensor, pad: Tensor | None, value: Tensor) -> tuple[Tensor, Tensor]:
        value = value.reshape(len(index), *value.shape[3:])
        if pad is None:
            return index, value
        real = (~pad)[:, None].expand(-1, len(self.heads), -1).flatten().nonzero().squeeze(1)
        return index[real], value.index_select(0, real)


Tile = Solo | Bucket


def tiles(work: list[Run], heads: int) -> Iterator[Tile]:
    """All runs as tiles: the large ones alone, the small ones in buckets that waste less than a kernel call costs."""
    short: dict[Band | None, list[Run]] = {}
    for run in work:
        if run.count * run.n_q * run.n_k * heads >= SOLO:
            yield Solo(run)
        else:
            units = [run._replace(q=run.q + i * run.step, k=run.k + i * run.step, count=1) for i in range(run.count)]
            short.setdefault(run.band, []).extend(units)
    for units in short.values():
        if len(units) == 1:
            yield Solo(units[0])
        else:
            yield from _buckets(units, heads)


def _buckets(units: list[Run], heads: int) -> Iterator[Bucket]:
    units.sort(key=lambda u: (u.n_q, u.n_k), reverse=True)
    bucket: list[Run] = []
    n_q = n_k = waste = 0
    for unit in units:
        area = max(n_q, unit.n_q) * max(n_k, unit.n_k) * heads
        waste += area - unit.n_q * unit.n_k * heads
        if bucket and (waste > SOLO or area * (len(bucket) + 1) > BUCKET):
            yield Bucket(bucket, heads)
            bucket, n_q, n_k, waste = [], 0, 0, 0
        bucket.append(unit)
        n_q, n_k = max(n_q, unit.n_q), max(n_k, unit.n_k)
    yield Bucket(bucket, heads)


def _flat(x: Tensor) -> Tensor:
    return x.view(-1, *x.shape[2:])


def _outside(band: Band, n_q: int, n_k: int) -> Tensor:
    distance = torch.arange(n_q)[:, None] + (band.left - torch.arange(n_k))
    return (distance < band.low) | (distance > band.high)


