"""Loss, strategy, precision, optimiser, schedule: each alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from synthetic import SCHEMA, make_batch, recipe, registry
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core import ops
from gem_core.errors import ConfigError, DataError
from gem_core.ops.dispatch import chosen
from gem_core.plugins import Register, hookimpl
from gem_core.protocols import Output
from gem_core.recipe import Dense, Optimizer
from gem_core.train import TorchEmbedding
from gem_core.train.build import build
from gem_core.train.loss import BinaryCrossEntropy
from gem_core.train.optimizer import DenseOptimizer, lr_factor
from gem_core.train.precision import BFloat16, Float32, apply
from gem_core.train.strategy import SingleProcess

CPU = SingleProcess.Config(device="cpu")


def test_loss_counts_only_labelled_rows_by_their_weight() -> None:
    batch = make_batch(4, seed=1)
    batch = dataclasses.replace(batch, weights={"click": torch.rand(16), "buy": torch.rand(16)})
    loss = BinaryCrossEntropy(BinaryCrossEntropy.Config(), SCHEMA)
    logits = {task: torch.randn(16, requires_grad=True) for task in ("click", "buy")}
    got = loss(Output(logits), batch)
    for task, (total, count) in got.items():
        kept = batch.masks[task] == 1
        each = binary_cross_entropy_with_logits(logits[task][kept], batch.labels[task][kept], reduction="none")
        torch.testing.assert_close(total, (each * batch.weights[task][kept]).sum())
        torch.testing.assert_close(count, batch.weights[task][kept].sum())
        torch.testing.assert_close(count, loss.counts(batch)[task])
    got["buy"][0].backward()
    grad = logits["buy"].grad
    assert grad is not None
    assert grad.isfinite().all()
    assert (grad[batch.masks["buy"] == 0] == 0).all()


def test_loss_names_the_task_without_a_logit() -> None:
    loss = BinaryCrossEntropy(BinaryCrossEntropy.Config(), SCHEMA)
    with pytest.raises(ConfigError, match='no logit for task "buy"'):
        loss(Output({"click": torch.zeros(4)}), make_batch(1, seed=0))


def test_strategy_divides_by_the_counts_and_weighs_tasks() -> None:
    model = nn.Linear(1, 1, bias=False)
    strategy = SingleProcess(CPU)
    strategy.setup(model, TorchEmbedding(TorchEmbedding.Config(), seed=0))
    total = model.weight.sum()
    sums = {"a": 6 * total, "b": 8 * total, "empty": 0 * total}
    counts = strategy.sum_counts({"a": torch.tensor(2.0), "b": torch.tensor(0.5), "empty": torch.tensor(0.0)})
    strategy.backward(sums, counts, {"a": 1.0, "b": 0.25, "empty": 1.0})
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(6 / 2 + 0.25 * 8 / 0.5)
    assert strategy.clip(1.0).item() == pytest.approx(7)
    assert model.weight.grad.item() == pytest.approx(1, abs=1e-5)
    assert strategy.agree_done(True)
    assert not strategy.agree_done(False)
    assert strategy.gather("x") == ["x"]


def test_strategy_state_round_trip_and_its_errors() -> None:
    one, two = SingleProcess(CPU), SingleProcess(CPU)
    embedding = TorchEmbedding(TorchEmbedding.Config(), seed=0)
    one.setup(nn.Linear(2, 3), embedding)
    two.setup(nn.Linear(2, 3), embedding)
    two.load(one.state())
    assert all(torch.equal(value, two.state()[name]) for name, value in one.state().items())
    with pytest.raises(DataError, match="not this model's"):
        two.load({"weight": torch.zeros(3, 2)})
    with pytest.raises(ConfigError, match=r"parallel\.plan"):
        two.setup(nn.Linear(1, 1), embedding, plan=object())


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no GPU"):
        SingleProcess(SingleProcess.Config(device="cuda"))
    assert SingleProcess(SingleProcess.Config()).device == torch.device("cpu")


def test_precisions() -> None:
    model, x, cpu = nn.Linear(4, 4), torch.randn(2, 4), torch.device("cpu")
    for cls, dtype in ((Float32, torch.float32), (BFloat16, torch.bfloat16)):
        precision = cls(cls.Config())
        assert apply(precision, model) is model
        assert type(model) is nn.Linear
        with precision.autocast(cpu):
            assert model(x).dtype == dtype
        packed = precision.pack(model.weight)
        assert [t.dtype for t in packed] == [dtype]
        torch.testing.assert_close(precision.unpack(packed, model.weight), model.weight, rtol=1e-2, atol=1e-2)


class Halved(Float32):
    """Half of every linear map, and the reference for GDPA."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return super().linear(x, w, b) / 2

    def op_variant(self, op: str) -> str | None:
        return "reference" if op == "gdpa" else None


