"""One head per objective on the shared trunk, with a bias per surface; surfaces' own feed-forwards and ESMM's products are options."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from gem_core.errors import ConfigError, nearest
from gem_core.model.layers import MLP, ByName, linear_macs
from gem_core.protocols import ComponentConfig
from gem_core.schema import Schema


class HeadConfig(ComponentConfig):
    """What every model's heads may do.

    Attributes:
        conversions: ESMM (1804.07931): "<conversion>: <click>" for each objective that can only happen after another one.
            Its head is then that of the conversion rate after a click, and its prediction the product of both rates: it learns
            from all impressions, and so does the click's head. Its label is that of the impression: 1 for click and conversion.
        surface_rank: rank of a feed-forward of each surface on the shared trunk, x + U_s gelu(V_s x) [Lattice]; 0: none.
    """

    conversions: dict[str, str] = {}
    surface_rank: int = Field(0, ge=0)


class SurfaceFeedForward(nn.Module):
    """x + U_s gelu(V_s x), of low rank r, with the weights of the row's surface s; it starts as the identity."""

    def __init__(self, surfaces: int, width: int, rank: int) -> None:
        super().__init__()
        self.surfaces, self.rank = surfaces, rank
        self.down = nn.Linear(width, surfaces * rank, bias=False)
        self.up = nn.Linear(surfaces * rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor, surface: Tensor) -> Tensor:
        """x (B, width), surface (B,) -> (B, width)."""
        # Surfaces are few and r is small: all are computed and one is kept, in shapes that do not depend on the data.
        own = torch.arange(self.surfaces, device=surface.device) == surface.unsqueeze(1)
        hidden = nn.functional.gelu(self.down(x)).unflatten(1, (self.surfaces, self.rank))
        out: Tensor = x + self.up(torch.where(own.unsqueeze(2), hidden, 0.0).flatten(1))
        return out


class Heads(nn.Module):
    """logit_head = MLP_head(x) + bias[head, surface] + skip[head], a head per objective and attribution window.

    The biases start at the training split's base rates, so that an untrained model is calibrated.

    Args:
        schema: a fitted schema.
        width: of x. hidden: hidden sizes of each head's MLP. options: see `HeadConfig`.

    Raises:
        ConfigError: `conversions` names an objective that is not there, or leads back to itself.
    """

    def __init__(
        self, schema: Schema, width: int, hidden: Sequence[int], dropout: float = 0.0, options: HeadConfig | None = None
    ) -> None:
        super().__init__()
        options = HeadConfig() if options is None else options
        self.tasks = schema.heads()
        self.products = _products(schema, options.conversions)
        self.heads = ByName({task: MLP([width, *hidden, 1], dropout) for task in self.tasks})
        rates = {task: schema.require_fitted().base_rates.get(task, 0.5) for task in self.tasks}
        after = {head: min(rates[head] / max(rates[click], 1e-6), 0.9) for head, click in self.products}
        start = [_logit({**rates, **after}[task]) for task in self.tasks]
        surfaces = len(schema.surface_names())
        self.surface_bias = nn.Parameter(torch.tensor(start).unsqueeze(1).repeat(1, surfaces))
        rank = options.surface_rank
        self.surface_ffn = SurfaceFeedForward(surfaces, width, rank) if rank else None
        for mlp in self.heads.values():
            last = [m for m in mlp.modules() if isinstance(m, nn.Linear)][-1]
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor, surface: Tensor, skip: Tensor | None = None) -> dict[str, Tensor]:
        """x (B, width), surface (B,), skip (B, heads) -> per head (B,) logits in float32."""
        out = {}
        if self.surface_ffn is not None:
            x = self.surface_ffn(x, surface)
        for i, task in enumerate(self.tasks):
            logit = self.heads[task](x).squeeze(1).float() + self.surface_bias[i][surface]
            out[task] = logit if skip is None else logit + skip[:, i].float()
        for head, click in self.products:
            out[head] = product_logit(out[head], out[click])
        return out

    def macs(self) -> int:
        """Multiply-adds per row."""
        return linear_macs(self)


def product_logit(a: Tensor, b: Tensor) -> Tensor:
    """The logit of sigmoid(a) * sigmoid(b): 1 / p - 1 = exp(-a) + exp(-b) + exp(-a - b), of which no term overflows."""
    return -torch.logsumexp(torch.stack([-a, -b, -a - b]), 0)


def _products(schema: Schema, conversions: dict[str, str]) -> list[tuple[str, str]]:
    """(head, objective that comes before) in an order in which each product's factor is done before it."""
    for names in (conversions.keys(), conversions.values()):
        for name in names:
            if name not in schema.objectives:
                raise ConfigError(
                    f'model.head.conversions: the schema has no objective "{name}"{nearest(name, schema.objectives)}'
                )
    done: list[str] = [task for task in schema.objectives if task not in conversions]
    waiting = dict(conversions)
    out = []
    while waiting:
        ready = [task for task, click in waiting.items() if click in done]
        if not ready:
            raise ConfigError(f"model.head.conversions: {', '.join(waiting)}: each waits for itself")
        for task in ready:
            out += [(head, waiting[task]) for head in schema.heads_of(task)]
            del waiting[task]
        done += ready
    return out


def check_hidden(model: str, asked: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for a hidden layer that a model does not have."""
    for name in asked:
        if name not in known:
            raise ConfigError(f'model {model} has no hidden layer "{name}"{nearest(name, known)}')


def _logit(p: float) -> float:
    p = min(max(p, 1e-6), 1 - 1e-6)
    return math.log(p / (1 - p))
