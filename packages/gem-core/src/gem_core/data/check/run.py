"""`gem data check`: a profile, and every way of leaking that can be seen in the log itself, found and counted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from gem_core.data.check import labels, log, splits, statistics, times
from gem_core.data.check.findings import KINDS, Finding
from gem_core.data.profile import Profile, profile
from gem_core.data.readers.base import TableReader
from gem_core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Check:
    """A log's profile and findings."""

    profile: Profile
    findings: list[Finding]

    @property
    def sound(self) -> bool:
        """Whether nothing was found that is an error by policy."""
        return all(finding.policy == "count" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        found = [asdict(finding) for finding in self.findings]
        return {"sound": self.sound, "findings": found, "profile": self.profile.as_json()}


def check(reader: TableReader, *, allow: Collection[str] = (), threshold: float = 0.99) -> Check:
    """Check all splits and events of a reader of tables; its schema need not be fitted. Holds the log in memory.

    Args:
        allow: kinds of findings that are counted and shown, but no errors.
        threshold: area under the ROC curve from which on a single column counts as the label.

    Raises:
        ConfigError: an unknown kind.
    """
    unknown = [kind for kind in allow if kind not in KINDS]
    if unknown:
        raise ConfigError(f'no kind of finding "{unknown[0]}"{nearest(unknown[0], KINDS)}')
    profiled = profile(reader)
    findings = [Finding("fault", fault.count, fault.first) for fault in profiled.faults]
    reader.on_fault = lambda *_: None  # counted by the profile
    read = log.read(reader)
    if read is not None:
        findings += splits.find(read, reader)
        findings += times.find(read)
        findings += labels.find(read, threshold)
        findings += statistics.find(read, threshold)
    return Check(profiled, [replace(f, policy="count") if f.kind in allow else f for f in findings])
