"""Match counts against a double loop."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import FULL, NOW, make_batch, make_schema

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError
from gem_core.model.match import MatchCounts, match_counts, matched_fields
from gem_core.schema import FIRST_KNOWN


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 5), max_size=6)), max_size=4)
)
def test_counts_equal_a_double_loop(requests: list[tuple[list[int], list[int]]]) -> None:
    row_ids = [i for rows, _ in requests for i in rows]
    event_ids = [i for _, events in requests for i in events]
    row_request = [q for q, (rows, _) in enumerate(requests) for _ in rows]
    event_request = [q for q, (_, events) in enumerate(requests) for _ in events]
    age = [(3 * e + 1) % 4 for e in range(len(event_ids))]
    expected = torch.zeros(len(row_ids), 4)
    for r, a in enumerate(row_ids):
        for e, b in enumerate(event_ids):
            if row_request[r] == event_request[e] and a == b and a >= FIRST_KNOWN:
                expected[r, age[e]] += 1
    arguments = (torch.tensor(x, dtype=torch.int64) for x in (row_ids, row_request, event_ids, event_request, age))
    assert torch.equal(match_counts(*arguments, 4, 6), expected)


def naive_counts(batch: Batch, counts: MatchCounts) -> torch.Tensor:
    out = torch.zeros(batch.rows, len(counts.fields), counts.bins)
    for row in range(batch.rows):
        request = int(batch.request[row])
        for index, (event, field, feature) in enumerate(counts.fields):
            fields = batch.events[event]
            start, end = fields["time"].offsets[request : request + 2].tolist()
            for at in range(start, end):
                wanted = int(batch.ids[feature].values[row])
                if wanted >= FIRST_KNOWN and int(fields[field].values[at]) == wanted:
                    age = math.log(max(int(batch.request_time[request] - fields["time"].values[at]), 1))
                    out[row, index, sum(age > edge for edge in counts.edges.tolist())] += 1
    return out.flatten(1).log1p()


@pytest.mark.parametrize("bins", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [(3, 0, 5), (0,), ()])
def test_counts_equal_a_loop(bins: int, rows: tuple[int, ...]) -> None:
    schema = make_schema()
    batch = make_batch(schema, rows)
    counts = MatchCounts(schema, bins, None)
    assert counts.width == 3 * bins
    torch.testing.assert_close(counts(batch), naive_counts(batch, counts))


def test_bins_run_from_four_days_to_a_year() -> None:
    schema = make_schema()
    counts = MatchCounts(schema, 6, None)
    days = (counts.edges.exp() / 86400).tolist()
    assert days[0] == pytest.approx(4, rel=1e-5) and days[-1] == pytest.approx(365, rel=1e-5)
    assert [b / a for a, b in itertools.pairwise(days)] == pytest.approx([(365 / 4) ** 0.25] * 4, rel=1e-4)
    batch = make_batch(schema, (1,), {"click": [3], "view": [0]})
    batch.ids["ad"].values.fill_(5)
    batch.events["click"]["ad"].values.fill_(5)
    batch.events["click"]["time"].values.copy_(NOW - 86400 * torch.tensor([1, 30, 5000]))
    ad = counts(batch)[0, :6]  # the first field is click.ad
    assert ad.bool().tolist() == [True, False, True, False, False, True]


def test_missing_and_unseen_ids_match_nothing() -> None:
    schema = make_schema()
    batch = make_batch(schema, (2, 2))
    for value in (0, 1):
        for ids in (
            batch.ids["ad"],
            batch.ids["cat"],
            *(f["cat"] for f in batch.events.values()),
            batch.events["click"]["ad"],
        ):
            ids.values.fill_(value)
        assert not MatchCounts(schema, 3, None)(batch).any()


def test_every_pair_of_a_field_and_a_row_feature_of_one_table() -> None:
    assert matched_fields(make_schema(), None) == [
        ("click", "ad", "ad"),
        ("click", "cat", "cat"),
        ("view", "cat", "cat"),
    ]
    sparse = {**FULL["sparse"], "other": {"table": "ad"}, "many": {"table": "ad", "multi": True}}
    pairs = [("click", "ad", "ad"), ("click", "ad", "other")]
    assert matched_fields(make_schema(sparse=sparse), None)[:2] == pairs
    assert matched_fields(make_schema(sparse=sparse), ["click.ad"]) == pairs


def test_a_choice_of_fields_is_checked() -> None:
    schema = make_schema()
    batch = make_batch(schema)
    some = MatchCounts(schema, 3, ["view.cat", "click.ad"])
    every = MatchCounts(schema, 3, None)(batch).view(batch.rows, 3, 3)
    assert torch.equal(some(batch).view(batch.rows, 2, 3), every[:, [2, 0]])
    with pytest.raises(ConfigError, match=r'"click.da" is no event field that shares a table'):
        matched_fields(schema, ["click.da"])
    with pytest.raises(ConfigError, match="nothing can match"):
        matched_fields(make_schema(events={}), None)
