"""`gem data prepare`: a raw log is cut by user, each part joined in memory, and by item for the counts of items.

Memory is that of one partition (and of the buffers of the open ones), whatever the log's size. All is written to a
folder of its own beside the result, which takes the result's name at the end: what is interrupted leaves nothing but
that folder, and the same command begins anew.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from gem_core.data.columns import Ints
from gem_core.data.ids import column_keys
from gem_core.data.prepare.options import Options
from gem_core.data.prepare.source import RawLog, actions_in
from gem_core.data.prepare.spill import Spill, partition_of
from gem_core.data.prepare.users import count_before, join
from gem_core.data.readers.base import SPLITS
from gem_core.errors import ConfigError, DataError

PART_BYTES = 1 << 25
"""Bytes of the log's files for each partition, where their number is not given."""
MOST = 256
"""Partitions: each is an open file, twice."""

Progress = Callable[[str, int, int], None]


@dataclass
class Prepared:
    """What was read and written: rows by action; by split rows, and per objective known labels and positives; events by
    type; rows that were left out, by reason."""

    actions: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    labels: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    partitions: int = 0


def prepare(
    options: Options,
    out: Path,
    *,
    partitions: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda *_: None,
) -> Prepared:
    """Prepare a raw log into the folder `out`: rows by split, events by type, schema.yaml, recipe.yaml, manifest.json.

    Args:
        partitions: how many parts the log is cut into, by user and by item (default: one per 32 MiB of its files).
        progress: told the stage, and how much of it is done of how much (0: not known).

    Raises:
        ConfigError: `out` is there (and not `overwrite`), or there are no files.
        DataError: a fault of the log, or a split without rows.
    """
    if out.exists() and not overwrite:
        raise ConfigError(f"{out}: is there already; give another folder, or --overwrite")
    log = RawLog(options)
    if partitions is None:
        partitions = min(MOST, max(1, math.ceil(log.bytes() / PART_BYTES)))
    if not 1 <= partitions <= MOST:
        raise ConfigError(f"partitions: expected 1 to {MOST}, found {partitions}")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        result = work / "result"
        result.mkdir()
        found = _Work(log, work, result, partitions, progress).run()
        _describe(options, out, result, found)
        if out.exists():
            out.rename(work / "replaced")
        result.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found


