"""`gem data prepare`: rows are those of a plain loop, whatever the files and partitions; nothing is left half-written."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from raw_log import OPTIONS, naive, raw

from gem_core.cli import main
from gem_core.data.check import check
from gem_core.data.prepare import Options, prepare
from gem_core.data.prepare import run as module
from gem_core.data.readers import ParquetReader
from gem_core.errors import ConfigError, DataError
from gem_core.schema import Schema


def write_csv(path: Path, log: list[dict[str, Any]], delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(log[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(log)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "log.csv", raw())
    return tmp_path


def options(**changes: Any) -> Options:
    return Options.parse({**OPTIONS, **changes})


def rows(out: Path) -> list[dict[str, Any]]:
    return [
        {**row, "split": split, "item": int(row["item"])}
        for split in ("train", "validation", "test")
        for row in pq.read_table(out / split).to_pylist()
    ]


def ordered(records: list[dict[str, Any]]) -> list[Any]:
    return sorted(sorted((k, str(v)) for k, v in r.items() if k != "row_id") for r in records)


@pytest.mark.parametrize("partitions", [1, 3, 40])
def test_rows_are_those_of_a_plain_loop(partitions: int, folder: Path) -> None:
    found = prepare(options(), folder / "out", partitions=partitions)
    made = rows(folder / "out")
    assert ordered(made) == ordered(naive(raw()))
    assert sorted(r["row_id"] for r in made) == list(range(len(made)))
    assert sum(found.rows.values()) == len(made) and found.actions["scroll"] == sum(
        e["action"] == "scroll" for e in raw()
    )
    assert found.labels["train"]["click"][1] == sum(r["click"] or 0 for r in made if r["split"] == "train")
    for split in ("train", "validation", "test"):
        for file in (folder / "out" / split).iterdir():
            moments = [(r["user"], r["time"]) for r in pq.read_table(file).to_pylist()]
            blocks = [m for i, m in enumerate(moments) if i == 0 or moments[i - 1] != m]
            assert len(blocks) == len(set(blocks)), "the rows of a request are adjacent"
    clicks = pq.read_table(folder / "out/events/click").to_pylist()
    assert ordered(clicks) == ordered(
        [
            {n: str(e[n]) if n == "item" else e[n] for n in ("user", "time", "item", "place")}
            for e in raw()
            if e["action"] == "click"
        ]
    )


def test_parquet_and_several_files_give_the_same_rows(folder: Path) -> None:
    log = raw()
    (folder / "parts").mkdir()
    for i in range(3):
        pq.write_table(pa.Table.from_pylist(log[200 * i : 200 * i + 200]), folder / f"parts/{i}.parquet")
    prepare(options(log="parts"), folder / "out", partitions=2)
    assert ordered(rows(folder / "out")) == ordered(naive(log))


def test_the_result_is_sound_and_trains_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "raw.yaml").write_text(yaml.safe_dump(OPTIONS))
    assert main(["data", "prepare", "raw.yaml", "--out", "out"]) == 0
    assert "train: " in capsys.readouterr().out
    assert main(["data", "prepare", "raw.yaml", "--out", "out"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["data", "prepare", "raw.yaml", "--out", "out", "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["events"].keys() == {"click", "bought"}
    small = ["model=din", "trainer.max_steps=2", "trackers=[jsonl]", "data.batch_rows=32", "data.workers=0"]
    assert main(["train", "out/recipe.yaml", *small]) == 0
    reader = {"rows": "out/train", "validation": "out/validation", "test": "out/test"}
    events = {name: f"out/events/{name}" for name in ("click", "bought")}
    config = ParquetReader.Config(**reader, events=events)
    kinds = {f.kind for f in check(ParquetReader(config, Schema.load("out/schema.yaml"))).findings}
    assert kinds <= {"duplicate-rows"}, "two views of one item at one time may be alike but for their ids"


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "user": ({"user": None}, 'log.csv, line 4, column "user" .*expected a value', 'no user (column "user")'),
    "time": ({"time": "noon"}, "log.csv, line 4, column \"time\".*found 'noon'", 'no time (column "time")'),
    "action": ({"action": None}, 'log.csv, line 4, column "action"', 'no action (column "action")'),
}


@pytest.mark.parametrize(("change", "message", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_by_policy(change: dict[str, Any], message: str, reason: str, folder: Path) -> None:
    log = raw()
    log[2] = {**log[2], **change}
    write_csv(folder / "log.csv", log)
    with pytest.raises(DataError, match=message):
        prepare(options(), folder / "out")
    assert sorted(p.name for p in folder.iterdir()) == ["log.csv"], "nothing half-written"
    found = prepare(options(faults="skip"), folder / "out")
    assert found.left_out[reason] == 1
    assert ordered(rows(folder / "out")) == ordered(naive(log[:2] + log[3:]))


def test_rows_with_too_few_fields_are_faults(folder: Path) -> None:
    with (folder / "log.csv").open("a") as file:
        file.write("u1,2\n")
    with pytest.raises(DataError, match="line 602: expected 6 fields, as in the header, found 2"):
        prepare(options(), folder / "out")
    assert prepare(options(faults="skip"), folder / "out").left_out["fields"] == 1


def test_interrupted_it_leaves_what_was_there_and_can_be_run_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(options(), folder / "out")
    before = (folder / "out/manifest.json").read_text()
    with monkeypatch.context() as patch:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(module, "_describe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(), folder / "out", overwrite=True)
    assert (folder / "out/manifest.json").read_text() == before
    (folder / ".out.partial").mkdir()  # what a killed run leaves
    prepare(options(), folder / "out", overwrite=True)
    assert sorted(p.name for p in folder.iterdir()) == ["log.csv", "out"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"objectves": {}}, 'unknown key "objectves"; did you mean "objectives"?'),
    "duration": (
        {"objectives": {"click": {"actions": ["click"], "within": "1w"}}},
        "objectives.click.within: expected",
    ),
    "splits": ({"test_from": 10}, "validation_from: expected a time before test_from"),
    "names": ({"sparse": ["user_click_count"]}, '"user_click_count": a name for two columns'),
    "label": ({"objectives": {"price": {"actions": ["buy"], "within": 1}}}, '"price": a name for two columns'),
    "multi": ({"sparse": {"place": {"multi": True}}}, "sparse.place.multi"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options_are_one_message(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        options(**change)
    assert message in str(error.value)


def test_wrong_logs_are_one_message(folder: Path) -> None:
    with pytest.raises(DataError, match='no row has action "seen"; found buy, click'):
        prepare(options(impressions=["seen"]), folder / "out")
    with pytest.raises(DataError, match="split validation has no row with a known label"):
        prepare(options(validation_from=2000, test_from=3000), folder / "out2")
    with pytest.raises(ConfigError, match="partitions: expected 1 to 256"):
        prepare(options(), folder / "out", partitions=1000)
    with pytest.raises(DataError, match='no column "who" \\(user\\)'):
        prepare(options(user="who"), folder / "out")


# Not resource.getrusage: a process starts there with the peak of the one that forked it.
PEAK = """
import sys
from pathlib import Path
from gem_core.data.prepare import Options, prepare
from raw_log import OPTIONS
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
prepare(Options.parse({**OPTIONS, "log": sys.argv[1]}), Path(sys.argv[2]), partitions=int(sys.argv[3]))
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_partition(tmp_path: Path) -> None:
    """Ten times the log in ten times the partitions: far from ten times the memory above that of the imports."""
    log = raw(4_000, users=400)
    write_csv(tmp_path / "small.csv", log)
    (tmp_path / "large").mkdir()
    for i in range(10):
        write_csv(
            tmp_path / f"large/{i}.csv", [{**e, "user": f"{i}-{e['user']}", "item": 6 * i + e["item"]} for e in log]
        )

    def peak(path: Path, partitions: int) -> int:
        out = tmp_path / f"out-{path.stem}"
        arguments = [sys.executable, "-c", PEAK, str(path), str(out), str(partitions)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
        return int(done.stdout)

    small, large = peak(tmp_path / "small.csv", 4), peak(tmp_path / "large", 40)
    assert small > 0 and large < 2 * small, (small, large)
