"""Losses against loops over rows and pairs, zipper, and both corrections of sampled negatives."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import SCHEMA, make_batch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError
from gem_core.protocols import Output
from gem_core.schema import Objective, Schema
from gem_core.train.loss import BinaryCrossEntropy, FocalLoss, PairwiseLoss
from gem_core.train.supervision import Supervision, assigned_window

LOSSES = {"bce": BinaryCrossEntropy, "focal": FocalLoss, "pairwise": PairwiseLoss}


def make_loss(name: str, schema: Schema = SCHEMA, **options: Any) -> Any:
    kind = LOSSES[name]
    return kind(kind.Config(**options), schema)


def random_batch(seed: int, requests: int = 6, rows_each: int = 4) -> Batch:
    """Labels and masks of `make_batch`, random weights with zeros among them."""
    batch, rng = make_batch(requests, seed, rows_each), torch.Generator().manual_seed(seed)
    weights = {t: (torch.rand(batch.rows, generator=rng) * 3 - 0.5).clamp(min=0) for t in batch.labels}
    return dataclasses.replace(batch, weights=weights)


def random_output(batch: Batch, schema: Schema = SCHEMA) -> Output:
    return Output({head: torch.randn(batch.rows, requires_grad=True) for head in schema.heads()})


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 99), st.integers(0, 4), st.integers(1, 6))
def test_pairwise_equals_a_loop(seed: int, requests: int, rows_each: int) -> None:
    batch = random_batch(seed, requests, rows_each)
    output, loss = random_output(batch), make_loss("pairwise")
    for task, (total, count) in loss(output, batch).items():
        s, y, w = output.logits[task], batch.labels[task], batch.masks[task] * batch.weights[task]
        expected = weight = torch.zeros(())
        for i in range(batch.rows):
            for j in range(batch.rows):
                if batch.request[i] == batch.request[j] and y[i] == 1 and y[j] == 0:
                    expected = expected + w[i] * w[j] * softplus(s[j] - s[i])
                    weight = weight + w[i] * w[j]
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(count, weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss.counts(batch)[task], count)


@pytest.mark.parametrize(("gamma", "alpha"), [(0.0, None), (2.0, None), (1.5, 0.25)])
def test_focal_by_its_definition(gamma: float, alpha: float | None) -> None:
    batch = random_batch(3)
    output = random_output(batch)
    for task, (total, count) in make_loss("focal", gamma=gamma, alpha=alpha)(output, batch).items():
        w = batch.masks[task] * batch.weights[task]
        y = torch.where(w > 0, batch.labels[task], 0.0)
        p = output.logits[task].sigmoid()
        right = torch.where(y == 1, p, 1 - p)
        a = 1.0 if alpha is None else torch.where(y == 1, alpha, 1 - alpha)
        torch.testing.assert_close(total, (-a * (1 - right) ** gamma * right.log() * w).sum())
        torch.testing.assert_close(count, w.sum())


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_in_float64(name: str) -> None:
    loss, batch = make_loss(name), random_batch(5)
    batch = dataclasses.replace(batch, weights={t: w.double() for t, w in batch.weights.items()})
    # float32 by contract: logits are cast, so the check runs on the functions that the losses are made of.
    logit = torch.randn(9, dtype=torch.float64, requires_grad=True)
    label = torch.tensor([0.0, 1.0, 0.0] * 3, dtype=torch.float64)
    if name != "pairwise":
        assert torch.autograd.gradcheck(lambda x: loss.each(x, label), (logit,))
    output = random_output(batch)
    total = sum(s for s, _ in loss(output, batch).values())
    total.backward()
    for task, x in output.logits.items():
        used = batch.masks[task] * batch.weights[task] > 0
        assert x.grad is not None and x.grad.isfinite().all() and not x.grad[~used].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("logit", [-90.0, 0.0, 90.0])
def test_extreme_logits_and_no_labels_stay_finite(name: str, logit: float) -> None:
    batch = random_batch(2)
    for masks in (batch.masks, {t: torch.zeros(batch.rows) for t in batch.masks}):
        there = dataclasses.replace(batch, masks=masks)
        output = Output({t: torch.full((batch.rows,), logit, requires_grad=True) for t in batch.labels})
        sums = make_loss(name)(output, there)
        sum(s for s, _ in sums.values()).backward()
        assert all(s.isfinite() for s, _ in sums.values())
        assert all(x.grad.isfinite().all() for x in output.logits.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_parts_are_the_whole(name: str) -> None:
    """Whole requests in two batches give the sums and counts of one."""
    batch, loss = random_batch(8, 6), make_loss(name)
    output = random_output(batch)
    whole = loss(output, batch)
    parts = []
    for rows, requests in ((slice(0, 8), slice(0, 2)), (slice(8, 24), slice(2, 6))):
        part = dataclasses.replace(
            batch,
            request=batch.request[rows] - requests.start,
            row_id=batch.row_id[rows],
            labels={t: x[rows] for t, x in batch.labels.items()},
            masks={t: x[rows] for t, x in batch.masks.items()},
            weights={t: x[rows] for t, x in batch.weights.items()},
        )
        parts.append(loss(Output({t: x[rows] for t, x in output.logits.items()}), part))
    for task, (total, count) in whole.items():
        torch.testing.assert_close(sum(p[task][0] for p in parts), total, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sum(p[task][1] for p in parts), count, rtol=1e-4, atol=1e-4)


def windowed() -> tuple[Schema, Batch]:
    delayed = Objective(label="bought", windows=["90m", "1d", "7d"], converted_at="at")
    schema = SCHEMA.model_copy(update={"objectives": {"click": Objective(label="clicked"), "buy": delayed}})
    batch, rng = make_batch(30, 1), torch.Generator().manual_seed(0)
    labels = {h: (torch.rand(batch.rows, generator=rng) < 0.4).float() for h in schema.heads()}
    masks = {h: (torch.rand(batch.rows, generator=rng) < 0.8).float() for h in schema.heads()}
    weights = {h: torch.rand(batch.rows, generator=rng) + 0.5 for h in schema.heads()}
    return schema, dataclasses.replace(batch, labels=labels, masks=masks, weights=weights)


def test_each_row_trains_the_head_of_one_window() -> None:
    schema, batch = windowed()
    output, heads = random_output(batch, schema), schema.heads_of("buy")
    window = assigned_window(batch.row_id, 3)
    total, count = make_loss("bce", schema)(output, batch)["buy"]
    expected = weight = torch.zeros(())
    for row, w in enumerate(window.tolist()):
        head = heads[w]
        each = binary_cross_entropy_with_logits(output.logits[head][row], batch.labels[head][row])
        expected = expected + each * batch.masks[head][row] * batch.weights[head][row]
        weight = weight + batch.masks[head][row] * batch.weights[head][row]
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(count, weight)
    total.backward()
    grads = torch.stack([output.logits[h].grad != 0 for h in heads])  # type: ignore[arg-type]
    assert grads.sum(0).max() == 1 and grads.any(1).all()


def test_pairs_are_of_rows_that_train_one_window() -> None:
    schema, batch = windowed()
    output, heads, window = random_output(batch, schema), schema.heads_of("buy"), assigned_window(batch.row_id, 3)
    total, _ = make_loss("pairwise", schema)(output, batch)["buy"]
    expected = torch.zeros(())
    for i in range(batch.rows):
        for j in range(batch.rows):
            head = heads[int(window[i])]
            y, w = batch.labels[head], batch.masks[head] * batch.weights[head]
            if batch.request[i] == batch.request[j] and window[i] == window[j] and y[i] == 1 and y[j] == 0:
                expected = expected + w[i] * w[j] * softplus(output.logits[head][j] - output.logits[head][i])
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_windows_are_dealt_evenly_and_by_the_row_id_alone() -> None:
    ids = torch.cat([torch.arange(30_000), torch.randint(-(2**63), 2**63 - 1, (30_000,))])
    window = assigned_window(ids, 3)
    for part in (window[:30_000], window[30_000:], window[:30_000:3]):
        assert (part.bincount(minlength=3) / len(part) - 1 / 3).abs().max() < 0.02
    order = torch.randperm(len(ids))
    assert torch.equal(assigned_window(ids[order], 3), window[order])
    assert not assigned_window(ids, 1).any()


def test_both_corrections_of_sampled_negatives_agree_in_calibration() -> None:
    """A log of which negatives were kept at rates of 0.1 and 0.5: both fits predict the rates of the whole log."""
    rng = torch.Generator().manual_seed(0)
    n, bins = 400_000, 4
    kind = torch.randint(0, bins, (n,), generator=rng)
    truth = torch.tensor([0.02, 0.05, 0.1, 0.2])
    label = (torch.rand(n, generator=rng) < truth[kind]).float()
    rate = torch.where(torch.rand(n, generator=rng) < 0.5, 0.1, 0.5)
    kept = (label == 1) | (torch.rand(n, generator=rng) < rate)
    kind, label, rate = kind[kept], label[kept], rate[kept]
    batch = dataclasses.replace(
        make_batch(1, 0),
        row_id=torch.arange(len(kind)),
        labels={"click": label},
        masks={"click": torch.ones(len(kind))},
        weights={"click": torch.where(label == 0, 1 / rate, 1.0)},
    )
    fits = []
    for correction in ("weight", "shift"):
        objective = Objective(rate="rate", correction=correction)  # type: ignore[arg-type]
        schema = SCHEMA.model_copy(update={"objectives": {"click": objective}})
        given = dataclasses.replace(batch, rates={"click": rate} if correction == "shift" else {})
        loss, logit = make_loss("bce", schema), torch.zeros(bins, requires_grad=True)
        optimizer = torch.optim.LBFGS([logit], max_iter=50)

        def closure(loss: Any = loss, logit: Any = logit, given: Batch = given, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            total, count = loss(Output({"click": logit[kind]}), given)["click"]
            (total / count).backward()
            return total / count

        optimizer.step(closure)
        fits.append(logit.detach().sigmoid())
    for fit in fits:
        torch.testing.assert_close(fit, truth, rtol=0.06, atol=0)
    torch.testing.assert_close(fits[0], fits[1], rtol=0.06, atol=0)


def test_a_shift_takes_the_weight_of_negatives_back() -> None:
    objective = Objective(rate="rate", correction="shift")
    schema = SCHEMA.model_copy(update={"objectives": {"click": objective}})
    batch = make_batch(5, 0)
    rate = torch.rand(batch.rows) / 2 + 0.1
    weights = {"click": torch.where(batch.labels["click"] == 0, 3 / rate, 3.0)}
    batch = dataclasses.replace(batch, weights=weights, rates={"click": rate})
    target = Supervision(schema).targets(batch)["click"]
    torch.testing.assert_close(target.weight, torch.full((batch.rows,), 3.0))
    logits = Supervision(schema).logits(Output({"click": torch.zeros(batch.rows)}), batch)["click"]
    torch.testing.assert_close(logsigmoid(logits).exp(), 1 / (1 + rate))


@pytest.mark.parametrize("name", LOSSES)
def test_a_missing_head_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r'no logit for task "buy": it gives \[\'click\'\]'):
        make_loss(name)(Output({"click": torch.zeros(24)}), random_batch(0))
