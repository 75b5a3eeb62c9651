"""DCNv2 (2008.13535), a baseline: cross layers x' = x0 * (W x + b) + x beside a deep network, on all tokens and mean-pooled events.

Shape letters: B rows, Q requests, n inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from gem_core.data.batch import Batch
from gem_core.model.features import FeatureConfig, FeatureTokens, mean_history, truncate
from gem_core.model.heads import HeadConfig, Heads, check_hidden
from gem_core.model.layers import MLP, linear_macs
from gem_core.protocols import ComponentConfig, Embedding, Output
from gem_core.schema import Schema


class DCNv2Config(ComponentConfig):
    """`cross_layers` of rank `cross_rank` beside an MLP of `hidden` sizes."""

    features: FeatureConfig = FeatureConfig()
    max_events: int = Field(64, ge=1)
    cross_layers: int = Field(3, ge=1)
    cross_rank: int = Field(32, ge=1)
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = Field(0.1, ge=0, lt=1)
    head: HeadConfig = HeadConfig()


class CrossLayer(nn.Module):
    """x0 * (U V x + b) + x, the low-rank form."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, x0, self.up(self.down(x)))


class DCNv2(nn.Module):
    """Parallel form: the heads read the cross network's and the deep network's outputs side by side."""

    Config = DCNv2Config
    embedding: Embedding
    hidden_names: tuple[str, ...] = ("trunk",)

    def __init__(self, config: DCNv2Config, *, schema: Schema, embedding: Embedding) -> None:
        super().__init__()
        self.config = config
        dim = config.features.embedding_dim
        keys = [f"{e}.{n}" for e, t in schema.events.items() for n, f in t.fields.items() if f.kind == "sparse"]
        self.features = FeatureTokens(schema, config.features, dim, keys)
        object.__setattr__(self, "embedding", embedding)
        embedding.setup(self.features.tables)
        pooled = sum(self.features.widths[k] for k in self.features.event_keys)
        width = (self.features.tokens["request"] + self.features.tokens["row"]) * dim + pooled
        self.cross = nn.ModuleList(CrossLayer(width, config.cross_rank) for _ in range(config.cross_layers))
        self.mlp = MLP([width, *config.hidden], config.dropout)
        self.heads = Heads(schema, width + config.hidden[-1], (), options=config.head)

    def forward(self, batch: Batch, hidden: Sequence[str] = ()) -> Output:
        """Raises ConfigError for a hidden layer that the model does not have."""
        check_hidden("dcnv2", hidden, self.hidden_names)
        used = {key.partition(".")[0] for key in self.features.event_keys}
        events = {e: truncate(batch.events[e], self.config.max_events) for e in used}
        looked = self.embedding.lookup(self.features.ids(batch, events))
        tokens = self.features(batch, looked)
        parts = [tokens.flat(batch)]
        parts += [mean[batch.request] for mean in mean_history(self.features.event_keys, looked, events)]
        x0 = x = torch.cat(parts, 1)
        for layer in self.cross:
            x = layer(x0, x)
        trunk = torch.cat([x, nn.functional.gelu(self.mlp(x0))], 1)
        return Output(self.heads(trunk, batch.surface, tokens.skip), {"trunk": trunk} if "trunk" in hidden else {})

    def flops(self, batch: Batch) -> dict[str, int]:
        """Forward FLOPs by module, 2 per multiply-add."""
        return {
            "features": 2 * self.features.macs(batch.rows, batch.requests),
            "cross": 2 * batch.rows * linear_macs(self.cross),
            "mlp": 2 * batch.rows * linear_macs(self.mlp),
            "heads": 2 * batch.rows * self.heads.macs(),
        }
