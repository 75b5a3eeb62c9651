"""Counts and rates that hold what comes later: the row's own event, or the whole log.

A feature is compared with what can be counted from the log itself, for each user, id, and user with id: rows, labels and
events, (a) strictly before the request, which is fair, and (b) up to and with it, after it, or in the whole log, which
is not. Spearman's rank correlation decides, so that logarithms and constant factors do not matter: a feature that is
almost an unfair statistic, and clearly less any fair one, holds what comes later. A count of what this log does not have is
judged by its increase since the key's row before: where that tells the label almost surely, the label is counted in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gem_core.data.check.findings import Finding
from gem_core.data.check.labels import judged
from gem_core.data.check.log import Log, attempt, mixed
from gem_core.data.check.tells import Values, ranks, sample
from gem_core.data.columns import Floats, Ints
from gem_core.data.rows import UserEvents

SAMPLE = 4_000
"""Rows that are correlated."""
LATEST = 100_000
"""Rows, the latest of the log, whose increases are looked at."""
WINDOWS = (4, 16, 64)
"""Shares of the log's length that statistics of a window are of."""
FAIR = "before"
"""How the names of statistics begin that are known at the request."""
LATER = np.iinfo(np.int64).max
"""After everything."""
ALIKE = 0.99
"""Rank correlation from which on a feature is taken for the statistic."""
FEWEST_KEYS, FEWEST_VALUES = 50, 10
"""Keys that a statistic must differ over, and values that it and the feature must have."""
NEAREST = 5
"""Statistics of each kind whose correlation is computed exactly."""
RISING = 0.95
"""Share of steps in which a count does not fall."""


@dataclass(frozen=True)
class _Key:
    """A user, an id, or both: key of each row, and by event type those of its events."""

    name: str
    rows: Ints
    events: dict[str, Ints]


@dataclass(frozen=True)
class _Statistic:
    """`fair`: known at the request. `values`: (sampled rows,)."""

    words: str
    fair: bool
    values: Floats


def find(log: Log, threshold: float) -> Iterator[Finding]:
    """Findings about the dense features."""
    columns = {}
    for name, dense in log.schema.dense.items():
        values = log.column(dense.column or name, f"dense feature {name}")
        numbers = None if values is None else attempt(values.numbers)
        if values is not None and numbers is not None:
            columns[f'{log.source.name}, column "{values.name}" ({values.role})'] = numbers
    if not columns or not len(log.table):
        return
    keys = list(_keys(log))
    rows = sample(len(log.table), SAMPLE)
    statistics = [s for key in keys for s in _statistics(log, key, rows) if len(np.unique(s.values)) >= FEWEST_VALUES]
    if statistics:
        table = np.stack([ranks(s.values).astype(np.float32) for s in statistics])
        for place, numbers in columns.items():
            yield from _future(place, numbers[rows], statistics, table)
    yield from _increases(log, columns, keys, threshold)


def _keys(log: Log) -> Iterator[_Key]:
    yield _Key("the user", log.user, {event: stored.user for event, stored in log.events.items()})
    for category in log.categories:
        matching: dict[str, Ints] = {}
        for event, stored in log.events.items():
            for field, ids in stored.ids.items():
                if log.schema.table_of(f"{event}.{field}") == log.schema.table_of(category.name):
                    matching.setdefault(event, ids)
        yield _Key(category.name, category.keys, matching)
        both = {event: mixed(log.events[event].user, ids) for event, ids in matching.items()}
        yield _Key(f"the user and {category.name}", mixed(log.user, category.keys), both)


# ---- statistics -------------------------------------------------------------------------------------------------


class _Sums:
    """Sums of values by key and time."""

    def __init__(self, key: Ints, time: Ints, values: Floats) -> None:
        self._ordered = UserEvents.of(key, time, {"values": values})
        self._sums = np.concatenate([[0.0], np.cumsum(self._ordered.fields["values"])])

    def before(self, key: Ints, time: Ints) -> Floats:
        """(n,) sums of what each key has strictly before a time."""
        start, end = self._ordered.spans(key, time, len(self._sums))
        out: Floats = self._sums[end] - self._sums[start]
        return out


@dataclass(frozen=True)
class _At:
    """The sampled rows: their keys, ends of history and times, and when the log begins and ends."""

    key: Ints
    before: Ints
    time: Ints
    first: int
    last: int

    def sums(self, of: _Sums) -> dict[str, Floats]:
        """By when, and whether that is fair."""
        fair, until_now = of.before(self.key, self.before), of.before(self.key, self.time + 1)
        whole = of.before(self.key, np.full(len(self.key), LATER))
        out = {
            f"{FAIR} the request": fair,
            f"{FAIR} the request by time": fair / (self.before - self.first + 1),
            "with the request": until_now,
            "in the whole log": whole,
            "after the request": whole - until_now,
            "from the request on": whole - fair,
        }
        for share in WINDOWS:
            width = (self.last - self.first) // share
            out[f"{FAIR} the request in a {share}th of the log"] = fair - of.before(self.key, self.before - width)
            out[f"from the request on in a {share}th of the log"] = of.before(self.key, self.before + width) - fair
        return out