class _Work:
    def __init__(self, log: RawLog, work: Path, result: Path, partitions: int, progress: Progress) -> None:
        self.log, self.options = log, log.options
        self.work, self.result, self.partitions, self.progress = work, result, partitions, progress
        self.found = Prepared(partitions=partitions)
        self.last = 0

    def run(self) -> Prepared:
        users = self._by_user()
        rows, items = Spill(self.work / "rows"), Spill(self.work / "items")
        with rows, items:
            for part in range(self.partitions):
                self.progress("users", part, self.partitions)
                self._users(part, users, rows, items)
        counts = Spill(self.work / "counts")
        with counts:
            for part in range(self.partitions):
                self.progress("items", part, self.partitions)
                self._items(items.read(part), counts)
        first_id = 0
        for part in range(self.partitions):
            self.progress("rows", part, self.partitions)
            first_id += self._rows(part, rows.read(part), counts.read(part), first_id)
        empty = [split for split in SPLITS if not self.found.rows.get(split)]
        if empty:
            raise DataError(f"split {empty[0]} has no row with a known label: see validation_from, test_from, within")
        return self.found

    def _by_user(self) -> Spill:
        """Cut the log by user; rows whose action nothing asks for are left out."""
        o, actions = self.options, Counter[str]()
        lists = [part.actions for part in o.objectives.values()] + [part.actions for part in o.histories.values()]
        wanted = {*o.impressions, *(action for actions_of in lists for action in actions_of)}
        users, done = Spill(self.work / "users"), 0
        with users:
            for table in self.log.pieces():
                for each in table.column(o.action).value_counts().to_pylist():
                    actions[each["values"]] += each["counts"]
                done += len(table)
                self.progress("log", done, 0)
                table = table.filter(pa.array(actions_in(table, o.action, sorted(wanted))))
                if len(table):
                    self.last = max(self.last, pc.max(table.column(o.time)).as_py())
                    users.add(table, partition_of(_keys(table, o.user), self.partitions))
        unknown = sorted(wanted - actions.keys())
        if unknown:
            raise DataError(f'log: no row has action "{unknown[0]}"; found {", ".join(sorted(actions)[:20]) or "none"}')
        self.found.actions = dict(sorted(actions.items()))
        self.found.left_out = dict(self.log.skipped)
        return users

    def _users(self, part: int, users: Spill, rows: Spill, items: Spill) -> None:
        table = users.read(part)
        if table is None:
            return
        joined = join(table, self.options, self.last)
        for kind, (name, events) in enumerate(joined.events.items()):
            self.found.events[name] = self.found.events.get(name, 0) + len(events)
            self._write(f"events/{name}", part, events)
            self._to_items(items, events, kind, -1)
        if len(joined.rows):
            rows.add(joined.rows, np.full(len(joined.rows), part))
            self._to_items(items, joined.rows, -1, part)

    def _to_items(self, items: Spill, table: pa.Table, kind: int, part: int) -> None:
        """What the counts of items need: of an event its type, of an impression its place."""
        n, key = len(table), _keys(table, self.options.item)
        columns = {
            "item": key,
            "time": table.column(self.options.time).to_numpy(),
            "kind": np.full(n, kind),
            "part": np.full(n, part),
            "place": np.arange(n),
        }
        items.add(pa.table(columns), partition_of(key, self.partitions))

    def _items(self, table: pa.Table | None, counts: Spill) -> None:
        """As-of counts of the items of a partition, sent back to where their impressions are."""
        if table is None:
            return
        item, time, kind, part, place = (table.column(i).to_numpy() for i in range(5))
        shown = kind < 0
        out: dict[str, Any] = {"place": place[shown]}
        for i, name in enumerate(self.options.histories):
            did = kind == i
            out[f"item_{name}_count"] = count_before(item[did], time[did], item[shown], time[shown])
        if shown.any():
            counts.add(pa.table(out), part[shown])

    def _rows(self, part: int, rows: pa.Table | None, counts: pa.Table | None, first_id: int) -> int:
        """Write the rows of a partition; how many they are."""
        if rows is None or counts is None:
            return 0
        counts = counts.take(pa.array(np.argsort(counts.column("place").to_numpy()))).drop_columns(["place"])
        for name in counts.column_names:
            rows = rows.append_column(name, counts.column(name))
        tasks = list(self.options.objectives)
        known = np.logical_or.reduce([rows.column(task).is_valid().to_numpy() for task in tasks])
        unknown = int((~known).sum())
        if unknown:
            reason = "impressions whose window is not over when the split or the log ends"
            self.found.left_out[reason] = self.found.left_out.get(reason, 0) + unknown
        rows = rows.filter(pa.array(known))
        rows = rows.append_column("row_id", pa.array(np.arange(first_id, first_id + len(rows))))
        for split in SPLITS:
            mine = rows.filter(pc.equal(rows.column("split"), split)).drop_columns(["split"])
            self.found.rows[split] = self.found.rows.get(split, 0) + len(mine)
            for task in tasks:
                seen = self.found.labels.setdefault(split, {}).setdefault(task, [0, 0])
                seen[0] += len(mine) - mine.column(task).null_count
                seen[1] += pc.sum(mine.column(task)).as_py() or 0
            if len(mine):
                self._write(split, part, mine)
        return len(rows)

    def _write(self, name: str, part: int, table: pa.Table) -> None:
        folder = self.result / name
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / f"part-{part:05}.parquet", compression="zstd", row_group_size=1 << 17)


def _keys(table: pa.Table, name: str) -> Ints:
    return column_keys(table.column(name).combine_chunks())


def _describe(options: Options, out: Path, result: Path, found: Prepared) -> None:
    """The schema, the recipe and the manifest of what was written."""
    schema = options.schema_of().model_dump(mode="json", exclude_defaults=True)
    reader: dict[str, Any] = {
        "name": "parquet",
        "rows": str(out / "train"),
        "validation": str(out / "validation"),
        "test": str(out / "test"),
    }
    if options.histories:
        reader["events"] = {name: str(out / "events" / name) for name in options.histories}
    recipe = {"name": out.name, "data": {"schema": "schema.yaml", "reader": reader}, "model": {"name": "kunlun"}}
    for name, value in {"schema.yaml": schema, "recipe.yaml": recipe}.items():
        (result / name).write_text(yaml.safe_dump(value, sort_keys=False))
    manifest = {"options": options.model_dump(mode="json", exclude_defaults=True), **asdict(found)}
    (result / "manifest.json").write_text(json.dumps(manifest, indent=1))
