"""Warm start: a new run begins with what an earlier one learned, though its vocabulary or schema has changed.

Rows of a table are matched by the id that they stand for, dense parameters by name and shape; what has no match begins as
in a new run. A row's AdaGrad moment comes with it; AdamW's moments, the schedule and the step count start anew.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gem_core.schema import FIRST_KNOWN, Schema
from gem_core.train.build import Parts
from gem_core.train.checkpoint import Checkpoint


@dataclass(frozen=True)
class TableRows:
    """Of one table: rows taken over, rows that are new, and rows of the earlier run that have no place any more."""

    mapped: int
    new: int
    dropped: int
    why: str = ""


@dataclass
class WarmStart:
    """What came from `checkpoint`. `parameters`: names taken over, new here, and only or otherwise shaped there."""

    checkpoint: str
    tables: dict[str, TableRows] = field(default_factory=dict)
    parameters: dict[str, list[str]] = field(default_factory=dict)
    cautions: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"from {self.checkpoint}"]
        for name, t in self.tables.items():
            why = f" ({t.why})" if t.why else ""
            lines.append(f"  table {name}: {t.mapped:,} rows taken over, {t.new:,} new, {t.dropped:,} dropped{why}")
        counts = ", ".join(f"{len(names)} {what}" for what, names in self.parameters.items())
        lines.append(f"  dense parameters: {counts}")
        for what in ("new", "dropped"):
            if self.parameters[what]:
                lines.append(f"  {what}: {', '.join(self.parameters[what])}")
        return "\n".join([*lines, *(f"  caution: {text}" for text in self.cautions)])


def warm_start(parts: Parts, checkpoint: Checkpoint) -> WarmStart:
    """Copy into the parts of a new run what the checkpoint has of them.

    Raises:
        DataError: the checkpoint is damaged.
    """
    old = checkpoint.schema()
    report = WarmStart(str(checkpoint.path), cautions=_cautions(old, parts.schema))
    _dense(parts, checkpoint.part("model"), report)
    _tables(parts, checkpoint.part("embedding"), old, report)
    return report


def _dense(parts: Parts, theirs: dict[str, Tensor], report: WarmStart) -> None:
    # Buffers follow from the schema (bin edges): this run's are right.
    own, names = parts.strategy.state(), {name for name, _ in parts.model.named_parameters()}
    taken = [n for n in own if n in names and n in theirs and theirs[n].shape == own[n].shape]
    parts.strategy.load({**own, **{n: theirs[n] for n in taken}})
    report.parameters = {
        "taken over": taken,
        "new": sorted(names - set(taken)),
        "dropped": sorted(theirs.keys() - own.keys() | (names & theirs.keys()) - set(taken)),
    }


def _tables(parts: Parts, theirs: dict[str, Tensor], old: Schema, report: WarmStart) -> None:
    own = {name: tensor.detach().cpu().clone() for name, tensor in parts.embedding.state().items()}
    for name in sorted({n.removeprefix("tables.").rpartition(".")[0] for n in (*own, *theirs)}):
        weight, moment = f"tables.{name}.weight", f"tables.{name}.moment"
        if weight not in own or weight not in theirs:
            new, gone = len(own.get(weight, ())), len(theirs.get(weight, ()))
            report.tables[name] = TableRows(0, new, gone, "no such table " + ("here" if weight in theirs else "there"))
            continue
        (rows, dim), (old_rows, old_dim) = own[weight].shape, theirs[weight].shape
        if dim != old_dim:
            report.tables[name] = TableRows(0, rows, old_rows, f"width {old_dim} there, {dim} here")
            continue
        to, of, why = _matching(name, parts.schema, old, rows, old_rows)
        own[weight][to] = theirs[weight][of]
        own[moment][to] = theirs[moment][of]
        report.tables[name] = TableRows(len(to), rows - len(to), old_rows - len(of), why)
    parts.embedding.load(own)


def _matching(name: str, new: Schema, old: Schema, rows: int, old_rows: int) -> tuple[Tensor, Tensor, str]:
    """Rows here and the rows there that stand for the same id, and why not more of them."""
    if name not in new.tables() or name not in old.tables():  # a table of the model's own
        same = torch.arange(rows if rows == old_rows else 0)
        return same, same, "" if rows == old_rows else f"{old_rows} rows there"
    own, other = new.sparse_options(name), old.sparse_options(name)
    if own.hash is not None or other.hash is not None:
        same = torch.arange(rows if own.hash == other.hash else FIRST_KNOWN)
        return same, same, "" if own.hash == other.hash else f"hash {other.hash} there, {own.hash} here"
    here = _known(new, name)
    there = {value: row for row, value in enumerate(_known(old, name), FIRST_KNOWN)}
    pairs = [(row, row) for row in range(FIRST_KNOWN)]
    pairs += [(row, there[value]) for row, value in enumerate(here, FIRST_KNOWN) if value in there]
    if own.unseen == other.unseen == "hash" and own.unseen_buckets == other.unseen_buckets:
        pairs += zip(range(FIRST_KNOWN + len(here), rows), range(FIRST_KNOWN + len(there), old_rows), strict=True)
    to, of = torch.tensor(pairs).unbind(1)
    return to, of, ""


def _known(schema: Schema, table: str) -> list[str]:
    """The ids of a table's rows from `FIRST_KNOWN` on; an integer and its decimal text are one id."""
    given = schema.sparse_options(table).vocabulary
    return [str(value) for value in (schema.require_fitted().vocabularies[table] if given is None else given)]


def _cautions(old: Schema, new: Schema) -> list[str]:
    """Lists of names that differ though they are as long: parameters by place among them would be taken for others'."""
    out = []
    for what, a, b in (
        ("surfaces", old.surface_names(), new.surface_names()),
        ("objectives", list(old.objectives), list(new.objectives)),
        *((f"dense features ({x})", old.names("dense", x), new.names("dense", x)) for x in ("row", "request")),
    ):
        if a != b and len(a) == len(b):
            out.append(
                f"{what} were {', '.join(a)}, now {', '.join(b)}: parameters by place are taken over as they stood"
            )
    return out
