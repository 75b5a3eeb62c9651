"""Checking a log before it is trained on: a profile, and the ways in which the future or the label is in the past."""

from gem_core.data.check.findings import KINDS, Finding
from gem_core.data.check.run import Check, check

__all__ = ["KINDS", "Check", "Finding", "check"]
