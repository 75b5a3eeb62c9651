"""What `gem data prepare` is told of a raw log: a small YAML file, validated like a schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gem_core.data.readers.base import seconds
from gem_core.data.readers.files import Paths
from gem_core.errors import ConfigError
from gem_core.schema import DenseFeature, EventField, EventType, Objective, Schema, SparseFeature, names_to_options
from gem_core.validation import explain, read_yaml

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
PARTS = ("user", "item", "user_item")
"""What the as-of counts are of."""


def _duration(value: object) -> object:
    """`7d` is short for 604800 seconds; s, m, h and d are known."""
    found = re.fullmatch(r"(\d+)([smhd])", value) if isinstance(value, str) else None
    return value if found is None else int(found[1]) * UNITS[found[2]]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Labelled(_Part):
    """An objective: 1 where the user does one of `actions` on the item `within` so long after the impression (seconds,
    or 30m, 12h, 7d). An action counts for the newest impression of its item alone."""

    actions: list[str] = Field(min_length=1)
    within: Annotated[int, BeforeValidator(_duration)] = Field(ge=0)


class History(_Part):
    """A type of events: those of `actions`, with the item and the columns `fields`."""

    actions: list[str] = Field(min_length=1)
    fields: Annotated[dict[str, EventField], BeforeValidator(names_to_options)] = {}
    max_length: int = Field(256, ge=1)


class Options(_Part):
    """A raw log and what becomes of it.

    `log`: a file, folder, glob or list of these, all CSV (with `delimiter`) or all Parquet. `user`, `item`, `time`,
    `action`: its columns. `impressions`: the actions that are one. `item_options`, `sparse`, `dense`: features of the
    impression, as in a schema. `validation_from`, `test_from`: where these splits begin. `faults`: of rows without a
    user, item, time or action: "error", or "skip" and count them.
    """

    log: Paths
    delimiter: str = Field(",", min_length=1, max_length=1)
    user: str = "user"
    item: str = "item"
    time: str = "time"
    action: str = "action"
    impressions: list[str] = Field(min_length=1)
    objectives: dict[str, Labelled] = Field(min_length=1)
    histories: dict[str, History] = {}
    item_options: SparseFeature = SparseFeature()
    sparse: Annotated[dict[str, SparseFeature], BeforeValidator(names_to_options)] = {}
    dense: Annotated[dict[str, DenseFeature], BeforeValidator(names_to_options)] = {}
    validation_from: int | datetime | date
    test_from: int | datetime | date
    faults: Literal["error", "skip"] = "error"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if seconds(self.validation_from) >= seconds(self.test_from):
            raise ValueError("validation_from: expected a time before test_from")
        taken = {self.user, self.item, self.time, *self.count_names()}
        places = {f.column or n for of in (self.sparse, self.dense) for n, f in of.items()}
        clash = sorted((taken & places) | (taken | places) & self.objectives.keys())
        if clash:
            raise ValueError(f'"{clash[0]}": a name for two columns of the rows')
        multi = sorted(name for name, feature in self.sparse.items() if feature.multi)
        if multi:
            raise ValueError(f"sparse.{multi[0]}.multi: a raw log has one value in a column")
        self.schema_of()
        return self

    def edges(self) -> tuple[int, int]:
        """Seconds where validation and test begin."""
        return int(seconds(self.validation_from)), int(seconds(self.test_from))

    def columns(self) -> dict[str, Literal["id", "dense"]]:
        """Columns of the log besides user, item, time and action, and how they are read."""
        out: dict[str, Literal["id", "dense"]] = {f.column or n: "id" for n, f in self.sparse.items()}
        out |= {f.column or n: "dense" for n, f in self.dense.items()}
        for history in self.histories.values():
            for name, field in history.fields.items():
                out.setdefault(field.column or name, "id" if field.kind == "sparse" else "dense")
        return {name: role for name, role in out.items() if name not in (self.user, self.item)}

    def count_names(self) -> list[str]:
        """Columns of the as-of counts."""
        return [f"{part}_{history}_count" for history in self.histories for part in PARTS]

    def schema_of(self) -> Schema:
        """The schema of what is written."""
        count = DenseFeature(transform="log1p", encoding="piecewise")
        events = {
            name: EventType(fields={self.item: EventField(), **h.fields}, max_length=h.max_length)
            for name, h in self.histories.items()
        }
        return Schema(
            user=self.user,
            time=self.time,
            row_id="row_id",
            sparse={self.item: self.item_options, **self.sparse},
            dense={**self.dense, **dict.fromkeys(self.count_names(), count)},
            events=events,
            objectives={task: Objective() for task in self.objectives},
        )

    @classmethod
    def parse(cls, value: Mapping[str, Any], where: str = "options") -> Options:
        """Validate a mapping; errors name the place in it and the nearest valid name."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from error

    @classmethod
    def load(cls, path: str | Path) -> Options:
        """Read an options file (YAML or JSON)."""
        return cls.parse(read_yaml(Path(path), str(path)), str(path))
