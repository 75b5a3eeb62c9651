import builtins
import dataclasses
import re
from typing import Any

import lightgbm
import numpy as np
import pytest
from sklearn.metrics import log_loss

from gem_core.data.completejourney import CompleteJourneyReader
from gem_core.data.rows import EncodedRows
from gem_core.demo.trees import TreeFeatures, TreeOptions, entropy, fit_trees
from gem_core.errors import ConfigError

SMALL = TreeOptions(learning_rate=0.3, leaves=7, trees=8, patience=3, threads=1)


def silent(task: str, trees: int, ne: float) -> None:
    pass


def test_the_matrix_holds_each_feature_of_each_row(reader: CompleteJourneyReader) -> None:
    features, rows = TreeFeatures(reader.schema, ("product", "coupon")), reader.load("test")
    matrix = features.matrix(rows)
    names = [*features.dense, *features.categories]
    assert matrix.shape == (rows.rows, len(names)) and len(set(names)) == len(names)
    assert not {"product", "coupon", "coupon_types"} & set(names)  # free ids, and a multi-valued feature
    request = np.repeat(np.arange(rows.requests), np.diff(rows.offsets))
    at = {name: matrix[:, place] for place, name in enumerate(names)}
    place = reader.schema.names("dense", "request").index("household_count")
    np.testing.assert_array_equal(at["household_count"], rows.request_dense[request, place])
    place = reader.schema.names("dense", "row").index("product_count")
    np.testing.assert_array_equal(at["product_count"], rows.dense[:, place])
    np.testing.assert_array_equal(at["type"], rows.ids.of("type"))
    np.testing.assert_array_equal(at["store"], rows.request_ids.of("store")[request])
    np.testing.assert_array_equal(at["surface"], rows.surface)


def test_trees_are_chosen_on_validation_and_reproducible(reader: CompleteJourneyReader) -> None:
    features = TreeFeatures(reader.schema, ("product", "coupon"))
    train, validation = reader.load("train"), reader.load("validation")
    seen: list[tuple[str, int, float]] = []
    fitted = fit_trees(features, train, validation, SMALL, lambda *progress: seen.append(progress))
    assert list(fitted) == list(reader.schema.objectives)
    purchase = fitted["purchase"]
    assert purchase.best == int(np.argmin(purchase.curve)) + 1 <= len(purchase.curve) <= SMALL.trees
    assert [ne for task, _, ne in seen if task == "purchase"] == purchase.curve
    assert [n for task, n, _ in seen if task == "purchase"] == list(range(1, len(purchase.curve) + 1))
    matrix = features.matrix(validation)
    counted = validation.masks["purchase"] > 0
    label, weight = validation.labels["purchase"][counted], validation.weights["purchase"][counted]
    probability = 1 / (1 + np.exp(-purchase.logits(matrix)[counted]))
    loss = log_loss(label, probability, sample_weight=weight)
    assert min(purchase.curve) == pytest.approx(loss / entropy(label, weight), rel=1e-5)
    again = fit_trees(features, train, validation, SMALL, silent)["purchase"]
    np.testing.assert_array_equal(again.logits(matrix), purchase.logits(matrix))


def _without_positives(rows: EncodedRows, task: str) -> EncodedRows:
    return dataclasses.replace(rows, labels={**rows.labels, task: np.zeros_like(rows.labels[task])})


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_objective_of_one_class_gets_its_base_rate(reader: CompleteJourneyReader, split: str) -> None:
    features = TreeFeatures(reader.schema)
    rows = {name: reader.load(name) for name in ("train", "validation")}
    rows[split] = _without_positives(rows[split], "purchase")
    ensemble = fit_trees(features, rows["train"], rows["validation"], SMALL, silent)["purchase"]
    assert ensemble.booster is None and ensemble.curve == []
    logits = ensemble.logits(np.zeros((3, 1), np.float32))
    train = rows["train"]
    weight = train.weights["purchase"] * (train.masks["purchase"] > 0)
    positive = float((np.nan_to_num(train.labels["purchase"]) * weight).sum())
    rate = (positive + 0.5) / (float(weight.sum()) + 1)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), rate, rtol=1e-6)


def test_entropy_is_the_loss_of_the_base_rate() -> None:
    label, weight = np.array([0, 0, 1, 1], np.float32), np.array([1, 5, 2, 2], np.float32)
    expected = log_loss(label, np.full(4, 0.4), sample_weight=weight)
    assert entropy(label, weight) == pytest.approx(expected)


def test_a_missing_lightgbm_says_what_to_install(
    reader: CompleteJourneyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "lightgbm":
            raise ImportError(name)
        return real(name, *args, **options)

    assert lightgbm.__version__
    monkeypatch.setattr(builtins, "__import__", without)
    rows = reader.load("test")
    with pytest.raises(ConfigError, match=re.escape('pip install "gem-core[demo]"')):
        fit_trees(TreeFeatures(reader.schema), rows, rows, SMALL, silent)
