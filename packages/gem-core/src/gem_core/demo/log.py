"""Stage 1 of the demo: the log, prepared, and what is in it."""

from __future__ import annotations

import json
from typing import Any

from gem_core.data.completejourney import prepare
from gem_core.data.completejourney.reader import cache_folder
from gem_core.demo.console import Pace, define, progress, say

HOUSEHOLDS = 2_469
"""In the whole log."""


def prepare_log(households: int | None) -> dict[str, Any]:
    """Prepare the log unless it is in the cache; its manifest."""
    pace = Pace(3)

    def show(stage: str, done: int, total: int) -> None:
        if pace.due():
            progress("reading the log's tables" if stage == "read" else f"week {done} of {total}")

    folder = prepare(cache_folder(None), households=households, progress=show)
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    progress(f"prepared: {folder}")
    return manifest


def explain_log() -> None:
    """What the log is, and the words that the demo uses."""
    say(
        """The log is Complete Journey: a year of grocery shopping with promotions, campaigns and coupons, which its
        authors call simulated from real shopping patterns. It is read as an ads log: what was promoted to whom, where,
        and what came of it. Preparing it counts, week by week, what was known before that week, so that no feature
        knows the future."""
    )
    define("request", "a household's visit to a store in a week (or a campaign's mail to it): the moment of ranking.")
    define("row", "one promotion shown in a request: an impression. A request's rows share the household's features.")
    define(
        "history", "the household's past events, newest first: purchases, promoted purchases, campaigns, redemptions."
    )
    define("objective", "what is predicted of a row: purchase now, repurchase within 28 days, redeem (a coupon).")
    define("surface", "where it was shown: display, mailer, both, or a campaign of type A, B or C.")


def describe(manifest: dict[str, Any]) -> dict[str, str]:
    """Facts of the prepared log, for the console and the report."""
    rows = {split: sum(surfaces.values()) for split, surfaces in manifest["rows"].items()}
    kept = manifest["households"]
    facts = {
        "households": f"{kept:,} of {HOUSEHOLDS:,} ({kept / HOUSEHOLDS:.0%})"
        + ("" if kept == HOUSEHOLDS else ", sampled by a hash of their ids; counts are over all households"),
        "rows": ", ".join(f"{split} {rows[split]:,}" for split in ("train", "validation", "test")),
        "requests": ", ".join(f"{split} {manifest['requests'][split]:,}" for split in ("train", "validation", "test")),
        "split": "by time: weeks 9-42 train, 43-46 validation, 47-53 test; campaigns by when they start and end",
    }
    for task, splits in manifest["labels"].items():
        test = splits["test"].values()
        count, positives = sum(s["rows"] for s in test), sum(s["positives"] for s in test)
        facts[task] = f"{positives:,} of {count:,} test rows ({positives / count:.1%})"
    lengths = manifest["purchase_history_length_per_row"]["train"]
    facts["histories"] = f"{lengths[0]:,} to {lengths[-1]:,} purchases, median {lengths[len(lengths) // 2]:,}"
    if "redeem" in manifest["labels"]:
        facts["redeem"] += f"; negatives sampled at {manifest['sends']['negatives_kept']:.0%} and weighted back"
    return facts
