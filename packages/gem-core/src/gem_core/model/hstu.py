"""HSTU (2402.17152), a baseline: SiLU(alpha q k^T) / n attention with a gate U over each event type's history, the ad as target.

A layer, over the history and, with the same weights, over the row's target:

    U, Q = SiLU(W1 LN(x)); K, V = SiLU(W2 LN(history)); x' = x + W3(LN(SiLU(alpha Q K^T) V / n) * U)

n is the declared maximum length, so a result does not depend on its batch. An event sees itself and older ones; a target sees its
request's whole history, which is encoded once for all rows of the request and never copied. Positions and ages come in by rotary
temporal embedding in place of the published bias of the scores; a target has angle 0. Shape letters: B rows, Q requests, T events, E width.
"""

from __future__ import annotations

from collections.abc import Sequence as Names

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import silu

from gem_core import ops
from gem_core.data.batch import Batch
from gem_core.model.events import EventTokens
from gem_core.model.features import FeatureConfig, FeatureTokens, truncate
from gem_core.model.heads import HeadConfig, Heads, check_hidden
from gem_core.model.layers import MLP, ByName, linear_macs, packed
from gem_core.model.pooling import Rote, Sequence
from gem_core.protocols import ComponentConfig, Embedding, Output
from gem_core.schema import Schema


