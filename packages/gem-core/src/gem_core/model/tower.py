"""Event towers: one per event type, of its own width, depth and summary size (event-level personalisation).

Shape letters: Q sequences (requests, or rows under `full` conditioning), T events, E tower width, D common width, K summary
tokens, n target queries, B rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from gem_core.data.batch import Batch, Jagged
from gem_core.model.events import EventTokens
from gem_core.model.layers import TokenMap, rms_unit
from gem_core.model.pooling import HierarchicalSeedPooling, Sequence
from gem_core.model.sequence import Attention, GdpaFeedForward, SequenceAttention
from gem_core.protocols import ComponentConfig
from gem_core.schema import Schema


class TowerConfig(ComponentConfig):
    """One event type's tower.

    Attributes:
        width: E. heads: of attention, pooling and GDPA. layers: None for as many as the trunk.
        max_events: newest events used, None for the schema's max_length.
        seeds, summary_tokens, kron_terms: S, K and k of the hierarchical seed pooling.
        target_queries: queries made from the ad's tokens, pooled from the same keys.
        attention, attention_size: "block" of 64, "window" of +-size, "full", "causal".
        block_shift: moves the blocks of every second attention layer by half a block.
        ffn_hidden: F of the GDPA feed-forward. activation: its activation.
        rote: rotary temporal embedding of attention and pooling.
        time_waves: sinusoids of log age among an event's inputs (0: none).
    """

    width: int = Field(32, ge=2)
    heads: int = Field(2, ge=1)
    layers: int | None = Field(None, ge=1)
    max_events: int | None = Field(None, ge=1)
    seeds: int = Field(16, ge=1)
    summary_tokens: int = Field(4, ge=1)
    kron_terms: int = Field(4, ge=1)
    target_queries: int = Field(2, ge=0)
    attention: Attention = "block"
    attention_size: int = Field(64, ge=1)
    block_shift: bool = False
    ffn_hidden: int = Field(64, ge=1)
    activation: Literal["gelu", "gelu_tanh", "gelu_poly", "relu", "silu", "hardswish", "relu2", "leaky_relu"] = "gelu"
    rote: bool = True
    time_waves: int = Field(8, ge=0)

    @model_validator(mode="after")
    def _divides(self) -> TowerConfig:
        if self.width % self.heads or (self.rote and (self.width // self.heads) % 2):
            raise ValueError(f"width {self.width} must split into {self.heads} heads of even width")
        return self


@dataclass
class TowerState:
    """What a tower carries from layer to layer: its sequence and its last summary (B or Q, tokens, D)."""

    sequence: Sequence
    queries: Tensor | None
    sequence_of_row: Tensor | None
    shared: Tensor | None = None
    target: Tensor | None = None

    def summary(self) -> Tensor:
        """(B, K + n, D): the shared summary given to each row, then the row's own answers."""
        assert self.shared is not None
        shared = self.shared if self.sequence_of_row is None else self.shared[self.sequence_of_row]
        return shared if self.target is None else torch.cat([shared, self.target], 1)


class Tower(nn.Module):
    """The sequence side of all layers for one event type; the trunk drives it layer by layer."""

    def __init__(
        self,
        schema: Schema,
        event: str,
        config: TowerConfig,
        widths: Mapping[str, int],
        dim: int,
        row_tokens: int,
        weight_tokens: int,
        trunk_layers: int,
        comp_skip: bool,
    ) -> None:
        super().__init__()
        self.event, self.config = event, config
        self.limit = min(config.max_events or schema.events[event].max_length, schema.events[event].max_length)
        self.layers = min(config.layers or trunk_layers, trunk_layers)
        self.tokens_out = config.summary_tokens + config.target_queries
        self.embed = EventTokens(schema, event, config.width, config.time_waves, widths)
        self.pool = nn.ModuleDict()
        self.ffn = nn.ModuleDict()
        self.attention = nn.ModuleDict()
        e = config.width
        for layer in range(self.layers):
            even = layer % 2 == 0
            if even or not comp_skip:
                self.pool[str(layer)] = self._pooling()
                self.ffn[str(layer)] = GdpaFeedForward(
                    weight_tokens, dim, e, config.heads, config.ffn_hidden, config.activation
                )
            if not even or not comp_skip:
                shift = config.block_shift and len(self.attention) % 2 == 1
                self.attention[str(layer)] = SequenceAttention(
                    e, config.heads, config.attention, config.attention_size, shift, config.rote
                )
        self.pool["final"] = self._pooling()
        self.target = TokenMap(row_tokens, config.target_queries) if config.target_queries else None
        self.target_in = nn.Linear(dim, e, bias=False) if config.target_queries else None
        self.project = nn.Linear(e, dim, bias=False) if e != dim else nn.Identity()

    def _pooling(self) -> HierarchicalSeedPooling:
        c = self.config
        return HierarchicalSeedPooling(
            c.width, c.heads, c.seeds, c.summary_tokens, c.kron_terms, c.rote, c.target_queries > 0
        )

    def start(
        self, batch: Batch, fields: Mapping[str, Jagged], looked: Mapping[str, Tensor], row_tokens: Tensor, full: bool
    ) -> TowerState:
        """Embed the events (already truncated to `limit`); under `full` conditioning each row gets its own copy."""
        sequence = self.embed.sequence(batch, fields, looked, self.limit)
        sequence_of_row: Tensor | None = batch.request
        if full:
            sequence, sequence_of_row = sequence.gather(batch.request), None
        queries = None
        if self.target is not None and self.target_in is not None:
            queries = self.target_in(rms_unit(self.target(row_tokens)))
        return TowerState(sequence, queries, sequence_of_row)

    def summarise(self, state: TowerState, layer: int | str) -> None:
        """A fresh summary where this layer has a pooling (else the last one stays)."""
        if str(layer) not in self.pool:
            return
        shared, target = self.pool[str(layer)](state.sequence, state.queries, state.sequence_of_row)
        state.shared = self.project(shared)
        state.target = None if target is None else self.project(target)

    def advance(self, state: TowerState, layer: int, weights: Tensor) -> None:
        """S of the next layer; `weights` (Q, R, D) are the tokens that generate the feed-forward's weights."""
        if str(layer) in self.ffn:
            state.sequence = self.ffn[str(layer)](state.sequence, weights)
        if str(layer) in self.attention:
            state.sequence = self.attention[str(layer)](state.sequence)

    def macs(self, embedded: int, lengths: Tensor, rows: int, pairs: int) -> dict[str, int]:
        """Multiply-adds by part; `embedded` events (once per request), `lengths` of the sequences as this tower runs
        them, `pairs` the sum of events over rows."""
        events, sequences = int(lengths.sum()), lengths.numel()
        c = self.config
        pooling = sum(
            p.macs(rows, sequences, events, pairs, c.target_queries)
            for p in self.pool.values()
            if isinstance(p, HierarchicalSeedPooling)
        )
        project = self.project.weight.numel() if isinstance(self.project, nn.Linear) else 0
        pooling += len(self.pool) * project * (sequences * c.summary_tokens + rows * c.target_queries)
        if self.target is not None and self.target_in is not None:
            d = self.target_in.weight.shape[1]
            pooling += rows * (self.target.macs(d) + c.target_queries * self.target_in.weight.numel())
        return {
            "embed": embedded * self.embed.macs(),
            "pool": pooling,
            "ffn": sum(f.macs(sequences, events) for f in self.ffn.values() if isinstance(f, GdpaFeedForward)),
            "attention": sum(a.macs(lengths) for a in self.attention.values() if isinstance(a, SequenceAttention)),
        }
