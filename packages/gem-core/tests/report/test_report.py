import base64
import builtins
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run

from gem_core.errors import ConfigError, DataError
from gem_core.report import Facts, Run, build, load_run, plots, write
from gem_core.report import environment as environments
from gem_core.report.run import objectives, surfaces
from gem_core.report.table import Cell, Section, Table, figure
from gem_core.report.tables import quality, speed, summary, verdicts


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """GEM with three seeds, trees with one."""
    folders = [write_run(tmp_path / f"gem{s}", "GEM", s, ne=0.75 + 0.01 * s, auc=0.8) for s in range(3)]
    folders.append(write_run(tmp_path / "trees", "Trees", ne=0.8, auc=0.78, fast=False))
    return [load_run(folder) for folder in folders]


class Page(HTMLParser):
    """Collects what a page would load, its tables' cells and its headings; fails on a tag that is not closed."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        assert tag not in ("script", "link", "iframe", "object")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_adds_up_its_speed_lines(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", "GEM"))
    assert (run.name, run.seed, run.status, run.best_step) == ("GEM", 0, "finished", 20)
    assert run.seconds == 8
    assert run.rate("fill") == pytest.approx((0.5 * 2 + 1.0 * 6) / 8)  # by time, not by line
    # 10 steps of 0.1 GFLOP and 10 of 0.3 over 50 rows/s * 8 s
    assert run.mflops_per_row() == pytest.approx((10 * 0.1 + 10 * 0.3) * 1e3 / 400)
    assert [run.seconds_at(s) for s in (0, 5, 10, 15, 20, 99)] == [0, 1, 2, 5, 8, 8]
    assert [line["step"] for line in run.training] == [10, 20]
    assert [line["step"] for line in run.evaluations] == [10, 20]


def test_figures_that_a_run_lacks_are_none(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", "Trees", fast=False))
    assert run.seconds == 8
    assert run.rate("samples_per_s") is None and run.mflops_per_row() is None


def test_objectives_and_surfaces_are_those_tested(runs: list[Run]) -> None:
    assert objectives(runs) == ["click", "buy"]
    assert surfaces(runs, "click") == ["feed", "a|b"] and surfaces(runs, "buy") == []


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _appended(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    return change


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (_without("recipe.yaml"), ConfigError, "recipe.yaml: cannot be read"),
        (_without("result.json"), DataError, "result.json: cannot be read: .* is .* the folder of a finished run?"),
        (_without("speed.jsonl"), DataError, "speed.jsonl: cannot be read"),
        (_appended("result.json", "}"), DataError, "result.json: not valid JSON"),
        (_appended("metrics.jsonl", '{"kind": "tr'), DataError, "metrics.jsonl, line 6: not valid JSON"),
        (_appended("metrics.jsonl", '{"step": 1}\n'), DataError, "lacks 'kind'"),
    ],
)
def test_a_broken_folder_is_named(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], says: str
) -> None:
    folder = write_run(tmp_path / "run", "GEM")
    spoil(folder)
    with pytest.raises(error, match=says) as caught:
        load_run(folder)
    assert str(folder) in str(caught.value)


# ---- tables --------------------------------------------------------------------------------------------------------


def test_the_best_is_marked_by_what_is_better_for_the_metric(runs: list[Run]) -> None:
    table = summary(runs)
    assert table.columns == ("model", "joint NE", "click NE", "click AUC", "buy NE", "buy AUC")
    gem, trees = table.sections[0].rows
    assert [cell.text for cell in gem[:2]] == ["GEM", "0.7600 ± 0.0100"]
    assert all(cell.best for cell in gem[1:]) and not any(cell.best for cell in trees)


def test_calibration_is_best_nearest_to_one(tmp_path: Path) -> None:
    found = [load_run(write_run(tmp_path / name, name)) for name in ("A", "B")]
    changed = replace(found[1], test={**found[1].test, "click/calibration": 0.97})
    rows = quality([found[0], changed], "click").sections[0].rows
    assert [row[-1] for row in rows] == [Cell("1.0500"), Cell("0.9700", best=True)]


def test_quality_has_a_section_for_each_surface(runs: list[Run]) -> None:
    headings = [section.heading for section in quality(runs, "click").sections]
    assert headings[0] == "all surfaces (1,000 rows, 500 positive)"
    assert headings[1:] == ["feed (600 rows, 300 positive)", "a|b (400 rows, 200 positive)"]


def test_positives_are_not_needed(runs: list[Run]) -> None:
    (older,) = [replace(run, test={k: v for k, v in run.test.items() if "positives" not in k}) for run in runs[:1]]
    assert quality([older], "click").sections[0].heading == "all surfaces (1,000 rows)"
    assert not any("nothing follows" in sentence for sentence in verdicts([older]))


def test_speed_says_nothing_where_nothing_was_measured(runs: list[Run]) -> None:
    gem, trees = speed(runs).sections[0].rows
    assert [c.text for c in gem] == ["GEM", "8", "50", "–", "10.00", "0.10", "0.88", "1.5"]
    assert [c.text for c in trees] == ["Trees", "8", *"––––––"]


def test_speed_tells_of_a_gpu_where_there_was_one(runs: list[Run]) -> None:
    assert "GPU GiB" not in speed(runs).columns
    *others, last = runs
    table = speed([*others, replace(last, speed=({"step": 20, "seconds": 8.0, "gpu_gib": 7.25},))])
    assert table.columns[-1] == "GPU GiB"
    assert [row[-1].text for row in table.sections[0].rows] == ["–", "7.2"]


def test_verdicts_name_the_winner_the_margin_and_what_weakens_them(runs: list[Run]) -> None:
    joint, click, buy, seeds = verdicts(runs)
    assert joint == "All objectives together: GEM has the lowest NE, 0.7600 ± 0.0100, 5.00% below Trees (0.8000)."
    assert click.endswith("5.00% below Trees (0.8000); AUC 0.8000 ± 0.0000 against 0.7800.")
    assert buy.endswith("Only 50 test rows are positive: nothing follows from this.")
    assert seeds.startswith("Fewer than three seeds")
    assert len(verdicts(runs[:3])) == 3  # one model, three seeds: no rival and nothing to warn of


def test_one_model_alone_is_best_of_nothing(runs: list[Run]) -> None:
    (row,) = summary(runs[:1]).sections[0].rows
    assert not any(cell.best for cell in row)


def test_figure() -> None:
    assert figure([]) == "–"
    assert figure([0.25]) == "0.2500"
    assert figure([1, 3], 1) == "2.0 ± 1.4"


def test_a_table_reads_the_same_in_all_formats() -> None:
    first = Section("", ((Cell("a<b"), Cell("1"), Cell("10", best=True)),))
    table = Table(("model", "x", "y"), (first, Section("more|", ((Cell("c"), Cell("2.5"), Cell("–")),))))
    assert table.text().splitlines() == ["model    x    y", "a<b      1   10*", "more|", "c      2.5    –"]
    assert '<tr><th scope="row">a&lt;b</th><td>1</td><td class=best>10</td></tr>' in table.html()
    one, heading, two = table.markdown().split("\n\n")
    assert one.splitlines() == ["| model | x | y |", "| --- | ---: | ---: |", "| a<b | 1 | **10** |"]
    assert heading == "more|:" and two.splitlines()[-1] == "| c | 2.5 | – |"
    pipes = Table(("m",), (Section("", ((Cell("a|b"),),)),)).markdown()
    assert pipes.splitlines()[-1] == "| a&#124;b |"


# ---- the whole -----------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_loads_nothing(runs: list[Run], tmp_path: Path) -> None:
    document = build("Two <models>", "our log", runs, {"The log": [Facts({"rows": "1 & 2"})]})
    path, text = write(document, tmp_path / "out")
    page = Page(path.read_text())
    assert page.text["h1"] == ["Two <models>"]
    assert page.text["h2"] == [
        "Summary", "Quality by objective and surface", "Learning", "Speed", "Terms", "The log", "How it was computed",
    ]  # fmt: skip
    assert page.text["h3"] == ["click", "buy"]
    assert "1 & 2" in page.text["dd"] and "GEM 0, 1, 2; Trees 0" in page.text["dd"]
    assert len(page.loads) == 7
    for source in page.loads:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        drawing = base64.b64decode(data).decode()
        ElementTree.fromstring(drawing)
        assert not re.search(r'(href|src)="(?!#)', drawing)  # nor do the drawings load anything
    markdown = text.read_text()
    shown = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(shown) == 7 and all((text.parent / name).is_file() for name in shown)
    assert "name: GEM" in markdown and "* **NE**: normalised entropy" in markdown


def test_the_same_runs_give_the_same_drawing(runs: list[Run]) -> None:
    assert plots.costs(runs) == plots.costs(runs)


def test_runs_without_evaluations_or_training_lines_have_no_plot_of_them(tmp_path: Path) -> None:
    trees = load_run(write_run(tmp_path / "trees", "Trees", fast=False))
    bare = replace(trees, evaluations=(), validation={})
    names = set(build("t", "s", [bare], {}).plots())
    assert names == {"ne.svg", "auc.svg", "calibration.svg", "reliability.svg", "costs.svg"}


def test_a_missing_matplotlib_says_what_to_install(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape('pip install "gem-core[demo]"')):
        build("t", "s", runs, {})


def test_the_environment_is_text_and_names_torch() -> None:
    found = environments.environment()
    assert "torch " in found["versions"] and "usable cores" in found["machine"]
    assert json.loads(json.dumps(found)) == found


def test_outside_a_working_tree_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no git
    monkeypatch.setattr(environments, "version", _not_installed)
    found = environments.environment()
    assert "commit" not in found and found["versions"] == ""


def _not_installed(name: str) -> str:
    raise environments.PackageNotFoundError(name)