def _statistics(log: Log, key: _Key, rows: Ints) -> Iterator[_Statistic]:
    if len(np.unique(key.rows)) < FEWEST_KEYS:
        return
    at = _At(key.rows[rows], log.before[rows], log.time[rows], int(log.time.min()), int(log.time.max()))
    trained = log.part == log.splits.index("train") if "train" in log.splits else np.ones(len(log.table), np.bool_)

    def of_rows(values: Floats) -> dict[str, Floats]:
        train = _Sums(key.rows[trained], log.time[trained], values[trained])
        sums = at.sums(_Sums(key.rows, log.time, values))
        return sums | {
            "with the row itself": sums[f"{FAIR} the request"] + values[rows],
            "in the training rows": train.before(at.key, np.full(len(rows), LATER)),
        }

    yield from _named(f"the number of rows of {key.name}", of_rows(np.ones(len(log.table))))
    for task, label in log.labels.items():
        positives, counted = of_rows(np.nan_to_num(label)), of_rows((~np.isnan(label)).astype(np.float64))
        yield from _named(f"the number of positives of {task} of {key.name}", positives)
        rates = {
            when: np.divide(positives[when], counted[when], out=np.zeros(len(rows)), where=counted[when] > 0)
            for when in positives
        }
        yield from _named(f"the rate of {task} of {key.name}", rates)
    for event, users in key.events.items():
        counts = at.sums(_Sums(users, log.events[event].time, np.ones(len(users))))
        yield from _named(f"the number of {event} events of {key.name}", counts)


def _named(words: str, values: dict[str, Floats]) -> Iterator[_Statistic]:
    for when, each in values.items():
        yield _Statistic(f"{words} {when}", when.startswith(FAIR), each)


def _future(
    place: str, numbers: Floats, statistics: list[_Statistic], table: npt.NDArray[np.float32]
) -> Iterator[Finding]:
    """`table` (statistics, rows): ranks over all sampled rows, by which the nearest statistics are chosen."""
    known = ~np.isnan(numbers)
    if len(np.unique(numbers[known])) < FEWEST_VALUES:
        return
    mine = _standardised(ranks(numbers[known]))
    some = table if known.all() else table[:, known]
    spread = some.std(axis=1)  # `mine` has mean 0: that of the others does not matter
    roughly = np.abs(some @ mine.astype(np.float32)) / np.where(spread > 0, spread, 1)
    best: dict[bool, tuple[float, str]] = {True: (0.0, ""), False: (0.0, "")}
    for fair in (True, False):
        of_kind = np.flatnonzero([statistic.fair == fair for statistic in statistics])
        for i in of_kind[np.argsort(-roughly[of_kind], kind="stable")][:NEAREST]:
            statistic = statistics[i]
            like = abs(float(mine @ _standardised(ranks(statistic.values[known])))) / len(mine)
            best[fair] = max(best[fair], (like, statistic.words))
    (fair_like, fair_words), (unfair_like, words) = best[True], best[False]
    if unfair_like >= ALIKE and 1 - fair_like >= 2 * (1 - unfair_like) + 1e-9:
        near = f" (the nearest known at the request, {fair_words}: {fair_like:.4f})" if fair_words else ""
        yield Finding(
            "future-statistic",
            None,
            f"{place}: expected what is known at the request, found {words}: rank correlation {unfair_like:.4f}{near}",
        )


def _standardised(values: Floats) -> Floats:
    spread = values.std()
    return (values - values.mean()) / spread if spread else np.zeros(len(values))


# ---- increases --------------------------------------------------------------------------------------------------


def _increases(log: Log, columns: dict[str, Floats], keys: list[_Key], threshold: float) -> Iterator[Finding]:
    late = np.sort(np.argsort(log.time, kind="stable")[-LATEST:])
    for key in keys:
        own, time = key.rows[late], log.time[late]
        order = np.lexsort((time, own))
        follows = np.append(False, (own[order][1:] == own[order][:-1]) & (time[order][1:] > time[order][:-1]))
        later, before = late[order[follows]], late[order[np.flatnonzero(follows) - 1]]
        if not len(later):
            continue
        for place, numbers in columns.items():
            step = numbers[later] - numbers[before]
            known = ~np.isnan(step)
            if not (step[known] > 0).any() or (step[known] >= 0).mean() < RISING:
                continue
            said = f"{place}: expected a count of what came before, whose increase since the last row of {key.name}"
            yield from judged(log, later, Values.of_numbers(step), threshold, "label-in-increase", said)