class Halves:
    """A plugin with that precision."""

    @staticmethod
    @hookimpl
    def gem_register_precision(register: Register) -> None:
        register("halved", Halved)


def test_a_precision_computes_the_linear_maps_and_chooses_backends(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)), torch.randn(2, 4)
    names, before = dict(model.named_parameters()), model[0](x)
    apply(Halved(Halved.Config()), model)
    torch.testing.assert_close(model[0](x), before / 2)
    assert dict(model.named_parameters()).keys() == names.keys()
    assert all(p is names[name] for name, p in model.named_parameters())
    known = registry()
    known.register_plugin(Halves, "halves")
    try:
        for given, gdpa, seed in (
            ({}, "reference", ""),
            ({"gdpa": "ragged"}, "ragged", ""),
            ({"all": "ragged"}, "ragged", "ragged"),
        ):
            build(recipe(tmp_path, precision="halved", ops=given), known)
            assert (chosen("gdpa"), chosen("seed_attention")) == (gdpa, seed)
    finally:
        ops.set_backends({})


def test_adamw_equals_its_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    options = Dense(lr=0.1, weight_decay=0.3)
    optimizer = DenseOptimizer(model.named_parameters(), options)
    expected = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step, factor in enumerate((0.5, 1.0, 0.2), start=1):
        model(torch.randn(5, 3)).square().sum().backward()
        grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step(factor)
        for name, p in expected.items():
            lr = options.lr * factor
            p *= 1 - lr * (options.weight_decay if p.ndim > 1 else 0.0)
            first[name] = 0.9 * first[name] + 0.1 * grads[name]
            second[name] = 0.999 * second[name] + 0.001 * grads[name] ** 2
            p -= lr * (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.999**step)).sqrt() + options.eps)
    for name, value in model.named_parameters():
        assert value.grad is None
        torch.testing.assert_close(value.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_optimizer_state_is_by_name_and_goes_on_bit_for_bit() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(3, 2))
    ours, other = (DenseOptimizer(m.named_parameters(), Dense()) for m in models)
    x = torch.randn(4, 3)
    models[0](x).sum().backward()
    ours.step(1.0)
    models[1].load_state_dict(models[0].state_dict())
    other.load(ours.state())
    assert set(ours.state()) == {f"{n}.{k}" for n in ("weight", "bias") for k in ("exp_avg", "exp_avg_sq", "step")}
    for model, optimizer in zip(models, (ours, other), strict=True):
        model(x).square().sum().backward()
        optimizer.step(1.0)
    assert torch.equal(models[0].weight, models[1].weight)
    with pytest.raises(DataError, match='"gone", which is no trainable parameter'):
        other.load({"gone.step": torch.zeros(())})


def test_a_model_without_dense_parameters_can_step() -> None:
    optimizer = DenseOptimizer([], Dense())
    optimizer.step(1.0)
    assert optimizer.state() == {}


def test_a_parameter_without_gradient_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = DenseOptimizer(model.named_parameters(), Dense(weight_decay=0.5))
    before = model.weight.detach().clone()
    model.bias.grad = torch.ones(2)
    optimizer.step(1.0)
    assert torch.equal(model.weight, before)


def test_schedules() -> None:
    def curve(schedule: str, warmup: int = 4, total: int = 24) -> list[float]:
        options = Optimizer.model_validate({"warmup_steps": warmup, "schedule": schedule, "final_lr": 0.1})
        return [lr_factor(options, step, total) for step in range(total + 2)]

    for schedule in ("constant", "cosine", "linear"):
        assert curve(schedule)[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
        assert curve(schedule)[4] == pytest.approx(1.0)
    assert set(curve("constant")[4:]) == {1.0}
    assert curve("linear")[23:] == pytest.approx([0.1] * 3)
    assert curve("cosine")[23:] == pytest.approx([0.1] * 3)
    assert curve("linear", 0, 11)[5] == pytest.approx(0.55)
    assert curve("cosine", 0, 11)[2] == pytest.approx(1 - 0.9 * (1 - math.cos(math.pi * 0.2)) / 2)
    assert curve("cosine", 4, 3)[2] < 1  # a run that ends within its warm-up
