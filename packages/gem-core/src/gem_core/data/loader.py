"""The loader: a reader's batches, read ahead in worker processes, each with the reader's position after it.

Workers are forked and share the encoded log with their parent. Each sends a batch as one block of shared memory,
whatever the number of its tensors. Worker w takes the rank's turns w, w + W, w + 2 W, ... (`Reader.turn`): the order and
the positions do not depend on W nor on timing, and a position is that of the batch taken, not of those read ahead.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError, GemError
from gem_core.protocols import Batcher, ComponentConfig, Reader

READ_AHEAD = 4
"""Batches that each worker keeps ready."""

_ALIGN = 64
PR_SET_PDEATHSIG = 1


class InOrder:
    """The batcher that changes nothing."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig

    def __init__(self, config: ComponentConfig) -> None:
        self.config = config

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches as they come."""
        yield from batches


@dataclass(frozen=True)
class _Packed:
    """A batch as one block of bytes: where each tensor lies in it, and the batch with their numbers in their places."""

    block: Tensor
    places: list[tuple[int, torch.dtype, torch.Size]]
    skeleton: Any
    state: dict[str, Any]
    turn: int
    last: bool

    @staticmethod
    def of(batch: Batch, state: dict[str, Any], turn: tuple[int, bool]) -> _Packed:
        known: dict[int, int] = {}  # features share offsets: stored once
        tensors: list[Tensor] = []

        def number(tensor: Tensor) -> int:
            if id(tensor) not in known:
                known[id(tensor)] = len(tensors)
                tensors.append(tensor)
            return known[id(tensor)]

        skeleton = pytree.tree_map_only(Tensor, number, batch)
        places, size = [], 0
        for tensor in tensors:
            places.append((size, tensor.dtype, tensor.shape))
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        packed = _Packed(torch.empty(size, dtype=torch.uint8), places, skeleton, state, *turn)
        for tensor, copy in zip(tensors, packed._tensors(), strict=True):
            copy.copy_(tensor)
        return packed

    def _tensors(self) -> list[Tensor]:
        return [
            self.block[place : place + dtype.itemsize * shape.numel()].view(dtype).view(shape)
            for place, dtype, shape in self.places
        ]

    def batch(self) -> Batch:
        tensors = self._tensors()
        out: Batch = pytree.tree_map_only(int, tensors.__getitem__, self.skeleton)
        return out


@dataclass(frozen=True)
class _Fault:
    """An error of a worker whose message explains it fully."""

    kind: type[GemError]
    message: str


def _end_with_parent() -> None:
    """Have the kernel end this process when the one that forked it is killed: it would find out late and noisily."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Worker(IterableDataset[Any]):
    """What runs in a worker process."""

    def __init__(self, reader: Reader, options: dict[str, Any], worker: int, workers: int) -> None:
        self.reader, self.options, self.worker, self.workers = reader, options, worker, workers

    def __iter__(self) -> Iterator[_Packed | _Fault]:
        # In a group of its own: Ctrl-C or a signal to the job's group goes to the trainer, which ends in good order.
        os.setpgid(0, 0)
        _end_with_parent()
        torch.set_num_threads(1)
        turn = getattr(self.reader, "turn", None)
        try:
            batches = self.reader.iterate(worker=self.worker, workers=self.workers, **self.options)
            for n, batch in enumerate(batches):
                of_turn = (self.worker + n * self.workers, True) if turn is None else turn()
                yield _Packed.of(batch, self.reader.state(), of_turn)
        except GemError as error:
            yield _Fault(type(error), str(error))


class Loader:
    """One pass over a split from `state` on: iterating gives (batch, state to go on from after it).

    `workers` processes read ahead (0: the reader runs in this process). A state that a batcher holds batches back at
    (it took more rows than it gave) is the last one at which it held none, with the number of batches to skip after it,
    so any batcher that is deterministic resumes exactly.

    Attributes:
        waited_s: seconds that the consumer has waited for batches.
    """

    def __init__(
        self,
        reader: Reader,
        split: str = "train",
        *,
        batch_rows: int = 2048,
        workers: int = 0,
        batcher: Batcher | None = None,
        rank: int = 0,
        world: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise ConfigError(f"loader: rank {rank} of {world}: expected 0 <= rank < world")
        self.reader, self.split, self.workers = reader, split, workers
        self.batcher = InOrder(InOrder.Config()) if batcher is None else batcher
        position = dict(state or {})
        self._skip = int(position.pop("skip", 0))
        self._start = position or {"epoch": 0}
        self._options: dict[str, Any] = {
            "split": split,
            "rank": rank,
            "world": world,
            "state": self._start,
            "batch_rows": batch_rows,
        }
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        taken = given = skipped = 0
        settled, since = dict(self._start), 0
        latest = settled

        def source() -> Iterator[Batch]:
            nonlocal taken, latest
            for batch, state in self._read():
                latest, taken = state, taken + batch.rows
                yield batch

        batches = self.batcher(source())
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches, None)
            finally:
                self.waited_s += time.perf_counter() - began
            if batch is None:
                return
            given, since = given + batch.rows, since + 1
            if given == taken:
                settled, since = latest, 0
            if skipped < self._skip:
                skipped += 1
                continue
            yield batch, {**settled, "skip": since} if since else dict(settled)

    def _read(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        if self.workers == 0:
            for batch in self.reader.iterate(**self._options):
                yield batch, self.reader.state()
            return
        prepare = getattr(self.reader, "prepare", None)
        if prepare is not None:
            prepare(self.split)
        processes = self._fork()
        heads: list[Any] = [None] * self.workers  # what a worker has sent of a later turn than its own is due
        ended = [False] * self.workers
        turn = 0
        while not all(ended):
            worker = turn % self.workers
            packet = heads[worker]
            if packet is None and not ended[worker]:
                packet = self._take(processes[worker])
            ended[worker] = packet is None
            if packet is None or packet.turn > turn:  # the turn has no batches, or there are no more turns
                heads[worker] = packet
                turn += 1
                continue
            heads[worker] = None
            turn += packet.last
            yield packet.batch(), packet.state

    def _take(self, packets: Iterator[Any]) -> _Packed | None:
        """A worker's next batch; None after the last."""
        try:
            packet: _Packed | _Fault | None = next(packets, None)
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error):
                raise
            raise GemError(
                f'a reader process of split "{self.split}" was killed ({str(error).splitlines()[0]}): often '
                "memory or /dev/shm is full; lower data.workers or data.batch_rows, or set data.workers=0"
            ) from error
        if isinstance(packet, _Fault):
            raise packet.kind(packet.message)
        return packet

    def _fork(self) -> list[Iterator[Any]]:
        """The packets of each worker."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGCHLD) if main else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # `workers` is deliberate
            processes: list[Iterator[Any]] = [
                iter(
                    DataLoader(
                        _Worker(self.reader, self._options, worker, self.workers),
                        batch_size=None,
                        num_workers=1,
                        prefetch_factor=READ_AHEAD,
                        multiprocessing_context="fork",
                        generator=torch.Generator(),  # draws nothing from the run's own
                    )
                )
                for worker in range(self.workers)
            ]
        if main:  # torch's handler would raise a worker's death in the midst of a training step; `next` finds it too
            signal.signal(signal.SIGCHLD, before)
        return processes
