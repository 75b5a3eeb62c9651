"""The log around the truth: sizes, order, activity, popularity, ads that come and go; the same bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from generated_small import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gem_core.data.generated import Block, GeneratedConfig, Log
from gem_core.data.generated.config import DAY, START
from gem_core.data.generated.exposure import GAP, Exposure
from gem_core.data.generated.log import BLOCK_USERS
from gem_core.data.generated.world import World


@given(
    st.integers(1, 60),
    st.integers(1, 400),
    st.integers(3, 40),
    st.integers(0, 30),
    st.integers(3, 9),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=60)
def test_exposures_are_what_was_asked_for(
    users: int, more: int, days: int, history: int, categories: int, seed: int
) -> None:
    rows = users + more
    config = GeneratedConfig(
        rows=rows, users=users, days=days, history_days=history, validation_days=1, test_days=1,
        categories=categories, advertisers=categories + seed, ads=8 * categories + seed, seed=seed,
    )  # fmt: skip
    world = World.draw(config)
    e = Exposure.draw(world, np.random.default_rng(seed), users, rows)
    late = e.time[e.request] >= history * DAY
    assert late.sum() == rows, "exactly so many rows"
    assert history > 0 or late.all()
    assert e.time.min() >= 0 and e.time.max() < config.seconds
    assert (np.diff(e.request) >= 0).all() and set(np.diff(e.request)) <= {0, 1}
    same = np.diff(e.user) == 0
    assert (np.diff(e.user) >= 0).all() and (np.diff(e.time)[same] >= GAP).all()
    begun = world.start[e.ad]
    assert ((begun <= e.time[e.request]) & (e.time[e.request] < begun + world.life)).all(), "only running ads are shown"


def test_rows_requests_and_counts(blocks: list[Block]) -> None:
    row = 0
    for block in blocks:
        r = {name: block.rows[name].to_numpy() for name in block.rows.column_names}
        assert (r["row_id"] == row + np.arange(len(block.rows))).all()
        row += len(block.rows)
        begins = r["request"] == r["row_id"]
        assert (begins[1:] == (np.diff(r["request"]) > 0)).all(), "a request is called by its first row"
        within = ~begins[1:]
        for name in ("user", "time", "surface", "country", "age", "device", "hour", "past_clicks", "past_impressions"):
            assert (r[name][1:] == r[name][:-1])[within].all(), f"{name} is the same in a request"
        assert r["time"].min() >= START and r["time"].max() < START + SMALL.days * DAY
        assert (r["category"] // 4 == r["department"]).all()
        for name, event in (("past_impressions", "impression"), ("past_clicks", "click")):
            user, time = (block.events[event][n].to_numpy() for n in ("user", "time"))
            for i in range(0, len(r["user"]), 97):
                assert r[name][i] == ((user == r["user"][i]) & (time < r["time"][i])).sum()
    assert row == SMALL.rows


def test_events_are_what_the_rows_say_and_what_was_before_them(blocks: list[Block]) -> None:
    for block in blocks:
        for event, table in block.events.items():
            user, time = table["user"].to_numpy(), table["time"].to_numpy()
            assert (np.lexsort((time, user)) == np.arange(len(table))).all(), f"{event} in order"
        shown = block.events["impression"]
        assert len(shown) > len(block.rows) and (shown["time"].to_numpy() >= START).sum() == len(block.rows)
        clicks = block.rows["click_time"].drop_null().to_numpy()
        assert np.isin(clicks, block.events["click"]["time"].to_numpy()).all()
        kinds = block.events["conversion"]["kind"].to_pylist()
        for kind in SMALL.conversions:
            assert kinds.count(kind) >= len(block.rows[f"{kind}_time"].drop_null()) > 0


def test_activity_and_popularity_have_heavy_tails() -> None:
    config = GeneratedConfig(rows=BLOCK_USERS * 64, users=BLOCK_USERS)
    rows = Log(config).block(0).rows
    per_user = np.bincount(rows["user"].to_numpy(), minlength=BLOCK_USERS)
    assert 0.2 < np.median(per_user) / per_user.max() < 0.3
    assert per_user.mean() > 1.2 * np.median(per_user)
    per_ad = np.sort(np.bincount(rows["ad"].to_numpy(), minlength=config.ads))[::-1]
    assert per_ad[: config.ads // 100].sum() > 0.1 * len(rows), "one ad in a hundred has more than a tenth of the rows"
    train = set(rows["ad"].to_numpy()[rows["time"].to_numpy() < config.edges()[0]])
    test = rows["ad"].to_numpy()[rows["time"].to_numpy() >= config.edges()[1]]
    assert 0.02 < np.mean([ad not in train for ad in test]) < 0.4, "new ads arrive"


def test_a_block_depends_on_nothing_else(blocks: list[Block]) -> None:
    log = Log(SMALL)
    for index in (1, 0):
        block = log.block(index)
        assert block.rows.equals(blocks[index].rows)
        assert block.events == blocks[index].events
    other = Log(SMALL.model_copy(update={"seed": 6})).block(0)
    assert not other.rows["ad"].equals(blocks[0].rows["ad"])


def test_a_larger_log_begins_with_the_smaller_one() -> None:
    one = GeneratedConfig(rows=4 * BLOCK_USERS, users=BLOCK_USERS)
    two = GeneratedConfig(rows=8 * BLOCK_USERS, users=2 * BLOCK_USERS)
    assert Log(one).block(0).rows.equals(Log(two).block(0).rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"days": 10, "validation_days": 5, "test_days": 5}, "validation_days . test_days: expected less than days"),
        ({"rows": 5, "users": 6}, "users: expected 1 to 10,000 rows per user"),
        ({"rows": 20_001, "users": 2}, "users: expected 1 to 10,000 rows per user"),
        ({"advertisers": 5}, "advertisers: expected at least one per category"),
        ({"ads": 100}, "ads: expected at least 8 per category .192., found 100"),
        ({"conversions": {"click": {"rate": 0.1, "window_days": 1, "delay_days": 1}}}, "'click' cannot be a name"),
        ({"max_length": {"clicks": 4}}, "max_length: .* found clicks: 4"),
        ({"max_length": {"click": 0}}, "max_length: .* found click: 0"),
    ],
)
def test_impossible_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GeneratedConfig.model_validate(options)
