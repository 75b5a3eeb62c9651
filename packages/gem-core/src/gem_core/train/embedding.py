"""Embedding tables of one process with row-wise AdaGrad: the sparse side of a model, no `nn.Parameter` among it.

A lookup gathers the rows of all features of a table; its backward only remembers (ids, gradient). `step` adds these up
over all lookups since the last step and moves each touched row once, so accumulating micro-batches is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gem_core.data.batch import Jagged
from gem_core.errors import ConfigError, DataError
from gem_core.protocols import ComponentConfig, Table

DENSE_UP_TO = 2.0
"""Up to this many rows per gathered id the whole table is updated densely (measured: benchmarks/embedding.py)."""
BITMAP_UP_TO = 32.0
"""Up to this many rows per gathered id distinct ids are found by a bitmap over the table, above it by sorting."""


class RowGradient(NamedTuple):
    """Row `ids[i]` of a table gets the gradient `grad[i]`: (n,) int64, (n, dim)."""

    ids: Tensor
    grad: Tensor


Exchange = Callable[[Sequence[RowGradient]], list[list[RowGradient]]]
"""From the gradients of this rank, one per table, to those of every rank, per table in rank order."""


class _Slot:
    """One table, its AdaGrad moments (one per row), and the gradients since the last step."""

    def __init__(self, table: Table, weight: Tensor, moment: Tensor) -> None:
        self.table = table
        self.weight = weight
        self.moment = moment
        self.pending: list[RowGradient] = []


class _Gather(torch.autograd.Function):
    """Rows of one table for several features. `anchor` only makes the outputs part of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, slot: _Slot, *ids: Tensor | Jagged) -> tuple[Tensor, ...]:
        ctx.slot, ctx.ids = slot, ids
        ctx.set_materialize_grads(False)
        return tuple(_rows(slot, i) for i in ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        for ids, grad in zip(ctx.ids, grads, strict=True):
            if grad is None:
                continue
            if isinstance(ids, Jagged):
                lengths, values = ids.lengths(), ids.values
                if ctx.slot.table.pooling == "mean":
                    grad = grad / lengths.clamp(min=1).unsqueeze(1)
                grad = grad.repeat_interleave(lengths, dim=0, output_size=values.numel())
                ctx.slot.pending.append(RowGradient(values, grad))
            else:
                ctx.slot.pending.append(RowGradient(ids, grad))
        return (None, None, *(None for _ in ctx.ids))


def _rows(slot: _Slot, ids: Tensor | Jagged) -> Tensor:
    if not isinstance(ids, Jagged):
        return slot.weight.index_select(0, ids)
    if ids.values.numel() == 0:
        return slot.weight.new_zeros(len(ids), slot.table.dim)
    mode = 0 if slot.table.pooling == "sum" else 1
    out: Tensor = torch.embedding_bag(slot.weight, ids.values, ids.offsets, False, mode, False, None, True)[0]
    return out


def _distinct(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sorted distinct ids (u,), and for each id its place among them (n,)."""
    if rows > BITMAP_UP_TO * ids.numel():
        distinct, place = torch.unique(ids, return_inverse=True)
        return distinct, place
    seen = torch.zeros(rows, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    distinct = seen.nonzero().squeeze(1)
    places = torch.empty(rows, dtype=torch.int64, device=ids.device)
    places.index_copy_(0, distinct, torch.arange(distinct.numel(), device=ids.device))
    return distinct, places.index_select(0, ids)


class TorchEmbedding:
    """Tables in plain float32 tensors, stepped by row-wise AdaGrad (as in FBGEMM and torchrec).

    moment += mean(g^2); row -= lr g / (sqrt(moment) + eps), with one moment per row.
    """

    class Config(ComponentConfig):
        """Tables start normal with standard deviation `init_std` (None: 1 / sqrt(dim)). `clip`: largest norm of a
        row's gradient; tables are outside the dense clip norm."""

        init_std: float | None = Field(None, ge=0)
        eps: float = Field(1e-8, gt=0)
        initial_moment: float = Field(0.0, ge=0)
        clip: float | None = Field(None, gt=0)

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._slots: dict[str, _Slot] = {}
        self._slot_of: dict[str, _Slot] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self._exchange: Exchange | None = None

    def setup(self, tables: Sequence[Table], mesh: Any = None, plan: Any = None) -> None:
        """Allocate the tables on torch's default device; contents depend on the seed and the table's name alone.

        Raises:
            ConfigError: a mesh or plan was given, or a table or feature is declared twice.
        """
        if mesh is not None or plan is not None:
            raise ConfigError('embedding "torch" is not sharded: use a strategy without a mesh, or a sharded embedding')
        for table in tables:
            if table.name in self._slots:
                raise ConfigError(f'embedding table "{table.name}" is set up twice')
            slot = self._slots[table.name] = _Slot(table, *self._allocate(table))
            for feature in table.features:
                if feature in self._slot_of:
                    other = self._slot_of[feature].table.name
                    raise ConfigError(f'feature "{feature}" is served by both tables "{other}" and "{table.name}"')
                self._slot_of[feature] = slot

    def _allocate(self, table: Table) -> tuple[Tensor, Tensor]:
        digest = hashlib.sha256(f"{self._seed}/{table.name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        std = table.dim**-0.5 if self.config.init_std is None else self.config.init_std
        # Drawn on the processor whatever the device, so that the numbers are the same on each.
        weight = torch.empty(table.rows, table.dim, device="cpu").normal_(0.0, std, generator=generator)
        device = torch.get_default_device()
        return weight.to(device), torch.full((table.rows,), self.config.initial_moment, device=device)

    def replicate(self, exchange: Exchange) -> None:
        """Keep equal copies of the tables on several ranks: each `step` applies the gradients of all of them."""
        self._exchange = exchange

    @property
    def tables(self) -> list[Table]:
        """The tables set up, in order."""
        return [slot.table for slot in self._slots.values()]

    def lookup(self, ids: Mapping[str, Tensor | Jagged]) -> dict[str, Tensor]:
        """Per feature: (n,) int64 ids -> (n, dim); `Jagged` of n segments -> (n, dim) pooled, an empty segment 0.

        Raises:
            DataError: an id outside its table; names feature, table, id and rows.
        """
        by_slot: dict[str, list[str]] = {}
        for feature in ids:
            if feature not in self._slot_of:
                raise ConfigError(f'feature "{feature}" has no embedding table: set it up with Table(features=...)')
            by_slot.setdefault(self._slot_of[feature].table.name, []).append(feature)
        out: dict[str, Tensor] = {}
        for name, features in by_slot.items():
            slot, wanted = self._slots[name], [ids[f] for f in features]
            _check(slot.table, features, wanted)
            if torch.is_grad_enabled():
                rows = _Gather.apply(self._anchor, slot, *wanted)  # type: ignore[no-untyped-call]
            else:
                rows = tuple(_rows(slot, i) for i in wanted)
            out.update(zip(features, rows, strict=True))
        return {feature: out[feature] for feature in ids}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients of all lookups since the last step, then forget them."""
        if self._exchange is not None and self._slots:
            # A rank's rows are distinct, and ranks are added in order: no sum depends on the order of threads.
            slots = list(self._slots.values())
            for slot, ranks in zip(slots, self._exchange([_own(slot) for slot in slots]), strict=True):
                slot.pending = [rank for rank in ranks if rank.ids.numel()]
        for slot in self._slots.values():
            if slot.pending:
                self._update(slot, lr)
        self.discard()

    def _update(self, slot: _Slot, lr: float) -> None:
        rows, (sizes, ids) = slot.table.rows, _joined(slot.pending)
        if ids.numel() == 0:
            return
        if rows <= DENSE_UP_TO * ids.numel():
            touched, places, count = None, ids, rows
        else:
            touched, places = _distinct(ids, rows)
            count = touched.numel()
        grad = _summed(slot, sizes, places, count)
        square = torch.linalg.vector_norm(grad, dim=1).square_().div_(slot.table.dim)  # mean(g^2), without a copy of g
        if self.config.clip is not None:
            norm = (square * slot.table.dim).sqrt_()
            scale = (self.config.clip / norm.clamp(min=self.config.clip)).unsqueeze(1)
            grad, square = grad * scale, square * scale.squeeze(1).square()
        # Untouched rows have gradient 0: the dense form leaves their weight and moment as they are.
        if touched is None:
            slot.moment += square
            slot.weight.addcdiv_(grad, (slot.moment.sqrt() + self.config.eps).unsqueeze(1), value=-lr)
        else:
            slot.moment.index_add_(0, touched, square)
            scale = slot.moment.index_select(0, touched).sqrt_().add_(self.config.eps).unsqueeze(1)
            slot.weight.index_add_(0, touched, grad.div_(scale), alpha=-lr)

    def discard(self) -> None:
        """Forget the gathered gradients without applying them."""
        for slot in self._slots.values():
            slot.pending.clear()

    def state(self) -> dict[str, Tensor]:
        """`tables.<name>.weight` (rows, dim) and `tables.<name>.moment` (rows,), the tensors themselves."""
        out = {}
        for name, slot in self._slots.items():
            out[f"tables.{name}.weight"], out[f"tables.{name}.moment"] = slot.weight, slot.moment
        return out

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state in.

        Raises:
            DataError: missing, unknown or misshapen tables, by name.
        """
        own = self.state()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise DataError(f"embedding state: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                expected, found = tuple(tensor.shape), tuple(state[name].shape)
                raise DataError(f'embedding state "{name}": expected shape {expected}, found {found}')
            tensor.copy_(state[name])


def _own(slot: _Slot) -> RowGradient:
    """The gradients of a slot's lookups, added up per row."""
    if not slot.pending:
        return RowGradient(slot.moment.new_empty(0, dtype=torch.int64), slot.weight.new_empty(0, slot.table.dim))
    sizes, ids = _joined(slot.pending)
    touched, places = _distinct(ids, slot.table.rows)
    return RowGradient(touched, _summed(slot, sizes, places, touched.numel()))


def _summed(slot: _Slot, sizes: list[int], places: Tensor, count: int) -> Tensor:
    """(count, dim): the pending gradients, entry i of them all added to row places[i]."""
    grad = slot.weight.new_zeros(count, slot.table.dim)
    for part, pending in zip(places.split(sizes), slot.pending, strict=True):
        grad.index_add_(0, part, pending.grad)
    return grad


def _joined(pending: Sequence[RowGradient]) -> tuple[list[int], Tensor]:
    return [p.ids.numel() for p in pending], torch.cat([p.ids for p in pending])


def _check(table: Table, features: Sequence[str], ids: Sequence[Tensor | Jagged]) -> None:
    for feature, value in zip(features, ids, strict=True):
        flat = value.values if isinstance(value, Jagged) else value
        if flat.numel() == 0:
            continue
        low, high = torch.aminmax(flat)
        if int(low) < 0 or int(high) >= table.rows:
            bad = int(low) if int(low) < 0 else int(high)
            raise DataError(
                f'feature "{feature}": id {bad} is outside table "{table.name}" of {table.rows} rows '
                f"(valid: 0..{table.rows - 1}); encode the data with the schema that the model was built from"
            )
