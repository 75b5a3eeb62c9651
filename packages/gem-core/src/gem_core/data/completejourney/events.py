"""Events, stored once per household in time order: purchases, promoted purchases, campaigns received, redemptions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.data.completejourney import calendar
from gem_core.data.completejourney.log import Ints, Log


def level_values(log: Log, level: str, product: Ints) -> pa.Array:
    """The products' values at a level of the hierarchy; null where unknown."""
    return log.vocabulary[level].take(pa.array(log.levels[level][product]))


def write(log: Log, keep: NDArray[np.bool_], folder: Path) -> dict[str, int]:
    """Write `folder`/<type>.parquet, sorted by (user, time); number of events per type."""
    folder.mkdir()
    tables = {
        "purchase": _purchases(log, keep[log.purchases.household]),
        "promoted_purchase": _purchases(log, keep[log.purchases.household] & log.purchases.deal),
        "campaign": _campaigns(log, keep),
        "redemption": _redemptions(log, keep),
    }
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd", row_group_size=1 << 18)
    return {name: len(table) for name, table in tables.items()}


def _purchases(log: Log, mine: NDArray[np.bool_]) -> pa.Table:
    sales = log.purchases
    rows = np.flatnonzero(mine)
    rows = rows[np.argsort(sales.household[rows], kind="stable")]  # in time order already
    product = sales.product[rows]
    return pa.table({
        "user": log.households[sales.household[rows]],
        "time": sales.time[rows],
        "product": log.products[product],
        **{level: level_values(log, level, product) for level in ("type", "category", "department", "brand")},
        "quantity": sales.quantity[rows].astype(np.float32),
        "value": sales.value[rows].astype(np.float32),
        "store": log.stores[sales.store[rows]],
        "week": sales.week[rows].astype(np.int32),
    })  # fmt: skip


def _campaigns(log: Log, keep: NDArray[np.bool_]) -> pa.Table:
    campaign, household = log.campaigns.sent_campaign, log.campaigns.sent_household
    time = calendar.midnight(log.campaigns.start)[campaign]
    order = np.lexsort((campaign, time, household))
    order = order[keep[household[order]]]
    return pa.table({
        "user": log.households[household[order]],
        "time": time[order],
        "campaign": log.campaigns.ids[campaign[order]],
        "campaign_type": [log.campaigns.kind[c] for c in campaign[order]],
    })  # fmt: skip


def _redemptions(log: Log, keep: NDArray[np.bool_]) -> pa.Table:
    c = log.campaigns
    time = calendar.midnight(c.redeemed_day)
    order = np.lexsort((c.redeemed_upc, time, c.redeemed_household))
    order = order[keep[c.redeemed_household[order]]]
    return pa.table({
        "user": log.households[c.redeemed_household[order]],
        "time": time[order],
        "coupon": c.redeemed_upc[order],
        "campaign": c.ids[c.redeemed_campaign[order]],
        "campaign_type": [c.kind[k] for k in c.redeemed_campaign[order]],
    })  # fmt: skip
