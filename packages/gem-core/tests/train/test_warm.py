"""A new run begins with an earlier one's rows, by id, and parameters, by name and shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from synthetic import recipe, registry
from test_trainer import lines
from windows import SCHEMA

from gem_core.recipe import Recipe
from gem_core.schema import Schema
from gem_core.train import Trainer, train
from gem_core.train.checkpoint import find
from gem_core.train.warm import _matching


def rows(ads: list[str]) -> pa.Table:
    n = len(ads)
    return pa.table(
        {
            "user": list(range(n)),
            "time": list(range(n)),
            "price": [float(i % 5) for i in range(n)],
            "ad": ads,
            "clicked": [i % 2 for i in range(n)],
        }
    )


def chosen(folder: Path, ads: list[str], **sections: Any) -> Recipe:
    return recipe(
        folder,
        data={
            "reader": {"name": "memory", "rows": rows(ads)},
            "schema": sections.pop("schema", SCHEMA),
            "batch_rows": 8,
        },
        model={"name": "dcnv2", "hidden": [sections.pop("hidden", 8)], "dropout": 0.0},
        **sections,
    )


def test_rows_follow_their_ids_and_what_is_new_starts_anew(tmp_path: Path) -> None:
    train(chosen(tmp_path / "old", ["a", "b", "c", "b"] * 6), registry())
    old = find(tmp_path / "old")
    new = chosen(tmp_path / "new", ["c", "d", "b", "7"] * 6, trainer={"warm_start": str(tmp_path / "old")}, hidden=16)
    trainer, fresh = Trainer(new, registry()), Trainer(new, registry())
    trainer._start("auto")
    vocabularies = [s.require_fitted().vocabularies["ad"] for s in (old.schema(), trainer.parts.schema)]
    for part in ("weight", "moment"):
        theirs, ours = old.part("embedding")[f"tables.ad.{part}"], trainer.parts.embedding.state()[f"tables.ad.{part}"]
        start = fresh.parts.embedding.state()[f"tables.ad.{part}"]
        assert torch.equal(ours[:2], theirs[:2]), "missing and unseen"
        for row, ad in enumerate(vocabularies[1], 2):
            expected = theirs[2 + vocabularies[0].index(ad)] if ad in vocabularies[0] else start[row]
            assert torch.equal(ours[row], expected), ad
    report = json.loads((tmp_path / "new/warm_start.json").read_text())
    assert report["tables"]["ad"] == {"mapped": 4, "new": 2, "dropped": 1, "why": ""}
    taken, begun = report["parameters"]["taken over"], report["parameters"]["new"]
    assert taken and begun and set(begun) <= set(report["parameters"]["dropped"])
    for name, value in trainer.strategy.state().items():
        expected = old.part("model")[name] if name in taken else fresh.strategy.state()[name]
        assert torch.equal(value, expected), name
    trainer._close()
    note = next(row["text"] for row in lines(tmp_path / "new", "text", "speed") if row["name"] == "warm start")
    assert "table ad: 4 rows taken over, 2 new, 1 dropped" in note
    result = train(new, registry(), resume="never")
    assert result.status == "finished"


def schema(**ad: Any) -> Schema:
    return Schema.parse({**SCHEMA, "sparse": {"ad": ad}})


def test_which_rows_match() -> None:
    def match(new: dict[str, Any], old: dict[str, Any], rows: int, old_rows: int) -> tuple[list[int], list[int], str]:
        to, of, why = _matching("ad", schema(**new), schema(**old), rows, old_rows)
        return to.tolist(), of.tolist(), why

    assert match({"hash": 3}, {"hash": 3}, 5, 5) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], "")
    assert match({"hash": 3}, {"hash": 4}, 5, 6) == ([0, 1], [0, 1], "hash 4 there, 3 here")
    numbers, texts = {"vocabulary": [5, 6]}, {"vocabulary": ["6", "5"]}
    assert match(numbers, texts, 4, 4) == ([0, 1, 2, 3], [0, 1, 3, 2], "")
    one = {"vocabulary": ["x"], "unseen": "hash", "unseen_buckets": 2}
    two = {"vocabulary": ["y", "x"], "unseen": "hash", "unseen_buckets": 2}
    assert match(one, two, 5, 6) == ([0, 1, 2, 3, 4], [0, 1, 3, 4, 5], "")
    to, _, why = _matching("own", schema(), schema(), 3, 4)
    assert (to.tolist(), why) == ([], "4 rows there")


def test_a_changed_schema_is_reported(tmp_path: Path) -> None:
    train(chosen(tmp_path / "old", ["a", "b"] * 8), registry())
    changed = {**SCHEMA, "sparse": {"advert": {"column": "ad"}}, "dense": {"cost": {"column": "price"}}}
    train(
        chosen(tmp_path / "new", ["a", "b"] * 8, schema=changed, trainer={"warm_start": str(tmp_path / "old")}),
        registry(),
    )
    report = json.loads((tmp_path / "new/warm_start.json").read_text())
    assert report["tables"]["ad"] == {"mapped": 0, "new": 0, "dropped": 4, "why": "no such table here"}
    assert report["tables"]["advert"] == {"mapped": 0, "new": 4, "dropped": 0, "why": "no such table there"}
    assert report["cautions"] == [
        "dense features (row) were price, now cost: parameters by place are taken over as they stood"
    ]
