"""Random logs, and an encoding of them that is written row by row in plain Python: the truth for the vectorised one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st

from gem_core.data.ids import hashed
from gem_core.schema import Schema

PROPERTY = settings(deadline=None, max_examples=40)

SPEC: dict[str, Any] = {
    "user": "u",
    "time": "t",
    "row_id": "id",
    "history_before": "h",
    "surface": "s",
    "surfaces": ["feed", "search"],
    "dense": {
        "price": {"transform": "log1p"},
        "score": {"column": "raw_score", "encoding": "piecewise", "bins": 4},
        "age": {"level": "request"},
    },
    "sparse": {
        "ad": {},
        "device": {"level": "request", "vocabulary": ["phone", "desk"], "unseen": "hash", "unseen_buckets": 3},
        "campaign": {"hash": 7},
        "tags": {"multi": True, "max_length": 2, "table": "tag"},
    },
    "vectors": {"look": {"width": 2}},
    "events": {
        "click": {
            "max_length": 3,
            "user": "who",
            "time": "when",
            "fields": {"ad": {}, "tag": {"table": "tag"}, "spent": {"kind": "dense", "transform": "log1p"}},
        },
        "view": {"max_length": 2, "user": "who", "time": "when", "fields": {"place": {"hash": 5, "column": "where"}}},
    },
    "objectives": {
        "click": {"label": "clicked", "surfaces": ["feed"], "rate": "kept"},
        "buy": {"label": "bought", "mask": "known", "weight": "value"},
    },
    "fitted": {
        "rows": 10,
        "dense": {
            "price": {"mean": 1.0, "std": 2.0},
            "score": {"mean": -1.0, "std": 0.5, "edges": [-1.0, 0.0, 1.0]},
            "age": {"mean": 30.0, "std": 10.0},
            "click.spent": {"mean": 0.5, "std": 0.25},
        },
        "vocabularies": {"ad": [5, 3, 8], "tag": ["x", "7", "y"]},
        "surfaces": [],
        "base_rates": {"click": 0.1, "buy": 0.1},
    },
}

ROW_TYPES = pa.schema(
    {
        "u": pa.int64(),
        "t": pa.int64(),
        "id": pa.int64(),
        "h": pa.int64(),
        "s": pa.string(),
        "price": pa.float64(),
        "raw_score": pa.float32(),
        "age": pa.int32(),
        "ad": pa.int64(),
        "device": pa.string(),
        "campaign": pa.string(),
        "tags": pa.list_(pa.string()),
        "look": pa.list_(pa.float32()),
        "clicked": pa.int8(),
        "bought": pa.float32(),
        "known": pa.bool_(),
        "value": pa.float64(),
        "kept": pa.float64(),
    }
)
EVENT_TYPES = {
    "click": pa.schema(
        {"who": pa.int64(), "when": pa.int64(), "ad": pa.int64(), "tag": pa.string(), "spent": pa.float64()}
    ),
    "view": pa.schema({"who": pa.int64(), "when": pa.int64(), "where": pa.string()}),
}


def schema() -> Schema:
    return Schema.parse(SPEC)


def _or_none(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


NUMBERS = st.floats(-0.5, 50, width=32)


@st.composite
def logs(draw: st.DrawFn, max_requests: int = 6) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Rows, and events by type: few users, few distinct times (so ties), missing and unseen ids, empty histories."""
    rows: list[dict[str, Any]] = []
    requests: dict[tuple[int, ...], dict[str, Any]] = {}
    for _ in range(draw(st.integers(0, max_requests))):
        time = draw(st.integers(0, 6))
        user, before = draw(st.integers(0, 3)), draw(st.integers(max(0, time - 2), time))
        features = {
            "age": draw(_or_none(st.integers(0, 90))),
            "device": draw(_or_none(st.sampled_from(["phone", "desk", "watch", "car"]))),
        }
        # The same user, time and end of history again may be the same request.
        shared = requests.setdefault((user, time, before), {"u": user, "t": time, "h": before, **features})
        for _ in range(draw(st.integers(1, 3))):
            clicked, bought = draw(_or_none(st.sampled_from([0, 1]))), draw(_or_none(st.sampled_from([0.0, 1.0])))
            rows.append(
                shared
                | {
                    "id": len(rows) + 100,
                    "s": draw(st.sampled_from(["feed", "search"])),
                    "price": draw(_or_none(NUMBERS)),
                    "raw_score": draw(_or_none(NUMBERS)),
                    "ad": draw(_or_none(st.sampled_from([3, 5, 8, 9, -1]))),
                    "campaign": draw(_or_none(st.sampled_from(["7", "spring", "07"]))),
                    "tags": draw(_or_none(st.lists(_or_none(st.sampled_from(["x", "y", "7", "z"])), max_size=4))),
                    "look": draw(_or_none(st.lists(NUMBERS, min_size=2, max_size=2))),
                    "clicked": clicked,
                    "bought": bought,
                    "known": draw(_or_none(st.booleans())),
                    "value": draw(st.floats(0, 4)),
                    "kept": draw(st.sampled_from([0.25, 0.5, 1.0])),
                }
            )
    who, when = st.integers(0, 4), st.integers(-2, 7)
    clicks = st.fixed_dictionaries(
        {
            "who": who,
            "when": when,
            "ad": _or_none(st.sampled_from([3, 5, 9])),
            "tag": _or_none(st.sampled_from(["x", "7", "z"])),
            "spent": _or_none(NUMBERS),
        }
    )
    views = st.fixed_dictionaries({"who": who, "when": when, "where": _or_none(st.sampled_from(["a", "b", "1"]))})
    events = {"click": draw(st.lists(clicks, max_size=15)), "view": draw(st.lists(views, max_size=8))}
    return rows, events


