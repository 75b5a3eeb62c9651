"""What a schema accepts, what it answers about tables, and how it refuses; nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gem_core.errors import ConfigError
from gem_core.schema import Schema

pytestmark = pytest.mark.light

SPEC: dict[str, Any] = {
    "user": "u",
    "time": "t",
    "dense": ["price"],
    "sparse": {"ad": None, "shop": {"level": "request", "hash": 10}, "kind": {"vocabulary": ["a", "b"]}},
    "events": {"click": {"fields": ["ad", "place"]}, "view": {"fields": {"page": {"table": "place"}}}},
    "objectives": ["click"],
}


def test_tables() -> None:
    schema = Schema.parse(SPEC)
    assert schema.tables() == {
        "ad": ["ad", "click.ad"],
        "shop": ["shop"],
        "kind": ["kind"],
        "click.place": ["click.place"],
        "place": ["view.page"],
    }
    assert schema.table_rows("shop") == 12 and schema.table_rows("kind") == 4
    assert schema.names("sparse", "request") == ["shop"] and schema.names("sparse", "row") == ["ad", "kind"]
    assert schema.surface_names() == ["all"]


def test_ids_of_a_learned_table_need_a_fitted_schema() -> None:
    with pytest.raises(ConfigError, match=r"the schema is not fitted: call schema\.fit"):
        Schema.parse(SPEC).table_rows("ad")
    fitted = {"rows": 1, "dense": {}, "vocabularies": {"ad": [1, "x"]}, "surfaces": ["b", "a"], "base_rates": {}}
    own = SPEC | {"fitted": fitted, "surface": "s", "sparse": {"ad": {"unseen": "hash", "unseen_buckets": 7}}}
    schema = Schema.parse(own)
    assert schema.table_rows("ad") == 2 + 2 + 7
    assert schema.surface_names() == ["b", "a"] and Schema.parse(own | {"surfaces": ["c"]}).surface_names() == ["c"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"sparce": {}}, r'unknown key "sparce".*did you mean "sparse"'),
    "unknown option": ({"sparse": {"ad": {"hsh": 1}}}, r'unknown key "sparse.ad.hsh".*did you mean "hash"'),
    "no user": ({"user": ...}, 'missing key "user"'),
    "no objectives": ({"objectives": {}}, "objectives"),
    "two sources of ids": ({"sparse": {"ad": {"hash": 3, "vocabulary": ["a"]}}}, "give `hash` or `vocabulary`"),
    "a feature twice": ({"dense": ["ad"]}, "'ad' is declared in more than one"),
    "a field called time": ({"events": {"click": {"fields": ["time"]}}}, 'the field name "time" is taken'),
    "a name with a dot": ({"dense": ["a.b"]}, "name 'a.b': names must not"),
    "surfaces alone": ({"surfaces": ["a"]}, "surfaces needs `surface`"),
    "surfaces of a task alone": ({"objectives": {"c": {"surfaces": ["a"]}}}, r"objectives.c.surfaces needs `surface`"),
    "unknown surface": (
        {"surface": "s", "surfaces": ["a"], "objectives": {"c": {"surfaces": ["b"]}}},
        r"objectives.c.surfaces: 'b' is not among",
    ),
    "ids made in two ways": (
        {"sparse": {"ad": {}, "other": {"table": "ad", "min_count": 3}}},
        r"other.min_count: the features of table 'ad' share their ids.*min_count: 1, found 3; give one another `table`",
    ),
    "names of another kind": ({"dense": [3]}, "dense"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_schemas(change: dict[str, Any], message: str) -> None:
    spec = {k: v for k, v in (SPEC | change).items() if v is not ...}
    with pytest.raises(ConfigError, match=message):
        Schema.parse(spec)


def test_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    with pytest.raises(ConfigError, match=r"schema .*schema.yaml: "):
        Schema.load(path)
    for text in ("a: [", "- a", "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"schema .*schema.yaml: "):
            Schema.load(path)
    path.write_text("user: u\ntime: t\nobjectives: {click: {lable: c}}\n")
    with pytest.raises(ConfigError, match=r'schema.yaml: unknown key "objectives.click.lable".*"label"'):
        Schema.load(path)
