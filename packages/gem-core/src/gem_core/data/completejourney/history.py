"""What is known at the start of a week, from purchases and promotions of strictly earlier weeks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gem_core.data.completejourney.log import HIERARCHY, Ints, Log
from gem_core.data.completejourney.promotions import DISPLAY, MAILER, NONE, Promotions
from gem_core.data.completejourney.tally import Counts, Pairs, Tally, ranges

LEVELS = ("product", *HIERARCHY)
FINE = ("product", "type", "category")  # levels with recency, intervals and all windows
WINDOWS = (4, 8, 26)
Floats = NDArray[np.float64]


class History:
    """State before `week`; `absorb` moves it one week on. Counts are of purchases (transaction rows) unless said."""

    def __init__(self, log: Log, first_week: int = 1) -> None:
        self.log = log
        self.week = first_week
        sales, households, products = log.purchases, len(log.households), len(log.products)
        self.codes: dict[str, Ints] = {"product": np.arange(products), **log.levels}
        self.sizes = {"product": products, **{level: len(log.vocabulary[level]) for level in HIERARCHY}}
        self.pairs = {
            level: Pairs(sales.household, self.codes[level][sales.product], self.sizes[level]) for level in LEVELS
        }
        self.bought = {level: Tally(len(self.pairs[level]), WINDOWS if level in FINE else (8,)) for level in LEVELS}
        self.deals: dict[str, Counts] = {level: _zeros(self.pairs[level]) for level in FINE}
        self.promoted: dict[str, Counts] = {level: _zeros(self.pairs[level]) for level in FINE}

        # Per (household, product): visits after the first purchase, those with the product promoted, and bought then.
        self.visits_before: Counts = _zeros(self.pairs["product"])
        self.exposed: Counts = _zeros(self.pairs["product"])
        self.taken: Counts = _zeros(self.pairs["product"])

        self.purchases = Tally(households, (4,))
        self.baskets = Tally(households, (4,))
        self.visits = Tally(households)  # (household, store) pairs per week
        self.store_pairs = Pairs(sales.household, sales.store, len(log.stores))
        self.store_visits = Tally(len(self.store_pairs))
        self.household_deals: Counts = np.zeros(households, np.int32)
        self.household_promoted: Counts = np.zeros(households, np.int32)
        self.household_value: Floats = np.zeros(households)

        self.sold = Tally(products, (1, 4, 13))
        self.sold_of = {level: Tally(self.sizes[level], (4,)) for level in ("type", "category")}
        self.sold_deals: Counts = np.zeros(products, np.int32)
        self.sold_promoted = Tally(products, (4,))
        self.sold_quantity: Floats = np.zeros(products)
        self.sold_value: Floats = np.zeros(products)
        self.sold_discount: Floats = np.zeros(products)
        self.buyers: Counts = np.zeros(products, np.int32)
        self.repeaters: Counts = np.zeros(products, np.int32)  # buyers in two weeks or more
        self.shelf_pairs = Pairs(sales.store, sales.product, products)
        self.shelf = Tally(len(self.shelf_pairs), (4,))
        self.store_sold: Counts = np.zeros(len(log.stores), np.int32)

        # Visits to a store while it promoted the product, and the visits that bought it, in all and by code.
        self.shown: Counts = np.zeros(products, np.int32)
        self.chosen: Counts = np.zeros(products, np.int32)
        self.shown_display, self.chosen_display = (np.zeros((products, len(DISPLAY)), np.int32) for _ in range(2))
        self.shown_mailer, self.chosen_mailer = (np.zeros((products, len(MAILER)), np.int32) for _ in range(2))
        self.past_promotions: list[NDArray[np.bool_]] = []  # (stores, products) of the last 4 weeks

    def skip(self) -> None:
        """Move over a week before the log."""
        self.week += 1

    def absorb(self, promotions: Promotions) -> None:
        """Take in the purchases and promotions of `week`."""
        log, week, rows = self.log, self.week, self.log.purchases.of_week(self.week)
        sales = log.purchases
        household, store, product = sales.household[rows], sales.store[rows], sales.product[rows]
        deal = sales.deal[rows]
        promoted = promotions.table[store, product] != NONE
        visits = np.unique(household * len(log.stores) + store)
        visit_household, visit_store = visits // len(log.stores), visits % len(log.stores)
        chosen = np.unique((household * len(log.stores) + store)[promoted] * len(log.products) + product[promoted])

        self._absorb_exposure(promotions, visit_household, visit_store, chosen)
        self.visits.add(week, visit_household)
        self._absorb_pairs(rows, deal, promoted)
        self.purchases.add(week, household)
        self.baskets.add(week, _baskets(household, sales.basket[rows]))
        self.store_visits.add(week, self.store_pairs.find(visit_household, visit_store))
        np.add.at(self.household_deals, household[deal], 1)
        np.add.at(self.household_promoted, household[promoted], 1)
        np.add.at(self.household_value, household, sales.value[rows])

        self.sold.add(week, product)
        for level, tally in self.sold_of.items():
            tally.add(week, self.codes[level][product])
        np.add.at(self.sold_deals, product[deal], 1)
        self.sold_promoted.add(week, product[promoted])
        np.add.at(self.sold_quantity, product, sales.quantity[rows])
        np.add.at(self.sold_value, product, sales.value[rows])
        np.add.at(self.sold_discount, product, sales.discount[rows])
        self.shelf.add(week, self.shelf_pairs.slots[rows])
        np.add.at(self.store_sold, store, 1)
        self._absorb_response(promotions, visit_store, chosen)
        self.past_promotions = [promotions.table != NONE, *self.past_promotions[:3]]
        self.week += 1

    def _absorb_pairs(self, rows: slice, deal: NDArray[np.bool_], promoted: NDArray[np.bool_]) -> None:
        for level in LEVELS:
            slots, tally = self.pairs[level].slots[rows], self.bought[level]
            seen, _ = tally.add(self.week, slots)
            if level in FINE:
                np.add.at(self.deals[level], slots[deal], 1)
                np.add.at(self.promoted[level], slots[promoted], 1)
            if level == "product":
                household, product = np.divmod(self.pairs["product"].keys[seen], len(self.log.products))
                new, again = tally.weeks[seen] == 1, tally.weeks[seen] == 2
                self.visits_before[seen[new]] = self.visits.total[household[new]]
                np.add.at(self.buyers, product[new], 1)
                np.add.at(self.repeaters, product[again], 1)

    def _absorb_exposure(self, promotions: Promotions, household: Ints, store: Ints, chosen: Ints) -> None:
        start, count = self.pairs["product"].span(household)
        slots = ranges(start, count)
        visit = np.repeat(np.arange(len(household)), count)
        known = self.bought["product"].total[slots] > 0
        slots, visit = slots[known], visit[known]
        product = self.pairs["product"].keys[slots] % len(self.log.products)
        met = promotions.table[store[visit], product] != NONE
        slots, visit, product = slots[met], visit[met], product[met]
        np.add.at(self.exposed, slots, 1)
        key = (household[visit] * len(self.log.stores) + store[visit]) * len(self.log.products) + product
        np.add.at(self.taken, slots[np.isin(key, chosen)], 1)

    def _absorb_response(self, promotions: Promotions, visit_store: Ints, chosen: Ints) -> None:
        visitors = np.bincount(visit_store, minlength=len(self.log.stores)).astype(np.int32)[promotions.store]
        display, mailer = np.divmod(promotions.code.astype(np.int64), len(MAILER))
        _add(self.shown, promotions.product, visitors)
        _add(self.shown_display, promotions.product * len(DISPLAY) + display, visitors)
        _add(self.shown_mailer, promotions.product * len(MAILER) + mailer, visitors)
        visit, product = np.divmod(chosen, len(self.log.products))
        code = promotions.table[visit % len(self.log.stores), product]
        display, mailer = np.divmod(code.astype(np.int64), len(MAILER))
        _add(self.chosen, product)
        _add(self.chosen_display, product * len(DISPLAY) + display)
        _add(self.chosen_mailer, product * len(MAILER) + mailer)


def _add(counts: Counts, at: Ints, numbers: Counts | None = None) -> None:
    """Add `numbers` (or ones) at flat positions, which may repeat."""
    added = np.bincount(at, weights=numbers, minlength=counts.size)
    counts += added.reshape(counts.shape).astype(np.int32)


def _zeros(pairs: Pairs) -> Counts:
    return np.zeros(len(pairs) + 1, np.int32)


def _baskets(household: Ints, basket: Ints) -> Ints:
    """The household of each distinct basket."""
    return household[np.unique(basket, return_index=True)[1]]
