"""Leaks planted in a sound log are found, and nothing is found in the sound log itself."""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from leaky_log import DAY, SCHEMA, TEST, inline, sound

from gem_core.data.check import Check, check
from gem_core.data.readers import MemoryReader
from gem_core.schema import Schema

SOUND = sound()


class Parts(NamedTuple):
    """A log: rows, clicks, schema, and options of the reader in place of a split by time."""

    rows: dict[str, list[Any]]
    clicks: dict[str, list[Any]]
    schema: dict[str, Any]
    options: dict[str, Any]


def parts() -> Parts:
    return Parts(*copy.deepcopy(SOUND), copy.deepcopy(SCHEMA), {"split": {"test_from": TEST}})


def reader_of(log: Parts) -> MemoryReader:
    given: dict[str, Any] = {"rows": log.rows, "unlabelled": "drop", **log.options}
    if "click.time" not in log.rows:
        given["events"] = {"click": log.clicks}
    return MemoryReader(MemoryReader.Config(**given), Schema.parse(log.schema))


def look(log: Parts, **options: Any) -> Check:
    return check(reader_of(log), **options)


def feature(log: Parts, values: Any, name: str = "leak", kind: str = "dense") -> None:
    log.rows[name] = list(values)
    log.schema[kind] = {key: {} for key in [*log.schema[kind], name]}


# ---- leaks ---------------------------------------------------------------------------------------------------------


def events_after_the_request(log: Parts) -> None:
    """Histories in list columns with what came up to an hour later."""
    log.rows.update(inline(log.rows, log.clicks, late=3600))


def label_column_as_feature(log: Parts) -> None:
    feature(log, log.rows["clicked"], "clicked")


def label_under_another_name(log: Parts) -> None:
    feature(log, [100 - 3 * y for y in log.rows["clicked"]])


def label_as_category(log: Parts) -> None:
    draw = np.random.default_rng(1)
    feature(log, [f"{'bd'[y]}{draw.integers(9)}" for y in log.rows["clicked"]], kind="sparse")


def label_in_the_number_of_ids(log: Parts) -> None:
    feature(log, [["seen"] * (1 + y) for y in log.rows["clicked"]])
    log.schema["dense"].pop("leak")
    log.schema["sparse"] = {"ad": {}, "category": {}, "leak": {"multi": True}}


def label_in_a_vector(log: Parts) -> None:
    log.rows["leak"] = [[0.5, float(y)] for y in log.rows["clicked"]]
    log.schema["vectors"] = {"leak": {"width": 2}}


def conversion_time(log: Parts) -> None:
    """When it was bought, which only what is bought has."""
    times = zip(log.rows["bought"], log.rows["time"], strict=True)
    feature(log, [time + 60.0 if bought else None for bought, time in times])


def missing_where_positive(log: Parts) -> None:
    """A join that drops a value where there was a click, three times of four."""
    draw = np.random.default_rng(2)
    feature(log, [None if y and draw.random() < 0.75 else 1.0 + draw.random() for y in log.rows["clicked"]])


def dwell_time(log: Parts) -> None:
    """Of half the clicks; all else has a little."""
    draw = np.random.default_rng(3)
    feature(log, [20 + draw.random() if y and draw.random() < 0.5 else draw.random() for y in log.rows["clicked"]])


def count_with_the_own_click(log: Parts) -> None:
    feature(log, [c + y for c, y in zip(log.rows["user_clicks"], log.rows["clicked"], strict=True)])


def external_count_with_the_own_click(log: Parts) -> None:
    """Of a longer log than this, so that no count of this log is near it: one row a request, to be seen alone."""
    keep = range(0, len(log.rows["user"]), 3)
    for name in log.rows:
        log.rows[name] = [log.rows[name][i] for i in keep]
    base = np.random.default_rng(4).integers(0, 10_000, 80)
    count: Counter[int] = Counter()
    values = []
    for user, y in zip(log.rows["user"], log.rows["clicked"], strict=True):
        count[user] += y
        values.append(float(base[user] + count[user]))
    feature(log, values)


def count_of_the_whole_log(log: Parts) -> None:
    whole = Counter(log.clicks["user"])
    feature(log, [float(whole[user]) for user in log.rows["user"]])


