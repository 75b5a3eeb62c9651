"""The planted truth: the oracle's probabilities follow from what each user did strictly before the request, and no more."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from generated_small import SMALL

from gem_core.data.generated import Block, GeneratedConfig, Log
from gem_core.data.generated.config import DAY
from gem_core.data.generated.world import World


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p / (1 - p))


def column(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy().astype(np.float64)


def by_hand(block: Block, users: int) -> tuple[pa.Table, np.ndarray]:
    """The rows of the first users, and the effect of history on each: sums over earlier events, written as in world.py."""
    tau = World.draw(SMALL).need_tau

    def of_users(table: pa.Table) -> list[dict[str, int]]:
        return table.filter(pc.less(table["user"], users)).to_pylist()

    rows, click, seen = map(of_users, (block.rows, block.events["click"], block.events["impression"]))
    out = []
    for row in rows:  # the block's first rows are those of its first users

        def ages(events: list[dict[str, int]], field: str, row: dict[str, int] = row) -> np.ndarray:
            same = [e for e in events if e["user"] == row["user"] and e[field] == row[field]]
            return np.array([row["time"] - e["time"] for e in same if e["time"] < row["time"]], np.float64)

        age = ages(click, "category")  # the truth counts a click from its request on, up to a minute earlier: see atol
        r = age / tau[row["category"]]
        interest, need = np.exp(-age / (2 * DAY)).sum(), (r * r / 2 * np.exp(-r)).sum()
        fatigue = np.exp(-ages(seen, "advertiser") / (20 * DAY)).sum()
        out.append(0.7 * (1 - np.exp(-interest)) + 2.2 * (1 - np.exp(-4 * need)) - 0.4 * np.log1p(fatigue))
    return block.rows.slice(0, len(rows)), np.array(out)


def test_history_enters_as_said_and_only_from_before_the_request(blocks: list[Block]) -> None:
    table, expected = by_hand(blocks[0], 40)
    assert len(table) > 200 and expected.std() > 0.3, "history matters here"
    found = logit(column(table, "oracle_click")) - logit(column(table, "static_click"))
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_a_conversion_needs_a_click_and_half_the_history(blocks: list[Block]) -> None:
    table, expected = by_hand(blocks[0], 40)
    for name, kind in SMALL.conversions.items():
        known = table[name].is_valid().to_numpy()
        within = 1 - np.exp(-kind.window_days / kind.delay_days)
        of_click = [column(table, f"{o}_{name}") / column(table, f"{o}_click") / within for o in ("oracle", "static")]
        found = logit(of_click[0][known]) - logit(of_click[1][known])
        np.testing.assert_allclose(found, 0.5 * expected[known], atol=2e-3)


def test_without_sequence_effects_history_is_nothing() -> None:
    block = Log(SMALL.model_copy(update={"sequence": 0.0, "users": 200, "rows": 2_000})).block(0)
    for task in SMALL.tasks:
        assert block.rows[f"oracle_{task}"].equals(block.rows[f"static_{task}"])


@pytest.mark.parametrize("seed", [0, 1])
def test_labels_are_drawn_by_the_oracle_at_the_rates_asked_for(seed: int) -> None:
    config = GeneratedConfig(rows=60_000, seed=seed, ctr=0.1, ads=800)
    rows = Log(config).block(0).rows
    for task in config.tasks:
        known = rows[task].is_valid().to_numpy()
        y, p = column(rows, task)[known], column(rows, f"oracle_{task}")[known]
        assert abs(y.sum() - p.sum()) < 4 * np.sqrt((p * (1 - p)).sum()), "within 4 standard deviations"
        # Reliability in five shares of the rows: the probabilities are right not only on average.
        for share in np.array_split(np.argsort(p), 5):
            assert abs(y[share].sum() - p[share].sum()) < 4 * np.sqrt((p[share] * (1 - p[share])).sum()) + 1
    assert rows["click"].to_numpy().mean() == pytest.approx(0.1, rel=0.15)
    clicked = rows.filter(pc.equal(rows["click"], 1))
    for name, kind in config.conversions.items():
        happened = clicked[f"{name}_time"].is_valid().to_numpy()[clicked[name].is_valid().to_numpy()]
        assert happened.mean() == pytest.approx(kind.rate, rel=0.3)


def test_labels_are_conversions_within_the_window(blocks: list[Block]) -> None:
    late = 0
    for block in blocks:
        rows = block.rows
        clicked = rows["click"].to_numpy() == 1
        assert (rows["click_time"].is_valid().to_numpy() == clicked).all()
        delay_of_click = rows["click_time"].drop_null().to_numpy() - rows["time"].to_numpy()[clicked]
        assert delay_of_click.min() >= 1 and delay_of_click.max() < 60
        for name, kind in SMALL.conversions.items():
            happened = rows[f"{name}_time"].is_valid().to_numpy()
            assert not (happened & ~clicked).any()
            delay = rows[f"{name}_time"].fill_null(0).to_numpy() - rows["click_time"].fill_null(0).to_numpy()
            assert (delay[happened] >= 1).all()
            label = rows[name].fill_null(0).to_numpy()
            assert ((label == 1) == (happened & (delay <= kind.window_days * DAY))).all()
            late += int((happened & (label == 0)).sum())
    assert late > 0, "some conversions come after their window"


def test_shops_and_apps_have_their_own_kinds(blocks: list[Block]) -> None:
    for block in blocks:
        app = block.rows["app_install"].is_valid().to_numpy()
        assert 0 < app.mean() < 1
        for name in ("add_to_cart", "purchase"):
            assert (block.rows[name].is_valid().to_numpy() == ~app).all()
        assert (block.rows["oracle_app_install"].is_valid().to_numpy() == app).all()