class HSTUConfig(ComponentConfig):
    """`width`, `heads`, `layers` of every event type's stack over its newest `max_events` (at most the schema's
    max_length). `time_waves`: sinusoids of log age among an event's inputs. `hidden`: the final MLP."""

    width: int = Field(32, ge=2)
    heads: int = Field(2, ge=1)
    layers: int = Field(2, ge=1)
    max_events: int = Field(64, ge=1)
    time_waves: int = Field(8, ge=0)
    features: FeatureConfig = FeatureConfig()
    hidden: tuple[int, ...] = Field((256, 128), min_length=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    head: HeadConfig = HeadConfig()

    @model_validator(mode="after")
    def _divides(self) -> HSTUConfig:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must split into {self.heads} heads of even width")
        return self


class HSTULayer(nn.Module):
    """See the module's docstring."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.gate_query = nn.Linear(width, 2 * width)
        self.key_value = nn.Linear(width, 2 * width)
        self.attended_norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width)
        self.rote = Rote(width // heads)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """SiLU of (n, 2 E) as two of (n, E)."""
        first, second = silu(x).chunk(2, dim=1)
        return first, second

    def _heads(self, x: Tensor) -> Tensor:
        return packed(x.unflatten(1, (self.heads, -1)))

    def keys(self, history: Sequence) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of the events, each (sum T, H, d)."""
        k, v = self._split(self.key_value(self.norm(history.values)))
        rotated: Tensor = self.rote(self._heads(k), history)
        return rotated, self._heads(v)

    def _step(
        self, x: Tensor, u: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, max_q: int, history: Sequence,
        mask: str,
    ) -> Tensor:  # fmt: skip
        seen = ops.hstu_attention(q, k, v, q_offsets, history.offsets, max_q, history.max_length, mask=mask)
        out: Tensor = x + self.out(self.attended_norm(seen.flatten(1)) * u)
        return out

    def events(self, history: Sequence, k: Tensor, v: Tensor) -> Sequence:
        """The history of the next layer; its events are stored oldest first."""
        u, q = self._split(self.gate_query(self.norm(history.values)))
        q = self.rote(self._heads(q), history)
        offsets, longest = history.offsets, history.max_length
        return history.replace(self._step(history.values, u, q, k, v, offsets, longest, history, "causal"))

    def targets(self, x: Tensor, offsets: Tensor, history: Sequence, k: Tensor, v: Tensor) -> Tensor:
        """The targets (B, E) of the next layer; `offsets` (Q + 1,) are those of the rows of each request."""
        u, q = self._split(self.gate_query(self.norm(x)))
        return self._step(x, u, self._heads(q), k, v, offsets, x.shape[0], history, "none")

    def macs(self, rows: int, events: int, pairs: int, self_pairs: int, last: bool) -> int:
        """Multiply-adds: `pairs` of a row and an event, `self_pairs` of two events; the last layer leaves the history."""
        width = self.out.weight.shape[0]
        whole = rows if last else rows + events
        return width * (whole * 3 * width + events * 2 * width + 2 * (pairs + (0 if last else self_pairs)))


class HSTU(nn.Module):
    """One stack per event type; then an MLP on all tokens of the row and its final targets. Hidden layers by name:
    "<event>.layer.<l>.x", the target after layer l (B, E), and "trunk"."""

    Config = HSTUConfig
    embedding: Embedding

    def __init__(self, config: HSTUConfig, *, schema: Schema, embedding: Embedding) -> None:
        super().__init__()
        self.config = config
        dim, width = config.features.embedding_dim, config.width
        keys = [f"{e}.{n}" for e, t in schema.events.items() for n, f in t.fields.items() if f.kind == "sparse"]
        self.features = FeatureTokens(schema, config.features, dim, keys)
        object.__setattr__(self, "embedding", embedding)  # its tables are not the model's parameters
        embedding.setup(self.features.tables)
        widths = {k: self.features.widths[k] for k in self.features.event_keys}
        self.limits = {e: min(config.max_events, t.max_length) for e, t in schema.events.items()}
        self.embed = ByName({e: EventTokens(schema, e, width, config.time_waves, widths) for e in schema.events})
        flat = (self.features.tokens["request"] + self.features.tokens["row"]) * dim
        self.target = ByName({e: nn.Linear(flat, width) for e in schema.events})
        self.stacks = ByName(
            {e: nn.ModuleList(HSTULayer(width, config.heads) for _ in range(config.layers)) for e in schema.events}
        )
        self.mlp = MLP([flat + width * len(schema.events), *config.hidden], config.dropout)
        self.heads = Heads(schema, config.hidden[-1], (), options=config.head)
        layers = range(config.layers)
        self.hidden_names = (*(f"{e}.layer.{i}.x" for e in schema.events for i in layers), "trunk")

    def _layers(self) -> dict[str, list[HSTULayer]]:
        return {e: [layer for layer in s.children() if isinstance(layer, HSTULayer)] for e, s in self.stacks.items()}

    def forward(self, batch: Batch, hidden: Names[str] = ()) -> Output:
        """Raises ConfigError for a hidden layer that the model does not have."""
        check_hidden("hstu", hidden, self.hidden_names)
        events = {e: truncate(batch.events[e], limit) for e, limit in self.limits.items()}
        looked = self.embedding.lookup(self.features.ids(batch, events))
        tokens = self.features(batch, looked)
        flat = tokens.flat(batch)
        requests = torch.arange(batch.requests + 1, device=batch.request.device)
        row_offsets = torch.searchsorted(batch.request, requests)  # rows of a request are adjacent
        kept: dict[str, Tensor] = {}
        ends = []
        for event, stack in self._layers().items():
            embed = self.embed[event]
            assert isinstance(embed, EventTokens)
            history = _oldest_first(embed.sequence(batch, events[event], looked, self.limits[event]))
            x = self.target[event](flat)
            for index, layer in enumerate(stack):
                k, v = layer.keys(history)
                x = kept[f"{event}.layer.{index}.x"] = layer.targets(x, row_offsets, history, k, v)
                if index + 1 < len(stack):
                    history = layer.events(history, k, v)
            ends.append(x)
        trunk = kept["trunk"] = nn.functional.gelu(self.mlp(torch.cat([flat, *ends], 1)))
        return Output(self.heads(trunk, batch.surface, tokens.skip), {name: kept[name] for name in hidden})

    # ---- accounting --------------------------------------------------------------------------------------------

    def _lengths(self, batch: Batch, event: str) -> Tensor:
        return batch.events[event]["time"].lengths().clamp(max=self.limits[event])

    def positions(self, batch: Batch) -> tuple[int, int]:
        """(real, computed) event positions: equal, as no padding is computed."""
        real = sum(int(self._lengths(batch, event).sum()) for event in self.limits)
        return real, real

    def flops(self, batch: Batch) -> dict[str, int]:
        """Forward FLOPs by module, 2 per multiply-add, from the true lengths."""
        rows = batch.rows
        out = {"features": 2 * self.features.macs(rows, batch.requests)}
        for event, stack in self._layers().items():
            n = self._lengths(batch, event)
            total, pairs = int(n.sum()), int(n[batch.request].sum())
            self_pairs = int((n * (n + 1) // 2).sum())
            out[f"{event}.embed"] = 2 * (
                total * linear_macs(self.embed[event]) + rows * linear_macs(self.target[event])
            )
            last = self.config.layers - 1
            out[f"{event}.layers"] = 2 * sum(
                layer.macs(rows, total, pairs, self_pairs, i == last) for i, layer in enumerate(stack)
            )
        out["mlp"] = 2 * rows * linear_macs(self.mlp)
        out["heads"] = 2 * rows * self.heads.macs()
        return out


def _oldest_first(sequence: Sequence) -> Sequence:
    """The events of each sequence turned round; their positions still count from the newest."""
    n = sequence.values.shape[0]
    of_event = ops.segment_ids(sequence.offsets, n)
    index = sequence.offsets[of_event] + sequence.offsets[of_event + 1] - 1
    index = index - torch.arange(n, device=index.device)
    offsets, longest = sequence.offsets, sequence.max_length
    return Sequence(sequence.values[index], offsets, longest, sequence.gaps[index], sequence.positions[index])
