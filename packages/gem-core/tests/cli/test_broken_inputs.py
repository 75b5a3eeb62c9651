"""A mistake in a schema, file, recipe, label or id is one message that names the place, with the right exit code.

A table of mistakes, each made in a log that is otherwise fine, and run through the real command line.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from gem_core.cli import main

TRAIN = ("train", "recipe.yaml")
PROFILE = ("data", "profile", "x.yaml")
RUN = "runs/small"
WRONG_USE, FAILED = 2, 1


@dataclass(frozen=True)
class Case:
    """`edit`: FILE -> (old, new) text replaced in it once (old "": the whole file; new None: the file is deleted)."""

    name: str
    says: tuple[str, ...]
    code: int
    edit: dict[str, tuple[str, str | None]]
    command: tuple[str, ...] = TRAIN


def recipe(name: str, old: str, new: str, *says: str, code: int = WRONG_USE) -> Case:
    return Case(f"recipe: {name}", says, code, {"recipe.yaml": (old, new)})


def override(text: str, *says: str, code: int = WRONG_USE) -> Case:
    return Case(f"override: {text}", says, code, {}, (*TRAIN, text))


def schema(name: str, old: str, new: str, *says: str, code: int = WRONG_USE) -> Case:
    return Case(f"schema: {name}", says, code, {"schema.yaml": (old, new)})


def rows(name: str, old: str, new: str | None, *says: str, code: int = FAILED) -> Case:
    return Case(f"rows: {name}", says, code, {"rows.csv": (old, new)})


def events(name: str, old: str, new: str | None, *says: str, code: int = FAILED) -> Case:
    return Case(f"events: {name}", says, code, {"events.csv": (old, new)})


def trained(name: str, command: str, *says: str, code: int = WRONG_USE, **edit: tuple[str, str | None]) -> Case:
    return Case(f"{command.split()[0]}: {name}", says, code, edit, tuple(command.split()))


ROW_1 = "u0,1000,feed,3.5,20,a3,c1,1,0,train"
LEARNED_SURFACES = """\
user: user
time: time
surface: place
sparse: [ad]
events: {click: {fields: [ad]}}
objectives: {click: {label: clicked, surfaces: [SURFACE]}}
"""
TEST_ROW = "u5,1290,search,"
READER = "  reader: {name: csv, rows: rows.csv, events: {click: events.csv}, split: {column: split}}\n"
PRICE = 'rows.csv, line 2, column "price"'

CASES = [
    recipe("not there", "", "", "recipe recipe.yaml: expected a mapping of options, found nothing"),
    recipe("not YAML", "trainer: {", "trainer: [", "recipe recipe.yaml: not valid YAML: line 8, column "),
    recipe("a list", "", "- train\n", "recipe recipe.yaml: expected a mapping of options, found list"),
    recipe(
        "a key twice", "name: small", "name: a\nname: b", "recipe.yaml: not valid YAML: line 2", '"name" is given twice'
    ),
    recipe("unknown key", "trainer:", "trainner:", 'recipe.yaml: unknown key "trainner"; did you mean "trainer"?'),
    recipe("unknown key within", "log_every", "log_evry", 'unknown key "trainer.log_evry"; did you mean "log_every"?'),
    recipe(
        "wrong type", "epochs: 1", "epochs: one", "recipe.yaml: trainer.epochs: expected a valid integer, found 'one'"
    ),
    recipe(
        "out of range",
        "batch_rows: 16",
        "batch_rows: 0",
        "data.batch_rows: expected a value greater than or equal to 1",
    ),
    recipe(
        "unknown model", "name: din", "name: dinn", 'recipe.yaml: model: model "dinn" is not known; did you mean "din"?'
    ),
    recipe("unknown reader", "name: csv", "name: cvs", 'data.reader: reader "cvs" is not known; did you mean "csv"?'),
    recipe(
        "option of the model", "hidden:", "hiden:", 'unknown key "model.hiden" of model "din"; did you mean "hidden"?'
    ),
    recipe(
        "option of the reader", "rows:", "row:", 'unknown key "data.reader.row" of reader "csv"; did you mean "rows"?'
    ),
    recipe("no reader", READER, "  batcher: in-order\n", 'recipe recipe.yaml: missing key "data.reader"'),
    recipe("no schema", "  schema: schema.yaml\n", "", "data.schema: missing; this reader needs the schema of the log"),
    recipe("schema not there", "schema.yaml", "shema.yaml", "schema shema.yaml: cannot be read: No such file"),
    recipe("base not there", "name: small", "base: b.yaml", "recipe b.yaml: cannot be read: No such file or directory"),
    recipe(
        "placeholder", "name: small", "output: 'runs/{nam}'", "output: expected no placeholders but {name} and {seed}"
    ),
    recipe(
        "unknown way to split",
        "split: {column: split}",
        "split: {colum: split}",
        'unknown key "data.reader.split.colum"',
    ),
    recipe(
        "two ways to split",
        "{column: split}",
        "{column: split, test_from: 3}",
        "data.reader.split: expected either `column`",
    ),
    recipe(
        "a type of events that is none",
        "events: {click:",
        "events: {clik:",
        'the schema has no type "clik"; did you mean "click"?',
    ),
    override("epochs", 'override "epochs": expected key.path=value'),
    override("trainer.epoch=2", 'override "trainer.epoch=2": unknown key "trainer.epoch"; did you mean "epochs"?'),
    override(
        "optimizer.dense.lr=fast", 'override "optimizer.dense.lr=fast": optimizer.dense.lr: expected a valid number'
    ),
    override("model.hidden.0=3", 'override "model.hidden.0=3": "hidden" is not a mapping in the recipe'),
    override("task_weights.by=2", 'task_weights: the schema has no task "by"; did you mean "buy"?'),
    override("ops.gpda=reference", 'there is no op "gpda"; did you mean "gdpa"?'),
    override("ops.gdpa=triton", 'backend "triton"', "pip install gem-kernels[triton]"),
    override("parallel.strategy=fsdp", 'strategy "fsdp"', "gem-parallel"),
    override(
        "data.reader.rows=row.csv",
        "reader: rows: row.csv: no such file (looked for /",
        "/row.csv: relative to the current folder)",
    ),
    override("precision.bits=8", 'override "precision.bits=8": unknown key "precision.bits" of precision "fp32"'),
    override("embedding.init=1", 'override "embedding.init=1": unknown key "embedding.init" of embedding "torch"'),
    override("precision=fp16", 'override "precision=fp16": precision: precision "fp16" is not known; valid: bf16,'),
    override("output=rows.csv", "output rows.csv: expected a folder, found a file there; choose another"),
    override("output=rows.csv/x", "output rows.csv/x: expected a folder, found a file there; choose another"),
    override("output=/proc/gem", "output /proc/gem: cannot be written: No such file or directory; choose another"),
    override("model.features={embedding_dim: 100000000000000}", "out of memory: ", "--summary", code=FAILED),
    override("trainer.early_stop.metric=clik/auc", 'trainer.early_stop.metric "clik/auc": not a validation metric'),
    schema("not YAML", "dense:", "dense: [", "schema schema.yaml: not valid YAML: line"),
    schema(
        "unknown key",
        "transform",
        "tranform",
        'schema.yaml: unknown key "dense.price.tranform"; did you mean "transform"?',
    ),
    schema(
        "unknown value",
        "log1p",
        "log2p",
        "schema.yaml: dense.price.transform: expected 'none' or 'log1p', found 'log2p'",
    ),
    schema("no user", "user: user\n", "", 'schema schema.yaml: missing key "user"'),
    schema(
        "no objectives",
        "  click: {label: clicked}\n  buy: {label: bought}\n",
        "  {}\n",
        "schema.yaml: objectives: expected at least 1 item, found {}",
    ),
    schema(
        "a feature twice",
        "  category: {}",
        "  price: {}",
        "feature 'price' is declared in more than one of dense, sparse, vectors",
    ),
    schema(
        "two sources of ids",
        "  ad: {}",
        "  ad: {hash: 10, vocabulary: [a1]}",
        "sparse.ad: give `hash` or `vocabulary`, not both",
    ),
    schema("field named time", "fields: {ad: {}", "fields: {time: {}", 'events.click: the field name "time" is taken'),
    schema("surfaces without a column", "surface: place\n", "", "schema schema.yaml: surfaces needs `surface`"),
    schema(
        "unknown surface",
        "label: bought",
        "label: bought, surfaces: [fed]",
        "objectives.buy.surfaces: 'fed' is not among surfaces",
    ),
    schema(
        "a surface that does not occur",
        "",
        LEARNED_SURFACES.replace("SURFACE", "fed"),
        'objectives.click.surfaces: "fed" does not occur in the training rows; did you mean "feed"?',
        "declare all surfaces in `surfaces:`",
    ),
    Case(
        "rows: a surface that only the test split has",
        ('rows.csv, line 60, column "place"', "one of feed, search, found 'map'", "the schema's `surfaces:`"),
        FAILED,
        {
            "schema.yaml": ("", LEARNED_SURFACES.replace("SURFACE", "feed, search")),
            "rows.csv": (TEST_ROW, TEST_ROW.replace("search", "map")),
        },
    ),
    schema(
        "column not in the file",
        "price: {",
        "prize: {",
        "rows.csv",
        'column "prize"',
        'did you mean "price"?',
        code=FAILED,
    ),
    schema(
        "events' column not in the file",
        "category: {}}}",
        "categori: {}}}",
        "events.csv",
        '"categori"',
        'did you mean "category"?',
        code=FAILED,
    ),
    schema(
        "unseen id",
        "  ad: {}",
        "  ad: {vocabulary: [a0, a1], unseen: error}",
        'events.csv, line 4, column "ad"',
        "found 'a2'",
        code=FAILED,
    ),
    rows("empty file", "", "", "rows.csv: cannot be read as CSV"),
    rows(
        "no rows",
        "",
        "user,time,place,price,age,ad,category,clicked,bought,split\n",
        "the training split has no rows: nothing to fit the schema on",
    ),
    rows(
        "a field too few",
        ROW_1,
        ROW_1.removesuffix(",train"),
        "rows.csv, line 2: expected 10 fields, as in the header, found 9",
    ),
    rows(
        "label of 2",
        ROW_1,
        "u0,1000,feed,3.5,20,a3,c1,2,0,train",
        'rows.csv, line 2, column "clicked" (label of click): expected a label of 0 or 1',
        "found 2",
    ),
    rows(
        "label not a number",
        ROW_1,
        "u0,1000,feed,3.5,20,a3,c1,yes,0,train",
        'rows.csv, line 2, column "clicked"',
        "found 'yes'",
    ),
    rows(
        "no label",
        ROW_1,
        "u0,1000,feed,3.5,20,a3,c1,,,train",
        "rows.csv, line 2: expected a label for at least one of click, buy, found none",
    ),
    rows(
        "number that is none", ROW_1, "u0,1000,feed,cheap,20,a3,c1,1,0,train", PRICE, "expected a number, found 'cheap'"
    ),
    rows("infinite number", ROW_1, "u0,1000,feed,inf,20,a3,c1,1,0,train", PRICE, "found inf"),
    rows("log of a negative", ROW_1, "u0,1000,feed,-3,20,a3,c1,1,0,train", PRICE, "found -3"),
    rows("no user", ROW_1, ",1000,feed,3.5,20,a3,c1,1,0,train", 'rows.csv, line 2, column "user"'),
    rows("no time", ROW_1, "u0,,feed,3.5,20,a3,c1,1,0,train", 'rows.csv, line 2, column "time"'),
    rows(
        "time that is none",
        ROW_1,
        "u0,noon,feed,3.5,20,a3,c1,1,0,train",
        'rows.csv, line 2, column "time"',
        "found 'noon'",
    ),
    rows(
        "unknown surface",
        ROW_1,
        "u0,1000,fed,3.5,20,a3,c1,1,0,train",
        'rows.csv, line 2, column "place"',
        "one of feed, search",
        'did you mean "feed"?',
    ),
    rows(
        "unknown split",
        ROW_1,
        "u0,1000,feed,3.5,20,a3,c1,1,0,trian",
        'rows.csv, line 2, column "split"',
        "one of train, validation, test",
        "found 'trian'",
    ),
    rows(
        "seconds with a fraction",
        ROW_1,
        ROW_1.replace("1000", "1000.5"),
        'rows.csv, line 2, column "time"',
        "whole seconds since 1970",
        "found '1000.5'",
    ),
    rows("a column twice", "price,age", "price,price", 'rows.csv, line 1: two columns are called "price" (dense)'),
    rows("in Latin-1", ROW_1, ROW_1.replace("a3", "\udce9"), "rows.csv: not in UTF-8: save it as UTF-8"),
    rows("a semicolon", "", "user;time;place\nu0;1000;feed\n", "the header has ';' and no ','", "delimiter: ';'"),
    rows("UTF-16", "", "\udcff\udcfeu\0s\0", "rows.csv: in UTF-16: save it as UTF-8"),
    rows("gzip", "", "\x1f\udc8b\b\0", "rows.csv: compressed with gzip: rename it to rows.csv.gz"),
    rows("Parquet", "", "PAR1", "rows.csv: a Parquet file: use the reader parquet"),
    rows("not there", "", None, "reader: rows: rows.csv: no such file", code=WRONG_USE),
    events("not there", "", None, "reader: events.click: events.csv: no such file", code=WRONG_USE),
    events("no time", "u0,900,", "u0,,", 'events.csv, line 2, column "time"'),
    events("no user", "u0,900,", ",900,", 'events.csv, line 2, column "user"'),
    events("a time that is none", "u0,900,", "u0,soon,", 'events.csv, line 2, column "time"', "found 'soon'"),
    Case("data: neither schema nor recipe", ("x.yaml: not valid YAML",), WRONG_USE, {"x.yaml": ("", "a: [")}, PROFILE),
    Case("data: a list", ("x.yaml: expected a mapping of options",), WRONG_USE, {"x.yaml": ("", "- 1")}, PROFILE),
    Case("data: not there", ("none.yaml: cannot be read",), WRONG_USE, {}, ("data", "profile", "none.yaml")),
    Case("data: no rows named", ("schema.yaml is a schema",), WRONG_USE, {}, ("data", "profile", "schema.yaml")),
    trained(
        "nothing to go on with",
        "train recipe.yaml --resume must name=new",
        "resume=must: runs/new has no complete checkpoint",
    ),
    trained("another model on resuming", "train recipe.yaml model.hidden=[4]", "runs/small", "model.hidden"),
    trained(
        "a file in place of a folder",
        f"predict {RUN} --rows rows.csv --out rows.csv/o.csv",
        "rows.csv: expected a folder, found a file there",
    ),
    trained(
        "a place that cannot be written",
        f"predict {RUN} --rows rows.csv --out /proc/gem/o.csv",
        "/proc/gem: cannot be written: No such file or directory",
    ),
    trained(
        "an override of the reader",
        f"eval {RUN} data.reader.tset=rows.csv",
        'override "data.reader.tset=rows.csv": unknown key "data.reader.tset" of reader "csv"; did you mean "test"?',
    ),
    trained("no such run", "eval runs/none", "runs/none"),
    trained("no such split", f"eval {RUN} --split tset", 'has no split "tset"; did you mean "test"?'),
    trained(
        "damaged checkpoint",
        f"eval {RUN}",
        "step-00000003",
        "model.pt",
        code=FAILED,
        **{"runs/small/checkpoints/step-00000003/model.pt": ("", "x")},
    ),
    trained("no rows", f"predict {RUN} --rows none.csv --out o.csv", "reader: test: none.csv: no such file"),
    trained(
        "kind of file",
        f"predict {RUN} --rows rows.csv --out o.txt",
        "predictions go to a .parquet or .csv file, not o.txt",
    ),
    trained(
        "events without a type",
        f"predict {RUN} --rows rows.csv --events events.csv --out o.csv",
        '--events "events.csv": expected TYPE=FILE',
    ),
    trained(
        "column not there",
        f"predict {RUN} --rows rows.csv --out o.csv",
        "rows.csv",
        'column "price"',
        code=FAILED,
        **{"rows.csv": ("price", "prize")},
    ),
    trained(
        "wrong number",
        f"predict {RUN} --rows rows.csv --out o.csv",
        PRICE,
        "found 'x'",
        code=FAILED,
        **{"rows.csv": ("feed,3.5", "feed,x")},
    ),
]


def apply(edit: dict[str, tuple[str, str | None]], folder: Path) -> None:
    for name, (old, new) in edit.items():
        path = folder / name
        if new is None:
            path.unlink()
            continue
        text = path.read_text(errors="surrogateescape") if path.exists() else ""
        assert old in text, f"{name} does not hold {old!r}"
        path.write_text(text.replace(old, new, 1) if old else new, errors="surrogateescape")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_message_that_names_the_place(
    case: Case, log: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    if case.name.partition(":")[0] in ("train", "eval", "predict"):
        shutil.copytree(request.getfixturevalue("run_folder"), log, dirs_exist_ok=True)
    apply(case.edit, log)
    capfd.readouterr()
    code = main(list(case.command))
    out, err = capfd.readouterr()
    assert err.startswith("error: ") and err.endswith("\n")
    assert "\nerror: " not in err and "Traceback" not in err and "unexpected" not in err
    for text in case.says:
        assert text in err
    assert code == case.code
    assert out == ""


def test_a_fault_in_the_test_split_comes_before_the_first_step(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apply({"rows.csv": (TEST_ROW, TEST_ROW.replace("u5", ""))}, log)
    assert main(list(TRAIN)) == FAILED
    assert 'rows.csv, line 60, column "user" (user): expected a user, found no value' in capsys.readouterr().err
    assert not (log / RUN / "metrics.jsonl").exists()


def test_the_log_is_fine_without_the_mistakes(run_folder: Path) -> None:
    assert (run_folder / RUN / "result.json").is_file()


def test_names_are_distinct_and_many() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 30
