"""A small model: events pooled by learned seeds, then two linear maps on everything side by side.

Shape letters: B rows, Q requests, T events of a request, S seeds, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from gem_core import ops
from gem_core.data.batch import Batch, Jagged
from gem_core.errors import ConfigError
from gem_core.protocols import ComponentConfig, Embedding, Output, Table
from gem_core.schema import Schema


class TwoLayerConfig(ComponentConfig):
    """`dim`: width of every embedding; `seeds`: queries that pool a history; `hidden`: width between the two maps."""

    dim: int = Field(8, ge=1)
    seeds: int = Field(2, ge=1)
    hidden: int = Field(32, ge=1)


class TwoLayer(nn.Module):
    """logits = W2 gelu(W1 [row features, request features, pooled events])."""

    Config = TwoLayerConfig
    hidden_names: tuple[str, ...] = ("hidden",)
    embedding: Embedding

    def __init__(self, config: TwoLayerConfig, *, schema: Schema, embedding: Embedding) -> None:
        super().__init__()
        self.config, self.tasks = config, list(schema.objectives)
        self.event_fields = {
            event: names
            for event, kind in schema.events.items()
            if (names := [name for name, field in kind.fields.items() if field.kind == "sparse"])
        }
        # The tables are the embedding's, not parameters of ours: a module must not take it as its child.
        object.__setattr__(self, "embedding", embedding)
        embedding.setup([Table(n, schema.table_rows(n), config.dim, tuple(k)) for n, k in schema.tables().items()])
        self.seeds = nn.ParameterDict(
            {event: nn.Parameter(torch.randn(config.seeds, 1, config.dim)) for event in self.event_fields}
        )
        dense = len(schema.names("dense", "row")) + len(schema.names("dense", "request"))
        vectors = sum(vector.width for vector in schema.vectors.values())
        embedded = len(schema.sparse) + len(self.event_fields) * config.seeds
        self.first = nn.Linear(dense + vectors + embedded * config.dim, config.hidden)
        self.second = nn.Linear(config.hidden, len(self.tasks))

    def forward(self, batch: Batch, hidden: Sequence[str] = ()) -> Output:
        """Logits (B,) per task. What does not depend on the ad is computed per request and then copied to its rows."""
        for name in hidden:
            if name not in self.hidden_names:
                raise ConfigError(
                    f'model two-layer has no hidden layer "{name}"; valid: {", ".join(self.hidden_names)}'
                )
        ids: dict[str, Tensor | Jagged] = {**batch.ids, **batch.request_ids}
        for event, names in self.event_fields.items():
            ids |= {f"{event}.{name}": batch.events[event][name].values for name in names}
        looked = self.embedding.lookup(ids)
        rows = [torch.nan_to_num(batch.dense), *batch.vectors.values(), *(looked[name] for name in batch.ids)]
        requests = [torch.nan_to_num(batch.request_dense), *batch.request_vectors.values()]
        requests += [looked[name] for name in batch.request_ids]
        requests += [self._pool(event, batch, looked) for event in self.event_fields]
        x = torch.cat([*rows, torch.cat(requests, 1)[batch.request]], 1)
        middle = nn.functional.gelu(self.first(x))
        logits = self.second(middle).float()
        return Output(dict(zip(self.tasks, logits.unbind(1), strict=True)), dict.fromkeys(hidden, middle))

    def _pool(self, event: str, batch: Batch, looked: dict[str, Tensor]) -> Tensor:
        """(Q, S * D): the seeds' attention over the events; 0 for a request without."""
        time = batch.events[event]["time"]
        events = torch.stack([looked[f"{event}.{name}"] for name in self.event_fields[event]]).sum(0)
        keys = events.unsqueeze(1)  # one head
        return ops.seed_attention(self.seeds[event], keys, keys, time.offsets, time.max_length).flatten(1)

    def flops(self, batch: Batch) -> dict[str, int]:
        """Of a forward pass, 2 per multiply-add, from the true lengths."""
        events = sum(batch.events[event]["time"].values.numel() for event in self.event_fields)
        linear = self.first.weight.numel() + self.second.weight.numel()
        return {"pooling": 4 * events * self.config.seeds * self.config.dim, "linear": 2 * batch.rows * linear}