def tables(
    rows: Sequence[Mapping[str, Any]], events: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[pa.Table, dict[str, pa.Table]]:
    """The log as Arrow tables."""
    stored = {name: pa.Table.from_pylist(list(e), schema=EVENT_TYPES[name]) for name, e in events.items()}
    return pa.Table.from_pylist(list(rows), schema=ROW_TYPES), stored


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit() and str(int(text)) == text


def _id(key: str, value: Any) -> int:
    if value is None:
        return 0
    if key in ("campaign", "view.place"):
        return 2 + int(hashed(pa.array([value]), {"campaign": 7, "view.place": 5}[key])[0])
    known = {"ad": ["5", "3", "8"], "click.ad": ["5", "3", "8"], "device": ["phone", "desk"]}.get(key, ["x", "7", "y"])
    if str(value) in known:
        return 2 + known.index(str(value))
    return 2 + 2 + int(hashed(pa.array([value]), 3)[0]) if key == "device" else 1


def _number(value: Any, mean: float, std: float, log: bool = False) -> float:
    if value is None:
        return math.nan
    return ((math.log1p(value) if log else value) - mean) / std


def naive(rows: Sequence[Mapping[str, Any]], events: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The batch of all rows as nested lists; ragged features as lists of lists."""
    groups: list[list[Mapping[str, Any]]] = []
    for row in rows:
        if groups and all(groups[-1][0][k] == row[k] for k in "uth"):
            groups[-1].append(row)
        else:
            groups.append([row])
    heads = [g[0] for g in groups]
    history: dict[str, list[list[Mapping[str, Any]]]] = {}
    for kind, limit in (("click", 3), ("view", 2)):
        history[kind] = []
        for head in heads:
            mine = [e for e in events[kind] if e["who"] == head["u"] and e["when"] < head["h"]]
            history[kind].append(sorted(mine, key=lambda e: e["when"])[-limit:][::-1])
    labels: dict[str, list[tuple[float, float, float]]] = {"click": [], "buy": []}
    for row in rows:
        counts = row["clicked"] is not None and row["s"] == "feed"
        weight = 1 / row["kept"] if row["clicked"] == 0 else 1.0
        labels["click"].append((float(row["clicked"]), 1.0, weight) if counts else (0.0, 0.0, 0.0))
        counts = row["bought"] is not None and bool(row["known"])
        labels["buy"].append((row["bought"], 1.0, row["value"]) if counts else (0.0, 0.0, 0.0))
    return {
        "dense": [[_number(r["price"], 1, 2, log=True), _number(r["raw_score"], -1, 0.5)] for r in rows],
        "request_dense": [[_number(h["age"], 30, 10)] for h in heads],
        "ids": {
            "ad": [[_id("ad", r["ad"])] for r in rows],
            "campaign": [[_id("campaign", r["campaign"])] for r in rows],
            "tags": [[_id("tags", t) for t in (r["tags"] or [])[:2]] for r in rows],
        },
        "request_ids": {"device": [[_id("device", h["device"])] for h in heads]},
        "vectors": {"look": [r["look"] or [0.0, 0.0] for r in rows]},
        "events": {
            "click": {
                "time": [[e["when"] for e in h] for h in history["click"]],
                "ad": [[_id("click.ad", e["ad"]) for e in h] for h in history["click"]],
                "tag": [[_id("click.tag", e["tag"]) for e in h] for h in history["click"]],
                "spent": [
                    [0.0 if e["spent"] is None else _number(e["spent"], 0.5, 0.25, log=True) for e in h]
                    for h in history["click"]
                ],
            },
            "view": {
                "time": [[e["when"] for e in h] for h in history["view"]],
                "place": [[_id("view.place", e["where"]) for e in h] for h in history["view"]],
            },
        },
        "request": [i for i, g in enumerate(groups) for _ in g],
        "request_time": [h["t"] for h in heads],
        "user": [h["u"] for h in heads],
        "surface": [["feed", "search"].index(r["s"]) for r in rows],
        "row_id": [r["id"] for r in rows],
        "labels": {task: [v[0] for v in values] for task, values in labels.items()},
        "masks": {task: [v[1] for v in values] for task, values in labels.items()},
        "weights": {task: [v[2] for v in values] for task, values in labels.items()},
    }


def inline(
    rows: Sequence[Mapping[str, Any]], events: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """The same rows as records that carry their history in list columns, oldest event first."""
    names = {"click": {"ad": "ad", "tag": "tag", "spent": "spent"}, "view": {"place": "where"}}
    out = []
    for row in rows:
        record = dict(row)
        for kind, fields in names.items():
            mine = [e for e in events[kind] if e["who"] == row["u"] and e["when"] < row["h"]]
            mine.sort(key=lambda e: e["when"])
            record[f"{kind}.time"] = [e["when"] for e in mine]
            record |= {f"{kind}.{f}": [e[c] for e in mine] for f, c in fields.items()}
        out.append(record)
    return out
