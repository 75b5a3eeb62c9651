"""The practitioner's features: counts, recency, ratios and per-week rates, all from strictly earlier weeks.

They are given to every model alike. Undefined ones (a ratio over nothing, the age of what never happened) are NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gem_core.data.completejourney.history import FINE, LEVELS, WINDOWS, History
from gem_core.data.completejourney.impressions import Impressions
from gem_core.data.completejourney.log import Ints
from gem_core.data.completejourney.promotions import MAILER

Columns = dict[str, NDArray[np.float32]]


def ratio(a: NDArray[np.generic] | float, b: NDArray[np.generic]) -> NDArray[np.float64]:
    """a / b, NaN where b is 0."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    out: NDArray[np.float64] = np.divide(a, b, out=np.full(b.shape, np.nan), where=b != 0)
    return out


def _since(week: int, then: NDArray[np.int32], seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.where(seen, week - then.astype(np.float64), np.nan)


def _float32(columns: dict[str, NDArray[np.generic]]) -> Columns:
    return {name: values.astype(np.float32) for name, values in columns.items()}


def of_request(history: History, household: Ints, store: Ints | None) -> Columns:
    """Activity of the household; same for all rows of a request. `store` is None for a campaign."""
    week, purchases, baskets, visits = history.week, history.purchases, history.baskets, history.visits
    age = _since(week, purchases.first[household], purchases.total[household] > 0)
    count = purchases.total[household]
    at_store = np.full(len(household), np.nan)
    if store is not None:
        at_store = history.store_visits.total[history.store_pairs.find(household, store)].astype(np.float64)
    return _float32({
        "household_weeks": age,
        "household_recency": _since(week, purchases.last[household], count > 0),
        "household_count": count,
        "household_count_4w": purchases.recent[4][household],
        "household_baskets_count": baskets.total[household],
        "household_baskets_count_4w": baskets.recent[4][household],
        "household_rate": ratio(count, age),
        "household_baskets_rate": ratio(baskets.total[household], age),
        "household_active_rate": ratio(purchases.weeks[household], age),
        "household_basket_size_ratio": ratio(count, baskets.total[household]),
        "household_deal_ratio": ratio(history.household_deals[household], count),
        "household_promoted_ratio": ratio(history.household_promoted[household], count),
        "household_value_ratio": ratio(history.household_value[household], count),
        "household_store_visits_count": at_store,
        "household_store_visits_ratio": ratio(at_store, visits.total[household]),
    })  # fmt: skip


def of_impression(history: History, rows: Impressions) -> Columns:
    """Household x product hierarchy, and the product itself."""
    return _float32({**_pairs(history, rows), **_product(history, rows)})


def _pairs(history: History, rows: Impressions) -> dict[str, NDArray[np.generic]]:
    week, out = history.week, dict[str, NDArray[np.generic]]()
    known = history.purchases.total[rows.household] > 0
    age = _since(week, history.purchases.first[rows.household], known)
    slots = {lvl: history.pairs[lvl].find(rows.household, history.codes[lvl][rows.product]) for lvl in LEVELS}
    total = {level: history.bought[level].total[slots[level]] for level in LEVELS}
    for level in LEVELS:
        at, tally, name = slots[level], history.bought[level], f"household_{level}"
        out[f"{name}_count"] = total[level]
        for window in WINDOWS if level in FINE else (8,):
            out[f"{name}_count_{window}w"] = tally.recent[window][at]
        out[f"{name}_rate"] = ratio(total[level], age)
        if level not in FINE:
            continue
        seen = total[level] > 0
        recency = _since(week, tally.last[at], seen)
        interval = ratio(tally.last[at] - tally.first[at], np.maximum(tally.weeks[at] - 1, 0))
        out[f"{name}_recency"] = recency
        out[f"{name}_interval"] = interval
        out[f"{name}_due_ratio"] = ratio(recency, np.nan_to_num(interval))
        out[f"{name}_weeks_rate"] = ratio(tally.weeks[at], age)
        out[f"{name}_since_first_rate"] = ratio(total[level], np.nan_to_num(_since(week, tally.first[at], seen)))
        out[f"{name}_deal_ratio"] = ratio(history.deals[level][at], total[level])
        out[f"{name}_promoted_ratio"] = ratio(history.promoted[level][at], total[level])
    at = slots["product"]
    after = np.where(total["product"] > 0, history.visits.total[rows.household] - history.visits_before[at], 0)
    out["household_product_visit_rate"] = ratio(history.bought["product"].weeks[at] - 1, after)
    out["household_product_exposed_count"] = history.exposed[at]
    out["household_product_taken_rate"] = ratio(history.taken[at], history.exposed[at])
    out["household_product_type_ratio"] = ratio(total["product"], total["type"])
    out["household_type_category_ratio"] = ratio(total["type"], total["category"])
    out["household_category_ratio"] = ratio(total["category"], history.purchases.total[rows.household])
    return out


def _product(history: History, rows: Impressions) -> dict[str, NDArray[np.generic]]:
    week, product, sold = history.week, rows.product, history.sold
    total = sold.total[product]
    age = _since(week, sold.first[product], total > 0)
    households = np.array(np.count_nonzero(history.purchases.total))
    display, mailer = np.divmod(rows.code.astype(np.int64), len(MAILER))
    shelf = history.shelf_pairs.find(rows.store, product)
    kind, category = history.codes["type"][product], history.codes["category"][product]
    shown, chosen = history.shown[product], history.chosen[product]
    value, discount = history.sold_value[product], history.sold_discount[product]
    weeks_promoted = np.zeros(len(product), np.int32)
    for past in history.past_promotions:
        weeks_promoted += past[rows.store, product]
    rate = ratio(total, age)
    return {
        "product_count": total,
        "product_count_1w": sold.recent[1][product],
        "product_count_4w": sold.recent[4][product],
        "product_count_13w": sold.recent[13][product],
        "product_rate": rate,
        "product_trend_ratio": ratio(sold.recent[4][product], 4 * np.nan_to_num(rate)),
        "product_recency": _since(week, sold.last[product], total > 0),
        "product_buyers_count": history.buyers[product],
        "product_buyers_ratio": ratio(history.buyers[product], households),
        "product_repeat_ratio": ratio(history.repeaters[product], history.buyers[product]),
        "product_purchases_per_buyer_ratio": ratio(total, history.buyers[product]),
        "product_deal_ratio": ratio(history.sold_deals[product], total),
        "product_promoted_count": history.sold_promoted.total[product],
        "product_promoted_count_4w": history.sold_promoted.recent[4][product],
        "product_promoted_ratio": ratio(history.sold_promoted.total[product], total),
        "product_shown_count": shown,
        "product_chosen_rate": ratio(chosen, shown),
        "product_display_rate": ratio(
            history.chosen_display[product, display], history.shown_display[product, display]
        ),
        "product_mailer_rate": ratio(history.chosen_mailer[product, mailer], history.shown_mailer[product, mailer]),
        "product_chosen_ratio": ratio(chosen, total),
        "product_promoted_weeks_count_4w": weeks_promoted,
        "product_store_count": history.shelf.total[shelf],
        "product_store_count_4w": history.shelf.recent[4][shelf],
        "product_store_ratio": ratio(history.shelf.total[shelf], history.store_sold[rows.store]),
        "product_price_ratio": ratio(value, history.sold_quantity[product]),
        "product_discount_ratio": ratio(discount, value + discount),
        "type_count": history.sold_of["type"].total[kind],
        "type_count_4w": history.sold_of["type"].recent[4][kind],
        "category_count_4w": history.sold_of["category"].recent[4][category],
        "product_of_type_ratio": ratio(total, history.sold_of["type"].total[kind]),
    }  # fmt: skip
