"""What a check finds: kinds, and findings with the place of the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KINDS = {
    "fault": "a value or column that is not what the schema declares",
    "duplicate-rows": "rows of a split that are equal in every column",
    "repeated-row-ids": "rows that have the row id of another",
    "rows-across-splits": "rows that stand in an earlier split too",
    "requests-across-splits": "requests with rows in several splits",
    "split-overlap": "a split that goes on after the next has begun",
    "label-as-feature": "a feature that reads the column of a label",
    "label-in-feature": "a feature that tells the label almost surely",
    "label-in-history": "an event that tells the label almost surely: the row's own",
    "label-in-increase": "a count that rises with the row's own label",
    "future-statistic": "a statistic of a user or an id that holds what comes later",
    "coarse-event-times": "events dated to the beginning of a day or hour, before they happened",
}
"""Kinds of findings."""


@dataclass(frozen=True)
class Finding:
    """A kind of fault. `count`: values or rows (None: a whole column or type of events); `message`: where the first is,
    what was expected and found. `policy`: "error" fails the check, "count" does not."""

    kind: str
    count: int | None
    message: str
    policy: Literal["error", "count"] = "error"
