"""Whether one column tells a label almost surely, which nothing known at the request does.

Three signs, each of a column alone: the area under the ROC curve (Fawcett 2006) of its values, or of their absence; of
ids the same (cross-fitted: the mean label of each id in one half of the rows scores the other); and a run of values at
either end, or some ids, in which nearly all rows are positive though most rows are not, that hold a fair part of the
positives. A column is cut into its distinct values once; all signs are then counts per value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gem_core.data.columns import Bools, Floats, Ints

FEWEST = 20
"""Positives and negatives that an area needs."""
PURE, PURE_ROWS, PURE_SHARE = 0.99, 100, 0.05
"""A pure group: share of positives in it, rows at least, share of all positives at least."""
FEW_VALUES = 1000
"""A number of so few values is looked at as an id too."""


@dataclass(frozen=True)
class Values:
    """A column cut into `size` distinct values: `codes` (n,), ascending with the values if these are `numbers`, of
    which the last is then that of no value."""

    codes: Ints
    size: int
    numbers: bool

    @staticmethod
    def of_numbers(values: Floats) -> Values:
        """Of numbers, NaN being no value."""
        known = ~np.isnan(values)
        distinct, inverse = np.unique(values[known], return_inverse=True)
        codes = np.full(len(values), len(distinct))
        codes[known] = inverse
        return Values(codes, len(distinct) + 1, True)

    @staticmethod
    def of_ids(ids: Ints) -> Values:
        """Of ids, given as any integers."""
        distinct, codes = np.unique(ids, return_inverse=True)
        return Values(codes, len(distinct), False)

    def take(self, rows: Bools) -> Values:
        """Of some rows."""
        return Values(self.codes[rows], self.size, self.numbers)


def tells(column: Values, label: Bools, threshold: float) -> str | None:
    """The surest sign in words; None where there is none.

    Args:
        column, label: of the same rows.
        threshold: area from which on there is a sign.
    """
    return next(_signs(column, label, threshold), None)


def _signs(column: Values, label: Bools, threshold: float) -> Iterator[str]:
    if min(label.sum(), (~label).sum()) < FEWEST:
        return
    count = np.bincount(column.codes, minlength=column.size)
    positive = np.bincount(column.codes, label, minlength=column.size)
    if column.numbers:
        known = count[:-1], positive[:-1]
        presence = [np.array([x[:-1].sum(), x[-1]]) for x in (count, positive)]
        for words, (rows, hits) in {"its value": known, "that it has a value": presence}.items():
            area = _area(hits, rows - hits)
            if area is not None and max(area, 1 - area) >= threshold:
                yield f"AUC {max(area, 1 - area):.4f} of {words}"
        for i, words in enumerate(("with a value", "without a value")):
            if presence[1][i] >= PURE * presence[0][i] and presence[0][i] >= PURE_ROWS:
                yield from _pure(presence[0][i], presence[1][i], label, words)
        for words, step in (("with its least values", 1), ("with its greatest values", -1)):
            rows, hits = (np.cumsum(x[::step]) for x in known)
            ends = np.flatnonzero((rows >= PURE_ROWS) & (hits >= PURE * rows))
            if len(ends):
                yield from _pure(rows[ends[-1]], hits[ends[-1]], label, words)
    if not column.numbers or column.size <= FEW_VALUES:
        area = _cross_fitted(column, label)
        if area is not None and area >= threshold:
            yield f"AUC {area:.4f} of its id"
        pure = (count >= PURE_ROWS) & (positive >= PURE * count)
        yield from _pure(count[pure].sum(), positive[pure].sum(), label, "with some of its ids")


def _area(positive: Floats, negative: Floats) -> float | None:
    """Area under the curve from counts per distinct score, ascending; None of too few of either."""
    positives, negatives = float(positive.sum()), float(negative.sum())
    if min(positives, negatives) < FEWEST:
        return None
    below = np.cumsum(negative) - negative / 2  # of a tie, half
    return float(positive @ below) / (positives * negatives)


def _cross_fitted(column: Values, label: Bools) -> float | None:
    """The smaller of the areas of the two halves, each scored by the other's mean labels."""
    half = np.random.default_rng(0).random(len(label)) < 0.5
    counts = []
    for side in (half, ~half):
        codes = column.codes[side]
        rows = np.bincount(codes, minlength=column.size).astype(np.float64)
        counts.append((rows, np.bincount(codes, label[side], minlength=column.size)))
    areas = []
    for (rows, hits), (other_rows, other_hits) in (counts, counts[::-1]):
        order, scores = _ascending((other_hits + label.mean()) / (other_rows + 1))
        positive, every = np.bincount(scores, hits[order]), np.bincount(scores, rows[order])
        areas.append(_area(positive.astype(np.float64), (every - positive).astype(np.float64)))
    known = [area for area in areas if area is not None]
    return min(known) if known else None


def _ascending(scores: Floats) -> tuple[Ints, Ints]:
    """An order, and in that order the place of each among the distinct scores."""
    order = np.argsort(scores, kind="stable")
    new = np.diff(scores[order], prepend=scores[order][:1]) > 0
    return order, np.cumsum(new)


def _pure(rows: float, positives: float, label: Bools, words: str) -> Iterator[str]:
    total = float(label.sum())
    if rows and total <= len(label) / 2 and positives >= PURE_SHARE * total:
        yield f"{positives:,.0f} positives among the {rows:,.0f} rows {words}"


def ranks(values: Floats) -> Floats:
    """(n,) ranks from 1, those of ties being their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    out: Floats = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return out


def sample(n: int, most: int) -> Ints:
    """At most `most` of n rows, drawn by a fixed seed, in order."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, most, replace=False))
