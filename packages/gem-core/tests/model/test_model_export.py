"""Kunlun as one graph: torch.compile without graph breaks or recompilation, and torch.export with dynamic rows, requests and events."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from model_batches import make_batch, make_model, make_schema, same, stir
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gem_core import ops
from gem_core.data.batch import Batch, Jagged
from gem_core.protocols import Table

# Little of everything: one layer with every module in it, match counts, and a tower that truncates.
OPTIONS: dict[str, Any] = {"layers": 1, "comp_skip": False, "match_bins": 3, "tower": {"max_events": 9}}
SCHEMA = make_schema(
    dense={"x": {"encoding": "piecewise"}, "age": {"level": "request"}},
    sparse={"ad": {}, "tags": {"multi": True}},
    vectors={},
    events={"click": {"max_length": 40, "fields": {"ad": {}, "price": {"kind": "dense"}}}},
    objectives={"click": {}},
)


class Lookups(nn.Module):
    """Tables as plain parameters: what an exported model carries along."""

    def __init__(self, tables: list[Table], state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.of = {feature: table.name for table in tables for feature in table.features}
        self.weights = nn.ParameterDict(
            {t.name: nn.Parameter(state[f"tables.{t.name}.weight"].clone()) for t in tables}
        )

    def lookup(self, ids: Mapping[str, Tensor | Jagged]) -> dict[str, Tensor]:
        out = {}
        for key, value in ids.items():
            table = self.weights[self.of[key]]
            rows = table[value.values if isinstance(value, Jagged) else value]
            out[key] = ops.segment_mean(rows, value.offsets) if isinstance(value, Jagged) else rows
        return out


class Scorer(nn.Module):
    """A batch to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lookups = Lookups(model.features.tables, model.embedding.state())
        object.__setattr__(model, "embedding", self.lookups)
        self.model = model

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        logits: dict[str, Tensor] = self.model(batch).logits
        return logits


def make_scorer(**options: Any) -> Scorer:
    return Scorer(stir(make_model("kunlun", SCHEMA, **{**OPTIONS, **options})))


def other_batches() -> list[Batch]:
    return [make_batch(SCHEMA, (1, 5, 2, 2, 3), seed=3), make_batch(SCHEMA, (2, 2), {"click": [40, 0]}, seed=4)]


def test_one_graph_serves_every_shape() -> None:
    scorer, batch = make_scorer(), make_batch(SCHEMA)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            torch._dynamo.maybe_mark_dynamic(leaf, 0)
    # Inductor's decompositions without its code generation.
    compiled = torch.compile(scorer, backend="aot_eager_decomp_partition", fullgraph=True)
    same(compiled(batch), scorer(batch))
    with torch.compiler.set_stance("fail_on_recompile"):
        for other in other_batches():
            same(compiled(other), scorer(other))
            gradients = []
            for run in (compiled, scorer):
                scorer.zero_grad()
                torch.stack([x.square().sum() for x in run(other).values()]).sum().backward()
                gradients.append({n: p.grad.clone() for n, p in scorer.named_parameters()})  # type: ignore[union-attr]
            for name, gradient in gradients[1].items():
                torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("conditioning", ["request", "full"])
def test_export_with_dynamic_shapes(conditioning: str) -> None:
    scorer, batch = make_scorer(conditioning=conditioning), make_batch(SCHEMA)
    shapes = torch.export.ShapesCollection()
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            shapes[leaf] = {0: torch.export.Dim.AUTO}
    with torch.no_grad():
        exported = torch.export.export(scorer, (batch,), dynamic_shapes=shapes).module()
        for each in (batch, *other_batches()):
            same(exported(each), scorer(each))
