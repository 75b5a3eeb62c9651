from datetime import datetime

import journey_source
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gem_core.data.completejourney import calendar
from gem_core.data.completejourney.impressions import uniform
from gem_core.data.completejourney.tally import Pairs, Tally, ranges

weeks = st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=12)


@given(weeks)
def test_tally_counts_what_was_added(added: list[list[int]]) -> None:
    tally = Tally(5, (1, 3))
    for week, slots in enumerate(added, 1):
        tally.add(week, np.array(slots, np.int64))
    for slot in range(6):  # 5 is the slot of keys that never occur
        per_week = [slots.count(slot) for slots in added]
        active = [week for week, n in enumerate(per_week, 1) if n]
        assert tally.total[slot] == sum(per_week)
        assert tally.weeks[slot] == len(active)
        assert (tally.first[slot], tally.last[slot]) == ((active[0], active[-1]) if active else (0, 0))
        for window in (1, 3):
            assert tally.recent[window][slot] == sum(per_week[-window:])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=20), st.integers(0, 5), st.integers(0, 3))
def test_pairs_find_their_slots(pairs: list[tuple[int, int]], a: int, b: int) -> None:
    first, second = (np.array(c, np.int64) for c in (zip(*pairs, strict=True) if pairs else ([], [])))
    found = Pairs(first, second, 4)
    slot = int(found.find(np.array([a]), np.array([b]))[0])
    assert (slot < len(found)) == ((a, b) in pairs)
    if slot < len(found):
        assert all((found.slots[i] == slot) == (pair == (a, b)) for i, pair in enumerate(pairs))
    start, count = found.span(np.array([a]))
    assert [int(k) % 4 for k in found.keys[ranges(start, count)]] == sorted({y for x, y in pairs if x == a})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=6))
def test_ranges_concatenate(spans: list[tuple[int, int]]) -> None:
    start, count = (np.array(c, np.int64) for c in (zip(*spans, strict=True) if spans else ([], [])))
    assert ranges(start, count).tolist() == [i for s, n in spans for i in range(s, s + n)]


def test_weeks_start_on_monday_at_local_midnight() -> None:
    starts = calendar.week_start(np.arange(1, 55))
    expected = [np.datetime64(journey_source.monday(w), "s").astype(np.int64) for w in range(1, 55)]
    assert starts.tolist() == expected
    assert np.datetime64(int(starts[10]), "s") == np.datetime64("2017-03-06T05:00:00")
    assert np.datetime64(int(starts[11]), "s") == np.datetime64("2017-03-13T04:00:00")  # summer time
    days = np.arange(np.datetime64("2016-11-01"), np.datetime64("2018-03-01"))
    of_day = calendar.week_of(days)
    midnight = calendar.midnight(days)
    assert (calendar.week_start(of_day) <= midnight).all() and (midnight < calendar.week_start(of_day + 1)).all()
    assert calendar.week_of(np.array([datetime(2016, 11, 14)], "datetime64[D]"))[0] < 1


def test_uniform_depends_on_seed_and_keys_alone() -> None:
    keys = np.arange(20_000)
    numbers = uniform(3, keys, keys % 7)
    assert (numbers[5:9] == uniform(3, keys[5:9], keys[5:9] % 7)).all()
    assert (numbers != uniform(4, keys, keys % 7)).mean() > 0.999
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = np.histogram(numbers, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() == pytest.approx(19, abs=4 * np.sqrt(38))
