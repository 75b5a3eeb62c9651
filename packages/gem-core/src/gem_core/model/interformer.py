"""InterFormer (2411.09852), Kunlun's predecessor and the baseline of its scaling: sequences and tokens inform each other in every layer.

A layer (model.md 3; layers count from 0):

    Xsum = Gate(MLP_tokens(X))                                    N -> R tokens
    Ssum = Gate(concat[CLS outputs, PMA outputs, newest events])
    X    = MLP(Interaction(concat[X, Ssum]))                      dot product, DCNv2 or DHEN
    S    = MHA(PFFN(Xsum, S))                                     rotary positions

Before layer 0 Xsum is put in front of S as R CLS tokens. The heads read concat[Xsum, Ssum] of what the last layer left. With
`conditioning: request` the sequences' Xsum is made from tokens that do not depend on the ad: they run once per request, whatever the
number of its rows. Shape letters: B rows, Q requests, N tokens, R compressed tokens, D width, E width of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Names
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from gem_core import ops
from gem_core.data.batch import Batch
from gem_core.model.events import EventTokens, check_event_types
from gem_core.model.features import FeatureConfig, FeatureTokens, truncate
from gem_core.model.heads import HeadConfig, Heads, check_hidden
from gem_core.model.interaction import Interaction, Kind
from gem_core.model.layers import ByName, TokenMap, packed, rms_unit
from gem_core.model.pooling import Rote, Sequence
from gem_core.model.sequence import SequenceAttention
from gem_core.protocols import ComponentConfig, Embedding, Output
from gem_core.schema import Schema


class SequenceConfig(ComponentConfig):
    """One event type's sequence.

    Attributes:
        width: E. heads: of attention and pooling.
        max_events: newest events used, None for the schema's max_length.
        pma_tokens: learned queries that pool the sequence. recent: newest events that are tokens as they are.
        rote: rotary temporal embedding of attention and pooling.
        time_waves: sinusoids of log age among an event's inputs (0: none).
    """

    width: int = Field(32, ge=2)
    heads: int = Field(2, ge=1)
    max_events: int | None = Field(None, ge=1)
    pma_tokens: int = Field(2, ge=1)
    recent: int = Field(2, ge=0)
    rote: bool = True
    time_waves: int = Field(8, ge=0)

    @model_validator(mode="after")
    def _divides(self) -> SequenceConfig:
        if self.width % self.heads or (self.rote and (self.width // self.heads) % 2):
            raise ValueError(f"width {self.width} must split into {self.heads} heads of even width")
        return self


class InterFormerConfig(ComponentConfig):
    """Sizes and switches.

    Attributes:
        dim, layers: D and depth. compressed_tokens: R, also the number of CLS tokens. tokens: of X after a layer.
        interaction: "dot" product, "dcnv2", or "dhen" (both). hidden: of its MLPs. cross_rank: of DCNv2's cross.
        sequence: the sequences' settings; sequences: changes per event type (null leaves the type out).
        conditioning: what makes the sequences' Xsum: "request" (once per request) or "full" (with the ad, once per row,
            as published; also where the schema has no request features).
    """

    dim: int = Field(32, ge=2)
    layers: int = Field(2, ge=1)
    compressed_tokens: int = Field(4, ge=1)
    tokens: int = Field(8, ge=1)
    features: FeatureConfig = FeatureConfig()
    interaction: Kind = "dot"
    hidden: tuple[int, ...] = (128,)
    cross_rank: int = Field(32, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    sequence: SequenceConfig = SequenceConfig()
    sequences: dict[str, dict[str, Any] | None] = {}
    conditioning: Literal["request", "full"] = "request"
    head_hidden: tuple[int, ...] = (64,)
    head_dropout: float = Field(0.0, ge=0, lt=1)
    head: HeadConfig = HeadConfig()

    @model_validator(mode="after")
    def _sequences_are_valid(self) -> InterFormerConfig:
        for event in self.sequences:
            self.sequence_of(event)
        return self

    def sequence_of(self, event: str) -> SequenceConfig | None:
        """The settings of an event type's sequence; None where the type is left out."""
        change = self.sequences.get(event, {})
        return None if change is None else SequenceConfig.model_validate({**self.sequence.model_dump(), **change})


