"""The log's weeks: they run from Monday, local midnight (US Eastern); the package's timestamps are UTC.

Week 2 starts on Monday 2017-01-02; week 1 holds only 2017-01-01. Week numbers below 1 are weeks of 2016.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIRST_WEEK, LAST_WEEK = 1, 53
_MONDAY = np.datetime64("2016-12-26")  # of week 1
_SUMMER = np.datetime64("2017-03-12"), np.datetime64("2017-11-05")  # daylight saving of 2017


def midnight(days: NDArray[np.datetime64]) -> NDArray[np.int64]:
    """UTC seconds of local midnight of `days` (datetime64[D])."""
    summer = (days > _SUMMER[0]) & (days <= _SUMMER[1])  # the clock changes at 2 o'clock of these days
    hours = np.where(summer, 4, 5)
    seconds: NDArray[np.int64] = days.astype("datetime64[s]").astype(np.int64) + hours * 3600
    return seconds


def week_start(week: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """UTC seconds at which `week` starts."""
    return midnight(_MONDAY + 7 * (np.asarray(week) - 1))


def week_of(days: NDArray[np.datetime64]) -> NDArray[np.int64]:
    """Week of each day."""
    return (days.astype("datetime64[D]") - _MONDAY).astype(np.int64) // 7 + 1
