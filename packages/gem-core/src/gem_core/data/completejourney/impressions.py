"""In-store impressions: promoted products that a visit bought, and popular promoted ones that it did not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_core.data.completejourney.calendar import LAST_WEEK
from gem_core.data.completejourney.log import Ints, Log
from gem_core.data.completejourney.promotions import NONE, Promotions

REPURCHASE_WEEKS = 4  # 28 days after the impression's week
FIRST_IMPRESSIONS = 9  # the weeks before only fill histories


@dataclass(frozen=True)
class Impressions:
    """Of one week, ordered by (request time, household, store, product): nothing in the order tells the label."""

    household: Ints
    store: Ints
    product: Ints
    time: Ints
    code: NDArray[np.uint8]
    purchase: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.household)


def uniform(seed: int, *keys: Ints) -> NDArray[np.float64]:
    """A number in [0, 1) that depends on `seed` and the keys alone: draws do not depend on what else is drawn."""
    state = np.full(np.broadcast_shapes(*(k.shape for k in keys)), np.uint64(seed % 2**64))
    for key in keys:
        state = _mix(state ^ _mix(key.astype(np.uint64)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(
    log: Log, week: int, promotions: Promotions, popularity: NDArray[np.int32], keep: NDArray[np.bool_], *,
    negatives: int, seed: int,
) -> Impressions:  # fmt: skip
    """Impressions of `week`'s visits by the households in `keep` (households,) bool.

    Per promoted product bought, `negatives` products that the store promoted that week are drawn with probability
    proportional to 1 + `popularity` (products,), their purchases in earlier weeks; what this request bought, and what
    it drew twice, is dropped.
    """
    rows = log.purchases.of_week(week)
    mine = keep[log.purchases.household[rows]]
    household, store, product, time = (
        c[rows][mine] for c in (log.purchases.household, log.purchases.store, log.purchases.product, log.purchases.time)
    )
    stores, products = len(log.stores), len(log.products)
    visit_of = household * stores + store
    visits, first = np.unique(visit_of, return_index=True)  # purchases are in time order: first is the first basket
    visit_time = time[first]
    bought = np.unique(visit_of * products + product)
    offered = promotions.table[bought // products % stores, bought % products] != NONE
    positive = bought[offered]

    many = np.repeat(positive // products, negatives)
    cumulative = np.concatenate([[0], np.cumsum(popularity[promotions.product].astype(np.int64) + 1)])
    span = np.searchsorted(promotions.store, np.arange(stores + 1))
    low, high = cumulative[span[:-1]], cumulative[span[1:]]
    number = uniform(
        seed, np.full(len(many), week), log.households[many // stores], log.stores[many % stores],
        np.arange(len(many)) - np.searchsorted(many, many),
    )  # fmt: skip
    target = low[many % stores] + number * (high - low)[many % stores]
    drawn = promotions.product[np.searchsorted(cumulative, target, side="right") - 1]
    negative = np.setdiff1d(many * products + drawn, bought)

    key = np.concatenate([positive, negative])
    label = np.arange(len(key)) < len(positive)
    visit, item = np.divmod(key, products)
    when = visit_time[np.searchsorted(visits, visit)]
    order = np.lexsort((key, when))
    visit, item = visit[order], item[order]
    return Impressions(
        household=visit // stores,
        store=visit % stores,
        product=item,
        time=when[order],
        code=promotions.table[visit % stores, item],
        purchase=label[order],
    )


class Repurchases:
    """Whether a household buys a product, in any store, in the four weeks after a week."""

    def __init__(self, log: Log) -> None:
        self._products = len(log.products)
        self._keys = np.sort(self._key(log.purchases.household, log.purchases.product, log.purchases.week))

    def _key(self, household: Ints, product: Ints, week: Ints) -> Ints:
        return (household * self._products + product) * 64 + week

    def label(self, rows: Impressions, week: int) -> NDArray[np.float32]:
        """0 or 1; NaN (masked) where the four weeks pass the end of the log."""
        if week + REPURCHASE_WEEKS > LAST_WEEK:
            return np.full(len(rows), np.nan, np.float32)
        bounds = [self._key(rows.household, rows.product, np.array(w)) for w in (week + 1, week + REPURCHASE_WEEKS + 1)]
        start, stop = (np.searchsorted(self._keys, b) for b in bounds)
        return (stop > start).astype(np.float32)
