"""Batch -> tokens: every feature of the schema to tokens of one width, kept apart by what depends on the ad (rows) and
what does not (requests), so that the latter is computed once per request.

Shape letters: B rows, Q requests, N tokens, D width, T events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core import ops
from gem_core.data.batch import Batch, Jagged
from gem_core.errors import ConfigError, nearest
from gem_core.model.layers import ByName, PiecewiseLinear, linear_macs
from gem_core.protocols import ComponentConfig, Table
from gem_core.schema import UNSEEN, Schema


class FeatureConfig(ComponentConfig):
    """How features become tokens.

    `match_only` names sparse features that only serve to match events against the ad (a free id per ad overfits where
    ads are many and rows few); `id_dropout` replaces ids of a feature by the unseen id while training.
    `dense_skip` adds a linear map of the encoded dense features to each logit. `dropout` is that of the encoded features.
    """

    embedding_dim: int = Field(16, ge=1)
    embedding_dims: dict[str, int] = {}
    match_only: tuple[str, ...] = ()
    id_dropout: dict[str, float] = {}
    dense_tokens: int = Field(2, ge=1)
    dense_skip: bool = True
    dropout: float = Field(0.0, ge=0, lt=1)


def truncate(fields: Mapping[str, Jagged], limit: int) -> dict[str, Jagged]:
    """The newest `limit` events of each segment (events are stored newest first)."""
    first = next(iter(fields.values()))
    if first.max_length <= limit:
        return dict(fields)
    lengths = first.lengths()
    position = torch.arange(first.values.shape[0], device=lengths.device)
    position = position - first.offsets[:-1].repeat_interleave(lengths, output_size=position.numel())
    kept = (position < limit).nonzero().squeeze(1)
    offsets = torch.cat([first.offsets[:1], lengths.clamp(max=limit).cumsum(0)])
    return {name: Jagged(f.values[kept], offsets, limit) for name, f in fields.items()}


def newest(
    event: str, fields: Mapping[str, Jagged], looked: Mapping[str, Tensor], limit: int
) -> tuple[dict[str, Jagged], dict[str, Tensor]]:
    """The fields of a type's newest `limit` events, and the looked-up vectors of these by key ("<event>.<field>")."""
    time = fields["time"]
    vectors = {
        key: Jagged(x, time.offsets, time.max_length) for key, x in looked.items() if key.startswith(f"{event}.")
    }
    kept = truncate({**fields, **vectors}, limit)
    return {name: kept[name] for name in fields}, {key: kept[key].values for key in vectors}


def mean_history(
    keys: Sequence[str], looked: Mapping[str, Tensor], events: Mapping[str, Mapping[str, Jagged]]
) -> list[Tensor]:
    """Per event field (Q, its width): the mean of its vectors over a request's events, 0 where there are none."""
    return [ops.segment_mean(looked[key], events[key.partition(".")[0]]["time"].offsets) for key in keys]


@dataclass
class Tokens:
    """request (Q, Nq, D); rows (B, Nr, D); skip (B, heads): a linear map of the encoded dense features, if asked for."""

    request: Tensor
    rows: Tensor
    skip: Tensor | None

    def flat(self, batch: Batch) -> Tensor:
        """(B, N * D): all tokens of a row and its request, side by side."""
        return torch.cat([self.request[batch.request].flatten(1), self.rows.flatten(1)], 1)


