"""A small log, its schema and its recipe, as a team would write them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gem_core.cli import main

SCHEMA = """\
user: user
time: time
surface: place
surfaces: [feed, search]
dense:
  price: {transform: log1p}
  age: {level: request}
sparse:
  ad: {}
  category: {}
events:
  click: {max_length: 8, fields: {ad: {}, category: {}}}
objectives:
  click: {label: clicked}
  buy: {label: bought}
"""

RECIPE = """\
name: small
data:
  reader: {name: csv, rows: rows.csv, events: {click: events.csv}, split: {column: split}}
  schema: schema.yaml
  batch_rows: 16
  workers: 0
model: {name: din, hidden: [8], attention_hidden: [4]}
trainer: {epochs: 1, threads: 1, log_every: 2}
trackers: [jsonl]
"""


def write_log(folder: Path) -> None:
    """rows.csv, events.csv, schema.yaml, recipe.yaml; 2 rows a request, 60 rows, 24 events."""
    draw = random.Random(0)
    rows = ["user,time,place,price,age,ad,category,clicked,bought,split"]
    for i in range(30):
        split = "train" if i < 20 else "validation" if i < 25 else "test"
        for _ in range(2):
            ad, label = draw.randrange(6), draw.randrange(2)
            rows.append(
                f"u{i % 6},{1000 + 10 * i},{('feed', 'search')[i % 2]},{ad + 0.5},{20 + i % 6},a{ad},c{ad % 2},"
                f"{label},{label and draw.randrange(2)},{split}"
            )
    events = ["user,time,ad,category"]
    events += [f"u{i % 6},{900 + 10 * i},a{i % 6},c{i % 2}" for i in range(24)]
    for name, text in {"rows.csv": rows, "events.csv": events}.items():
        (folder / name).write_text("\n".join(text) + "\n")
    (folder / "schema.yaml").write_text(SCHEMA)
    (folder / "recipe.yaml").write_text(RECIPE)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which holds the log."""
    write_log(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log and a run trained on it."""
    folder = tmp_path_factory.mktemp("trained")
    write_log(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "recipe.yaml"]) == 0
    return folder
