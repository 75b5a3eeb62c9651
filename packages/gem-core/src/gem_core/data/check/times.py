"""Events that are dated before they happened: to the beginning of their day, hour or minute."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gem_core.data.check.findings import Finding
from gem_core.data.check.log import Log

UNITS = {86_400: "day", 3_600: "hour", 60: "minute"}
ZONES = 900
"""Days and hours begin at a multiple of so many seconds wherever one is."""
FEWEST_EVENTS = 100
FEWEST_TIMES = 10


def find(log: Log) -> Iterator[Finding]:
    """Types of stored events whose times are all multiples of a unit that the ends of the histories are not."""
    for event, stored in log.events.items():
        times = np.unique(stored.time)
        if len(stored.time) < FEWEST_EVENTS or len(times) < FEWEST_TIMES:
            continue
        for seconds, unit in UNITS.items():
            offset = int(times[0]) % seconds
            if offset % min(ZONES, seconds) or (times % seconds != offset).any():
                continue
            finer = log.before % seconds != offset
            if finer.any():
                i = int(finer.argmax())
                yield Finding(
                    "coarse-event-times",
                    None,
                    f"{event} events: expected times as fine as those of the requests, found only whole {unit}s, though "
                    f"{log.source.at(i)} is between two: an event may count as past before it happened; give the events "
                    f"their own times, or the rows a history_before at the beginning of the {unit}",
                )
            break
