"""The promotions, streamed week by week: what a store showed and mailed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.data.completejourney import log as logs
from gem_core.data.completejourney.log import Ints, Log
from gem_core.errors import DataError

DISPLAY = "0123456789A"  # 0: not on display
MAILER = "0ACDFHJLPXZ"  # 0: not in the mailer
NONE = 255


@dataclass(frozen=True)
class Promotions:
    """Of one week, ordered by (store, product), each pair once: `code` = display * len(MAILER) + mailer.

    `table` (stores, products) holds the code, NONE where the product is not promoted.
    """

    store: Ints
    product: Ints
    code: NDArray[np.uint8]
    table: NDArray[np.uint8]


def _codes(column: pa.DictionaryArray, letters: str, what: str) -> Ints:
    codes = pc.index_in(column.dictionary, value_set=pa.array(list(letters)))
    if codes.null_count or column.null_count:
        bad = column.dictionary.filter(codes.is_null())[0].as_py() if codes.null_count else None
        raise DataError(f"Complete Journey: promotions: {what} {bad!r} is unknown; expected one of {letters}")
    found: Ints = codes.to_numpy().astype(np.int64)[column.indices.to_numpy()]
    return found


def _week(log: Log, store: Ints, product: Ints, display: Ints, mailer: Ints) -> Promotions:
    key = store * len(log.products) + product
    order = np.argsort(key, kind="stable")
    start = np.flatnonzero(np.diff(key[order], prepend=-1))
    unique = key[order[start]]
    # A few pairs are listed twice, with and without a display: each keeps its highest codes.
    highest = (np.maximum.reduceat(c[order], start) if len(start) else c for c in (display, mailer))
    code = (next(highest) * len(MAILER) + next(highest)).astype(np.uint8)
    table = np.full((len(log.stores), len(log.products)), NONE, np.uint8)
    table.reshape(-1)[unique] = code
    return Promotions(unique // len(log.products), unique % len(log.products), code, table)


def weeks(source: Path, log: Log, last: int) -> Iterator[tuple[int, Promotions]]:
    """(week, its promotions) for every week from 1 to `last`; memory holds one week at a time."""
    file = pq.ParquetFile(logs.path(source, "promotions"), read_dictionary=["display_location", "mailer_location"])
    held: list[tuple[Ints, ...]] = []
    week = 1

    def flush() -> tuple[int, Promotions]:
        columns = [np.concatenate(c) for c in zip(*held, strict=True)] if held else [np.zeros(0, np.int64)] * 4
        return week, _week(log, *columns)

    for batch in file.iter_batches(1 << 18):
        number = np.asarray(batch["week"].to_numpy())
        if len(number) and (number[0] < week or (np.diff(number) < 0).any()):
            raise DataError("Complete Journey: promotions are not ordered by week")
        store_id, product_id = (np.asarray(batch[c].to_numpy()) for c in ("store_id", "product_id"))
        store = np.minimum(np.searchsorted(log.stores, store_id), len(log.stores) - 1)
        product = np.minimum(np.searchsorted(log.products, product_id), len(log.products) - 1)
        # A store or product that nobody ever bought from can give no impression.
        known = (log.stores[store] == store_id) & (log.products[product] == product_id)
        display = _codes(batch["display_location"], DISPLAY, "display_location")
        mailer = _codes(batch["mailer_location"], MAILER, "mailer_location")
        while len(number):
            stop = int(np.searchsorted(number, week, side="right"))
            keep = known[:stop]
            held.append(tuple(c[:stop][keep] for c in (store, product, display, mailer)))
            if stop == len(number):
                break
            yield flush()
            held, week = [], week + 1
            number, known = number[stop:], known[stop:]
            store, product, display, mailer = store[stop:], product[stop:], display[stop:], mailer[stop:]
    while week <= last:
        yield flush()
        held, week = [], week + 1
