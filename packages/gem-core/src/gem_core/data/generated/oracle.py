"""The best possible NE: what predicting the true probabilities would score. A model's gap to it can be closed by learning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_core.data.generated.log import oracle_column, static_column

Floats = NDArray[np.float64]

BINS, LOWEST, HIGHEST = 4096, -24.0, 8.0
"""The best prediction without history is found per bin of the logit without its effects."""


def entropy(p: Floats) -> Floats:
    """-p log p - (1 - p) log(1 - p), for 0 < p < 1."""
    out: Floats = -(p * np.log(p) + (1 - p) * np.log1p(-p))
    return out


def oracle_columns(tasks: Sequence[str]) -> list[str]:
    """The columns of rows that `Oracle` reads."""
    return [name for task in tasks for name in (task, oracle_column(task), static_column(task))]


class _Sums:
    """Of one task."""

    def __init__(self) -> None:
        self.rows = self.positives = self.probability = self.loss = self.entropy = 0.0
        self.bins = np.zeros((2, BINS))

    def add(self, label: NDArray[np.int8], p: Floats, static: Floats) -> None:
        yes, no = np.log(p), np.log1p(-p)
        self.rows += len(label)
        self.positives += float(label.sum())
        self.probability += float(p.sum())
        self.loss -= float(np.where(label > 0, yes, no).sum())
        self.entropy -= float((p * yes + (1 - p) * no).sum())
        place = (np.log(static / (1 - static)) - LOWEST) * (BINS / (HIGHEST - LOWEST))
        at = np.clip(place, 0, BINS - 1).astype(np.int64)
        self.bins[0] += np.bincount(at, minlength=BINS)
        self.bins[1] += np.bincount(at, p, BINS)

    def base(self, mean: float) -> float:
        """Total log-loss of predicting the mean for every row."""
        return self.rows * float(entropy(np.array(mean)))


class Oracle:
    """Adds up tables of rows of a generated log; `compute` gives, per task,

    * `rows`, `positives`, `rate`;
    * `oracle_ne`: NE of the true probabilities on the labels as drawn: what to compare a model's NE with;
    * `expected_ne`: its expectation over the drawing of labels;
    * `static_ne`: the expected NE of the best prediction that knows all but the effects of history;

    and "joint/oracle_ne". NE is left out where a task has labels of one kind only.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._sums = {task: _Sums() for task in tasks}

    @staticmethod
    def of(tables: Iterable[pa.Table], tasks: Sequence[str]) -> dict[str, float]:
        """`compute` of these tables, which have the columns of `tasks` and the oracle's."""
        oracle = Oracle(tasks)
        for table in tables:
            oracle.add(table)
        return oracle.compute()

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table."""
        for task, sums in self._sums.items():
            labels = table[task]
            known = labels.is_valid().to_numpy()
            values = (table[name].to_numpy()[known] for name in (oracle_column(task), static_column(task)))
            sums.add(labels.drop_null().to_numpy(), *(v.astype(np.float64) for v in values))

    def compute(self) -> dict[str, float]:
        """See the class."""
        out: dict[str, float] = {}
        loss = base = 0.0
        for task, s in self._sums.items():
            out |= {f"{task}/rows": s.rows, f"{task}/positives": s.positives}
            if s.rows:
                out[f"{task}/rate"] = s.positives / s.rows
            if not 0 < s.positives < s.rows:
                continue
            count, p = s.bins[:, s.bins[0] > 0]
            expected = s.base(s.probability / s.rows)
            own = s.base(s.positives / s.rows)
            out[f"{task}/oracle_ne"] = s.loss / own
            out[f"{task}/expected_ne"] = s.entropy / expected
            out[f"{task}/static_ne"] = float((count * entropy(p / count)).sum()) / expected
            loss, base = loss + s.loss, base + own
        return out | ({"joint/oracle_ne": loss / base} if base else {})
