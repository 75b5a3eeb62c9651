"""What was exported against the model itself: the same keys, and numbers that differ by rounding only."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_core.data.batch import Batch, Jagged
from gem_core.errors import DataError, GemError
from gem_core.export import fresh
from gem_core.export.program import Scores
from gem_core.train.build import Parts


@dataclass(frozen=True)
class Parity:
    """One batch: its sizes, and the largest absolute differences over its rows and tasks."""

    rows: int
    requests: int
    events: int
    logits: float
    probabilities: float


def samples(batches: Iterable[Batch]) -> list[Batch]:
    """Batches of other rows, requests and lengths from a reader's: one row alone and one without histories among them.

    Raises:
        DataError: there is no row.
    """
    found = []
    for batch in batches:
        if batch.rows:
            found.append(batch)
        if len(found) == 2:
            break
    if not found:
        raise DataError("export: the reader gives no row to compare the exported model on")
    first = found[0]
    third = head(first, (first.rows + 2) // 3)
    return [*found, third, without_events(third), head(first, 1), without_events(head(first, 1))]


def head(batch: Batch, rows: int) -> Batch:
    """The first rows of a batch, at least one, and their requests."""
    requests = int(batch.request[rows - 1]) + 1

    def cut(parts: dict[str, Jagged], n: int) -> dict[str, Jagged]:
        return {
            name: Jagged(j.values[: int(j.offsets[n])], j.offsets[: n + 1], j.max_length) for name, j in parts.items()
        }

    return Batch(
        dense=batch.dense[:rows],
        ids=cut(batch.ids, rows),
        vectors={name: v[:rows] for name, v in batch.vectors.items()},
        request_dense=batch.request_dense[:requests],
        request_ids=cut(batch.request_ids, requests),
        request_vectors={name: v[:requests] for name, v in batch.request_vectors.items()},
        events={event: cut(fields, requests) for event, fields in batch.events.items()},
        request=batch.request[:rows],
        request_time=batch.request_time[:requests],
        user=batch.user[:requests],
        surface=batch.surface[:rows],
        row_id=batch.row_id[:rows],
    )


def without_events(batch: Batch) -> Batch:
    """The same rows of users without a past."""
    events = {
        event: {name: Jagged(j.values[:0], torch.zeros_like(j.offsets), j.max_length) for name, j in fields.items()}
        for event, fields in batch.events.items()
    }
    return Batch(**{**vars(batch), "events": events})


@torch.no_grad()
def expected(parts: Parts, batch: Batch) -> Scores:
    """What the run's own model says, as `gem predict` computes it."""
    logits = {task: logit.float() for task, logit in parts.predict(batch).items()}
    return {"logits": logits, "probabilities": {task: logit.sigmoid() for task, logit in logits.items()}}


def in_fresh_process(form: str, file: Path, inputs: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """See `fresh.main`.

    Raises:
        GemError: the process failed; with the last line that it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "inputs.pt"), Path(folder, "outputs.pt")
        # What came from a reader process is views of one buffer, of which torch.save writes one type alone.
        torch.save([{name: tensor.clone() for name, tensor in each.items()} for each in inputs], given)
        command = [sys.executable, "-P", fresh.__file__, form, str(file), str(given), str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise GemError(f"export: the {form} program fails in a process of its own: {last}")
        result: dict[str, Any] = torch.load(out)
        return result


def compare(form: str, batches: Sequence[Batch], wanted: Sequence[Scores], found: Sequence[Scores]) -> list[Parity]:
    """The differences, batch by batch.

    Raises:
        GemError: a key is missing or too many, or a number is of another shape.
    """
    out = []
    for batch, want, got in zip(batches, wanted, found, strict=True):
        largest = {}
        for kind, tasks in want.items():
            if got.keys() != want.keys() or got[kind].keys() != tasks.keys():
                keys = [f"{k}.{task}" for k, inner in got.items() for task in inner]
                expected_keys = [f"{k}.{task}" for k, inner in want.items() for task in inner]
                raise GemError(f"export: the {form} program gives {keys}, the model {expected_keys}")
            for task, value in tasks.items():
                if got[kind][task].shape != value.shape:
                    shapes = f"shape {list(got[kind][task].shape)}, the model {list(value.shape)}"
                    raise GemError(f"export: {kind}.{task}: the {form} program gives {shapes}")
            # torch's maximum, unlike Python's, keeps NaN.
            largest[kind] = torch.stack([(got[kind][t] - v).abs().max() for t, v in tasks.items()]).max().item()
        events = sum(len(fields["time"].values) for fields in batch.events.values())
        out.append(Parity(batch.rows, batch.requests, events, largest["logits"], largest["probabilities"]))
    return out
