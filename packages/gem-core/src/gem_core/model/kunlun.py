"""Kunlun, the foundation model of GEM: event towers, hierarchical seed pooling and a trunk of Wukong experts.

A layer (model.md 4; layers count from 0, `comp_skip` as published):

    Xsum = WeightGen(X)                                  token-axis compression to R tokens, then a gate
    H    = HSP(S) on even layers, else the last H        CompSkip
    X    = WukongExperts(concat[Xsum, H])
    S    = GdpaFeedForward(S, Xsum) on even layers, S + MHA(norm(S)) on odd ones

Each tower ends with one more pooling that the heads read, so every parameter gets a gradient. With `conditioning: request` the
weights of the feed-forward are made from tokens that do not depend on the ad: a tower runs once per request, whatever
the number of its rows. Shape letters: B rows, Q requests, N tokens, R compressed tokens, K summary tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core.data.batch import Batch, Jagged
from gem_core.model.events import check_event_types
from gem_core.model.features import FeatureConfig, FeatureTokens, Tokens, mean_history, newest, truncate
from gem_core.model.heads import HeadConfig, Heads, check_hidden
from gem_core.model.layers import ByName, TokenMap, join, linear_macs
from gem_core.model.match import MatchCounts
from gem_core.model.tower import Tower, TowerConfig
from gem_core.model.wukong import WukongConfig, WukongExperts
from gem_core.protocols import ComponentConfig, Embedding, Output
from gem_core.schema import Schema


class KunlunConfig(ComponentConfig):
    """Every part of Kunlun is a switch here; the sizes s, m, l and the cluster's are recipes.

    Attributes:
        dim, layers: D and depth of the trunk. compressed_tokens: R. gate: rank of WeightGen's gate.
        experts, combine: M Wukong experts and how their outputs join.
        tower: the towers' settings; towers: changes per event type (null leaves the type out).
        conditioning: what makes the GDPA weights: "request" (once per request) or "full" (with the ad, once per row; also
            where the schema has no request features).
        comp_skip: even layers without self-attention, odd ones without pooling and feed-forward.
        match_bins: bins of age of the match counts (0: none). match_fields: "<event type>.<field>" of those that match
            (default: all that can). match_tokens: tokens that the counts give.
        history: event types with a token for each sparse field, the mean of its vectors over so many newest events.
        objective_tokens: a token of its own for each objective.
    """

    dim: int = Field(32, ge=2)
    layers: int = Field(2, ge=1)
    compressed_tokens: int = Field(8, ge=1)
    gate: int = Field(32, ge=1)
    features: FeatureConfig = FeatureConfig()
    experts: int = Field(1, ge=1)
    combine: Literal["sum", "concat"] = "concat"
    wukong: WukongConfig = WukongConfig()
    tower: TowerConfig = TowerConfig()
    towers: dict[str, dict[str, Any] | None] = {}
    conditioning: Literal["request", "full"] = "request"
    comp_skip: bool = True
    match_bins: int = Field(0, ge=0)
    match_fields: tuple[str, ...] | None = None
    match_tokens: int = Field(2, ge=1)
    history: dict[str, PositiveInt] = {}
    objective_tokens: bool = True
    head_hidden: tuple[int, ...] = (64,)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    head: HeadConfig = HeadConfig()

    @model_validator(mode="after")
    def _towers_are_valid(self) -> KunlunConfig:
        for event in self.towers:
            self.tower_of(event)
        return self

    def tower_of(self, event: str) -> TowerConfig | None:
        """The settings of an event type's tower; None where the type is left out."""
        change = self.towers.get(event, {})
        return None if change is None else TowerConfig.model_validate({**self.tower.model_dump(), **change})

    def said_of_attention(self, event: str) -> list[str]:
        """The options of an event type's self-attention that the recipe sets."""
        given = self.tower.model_fields_set | set(self.towers.get(event) or {})
        return sorted(given & {"attention", "attention_size", "block_shift"})


