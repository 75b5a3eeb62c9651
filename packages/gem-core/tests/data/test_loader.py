"""Batches in an order that depends on nothing but seed and epoch; exact positions; each row exactly once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_log import PROPERTY
from test_encode import assert_same

from gem_core.data.batch import Batch
from gem_core.data.loader import InOrder, Loader, _Packed
from gem_core.data.readers import MemoryReader
from gem_core.errors import ConfigError, DataError, GemError
from gem_core.schema import Schema

SPEC = {
    "user": "u",
    "time": "t",
    "row_id": "id",
    "dense": {"x": {}},
    "sparse": {"ad": {"hash": 50}, "tags": {"multi": True, "hash": 9}},
    "events": {"click": {"max_length": 4, "fields": {"ad": {}}}},
    "objectives": {"y": {}},
}


def reader(sizes: Sequence[int], seed: int = 0, **options: Any) -> MemoryReader:
    """A log whose requests have so many rows each."""
    random = np.random.default_rng(7)
    n = sum(sizes)
    request = np.repeat(np.arange(len(sizes)), sizes)
    rows = pa.table(
        {
            "u": request % 5,
            "t": request + 10,
            "id": np.arange(n) + 1000,
            "x": random.normal(size=n),
            "ad": random.integers(0, 100, n),
            "tags": pa.array([list(range(i % 3)) for i in range(n)], pa.list_(pa.int64())),
            "y": np.arange(n) % 2,
        }
    )
    clicks = pa.table(
        {"u": random.integers(0, 5, 60), "t": random.integers(0, 60, 60), "ad": random.integers(0, 100, 60)}
    )
    config = MemoryReader.Config(rows=rows, test=rows, events={"click": clicks})
    return MemoryReader(config, Schema.parse(SPEC), seed=seed)


SIZES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
LOG = reader(SIZES)


def taken(loader: Loader) -> list[tuple[Batch, dict[str, Any]]]:
    with closing(iter(loader)) as batches:  # type: ignore[type-var]
        return list(batches)


def assert_equal(found: list[tuple[Batch, dict[str, Any]]], expected: list[tuple[Batch, dict[str, Any]]]) -> None:
    assert [s for _, s in found] == [s for _, s in expected]
    for (a, _), (b, _) in zip(found, expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("split", ["train", "test"])
def test_workers_change_nothing(workers: int, split: str) -> None:
    alone = taken(Loader(LOG, split, batch_rows=10))
    assert_equal(taken(Loader(LOG, split, batch_rows=10, workers=workers)), alone)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_resume_after_any_batch(workers: int, world: int) -> None:
    """Also with another number of workers than the position was saved with."""
    for rank in range(world):
        options: dict[str, Any] = {"batch_rows": 12, "rank": rank, "world": world}
        whole = taken(Loader(LOG, "train", **options, state={"epoch": 2}))
        assert len(whole) > 1
        for i, (_, state) in enumerate(whole):
            rest = taken(Loader(LOG, "train", **options, state=state, workers=workers if i == 1 else 0))
            assert_equal(rest, whole[i + 1 :])


@PROPERTY
@given(
    st.lists(st.integers(1, 6), max_size=12),
    st.integers(1, 15),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from(["train", "test"]),
)
def test_every_row_exactly_once(
    sizes: list[int], batch_rows: int, world: int, workers: int, epoch: int, split: str
) -> None:
    if not sizes:
        sizes = [1]
    log = reader(sizes)
    ids: list[int] = []
    for rank in range(world):
        for worker in range(workers):
            place: dict[str, Any] = {"rank": rank, "world": world, "worker": worker, "workers": workers}
            for batch in log.iterate(split, **place, state={"epoch": epoch}, batch_rows=batch_rows):
                assert batch.rows <= max(batch_rows, max(sizes)) and batch.rows > 0
                ids += batch.row_id.tolist()
    assert sorted(ids) == list(range(1000, 1000 + sum(sizes)))


@PROPERTY
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_a_position_can_be_taken_up_by_another_number_of_ranks(before: int, after: int, steps: int) -> None:
    ids: list[int] = []
    state: dict[str, Any] = {"epoch": 1}
    for rank in range(before):
        run = iter(Loader(LOG, "train", batch_rows=7, rank=rank, world=before, state={"epoch": 1}))
        for _ in range(steps):
            found = next(run, None)
            if found is not None:
                ids += found[0].row_id.tolist()
                state = found[1] if rank == 0 else state
    for rank in range(after):
        rest = Loader(LOG, "train", batch_rows=5, rank=rank, world=after, state=state)
        ids += [i for batch, _ in rest for i in batch.row_id.tolist()]
    assert sorted(ids) == list(range(1000, 1000 + sum(SIZES)))


def test_each_epoch_has_an_order_of_its_own() -> None:
    def order(log: MemoryReader, epoch: int, split: str = "train") -> list[int]:
        return [i for b in log.iterate(split, state={"epoch": epoch}, batch_rows=10) for i in b.row_id.tolist()]

    first, second = order(LOG, 0), order(LOG, 1)
    assert first != second and sorted(first) == sorted(second) == list(range(1000, 1000 + sum(SIZES)))
    assert order(reader(SIZES), 1) == second, "fixed by the seed"
    assert order(reader(SIZES, seed=1), 0) != first
    assert order(LOG, 0, "test") == order(LOG, 5, "test") == sorted(first), "evaluation goes in the order stored"


def test_the_end_of_an_epoch_is_a_position_too() -> None:
    *_, (_, last) = taken(Loader(LOG, "train", batch_rows=10))
    assert taken(Loader(LOG, "train", batch_rows=10, state=last)) == []
    assert last["request"] == last["requests"] == len(SIZES)
    assert list(LOG.iterate("train", state=last)) == [] and LOG.state() == last


WRONG_STATES = {
    "another log": ({"requests": 3}, "expected requests 3, found 15"),
    "another seed": ({"seed": 9}, "expected seed 9, found 0"),
    "beyond the end": ({"request": 99}, "no position"),
    "no epoch": ({"epoch": -1}, "no position"),
}


@pytest.mark.parametrize(("state", "message"), WRONG_STATES.values(), ids=WRONG_STATES.keys())
def test_a_position_of_something_else_is_refused(state: dict[str, Any], message: str) -> None:
    for workers in (0, 1):
        with pytest.raises(DataError, match=f'cannot resume split "train".*{message}'):
            taken(Loader(LOG, "train", state={"epoch": 0} | state, workers=workers))


def test_ranks() -> None:
    with pytest.raises(ConfigError, match=r"rank 2 of 2"):
        Loader(LOG, rank=2, world=2)


def test_a_killed_worker_is_one_message() -> None:
    others = set(torch.multiprocessing.active_children())  # of earlier tests, not yet collected
    with closing(iter(Loader(LOG, "train", batch_rows=4, workers=1))) as batches:  # type: ignore[type-var]
        handler = signal.getsignal(signal.SIGCHLD)
        next(batches)
        (child,) = set(torch.multiprocessing.active_children()) - others
        assert child.pid is not None and os.getpgid(child.pid) == child.pid, "out of reach of the job's signals"
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        with pytest.raises(GemError, match=r'a reader process of split "train" was killed .*data.workers=0'):
            list(batches)
        assert signal.getsignal(signal.SIGCHLD) == handler
    assert not set(torch.multiprocessing.active_children()) - others


class Failing:
    """A reader that fails after its first batch."""

    Config, schema = MemoryReader.Config, LOG.schema

    def __init__(self, error: Exception) -> None:
        self.error = error

    def iterate(self, *args: Any, **options: Any) -> Iterator[Batch]:
        yield next(LOG.iterate("train", batch_rows=10))
        raise self.error

    def state(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_a_reader(workers: int) -> None:
    with pytest.raises(DataError) as caught:
        taken(Loader(Failing(DataError("rows.csv, row 3: wrong")), workers=workers))
    assert str(caught.value) == "rows.csv, row 3: wrong", "no trace of the worker in it"
    with pytest.raises(RuntimeError, match="a bug"):
        taken(Loader(Failing(RuntimeError("a bug")), workers=workers))


def test_the_runs_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    taken(Loader(LOG, "train", workers=1))
    assert torch.equal(torch.rand(1), expected)


def test_waiting_is_measured() -> None:
    loader = Loader(LOG, "train")
    assert loader.waited_s == 0
    taken(loader)
    assert loader.waited_s > 0


class Pairs:
    """Takes two batches and gives them in turn the other way round."""

    Config = InOrder.Config

    def __init__(self, config: Any) -> None:
        pass

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        held = []
        for batch in batches:
            held.append(batch)
            if len(held) == 2:
                yield from reversed(held)
                held = []
        yield from held


def test_a_batcher_that_holds_back_resumes_exactly() -> None:
    options: dict[str, Any] = {"batch_rows": 10, "batcher": Pairs(Pairs.Config())}
    whole = taken(Loader(LOG, "train", **options))
    plain = taken(Loader(LOG, "train", batch_rows=10))
    assert_same(whole[0][0], plain[1][0])
    for i, (_, state) in enumerate(whole):
        assert_equal(taken(Loader(LOG, "train", **options, state=state)), whole[i + 1 :])
    assert ["skip" in state for _, state in whole[:4]] == [True, False, True, False]


def test_a_packed_batch_is_the_batch() -> None:
    rows = LOG.load("train")
    for requests in (np.arange(3), np.arange(0)):
        batch = rows.batch(requests)
        packed = _Packed.of(batch, {}, (0, True))
        assert_same(packed.batch(), batch)
        assert len(packed.places) < len(torch.utils._pytree.tree_leaves(batch)), "shared offsets are sent once"