class FeatureTokens(nn.Module):
    """Tokens of all non-sequence features: dense (standardised or piecewise-linear), sparse, vectors, surface.

    Args:
        schema: a fitted schema.
        config: see `FeatureConfig`.
        dim: D.
        event_keys: lookup keys of the event fields that the model embeds.
    """

    def __init__(self, schema: Schema, config: FeatureConfig, dim: int, event_keys: Sequence[str]) -> None:
        super().__init__()
        self.config = config
        known = {*schema.sparse, *schema.sparse_keys()}
        for option in (config.match_only, config.id_dropout):
            for key in option:
                if key not in known:
                    raise ConfigError(f'features: "{key}" is no sparse feature of the schema{nearest(key, known)}')
        tables = schema.tables()
        for name in config.embedding_dims:
            if name not in tables:
                raise ConfigError(f'features.embedding_dims: no table "{name}"{nearest(name, tables)}')
        self.sparse = {
            level: [n for n in schema.names("sparse", level) if n not in config.match_only]
            for level in ("request", "row")
        }
        self.vector_names = {"request": schema.names("vectors", "request"), "row": schema.names("vectors", "row")}
        self.multi = {name for name, feature in schema.sparse.items() if feature.multi}
        self.event_keys = [key for key in event_keys if key not in config.match_only]
        self.widths = {key: self._dim(schema, key) for key in (*schema.sparse, *event_keys)}
        self.tables = [
            Table(
                name,
                schema.table_rows(name),
                self._dim(schema, used[0]),
                tuple(used),
                self._pooling(schema, name, used),
            )
            for name, keys in tables.items()
            if (used := [k for k in keys if k in self.sparse["request"] + self.sparse["row"] + self.event_keys])
        ]
        fitted = schema.require_fitted()
        self.encoders = ByName()
        self.dense = ByName()
        self.skip = ByName()
        self.vectors = ByName()
        self.project = ByName()
        self.tokens = {"request": 0, "row": 1}
        for level in ("request", "row"):
            names = schema.names("dense", level)
            encoder = self.encoders[level] = PiecewiseLinear([fitted.dense[n].edges for n in names])
            if names:
                count = config.dense_tokens if level == "row" else 1
                self.dense[level] = nn.Linear(encoder.width, count * dim)
                if config.dense_skip:
                    skip = self.skip[level] = nn.Linear(encoder.width, len(schema.heads()), bias=False)
                    nn.init.zeros_(skip.weight)
                self.tokens[level] += count
            for name in self.sparse[level]:
                if self.widths[name] != dim:
                    self.project[name] = nn.Linear(self.widths[name], dim, bias=False)
                self.tokens[level] += 1
            for name in self.vector_names[level]:
                self.vectors[name] = nn.Linear(schema.vectors[name].width, dim)
                self.tokens[level] += 1
        self.surface = nn.Parameter(torch.randn(len(schema.surface_names()), dim) * 0.1)
        self.dropout = nn.Dropout(config.dropout)
        self.dim = dim

    def _dim(self, schema: Schema, key: str) -> int:
        return self.config.embedding_dims.get(schema.table_of(key), self.config.embedding_dim)

    @staticmethod
    def _pooling(schema: Schema, table: str, keys: Sequence[str]) -> str:
        kinds = {k: schema.sparse[k].pooling for k in keys if k in schema.sparse and schema.sparse[k].multi}
        if len(set(kinds.values())) > 1:
            found = ", ".join(f'"{key}" {pooling}' for key, pooling in kinds.items())
            raise ConfigError(f'schema: features of one table need one pooling; table "{table}" has {found}')
        return next(iter(kinds.values()), "mean")

    def ids(self, batch: Batch, events: Mapping[str, Mapping[str, Jagged]]) -> dict[str, Tensor | Jagged]:
        """The ids of one look-up for everything: sparse features (pooled where multi-valued) and event fields."""
        out: dict[str, Tensor | Jagged] = {}
        for level, source in (("request", batch.request_ids), ("row", batch.ids)):
            for name in self.sparse[level]:
                out[name] = source[name] if name in self.multi else source[name].values
        for key in self.event_keys:
            event, _, name = key.partition(".")
            out[key] = events[event][name].values
        if self.training:
            for key, rate in self.config.id_dropout.items():
                if key in out:
                    out[key] = _drop_ids(out[key], rate)
        return out

    def forward(self, batch: Batch, looked: Mapping[str, Tensor]) -> Tokens:
        request, request_skip = self._level("request", batch.request_dense, batch.request_vectors, looked)
        rows, skip = self._level("row", batch.dense, batch.vectors, looked)
        rows.append(self.surface[batch.surface].unsqueeze(1))
        if request_skip is not None:
            of_rows = request_skip[batch.request]
            skip = of_rows if skip is None else skip + of_rows
        nothing = batch.request_dense.new_zeros(batch.requests, 0, self.dim)
        return Tokens(torch.cat([nothing, *request], 1), torch.cat(rows, 1), skip)

    def _level(
        self, level: str, dense: Tensor, vectors: Mapping[str, Tensor], looked: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """The tokens of a level, and its part of the skip (n, tasks)."""
        tokens: list[Tensor] = []
        skip = None
        maps = self._dense_maps(level)
        if maps:
            # Tokens and skip in one product: the encoding is wide, and reading it costs more than the few columns.
            out = F.linear(self.dropout(self.encoders[level](dense)), torch.cat([m.weight for m in maps]))
            width = maps[0].out_features
            tokens.append((out[:, :width] + maps[0].bias).unflatten(1, (-1, self.dim)))
            skip = out[:, width:] if len(maps) == 2 else None
        for name in self.sparse[level]:
            x = looked[name]
            tokens.append((self.project[name](x) if name in self.project else x).unsqueeze(1))
        tokens += [self.vectors[name](vectors[name]).unsqueeze(1) for name in self.vector_names[level]]
        return tokens, skip

    def _dense_maps(self, level: str) -> list[nn.Linear]:
        """The map to the dense tokens and that to the logits, where there are."""
        found = [group[level] for group in (self.dense, self.skip) if level in group]
        return [m for m in found if isinstance(m, nn.Linear)]

    def macs(self, rows: int, requests: int) -> int:
        """Multiply-adds of a batch."""
        total = 0
        for level, n in (("request", requests), ("row", rows)):
            maps: list[nn.Module] = [*self._dense_maps(level)]
            maps += [self.project[name] for name in self.sparse[level] if name in self.project]
            maps += [self.vectors[name] for name in self.vector_names[level]]
            total += n * sum(linear_macs(m) for m in maps)
        return total


def _drop_ids(ids: Tensor | Jagged, rate: float) -> Tensor | Jagged:
    values = ids.values if isinstance(ids, Jagged) else ids
    dropped = torch.where(torch.rand(values.shape, device=values.device) < rate, UNSEEN, values)
    return Jagged(dropped, ids.offsets, ids.max_length) if isinstance(ids, Jagged) else dropped
