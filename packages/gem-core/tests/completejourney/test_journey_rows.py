"""Labels, negatives, splits, histories and every dense feature against naive recomputation from the raw tables."""

from pathlib import Path

import journey_source
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from journey_naive import Naive

from gem_core.data.completejourney import calendar, prepare
from gem_core.data.completejourney import log as logs
from gem_core.data.completejourney.rows import OBJECTIVES, REQUEST_SPARSE


def rows_of(folder: Path) -> pa.Table:
    return pq.read_table(folder / "rows.parquet")


def in_store(table: pa.Table) -> pa.Table:
    return table.filter(pc.is_valid(table["purchase"]))


def sent(table: pa.Table) -> pa.Table:
    return table.filter(pc.is_null(table["purchase"]))


def check_dense(folder: Path, naive: Naive, sample: int) -> None:
    table = rows_of(folder)
    dense = [n for n in table.column_names if n not in OBJECTIVES and pa.types.is_floating(table.schema.field(n).type)]
    dense.remove("rate")
    rng = np.random.default_rng(0)
    picked = [in_store(table), sent(table)]
    picked = [t.take(pa.array(rng.choice(len(t), min(sample, len(t)), replace=False))) for t in picked]
    for row in pa.concat_tables(picked).to_pylist():
        expected = naive.request(row["user"], row["store"], row["week"])
        if row["store"] is not None:
            expected |= naive.impression(row["user"], row["store"], row["week"], row["product"])
        else:
            expected |= naive.send(row["user"], row["week"], naive.campaign(row["coupon"], row["time"]), row["coupon"])
        assert set(expected) <= set(dense)
        for name in dense:
            found = np.nan if row[name] is None else row[name]
            assert found == pytest.approx(expected.get(name, np.nan), rel=1e-5, nan_ok=True), (name, row)


def test_dense_features_are_what_a_naive_count_of_earlier_weeks_gives(source: Path, prepared: Path) -> None:
    check_dense(prepared, Naive(source), 80)


def test_every_promoted_product_bought_is_a_row_and_negatives_were_promoted(source: Path, prepared: Path) -> None:
    naive, table = Naive(source), in_store(rows_of(prepared))
    keys = list(zip(*(table[c].to_pylist() for c in ("user", "store", "week", "product")), strict=True))
    assert len(set(keys)) == len(keys)
    positive = {key for key, label in zip(keys, table["purchase"].to_pylist(), strict=True) if label}
    assert positive == {key for key in naive.bought if key[1:] in naive.promotions and key[2] >= 9}
    assert not (set(keys) - positive) & naive.bought
    assert 0 < len(keys) - len(positive) <= 4 * len(positive)
    for key, display, mailer, surface in zip(
        keys, *(table[c].to_pylist() for c in ("display", "mailer", "surface")), strict=True
    ):  # fmt: skip
        assert naive.promotions[key[1:]] == (display, mailer)
        assert surface == "+".join(n for n, code in (("display", display), ("mailer", mailer)) if code != "0")


def test_repurchase_is_a_purchase_in_the_next_four_weeks_in_any_store(source: Path, prepared: Path) -> None:
    naive, table = Naive(source), in_store(rows_of(prepared))
    weeks = {(h, p, w) for h, _, w, p in naive.bought}
    for user, product, week, label in zip(
        *(table[c].to_pylist() for c in ("user", "product", "week", "repurchase")), strict=True
    ):  # fmt: skip
        expected = None if week > 49 else any((user, product, w) in weeks for w in range(week + 1, week + 5))
        assert label == expected
    assert 0 < pc.mean(table["repurchase"]).as_py() < 1


def test_rows_of_a_request_share_time_history_and_order_that_tells_nothing(source: Path, prepared: Path) -> None:
    naive, table = Naive(source), rows_of(prepared)
    request = table["request_id"].to_numpy()
    first = np.flatnonzero(np.diff(request, prepend=-1))
    assert len(set(request[first])) == len(first)  # rows of a request are adjacent
    at = np.repeat(first, np.diff(first, append=len(request)))
    same = ("user", "time", "history_before", "split", "week", *REQUEST_SPARSE)
    for name in same + tuple(n for n in table.column_names if n.startswith("household_") and "product" not in n)[:15]:
        column = table[name].combine_chunks()
        assert column.take(pa.array(at)).equals(column), name
    time, before = table["time"].to_numpy(), table["history_before"].to_numpy()
    assert (np.diff(time) >= 0).all() and (before <= time).all()
    assert (before == calendar.week_start(table["week"].to_numpy())).all()
    assert table["row_id"].null_count == 0 and len(pc.unique(table["row_id"])) == len(table)
    shop = in_store(table)
    product, inside = shop["product"].to_numpy(), np.diff(shop["request_id"].to_numpy()) == 0
    assert (np.diff(product)[inside] > 0).all()
    for user, store, week, when in zip(*(shop[c].to_pylist() for c in ("user", "store", "week", "time")), strict=True):
        mine = (naive.household == user) & (naive.store == store) & (naive.week == week)
        assert when == naive.time[mine].min()


