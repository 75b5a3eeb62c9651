"""The dense side on one device in one process, and what every strategy that holds the whole dense side shares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gem_core.errors import ConfigError, DataError
from gem_core.protocols import ComponentConfig, Embedding

Device = Literal["auto", "cpu", "cuda"]


def choose_device(wanted: Device, index: int | None = None) -> torch.device:
    """The device of `parallel.strategy.device`: "auto" is the GPU of this index (None: the current one) if there is one.

    Raises:
        ConfigError: there is no such GPU.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise ConfigError('parallel.strategy.device is "cuda", but torch finds no GPU: use "cpu" or "auto"')
    if index is not None and index >= found:
        raise ConfigError(
            f"process {index} of this machine finds {found} GPUs: start at most as many processes as GPUs"
        )
    return torch.device("cuda") if index is None else torch.device("cuda", index)


def world_size() -> int:
    """The number of processes of this run: torchrun's, else 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class WholeModel:
    """The part of a strategy whose process holds every dense parameter: gradients, norm, state."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._model: nn.Module = nn.Identity()

    def backward(self, sums: Mapping[str, Tensor], counts: Mapping[str, Tensor], weights: Mapping[str, float]) -> None:
        """Gradients of sum over tasks of weight * sum / count; a task without rows in the step adds nothing."""
        # A count of 0 comes with a sum of 0; adding 1 to it keeps the quotient 0.
        total = torch.stack([weights[t] * s / (counts[t] + (counts[t] == 0)) for t, s in sums.items()]).sum()
        total.backward()

    def clip(self, max_norm: float) -> Tensor:
        """Scale the dense gradients to the global norm; returns the norm before (infinite `max_norm` only measures)."""
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return dict(self._model.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state in.

        Raises:
            DataError: names or shapes that are not the model's.
        """
        try:
            self._model.load_state_dict(dict(state))
        except RuntimeError as error:
            raise DataError(f"the stored dense parameters are not this model's: {error}") from error


class SingleProcess(WholeModel):
    """One process, one device: nothing is wrapped, nothing communicated."""

    class Config(ComponentConfig):
        """`device`: "auto" takes a GPU where there is one."""

        device: Device = "auto"

    rank = 0
    world = 1

    def __init__(self, config: Config) -> None:
        if world_size() > 1:
            raise ConfigError(
                f'parallel.strategy "single" is for one process, and torchrun started {world_size()}: each would train '
                "the same model for itself; set parallel.strategy=ddp"
            )
        super().__init__(choose_device(config.device))

    def setup(self, model: nn.Module, embedding: Embedding, plan: Any = None) -> nn.Module:
        """Move the model to the device; returns it."""
        if plan is not None:
            raise ConfigError('strategy "single" follows no plan: remove parallel.plan')
        self._model = model.to(self.device)
        return self._model

    def sum_counts(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The counts themselves: there is one rank."""
        return dict(counts)

    def agree_done(self, done: bool) -> bool:
        """`done`."""
        return done

    def gather(self, value: Any) -> list[Any]:
        """`[value]`."""
        return [value]

    def close(self) -> None:
        """Nothing to leave."""
