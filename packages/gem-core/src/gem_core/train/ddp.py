"""Data parallelism: each process has the whole dense side and all tables, and its own share of the batches.

A step's gradient is that of the ranks' batches put together, whatever their sizes: the counts are added up over the ranks
before the backward pass, the dense gradients after it, in one collective, and the tables' gradients are gathered row by
row and applied in rank order, so that every rank's copy stays the same to the bit. A rank that has no batch left takes
part with zeros. CPU tensors travel by gloo, those of a GPU by NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gem_core.errors import ConfigError, GemError
from gem_core.protocols import ComponentConfig, Embedding
from gem_core.train.embedding import RowGradient
from gem_core.train.strategy import Device, WholeModel, choose_device, world_size


class DataParallel(WholeModel):
    """The processes that torchrun started, each with a whole copy; without torchrun, one process alone.

    Every process reads the recipe, the data and the run's folder: with several machines these are on a shared file
    system. An embedding that is replicated (it has `replicate`) is given the means to keep its copies equal; another is
    taken to share its rows out itself.
    """

    class Config(ComponentConfig):
        """`device`: "auto" takes the process's own GPU where there is one. `timeout_s`: how long a rank waits for others
        that are at work (reading, writing a checkpoint) before it gives up; one that ended is found out at once."""

        device: Device = "auto"
        timeout_s: int = Field(1800, ge=1)

    def __init__(self, config: Config) -> None:
        self.rank, self.world = int(os.environ.get("RANK", "0")), world_size()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        super().__init__(choose_device(config.device, local if self.world > 1 else None))
        if self.device.type == "cuda" and self.world > 1:
            torch.cuda.set_device(self.device)
        self._joined = self.world > 1 and not dist.is_initialized()
        if self._joined:
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            with self._together("start"):
                dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s))

    def setup(self, model: nn.Module, embedding: Embedding, plan: Any = None) -> nn.Module:
        """Move the model to the device, and start from the first rank's parameters; returns it."""
        if plan is not None:
            raise ConfigError('strategy "ddp" follows no plan: remove parallel.plan')
        self._model = model.to(self.device)
        if self.world > 1:
            with self._together("setup"), torch.no_grad():
                for tensor in self._model.state_dict().values():  # another make of processor may draw other numbers
                    dist.broadcast(tensor, 0)
            replicate = getattr(embedding, "replicate", None)
            if replicate is not None:
                replicate(self.gather_rows)
        return self._model

    def sum_counts(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the ranks, added in float64; every rank gives the same names."""
        if self.world == 1:
            return dict(counts)
        names = sorted(counts)
        flat = torch.stack([counts[name].double() for name in names])
        with self._together("counts"):
            dist.all_reduce(flat)
        return {name: value.to(counts[name].dtype) for name, value in zip(names, flat.unbind(), strict=True)}

    def clip(self, max_norm: float) -> Tensor:
        """Add the gradients up over the ranks, then scale them to the global norm; returns the norm before."""
        if self.world > 1:
            self._share_gradients()
        return super().clip(max_norm)

    @torch.no_grad()
    def _share_gradients(self) -> None:
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        if not parameters:
            return
        # Behind the gradients, whether each parameter has one: what has none on any rank keeps none.
        has = [float(p.grad is not None) for p in parameters]
        grads = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in parameters]
        flat = torch.cat([*(g.float() for g in grads), torch.tensor(has, device=self.device)])
        with self._together("gradients"):
            dist.all_reduce(flat)
        *sums, used = flat.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, total, ranks in zip(parameters, sums, used.tolist(), strict=True):
            parameter.grad = total.view_as(parameter).to(parameter.dtype) if ranks else None

    def gather_rows(self, own: Sequence[RowGradient]) -> list[list[RowGradient]]:
        """Per table what each rank gives of it, in rank order. `own`: this rank's, every table's in the same order."""
        sizes = self._all_gather(torch.tensor([g.ids.numel() for g in own]))
        dims = torch.tensor([g.grad.shape[1] for g in own])
        ids = self._all_gather(torch.cat([g.ids for g in own]), [int(s.sum()) for s in sizes])
        flat = torch.cat([g.grad.reshape(-1) for g in own])
        grads = self._all_gather(flat, [int((s * dims).sum()) for s in sizes])
        out: list[list[RowGradient]] = [[] for _ in own]
        for size, its_ids, its_grads in zip(sizes, ids, grads, strict=True):
            pieces = its_grads.split((size * dims).tolist())
            for table, rows, piece, dim in zip(out, its_ids.split(size.tolist()), pieces, dims.tolist(), strict=True):
                table.append(RowGradient(rows, piece.view(-1, dim)))
        return out

    def _all_gather(self, own: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """The ranks' vectors of these sizes (None: all of the same); shorter ones travel padded: gloo knows no other."""
        sizes = [own.numel()] * self.world if sizes is None else sizes
        padded = own.new_zeros(max(sizes))
        padded[: own.numel()] = own
        out = [torch.empty_like(padded) for _ in sizes]
        if padded.numel():
            with self._together("table gradients"):
                dist.all_gather(out, padded)
        return [tensor[:size] for tensor, size in zip(out, sizes, strict=True)]

    def agree_done(self, done: bool) -> bool:
        """Whether every rank is done."""
        if self.world == 1:
            return done
        flag = torch.tensor(int(done))
        with self._together("end of data"):
            dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, its tensors on the processor."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        with self._together("exchange"):
            dist.all_gather_object(out, pytree.tree_map_only(Tensor, lambda t: t.cpu(), value))
        return out

    def close(self) -> None:
        """Leave the process group that this strategy made."""
        if self._joined:
            dist.destroy_process_group()
            self._joined = False

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """A collective: its failure is another rank's, which says itself why it ended."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise GemError(
                f"rank {self.rank} of {self.world} lost the others ({what}: {str(error).splitlines()[0]}): one of them "
                "ended, and its own message says why, or it took longer than parallel.strategy.timeout_s"
            ) from error
