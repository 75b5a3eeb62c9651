"""Rows of impressions and sends as one Arrow table, and the Parquet file that they stream into."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.data.completejourney import calendar, features, sends
from gem_core.data.completejourney.events import level_values
from gem_core.data.completejourney.history import History
from gem_core.data.completejourney.impressions import Impressions, Repurchases
from gem_core.data.completejourney.log import DEMOGRAPHICS, HIERARCHY, Ints, Log
from gem_core.data.completejourney.promotions import DISPLAY, MAILER
from gem_core.data.completejourney.sends import Sends

ROW_GROUP = 65_536
REQUEST_SPARSE = ("store", *DEMOGRAPHICS)
ROW_SPARSE = ("product", *HIERARCHY, "display", "mailer", "coupon", "campaign_type")
ROW_LISTS = ("coupon_types", "coupon_categories", "coupon_brands")
OBJECTIVES = ("purchase", "repurchase", "redeem")
LIST = pa.list_(pa.string())


def split_of_week(week: int) -> str:
    """Split of in-store impressions."""
    return "train" if week <= 42 else "validation" if week <= 46 else "test"


class Rows:
    """Builds tables of one schema from impressions and sends. `empty`: a history that nothing was absorbed into."""

    def __init__(self, log: Log, empty: History) -> None:
        self.log = log
        self._repurchases = Repurchases(log)
        none = np.zeros(0, np.int64)
        nothing = Impressions(none, none, none, none, none.astype(np.uint8), none.astype(bool))
        self.dense_request = tuple(features.of_request(empty, none, None))
        unsent = sends.draw(empty, np.zeros(len(log.households), bool), 0)  # to nobody
        self.dense_row = (*features.of_impression(empty, nothing), *sends.features(empty, unsent))
        ints, text, number = pa.int64(), pa.string(), pa.float32()
        self.schema = pa.schema([
            *((n, ints) for n in ("row_id", "request_id", "user", "time", "history_before")),
            *((n, text) for n in ("surface", "split")),
            ("week", pa.int32()),
            ("store", ints),
            *((n, text) for n in DEMOGRAPHICS),
            ("product", ints),
            *((n, log.vocabulary[n].type) for n in HIERARCHY),
            *((n, text) for n in ("display", "mailer")),
            ("coupon", ints),
            ("campaign_type", text),
            *((n, LIST) for n in ROW_LISTS),
            *((n, number) for n in ("rate", *OBJECTIVES, *self.dense_request, *self.dense_row)),
        ])  # fmt: skip

    def impressions(self, history: History, rows: Impressions) -> pa.Table:
        """Impressions of the history's week, purchases and promotions of that week not yet absorbed."""
        log, week = self.log, history.week
        request = (week * len(log.households) + rows.household) * len(log.stores) + rows.store
        display, mailer = np.divmod(rows.code.astype(np.int64), len(MAILER))
        surface = np.where(mailer == 0, "display", np.where(display == 0, "mailer", "display+mailer"))
        return self._table(history, rows.household, {
            "row_id": request * len(log.products) + rows.product,
            "request_id": request,
            "time": rows.time,
            "surface": surface,
            "split": np.full(len(rows), split_of_week(week)),
            "store": log.stores[rows.store],
            "product": log.products[rows.product],
            **{level: level_values(log, level, rows.product) for level in HIERARCHY},
            "display": np.array(list(DISPLAY))[display],
            "mailer": np.array(list(MAILER))[mailer],
            "rate": np.ones(len(rows), np.float32),
            "purchase": rows.purchase.astype(np.float32),
            "repurchase": self._repurchases.label(rows, week),
            **features.of_request(history, rows.household, rows.store),
            **features.of_impression(history, rows),
        })  # fmt: skip

    def sends(self, history: History, rows: Sends) -> pa.Table:
        """Sends of campaigns that start in the history's week."""
        log, coupons, campaigns = self.log, rows.coupons, self.log.campaigns
        base = (calendar.LAST_WEEK + 1) * len(log.households) * len(log.stores)  # above every impression's request
        request = rows.campaign * len(log.households) + rows.household
        upcs, upc = np.unique(campaigns.coupon_upc), coupons.upc[rows.coupon]
        kind = np.array(campaigns.kind)[rows.campaign]
        splits = np.array([s or "" for s in sends.split(log)])
        lists = pa.ListArray.from_arrays
        return self._table(history, rows.household, {
            "row_id": base * len(log.products) + request * len(upcs) + np.searchsorted(upcs, upc),
            "request_id": base + request,
            "time": rows.time,
            "surface": np.char.add("campaign_", kind),
            "split": splits[rows.campaign],
            "coupon": upc,
            "campaign_type": kind,
            **{
                column: lists(coupons.offsets.astype(np.int32), level_values(log, level, coupons.product)).take(
                    pa.array(rows.coupon)
                )
                for column, level in zip(ROW_LISTS, ("type", "category", "brand"), strict=True)
            },
            "rate": rows.rate,
            "redeem": rows.redeem,
            **features.of_request(history, rows.household, None),
            **sends.features(history, rows),
        })  # fmt: skip

    def _table(self, history: History, household: Ints, columns: dict[str, NDArray[np.generic] | pa.Array]) -> pa.Table:
        size = len(household)
        columns |= {
            "user": self.log.households[household],
            "week": np.full(size, history.week, np.int32),
            "history_before": np.full(size, calendar.week_start(history.week)),
        }
        people = self.log.demographics.take(pa.array(household))
        arrays = []
        for field in self.schema:
            if field.name in DEMOGRAPHICS:
                arrays.append(people[field.name])
            elif field.name in columns:
                arrays.append(pa.array(columns[field.name], type=field.type, from_pandas=True))
            else:
                arrays.append(pa.nulls(size, field.type))
        return pa.table(arrays, schema=self.schema)


def in_time_order(*tables: pa.Table) -> pa.Table:
    """The tables' rows by (time, request), rows of a request in their order."""
    filled = [t for t in tables if len(t)]
    if len(filled) < 2:  # each is in order already
        return filled[0] if filled else tables[0]
    table = pa.concat_tables(filled)
    order = np.lexsort((table["request_id"].to_numpy(), table["time"].to_numpy()))
    return table.take(pa.array(order))


class RowWriter:
    """Writes tables as row groups of at most about `ROW_GROUP` rows; a request is never cut."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        text = [f.name for f in schema if not pa.types.is_floating(f.type)]
        self._file = pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, use_dictionary=text)
        self._held = schema.empty_table()

    def write(self, table: pa.Table) -> None:
        """Add rows; whole requests."""
        self._held = pa.concat_tables([self._held, table])
        while len(self._held) > ROW_GROUP:
            request = self._held["request_id"].to_numpy()
            cuts = np.flatnonzero(np.diff(request)) + 1
            at = int(np.searchsorted(cuts, ROW_GROUP, side="right"))
            self._flush(int(cuts[max(at - 1, 0)]) if len(cuts) else len(self._held))

    def _flush(self, rows: int) -> None:
        self._file.write_table(self._held.slice(0, rows), row_group_size=max(rows, 1))
        self._held = self._held.slice(rows)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and len(self._held):
            self._flush(len(self._held))
        self._file.close()