def future_popularity(log: Parts) -> None:
    """Clicks on the ad after the request."""
    times = defaultdict(list)
    for ad, time in zip(log.clicks["ad"], log.clicks["time"], strict=True):
        times[ad].append(time)
    feature(log, [float(sum(t > now for t in times[ad])) for ad, now in _moments(log)])


def next_weeks_popularity(log: Parts) -> None:
    times = defaultdict(list)
    for ad, time in zip(log.clicks["ad"], log.clicks["time"], strict=True):
        times[ad].append(time)
    width = (log.rows["time"][-1] - log.rows["time"][0]) // 4
    feature(log, [np.log1p(sum(now <= t < now + width for t in times[ad])) for ad, now in _moments(log)])


def target_encoding(log: Parts) -> None:
    """The mean label of each user in the training rows, the row itself among them."""
    shown, clicked = Counter[int](), Counter[int]()
    for user, time, y in zip(log.rows["user"], log.rows["time"], log.rows["clicked"], strict=True):
        if time < TEST:
            shown[user] += 1
            clicked[user] += y
    feature(log, [clicked[user] / max(shown[user], 1) for user in log.rows["user"]])


def rate_of_the_whole_log(log: Parts) -> None:
    shown, clicked = Counter(log.rows["ad"]), Counter(log.clicks["ad"])
    feature(log, [(clicked[ad] + 0.1) / (shown[ad] + 1) for ad in log.rows["ad"]])


def own_event_in_the_history(log: Parts) -> None:
    """Clicks dated a little before the request that they answer."""
    log.clicks["time"] = [time - 10 for time in log.clicks["time"]]


def label_in_an_event(log: Parts) -> None:
    """Impressions as events, dated before themselves, with what came of them."""
    log.clicks.update({name: log.rows[name] for name in ("user", "ad")})
    log.clicks["time"] = [time - 1 for time in log.rows["time"]]
    log.clicks["cost"] = [float(y) for y in log.rows["clicked"]]


