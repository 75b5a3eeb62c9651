"""Wukong (2403.02545), a baseline: a stack of Wukong blocks on the non-sequence tokens and the means of the histories.

Shape letters: B rows, Q requests, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from gem_core.data.batch import Batch
from gem_core.model.features import FeatureConfig, FeatureTokens, mean_history, truncate
from gem_core.model.heads import HeadConfig, Heads, check_hidden
from gem_core.model.layers import ByName, linear_macs
from gem_core.model.wukong import WukongBlock, WukongConfig
from gem_core.protocols import ComponentConfig, Embedding, Output
from gem_core.schema import Schema


class WukongModelConfig(ComponentConfig):
    """`dim`, `layers`: D and the number of blocks. `max_events`: newest events whose mean is a token, one per sparse field."""

    dim: int = Field(32, ge=2)
    layers: int = Field(3, ge=1)
    block: WukongConfig = WukongConfig()
    features: FeatureConfig = FeatureConfig()
    max_events: int = Field(64, ge=1)
    head_hidden: tuple[int, ...] = (64,)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    head: HeadConfig = HeadConfig()


class Wukong(nn.Module):
    """Hidden layers by name: "layer.<l>.x" (B, N, D), "trunk" (B, width of the heads' input)."""

    Config = WukongModelConfig
    embedding: Embedding

    def __init__(self, config: WukongModelConfig, *, schema: Schema, embedding: Embedding) -> None:
        super().__init__()
        self.config = config
        keys = [f"{e}.{n}" for e, t in schema.events.items() for n, f in t.fields.items() if f.kind == "sparse"]
        self.features = FeatureTokens(schema, config.features, config.dim, keys)
        object.__setattr__(self, "embedding", embedding)  # its tables are not the model's parameters
        embedding.setup(self.features.tables)
        means = {
            key.replace(".", "/"): nn.Linear(self.features.widths[key], config.dim, bias=False)
            for key in self.features.event_keys
        }
        self.history = ByName(means)
        tokens = [self.features.tokens["request"] + self.features.tokens["row"] + len(means)]
        tokens += [config.block.tokens_out] * config.layers
        self.layers = nn.ModuleList(WukongBlock(n, config.dim, config.block) for n in tokens[:-1])
        self.heads = Heads(schema, tokens[-1] * config.dim, config.head_hidden, config.head_dropout, config.head)
        self.hidden_names = (*(f"layer.{i}.x" for i in range(config.layers)), "trunk")

    def forward(self, batch: Batch, hidden: Sequence[str] = ()) -> Output:
        """Raises ConfigError for a hidden layer that the model does not have."""
        check_hidden("wukong", hidden, self.hidden_names)
        keys = self.features.event_keys
        events = {e: truncate(batch.events[e], self.config.max_events) for e in {k.partition(".")[0] for k in keys}}
        looked = self.embedding.lookup(self.features.ids(batch, events))
        tokens = self.features(batch, looked)
        means = zip(keys, mean_history(keys, looked, events), strict=True)
        history = [self.history[key.replace(".", "/")](mean).unsqueeze(1) for key, mean in means]
        x = torch.cat([torch.cat([tokens.request, *history], 1)[batch.request], tokens.rows], 1)
        kept: dict[str, Tensor] = {}
        for index, block in enumerate(self.layers):
            x = kept[f"layer.{index}.x"] = block(x)
        trunk = kept["trunk"] = x.flatten(1)
        return Output(self.heads(trunk, batch.surface, tokens.skip), {name: kept[name] for name in hidden})

    def flops(self, batch: Batch) -> dict[str, int]:
        """Forward FLOPs by module, 2 per multiply-add."""
        return {
            "features": 2 * self.features.macs(batch.rows, batch.requests),
            "history": 2 * batch.requests * linear_macs(self.history),
            "trunk": 2 * batch.rows * sum(b.macs() for b in self.layers if isinstance(b, WukongBlock)),
            "heads": 2 * batch.rows * self.heads.macs(),
        }
