"""RankingMetrics against scikit-learn and plain loops."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score
from synthetic import SCHEMA, make_batch
from torch import Tensor

from gem_core.data.batch import Batch
from gem_core.train import RankingMetrics
from gem_core.train.ranking import deciles, grouped_auc, histogram_auc

SURFACES = ("feed", "reels")


def metric(exact: bool = True, **options: Any) -> RankingMetrics:
    return RankingMetrics(RankingMetrics.Config.model_validate(options), SCHEMA, exact=exact)


def data(seed: int, requests: int = 40) -> tuple[dict[str, Tensor], Batch]:
    """Logits with many ties, and a batch with random weights."""
    batch = make_batch(requests, seed)
    generator = torch.Generator().manual_seed(seed)
    weights = {task: torch.rand(batch.rows, generator=generator) + 0.1 for task in ("click", "buy")}
    logits = {t: (torch.randn(batch.rows, generator=generator) * 8).round() / 4 + batch.dense[:, 0] for t in weights}
    return logits, dataclasses.replace(batch, weights=weights)


def arrays(logits: dict[str, Tensor], batch: Batch, task: str) -> dict[str, Any]:
    """Labelled rows as numpy: p, y, w, surface, user."""
    kept = batch.masks[task] > 0
    columns = {
        "s": logits[task],
        "p": logits[task].double().sigmoid(),
        "y": batch.labels[task],
        "w": batch.weights[task].double(),
        "surface": batch.surface,
        "user": batch.user[batch.request],
    }
    return {name: value[kept].numpy() for name, value in columns.items()}


def expected(a: dict[str, Any]) -> dict[str, float]:
    rate = float(np.average(a["y"], weights=a["w"]))
    loss = log_loss(a["y"], a["p"], sample_weight=a["w"])
    entropy = log_loss(a["y"], np.full(len(a["y"]), rate), sample_weight=a["w"])
    return {
        "rows": float(len(a["y"])),
        "logloss": loss,
        "ne": loss / entropy,
        "auc": float(roc_auc_score(a["y"], a["s"], sample_weight=a["w"])),
        "calibration": float((a["p"] * a["w"]).sum() / (a["y"] * a["w"]).sum()),
    }


@pytest.mark.parametrize("seed", range(3))
def test_exact_metrics_equal_scikit_learn(seed: int) -> None:
    logits, batch = data(seed)
    measured = metric()
    measured.update(logits, batch)
    got = measured.compute()
    loss = entropy = 0.0
    for task in ("click", "buy"):
        a = arrays(logits, batch, task)
        want = {f"{task}/{name}": value for name, value in expected(a).items()}
        for i, surface in enumerate(SURFACES):
            part = {name: value[a["surface"] == i] for name, value in a.items()}
            want |= {f"{task}/{surface}/{name}": value for name, value in expected(part).items()}
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=2e-6), name
        assert got[f"{task}/base_rate"] == pytest.approx(np.average(a["y"], weights=a["w"]), rel=1e-6)
        loss += want[f"{task}/logloss"] * a["w"].sum()
        entropy += want[f"{task}/logloss"] / want[f"{task}/ne"] * a["w"].sum()
    assert got["joint/ne"] == pytest.approx(loss / entropy, rel=1e-6)
    assert got["joint/rows"] == sum(got[f"{task}/rows"] for task in ("click", "buy"))


def test_gauc_is_the_impression_weighted_mean_over_users_with_both_classes() -> None:
    logits, batch = data(5)
    measured = metric()
    measured.update(logits, batch)
    a = arrays(logits, batch, "click")
    total = weight = 0.0
    for user in np.unique(a["user"]):
        mine = a["user"] == user
        if 0 < a["y"][mine].mean() < 1:
            auc = roc_auc_score(a["y"][mine], a["s"][mine], sample_weight=a["w"][mine])
            total, weight = total + auc * a["w"][mine].sum(), weight + a["w"][mine].sum()
    assert measured.compute()["click/gauc"] == pytest.approx(total / weight, rel=1e-6)


def test_deciles_are_ten_equal_shares_by_prediction() -> None:
    p = torch.linspace(0.01, 0.99, 200, dtype=torch.float64)
    y = (torch.rand(200, generator=torch.Generator().manual_seed(0)) < p).double()
    for share, (rate, predicted) in enumerate(deciles(torch.ones(200, dtype=torch.float64), y, p)):
        part = slice(20 * share, 20 * share + 20)
        assert rate == pytest.approx(float(y[part].mean()))
        assert predicted == pytest.approx(float(p[part].mean()))
    one = deciles(torch.ones(1, dtype=torch.float64), torch.ones(1), torch.full((1,), 0.5))
    assert [i for i, (rate, _) in enumerate(one) if rate == 1.0] == [5]
    logits, batch = data(2)
    coarse = metric(exact=False)
    coarse.update(logits, batch)
    got = coarse.compute()
    rates = [got[f"click/decile_{i}/rate"] for i in range(10) if f"click/decile_{i}/rate" in got]
    assert len(rates) >= 9
    assert rates[-1] > rates[0]


@pytest.mark.parametrize("exact", [True, False])
def test_the_base_rate_as_a_constant_has_ne_exactly_one(exact: bool) -> None:
    batch = make_batch(50, seed=8)
    rates = {t: (batch.labels[t].nan_to_num() * batch.masks[t]).sum() / batch.masks[t].sum() for t in batch.labels}
    logits = {task: torch.full((batch.rows,), float(rate)).logit() for task, rate in rates.items()}
    measured = metric(exact)
    measured.update(logits, batch)
    got = measured.compute()
    for name in ("click/ne", "buy/ne", "joint/ne", "click/calibration"):
        assert got[name] == pytest.approx(1.0, abs=1e-6)
    assert got["click/auc"] == 0.5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 60), groups=st.integers(1, 5))
def test_grouped_auc_counts_pairs(seed: int, n: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    score, label = rng.integers(0, 6, n) / 2.0, rng.integers(0, 2, n)
    weight, group = rng.random(n) + 0.1, rng.integers(0, groups, n)
    want = []
    for g in range(groups):
        pairs = possible = 0.0
        for i in np.flatnonzero((group == g) & (label == 1)):
            for j in np.flatnonzero((group == g) & (label == 0)):
                possible += weight[i] * weight[j]
                pairs += weight[i] * weight[j] * ((score[i] > score[j]) + 0.5 * (score[i] == score[j]))
        if possible:
            want.append((pairs / possible, weight[group == g].sum()))
    auc, total = grouped_auc(*(torch.from_numpy(v) for v in (score, label.astype(float), weight, group)))
    assert auc.tolist() == pytest.approx([a for a, _ in want])
    assert total.tolist() == pytest.approx([w for _, w in want])


@pytest.mark.parametrize("bins", [16, 256, 4096])
def test_histogram_auc_is_within_its_stated_error(bins: int) -> None:
    logits, batch = data(3, requests=200)
    exact, coarse = metric(), metric(exact=False, bins=bins)
    for m in (exact, coarse):
        m.update(logits, batch)
    got, truth = coarse.compute(), exact.compute()
    for name in ("click", "buy", "click/feed", "buy/reels"):
        error = got[f"{name}/auc_error"]
        assert abs(got[f"{name}/auc"] - truth[f"{name}/auc"]) <= error + 1e-12
        assert error <= 16 / bins
        for other in ("ne", "logloss", "calibration", "rows"):
            assert got[f"{name}/{other}"] == truth[f"{name}/{other}"]
    assert not [name for name in got if "gauc" in name]
    assert histogram_auc(torch.ones(4), torch.zeros(4)) is None


@pytest.mark.parametrize("exact", [True, False])
def test_parts_merged_over_ranks_equal_the_whole(exact: bool) -> None:
    ranks = [metric(exact) for _ in range(3)]  # the last has no batch
    whole = metric(exact)
    for seed in range(4):
        logits, batch = data(seed)
        whole.update(logits, batch)
        ranks[seed % 2].update(logits, batch)
    ranks[0].merge([rank.state() for rank in ranks[1:]])
    got, want = ranks[0].compute(), whole.compute()
    assert got.keys() == want.keys()
    assert {name: pytest.approx(value, rel=1e-12) for name, value in want.items()} == got
    fresh = metric(exact)
    fresh.merge([whole.state()])
    assert fresh.compute() == want


def test_nothing_seen_and_undefined_metrics_are_left_out() -> None:
    assert metric().compute() == {}
    logits, batch = data(1)
    nothing = dataclasses.replace(batch, masks={t: torch.zeros_like(m) for t, m in batch.masks.items()})
    for exact in (True, False):
        empty = metric(exact)
        empty.update(logits, nothing)
        rows = {name: value for name, value in empty.compute().items() if value}
        assert rows == {}
        negatives = metric(exact)
        labels = {t: torch.zeros_like(y) for t, y in batch.labels.items()}
        negatives.update(logits, dataclasses.replace(batch, labels=labels))
        got = negatives.compute()
        assert got["click/logloss"] > 0
        assert not {"click/ne", "click/auc", "click/calibration", "joint/ne"} & got.keys()


def test_extreme_logits_stay_finite() -> None:
    _, batch = data(1)
    signs = torch.where(batch.labels["click"] > 0, -1e4, 1e4)
    for exact in (True, False):
        wrong = metric(exact)
        wrong.update({"click": signs, "buy": signs}, batch)
        got = wrong.compute()
        assert got["click/auc"] == 0.0
        assert all(np.isfinite(list(got.values())))


def test_constant_memory_without_exactness() -> None:
    measured = RankingMetrics(RankingMetrics.Config(exact=False), SCHEMA)
    sizes = set()
    for seed in range(3):
        logits, batch = data(seed)
        measured.update(logits, batch)
        sizes.add(sum(t.numel() for t in (measured.state()["sums"], measured.state()["histogram"])))
        assert measured.state()["rows"] == {}
    assert len(sizes) == 1
