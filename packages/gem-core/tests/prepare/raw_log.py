"""Raw event logs, and what must become of them, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np

OPTIONS: dict[str, Any] = {
    "log": "log.csv",
    "impressions": ["view"],
    "objectives": {"click": {"actions": ["click"], "within": 20}, "buy": {"actions": ["buy"], "within": "1m"}},
    "histories": {"click": {"actions": ["click"], "fields": ["place"]}, "bought": {"actions": ["buy"]}},
    "sparse": ["place"],
    "dense": ["price"],
    "validation_from": 600,
    "test_from": 800,
}


def raw(events: int = 600, users: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Events of 1000 seconds, many at one time, in no order."""
    draw = np.random.default_rng(seed)
    return [
        {
            "user": f"u{draw.integers(users)}",
            "item": int(draw.integers(6)),
            "time": int(draw.integers(200)) * 5,
            "action": str(draw.choice(["view", "click", "buy", "scroll"], p=[0.5, 0.25, 0.15, 0.1])),
            "place": str(draw.choice(["top", "side"])),
            "price": float(draw.integers(1, 9)) / 2,
        }
        for _ in range(events)
    ]


def naive(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all splits, without row ids, as `OPTIONS` ask for them."""
    last = max(e["time"] for e in log if e["action"] != "scroll")
    views = [(i, e) for i, e in enumerate(log) if e["action"] == "view"]
    out = []
    for i, view in views:
        user, item, now = view["user"], view["item"], view["time"]
        split, end = ("train", 600) if now < 600 else ("validation", 800) if now < 800 else ("test", last + 1)
        row = {name: view[name] for name in ("user", "time", "item", "place", "price")} | {"split": split}
        for task, (action, within) in {"click": ("click", 20), "buy": ("buy", 60)}.items():
            label = 0
            for event in log:
                if (event["action"], event["user"], event["item"]) != (action, user, item):
                    continue
                before = [
                    (v["time"], j)
                    for j, v in views
                    if (v["user"], v["item"]) == (user, item) and v["time"] <= event["time"]
                ]
                if before and max(before)[1] == i and event["time"] <= now + within:
                    label = 1
            row[task] = label if now + within < end else None
        for name, action in {"click": "click", "bought": "buy"}.items():
            past = [e for e in log if e["action"] == action and e["time"] < now]
            row[f"user_{name}_count"] = sum(e["user"] == user for e in past)
            row[f"item_{name}_count"] = sum(e["item"] == item for e in past)
            row[f"user_item_{name}_count"] = sum((e["user"], e["item"]) == (user, item) for e in past)
        if row["click"] is not None or row["buy"] is not None:
            out.append(row)
    return out
