"""Several ranks compute what one process computes on their batches put together, take every decision together, and end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from synthetic import SyntheticReader, recipe, registry
from test_trainer import joined, lines

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError, GemError
from gem_core.plugins import hookimpl
from gem_core.protocols import Callback, ComponentConfig, Table
from gem_core.recipe import Recipe
from gem_core.train import TorchEmbedding, Trainer, train
from gem_core.train.checkpoint import complete
from gem_core.train.ddp import DataParallel
from gem_core.train.strategy import SingleProcess


class UnevenReader(SyntheticReader):
    """Of each round of batches rank r gets the r-th; one process gets the whole round as one batch. `empty`: a batch
    without rows comes with the second round."""

    class Config(SyntheticReader.Config):
        share: int = 1
        empty: bool = False

    def iterate(self, split: str = "train", *, rank: int = 0, world: int = 1, **options: Any) -> Iterator[Batch]:
        if split != "train" or world > 1:
            for n, batch in enumerate(super().iterate(split, rank=rank, world=world, **options)):
                yield nothing(batch) if self.config.empty and split == "train" and (n, rank) == (1, 1) else batch
            return
        waiting: list[Batch] = []
        for batch in super().iterate(split, **options):
            waiting.append(batch)
            if len(waiting) == self.config.share:
                yield joined(waiting)
                waiting = []
        if waiting:
            yield joined(waiting)


def nothing(batch: Batch) -> Batch:
    """The batch without its rows."""
    import dataclasses

    from gem_core.data.batch import Jagged

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(inner) for key, inner in value.items()}
        return Jagged(value.values[:0], value.offsets[:1], value.max_length) if isinstance(value, Jagged) else value[:0]

    return Batch(**{f.name: cut(getattr(batch, f.name)) for f in dataclasses.fields(Batch)})


class OnRank(Callback):
    """Does something after a step, on one rank."""

    class Config(ComponentConfig):
        rank: int = 1
        step: int = 4
        what: str = "SIGTERM"

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_step(self, trainer: Trainer, step: int) -> None:
        if (trainer.strategy.rank, step) == (self.config.rank, self.config.step):
            if self.config.what == "fail":
                raise GemError("this rank has a fault of its own")
            os.kill(os.getpid(), getattr(signal, self.config.what))


class Plugin:
    @staticmethod
    @hookimpl
    def gem_register_reader(register: Any) -> None:
        register("uneven", UnevenReader)

    @staticmethod
    @hookimpl
    def gem_register_callback(register: Any) -> None:
        register("on-rank", OnRank)


def chosen(folder: Path, share: int = 1, strategy: str = "ddp", **sections: Any) -> Recipe:
    """Rounds of `share` batches: 15 batches of 64 rows, so that the last round is not full, without dropout."""
    return recipe(
        folder,
        data={"reader": {"name": "uneven", "share": share, **sections.pop("reader", {})}},
        model={"name": "tiny", "dropout": 0.0},
        optimizer={"dense": {"eps": 1e-4, "lr": 0.01}, "clip_norm": 0.1, "schedule": "constant"},
        trainer={"epochs": 1, "log_every": 3, **sections.pop("trainer", {})},
        parallel={"strategy": strategy},
        **sections,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {**trainer.strategy.state(), **trainer.parts.embedding.state()}


def run(made: Recipe) -> Any:
    """Weights, step and result of a run on this rank."""
    trainer = Trainer(made, registry(Plugin))
    result = trainer.run()
    return {"weights": weights(trainer), "step": trainer.state.step, "result": result}


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (2, 2), (4, 1)])
def test_uneven_ranks_equal_one_process_on_the_joined_batches(tmp_path: Path, world: int, accumulate: int) -> None:
    """15 batches over 2 ranks leave one rank with 7, over 4 one with 3; accumulated, a step may have one batch only."""
    trainer = {"accumulate": accumulate}
    ranks = run_ranks(world, tmp_path / "out", lambda _: run(chosen(tmp_path / "many", trainer=trainer)))
    whole = run(chosen(tmp_path / "one", share=world, strategy="single", trainer=trainer))
    assert [r["step"] for r in ranks] == [whole["step"]] * world
    for name, value in whole["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, rtol=1e-4, atol=2e-5)
        for rank in ranks[1:]:
            assert torch.equal(rank["weights"][name], ranks[0]["weights"][name]), f"{name} drifts apart"
    for kind in ("train", "validation", "test"):
        for a, b in zip(lines(tmp_path / "many", kind), lines(tmp_path / "one", kind), strict=True):
            assert a.keys() == b.keys()
            for name, value in b.items():
                if name != "kind" and "auc_error" not in name:
                    assert a[name] == pytest.approx(value, rel=2e-3, abs=1e-4), (kind, name)
                if name.endswith("/rows"):
                    assert a[name] == value
    assert all(r["result"].test == ranks[0]["result"].test for r in ranks), "every rank knows the same bits"


def test_ranks_repeat_themselves_to_the_bit_and_only_the_first_writes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        run_ranks(
            3, tmp_path / f"out-{name}", lambda _, n=name: run(chosen(tmp_path / n, trackers=["jsonl", "console"]))
        )
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    one, two = (complete(tmp_path / name)[-1] for name in ("a", "b"))
    for part in ("model", "embedding"):
        assert all(torch.equal(t, two.part(part)[n]) for n, t in one.part(part).items())
    said = capfd.readouterr().out
    assert said.count("run step 0") == 2 and "3 ranks, cpu" in said
    assert sum(r["click/rows"] for r in lines(tmp_path / "a", "train")) == 960
    speed = lines(tmp_path / "a", "speed", "speed")
    assert all({"samples_per_s", "wait_share", "mfu"} <= s.keys() for s in speed)


def test_an_empty_batch_is_legal(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path / "out", lambda _: run(chosen(tmp_path / "run", reader={"empty": True})))
    assert [r["step"] for r in ranks] == [8, 8]
    assert sum(r["click/rows"] for r in lines(tmp_path / "run", "train")) == 960 - 64


def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_goes_on(tmp_path: Path) -> None:
    """With another number of workers; the ranks' own positions and generators are in the checkpoint."""
    callbacks = [{"name": "on-rank", "step": 4, "what": "SIGTERM"}]
    run_ranks(2, tmp_path / "whole-out", lambda _: run(chosen(tmp_path / "whole")))
    cut = run_ranks(2, tmp_path / "out", lambda _: run(chosen(tmp_path / "run", callbacks=callbacks)))
    assert [(r["step"], r["result"].status) for r in cut] == [(4, "interrupted")] * 2
    assert "a signal to another rank: saved at step 4" in (tmp_path / "run/speed.jsonl").read_text()
    again = run_ranks(2, tmp_path / "again", lambda _: run(chosen(tmp_path / "run")))
    assert [r["result"].status for r in again] == ["finished"] * 2
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_a_rank_that_fails_ends_the_others_with_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callbacks = [{"name": "on-rank", "step": 2, "what": "fail"}]
    first, second = run_ranks(2, tmp_path / "out", lambda _: run(chosen(tmp_path / "run", callbacks=callbacks)))
    capfd.readouterr()
    assert isinstance(first, GemError) and isinstance(second, GemError)
    assert "this rank has a fault of its own" in str(second)
    assert "rank 0 of 2 lost the others" in str(first) and "its own message says why" in str(first)


