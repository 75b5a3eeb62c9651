"""What a recipe's model is made of, without allocating it or reading data: parameters by part, tables, FLOPs per row.

summary = summarise(recipe, registry, schema=None, lengths={"click": 800}, rows_per_request=20)
print(summary)

`gem train RECIPE --summary` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.data.batch import Batch, Jagged
from gem_core.errors import ConfigError, nearest
from gem_core.plugins import Registry
from gem_core.protocols import Table
from gem_core.recipe import Recipe
from gem_core.schema import DenseStats, Fitted, Schema


@dataclass(frozen=True)
class Summary:
    """The counts.

    Attributes:
        parameters: dense, by part.
        tables: numbers of each embedding table.
        flops: forward, per row, by part, for `events` per type and `rows_per_request`.
        at_most: the tables whose vocabulary is still to be learned, counted at its largest.
    """

    parameters: dict[str, int]
    tables: dict[str, int]
    flops: dict[str, float]
    events: dict[str, int]
    rows_per_request: int
    at_most: tuple[str, ...]

    def __str__(self) -> str:
        rows = "1 row" if self.rows_per_request == 1 else f"{self.rows_per_request} rows"
        events = ", ".join(f"{n} {event}" for event, n in self.events.items())
        limit = "at most " if self.at_most else ""
        tables = {f"{table}{' (at most)' if table in self.at_most else ''}": n for table, n in self.tables.items()}
        blocks: list[tuple[str, Mapping[str, float]]] = [
            ("dense parameters", self.parameters),
            (f"table parameters, {limit}{_short(4 * sum(self.tables.values()))}B in float32", tables),
            (f"forward FLOPs per row, with {rows} a request and events {events or 'of no type'}", self.flops),
        ]
        lines = []
        for title, values in blocks:
            width = max([32, *map(len, values)])
            lines += [title, *(f"  {part:<{width}}{_short(n):>10}" for part, n in values.items())]
            lines.append(f"  {'total':<{width}}{_short(sum(values.values())):>10}")
        return "\n".join(lines)


def summarise(
    recipe: Recipe,
    registry: Registry,
    schema: Schema | None = None,
    *,
    lengths: Mapping[str, int] | None = None,
    rows_per_request: int = 1,
) -> Summary:
    """Build the recipe's model on the meta device and count it.

    Args:
        schema: default: the recipe's, or that of a reader which says it without its data (`schema_of`). It need not be
            fitted: a vocabulary that is still to be learned counts with its largest size.
        lengths: typical number of events per event type (default: the schema's `max_length`).
        rows_per_request: rows that share the work done once per request.
    """
    schema = _schema_of(recipe, registry) if schema is None else schema
    for event in lengths or {}:
        if event not in schema.events:
            raise ConfigError(f'summary: lengths: no event type "{event}" in the schema{nearest(event, schema.events)}')
    tables = _Tables()
    with torch.device("meta"):
        model: Any = registry.create(
            "model", recipe.model.name, recipe.model.options, "model", schema=_sized(schema), embedding=tables
        )
    batch = _typical(schema, lengths or {}, rows_per_request)
    return Summary(
        parameters={part: n for part, n in _parameters(model) if n},
        tables={table.name: table.rows * table.dim for table in tables.tables},
        flops={part: n / rows_per_request for part, n in model.flops(batch).items()},
        events={event: fields["time"].values.numel() for event, fields in batch.events.items()},
        rows_per_request=rows_per_request,
        at_most=tuple(table.name for table in tables.tables if _learned(schema, table.name)),
    )


def _schema_of(recipe: Recipe, registry: Registry) -> Schema:
    """The schema of the recipe's reader, as it is known before the data are read."""
    given, reader = recipe.data.schema_, recipe.data.reader
    schema = None
    if given is not None:
        schema = Schema.load(given) if isinstance(given, str) else Schema.parse(given, "recipe: data.schema")
    known = getattr(registry.get("reader", reader.name).load(), "schema_of", None)
    if known is not None:
        schema = known(registry.config("reader", reader.name, reader.options, "data.reader"), schema)
    if schema is None:
        raise ConfigError(f'summary: reader "{reader.name}" brings its own schema, which only its data tell: pass it')
    return schema


def _learned(schema: Schema, table: str) -> bool:
    options = schema.sparse_options(table)
    return schema.fitted is None and options.hash is None and options.vocabulary is None


class _Tables:
    """An embedding that only takes note of its tables."""

    tables: Sequence[Table] = ()

    def setup(self, tables: Sequence[Table], mesh: Any = None, plan: Any = None) -> None:
        self.tables = tables


def _parameters(model: nn.Module) -> Iterator[tuple[str, int]]:
    for name, parameter in model.named_parameters(recurse=False):
        yield name, parameter.numel()
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from ((f"{name}.{key}", _size(module)) for key, module in child.named_children())
        else:
            yield name, _size(child)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _sized(schema: Schema) -> Schema:
    """A schema that is not fitted, with a fitted part of the largest size that it may get."""
    if schema.fitted is not None:
        return schema
    edges = {n: range(f.bins + 1) if f.encoding == "piecewise" else () for n, f in schema.dense.items()}
    learned: dict[str, Any] = {t: range(schema.sparse_options(t).max_vocabulary) for t in schema.tables()}
    fitted = Fitted.model_construct(
        rows=0,
        dense={n: DenseStats(mean=0, std=1, edges=list(e)) for n, e in edges.items()},
        vocabularies=learned,
        surfaces=schema.surfaces or ["all"],
        base_rates={},
    )
    return schema.model_copy(update={"fitted": fitted})


def _typical(schema: Schema, lengths: Mapping[str, int], rows: int) -> Batch:
    """One request; only what says how many rows and events there are."""
    nothing = torch.empty(0, 0)

    def time(event: str) -> Jagged:
        longest = schema.events[event].max_length
        n = min(lengths.get(event, longest), longest)
        return Jagged(torch.empty(n, dtype=torch.int64, device="meta"), torch.tensor([0, n]), longest)

    def zeros(n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int64)

    return Batch(
        dense=nothing, ids={}, vectors={}, request_dense=nothing, request_ids={}, request_vectors={},
        events={event: {"time": time(event)} for event in schema.events},
        request=zeros(rows), request_time=zeros(1), user=zeros(1), surface=zeros(rows), row_id=zeros(rows),
    )  # fmt: skip


def _short(n: float) -> str:
    for unit in ("", " K", " M", " G"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g} T"
