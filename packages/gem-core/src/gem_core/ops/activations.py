"""Element-wise activations of GDPA with exact derivatives (kernels.md 2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.errors import ConfigError, nearest

aten = torch.ops.aten
_POLY = (0.3989422804, -0.0664903801, 0.00997355701)  # gelu's even part: 1 / sqrt(2 pi) times 1, -1/6, 1/40


@dataclass(frozen=True)
class Activation:
    """`value(z)` and `gradient(dp, z)`, which is dp * act'(z); every act(0) is 0, so a zeroed score gives nothing."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _gelu_poly(z: Tensor) -> Tensor:
    s = z * z
    return 0.5 * z + s * (_POLY[0] + s * (_POLY[1] + s * _POLY[2]))


def _gelu_poly_gradient(dp: Tensor, z: Tensor) -> Tensor:
    s = z * z
    return dp * (0.5 + z * (2 * _POLY[0] + s * (4 * _POLY[1] + s * (6 * _POLY[2]))))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(F.gelu, aten.gelu_backward.default),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"), lambda dp, z: aten.gelu_backward.default(dp, z, approximate="tanh")
    ),
    "gelu_poly": Activation(_gelu_poly, _gelu_poly_gradient),
    "relu": Activation(torch.relu, lambda dp, z: aten.threshold_backward.default(dp, z, 0)),
    "silu": Activation(F.silu, aten.silu_backward.default),
    "hardswish": Activation(F.hardswish, aten.hardswish_backward.default),
    "relu2": Activation(lambda z: torch.relu(z).square(), lambda dp, z: dp * (2 * torch.relu(z))),
    "leaky_relu": Activation(
        lambda z: F.leaky_relu(z, 0.01), lambda dp, z: aten.leaky_relu_backward.default(dp, z, 0.01, False)
    ),
}


def encode(activation: str | tuple[str, ...], heads: int) -> str:
    """The op's string form: one name, or one per head joined by commas."""
    names = (activation,) if isinstance(activation, str) else tuple(activation)
    for name in names:
        if name not in ACTIVATIONS:
            raise ConfigError(f'activation: unknown "{name}"{nearest(name, ACTIVATIONS)}')
    if len(names) not in (1, heads):
        raise ConfigError(f"activation: expected one name or one per head ({heads}), found {len(names)}")
    return names[0] if len(set(names)) == 1 else ",".join(names)


def runs(activation: str, heads: int) -> list[tuple[slice, Activation]]:
    """Neighbouring heads with the same activation, as slices of the head axis."""
    names = activation.split(",")
    if len(names) == 1:
        return [(slice(0, heads), ACTIVATIONS[names[0]])]
    borders = [0, *(h for h in range(1, heads) if names[h] != names[h - 1]), heads]
    return [(slice(a, b), ACTIVATIONS[names[a]]) for a, b in itertools.pairwise(borders)]


def apply(activation: str, z: Tensor, heads: int) -> Tensor:
    """act(z) for scores (n * H, rows, keys)."""
    parts = runs(activation, heads)
    if len(parts) == 1:
        return parts[0][1].value(z)
    split = z.unflatten(0, (-1, heads))
    return torch.cat([act.value(split[:, part]) for part, act in parts], dim=1).flatten(0, 1)


def apply_gradient(activation: str, dp: Tensor, z: Tensor, heads: int) -> Tensor:
    """dp * act'(z) for scores (n * H, rows, keys)."""
    parts = runs(activation, heads)
    if len(parts) == 1:
        return parts[0][1].gradient(dp, z)
    up, split = dp.unflatten(0, (-1, heads)), z.unflatten(0, (-1, heads))
    return torch.cat([act.gradient(up[:, part], split[:, part]) for part, act in parts], dim=1).flatten(0, 1)
