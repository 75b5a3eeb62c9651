"""The interfaces that plugins and the other packages code against. Names and meaning are fixed by the contract version.

Every component is a class with a frozen pydantic `Config` (its options in a recipe, unknown keys refused) and the
constructor `Component(config, **context)`; the context of each kind is named in its docstring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gem_core.data.batch import Batch, Jagged
    from gem_core.schema import Schema


class ComponentConfig(BaseModel):
    """Base of every component's options."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Reader(Protocol):
    """Batches with resumable state. Constructed as `Reader(config, schema=Schema | None, seed=int)`.

    A reader that knows its own layout (a shipped set) brings the schema; the others get the recipe's. A static method
    `schema_of(config, schema)`, if there is one, says without the data which schema it will be. One that has a method
    `prepare(split)` is asked, before reader processes fork, to read what they are to share.

    What a rank reads in a pass is a row of turns. A turn is one batch, unless the reader has a method `turn()`, which says
    of the batch last given its turn, counted from 0 where the iteration began, and whether it is the turn's last:
    `(3, False)`. A turn may have no batches.
    """

    Config: ClassVar[type[ComponentConfig]]
    schema: Schema
    """The schema fitted on the training split."""

    def splits(self) -> Sequence[str]:
        """Those of "train", "validation", "test" that there are rows for."""
        ...

    def iterate(
        self,
        split: str = "train",
        *,
        rank: int = 0,
        world: int = 1,
        worker: int = 0,
        workers: int = 1,
        state: Mapping[str, Any] | None = None,
        batch_rows: int = 2048,
    ) -> Iterator[Batch]:
        """One pass over a split ("train", "validation", "test"); training order is shuffled by seed and epoch.

        A batch has whole requests of about `batch_rows` rows in all. The n-th turn of worker w of W is the rank's turn
        n W + w: the loader takes them in order, so the order of batches does not depend on W. `state` is what `state()`
        returned after the last batch taken (or `{"epoch": e}`): the iteration goes on with the very next batch. Each
        row is given exactly once over all (rank, worker) pairs; the ranks may have unequal numbers of batches.
        """
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able position after the batch last given: epoch and place within it."""
        ...


@dataclass
class Output:
    """What a model returns: per task (B,) logits, and the hidden layers asked for, by name."""

    logits: dict[str, Tensor]
    hidden: dict[str, Tensor] = field(default_factory=dict)


class Model(Protocol):
    """Batch -> logits and hidden layers. Constructed as `Model(config, schema=Schema, embedding=Embedding)`.

    A `torch.nn.Module` whose parameters are the dense side only; the tables belong to the embedding, which the
    constructor sets up with the tables that the model needs (`embedding.setup(tables)`). What its run should say of how
    it was built (an option that the schema overrides) stands in `notes`, a tuple of texts, if it has any.
    """

    Config: ClassVar[type[ComponentConfig]]
    hidden_names: tuple[str, ...]

    def __call__(self, batch: Batch, hidden: Sequence[str] = ()) -> Output: ...

    def flops(self, batch: Batch) -> dict[str, int]:
        """Forward FLOPs of this batch per module (2 per multiply-add), from its true ragged lengths."""
        ...


@dataclass(frozen=True)
class Table:
    """One embedding table. `features` are the lookup keys served by it: "ad", "click.item", ...

    Attributes:
        rows: ids 0 .. rows - 1 are valid (0 missing, 1 unseen).
        pooling: for lookups of a `Jagged`: "sum" or "mean" over each segment.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "mean"


class Embedding(Protocol):
    """Sole owner of the sparse side: tables, their optimiser, their sharding. `Embedding(config, seed=int)`.

    One that keeps whole copies of its tables on several ranks has a method `replicate(exchange)` (see
    `gem_core.train.embedding.Exchange`), by which a strategy lets it exchange gradients.
    """

    Config: ClassVar[type[ComponentConfig]]

    def setup(self, tables: Sequence[Table], mesh: Any = None, plan: Any = None) -> None:
        """Allocate the tables (seeded by name, so independent of order and sharding)."""
        ...

    def lookup(self, ids: Mapping[str, Tensor | Jagged]) -> dict[str, Tensor]:
        """Per feature: (n,) ids -> (n, dim); `Jagged` of n segments -> (n, dim) pooled. Differentiable.

        Raises:
            DataError: an id outside its table; names feature, table, id and rows.
        """
        ...

    def step(self, lr: float) -> None:
        """Apply the gradients of all lookups since the last step (so accumulation is exact), then forget them."""
        ...

    def discard(self) -> None:
        """Forget the gathered gradients without applying them (a step skipped by the NaN policy)."""
        ...

    def state(self) -> dict[str, Tensor]:
        """`tables.<name>.weight` and `tables.<name>.moment`, unsharded rows."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`; refuses missing, unknown or misshapen tables by name."""
        ...


class Loss(Protocol):
    """Per-task sums and counts, never means: accumulation and uneven ranks then give the large batch's number exactly.

    Constructed as `Loss(config, schema=Schema)`.
    """

    Config: ClassVar[type[ComponentConfig]]

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Per task the scalar denominator (sum of mask * weight); needs no forward pass."""
        ...

    def __call__(self, output: Output, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Per task (sum, count)."""
        ...


