"""Writes a small click log as JSON lines: `python -m gem_plugin_example.generate clicks.jsonl`.

Each user clicks ads of one topic far more often than others, so the history tells: something for a model to find.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

USERS, ADS, TOPICS, ROWS, DAY = 40, 30, 3, 3000, 86_400


def generate(path: Path, seed: int = 0) -> None:
    """One row per impression, in order of time; the history holds the user's latest clicks, oldest first."""
    draw = random.Random(seed)
    clicks: dict[int, list[tuple[int, int]]] = {user: [] for user in range(USERS)}
    lines = []
    for i in range(ROWS):
        user, ad, time = draw.randrange(USERS), draw.randrange(ADS), i * DAY // 50
        history = clicks[user][-20:]
        clicked = draw.random() < (0.7 if ad % TOPICS == user % TOPICS else 0.15)
        lines.append(
            {
                "user": f"u{user}",
                "time": time,
                "split": "train" if i < ROWS * 0.7 else "validation" if i < ROWS * 0.85 else "test",
                "ad": ad,
                "topic": ad % TOPICS,
                "hour": time % DAY / 3600,
                "click.ad": [other for other, _ in history],
                "click.topic": [other % TOPICS for other, _ in history],
                "click.time": [when for _, when in history],
                "clicked": int(clicked),
            }
        )
        if clicked:
            clicks[user].append((ad, time))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
