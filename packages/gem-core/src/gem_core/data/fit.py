"""What a schema learns from the training split, in one pass over the rows and one over the events.

Statistics are exact; quantile edges and nothing else come from a sample where a feature has more than a million values
(seeded, uniform). Only events before the last training request are looked at: later ones are the future.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.data.columns import Column, Floats, Ints, Source, column
from gem_core.data.ids import split_decimals
from gem_core.data.targets import Targets
from gem_core.data.values import dense_values, inline_column, surface_texts
from gem_core.errors import ConfigError, DataError, nearest, warn
from gem_core.schema import DenseFeature, DenseStats, EventField, Fitted, Schema

SAMPLE = 1_000_000
"""Values of a feature that the quantiles are computed from."""

DISTINCT = 8_000_000
"""Distinct ids of pieces that are gathered before they are merged."""


def quantile_edges(values: Floats, bins: int) -> list[float]:
    """At most bins + 1 increasing edges with about equally many values between them.

    A value that alone fills a bin (the zero of a count) gets one edge, and the other edges go to the rest, so that a
    feature with many ties keeps its resolution.
    """
    if not len(values):
        return [0.0, 1.0]
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= bins + 1:
        edges = distinct
    else:
        heavy = counts * bins >= len(values)
        rest = np.repeat(distinct[~heavy], counts[~heavy])
        levels = np.linspace(0, 1, max(2, bins + 1 - int(heavy.sum())))
        inner = np.quantile(rest, levels, method="nearest") if len(rest) else rest
        edges = np.unique(np.concatenate([distinct[heavy], inner]))
    return [float(e) for e in edges] if len(edges) > 1 else [float(edges[0]), float(edges[0]) + 1.0]


class _Moments:
    """Mean, standard deviation and (if `bins`) a sample of a stream of numbers; NaN is left out."""

    def __init__(self, key: str, bins: int | None, seed: int) -> None:
        self.bins = bins
        self.n, self.mean, self.square = 0, 0.0, 0.0
        self.sample: list[npt.NDArray[np.float32]] = []
        self.kept: npt.NDArray[np.float32] | None = None
        self.random = np.random.default_rng([seed, zlib.crc32(key.encode())])

    def add(self, numbers: npt.NDArray[np.floating[Any]]) -> None:
        values: Floats = numbers[~np.isnan(numbers)].astype(np.float64)
        if not len(values):
            return
        if self.bins is not None:
            self._keep(values.astype(np.float32))
        n, mean = len(values), float(values.mean())
        delta, total = mean - self.mean, self.n + n
        self.square += float(((values - mean) ** 2).sum()) + delta * delta * self.n * n / total
        self.mean += delta * n / total
        self.n = total

    def _keep(self, values: npt.NDArray[np.float32]) -> None:
        """Reservoir sampling (algorithm R), a piece at a time."""
        if self.kept is None:
            self.sample.append(values)
            if self.n + len(values) < SAMPLE:
                return
            whole = np.concatenate(self.sample)
            self.sample, self.kept, values = [], whole[:SAMPLE], whole[SAMPLE:]
            first = SAMPLE
        else:
            first = self.n
        slot = self.random.integers(0, np.arange(first, first + len(values)) + 1)
        chosen = slot < SAMPLE
        self.kept[slot[chosen]] = values[chosen]

    def stats(self) -> DenseStats:
        std = float(np.sqrt(self.square / self.n)) if self.n else 0.0
        std = std if std > 1e-12 * max(1.0, abs(self.mean)) else 1.0
        if self.bins is None:
            return DenseStats(mean=self.mean, std=std)
        values = self.kept if self.kept is not None else np.concatenate([*self.sample, np.empty(0, np.float32)])
        return DenseStats(
            mean=self.mean, std=std, edges=quantile_edges((values.astype(np.float64) - self.mean) / std, self.bins)
        )


class _IdFrequencies:
    """How often each id of a table occurs, over all the lookup keys that share it."""

    def __init__(self) -> None:
        self.pieces: list[pa.Table] = []
        self.size = 0

    def add(self, values: pa.Array) -> None:
        found = values.drop_null().value_counts()
        distinct = found.field("values")
        self.pieces.append(pa.table({"id": distinct.cast(pa.string()), "n": found.field("counts")}))
        self.size += len(distinct)
        if self.size > DISTINCT:
            self._merge()

    def _merge(self) -> pa.Table:
        whole = (
            pa.concat_tables(self.pieces)
            if self.pieces
            else pa.table({"id": pa.array([], pa.string()), "n": pa.array([], pa.int64())})
        )
        merged = whole.group_by("id", use_threads=False).aggregate([("n", "sum")]).rename_columns(["id", "n"])
        self.pieces, self.size = [merged], len(merged)
        return merged

    def vocabulary(self, max_size: int, min_count: int) -> list[str | int]:
        """By frequency, then value (integers before texts, in their own order)."""
        merged = self._merge()
        merged = merged.filter(pc.greater_equal(merged["n"], min_count))
        texts = pa.concat_arrays(merged["id"].chunks) if len(merged) else pa.array([], pa.string())
        integers, decimal = split_decimals(texts)
        ranked = pa.table({"id": texts, "n": merged["n"], "text": pa.array(~decimal), "value": pa.array(integers)})
        order = pc.sort_indices(
            ranked,
            sort_keys=[("n", "descending"), ("text", "ascending"), ("value", "ascending"), ("id", "ascending")],
        )[:max_size]
        chosen = ranked.take(order)
        whole = not chosen["text"].to_numpy().any()
        return list(chosen["value" if whole else "id"].to_pylist())


class _Fit:
    def __init__(self, schema: Schema, seed: int) -> None:
        self.schema = schema
        self.seed = seed
        self.rows = 0
        self.last_request = np.iinfo(np.int64).min
        self.moments: dict[str, _Moments] = {}
        self.ids: dict[str, _IdFrequencies] = {
            table: _IdFrequencies()
            for table in schema.tables()
            if schema.sparse_options(table).hash is None and schema.sparse_options(table).vocabulary is None
        }
        self.surfaces = _IdFrequencies()
        self.positives = dict.fromkeys(schema.heads(), 0.0)
        self.weight = dict.fromkeys(schema.heads(), 0.0)

    def _numbers(self, key: str, values: Column, feature: DenseFeature | EventField, keep: Any = None) -> None:
        if key not in self.moments:
            piecewise = isinstance(feature, DenseFeature) and feature.encoding == "piecewise"
            bins = feature.bins if isinstance(feature, DenseFeature) and piecewise else None
            self.moments[key] = _Moments(key, bins, self.seed)
        numbers = dense_values(values, feature)
        self.moments[key].add(numbers if keep is None else numbers[keep])

    def _ids(self, key: str, values: pa.Array) -> None:
        frequencies = self.ids.get(self.schema.table_of(key))
        if frequencies is not None:
            frequencies.add(values)

    def add_rows(self, table: pa.Table, source: Source) -> None:
        schema = self.schema
        self.rows += len(table)
        for name, dense in schema.dense.items():
            self._numbers(name, column(table, dense.column or name, f"dense feature {name}", source), dense)
        for name, sparse in schema.sparse.items():
            values = column(table, sparse.column or name, f"sparse feature {name}", source)
            if sparse.multi:
                values, _ = values.lists()
            self._ids(name, values.ids())
        time = column(table, schema.history_before or schema.time, "request time", source).times()
        self.last_request = max(self.last_request, int(time.max(initial=self.last_request)))
        surfaces = surface_texts(schema, table, source)
        if surfaces is not None:
            self.surfaces.add(surfaces.values)
        targets = Targets(schema, table, source, surfaces, required=True)
        for task, label in targets.labels.items():
            self.positives[task] += float((label * targets.weights[task]).sum(dtype=np.float64))
            self.weight[task] += float(targets.weights[task].sum(dtype=np.float64))

    def add_inline_events(self, table: pa.Table, source: Source) -> None:
        """The list columns of rows that carry their own history."""
        for event, kind in self.schema.events.items():
            for name, options in kind.fields.items():
                values, _ = inline_column(self.schema, table, event, name, source).lists()
                self._field(event, name, options, values)

    def add_events(self, event: str, table: pa.Table, source: Source) -> None:
        kind = self.schema.events[event]
        time = column(table, kind.time or self.schema.time, f"time of {event} events", source).times()
        earlier: Ints = np.flatnonzero(time < self.last_request)
        table, source = table.take(pa.array(earlier)), source.take(earlier, len(table))
        for name, options in kind.fields.items():
            values = column(table, options.column or name, f"field {event}.{name}", source)
            self._field(event, name, options, values)

    def _field(self, event: str, name: str, options: EventField, values: Column) -> None:
        key = f"{event}.{name}"
        if options.kind == "sparse":
            self._ids(key, values.ids())
        else:
            self._numbers(key, values, options)

    def _check_objectives(self, surfaces: list[str]) -> None:
        """Raise for an objective on a surface that does not occur; warn of one that nothing can be learned of."""
        for task, objective in self.schema.objectives.items():
            for surface in objective.surfaces or () if self.schema.surfaces is None else ():
                if surface not in surfaces:
                    raise ConfigError(
                        f'objectives.{task}.surfaces: "{surface}" does not occur in the training rows'
                        f"{nearest(surface, surfaces)} (one that comes later: declare all surfaces in `surfaces:`)"
                    )
            if not self.weight[task]:
                warn(f"objective {task} has no label in the training rows: nothing is learned of it")
            elif not self.positives[task]:
                warn(f"objective {task} has no positive label in the training rows: there are only zeros to learn")

    def fitted(self) -> Fitted:
        if not self.rows:
            raise DataError("the training split has no rows: nothing to fit the schema on")
        surfaces = [str(s) for s in self.surfaces.vocabulary(1_000_000, 1)]
        self._check_objectives(surfaces)
        vocabularies = {}
        for table, frequencies in self.ids.items():
            options = self.schema.sparse_options(table)
            vocabularies[table] = frequencies.vocabulary(options.max_vocabulary, options.min_count)
        return Fitted(
            rows=self.rows,
            dense={key: moments.stats() for key, moments in self.moments.items()},
            vocabularies=vocabularies,
            surfaces=surfaces,
            base_rates={t: self.positives[t] / w if w else 0.0 for t, w in self.weight.items()},
        )


def fit(schema: Schema, rows: Iterable[pa.Table], events: Mapping[str, Iterable[pa.Table]], seed: int = 0) -> Schema:
    """See `Schema.fit`. Without `events`, histories stand in list columns of the rows."""
    return fit_sources(schema, _named(rows, "rows"), {e: _named(t, f"{e} events") for e, t in events.items()}, seed)


def _named(tables: Iterable[pa.Table], name: str) -> Iterator[tuple[pa.Table, Source]]:
    first = 0
    for table in tables:
        yield table, Source(name, first)
        first += len(table)


def fit_sources(
    schema: Schema,
    rows: Iterable[tuple[pa.Table, Source]],
    events: Mapping[str, Iterable[tuple[pa.Table, Source]]],
    seed: int = 0,
) -> Schema:
    """`fit` over pieces that know where they are from."""
    work = _Fit(schema, seed)
    for table, source in rows:
        work.add_rows(table, source)
        if not events:
            work.add_inline_events(table, source)
    for event, tables in events.items():
        for table, source in tables:
            work.add_events(event, table, source)
    return schema.model_copy(update={"fitted": work.fitted()})
