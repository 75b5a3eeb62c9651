"""The training loop: what a step computes, what a run writes, how it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import SyntheticReader, TinyModel, recipe, registry

from gem_core.errors import ConfigError, GemError
from gem_core.plugins import hookimpl
from gem_core.protocols import Callback, ComponentConfig, StopTraining
from gem_core.train import Trainer, build, train
from gem_core.train.measure import measure


def lines(run: Path, kind: str, file: str = "metrics") -> list[dict[str, Any]]:
    return [r for r in map(json.loads, (run / f"{file}.jsonl").read_text().splitlines()) if r["kind"] == kind]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {**trainer.strategy.state(), **trainer.parts.embedding.state()}


class Recorder(Callback):
    """Notes events; stops or raises where it is told to."""

    class Config(ComponentConfig):
        stop_at: int | None = None

    events: list[tuple[str, int]] = []

    def __init__(self, config: Config) -> None:
        self.config = config
        Recorder.events = []

    def on_start(self, trainer: Trainer) -> None:
        self.events.append(("start", trainer.state.step))

    def on_step(self, trainer: Trainer, step: int) -> None:
        self.events.append(("step", step))
        if step == self.config.stop_at:
            raise StopTraining

    def on_evaluate(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("evaluate", step))

    def on_end(self, trainer: Trainer) -> None:
        self.events.append(("end", trainer.state.step))


class Plugin:
    @staticmethod
    @hookimpl
    def gem_register_callback(register: Any) -> None:
        register("recorder", Recorder)

    @staticmethod
    @hookimpl
    def gem_register_reader(register: Any) -> None:
        register("no-splits", TrainOnly)


class TrainOnly(SyntheticReader):
    def splits(self) -> list[str]:
        return ["train"]


def test_a_run_learns_and_writes_what_it_says(tmp_path: Path) -> None:
    result = train(recipe(tmp_path, trainer={"epochs": 3}), registry())
    assert (result.status, result.step, result.exit_code) == ("finished", 45, 0)
    assert result.test["joint/ne"] < 0.95
    assert result.validation["click/auc"] > 0.65
    assert {p.name for p in tmp_path.iterdir()} == {
        "checkpoints",
        "lock",
        "recipe.yaml",
        "result.json",
        "metrics.jsonl",
        "speed.jsonl",
    }
    train_lines = lines(tmp_path, "train")
    assert [r["step"] for r in train_lines] == [4, 8, 12, 15, 16, 20, 24, 28, 30, 32, 36, 40, 44, 45]
    assert {"epoch", "click/loss", "buy/loss", "lr", "grad_norm", "click/auc", "joint/ne"} <= train_lines[0].keys()
    assert train_lines[0]["click/loss"] == pytest.approx(train_lines[0]["click/logloss"], rel=1e-6)
    assert train_lines[-1]["joint/ne"] < train_lines[0]["joint/ne"]
    assert not [name for name in train_lines[0] if name.count("/") > 1]
    speed = lines(tmp_path, "speed", "speed")
    assert [r["step"] for r in speed] == [r["step"] for r in train_lines]
    expected = {"progress", "samples_per_s", "events_per_s", "fill", "gflops_per_step", "mfu", "rss_gib", "wait_share"}
    assert expected <= speed[0].keys()
    assert speed[0]["fill"] == 1.0
    assert speed[-1]["progress"] == 1.0
    assert [r["step"] for r in lines(tmp_path, "validation")] == [15, 30, 45]
    assert lines(tmp_path, "test")[0]["joint/ne"] == result.test["joint/ne"]
    assert json.loads((tmp_path / "result.json").read_text())["test"] == result.test


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(recipe(tmp_path / name, trainer={"deterministic": True}), registry())
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert not torch.are_deterministic_algorithms_enabled()
    other = train(recipe(tmp_path / "c", seed=4), registry())
    assert lines(tmp_path / "c", "test")[0]["joint/ne"] == other.test["joint/ne"]
    assert (tmp_path / "a/metrics.jsonl").read_bytes() != (tmp_path / "c/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_steps_equal_large_batches(tmp_path: Path, accumulate: int) -> None:
    small, large = (
        Trainer(
            recipe(
                tmp_path / name,
                data={"reader": "concatenating", "batch_rows": rows},
                model={"name": "tiny", "dropout": 0.0},
                trainer={"accumulate": parts, "epochs": 1},
                optimizer={"clip_norm": 0.1, "dense": {"eps": 1e-4}},
                trackers=[],
            ),
            registry(Plugin, Concatenating),
        )
        for name, rows, parts in (("small", 32, accumulate), ("large", 32 * accumulate, 1))
    )
    for trainer in (small, large):
        trainer.run()
    assert small.state.step == large.state.step > 5
    for name, value in weights(small).items():
        torch.testing.assert_close(value, weights(large)[name], rtol=1e-4, atol=1e-5)


def test_task_weights_scale_a_task(tmp_path: Path) -> None:
    parts = [build(recipe(tmp_path, task_weights=w), registry()) for w in ({}, {"buy": 0.0})]
    assert parts[0].task_weights == {"click": 1.0, "buy": 1.0}
    assert parts[1].task_weights == {"click": 1.0, "buy": 0.0}
    with pytest.raises(ConfigError, match='no task "by"; did you mean "buy"'):
        build(recipe(tmp_path, task_weights={"by": 1.0}), registry())


def test_dense_parameters_and_tables_follow_from_the_seed(tmp_path: Path) -> None:
    one, two, other = (build(recipe(tmp_path, seed=seed), registry()) for seed in (1, 1, 2))
    for name, value in {**one.strategy.state(), **one.embedding.state()}.items():
        assert torch.equal(value, {**two.strategy.state(), **two.embedding.state()}[name])
    assert not torch.equal(one.model.hidden.weight, other.model.hidden.weight)


def test_bf16_trains(tmp_path: Path) -> None:
    result = train(recipe(tmp_path, precision="bf16", trainer={"epochs": 1}), registry())
    assert 0.5 < result.test["joint/ne"] < 1.1


def test_max_steps_and_its_schedule(tmp_path: Path) -> None:
    result = train(recipe(tmp_path, trainer={"epochs": 5, "max_steps": 7}), registry())
    assert (result.status, result.step, result.best_step) == ("finished", 7, 7)
    assert [r["step"] for r in lines(tmp_path, "train")] == [4, 7]
    assert lines(tmp_path, "train")[-1]["lr"] == pytest.approx(0.01 * 0.05)


def test_evaluations_checkpoints_and_callbacks_by_steps(tmp_path: Path) -> None:
    chosen = recipe(
        tmp_path,
        trainer={"epochs": 1, "evaluate_every": 6, "checkpoint_every": 4, "keep_checkpoints": 9},
        callbacks=["recorder"],
    )
    result = train(chosen, registry(Plugin))
    steps = sorted(int(p.name[-8:]) for p in (tmp_path / "checkpoints").iterdir())
    evaluated = [r["step"] for r in lines(tmp_path, "validation")]
    assert evaluated == [6, 12, 15]
    assert set(steps) >= {4, 8, 12, 15, result.best_step}
    assert [e for e in Recorder.events if e[0] == "evaluate"] == [("evaluate", step) for step in evaluated]
    assert [e[1] for e in Recorder.events if e[0] == "step"] == list(range(1, 16))
    assert Recorder.events[0] == ("start", 0)
    assert Recorder.events[-1] == ("end", 15)


def test_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    callbacks = [{"name": "recorder", "stop_at": 5}]
    result = train(recipe(tmp_path, callbacks=callbacks), registry(Plugin))
    assert (result.status, result.step, result.exit_code) == ("stopped", 5, 0)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000005"
    assert result.test


def test_early_stop_keeps_and_tests_the_best(tmp_path: Path) -> None:
    chosen = recipe(
        tmp_path,
        trainer={
            "epochs": 20,
            "evaluate_every": 5,
            "keep_checkpoints": 1,
            "early_stop": {"patience": 2, "metric": "buy/ne"},
        },
        optimizer={"sparse_lr": 2.0, "dense": {"lr": 0.05}, "schedule": "constant"},
    )
    result = train(chosen, registry())
    assert result.status == "stopped"
    curve = {r["step"]: r["buy/ne"] for r in lines(tmp_path, "validation")}
    assert result.best_step == min(curve, key=curve.__getitem__)
    assert max(curve) == result.step == result.best_step + 10
    assert result.validation["buy/ne"] == curve[result.best_step]
    assert result.checkpoint.name == f"step-{result.best_step:08d}"
    assert sorted(int(p.name[-8:]) for p in (tmp_path / "checkpoints").iterdir()) == [result.best_step, result.step]
    again = train(chosen, registry())
    assert (again.status, again.step, again.test) == ("stopped", result.step, result.test)


def test_early_stop_on_an_unknown_metric_names_the_known(tmp_path: Path) -> None:
    trainer = {"early_stop": {"metric": "click/nee"}}
    with pytest.raises(ConfigError, match=r'"click/nee": not a validation metric \(buy/auc, .*joint/ne'):
        train(recipe(tmp_path, trainer=trainer), registry())


def test_a_reader_with_training_rows_only(tmp_path: Path) -> None:
    result = train(recipe(tmp_path, data={"reader": "no-splits"}), registry(Plugin))
    assert (result.validation, result.test, result.best_step) == ({}, {}, None)
    assert result.checkpoint.name == "step-00000030"
    with pytest.raises(ConfigError, match='the reader has no split "test"'):
        measure(build(recipe(tmp_path, data={"reader": "no-splits"}), registry(Plugin)), "test")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loss_that_is_not_finite_stops_with_place_and_dump(tmp_path: Path, workers: int) -> None:
    reader = {"name": "synthetic", "nan_at": [5]}
    with pytest.raises(GemError, match="step 6: the loss is nan") as caught:
        train(recipe(tmp_path, data={"reader": reader, "workers": workers}), registry())
    assert '"batch": 6' in str(caught.value)
    dump = torch.load(tmp_path / "fault-step-00000006.pt", weights_only=True)
    assert dump["batches"][0]["dense"].isnan().any()
    assert set(dump["batches"][0]["events"]["click"]["ad"]) == {"values", "offsets", "max_length"}


def test_faulty_steps_may_be_skipped_up_to_a_number(tmp_path: Path) -> None:
    reader = {"name": "synthetic", "nan_at": [2, 5]}
    trainer = {"nan_policy": "skip", "max_skipped": 2, "epochs": 1}
    result = train(recipe(tmp_path / "a", data={"reader": reader}, trainer=trainer), registry())
    assert result.status == "finished"
    last = lines(tmp_path / "a", "train")[-1]
    assert last["skipped"] == 2
    assert sum(r["click/rows"] for r in lines(tmp_path / "a", "train")) == 13 * 64
    notes = [r["text"] for r in lines(tmp_path / "a", "text", "speed") if r["name"] == "skipped"]
    assert [note.split(":")[0] for note in notes] == ["step 3", "step 6"]
    with pytest.raises(GemError, match=r"More than trainer\.max_skipped = 1"):
        train(recipe(tmp_path / "b", data={"reader": reader}, trainer=trainer | {"max_skipped": 1}), registry())


def test_an_exploding_loss_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(GemError, match=r"above explode_factor 1\.01 times its running mean"):
        train(recipe(tmp_path, trainer={"explode_factor": 1.01}), registry())


def test_resume_words(tmp_path: Path) -> None:
    short = recipe(tmp_path, trainer={"max_steps": 5})
    with pytest.raises(ConfigError, match=r"resume=must: .* has no complete checkpoint"):
        train(short, registry(), resume="must")
    train(short, registry())
    assert train(short, registry(), resume="must").step == 5
    assert len(lines(tmp_path, "train")) == 2
    assert len(lines(tmp_path, "test")) == 1
    changed = recipe(tmp_path, trainer={"max_steps": 3}, seed=11)
    with pytest.raises(ConfigError, match="seed: 3 in the checkpoint, 11 now"):
        train(changed, registry())
    assert train(changed, registry(), resume="never").step == 3
    assert [r["step"] for r in lines(tmp_path, "train")] == [3]


def test_threads_are_set(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        Trainer(recipe(tmp_path, trainer={"threads": 2}), registry())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_every_parameter_gets_a_gradient(tmp_path: Path) -> None:
    parts = build(recipe(tmp_path), registry())
    batch, _ = next(parts.batches("train"))
    sums = {task: total for task, (total, _) in parts.loss(parts.module(batch), batch).items()}
    parts.strategy.backward(sums, parts.loss.counts(batch), parts.task_weights)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parts.model.parameters())
    assert isinstance(parts.model, TinyModel)


class ConcatenatingReader(SyntheticReader):
    """Batches of 32 rows made by seed, several of them in one batch where more rows are asked for."""

    def iterate(self, split: str = "train", *, batch_rows: int = 32, **options: Any) -> Any:
        waiting: list[Any] = []
        for batch in super().iterate(split, batch_rows=32, **options):
            waiting.append(batch)
            if len(waiting) == batch_rows // 32:
                yield joined(waiting)
                waiting = []
        if waiting:
            yield joined(waiting)


def joined(batches: list[Any]) -> Any:
    """Batches one behind the other."""
    import dataclasses

    from gem_core.data.batch import Batch, Jagged

    def cat(name: str, values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: cat(key, [v[key] for v in values]) for key in values[0]}
        if isinstance(values[0], Jagged):
            lengths = torch.cat([v.lengths() for v in values])
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            return Jagged(torch.cat([v.values for v in values]), offsets, values[0].max_length)
        if name == "request":
            starts = [sum(b.requests for b in batches[:i]) for i in range(len(batches))]
            return torch.cat([v + start for v, start in zip(values, starts, strict=True)])
        return torch.cat(values)

    return Batch(**{f.name: cat(f.name, [getattr(b, f.name) for b in batches]) for f in dataclasses.fields(Batch)})


class Concatenating:
    @staticmethod
    @hookimpl
    def gem_register_reader(register: Any) -> None:
        register("concatenating", ConcatenatingReader)


@pytest.mark.parametrize(("conditioning", "said"), [("request", True), ("full", False)])
def test_a_run_says_where_the_schema_overrides_the_recipe(tmp_path: Path, conditioning: str, said: bool) -> None:
    """Without request-level features, Kunlun's weights cannot be made once per request."""
    rows = {"user": [1, 2, 3], "time": [1, 2, 3], "price": [0.0, 1.0, 2.0], "clicked": [0, 1, 0]}
    schema = {"user": "user", "time": "time", "dense": ["price"], "objectives": {"click": {"label": "clicked"}}}
    chosen = recipe(
        tmp_path,
        data={"reader": {"name": "memory", "rows": rows}, "schema": schema, "batch_rows": 3},
        model={"name": "kunlun", "dim": 8, "layers": 1, "conditioning": conditioning},
        trainer={"epochs": 1},
    )
    train(chosen, registry())
    notes = [line["text"] for line in lines(tmp_path, "text", "speed") if line["name"] == "model"]
    assert notes == ["conditioning: full, as the schema has no request-level feature"] * said