def test_a_fault_is_every_rank_s(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A NaN in a batch of rank 1 stops both; each dumps its own batches."""
    errors = run_ranks(2, tmp_path / "out", lambda _: run(chosen(tmp_path / "run", reader={"nan_at": [3]})))
    capfd.readouterr()
    assert all("step 2: the loss is nan" in str(e) for e in errors)
    nan = []
    for rank in (0, 1):
        dump = torch.load(tmp_path / f"run/fault-step-00000002-rank-{rank}.pt", weights_only=True)
        nan.append(bool(dump["batches"][0]["dense"].isnan().any()))
    assert nan == [False, True]


def test_rows_of_any_rank_move_every_copy(tmp_path: Path) -> None:
    """Tables of several widths; rows met on one rank, on both, and none at all on one of them."""
    tables = [Table("a", 50, 4, ("a",)), Table("b", 3, 2, ("b",)), Table("c", 5, 1, ("c",))]
    ids = [{"a": [1, 1, 40], "b": [0, 2, 2], "c": []}, {"a": [1, 7], "b": [], "c": []}]

    def step(embedding: TorchEmbedding, wanted: dict[str, list[int]]) -> None:
        asked = {key: torch.tensor(values, dtype=torch.int64) for key, values in wanted.items()}
        (sum(x.pow(3).sum() for x in embedding.lookup(asked).values())).backward()

    def on(rank: int) -> dict[str, torch.Tensor]:
        strategy = DataParallel(DataParallel.Config(device="cpu"))
        embedding = TorchEmbedding(TorchEmbedding.Config(init_std=1.0), seed=1)
        embedding.setup(tables)
        strategy.setup(torch.nn.Linear(1, 1), embedding)
        step(embedding, ids[rank])
        embedding.step(0.1)
        embedding.step(0.1)  # a step without any look-up changes nothing
        strategy.close()
        return embedding.state()

    one = TorchEmbedding(TorchEmbedding.Config(init_std=1.0), seed=1)
    one.setup(tables)
    for wanted in ids:
        step(one, wanted)
    one.step(0.1)
    states = run_ranks(2, tmp_path, on)
    for name, value in one.state().items():
        assert torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(states[0][name], value)


def test_a_parameter_without_gradient_on_any_rank_keeps_none(tmp_path: Path) -> None:
    def on(rank: int) -> list[bool]:
        strategy = DataParallel(DataParallel.Config(device="cpu"))
        model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ("both", "second", "none")})
        with torch.no_grad():
            model["both"].weight.fill_(rank)
        strategy.setup(model, TorchEmbedding(TorchEmbedding.Config(), seed=0))
        assert not model["both"].weight.detach().any(), "the first rank's parameters are everyone's"
        model["both"].weight.grad = torch.ones(1, 1)
        if rank == 1:
            model["second"].weight.grad = torch.full((1, 1), 2.0)
        norm = float(strategy.clip(1e9).detach())
        assert norm == pytest.approx(8**0.5)
        strategy.close()
        return [layer.weight.grad is not None for layer in model.values()]

    assert run_ranks(2, tmp_path, on) == [[True, True, False]] * 2


def test_ddp_without_torchrun_is_one_process(tmp_path: Path) -> None:
    result = train(chosen(tmp_path / "a"), registry(Plugin))
    single = train(chosen(tmp_path / "b", strategy="single"), registry(Plugin))
    assert result.test == single.test
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"parallel\.plan"):
        DataParallel(DataParallel.Config()).setup(torch.nn.Linear(1, 1), TorchEmbedding(TorchEmbedding.Config(), 0), 1)


def test_one_process_s_strategy_refuses_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"torchrun started 2: .* set parallel\.strategy=ddp"):
        SingleProcess(SingleProcess.Config())
    from gem_core.train import predict

    with pytest.raises(ConfigError, match="gem predict runs in one process"):
        predict(tmp_path, tmp_path / "out.csv")


def test_a_process_without_its_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="process 1 of this machine finds 1 GPUs"):
        DataParallel(DataParallel.Config())


def test_result_file_is_the_first_rank_s(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path / "out", lambda _: run(chosen(tmp_path / "run")))
    assert json.loads((tmp_path / "run/result.json").read_text())["test"] == ranks[1]["result"].test
