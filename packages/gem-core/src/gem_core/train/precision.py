"""float32, and bfloat16 by autocast (weights, loss and tables stay float32); how a precision gets into a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional

from gem_core.protocols import ComponentConfig, Precision


class Float32:
    """Everything in float32."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config) -> None:
        pass

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which autocast is off."""
        return torch.autocast(device.type, enabled=False)

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """torch's own."""
        return functional.linear(x, w, b)

    def op_variant(self, op: str) -> str | None:
        """None: the usual choice."""
        return None

    def pack(self, shard: Tensor) -> list[Tensor]:
        """The shard itself."""
        return [shard]

    def unpack(self, packed: Sequence[Tensor], like: Tensor) -> Tensor:
        """The gathered tensor in the parameter's shape and type."""
        return packed[0].to(like.dtype).view(like.shape)


class BFloat16(Float32):
    """Linear maps and attention in bfloat16 by torch's autocast; bfloat16 travels in an all-gather."""

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which torch casts to bfloat16 what is safe in it."""
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def pack(self, shard: Tensor) -> list[Tensor]:
        """The shard in bfloat16."""
        return [shard.to(torch.bfloat16)]


class PreciseLinear(nn.Linear):
    """A linear map computed by a precision."""

    precision: Precision

    def forward(self, x: Tensor) -> Tensor:
        return self.precision.linear(x, self.weight, self.bias)


def apply(precision: Precision, model: nn.Module) -> nn.Module:
    """Let every `nn.Linear` of a model compute by `precision`; parameters and their names stay. Returns the model."""
    if getattr(type(precision), "linear", None) is Float32.linear:
        return model
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = PreciseLinear
            object.__setattr__(module, "precision", precision)
    return model
