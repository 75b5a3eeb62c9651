"""The work list of an attention over ragged sequences: rectangles of queries and keys that a mask leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # query rows of a window's chunk, and of a prefix mask's: wider would compute more that the mask then drops
ALL = 2**62


class Band(NamedTuple):
    """Query i of a rectangle sees its key j where low <= i + left - j <= high."""

    left: int
    low: int
    high: int


CAUSAL = Band(0, 0, ALL)


class Run(NamedTuple):
    """A rectangle: n_q query rows from q on, n_k key rows from k on."""

    q: int
    n_q: int
    k: int
    n_k: int
    band: Band | None = None


Span = tuple[int, int, int, int]  # a sequence: first query row, queries, first key row, keys


def spans(q_offsets: Tensor, k_offsets: Tensor, k_index: Tensor | None, *, merge: bool) -> list[Span]:
    """The sequences of a call. With `merge`, neighbours that read the same keys become one (right where no position counts)."""
    if k_index is None:
        a, b = q_offsets.tolist(), k_offsets.tolist()
        return [(q, end - q, k, stop - k) for q, end, k, stop in zip(a, a[1:], b, b[1:], strict=False)]
    if merge:
        k_index, size = torch.unique_consecutive(k_index, return_counts=True)
        q_offsets = q_offsets[torch.cat((size.new_zeros(1), size.cumsum(0)))]
    a, start, length = q_offsets.tolist(), k_offsets[k_index].tolist(), k_offsets.diff()[k_index].tolist()
    return [(q, end - q, k, n) for q, end, k, n in zip(a, a[1:], start, length, strict=False)]


def runs(mask: str, size: int, shift: int, work: Iterable[Span]) -> list[Run]:
    """The rectangles of all sequences; none is empty, and every query row is in one rectangle at most."""
    return [
        run
        for span in work
        if span[1] and span[3]
        for run in _CUTS[mask](size, shift, *span)
        if run.n_q > 0 and run.n_k > 0
    ]


def _whole(size: int, shift: int, q: int, n_q: int, k: int, n_k: int) -> Iterator[Run]:
    yield Run(q, n_q, k, n_k)


def _causal(size: int, shift: int, q: int, n_q: int, k: int, n_k: int) -> Iterator[Run]:
    n = min(n_q, n_k)
    yield Run(q, n, k, n, CAUSAL)
    yield Run(q + n, n_q - n, k, n_k)  # queries after the last key see all keys


def _block(size: int, shift: int, q: int, n_q: int, k: int, n_k: int) -> Iterator[Run]:
    n = min(n_q, n_k)
    for border in range(-shift, n, size):
        a = max(border, 0)
        yield Run(q + a, min(border + size, n_q) - a, k + a, min(border + size, n_k) - a)


def _window(size: int, shift: int, q: int, n_q: int, k: int, n_k: int) -> Iterator[Run]:
    n_q = min(n_q, n_k + size)  # queries farther than `size` past the last key see nothing
    step = max(CHUNK, size)
    for a in range(0, n_q, step):
        left = min(a, size)
        yield Run(
            q + a, min(step, n_q - a), k + a - left, min(n_k, a + step + size) - (a - left), Band(left, -size, size)
        )


def _prefix(size: int, shift: int, q: int, n_q: int, k: int, n_k: int) -> Iterator[Run]:
    yield Run(q, min(size, n_q), k, n_k)
    for a in range(size, n_q, CHUNK):
        yield Run(q + a, min(CHUNK, n_q - a), k, min(n_k, a + CHUNK), Band(a, 0, ALL))


_CUTS = {"none": _whole, "causal": _causal, "block": _block, "window": _window, "prefix": _prefix}