def events_of_whole_days(log: Parts) -> None:
    """A click counts as one of midnight, before the requests of its day."""
    log.clicks["time"] = [time // DAY * DAY for time in log.clicks["time"]]


def duplicated_row(log: Parts) -> None:
    for values in log.rows.values():
        values.append(values[10])
    log.rows["id"][-1] = -1


def row_in_two_splits(log: Parts) -> None:
    _by_column(log)
    for name, values in log.rows.items():
        values.append("test" if name == "part" else values[10])


def overlapping_splits(log: Parts) -> None:
    _by_column(log)
    log.rows["part"] = ["test" if user % 4 == 0 else "train" for user in log.rows["user"]]


def shared_request(log: Parts) -> None:
    _by_column(log)
    border = log.rows["part"].index("test")
    log.rows["part"][border] = "train"


def repeated_row_ids(log: Parts) -> None:
    log.rows["id"] = [i // 2 for i in log.rows["id"]]


def _moments(log: Parts) -> Any:
    return zip(log.rows["ad"], log.rows["time"], strict=True)


def _by_column(log: Parts) -> None:
    log.rows["part"] = ["test" if time >= TEST else "train" for time in log.rows["time"]]
    log.options.clear()
    log.options["split"] = {"column": "part"}


LEAKS: dict[Callable[[Parts], None], tuple[str, str]] = {
    events_after_the_request: ("fault", 'column "click.time".*a later event is a leak'),
    label_column_as_feature: ("label-as-feature", 'column "clicked" .*that of objective click'),
    label_under_another_name: ("label-in-feature", r'column "leak" \(dense feature leak\).*tells click.*AUC 1.0000'),
    label_as_category: ("label-in-feature", r'column "leak" \(sparse feature leak\).*tells click.*of its id'),
    label_in_the_number_of_ids: ("label-in-feature", "number of ids: .*tells click"),
    label_in_a_vector: ("label-in-feature", "number 2: .*tells click"),
    conversion_time: ("label-in-feature", 'column "leak".*tells buy.*that it has a value'),
    missing_where_positive: ("label-in-feature", 'column "leak".*tells click.*rows without a value'),
    dwell_time: ("label-in-feature", 'column "leak".*tells click.*with its greatest values'),
    count_with_the_own_click: ("future-statistic", 'column "leak".*positives of click of the user with the'),
    external_count_with_the_own_click: ("label-in-increase", 'column "leak".*last row of the user.*tells click'),
    count_of_the_whole_log: ("future-statistic", 'column "leak".*of the user in the whole log'),
    future_popularity: ("future-statistic", 'column "leak".*of ad (after the request|from the request on)'),
    next_weeks_popularity: ("future-statistic", 'column "leak".*of ad from the request on in a 4th of the log'),
    target_encoding: ("future-statistic", 'column "leak".*rate of click of the user in the training rows'),
    rate_of_the_whole_log: ("future-statistic", 'column "leak".*rate of click of ad in the whole log'),
    own_event_in_the_history: ("label-in-history", "newest click event of the row's ad: .*tells click"),
    label_in_an_event: ("label-in-history", "newest click event of the row's ad: cost: .*tells click"),
    events_of_whole_days: ("coarse-event-times", "click events: .*only whole days"),
    duplicated_row: ("duplicate-rows", r"rows, row 3001 .*found rows, row 11 of split train"),
    row_in_two_splits: ("rows-across-splits", r"rows, row 3001 of split test: .*row 11 of split train"),
    overlapping_splits: ("split-overlap", 'column "time": expected a row of split train'),
    shared_request: ("requests-across-splits", "expected a request with all rows in one split"),
    repeated_row_ids: ("repeated-row-ids", "row 2 of split train: expected a row id of its own.*row 1 of split"),
}


@pytest.mark.parametrize(
    ("leak", "kind", "message"), [(k, *v) for k, v in LEAKS.items()], ids=lambda v: getattr(v, "__name__", "")
)
def test_leaks_are_found(leak: Callable[[Parts], None], kind: str, message: str) -> None:
    log = parts()
    leak(log)
    found = look(log)
    of_kind = [f.message for f in found.findings if f.kind == kind]
    assert any(re.search(message, text) for text in of_kind), found.findings
    assert not found.sound


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_is_found_in_a_sound_log(seed: int) -> None:
    log = parts()._replace(**dict(zip(("rows", "clicks"), sound(seed=seed), strict=True)))
    assert look(log).findings == []


def test_nothing_is_found_in_a_sound_log_with_inline_histories() -> None:
    log = parts()
    log.rows.update(inline(log.rows, log.clicks))
    assert look(log).findings == []


def test_a_history_up_to_the_day_may_have_events_of_whole_days() -> None:
    log = parts()
    events_of_whole_days(log)
    log.rows["before"] = [time // DAY * DAY for time in log.rows["time"]]
    log.schema["history_before"] = "before"
    assert look(log).findings == []


def test_a_log_of_one_request_a_day_may_have_its_events_soon_after() -> None:
    """No clock in the world cuts times to a minute past midnight."""
    log = parts()
    for columns, seconds in ((log.rows, 0), (log.clicks, 60)):
        columns["time"] = [time // DAY * DAY + seconds for time in columns["time"]]
    assert "coarse-event-times" not in {finding.kind for finding in look(log).findings}


def test_an_event_at_the_request_is_never_seen() -> None:
    """By construction: the impression as an event, and the target in the history at the request's own time."""
    log = parts()
    log.clicks.update({name: list(log.rows[name]) for name in ("user", "time", "ad")})
    log.clicks["cost"] = [float(y) for y in log.rows["clicked"]]
    assert look(log).findings == []
    reader = reader_of(log)
    rows = reader.load("train")
    batch = rows.batch(np.arange(rows.requests))
    times = batch.events["click"]["time"]
    owner = np.repeat(np.arange(rows.requests), np.diff(times.offsets.numpy()))
    assert (times.values.numpy() < batch.request_time.numpy()[owner]).all() and len(owner)


def test_kinds_can_be_allowed() -> None:
    log = parts()
    overlapping_splits(log)
    found = look(log, allow=["split-overlap"])
    assert [(f.kind, f.policy) for f in found.findings] == [("split-overlap", "count")] and found.sound
    assert found.as_json()["sound"] is True


def test_the_threshold_is_an_option() -> None:
    log = parts()
    draw = np.random.default_rng(0)
    feature(log, [draw.random() - (not y and draw.random() < 0.95) for y in log.rows["clicked"]])
    assert look(log).findings == []
    assert {f.kind for f in look(log, threshold=0.9).findings} == {"label-in-feature"}
