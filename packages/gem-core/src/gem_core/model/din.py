"""DIN (1706.06978), a baseline: the ad attends to each event by a small MLP on [q, k, q - k, q * k], sum-pooled without softmax.

Shape letters: B rows, P (row, event) pairs, E width of an event, D width of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from gem_core.data.batch import Batch, Jagged
from gem_core.model.features import FeatureConfig, FeatureTokens, truncate
from gem_core.model.heads import HeadConfig, Heads, check_hidden
from gem_core.model.layers import MLP, ByName, linear_macs
from gem_core.protocols import ComponentConfig, Embedding, Output
from gem_core.schema import Schema


class DINConfig(ComponentConfig):
    """`max_events`: newest events used. `attention_hidden`, `hidden`: sizes of the attention's and the final MLP."""

    features: FeatureConfig = FeatureConfig()
    max_events: int = Field(64, ge=1)
    attention_hidden: tuple[int, ...] = (64, 32)
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = Field(0.1, ge=0, lt=1)
    head: HeadConfig = HeadConfig()


class TargetAttention(nn.Module):
    """Sum over a row's events of MLP([q, k, q - k, q * k]) k."""

    def __init__(self, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.score = MLP([4 * width, *hidden, 1])

    def forward(self, query: Tensor, keys: Tensor, offsets: Tensor, request: Tensor) -> Tensor:
        """query (B, E), keys (sum T, E) of the requests, request (B,) -> (B, E)."""
        lengths = offsets.diff()[request]
        row = torch.arange(request.numel(), device=request.device).repeat_interleave(lengths)
        start = lengths.cumsum(0) - lengths
        event = torch.arange(row.numel(), device=row.device) - start[row] + offsets[:-1][request][row]
        q, k = query[row], keys[event]
        weight = self.score(torch.cat([q, k, q - k, q * k], 1))
        return query.new_zeros(query.shape).index_add(0, row, weight * k)


class DIN(nn.Module):
    """Per event type: target attention over the newest `max_events`; then an MLP on all tokens and the pooled histories."""

    Config = DINConfig
    embedding: Embedding
    hidden_names: tuple[str, ...] = ("trunk",)

    def __init__(self, config: DINConfig, *, schema: Schema, embedding: Embedding) -> None:
        super().__init__()
        self.config = config
        dim = config.features.embedding_dim
        self.fields = _matching_fields(schema, config.features.match_only)
        keys = [key for pairs in self.fields.values() for key, _ in pairs]
        self.features = FeatureTokens(schema, config.features, dim, keys)
        object.__setattr__(self, "embedding", embedding)
        embedding.setup(self.features.tables)
        widths = {e: sum(self.features.widths[k] for k, _ in pairs) for e, pairs in self.fields.items()}
        self.attention = ByName({e: TargetAttention(w, config.attention_hidden) for e, w in widths.items()})
        tokens = (self.features.tokens["request"] + self.features.tokens["row"]) * dim
        self.mlp = MLP([tokens + 2 * sum(widths.values()), *config.hidden], config.dropout)
        self.heads = Heads(schema, config.hidden[-1], (), options=config.head)

    def forward(self, batch: Batch, hidden: Sequence[str] = ()) -> Output:
        """Raises ConfigError for a hidden layer that the model does not have."""
        check_hidden("din", hidden, self.hidden_names)
        events = {e: truncate(batch.events[e], self.config.max_events) for e in self.fields}
        looked = self.embedding.lookup(self.features.ids(batch, events))
        tokens = self.features(batch, looked)
        parts = [tokens.flat(batch)]
        for event, pairs in self.fields.items():
            keys = torch.cat([looked[k] for k, _ in pairs], 1)
            query = torch.cat([looked[f] for _, f in pairs], 1)
            parts += [query, self.attention[event](query, keys, events[event]["time"].offsets, batch.request)]
        trunk = nn.functional.gelu(self.mlp(torch.cat(parts, 1)))
        return Output(self.heads(trunk, batch.surface, tokens.skip), {"trunk": trunk} if "trunk" in hidden else {})

    def positions(self, batch: Batch) -> tuple[int, int]:
        """(real, computed) event positions: each event once per row, no padding."""
        real = sum(int(self._pairs(batch.events[e]["time"], batch).sum()) for e in self.fields)
        return real, real

    def _pairs(self, time: Jagged, batch: Batch) -> Tensor:
        return time.lengths().clamp(max=self.config.max_events)[batch.request]

    def flops(self, batch: Batch) -> dict[str, int]:
        """Forward FLOPs by module, 2 per multiply-add, from the true lengths."""
        out = {"features": 2 * self.features.macs(batch.rows, batch.requests)}
        for event, module in self.attention.items():
            pairs = int(self._pairs(batch.events[event]["time"], batch).sum())
            out[f"{event}.attention"] = 2 * pairs * linear_macs(module)
        out["mlp"] = 2 * batch.rows * linear_macs(self.mlp)
        out["heads"] = 2 * batch.rows * self.heads.macs()
        return out


def _matching_fields(schema: Schema, left_out: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Per event type its (key, row feature) pairs: what an event shares with the ad is compared with the ad's."""
    row = [n for n, f in schema.sparse.items() if f.level == "row" and not f.multi and n not in left_out]
    tables = {schema.table_of(name): name for name in row}
    out: dict[str, list[tuple[str, str]]] = {}
    for event, kind in schema.events.items():
        keys = [f"{event}.{n}" for n, f in kind.fields.items() if f.kind == "sparse" and f"{event}.{n}" not in left_out]
        pairs = [(key, tables[schema.table_of(key)]) for key in keys if schema.table_of(key) in tables]
        if pairs:
            out[event] = pairs
    return out
