"""A sound log with as-of features, made row by row in time order, and helpers to leak into it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

DAY = 86_400
START = 20_000 * DAY
TEST = START + 80 * DAY

SCHEMA: dict[str, Any] = {
    "user": "user",
    "time": "time",
    "request": "request",
    "row_id": "id",
    "surface": "place",
    "sparse": ["ad", "category"],
    "dense": ["price", "age", "user_clicks", "ad_clicks", "ad_rate", "user_recent"],
    "events": {"click": {"fields": {"ad": {}, "cost": {"kind": "dense"}}}},
    "objectives": {"click": {"label": "clicked"}, "buy": {"label": "bought", "surfaces": ["feed"]}},
}


def sound(requests: int = 1000, seed: int = 0) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Columns of the rows (3 a request) and of the clicks; every count is of what came before."""
    draw = np.random.default_rng(seed)
    users, ads = 80, 60
    taste, quality = draw.integers(0, 6, users), draw.normal(-1.5, 0.8, ads)
    activity = draw.lognormal(0, 1, users)
    price, age = draw.uniform(1, 50, ads).round(2), draw.integers(18, 80, users)
    times = START + np.sort(draw.choice(100 * DAY, requests, replace=False))
    rows: list[dict[str, Any]] = []
    clicks: list[dict[str, Any]] = []
    by_user, by_ad, shown = Counter[int](), Counter[int](), Counter[int]()
    for number, time in enumerate(times.tolist()):
        user = int(draw.choice(users, p=activity / activity.sum()))
        place = str(draw.choice(["feed", "search"]))
        asof = by_user[user], by_ad.copy(), shown.copy()
        recent = sum(c["user"] == user and c["time"] >= time - 7 * DAY for c in clicks[-150:])
        for ad in draw.choice(ads, 3, replace=False).tolist():
            logit = quality[ad] + 1.2 * (ad % 6 == taste[user])
            clicked = int(draw.random() < 1 / (1 + np.exp(-logit)))
            bought = int(clicked and draw.random() < 0.4)
            rows.append({
                "user": user, "time": time, "request": number, "id": len(rows), "place": place, "ad": ad,
                "category": ad % 6, "price": float(price[ad]), "age": float(age[user]), "user_clicks": float(asof[0]),
                "ad_clicks": float(np.log1p(asof[1][ad])), "ad_rate": (asof[1][ad] + 1) / (asof[2][ad] + 5),
                "user_recent": float(recent), "clicked": clicked, "bought": bought if place == "feed" else None,
            })  # fmt: skip
            shown[ad] += 1
            if clicked:
                by_user[user] += 1
                by_ad[ad] += 1
                clicks.append({"user": user, "time": time + 5, "ad": ad, "cost": float(draw.uniform(0, 1))})
    return _columns(rows), _columns(clicks)


def _columns(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [record[name] for record in records] for name in records[0]}


def inline(rows: dict[str, list[Any]], events: dict[str, list[Any]], late: int = 0) -> dict[str, list[Any]]:
    """The rows with their history in list columns; `late`: seconds after the request from which events are seen."""
    table = pa.table(events).sort_by("time").to_pylist()
    seen = [
        [e for e in table if e["user"] == user and e["time"] < time + late]
        for user, time in zip(rows["user"], rows["time"], strict=True)
    ]
    return rows | {f"click.{name}": [[e[name] for e in each] for each in seen] for name in ("time", "ad", "cost")}
