"""The Complete Journey reader: prepared once, read by the schema that it brings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gem_core.data.completejourney import CompleteJourneyReader
from gem_core.data.completejourney.reader import SCHEMA, cache_folder
from gem_core.errors import ConfigError
from gem_core.schema import Schema


@pytest.fixture(scope="module")
def reader(source: Path, prepared: Path) -> CompleteJourneyReader:
    config = CompleteJourneyReader.Config(cache=str(prepared.parent), source=str(source), max_length={"purchase": 7})
    return CompleteJourneyReader(config, seed=3)


def test_it_reads_what_was_prepared(reader: CompleteJourneyReader, prepared: Path) -> None:
    assert reader.folder == prepared, "nothing is prepared twice"
    rows = pq.read_table(prepared / "rows.parquet", columns=["row_id", "split", "purchase", "repurchase", "redeem"])
    labelled = rows.filter(
        np.isfinite(np.stack([rows[o].to_numpy() for o in ("purchase", "repurchase", "redeem")])).any(0)
    )
    assert reader.splits() == ["train", "validation", "test"]
    for split in reader.splits():
        expected = labelled.filter(np.array(labelled["split"].to_pylist()) == split)["row_id"].to_pylist()
        ids = [i for batch in reader.iterate(split, batch_rows=64) for i in batch.row_id.tolist()]
        assert sorted(ids) == sorted(expected)


def test_every_column_has_its_place(reader: CompleteJourneyReader, prepared: Path) -> None:
    schema, columns = reader.schema, set(pq.read_schema(prepared / "rows.parquet").names)
    used = {*schema.dense, *schema.sparse, *schema.objectives, "user", "time", "request_id", "row_id"}
    assert used | {"history_before", "surface", "rate", "split", "week"} == columns
    fitted = schema.require_fitted()
    assert set(fitted.dense) == {*schema.dense, *(f"{e}.{n}" for e in BOUGHT for n in ("quantity", "value"))}
    batch = next(reader.iterate("train"))
    assert batch.dense.shape[1] + batch.request_dense.shape[1] == len(schema.dense)
    assert schema.tables()["product"] == ["product", "purchase.product", "promoted_purchase.product"]
    assert schema.tables()["type"][:2] == ["type", "coupon_types"]


BOUGHT = ("purchase", "promoted_purchase")


def test_histories_are_of_earlier_weeks_and_as_long_as_asked(reader: CompleteJourneyReader) -> None:
    for batch in reader.iterate("test", batch_rows=100):
        for event, limit in (("purchase", 7), ("promoted_purchase", 256), ("campaign", 32)):
            time = batch.events[event]["time"]
            assert time.max_length == limit and time.lengths().max() <= limit
            owner = np.repeat(np.arange(batch.requests), time.lengths().numpy())
            assert (time.values.numpy() < batch.request_time.numpy()[owner]).all()


def test_a_schema_of_ones_own(reader: CompleteJourneyReader, source: Path, prepared: Path) -> None:
    """Fewer features and events than the log has."""
    spec = {
        "user": "user", "time": "time", "history_before": "history_before", "surface": "surface",
        "sparse": {"product": {}}, "events": {"purchase": {"fields": ["product"]}}, "objectives": {"purchase": {}},
    }  # fmt: skip
    config = CompleteJourneyReader.Config(cache=str(prepared.parent), source=str(source))
    small = CompleteJourneyReader(config, Schema.parse(spec))
    batch = next(small.iterate("validation"))
    assert batch.ids.keys() == {"product"} and batch.events.keys() == {"purchase"} and batch.dense.shape[1] == 0
    again = CompleteJourneyReader(config, reader.schema)
    assert again.schema.fitted is reader.schema.fitted, "a fitted one is not fitted again"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"purchases": 5}, 'no events "purchases"; did you mean "purchase"'),
        ({"purchase": 0}, "expected at least 1, found 0"),
    ],
)
def test_wrong_lengths(lengths: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"max_length.*{message}"):
        CompleteJourneyReader(CompleteJourneyReader.Config(max_length=lengths))


def test_the_schema_has_what_the_specification_says() -> None:
    schema = Schema.load(SCHEMA)
    assert schema.events["purchase"].max_length == 512 and schema.objectives["redeem"].rate == "rate"
    assert all(d.encoding == "piecewise" and d.bins == 13 for d in schema.dense.values())
    assert all(d.transform == "log1p" for n, d in schema.dense.items() if "_count" in n)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEM_CACHE", str(tmp_path))
    assert cache_folder(None) == tmp_path and cache_folder("elsewhere") == Path("elsewhere")
    monkeypatch.delenv("GEM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "gem"