def test_splits_are_by_week_and_by_campaign(prepared: Path) -> None:
    table = rows_of(prepared)
    assert set(in_store(table)["week"].to_pylist()) == set(range(9, 54))
    for week, split in zip(*(in_store(table)[c].to_pylist() for c in ("week", "split")), strict=True):
        assert split == ("train" if week <= 42 else "validation" if week <= 46 else "test")
    coupons = sent(table)
    found = set(zip((c // 100 % 100 for c in coupons["coupon"].to_pylist()), coupons["split"].to_pylist(), strict=True))
    assert found == {(1, "train"), (2, "train"), (3, "train"), (4, "validation"), (6, "test"), (7, "test")}


def test_sends_are_the_redeemed_ones_and_a_tenth_of_the_others(source: Path, prepared: Path) -> None:
    table = sent(rows_of(prepared))
    raw = {n: pq.read_table(source / f"{n}.parquet") for n in ("campaigns", "coupon_redemptions")}
    pairs = set(zip(*(raw["campaigns"][c].to_pylist() for c in ("campaign_id", "household_id")), strict=True))
    redeemed = set(
        zip(
            *(raw["coupon_redemptions"][c].to_pylist() for c in ("campaign_id", "household_id", "coupon_upc")),
            strict=True,
        )
    )
    rows = list(
        zip(*(table[c].to_pylist() for c in ("user", "coupon", "redeem", "rate", "surface", "time")), strict=True)
    )
    campaign = [coupon // 100 % 100 for _, coupon, *_ in rows]
    assert {(c, r[0]) for c, r in zip(campaign, rows, strict=True)} <= pairs
    for number, (user, coupon, label, rate, surface, time) in zip(campaign, rows, strict=True):
        hit = (number, user, coupon) in redeemed
        assert label == (None if number == 7 else hit)  # campaign 7 ends after the log
        assert rate == pytest.approx(1 if hit else 0.1)
        kind, start, _ = journey_source.CAMPAIGNS[number]
        assert surface == f"campaign_{kind[-1].lower()}"
        assert np.datetime64(time, "s").astype("datetime64[D]") == np.datetime64(start)
    known = {(n, u, c) for n, (u, c, *_) in zip(campaign, rows, strict=True)}
    assert {r for r in redeemed if r[0] != 5 and (r[0], r[1]) in pairs} <= known
    others = 10 * sum(c != 5 for c, _ in pairs) - len(redeemed)
    assert 0.03 * others < len(known - redeemed) < 0.2 * others


def test_coupon_lists_hold_the_most_popular_products_before_the_campaign(source: Path, prepared: Path) -> None:
    naive = Naive(source)
    for row in sent(rows_of(prepared)).to_pylist():
        products = naive.coupon_products(naive.campaign(row["coupon"], row["time"]), row["coupon"], row["week"])
        for column, level in (("coupon_types", 1), ("coupon_categories", 2), ("coupon_brands", 4)):
            assert row[column] == [naive.level(p, level) for p in products]


def test_nothing_but_labels_depends_on_the_impressions_week_or_later(
    source: Path, prepared: Path, tmp_path: Path
) -> None:
    """Later weeks are gone; in the week itself every purchase is tenfold and discounted, and more is bought."""
    week = 30
    content = {t: pq.read_table(logs.path(source, t)) for t in logs.TABLES}
    sales = content["transactions"]
    now = sales.filter(pc.equal(sales["week"], week))
    extra = now.set_column(3, "product_id", pa.array(np.full(len(now), 1000 + 7 * 59)))  # the undescribed product
    for name in ("quantity", "sales_value", "retail_disc"):
        place = sales.column_names.index(name)
        changed = pc.cast(pc.add(pc.multiply(now[name], 10), 1), sales.schema.field(name).type)
        now, extra = (t.set_column(place, name, changed) for t in (now, extra))
    content["transactions"] = pa.concat_tables([sales.filter(pc.less(sales["week"], week)), now, extra])
    changed_source = journey_source.write(tmp_path / "changed", content)
    before, after = (in_store(rows_of(f)) for f in (prepared, prepare(tmp_path / "cache", source=changed_source)))
    before, after = (t.filter(pc.less_equal(t["week"], week)).drop(["repurchase"]) for t in (before, after))
    key = ["user", "store", "week", "product"]
    ids = [set(zip(*(t[c].to_pylist() for c in key), strict=True)) for t in (before, after)]
    shared = ids[0] & ids[1]
    assert len(shared) > 0.95 * len(ids[0]) and max(ids[0] ^ ids[1], default=(0, 0, week))[2] <= week
    both = []
    for table in (before, after):
        mine = [k in shared for k in zip(*(table[c].to_pylist() for c in key), strict=True)]
        both.append(
            table.filter(pa.array(mine)).drop(["row_id", "request_id"]).sort_by([(k, "ascending") for k in key])
        )
    assert any(k[2] == week for k in shared)
    assert both[0].equals(both[1])
