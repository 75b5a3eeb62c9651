"""Every dense feature once more, from its definition and the raw tables, one row at a time."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

LEVELS = ("product", "type", "category", "department", "brand", "manufacturer")
FINE = LEVELS[:3]
COLUMNS = ("product_id", "product_type", "product_category", "department", "brand", "manufacturer_id")
NAN = float("nan")


def over(a: float, b: float) -> float:
    return a / b if b and not np.isnan(b) else NAN


class Naive:
    """The raw tables as arrays, and features recomputed by masks on them."""

    def __init__(self, source: Path) -> None:
        read = {
            t: pq.read_table(source / f"{t}.parquet")
            for t in ("transactions", "products", "promotions", "coupons", "campaign_descriptions")
        }
        sales = {n: c.to_numpy() for n, c in zip(read["transactions"].column_names, read["transactions"], strict=True)}
        self.household, self.store, self.product = (sales[f"{n}_id"] for n in ("household", "store", "product"))
        self.basket, self.week, self.value = sales["basket_id"], sales["week"], sales["sales_value"]
        self.quantity, self.discount = sales["quantity"], sales["retail_disc"]
        self.time = sales["transaction_timestamp"].astype("datetime64[s]").astype(np.int64)
        self.deal = (self.discount > 0) | (sales["coupon_disc"] > 0) | (sales["coupon_match_disc"] > 0)
        self.of = {row["product_id"]: tuple(row[c] for c in COLUMNS) for row in read["products"].to_pylist()}
        self.levels = {
            level: np.array([hash(self.level(p, at)) for p in self.product.tolist()]) for at, level in enumerate(LEVELS)
        }
        self.promotions: dict[tuple[int, int, int], tuple[str, str]] = {}
        names = ("store_id", "week", "product_id", "display_location", "mailer_location")
        for store, week, product, display, mailer in zip(
            *(read["promotions"][n].to_pylist() for n in names), strict=True
        ):  # fmt: skip
            old = self.promotions.get((store, week, product), ("0", "0"))
            self.promotions[store, week, product] = max(display, old[0]), max(mailer, old[1])
        at = zip(self.store.tolist(), self.week.tolist(), self.product.tolist(), strict=True)
        self.promoted = np.array([key in self.promotions for key in at])
        self.visits = sorted(set(zip(self.household.tolist(), self.store.tolist(), self.week.tolist(), strict=True)))
        self.bought = set(
            zip(self.household.tolist(), self.store.tolist(), self.week.tolist(), self.product.tolist(), strict=True)
        )
        self.starts = {
            row["campaign_id"]: row["start_date"].date() for row in read["campaign_descriptions"].to_pylist()
        }
        self.coupons: dict[tuple[int, int], set[int]] = {}
        for row in read["coupons"].to_pylist():
            self.coupons.setdefault((row["campaign_id"], row["coupon_upc"]), set()).add(row["product_id"])

    def level(self, product: int, at: int) -> Any:
        return product if at == 0 else self.of.get(product, (None,) * len(LEVELS))[at]

    def request(self, user: int, store: int | None, week: int) -> dict[str, float]:
        mine = (self.household == user) & (self.week < week)
        count = float(mine.sum())
        first = self.week[mine].min() if count else 0
        age = float(week - first) if count else NAN
        baskets = float(len(set(self.basket[mine].tolist())))
        visits = [s for h, s, w in self.visits if h == user and w < week]
        at_store = float(visits.count(store)) if store is not None else NAN
        recent = mine & (self.week >= week - 4)
        return {
            "household_weeks": age,
            "household_recency": float(week - self.week[mine].max()) if count else NAN,
            "household_count": count,
            "household_count_4w": float(recent.sum()),
            "household_baskets_count": baskets,
            "household_baskets_count_4w": float(len(set(self.basket[recent].tolist()))),
            "household_rate": over(count, age),
            "household_baskets_rate": over(baskets, age),
            "household_active_rate": over(len(set(self.week[mine].tolist())), age),
            "household_basket_size_ratio": over(count, baskets),
            "household_deal_ratio": over(self.deal[mine].sum(), count),
            "household_promoted_ratio": over(self.promoted[mine].sum(), count),
            "household_value_ratio": over(self.value[mine].sum(), count),
            "household_store_visits_count": at_store,
            "household_store_visits_ratio": over(at_store, len(visits)),
        }

    def impression(self, user: int, store: int, week: int, product: int) -> dict[str, float]:
        return {**self._pair(user, week, product), **self._product(store, week, product)}

    def _pair(self, user: int, week: int, product: int) -> dict[str, float]:
        out: dict[str, float] = {}
        mine = (self.household == user) & (self.week < week)
        age = float(week - self.week[mine].min()) if mine.any() else NAN
        totals = {"": float(mine.sum())}
        for at, level in enumerate(LEVELS):
            hit = mine & (self.levels[level] == hash(self.level(product, at)))
            name, total = f"household_{level}", float(hit.sum())
            totals[level] = total
            out[f"{name}_count"] = total
            for window in (4, 8, 26) if level in FINE else (8,):
                out[f"{name}_count_{window}w"] = float((hit & (self.week >= week - window)).sum())
            out[f"{name}_rate"] = over(total, age)
            if level not in FINE:
                continue
            weeks = sorted(set(self.week[hit].tolist()))
            recency = float(week - weeks[-1]) if weeks else NAN
            interval = over(weeks[-1] - weeks[0], len(weeks) - 1) if weeks else NAN
            out[f"{name}_recency"] = recency
            out[f"{name}_interval"] = interval
            out[f"{name}_due_ratio"] = over(recency, interval)
            out[f"{name}_weeks_rate"] = over(len(weeks), age)
            out[f"{name}_since_first_rate"] = over(total, week - weeks[0]) if weeks else NAN
            out[f"{name}_deal_ratio"] = over((hit & self.deal).sum(), total)
            out[f"{name}_promoted_ratio"] = over((hit & self.promoted).sum(), total)
        hit = mine & (self.product == product)
        first = self.week[hit].min() if hit.any() else 99
        later = [(s, w) for h, s, w in self.visits if h == user and first < w < week]
        exposed = [v for v in later if (*v, product) in self.promotions]
        taken = [v for v in exposed if (user, *v, product) in self.bought]
        out["household_product_visit_rate"] = over(len(set(self.week[hit].tolist())) - 1, len(later))
        out["household_product_exposed_count"] = float(len(exposed))
        out["household_product_taken_rate"] = over(len(taken), len(exposed))
        out["household_product_type_ratio"] = over(totals["product"], totals["type"])
        out["household_type_category_ratio"] = over(totals["type"], totals["category"])
        out["household_category_ratio"] = over(totals["category"], totals[""])
        return out

    def _product(self, store: int, week: int, product: int) -> dict[str, float]:
        before = self.week < week
        hit = before & (self.product == product)
        total = float(hit.sum())
        age = float(week - self.week[hit].min()) if total else NAN
        buyers: dict[int, set[int]] = {}
        for household, when in zip(self.household[hit].tolist(), self.week[hit].tolist(), strict=True):
            buyers.setdefault(household, set()).add(when)
        shown, chosen = {"": 0}, {"": 0}
        for household, shop, when in self.visits:
            codes = self.promotions.get((shop, when, product))
            if when >= week or codes is None:
                continue
            for key in ("", f"display {codes[0]}", f"mailer {codes[1]}"):
                shown[key] = shown.get(key, 0) + 1
                chosen[key] = chosen.get(key, 0) + ((household, shop, when, product) in self.bought)
        display, mailer = (
            f"{n} {c}" for n, c in zip(("display", "mailer"), self.promotions[store, week, product], strict=True)
        )
        shelf = hit & (self.store == store)
        kind, category = (
            before & (self.levels[level] == hash(self.level(product, LEVELS.index(level))))
            for level in ("type", "category")
        )
        value, discount = self.value[hit].sum(), self.discount[hit].sum()

        def recent(mask: np.ndarray, window: int) -> float:
            return float((mask & (self.week >= week - window)).sum())

        promoted = hit & self.promoted
        return {
            "product_count": total,
            "product_count_1w": recent(hit, 1),
            "product_count_4w": recent(hit, 4),
            "product_count_13w": recent(hit, 13),
            "product_rate": over(total, age),
            "product_trend_ratio": over(recent(hit, 4), 4 * over(total, age)),
            "product_recency": float(week - self.week[hit].max()) if total else NAN,
            "product_buyers_count": float(len(buyers)),
            "product_buyers_ratio": over(len(buyers), len(set(self.household[before].tolist()))),
            "product_repeat_ratio": over(sum(len(w) > 1 for w in buyers.values()), len(buyers)),
            "product_purchases_per_buyer_ratio": over(total, len(buyers)),
            "product_deal_ratio": over((hit & self.deal).sum(), total),
            "product_promoted_count": float(promoted.sum()),
            "product_promoted_count_4w": recent(promoted, 4),
            "product_promoted_ratio": over(promoted.sum(), total),
            "product_shown_count": float(shown[""]),
            "product_chosen_rate": over(chosen[""], shown[""]),
            "product_display_rate": over(chosen.get(display, 0), shown.get(display, 0)),
            "product_mailer_rate": over(chosen.get(mailer, 0), shown.get(mailer, 0)),
            "product_chosen_ratio": over(chosen[""], total),
            "product_promoted_weeks_count_4w": float(
                sum((store, w, product) in self.promotions for w in range(week - 4, week))
            ),
            "product_store_count": float(shelf.sum()),
            "product_store_count_4w": recent(shelf, 4),
            "product_store_ratio": over(shelf.sum(), (before & (self.store == store)).sum()),
            "product_price_ratio": over(value, self.quantity[hit].sum()),
            "product_discount_ratio": over(discount, value + discount),
            "type_count": float(kind.sum()),
            "type_count_4w": recent(kind, 4),
            "category_count_4w": recent(category, 4),
            "product_of_type_ratio": over(total, kind.sum()),
        }

    def campaign(self, coupon: int, time: int) -> int:
        """The campaign with this coupon that starts on the day of `time`."""
        day = datetime.fromtimestamp(time, UTC).date()
        return next(c for c, upc in self.coupons if upc == coupon and self.starts[c] == day)

    def coupon_products(self, campaign: int, coupon: int, week: int) -> list[int]:
        """The 64 most popular before `week`, most popular first."""
        before = self.product[self.week < week]
        return sorted(self.coupons[campaign, coupon], key=lambda p: (-int((before == p).sum()), p))[:64]

    def send(self, user: int, week: int, campaign: int, coupon: int) -> dict[str, float]:
        products = self.coupon_products(campaign, coupon, week)
        kinds = {hash(self.level(p, 1)) for p in products}
        mine = (self.household == user) & (self.week < week)
        hit = mine & np.isin(self.product, products)
        age = float(week - self.week[mine].min()) if mine.any() else NAN
        return {
            "coupon_products_count": float(len(self.coupons[campaign, coupon])),
            "coupon_count": float(((self.week < week) & np.isin(self.product, products)).sum()),
            "coupon_household_count": float(hit.sum()),
            "coupon_household_types_count": float((mine & np.isin(self.levels["type"], list(kinds))).sum()),
            "coupon_household_recency": float(week - self.week[hit].max()) if hit.any() else NAN,
            "coupon_household_rate": over(hit.sum(), age),
            "coupon_household_ratio": over(hit.sum(), mine.sum()),
        }
