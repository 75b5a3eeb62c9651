"""float32, and bfloat16 by autocast (weights, loss and tables stay float32)."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from gem_core.protocols import ComponentConfig


class Float32:
    """Everything in float32."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config) -> None:
        pass

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which autocast is off."""
        return torch.autocast(device.type, enabled=False)

    def convert(self, model: nn.Module) -> nn.Module:
        """The model as it is."""
        return model


class BFloat16(Float32):
    """Linear maps and attention in bfloat16 by torch's autocast."""

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which torch casts to bfloat16 what is safe in it."""
        return torch.autocast(device.type, dtype=torch.bfloat16)
