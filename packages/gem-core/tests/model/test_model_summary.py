"""Sizes of the shipped recipes, counted without memory, and that every parameter of each gets a gradient."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from model_batches import FULL, MODELS, fitted, make_batch, make_model, make_schema, stir
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gem_core import recipe as recipes
from gem_core.data.completejourney.reader import SCHEMA
from gem_core.data.generated import GeneratedReader
from gem_core.errors import ConfigError
from gem_core.model.summary import Summary, summarise
from gem_core.plugins import default_registry
from gem_core.schema import Schema

FOLDER = Path(__file__).parents[4] / "recipes"
SHIPPED = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
TYPICAL = {"click": 800, "impression": 1200, "conversion": 100}


class Allocated(TorchDispatchMode):
    """Bytes of all real tensors that operators return."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.bytes += leaf.numel() * leaf.element_size()
        return out


def size_of(name: str, **options: Any) -> Summary:
    return summarise(recipes.load(SHIPPED[name]), default_registry(), **options)


def test_the_cluster_recipe_is_counted_without_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with Allocated() as allocated:
        summary = size_of("kunlun-cluster", lengths=TYPICAL, rows_per_request=20)
    with capsys.disabled():
        print(f"\nkunlun-cluster, {TYPICAL} events, 20 rows per request\n{summary}")
    assert allocated.bytes < 1e6
    assert 2e9 < sum(summary.parameters.values()) < 2e10
    assert sum(summary.tables.values()) > 1e12
    assert 3e10 < sum(summary.flops.values()) < 3e11
    assert "towers.impression" in str(summary) and "ad  " in str(summary)
    assert "with 20 rows a request and events 800 click, 1200 impression, 100 conversion\n" in str(summary)


def test_sizes_rise_from_s_to_cluster() -> None:
    sizes = [size_of(f"kunlun-{size}") for size in ("s", "m", "l", "cluster")]
    for part in ("parameters", "flops"):
        totals = [sum(getattr(size, part).values()) for size in sizes]
        assert all(b > 4 * a for a, b in itertools.pairwise(totals))


@pytest.mark.parametrize("name", MODELS)
def test_a_summary_counts_what_the_built_model_has(name: str) -> None:
    schema = make_schema()
    recipe = recipes.parse({"data": {"reader": "memory"}, "model": name})
    lengths = {"click": 11, "view": 3}
    summary = summarise(recipe, default_registry(), schema, lengths=lengths, rows_per_request=4)
    model = make_model(name, schema)
    assert sum(summary.parameters.values()) == sum(p.numel() for p in model.parameters())
    weights = {k: v for k, v in model.embedding.state().items() if k.endswith(".weight")}
    assert sum(summary.tables.values()) == sum(v.numel() for v in weights.values())
    batch = make_batch(schema, (4,), {k: [n] for k, n in lengths.items()})
    assert summary.flops == {part: n / 4 for part, n in model.flops(batch).items()}


def test_a_schema_that_is_not_fitted_counts_at_its_largest() -> None:
    small = {"sparse": {"ad": {"max_vocabulary": 30}, "kind": {"vocabulary": ["a", "b"]}}, "events": {}}
    recipe = recipes.parse({"data": {"reader": "memory", "schema": {**FULL, **small}}, "model": "kunlun"})
    summary = summarise(recipe, default_registry())
    assert summary.tables == {"ad": (30 + 2) * 16, "kind": (2 + 2) * 16}
    assert summary.at_most == ("ad",)
    assert "table parameters, at most 2.3 KB in float32\n  ad (at most)" in str(summary)
    assert "with 1 row a request and events of no type\n" in str(summary)
    bins = recipe.data.schema_["dense"]["x"].get("bins", 26)  # type: ignore[index, call-overload]
    linear = (bins + 1) + 2 + 1  # x's bins and missing bit, y and its, ...
    assert summary.parameters["features"] > linear * 32


def test_a_reader_says_its_schema_without_the_log() -> None:
    reader = {"name": "completejourney", "source": "nowhere", "max_length": {"purchase": 7}}
    data = {"reader": reader}
    summary = summarise(recipes.parse({"data": data, "model": "kunlun"}), default_registry())
    assert summary.events["purchase"] == 7 and summary.events["campaign"] == 32
    reader["max_length"] = {"purchases": 7}
    with pytest.raises(ConfigError, match='no events "purchases"; did you mean "purchase"'):
        summarise(recipes.parse({"data": data, "model": "kunlun"}), default_registry())


def test_what_a_summary_cannot_know_is_said() -> None:
    recipe = recipes.parse({"data": {"reader": "memory"}, "model": "kunlun"})
    with pytest.raises(ConfigError, match='reader "memory" brings its own schema, which only its data tell'):
        summarise(recipe, default_registry())
    with pytest.raises(ConfigError, match='no event type "clik" in the schema; did you mean "click"'):
        summarise(recipe, default_registry(), make_schema(), lengths={"clik": 3})


LARGEST = {
    "dim": 32, "width": 32, "seeds": 8, "ffn_hidden": 16, "summary_tokens": 4, "compressed_tokens": 12, "rank": 4,
    "hidden": 32, "head_hidden": 32, "embedding_dim": 8, "attention_size": 8,
}  # fmt: skip


def shrink(options: dict[str, Any]) -> dict[str, Any]:
    """The same switches at sizes that a test can train."""

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: cut(k, v) for k, v in value.items()}
        if isinstance(value, list):
            return [cut(key, v) for v in value]
        return min(value, LARGEST[key]) if key in LARGEST else value

    return {key: cut(key, value) for key, value in options.items()}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_parameter_of_every_recipe_gets_a_gradient(name: str) -> None:
    recipe = recipes.load(SHIPPED[name])
    given, reader = recipe.data.schema_, recipe.data.reader
    if reader.name == "generated":
        value = GeneratedReader.schema_of(GeneratedReader.Config(**reader.options))
    else:
        value = Schema.load(SCHEMA) if given is None else Schema.parse(given)  # type: ignore[arg-type]
    hashed = {n: f.model_copy(update={"hash": None}) for n, f in value.sparse.items()}  # small tables
    schema = fitted(value.model_copy(update={"sparse": hashed}))
    lengths = {event: [9, 0, 3] for event in schema.events}
    model = stir(make_model(recipe.model.name, schema, **shrink(recipe.model.options))).train()
    logits = model(make_batch(schema, (8, 5, 5), lengths)).logits
    torch.stack([(x * torch.randn(x.shape)).sum() for x in logits.values()]).sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
