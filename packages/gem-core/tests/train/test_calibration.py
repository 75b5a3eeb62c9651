"""Calibration maps: what they recover, keep and leave alone, and that a run stores and uses them."""

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import fitted_schema, recipe, registry

from gem_core.errors import ConfigError
from gem_core.recipe import Calibration
from gem_core.train import evaluate, predict, restore, train
from gem_core.train.calibration import Calibrator

METHODS = ("temperature", "platt", "isotonic")


def make(method: str, per_surface: bool = False) -> Calibrator:
    return Calibrator(Calibration(method=method, per_surface=per_surface), fitted_schema())  # type: ignore[arg-type]


def rows(n: int, slope: float, bias: float, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Logits, labels drawn from slope * logit + bias, weights, surfaces."""
    rng = torch.Generator().manual_seed(seed)
    logit = torch.randn(n, generator=rng) * 1.5
    label = (torch.rand(n, generator=rng) < (slope * logit + bias).sigmoid()).float()
    return logit, label, torch.ones(n), torch.randint(0, 2, (n,), generator=rng)


@pytest.mark.parametrize(("method", "bias"), [("temperature", 0.0), ("platt", -1.0), ("isotonic", -1.0)])
def test_maps_recover_the_truth(method: str, bias: float) -> None:
    logit, label, weight, surface = rows(100_000, 0.6, bias)
    calibrator = make(method)
    calibrator.fit("click", logit, label, weight, surface)
    z = torch.linspace(-2, 2, 41)
    out = calibrator({"click": z, "other": z}, torch.zeros(41, dtype=torch.int64))
    torch.testing.assert_close(out["click"], 0.6 * z + bias, rtol=0, atol=0.05 if method != "isotonic" else 0.3)
    assert out["other"] is z


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from(METHODS), st.integers(0, 30), st.integers(0, 99))
def test_maps_never_reorder_rows(method: str, n: int, seed: int) -> None:
    """Whatever the rows: none, one class, some of weight 0."""
    logit, label, weight, surface = rows(n, -1.0, 0.0, seed)
    weight = torch.where(torch.arange(n) % 3 == 0, 0.0, weight)
    calibrator = make(method)
    calibrator.fit("click", logit, label, weight, surface)
    z = torch.linspace(-9, 9, 101)
    out = calibrator({"click": z}, torch.zeros(101, dtype=torch.int64))["click"]
    assert out.isfinite().all() and (out.diff() >= -1e-5).all()
    if not (weight > 0).any():
        torch.testing.assert_close(out, z)


@pytest.mark.parametrize("method", METHODS)
def test_each_surface_has_its_own_map(method: str) -> None:
    logit, label, weight, surface = rows(40_000, 1.0, 0.0)
    scaled = torch.where(surface == 1, 2 * logit, logit)
    calibrator = make(method, per_surface=True)
    calibrator.fit("click", scaled, label, weight, surface)
    calibrated = calibrator({"click": scaled}, surface)["click"]
    assert (calibrated - logit).abs().mean() < 0.1


def test_weights_count() -> None:
    logit, label, weight, surface = rows(20_000, 1.0, 0.0)
    negatives = label == 0
    for method in ("platt", "isotonic"):
        calibrator = make(method)
        calibrator.fit("click", logit, label, torch.where(negatives, 5.0, weight), surface)
        p = calibrator({"click": logit}, surface)["click"].sigmoid()
        expected = label.sum() / (label.sum() + 5 * negatives.sum())
        w = torch.where(negatives, 5.0, 1.0)
        assert ((p * w).sum() / w.sum() / expected - 1).abs() < 0.02


@pytest.mark.parametrize("options", [{"method": "isotonic", "per_surface": True}, {}], ids=str)
def test_a_run_stores_its_calibration_and_uses_it(tmp_path: Path, options: dict[str, Any]) -> None:
    """Pairwise losses leave logits without a level; calibrated, their mean is that of the labels."""
    run = train(recipe(tmp_path / "run", loss="pairwise", calibration=options, trainer={"epochs": 1}), registry())
    assert run.validation["click/calibration"] == pytest.approx(1, abs=0.05)
    assert evaluate(run.folder, registry=registry()) == run.test
    assert evaluate(run.folder, "validation", registry=registry()) == run.validation
    raw = evaluate(run.folder, "validation", ["calibration=null"], registry=registry())
    assert raw["click/ne"] > run.validation["click/ne"]
    predict(run.folder, tmp_path / "out.parquet", registry=registry())
    parts = restore(run.folder, registry())
    with torch.no_grad():
        batches = [(b, parts.module(b).logits) for b, _ in parts.batches("test")]
    assert parts.calibrator is not None
    expected = torch.cat([parts.calibrator(z, b.surface)["click"].sigmoid() for b, z in batches])
    found = torch.tensor(pyarrow.parquet.read_table(tmp_path / "out.parquet")["click"].to_pylist())
    torch.testing.assert_close(found, expected)


def test_calibration_needs_a_validation_split(tmp_path: Path) -> None:
    given = recipe(
        tmp_path, calibration={}, data={"reader": {"name": "synthetic", "rows": {"train": 64}}, "workers": 0}
    )
    with pytest.raises(ConfigError, match="fitted on the validation split, which the reader does not have"):
        train(given, registry())
