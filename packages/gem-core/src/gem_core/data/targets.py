"""What is to be predicted of each row: labels, masks and weights per head, read alike by fitting, encoding and profiling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.data.columns import Bools, Column, Floats, Source, column
from gem_core.data.rows import Dense
from gem_core.errors import DataError
from gem_core.schema import Schema, window_seconds


@dataclass(frozen=True)
class _Rows:
    """The columns of a table that a task names, checked."""

    schema: Schema
    table: pa.Table
    source: Source
    surfaces: Column | None

    def _column(self, name: str, role: str) -> Column:
        return column(self.table, name, role, self.source)

    def label(self, task: str) -> tuple[Floats, Bools]:
        """(n,) labels, NaN where there is none, and where there is one."""
        labels = self._column(self.schema.objectives[task].label or task, f"label of {task}")
        label = labels.numbers()
        known = ~np.isnan(label)
        labels.check(known & (label != 0) & (label != 1), "a label of 0 or 1, or none")
        return label, known

    def counted(self, task: str) -> Bools:
        """(n,) rows to which the task applies, by its mask and surfaces."""
        objective = self.schema.objectives[task]
        mask = np.ones(len(self.table), np.bool_)
        if objective.mask is not None:
            mask &= self._column(objective.mask, f"mask of {task}").flags()
        if objective.surfaces is not None and self.surfaces is not None:
            wanted = pc.is_in(self.surfaces.values, value_set=pa.array(objective.surfaces, pa.string()))
            mask &= wanted.to_numpy(zero_copy_only=False)
        return mask

    def weight(self, task: str, mask: Bools) -> Floats:
        """(n,) weights of the rows, before any correction of sampling."""
        name = self.schema.objectives[task].weight
        if name is None:
            return np.ones(len(self.table))
        weights = self._column(name, f"weight of {task}")
        weight = weights.numbers()
        weights.check(mask & ~(np.isfinite(weight) & (weight >= 0)), "a weight of at least 0")
        return weight

    def rate(self, task: str, mask: Bools, label: Floats) -> Floats | None:
        """(n,) rates at which negatives were kept, 1 where none is needed; None where the task names no column."""
        objective = self.schema.objectives[task]
        if objective.rate is None:
            return None
        rates = self._column(objective.rate, f"rate of {task}'s negatives")
        rate = rates.numbers()
        # A shift moves the logits of positives too. Rows that windows may make negatives of need their rate as well.
        needed = mask if objective.correction == "shift" or objective.windows else mask & (label == 0)
        fair = (rate > 0) & (rate <= 1)
        rates.check(needed & ~fair, "a rate in (0, 1]")
        return np.where(fair, rate, 1.0)

    def delays(self, task: str, positive: Bools) -> tuple[Floats, Floats]:
        """(n,) seconds from the row to its conversion, infinite where there is none, and for how long it was watched."""
        objective = self.schema.objectives[task]
        assert objective.converted_at is not None
        time = self._column(self.schema.time, "request time").times()
        conversions = self._column(objective.converted_at, f"time of the conversion of {task}")
        none = conversions.nulls()
        conversions.check(positive & none, "the time of the conversion, as the label is 1")
        delay = np.full(len(time), np.inf)
        there = np.flatnonzero(~none)
        source = self.source.take(there, len(time))
        found = Column(conversions.values.take(pa.array(there)), conversions.name, conversions.role, source)
        delay[there] = found.times() - time[there]
        conversions.check(delay < 0, "a conversion not before the row's own time")
        watched = np.zeros(len(time))
        if objective.observed_until is not None:
            until = self._column(objective.observed_until, f"end of the watch for conversions of {task}")
            watched = (until.times() - time).astype(np.float64)
        return delay, watched


class Targets:
    """Labels, masks and weights of a table's rows, (n,) float32 per head (`Schema.heads`); where the mask is 0 so are the
    others. `rates`: per task with `correction: shift`, the rate at which negatives were kept."""

    def __init__(
        self, schema: Schema, table: pa.Table, source: Source, surfaces: Column | None, required: bool
    ) -> None:
        self.labels: dict[str, Dense] = {}
        self.masks: dict[str, Dense] = {}
        self.weights: dict[str, Dense] = {}
        self.rates: dict[str, Dense] = {}
        self.any = np.zeros(len(table), np.bool_)
        self._rows = _Rows(schema, table, source, surfaces)
        for task, objective in schema.objectives.items():
            if not required and (objective.label or task) not in table.column_names:
                for head in schema.heads_of(task):
                    self._keep(head, *([np.zeros(len(table))] * 3))
                if objective.correction == "shift":
                    self.rates[task] = np.ones(len(table), np.float32)
                continue
            self._add(task)
        del self._rows

    def _keep(self, head: str, label: Floats, mask: npt.NDArray[np.generic], weight: Floats) -> None:
        self.labels[head] = np.where(mask, label, 0).astype(np.float32)
        self.masks[head] = mask.astype(np.float32)
        self.weights[head] = np.where(mask, weight, 0).astype(np.float32)
        self.any |= mask.astype(np.bool_)

    def _add(self, task: str) -> None:
        """The label of a task and of each of its shorter windows."""
        rows, objective = self._rows, self._rows.schema.objectives[task]
        label, known = rows.label(task)
        counted = rows.counted(task)
        used = counted if objective.windows else counted & known
        weight = rows.weight(task, used)
        rate = rows.rate(task, used, label)
        if rate is not None and objective.correction == "shift":
            self.rates[task] = rate.astype(np.float32)

        def keep(head: str, label: Floats, mask: Bools) -> None:
            self._keep(head, label, mask, weight if rate is None else np.where(label == 0, weight / rate, weight))

        heads = self._rows.schema.heads_of(task)
        if len(heads) > 1:
            delay, watched = rows.delays(task, known & (label == 1))
            for head, window in zip(heads, objective.windows[:-1], strict=False):
                within = delay <= window_seconds(window)
                over = known | within | (watched >= window_seconds(window))
                keep(head, within.astype(np.float64), counted & over)
        keep(task, label, counted & known)

    def select(self, keep: Bools) -> None:
        """Forget the rows that `keep` does not mark."""
        for values in (self.labels, self.masks, self.weights, self.rates):
            values.update({task: v[keep] for task, v in values.items()})
        self.any = self.any[keep]

    def check_labelled(self, source: Source) -> None:
        """Raise for the first row that has a label for no task."""
        if not self.any.all():
            i = int((~self.any).argmax())
            raise DataError(
                f"{source.at(i)}: expected a label for at least one of {', '.join(self.labels)}, found none "
                "(null, masked, or on another surface); reader option unlabelled: keep or drop allows such rows"
            )