class Gate(nn.Module):
    """Gate(A) = sigmoid(A * MLP(A)), its MLP one linear map of the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.map(x))

    def macs(self) -> int:
        """Multiply-adds per token."""
        return self.map.weight.numel()


class TokenSummary(nn.Module):
    """Xsum = Gate(W X): (B, N, D) -> (B, R, D)."""

    def __init__(self, tokens_in: int, tokens_out: int, dim: int) -> None:
        super().__init__()
        self.compress = TokenMap(tokens_in, tokens_out, near_identity=True)
        self.gate = Gate(dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gate(self.compress(x))
        return out

    def macs(self, dim: int) -> int:
        """Multiply-adds per sample."""
        return self.compress.macs(dim) + self.compress.weight.shape[0] * self.gate.macs()


class PersonalFeedForward(nn.Module):
    """PFFN(Xsum, S) = S W(Xsum), the E x E matrix W = U diag(1 + g(Xsum)) V with g linear; it starts near the identity.

    In this form the events of all sequences go through two common products: none is padded to another's length.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.generate = nn.Linear(inputs, width)
        self.into = nn.Linear(width, width, bias=False)
        self.back = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.into.weight)
        with torch.no_grad():
            self.back.weight.copy_(self.into.weight.t())
        nn.init.zeros_(self.generate.bias)

    def forward(self, sequence: Sequence, xsum: Tensor) -> Sequence:
        scale = 1 + self.generate(xsum.flatten(1))
        of_event = ops.segment_ids(sequence.offsets, sequence.values.shape[0])
        return sequence.replace(self.back(self.into(sequence.values) * scale[of_event]))

    def macs(self, sequences: int, events: int) -> int:
        """Multiply-adds."""
        return sequences * self.generate.weight.numel() + events * 2 * self.into.weight.numel()