class WeightGen(nn.Module):
    """Xsum = C * (1 + MLP(flatten(C))), C the token-axis compression N -> R.

    The MLP is linear, of low rank: with it each number of a token meets every other by a product, as in a cross layer of
    DCNv2. A factorisation machine of inner products alone cannot express that.
    """

    def __init__(self, tokens_in: int, tokens_out: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.compress = TokenMap(tokens_in, tokens_out, near_identity=True)
        flat = tokens_out * dim
        self.gate = nn.Sequential(nn.Linear(flat, hidden, bias=False), nn.Linear(hidden, flat))

    def forward(self, x: Tensor) -> Tensor:
        x = self.compress(x)
        down, up = self.gate
        assert isinstance(up, nn.Linear)
        factor = F.linear(down(x.flatten(1)), up.weight, up.bias + 1)  # adding 1 here spares a pass over x
        return x * factor.view_as(x)

    def macs(self, dim: int) -> int:
        """Multiply-adds per sample."""
        return self.compress.macs(dim) + linear_macs(self.gate)


class Layer(nn.Module):
    """The trunk's side of one layer: WeightGen of the row tokens and the experts; `request_weights` where a tower's
    feed-forward of this layer is conditioned on the request's tokens."""

    def __init__(
        self, tokens_in: int, summary: int, config: KunlunConfig, request_tokens: int, request_weights: bool
    ) -> None:
        super().__init__()
        c = config
        self.weight_gen = WeightGen(tokens_in, c.compressed_tokens, c.dim, c.gate)
        self.request_gen = WeightGen(request_tokens, c.compressed_tokens, c.dim, c.gate) if request_weights else None
        self.interaction = WukongExperts(c.compressed_tokens + summary, c.dim, c.experts, c.combine, c.wukong)


class Kunlun(nn.Module):
    """See the module's docstring. Hidden layers by name: "layer.<l>.x" (B, N, D), "<event>.layer.<l>.h" (B, K + n, D),
    "<event>.final.h", "trunk" (B, width of the heads' input)."""

    Config = KunlunConfig
    embedding: Embedding

    def __init__(self, config: KunlunConfig, *, schema: Schema, embedding: Embedding) -> None:
        super().__init__()
        self.config = config
        check_event_types(schema, towers=config.towers, history=config.history)
        towers = {e: t for e in schema.events if (t := config.tower_of(e)) is not None}
        used = [e for e in schema.events if e in towers or e in config.history]
        keys = [f"{e}.{n}" for e in used for n, f in schema.events[e].fields.items() if f.kind == "sparse"]
        self.features = FeatureTokens(schema, config.features, config.dim, keys)
        object.__setattr__(self, "embedding", embedding)  # its tables are not the model's parameters
        embedding.setup(self.features.tables)
        widths = {k: self.features.widths[k] for k in self.features.event_keys}
        self.match = MatchCounts(schema, config.match_bins, config.match_fields) if config.match_bins else None
        self.match_map = nn.Linear(self.match.width, config.match_tokens * config.dim) if self.match else None
        self.objectives = (
            nn.Parameter(torch.randn(len(schema.objectives), config.dim) * 0.1) if config.objective_tokens else None
        )
        means = [key for key in self.features.event_keys if key.partition(".")[0] in config.history]
        self.history = ByName({key.replace(".", "/"): nn.Linear(widths[key], config.dim, bias=False) for key in means})
        request_tokens = self.features.tokens["request"] + len(means)
        row_tokens = self.features.tokens["row"]
        row_tokens += config.match_tokens if self.match else 0
        tokens = request_tokens + row_tokens + (len(schema.objectives) if config.objective_tokens else 0)
        full = config.conditioning == "full" or request_tokens == 0
        self.full = full
        self.notes: tuple[str, ...] = ()
        if full and config.conditioning == "request":
            self.notes = ("conditioning: full, as the schema has no request-level feature",)
        self.notes += tuple(
            f"tower {event}: {', '.join(said)}: without effect, as it has no self-attention (one layer under comp_skip)"
            for event, tower in towers.items()
            if config.comp_skip and min(tower.layers or config.layers, config.layers) == 1
            if (said := config.said_of_attention(event))
        )
        self.towers = ByName(
            {
                event: Tower(
                    schema, event, tower, widths, config.dim, row_tokens, config.compressed_tokens, config.layers,
                    config.comp_skip,
                )
                for event, tower in towers.items()
            }
        )  # fmt: skip
        limits = {event: tower.limit for event, tower in self._towers().items()}
        self.limits = {event: max(limits.get(event, 0), config.history.get(event, 0)) for event in used}
        summary = sum(tower.tokens_out for tower in self._towers().values())
        layers = []
        for index in range(config.layers):
            conditioned = any(str(index) in tower.ffn for tower in self._towers().values())
            layers.append(Layer(tokens, summary, config, request_tokens, conditioned and not full))
            tokens = layers[-1].interaction.tokens_out
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.dim) if config.wukong.norm else nn.Identity()
        self.heads = Heads(
            schema, (tokens + summary) * config.dim, config.head_hidden, config.head_dropout, config.head
        )
        self.hidden_names = (
            *(f"layer.{i}.x" for i in range(config.layers)),
            *(f"{e}.layer.{i}.h" for e in towers for i in range(config.layers)),
            *(f"{e}.final.h" for e in towers),
            "trunk",
        )

    def _towers(self) -> dict[str, Tower]:
        return {name: tower for name, tower in self.towers.items() if isinstance(tower, Tower)}

    def forward(self, batch: Batch, hidden: Sequence[str] = ()) -> Output:
        """Raises ConfigError for a hidden layer that the model does not have."""
        check_hidden("kunlun", hidden, self.hidden_names)
        kept: dict[str, Tensor] = {}
        towers = self._towers()
        events = {event: truncate(batch.events[event], limit) for event, limit in self.limits.items()}
        looked = self.embedding.lookup(self.features.ids(batch, events))
        tokens = self.features(batch, looked)
        counts = self.match(batch) if self.match is not None else None
        rows = tokens.rows
        if counts is not None and self.match_map is not None:
            rows = torch.cat([rows, self.match_map(counts).unflatten(1, (-1, self.config.dim))], 1)
        if len(self.history):
            tokens.request = torch.cat([tokens.request, *self._history_tokens(events, looked)], 1)
        states = {}
        for event, tower in towers.items():
            fields, vectors = newest(event, events[event], looked, tower.limit)
            states[event] = tower.start(batch, fields, vectors, rows, self.full)
        x = self._all_tokens(batch, tokens, rows)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            xsum = layer.weight_gen(x)
            for event, tower in towers.items():
                tower.summarise(states[event], index)
            x = layer.interaction(join([xsum, *(states[e].summary() for e in towers)]))
            weights = xsum if layer.request_gen is None else layer.request_gen(tokens.request)
            for event, tower in towers.items():
                if f"{event}.layer.{index}.h" in hidden:
                    kept[f"{event}.layer.{index}.h"] = states[event].summary()
                tower.advance(states[event], index, weights)
            if f"layer.{index}.x" in hidden:
                kept[f"layer.{index}.x"] = x
        final = []
        for event, tower in towers.items():
            tower.summarise(states[event], "final")
            final.append(states[event].summary())
            if f"{event}.final.h" in hidden:
                kept[f"{event}.final.h"] = final[-1]
        trunk = self.norm(join([x, *final])).flatten(1)
        if "trunk" in hidden:
            kept["trunk"] = trunk
        return Output(self.heads(trunk, batch.surface, tokens.skip), kept)

    def _history_tokens(self, events: Mapping[str, Mapping[str, Jagged]], looked: Mapping[str, Tensor]) -> list[Tensor]:
        """A token (Q, 1, D) for each field of `history`."""
        out = []
        for event, count in self.config.history.items():
            fields, vectors = newest(event, events[event], looked, count)
            means = mean_history(list(vectors), vectors, {event: fields})
            for key, mean in zip(vectors, means, strict=True):
                out.append(self.history[key.replace(".", "/")](mean).unsqueeze(1))
        return out

    def _all_tokens(self, batch: Batch, tokens: Tokens, rows: Tensor) -> Tensor:
        parts = [tokens.request[batch.request], rows]
        if self.objectives is not None:
            parts.append(self.objectives.expand(batch.rows, -1, -1))
        return torch.cat(parts, 1)

    # ---- accounting --------------------------------------------------------------------------------------------

    def _lengths(self, batch: Batch) -> dict[str, Tensor]:
        return {
            event: batch.events[event]["time"].lengths().clamp(max=tower.limit)
            for event, tower in self._towers().items()
        }

    def positions(self, batch: Batch) -> tuple[int, int]:
        """(real, computed) event positions: equal, as no padding is computed."""
        real = sum(int(n.sum()) for n in self._lengths(batch).values())
        return real, real

    def flops(self, batch: Batch) -> dict[str, int]:
        """Forward FLOPs by module, 2 per multiply-add, from the true lengths."""
        rows, requests, dim = batch.rows, batch.requests, self.config.dim
        out = {"features": 2 * self.features.macs(rows, requests)}
        if len(self.history):
            out["history"] = 2 * requests * linear_macs(self.history)
        if self.match_map is not None:
            out["match"] = 2 * rows * self.match_map.weight.numel()
        for event, tower in self._towers().items():
            lengths = self._lengths(batch)[event]
            of_rows = lengths[batch.request]
            parts = tower.macs(int(lengths.sum()), of_rows if self.full else lengths, rows, int(of_rows.sum()))
            out |= {f"{event}.{part}": 2 * macs for part, macs in parts.items()}
        trunk = 0
        for layer in self.layers:
            assert isinstance(layer, Layer)
            trunk += rows * (layer.weight_gen.macs(dim) + layer.interaction.macs())
            if layer.request_gen is not None:
                trunk += requests * layer.request_gen.macs(dim)
        out["trunk"] = 2 * trunk
        out["heads"] = 2 * rows * self.heads.macs()
        return out
