"""What goes into an exported program: the tensors of a `Batch` by name, no class of ours among them.

A name says where in the batch a tensor is: "ids.ad.values" is `batch.ids["ad"].values`. Left out is what no prediction needs
(labels, `user`, `row_id`), what follows from the rest (offsets of single-valued features), and what has no columns; the fields
of an event type share "events.<type>.offsets".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_core.data.batch import Batch, Jagged
from gem_core.errors import DataError, nearest
from gem_core.schema import Level, Schema

LEVELS: tuple[tuple[str, Level, str], ...] = (("", "row", "rows"), ("request_", "request", "requests"))
"""Of each level: the prefix of its fields in `Batch`, its name in the schema, and what there is one of for each entry."""


@dataclass(frozen=True)
class Input:
    """A tensor: its first axis is dynamic, of `size` ("rows", "requests", or a ragged part's own) plus `extra` entries."""

    name: str
    dtype: torch.dtype
    size: str
    extra: int = 0
    width: int | None = None

    def dims(self) -> list[str | int]:
        """The shape, as a manifest shows it: ["rows + 1"], ["rows", 3]."""
        first = f"{self.size} + {self.extra}" if self.extra else self.size
        return [first] if self.width is None else [first, self.width]


class Signature:
    """The inputs of every model of a schema, in order."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.inputs = tuple(_inputs(schema))
        self.names = frozenset(each.name for each in self.inputs)

    def tensors(self, batch: Batch) -> dict[str, Tensor]:
        """The batch's tensors by name.

        Raises:
            DataError: the batch lacks one, or has it in another type or shape; names it.
        """
        sizes = {"rows": batch.rows, "requests": batch.requests}
        out = {}
        for each in self.inputs:
            tensor = _at(batch, each.name)
            shape, expected = tuple(tensor.shape), () if each.width is None else (each.width,)
            count = sizes.setdefault(each.size, len(tensor) - each.extra) + each.extra if shape else 0
            if tensor.dtype != each.dtype or shape != (count, *expected):
                raise DataError(
                    f'exported model: input "{each.name}": expected {each.dtype} of shape {each.dims()} with '
                    f"{each.size} = {sizes.get(each.size)}, found {tensor.dtype} of shape {list(shape)}; "
                    "encode the batch with the schema that was exported"
                )
            out[each.name] = tensor
        return out

    def batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        """The inverse of `tensors`; users and row ids are numbers of their own."""
        request, time = tensors["request"], tensors["request_time"]
        counts = {"row": request.shape[0], "request": time.shape[0]}
        levels: dict[str, Any] = {}
        for prefix, level, _ in LEVELS:
            n = counts[level]
            name = f"{prefix}dense"
            levels[name] = (
                tensors[name] if name in self.names else torch.zeros(n, 0, dtype=torch.float32, device=request.device)
            )
            levels[f"{prefix}ids"] = ids = {}
            for feature in self.schema.names("sparse", level):
                options, name = self.schema.sparse[feature], f"{prefix}ids.{feature}"
                ids[feature] = (
                    Jagged(tensors[f"{name}.values"], tensors[f"{name}.offsets"], options.max_length)
                    if options.multi
                    else Jagged(tensors[f"{name}.values"], torch.arange(n + 1, device=request.device), 1)
                )
            names = self.schema.names("vectors", level)
            levels[f"{prefix}vectors"] = {f: tensors[f"{prefix}vectors.{f}"] for f in names}
        events = {}
        for event, kind in self.schema.events.items():
            offsets = tensors[f"events.{event}.offsets"]
            fields = ["time", *kind.fields]
            events[event] = {f: Jagged(tensors[f"events.{event}.{f}.values"], offsets, kind.max_length) for f in fields}
        return Batch(
            **levels,
            events=events,
            request=request,
            request_time=time,
            user=torch.arange(counts["request"], device=request.device),
            surface=tensors["surface"],
            row_id=torch.arange(counts["row"], device=request.device),
        )

    def example(self, device: torch.device) -> dict[str, Tensor]:
        """Inputs to trace with: every size is another one, and at least 2."""
        names = dict.fromkeys(each.size for each in self.inputs)
        ragged = [name for name in names if name not in ("rows", "requests")]
        sizes = {"requests": 3, "rows": 5} | {name: 7 + 2 * i for i, name in enumerate(ragged)}
        out = {}
        for each in self.inputs:
            n = sizes[each.size]
            if each.extra:  # the offsets of a ragged part: all entries belong to the first segment
                out[each.name] = torch.full((n + 1,), sizes[each.name.removesuffix(".offsets")], device=device)
                out[each.name][0] = 0
            else:
                shape = (n,) if each.width is None else (n, each.width)
                out[each.name] = torch.zeros(shape, dtype=each.dtype, device=device)
        out["request"] = torch.arange(sizes["rows"], device=device).clamp(max=sizes["requests"] - 1)
        return out

    def dynamic_shapes(self) -> dict[str, dict[int, Any]]:
        """Per input its dynamic axis for torch.export; equal sizes are one dimension."""
        names = dict.fromkeys(each.size for each in self.inputs)
        # Names of features may be anything, those of dimensions only identifiers.
        dims = {name: torch.export.Dim(f"size{i}", min=0) for i, name in enumerate(names)}
        return {each.name: {0: dims[each.size] + each.extra if each.extra else dims[each.size]} for each in self.inputs}


def _inputs(schema: Schema) -> Iterator[Input]:
    for prefix, level, size in LEVELS:
        if names := schema.names("dense", level):
            yield Input(f"{prefix}dense", torch.float32, size, width=len(names))
        for feature in schema.names("sparse", level):
            name = f"{prefix}ids.{feature}"
            multi = schema.sparse[feature].multi
            yield Input(f"{name}.values", torch.int64, name if multi else size)
            if multi:
                yield Input(f"{name}.offsets", torch.int64, size, extra=1)
        for feature in schema.names("vectors", level):
            yield Input(f"{prefix}vectors.{feature}", torch.float32, size, width=schema.vectors[feature].width)
    for event, kind in schema.events.items():
        name = f"events.{event}"
        yield Input(f"{name}.offsets", torch.int64, "requests", extra=1)
        yield Input(f"{name}.time.values", torch.int64, name)
        for field, options in kind.fields.items():
            yield Input(f"{name}.{field}.values", torch.int64 if options.kind == "sparse" else torch.float32, name)
    yield Input("request", torch.int64, "rows")
    yield Input("request_time", torch.int64, "requests")
    yield Input("surface", torch.int64, "rows")


def _at(batch: Batch, name: str) -> Tensor:
    part, *path = name.split(".")
    value: Any = getattr(batch, part)
    if part == "events" and len(path) == 2:
        path.insert(1, "time")
    for step in path:
        if isinstance(value, Jagged):
            value = getattr(value, step)
        elif step in value:
            value = value[step]
        else:
            raise DataError(f'exported model: the batch has no "{name}": no "{step}"{nearest(step, value)}')
    out: Tensor = value
    return out
