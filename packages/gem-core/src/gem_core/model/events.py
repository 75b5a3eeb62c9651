"""Events of one type as vectors: their fields and age, embedded once per request.

Shape letters: Q requests, T events, E width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.data.batch import Batch, Jagged
from gem_core.errors import ConfigError, nearest
from gem_core.model.layers import MLP, linear_macs
from gem_core.model.pooling import Sequence
from gem_core.schema import Schema


class EventTokens(nn.Module):
    """Fields of each event, concatenated with its age, through an MLP: (sum T, E).

    Args:
        schema: a fitted schema.
        event: the event type.
        width: E.
        time_waves: sinusoids of log age among the inputs.
        widths: of the looked-up vectors, by key; a sparse field that is not there is left out.
    """

    waves: Tensor

    def __init__(self, schema: Schema, event: str, width: int, time_waves: int, widths: Mapping[str, int]) -> None:
        super().__init__()
        self.event = event
        fields = schema.events[event].fields
        self.sparse = [f"{event}.{n}" for n, f in fields.items() if f.kind == "sparse" and f"{event}.{n}" in widths]
        self.dense = [n for n, f in fields.items() if f.kind == "dense"]
        # Log of age in days runs from about -11 (a second) to 7 (three years).
        self.register_buffer("waves", torch.pi * 2.0 ** -torch.arange(time_waves), persistent=False)
        inputs = sum(widths[k] for k in self.sparse) + 2 * len(self.dense) + 1 + 2 * time_waves
        self.mlp = MLP([inputs, width, width])

    def forward(self, fields: Mapping[str, Jagged], gaps: Tensor, looked: Mapping[str, Tensor]) -> Tensor:
        """gaps (sum T,): seconds before the request; looked: vectors by key."""
        age = (gaps.to(torch.float32) / 86400).add(1e-4).log().unsqueeze(1)
        angle = age * self.waves
        parts = [looked[key] for key in self.sparse] + [age / 4, angle.sin(), angle.cos()]
        for name in self.dense:
            x = fields[name].values.to(torch.float32).unsqueeze(1)
            missing = x.isnan()
            parts += [torch.where(missing, 0.0, x), missing.to(x.dtype)]
        out: Tensor = self.mlp(torch.cat(parts, 1))
        return out

    def sequence(
        self, batch: Batch, fields: Mapping[str, Jagged], looked: Mapping[str, Tensor], limit: int
    ) -> Sequence:
        """The events (already truncated to `limit`) of every request, newest first."""
        time = fields["time"]
        n = time.values.shape[0]
        gaps = (batch.request_time[ops.segment_ids(time.offsets, n)] - time.values).clamp(min=0)
        positions = ops.positions(time.offsets, n)
        return Sequence(self(fields, gaps, looked), time.offsets, limit, gaps, positions)

    def macs(self) -> int:
        """Multiply-adds per event."""
        return linear_macs(self)


def check_event_types(schema: Schema, **options: Iterable[str]) -> None:
    """Raises ConfigError where an option of the model names an event type that the schema does not have."""
    for option, named in options.items():
        for event in named:
            if event not in schema.events:
                raise ConfigError(
                    f'model.{option}: no event type "{event}" in the schema{nearest(event, schema.events)}'
                )
