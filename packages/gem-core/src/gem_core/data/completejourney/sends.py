"""Targeted sends: household x campaign x coupon, and what is known of the coupon when the campaign starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_core.data.completejourney import calendar
from gem_core.data.completejourney.features import Columns, ratio
from gem_core.data.completejourney.history import History
from gem_core.data.completejourney.impressions import uniform
from gem_core.data.completejourney.log import Ints, Log
from gem_core.data.completejourney.tally import ranges

COUPON_PRODUCTS = 64  # a coupon covers up to 14,477: its most popular in earlier weeks are kept
REDEEM_RATE = 0.1  # of the sends that were not redeemed, this share is kept


@dataclass(frozen=True)
class Coupons:
    """Coupons of campaigns, ordered by (campaign, upc), with their most popular products, most popular first."""

    campaign: Ints
    upc: Ints
    covered: Ints  # number of products that the coupon covers
    offsets: Ints
    product: Ints


@dataclass(frozen=True)
class Sends:
    """Ordered by (time, campaign, household, coupon). `coupon` indexes `coupons`."""

    coupons: Coupons
    household: Ints
    coupon: Ints
    time: Ints
    redeem: NDArray[np.float32]  # NaN: the campaign ends after the log
    rate: NDArray[np.float32]
    population: int  # sends before down-sampling
    redeemed: int

    def __len__(self) -> int:
        return len(self.household)

    @property
    def campaign(self) -> Ints:
        """Index of each send's campaign."""
        return self.coupons.campaign[self.coupon]


def start_weeks(log: Log) -> Ints:
    """Week in which each campaign starts."""
    return calendar.week_of(log.campaigns.start)


def split(log: Log) -> list[str | None]:
    """Split of each campaign: ended by week 42 train, started in week 43 or later test; those that run across are
    validation if they ended by week 46, else (None) left out: neither side could hold them without a leak."""
    starts, ends = start_weeks(log), calendar.week_of(log.campaigns.end)
    return [
        "train" if end <= 42 else "test" if start >= 43 else "validation" if end <= 46 else None
        for start, end in zip(starts, ends, strict=True)
    ]


def popular(history: History, campaigns: Ints) -> Coupons:
    """The coupons of `campaigns`, their products by purchases in earlier weeks."""
    log = history.log.campaigns
    mine = np.isin(log.coupon_campaign, campaigns)
    campaign, upc, product = log.coupon_campaign[mine], log.coupon_upc[mine], log.coupon_product[mine]
    order = np.lexsort((product, -history.sold.total[product], upc, campaign))
    campaign, upc, product = campaign[order], upc[order], product[order]
    first = _changes(campaign, upc, product)  # some products are listed twice
    campaign, upc, product = campaign[first], upc[first], product[first]
    start = _changes(campaign, upc)
    covered = np.diff(start, append=len(upc))
    kept = np.minimum(covered, COUPON_PRODUCTS)
    offsets = np.concatenate([[0], np.cumsum(kept)])
    return Coupons(campaign[start], upc[start], covered, offsets, product[ranges(start, kept)])


def _changes(*columns: Ints) -> Ints:
    """Positions whose values differ from those before."""
    new = np.any([np.diff(c, prepend=-1) != 0 for c in columns], axis=0)
    return np.flatnonzero(new)


def draw(history: History, keep: NDArray[np.bool_], seed: int) -> Sends:
    """The sends of campaigns that start in the history's week, to the households in `keep`; negatives down-sampled."""
    log, campaigns = history.log, history.log.campaigns
    splits = split(log)
    started = np.array([c for c, w in enumerate(start_weeks(log)) if w == history.week and splits[c]], np.int64)
    started = started[np.lexsort((started, campaigns.start[started]))]
    coupons = popular(history, started)
    parts: list[tuple[Ints, Ints]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for campaign in started:
        sent = np.unique(campaigns.sent_household[campaigns.sent_campaign == campaign])
        sent = sent[keep[sent]]
        offered = np.flatnonzero(coupons.campaign == campaign)
        parts.append((np.repeat(sent, len(offered)), np.tile(offered, len(sent))))
    household, coupon = (np.concatenate(c) for c in zip(*parts, strict=True))
    campaign, upc = coupons.campaign[coupon], coupons.upc[coupon]
    redeemed = _redeemed(log, household, campaign, upc)
    kept = redeemed | (uniform(seed, campaigns.ids[campaign], log.households[household], upc) < REDEEM_RATE)
    masked = calendar.week_of(campaigns.end)[campaign] > calendar.LAST_WEEK
    return Sends(
        coupons=coupons,
        household=household[kept],
        coupon=coupon[kept],
        time=calendar.midnight(campaigns.start)[campaign[kept]],
        redeem=np.where(masked, np.nan, redeemed).astype(np.float32)[kept],
        rate=np.where(redeemed, 1, REDEEM_RATE).astype(np.float32)[kept],
        population=len(household),
        redeemed=int(redeemed.sum()),
    )


def _redeemed(log: Log, household: Ints, campaign: Ints, upc: Ints) -> NDArray[np.bool_]:
    upcs = np.unique(log.campaigns.coupon_upc)
    width = len(upcs) + 1

    def key(household: Ints, campaign: Ints, upc: Ints) -> Ints:
        at = np.searchsorted(upcs, upc)
        at = np.where(upcs[np.minimum(at, len(upcs) - 1)] == upc, at, len(upcs)) if len(upcs) else at
        return (household * len(log.campaigns.ids) + campaign) * width + at

    c = log.campaigns
    return np.isin(key(household, campaign, upc), key(c.redeemed_household, c.redeemed_campaign, c.redeemed_upc))


def features(history: History, rows: Sends) -> Columns:
    """The coupon, and the household's purchases of its products and of their types, before the campaign's week."""
    coupons, bought = rows.coupons, history.bought["product"]
    start, count = coupons.offsets[:-1][rows.coupon], np.diff(coupons.offsets)[rows.coupon]
    product = coupons.product[ranges(start, count)]
    row = np.repeat(np.arange(len(rows)), count)
    slots = history.pairs["product"].find(rows.household[row], product)

    kinds = len(history.log.vocabulary["type"])
    row_kind = np.unique(row * kinds + history.codes["type"][product])
    of_kind, kind = np.divmod(row_kind, kinds)
    kind_slots = history.pairs["type"].find(rows.household[of_kind], kind)

    seen = bought.total[slots] > 0
    last = np.full(len(rows), -np.inf)
    np.maximum.at(last, row[seen], bought.last[slots[seen]].astype(np.float64))
    products, types = (
        np.bincount(at, weights=values, minlength=len(rows))
        for at, values in (
            (row, bought.total[slots].astype(np.float64)),
            (of_kind, history.bought["type"].total[kind_slots].astype(np.float64)),
        )
    )
    total = history.purchases.total[rows.household]
    age = np.where(total > 0, history.week - history.purchases.first[rows.household], 0)
    columns = {
        "coupon_products_count": coupons.covered[rows.coupon],
        "coupon_count": np.bincount(row, weights=history.sold.total[product], minlength=len(rows)),
        "coupon_household_count": products,
        "coupon_household_types_count": types,
        "coupon_household_recency": np.where(np.isfinite(last), history.week - last, np.nan),
        "coupon_household_rate": ratio(products, age),
        "coupon_household_ratio": ratio(products, total),
    }
    return {name: values.astype(np.float32) for name, values in columns.items()}
