"""The log in blocks of users: tables of rows and events, and the schema that reads them.

A block is what is simulated and drawn at once, from a random stream of its own ([seed, 1, block]); what a block holds
depends on nothing outside of it, so that a log is the same in every order and piece that it is read in, and a log with
more rows and users in the same proportion begins with the users of a smaller one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_core.data.generated.config import EVENTS, START, GeneratedConfig
from gem_core.data.generated.exposure import Exposure
from gem_core.data.generated.response import Response, calibrate, respond
from gem_core.data.generated.world import (
    AGES,
    CATEGORIES_OF_DEPARTMENT,
    COUNTRIES,
    DEVICES,
    FORMATS,
    SURFACES,
    Ints,
    World,
)

BLOCK_USERS = 1024
ITEM = ("ad", "advertiser", "category", "department")
"""An ad's id and the levels above it: fields of every event."""


def oracle_column(task: str) -> str:
    """The column of the true probability of a task's label, given all that came before the request."""
    return f"oracle_{task}"


def static_column(task: str) -> str:
    """The column of the probability without the effects of history."""
    return f"static_{task}"


def describe(config: GeneratedConfig) -> dict[str, Any]:
    """The schema of the log, as a schema file has it. Labels, features and histories; the oracle's columns are in no part."""
    item: dict[str, Any] = dict.fromkeys(ITEM)
    fields = {"impression": item, "click": item, "conversion": item | {"kind": None}}
    request = {"level": "request"}
    return {
        "user": "user",
        "time": "time",
        "request": "request",
        "row_id": "row_id",
        "surface": "surface",
        "surfaces": list(SURFACES),
        "sparse": {**item, "format": {}} | {name: dict(request) for name in ("country", "age", "device", "hour")},
        "dense": {"price": {"transform": "log1p"}}
        | {name: {"transform": "log1p", **request} for name in ("past_impressions", "past_clicks")},
        "events": {
            event: {"max_length": config.max_length.get(event, length), "fields": {n: {} for n in fields[event]}}
            for event, length in EVENTS.items()
        },
        "objectives": {task: {} for task in config.tasks},
    }


@dataclass(frozen=True)
class Block:
    """Rows and, per type, events of some users. Rows are ordered by user and time, and so are events."""

    rows: pa.Table
    events: dict[str, pa.Table]


class Log:
    """A generated log; `blocks` makes it."""

    def __init__(self, config: GeneratedConfig) -> None:
        self.config = config
        self.block_count = -(-config.user_count // BLOCK_USERS)

    @cached_property
    def _truth(self) -> Any:
        return calibrate(World.draw(self.config))

    def blocks(self) -> Iterator[Block]:
        """All blocks, one after the other; their rows are `config.rows` in all."""
        for index in range(self.block_count):
            yield self.block(index)

    def block(self, index: int) -> Block:
        """The users from index * BLOCK_USERS on."""
        config, users = self.config, self.config.user_count
        first = index * BLOCK_USERS
        end = min(first + BLOCK_USERS, users)
        first_row, end_row = config.rows * first // users, config.rows * end // users
        rng = np.random.default_rng([config.seed, 1, index])
        exposure = Exposure.draw(self._truth.world, rng, end - first, end_row - first_row)
        return _tables(self._truth.world, exposure, respond(self._truth, exposure, rng), first, first_row)


def _texts(index: Ints, names: Sequence[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(index.astype(np.int8)), pa.array(names))


def _tables(world: World, e: Exposure, response: Response, first_user: int, first_row: int) -> Block:
    config = world.config
    user = first_user + e.user[e.request]
    time = config.first_second + e.time[e.request]
    category = world.category[e.ad]
    item = {
        "ad": e.ad,
        "advertiser": world.advertiser[e.ad],
        "category": category,
        "department": category // CATEGORIES_OF_DEPARTMENT,
    }
    begin = np.searchsorted(e.request, np.arange(len(e.user)))  # first row of each request
    users_first = begin[np.searchsorted(e.user, e.user)]  # first row of its user
    kept = np.flatnonzero(time >= START)  # the rows; those before are there as events alone
    row_id = np.zeros(len(e.ad), np.int64)
    row_id[kept] = first_row + np.arange(len(kept))
    clicks_before = np.concatenate([[0], np.cumsum(response.clicked)])
    columns: dict[str, Any] = {
        "row_id": row_id,
        "request": row_id[begin[e.request]],
        "user": user,
        "time": time,
        "surface": _texts(e.surface[e.request], SURFACES),
        "country": _texts(e.country[e.user][e.request], COUNTRIES),
        "age": _texts(e.age[e.user][e.request], AGES),
        "device": _texts(e.device[e.request], DEVICES),
        "hour": (e.time // 3600 % 24)[e.request],
        "past_impressions": (begin - users_first)[e.request],
        "past_clicks": (clicks_before[begin] - clicks_before[users_first])[e.request],
        **item,
        "format": _texts(world.format[e.ad], FORMATS),
        "price": world.price[e.ad].astype(np.float32),
    }
    labels = response.labels(config)
    app = world.app[e.ad]
    unlabelled = [np.zeros(len(app), np.bool_), *(app != (c.advertisers == "app") for c in config.conversions.values())]
    happened = np.concatenate([response.clicked[None], response.converted])
    times = config.first_second + np.concatenate([response.click_time[None], response.convert_time])
    for i, task in enumerate(config.tasks):
        columns[task] = pa.array(labels[i].astype(np.int8), mask=unlabelled[i])
    for i, task in enumerate(config.tasks):
        columns[f"{task}_time"] = pa.array(times[i], mask=~happened[i])
    for i, task in enumerate(config.tasks):
        for name, values in ((oracle_column(task), response.probability), (static_column(task), response.static)):
            columns[name] = pa.array(values[i].astype(np.float32), mask=unlabelled[i])

    def events(task: Ints, row: Ints, own: dict[str, NDArray[np.int64]] | None = None) -> pa.Table:
        when = times[task, row]
        order = np.lexsort((when, user[row]))
        row = row[order]
        found = {"user": user[row], "time": when[order], **{name: values[row] for name, values in item.items()}}
        return pa.table(found | {name: _texts(v[order], list(config.conversions)) for name, v in (own or {}).items()})

    clicked = np.flatnonzero(response.clicked)
    kind, converted = response.converted.nonzero()
    return Block(
        pa.table(columns).take(pa.array(kept)),
        {
            "impression": pa.table({"user": user, "time": time, **item}),
            "click": events(np.zeros_like(clicked), clicked),
            "conversion": events(1 + kind, converted, {"kind": kind}),
        },
    )
