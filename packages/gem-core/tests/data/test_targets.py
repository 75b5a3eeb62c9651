"""Attribution windows and rates of a log: labels and masks of every head, and what is refused."""

from typing import Any

import pyarrow as pa
import pytest

from gem_core.errors import ConfigError, DataError
from gem_core.schema import Schema

HOUR, DAY = 3600, 86400
BUY: dict[str, Any] = {"windows": ["90m", "1d", "7d"], "converted_at": "at", "observed_until": "until"}


def make_schema(**buy: Any) -> Schema:
    return Schema.parse({"user": "u", "time": "t", "dense": ["x"], "objectives": {"buy": {**BUY, **buy}}})


def log(**changes: Any) -> pa.Table:
    """Bought after an hour, after two days, not at all, and three rows whose last window is not over."""
    columns = {
        "u": [1] * 6,
        "t": [1_700_000_000 + i for i in range(6)],
        "x": [0.0] * 6,
        "buy": [1, 1, 0, None, None, None],
        "at": [1_700_000_000 + HOUR, 1_700_000_001 + 2 * DAY, None, 1_700_000_003 + 60, None, None],
        "until": [1_700_000_000 + 10 * DAY] * 3 + [1_700_000_000 + 2 * DAY] * 2 + [1_700_000_000 + 3 * HOUR],
        **changes,
    }
    return pa.table(columns)


def test_labels_and_masks_of_each_window() -> None:
    schema = make_schema()
    fitted = schema.fit([log()], {})
    assert schema.heads() == ["buy@90m", "buy@1d", "buy"]
    batch = fitted.encode(log())
    assert batch.labels["buy@90m"].tolist() == [1, 0, 0, 1, 0, 0]
    assert batch.masks["buy@90m"].tolist() == [1, 1, 1, 1, 1, 1]
    assert batch.labels["buy@1d"].tolist() == [1, 0, 0, 1, 0, 0]
    assert batch.masks["buy@1d"].tolist() == [1, 1, 1, 1, 1, 0]
    assert batch.labels["buy"].tolist() == [1, 1, 0, 0, 0, 0]
    assert batch.masks["buy"].tolist() == [1, 1, 1, 0, 0, 0]
    assert fitted.require_fitted().base_rates == {"buy@90m": 2 / 6, "buy@1d": 2 / 5, "buy": 2 / 3}
    unlabelled = fitted.encode(log().drop_columns(["buy", "at", "until"]))
    assert not any(mask.any() for mask in unlabelled.masks.values())


def test_without_the_end_of_the_watch_only_known_labels_count() -> None:
    schema = make_schema(observed_until=None)
    masks = schema.fit([log()], {}).encode(log()).masks
    assert masks["buy@90m"].tolist() == masks["buy@1d"].tolist() == [1, 1, 1, 1, 0, 0]


def test_rates_of_a_shift_and_of_weights() -> None:
    rate = [0.5, 0.5, 0.25, 0.25, 0.5, 0.5]
    for correction in ("weight", "shift"):
        schema = make_schema(rate="rate", correction=correction)
        batch = schema.fit([log(rate=rate)], {}).encode(log(rate=rate))
        assert batch.weights["buy@90m"].tolist() == [1, 2, 4, 1, 2, 2]
        assert {t: r.tolist() for t, r in batch.rates.items()} == ({"buy": rate} if correction == "shift" else {})
    schema = make_schema(rate="rate", correction="shift")
    with pytest.raises(DataError, match=r'"rate".*expected a rate in \(0, 1\]'):
        schema.fit([log(rate=[None, *rate[1:]])], {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at": [None] * 6}, "expected the time of the conversion, as the label is 1"),
        ({"at": [1] * 6}, "expected a conversion not before the row's own time"),
    ],
)
def test_wrong_conversions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_schema().fit([log(**changes)], {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": ["1d"]}, "expected at least two, shortest first"),
        ({"windows": ["1d", "24h"]}, "expected at least two, shortest first"),
        ({"windows": ["1x", "2d"]}, "expected a number and a unit of s, m, h, d"),
        ({"windows": ["0m", "2d"]}, "expected a number and a unit of s, m, h, d"),
        ({"converted_at": None}, "need each other"),
        ({"windows": [], "converted_at": None}, "`observed_until` needs `windows`"),
        ({"correction": "shift"}, "correction: shift needs `rate`"),
    ],
)
def test_wrong_windows(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schema(**changes)


def test_an_objective_may_not_have_the_name_of_a_window() -> None:
    objectives = {"buy": {"windows": ["1h", "1d"], "converted_at": "at"}, "buy@1h": {}}
    with pytest.raises(ConfigError, match="this name is that of a window of another objective"):
        Schema.parse({"user": "u", "time": "t", "objectives": objectives})