class Precision(Protocol):
    """How linear maps and attention are computed, and what travels in an all-gather. `Precision(config)`."""

    Config: ClassVar[type[ComponentConfig]]

    def autocast(self, device: torch.device) -> Any:
        """The context manager that forward and loss run in."""
        ...

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """x (..., n), w (m, n), b (m,) -> (..., m): every `nn.Linear` of the model computes this."""
        ...

    def op_variant(self, op: str) -> str | None:
        """The backend that an op takes under this precision, None for the usual choice; a recipe's `ops` go before it."""
        ...

    def pack(self, shard: Tensor) -> list[Tensor]:
        """What travels in an all-gather in place of a parameter's shard."""
        ...

    def unpack(self, packed: Sequence[Tensor], like: Tensor) -> Tensor:
        """A gathered parameter, of `like`'s shape and type."""
        ...


class Strategy(Protocol):
    """Dense side and the mesh. Names in `state` are the single-process parameter names. `Strategy(config)`."""

    Config: ClassVar[type[ComponentConfig]]
    rank: int
    world: int
    device: torch.device

    def setup(self, model: nn.Module, embedding: Embedding, plan: Any = None) -> nn.Module:
        """Place (wrap, shard) the model; returns the module to call."""
        ...

    def sum_counts(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All-reduced denominators of one optimiser step."""
        ...

    def backward(self, sums: Mapping[str, Tensor], counts: Mapping[str, Tensor], weights: Mapping[str, float]) -> None:
        """Gradients of sum over tasks of weight * sum / count, count being the whole step's over all ranks."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """The step's gradients of all ranks, scaled to the global norm; returns the norm before. Called once a step, after
        every `backward` of it, also on a rank that had no batch. Tables are outside of the norm."""
        ...

    def agree_done(self, done: bool) -> bool:
        """True when every rank is done: ranks with unequal batch counts never hang."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank, in rank order (metric states)."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Dense parameters and buffers, whole, by single-process name."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`."""
        ...

    def close(self) -> None:
        """Leave the other ranks; nothing is called after it."""
        ...


class Batcher(Protocol):
    """Orders or groups a reader's batches before the trainer takes them. `Batcher(config)`."""

    Config: ClassVar[type[ComponentConfig]]

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]: ...


class Planner(Protocol):
    """Recipe and topology -> plan, without a GPU. `Planner(config)`."""

    Config: ClassVar[type[ComponentConfig]]

    def plan(self, recipe: Any, topology: Any, constraints: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Found:
    """Answer of a store: `values` (n, width), `time` (n,) seconds, `version` (n,), `found` (n,) bool."""

    values: Tensor
    time: Tensor
    version: Sequence[str]
    found: Tensor


class Store(Protocol):
    """Representations with version and time. `Store(config, clock=Callable[[], float])`."""

    Config: ClassVar[type[ComponentConfig]]

    def put(self, space: str, keys: Sequence[str], values: Tensor, time: Tensor, version: str) -> None: ...

    def get(self, space: str, keys: Sequence[str], now: float) -> Found: ...

    def history(self, space: str, users: Sequence[str], before: Tensor, limit: int, retention: float) -> Jagged:
        """Entries strictly before `before`, newest first, at most `limit`, not older than `retention` seconds."""
        ...


class Transfer(Protocol):
    """One arm of the distillation report. `Transfer(config, schema=Schema)`."""

    Config: ClassVar[type[ComponentConfig]]

    def columns(self) -> Sequence[str]:
        """Features that this arm adds to the schema."""
        ...

    def loss(self, output: Output, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]: ...

    def report(self) -> dict[str, Any]: ...


class Metric(Protocol):
    """Accumulated on the device without a host sync, merged exactly over ranks. `Metric(config, schema=Schema, exact=bool)`.

    `exact`: for an evaluation pass, where memory may grow with the rows; else for a window of training.
    """

    Config: ClassVar[type[ComponentConfig]]

    def update(self, logits: Mapping[str, Tensor], batch: Batch) -> None: ...

    def state(self) -> Any:
        """What `merge` of another rank takes."""
        ...

    def merge(self, states: Sequence[Any]) -> None: ...

    def compute(self) -> dict[str, float]:
        """Names like "purchase/ne", "purchase/display/auc", "joint/ne"."""
        ...


@runtime_checkable
class Tracker(Protocol):
    """Where scalars, texts and figures go; only rank 0 has trackers. `Tracker(config, folder=Path, resume=int)`.

    `resume`: step of the checkpoint that the run goes on from, 0 for a new run. Kinds of scalars: "train" (what a seed
    fixes), "speed" (what the machine adds, for the same step), "validation", "test", "progressive"
    (a window of `follow` before it is trained on).
    """

    Config: ClassVar[type[ComponentConfig]]

    def scalars(self, step: int, values: Mapping[str, float], kind: str = "train") -> None: ...

    def text(self, step: int, name: str, value: str) -> None: ...

    def figure(self, step: int, name: str, figure: Any) -> None: ...

    def close(self) -> None: ...


class Callback:
    """Trainer events; override what is needed. `Callback(config)`. Raising `StopTraining` ends the run cleanly."""

    Config: ClassVar[type[ComponentConfig]]

    def on_start(self, trainer: Any) -> None:
        """Before the first step, after a checkpoint (if any) was loaded."""

    def on_step(self, trainer: Any, step: int) -> None:
        """After an optimiser step."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation on the validation split."""

    def on_window(self, trainer: Any, name: str, metrics: Mapping[str, float]) -> None:
        """After a file of `follow` was trained on; `metrics` are those before it was (progressive validation)."""

    def on_end(self, trainer: Any) -> None:
        """After the last step, before trackers close."""


class StopTraining(Exception):
    """Raised by a callback: evaluate, save and end with exit code 0."""