class AttentionPooling(nn.Module):
    """PMA: learned queries (P, E) attend to each sequence: (Q, P, E)."""

    def __init__(self, width: int, heads: int, queries: int, rote: bool) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.norm = nn.LayerNorm(width)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.rote = Rote(width // heads) if rote else None

    def forward(self, sequence: Sequence) -> Tensor:
        key, value = self.key_value(self.norm(sequence.values)).chunk(2, dim=-1)
        k, v = (packed(x.unflatten(1, (self.heads, x.shape[1] // self.heads))) for x in (key, value))
        if self.rote is not None:
            k = self.rote(k, sequence)
        q = rms_unit(self.queries).unflatten(1, (self.heads, -1)).to(k.dtype)
        pooled = ops.seed_attention(q, k, v, sequence.offsets, sequence.max_length)
        out: Tensor = self.out(pooled.flatten(2))
        return out

    def macs(self, sequences: int, events: int) -> int:
        """Multiply-adds."""
        count, width = self.queries.shape
        return events * (2 * width**2 + 2 * count * width) + sequences * count * width**2


class SequenceTower(nn.Module):
    """One event type through all layers; the trunk drives it layer by layer."""

    def __init__(
        self,
        schema: Schema,
        event: str,
        config: SequenceConfig,
        widths: dict[str, int],
        dim: int,
        cls_tokens: int,
        layers: int,
    ) -> None:
        super().__init__()
        e, longest = config.width, schema.events[event].max_length
        self.config, self.cls_tokens = config, cls_tokens
        self.limit = min(config.max_events or longest, longest)
        self.tokens_out = cls_tokens + config.pma_tokens + config.recent
        self.embed = EventTokens(schema, event, e, config.time_waves, widths)
        self.cls = nn.Linear(dim, e, bias=False)
        self.ffn = nn.ModuleList(PersonalFeedForward(cls_tokens * dim, e) for _ in range(layers))
        self.attention = nn.ModuleList(
            SequenceAttention(e, config.heads, "full", 1, False, config.rote) for _ in range(layers)
        )
        pools = [AttentionPooling(e, config.heads, config.pma_tokens, config.rote) for _ in range(layers + 1)]
        self.pool = nn.ModuleList(pools)
        self.gate = nn.ModuleList(Gate(e) for _ in range(layers + 1))
        self.project = nn.Linear(e, dim, bias=False) if e != dim else nn.Identity()

    def start(self, sequence: Sequence, xsum: Tensor) -> Sequence:
        """The sequence behind its CLS tokens, xsum (Q, R, D)."""
        tokens = self.cls(xsum)
        n, r = sequence.values.shape[0], self.cls_tokens
        index = torch.arange(sequence.offsets.shape[0], device=tokens.device)
        offsets = sequence.offsets + r * index
        first = (offsets[:-1, None] + torch.arange(r, device=tokens.device)).flatten()
        place = torch.arange(n, device=tokens.device) + r * (ops.segment_ids(sequence.offsets, n) + 1)
        order = torch.cat([first, place]).argsort()  # of a permutation: its inverse
        values = torch.cat([tokens.flatten(0, 1), sequence.values])[order]
        gaps = torch.cat([torch.zeros_like(first), sequence.gaps])[order]
        positions = ops.positions(offsets, values.shape[0])
        return Sequence(values, offsets, sequence.max_length + r, gaps, positions)

    def summary(self, sequence: Sequence, layer: int) -> Tensor:
        """Ssum (Q, R + P + k, D) of a sequence with its CLS tokens; an event that is not there is a token of zeros."""
        count = self.cls_tokens + self.config.recent
        position = torch.arange(count, device=sequence.offsets.device)
        there = position < sequence.offsets.diff().unsqueeze(1)
        place = torch.where(there, sequence.offsets[:-1, None] + position, sequence.offsets[:-1, None])
        front = torch.where(there.unsqueeze(2), sequence.values[place], 0.0)
        out: Tensor = self.project(self.gate[layer](torch.cat([front, self.pool[layer](sequence)], 1)))
        return out

    def advance(self, sequence: Sequence, layer: int, xsum: Tensor) -> Sequence:
        """S of the next layer."""
        out: Sequence = self.attention[layer](self.ffn[layer](sequence, xsum))
        return out

    def macs(self, embedded: int, lengths: Tensor) -> dict[str, int]:
        """Multiply-adds by part; `embedded` events (once per request), `lengths` of the sequences as they run."""
        sequences, whole = lengths.numel(), lengths + self.cls_tokens
        events, tokens = int(whole.sum()), sequences * self.tokens_out
        project = self.project.weight.numel() if isinstance(self.project, nn.Linear) else 0
        pools = sum(p.macs(sequences, events) for p in self.pool if isinstance(p, AttentionPooling))
        gates = sum(g.macs() + project for g in self.gate if isinstance(g, Gate))
        return {
            "embed": embedded * self.embed.macs() + sequences * self.cls_tokens * self.cls.weight.numel(),
            "summary": pools + tokens * gates,
            "ffn": sum(f.macs(sequences, events) for f in self.ffn if isinstance(f, PersonalFeedForward)),
            "attention": sum(a.macs(whole) for a in self.attention if isinstance(a, SequenceAttention)),
        }


class InterFormer(nn.Module):
    """See the module's docstring. Hidden layers by name: "layer.<l>.x" (B, N, D), "<event>.layer.<l>.h", what layer l
    reads of a sequence (B, R + P + k, D), "<event>.final.h", "trunk" (B, width of the heads' input)."""

    Config = InterFormerConfig
    embedding: Embedding

    def __init__(self, config: InterFormerConfig, *, schema: Schema, embedding: Embedding) -> None:
        super().__init__()
        self.config = config
        check_event_types(schema, sequences=config.sequences)
        chosen = {e: s for e in schema.events if (s := config.sequence_of(e)) is not None}
        keys = [f"{e}.{n}" for e in chosen for n, f in schema.events[e].fields.items() if f.kind == "sparse"]
        self.features = FeatureTokens(schema, config.features, config.dim, keys)
        object.__setattr__(self, "embedding", embedding)  # its tables are not the model's parameters
        embedding.setup(self.features.tables)
        widths = {k: self.features.widths[k] for k in self.features.event_keys}
        r, dim = config.compressed_tokens, config.dim
        self.towers = ByName({e: SequenceTower(schema, e, s, widths, dim, r, config.layers) for e, s in chosen.items()})
        summary = sum(tower.tokens_out for tower in self._towers().values())
        request_tokens = self.features.tokens["request"]
        self.full = config.conditioning == "full" or request_tokens == 0
        changed = self.full and config.conditioning == "request"
        self.notes = ("conditioning: full, as the schema has no request-level feature",) if changed else ()
        tokens = [request_tokens + self.features.tokens["row"], *[config.tokens] * config.layers]
        conditions = (tokens if self.full else [request_tokens] * len(tokens))[: config.layers if chosen else 0]
        self.condition = nn.ModuleList(TokenSummary(n, r, dim) for n in conditions)
        self.layers = nn.ModuleList(
            Interaction(
                n + summary, config.tokens, dim, config.interaction, config.hidden, config.cross_rank, config.dropout
            )
            for n in tokens[:-1]
        )
        self.summary = TokenSummary(config.tokens, r, dim)
        self.heads = Heads(schema, (r + summary) * dim, config.head_hidden, config.head_dropout, config.head)
        self.hidden_names = (
            *(f"layer.{i}.x" for i in range(config.layers)),
            *(f"{e}.layer.{i}.h" for e in chosen for i in range(config.layers)),
            *(f"{e}.final.h" for e in chosen),
            "trunk",
        )

    def _towers(self) -> dict[str, SequenceTower]:
        return {name: tower for name, tower in self.towers.items() if isinstance(tower, SequenceTower)}

    def forward(self, batch: Batch, hidden: Names[str] = ()) -> Output:
        """Raises ConfigError for a hidden layer that the model does not have."""
        check_hidden("interformer", hidden, self.hidden_names)
        towers = self._towers()
        events = {event: truncate(batch.events[event], tower.limit) for event, tower in towers.items()}
        looked = self.embedding.lookup(self.features.ids(batch, events))
        tokens = self.features(batch, looked)
        x = torch.cat([tokens.request[batch.request], tokens.rows], 1)
        states: dict[str, Sequence] = {}
        kept: dict[str, Tensor] = {}

        def summaries(layer: int, name: str) -> list[Tensor]:
            out = []
            for event, tower in towers.items():
                found = tower.summary(states[event], layer)
                out.append(found if self.full else found[batch.request])
                kept[f"{event}.{name}.h"] = out[-1]
            return out

        for index, layer in enumerate(self.layers):
            if towers:
                xsum = self.condition[index](x if self.full else tokens.request)
            for event, tower in towers.items():
                if index == 0:
                    sequence = tower.embed.sequence(batch, events[event], looked, tower.limit)
                    states[event] = tower.start(sequence.gather(batch.request) if self.full else sequence, xsum)
            x = kept[f"layer.{index}.x"] = layer(torch.cat([x, *summaries(index, f"layer.{index}")], 1))
            for event, tower in towers.items():
                states[event] = tower.advance(states[event], index, xsum)
        kept["trunk"] = torch.cat([self.summary(x), *summaries(self.config.layers, "final")], 1).flatten(1)
        logits = self.heads(kept["trunk"], batch.surface, tokens.skip)
        return Output(logits, {name: kept[name] for name in hidden})

    # ---- accounting --------------------------------------------------------------------------------------------

    def _lengths(self, batch: Batch, event: str) -> Tensor:
        return batch.events[event]["time"].lengths().clamp(max=self._towers()[event].limit)

    def positions(self, batch: Batch) -> tuple[int, int]:
        """(real, computed) event positions: equal, as no padding is computed."""
        real = sum(int(self._lengths(batch, event).sum()) for event in self.towers)
        return real, real

    def flops(self, batch: Batch) -> dict[str, int]:
        """Forward FLOPs by module, 2 per multiply-add, from the true lengths."""
        rows, requests, dim = batch.rows, batch.requests, self.config.dim
        out = {"features": 2 * self.features.macs(rows, requests)}
        for event, tower in self._towers().items():
            lengths = self._lengths(batch, event)
            parts = tower.macs(int(lengths.sum()), lengths[batch.request] if self.full else lengths)
            out |= {f"{event}.{part}": 2 * macs for part, macs in parts.items()}
        conditions = sum(s.macs(dim) for s in self.condition if isinstance(s, TokenSummary))
        trunk = rows * sum(i.macs() for i in self.layers if isinstance(i, Interaction))
        trunk += rows * self.summary.macs(dim) + (rows if self.full else requests) * conditions
        out["trunk"] = 2 * trunk
        out["heads"] = 2 * rows * self.heads.macs()
        return out
