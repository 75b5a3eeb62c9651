"""One partition of users, whole in memory: labels by attribution, as-of counts of the user, events by type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gem_core.data.columns import Bools, Ints
from gem_core.data.ids import column_keys, splitmix64
from gem_core.data.prepare.options import History, Options
from gem_core.data.prepare.source import actions_in
from gem_core.data.readers.base import SPLITS
from gem_core.data.rows import UserEvents

ALL = np.iinfo(np.int64).max


def pair(one: Ints, other: Ints) -> Ints:
    """(n,) a key of two."""
    return splitmix64(splitmix64(one.view(np.uint64)) ^ other.view(np.uint64)).view(np.int64)


@dataclass(frozen=True)
class UserPart:
    """Impressions in order of user and time, with labels (null where not known), counts and split; events by type."""

    rows: pa.Table
    events: dict[str, pa.Table]


def count_before(key: Ints, time: Ints, of_key: Ints, before: Ints) -> Ints:
    """(n,) how many events (`key`, `time`) each `of_key` has strictly earlier than `before`."""
    start, end = UserEvents.of(key, time, {}).spans(of_key, before, ALL)
    return end - start


def join(table: pa.Table, options: Options, last: int) -> UserPart:
    """Labels, counts and events of the users of `table`; `last` is the latest time of the whole log.

    A label is known only where its window ends before the next split begins and not after the log: what comes of an
    impression of the training split is then known when validation begins.
    """
    o = options
    user, time = column_keys(table.column(o.user).combine_chunks()), table.column(o.time).to_numpy()
    order = np.lexsort((time, user))
    table, user, time = table.take(pa.array(order)), user[order], time[order]
    item = column_keys(table.column(o.item).combine_chunks())
    shown = actions_in(table, o.action, o.impressions)
    rows = table.filter(pa.array(shown))
    both, at = pair(user, item), time[shown]
    edges = np.array(o.edges())
    split = np.searchsorted(edges, at, side="right")
    end = np.append(edges, last + 1)[split]
    labels: dict[str, pa.Array] = {}
    for task, objective in o.objectives.items():
        label = _labels(both, time, shown, actions_in(table, o.action, objective.actions), objective.within)
        labels[task] = pa.array(label.astype(np.int8), mask=at + objective.within >= end)
    counts: dict[str, pa.Array] = {}
    events: dict[str, pa.Table] = {}
    for name, history in o.histories.items():
        did = actions_in(table, o.action, history.actions)
        counts[f"user_{name}_count"] = pa.array(count_before(user[did], time[did], user[shown], at))
        counts[f"user_item_{name}_count"] = pa.array(count_before(both[did], time[did], both[shown], at))
        events[name] = table.filter(pa.array(did)).select(_event_columns(o, history))
    kept = [o.user, o.time, o.item, *(f.column or n for of in (o.sparse, o.dense) for n, f in of.items())]
    columns = {name: rows.column(name) for name in dict.fromkeys(kept)}
    split_names = pa.array(np.array(SPLITS)[split] if len(split) else [], pa.string())
    return UserPart(pa.table({**columns, **counts, **labels, "split": split_names}), events)


def _event_columns(options: Options, history: History) -> list[str]:
    fields = [field.column or name for name, field in history.fields.items()]
    return list(dict.fromkeys([options.user, options.time, options.item, *fields]))


def _labels(both: Ints, time: Ints, shown: Bools, acted: Bools, within: int) -> Bools:
    """(impressions,) whether an action follows whose newest impression this is, at most `within` seconds after it."""
    place = np.arange(int(shown.sum()))
    impressions = UserEvents.of(both[shown], time[shown], {"place": place})
    start, end = impressions.spans(both[acted], time[acted] + 1, 1)
    newest = end[start < end] - 1
    soon = time[acted][start < end] - impressions.time[newest] <= within
    out = np.zeros(len(place), np.bool_)
    out[impressions.fields["place"][newest[soon]]] = True
    return out
