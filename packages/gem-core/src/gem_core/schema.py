"""The schema: what a team's log means. A short YAML file, validated; `fit` adds what the training split teaches.

    user: user_id
    time: shown_at
    sparse: {ad: {hash: 100000}, category: {}}
    dense: {price: {transform: log1p}}
    events: {click: {max_length: 256, fields: {ad: {}, category: {}}}}
    objectives: {click: {label: clicked}}

Importing this module needs no torch. `Schema.encode` (gem_core.data.encode) is the one preprocessing of training and
serving.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gem_core.errors import ConfigError
from gem_core.validation import explain, read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa

    from gem_core.data.batch import Batch
    from gem_core.data.encode import EventLog

Level = Literal["row", "request"]
MISSING, UNSEEN, FIRST_KNOWN = 0, 1, 2
"""Encoded ids: 0 for a missing value, 1 for one that the vocabulary does not hold, known values from 2."""


_ID_OPTIONS = {"vocabulary", "max_vocabulary", "min_count", "hash", "unseen", "unseen_buckets"}


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def names_to_options(value: object) -> object:
    """`[a, b]` and `{a: null}` are short for `{a: {}, b: {}}`."""
    if isinstance(value, list):
        return {name: {} for name in value} if all(isinstance(v, str) for v in value) else value
    if isinstance(value, dict):
        return {k: {} if v is None else v for k, v in value.items()}
    return value


class DenseFeature(_Part):
    """A number per row or request. Missing values (null, NaN) are legal unless `missing: error`.

    `encoding`: "linear" (standardised) or "piecewise" (piecewise-linear over `bins` quantile bins, in the model).
    """

    column: str | None = None
    level: Level = "row"
    transform: Literal["none", "log1p"] = "none"
    encoding: Literal["linear", "piecewise"] = "linear"
    bins: int = Field(26, ge=2, le=1024)
    missing: Literal["allow", "error"] = "allow"


class SparseFeature(_Part):
    """An id, or several (`multi`), per row or request.

    The ids come from a vocabulary learned in `fit` (default; at most `max_vocabulary` values seen at least `min_count`
    times), one given as a list (`vocabulary`), or hashing into `hash` buckets. `unseen` says what an id outside the
    vocabulary becomes: "oov" (the row for unseen ids), "error", or "hash" (one of `unseen_buckets` extra rows).
    Features with one `table` share ids and vectors; an event field that shares a table with a row feature gives the
    model a match bit.
    """

    column: str | None = None
    level: Level = "row"
    table: str | None = None
    vocabulary: list[str | int] | None = None
    max_vocabulary: int = Field(1_000_000, ge=1)
    min_count: int = Field(1, ge=1)
    hash: int | None = Field(None, ge=1)
    unseen: Literal["oov", "error", "hash"] = "oov"
    unseen_buckets: int = Field(64, ge=1)
    multi: bool = False
    max_length: int = Field(64, ge=1)
    pooling: Literal["mean", "sum"] = "mean"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.hash is not None and self.vocabulary is not None:
            raise ValueError("give `hash` or `vocabulary`, not both")
        return self


class VectorFeature(_Part):
    """A vector of `width` numbers per row or request."""

    column: str | None = None
    level: Level = "row"
    width: int = Field(ge=1)


class EventField(_Part):
    """A field of an event: an id ("sparse") or a number ("dense"). A sparse field without options of its own shares
    the table of the row or request feature of the same name, where there is one."""

    kind: Literal["sparse", "dense"] = "sparse"
    column: str | None = None
    table: str | None = None
    vocabulary: list[str | int] | None = None
    max_vocabulary: int = Field(1_000_000, ge=1)
    min_count: int = Field(1, ge=1)
    hash: int | None = Field(None, ge=1)
    unseen: Literal["oov", "error", "hash"] = "oov"
    unseen_buckets: int = Field(64, ge=1)
    transform: Literal["none", "log1p"] = "none"


class EventType(_Part):
    """One type of past event of a user. Stored once per user in time order; a request sees the newest `max_length`
    events that are strictly earlier than it. `user`, `time`: columns of the events (default: those of the rows). Events
    in list columns of the rows stand in "<type>.time" and "<type>.<field>", or in the columns named here and there."""

    user: str | None = None
    time: str | None = None
    max_length: int = Field(256, ge=1)
    fields: Annotated[dict[str, EventField], BeforeValidator(names_to_options)] = Field(min_length=1)

    @model_validator(mode="after")
    def _no_time_field(self) -> Self:
        if "time" in self.fields:
            raise ValueError('the field name "time" is taken: every event has its time')
        return self


class Objective(_Part):
    """A task: to predict the column `label` (default: the task's name), which holds 0, 1 or nothing.

    A row counts where `label` is not null, `mask` (if given) is true and its surface is in `surfaces`.

    `rate`: column with the rate at which negatives were kept; in metrics they weigh 1 / rate. `correction` says how a
    loss undoes the sampling: by the same weights, or by a shift of the logit by log(rate) in every row ("shift").
    `weight`: column of weights.

    `windows`: attribution windows of a delayed objective, shortest first, as in [90m, 1d, 7d] (units s, m, h, d); `label`
    is that of the last, and `converted_at` is the column with the time of the conversion, null where there is none.
    Each row trains one window's head, chosen by a hash of its row id, and the last window's head is served. A row whose
    label is not known yet counts for those windows that ended before the time in the column `observed_until`.
    """

    label: str | None = None
    mask: str | None = None
    weight: str | None = None
    rate: str | None = None
    correction: Literal["weight", "shift"] = "weight"
    surfaces: list[str] | None = None
    windows: list[str] = []
    converted_at: str | None = None
    observed_until: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.correction == "shift" and self.rate is None:
            raise ValueError("correction: shift needs `rate`, the column with the rate at which negatives were kept")
        lengths = [window_seconds(window) for window in self.windows]
        if len(lengths) == 1 or any(b <= a for a, b in itertools.pairwise(lengths)):
            raise ValueError(f"windows: expected at least two, shortest first, found {self.windows}")
        if bool(self.windows) != (self.converted_at is not None):
            raise ValueError(
                "`windows` and `converted_at`, the column with the time of the conversion, need each other"
            )
        if self.observed_until is not None and not self.windows:
            raise ValueError("`observed_until` needs `windows`")
        return self


def window_seconds(text: str) -> int:
    """Length of an attribution window, as in "90m"."""
    number, unit = text[:-1], _UNITS.get(text[-1:])
    if unit is None or not number.isdecimal() or int(number) == 0:
        raise ValueError(f'window {text!r}: expected a number and a unit of s, m, h, d, as in "90m" or "7d"')
    return int(number) * unit


class DenseStats(_Part):
    """Of the training split, after the transform: mean, standard deviation, and bin edges in standardised units."""

    mean: float
    std: float
    edges: list[float] = []


class Fitted(_Part):
    """What `Schema.fit` learned from the training split."""

    rows: int
    dense: dict[str, DenseStats]
    vocabularies: dict[str, list[str | int]]
    surfaces: list[str]
    base_rates: dict[str, float]


class Schema(_Part):
    """What the columns of a log mean; docs/guides/own-logs.md builds one step by step.

    `user`, `time`, `request`, `row_id`, `surface`: columns of the rows. Without `request`, adjacent rows of equal user
    and time are one. `history_before`: column with the time where the history ends, if that is before the request.
    `surfaces`: all surfaces, where training rows may not have each. A name in `dense`, `sparse`, `vectors` is the
    column, unless `column` says another; `[a, b]` is short for `{a: {}, b: {}}`. `level: request` is for what is the
    same in all rows of a request.
    """

    schema_version: Literal[1] = 1
    user: str
    time: str
    request: str | None = None
    row_id: str | None = None
    history_before: str | None = None
    surface: str | None = None
    surfaces: list[str] | None = None
    dense: Annotated[dict[str, DenseFeature], BeforeValidator(names_to_options)] = {}
    sparse: Annotated[dict[str, SparseFeature], BeforeValidator(names_to_options)] = {}
    vectors: dict[str, VectorFeature] = {}
    events: dict[str, EventType] = {}
    objectives: Annotated[dict[str, Objective], BeforeValidator(names_to_options)] = Field(min_length=1)
    fitted: Fitted | None = None

    @model_validator(mode="after")
    def _one_making_of_ids(self) -> Self:
        """The first feature of a table says how its ids are made; another may only repeat it."""
        for table, keys in self.tables().items():
            first = self.sparse_options(table)
            for key in keys[1:]:
                own = self._options_of(key)
                for name in sorted(_ID_OPTIONS & own.model_fields_set):
                    if getattr(own, name) != getattr(first, name):
                        raise ValueError(
                            f"{key}.{name}: the features of table {table!r} share their ids, and {keys[0]!r} says "
                            f"{name}: {getattr(first, name)}, found {getattr(own, name)}; give one another `table`"
                        )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [*self.dense, *self.sparse, *self.vectors]
        clash = next((task for task in self.objectives if self.heads().count(task) > 1), None)
        if clash is not None:
            raise ValueError(f"objectives.{clash}: this name is that of a window of another objective")
        for name in (*names, *self.events, *self.objectives, *(f for e in self.events.values() for f in e.fields)):
            if not name or "." in name or "/" in name:
                raise ValueError(f'name {name!r}: names must not be empty or hold "." or "/", which separate names')
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"feature {twice[0]!r} is declared in more than one of dense, sparse, vectors")
        if self.surfaces is not None and self.surface is None:
            raise ValueError("surfaces needs `surface`, the column that holds the surface")
        for task, objective in self.objectives.items():
            if objective.surfaces is None:
                continue
            if self.surface is None:
                raise ValueError(f"objectives.{task}.surfaces needs `surface`, the column that holds the surface")
            unknown = sorted(set(objective.surfaces) - set(self.surfaces or objective.surfaces))
            if unknown:
                raise ValueError(f"objectives.{task}.surfaces: {unknown[0]!r} is not among surfaces {self.surfaces}")
        return self

    # ---- names -------------------------------------------------------------------------------------------------

    def names(self, kind: Literal["dense", "sparse", "vectors"], level: Level) -> list[str]:
        """Features of a kind at a level, in the schema's order (the column order of `Batch.dense`)."""
        features: dict[str, Any] = getattr(self, kind)
        return [name for name, feature in features.items() if feature.level == level]

    def table_of(self, key: str) -> str:
        """Table of a lookup key: a sparse feature's name, or "<event type>.<field>"."""
        if key in self.sparse:
            return self.sparse[key].table or key
        event, _, name = key.partition(".")
        field = self.events[event].fields[name]
        return field.table or (self.table_of(name) if name in self.sparse else key)

    def sparse_keys(self) -> list[str]:
        """Every lookup key: sparse features, then event fields."""
        fields = [f"{e}.{n}" for e, t in self.events.items() for n, f in t.fields.items() if f.kind == "sparse"]
        return [*self.sparse, *fields]

    def tables(self) -> dict[str, list[str]]:
        """Table name -> the lookup keys that it serves."""
        out: dict[str, list[str]] = {}
        for key in self.sparse_keys():
            out.setdefault(self.table_of(key), []).append(key)
        return out

    def sparse_options(self, table: str) -> SparseFeature | EventField:
        """The declaration that says how a table's ids are made: its first feature's."""
        return self._options_of(self.tables()[table][0])

    def _options_of(self, key: str) -> SparseFeature | EventField:
        if key in self.sparse:
            return self.sparse[key]
        event, _, name = key.partition(".")
        return self.events[event].fields[name]

    def table_rows(self, table: str) -> int:
        """Number of ids of a table, those for missing and unseen values included. Needs a fitted schema if learned."""
        options = self.sparse_options(table)
        if options.hash is not None:
            return FIRST_KNOWN + options.hash
        known = options.vocabulary
        if known is None:
            known = self.require_fitted().vocabularies[table]
        return FIRST_KNOWN + len(known) + (options.unseen_buckets if options.unseen == "hash" else 0)

    def surface_names(self) -> list[str]:
        """Surfaces in the order of `Batch.surface`; one, "all", where the schema has no surface column."""
        if self.surface is None:
            return ["all"]
        return self.surfaces if self.surfaces is not None else self.require_fitted().surfaces

    def heads_of(self, task: str) -> list[str]:
        """The heads of an objective: one per attribution window, shortest first ("purchase@90m", ...); the last, which is
        served, has the task's name."""
        return [*(f"{task}@{window}" for window in self.objectives[task].windows[:-1]), task]

    def heads(self) -> list[str]:
        """The heads of all objectives."""
        return [head for task in self.objectives for head in self.heads_of(task)]

    def require_fitted(self) -> Fitted:
        """The fitted part, or an error that says how to get it."""
        if self.fitted is None:
            raise ConfigError("the schema is not fitted: call schema.fit(rows, events) on the training split first")
        return self.fitted

    # ---- files -------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, value: Mapping[str, Any], where: str = "schema") -> Schema:
        """Validate a mapping; errors name the place in it and the nearest valid name."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from error

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Read a schema file (YAML or JSON)."""
        value = read_yaml(Path(path), f"schema {path}")
        return cls.parse(value, where=f"schema {path}")

    def save(self, path: str | Path) -> None:
        """Write the schema with its fitted part as JSON."""
        Path(path).write_text(json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=1))

    # ---- data --------------------------------------------------------------------------------------------------

    def fit(self, rows: Iterable[pa.Table], events: Mapping[str, Iterable[pa.Table]], seed: int = 0) -> Schema:
        """The schema with statistics and vocabularies of the training split (streaming; see gem_core.data.fit)."""
        from gem_core.data.fit import fit

        return fit(self, rows, events, seed)

    def encode(self, records: pa.Table | Sequence[Mapping[str, Any]], events: EventLog | None = None) -> Batch:
        """Records (one per row, rows of a request adjacent) to a batch; see gem_core.data.encode.

        Histories come from `events` (the users' stored events) or, without it, from list columns
        "<event type>.<field>" and "<event type>.time" of a request's first record.
        """
        from gem_core.data.encode import encode

        return encode(self, records, events)
