"""Small building blocks: token-axis maps, MLPs, piecewise-linear encoding. Each says its multiply-adds per sample.

Shape letters: B samples, N tokens, R compressed tokens, D width, n features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def map_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """Weight (R, N) on the token axis of x (B, N, D): (B, R, D)."""
    # 2.5 times as fast on a processor as matmul, which transposes x to fold the samples into one product.
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x)


def join(parts: list[Tensor]) -> Tensor:
    """Concatenation over the token axis; one part is taken as it is (torch.cat would copy it)."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def packed(part: Tensor) -> Tensor:
    """A contiguous copy of a part of a tensor. `contiguous` asks torch.export whether a size is 1; this does not."""
    return part.clone(memory_format=torch.contiguous_format)


class TokenMap(nn.Module):
    """Linear map over the token axis: (B, N, D) -> (B, R, D).

    `near_identity` starts it as the map that keeps tokens apart (R >= N: token r mod N; else the sum of the tokens n
    with n mod R = r) plus a fifth of the random one.
    """

    def __init__(self, tokens_in: int, tokens_out: int, near_identity: bool = False) -> None:
        super().__init__()
        weight = torch.randn(tokens_out, tokens_in) * max(tokens_in, 1) ** -0.5
        if near_identity:
            fold = min(tokens_in, tokens_out)
            same = torch.arange(tokens_out).unsqueeze(1) % fold == torch.arange(tokens_in) % fold
            weight = weight / 5 + same / same.sum(1, keepdim=True).sqrt()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return map_tokens(self.weight, x)

    def macs(self, dim: int) -> int:
        """Multiply-adds per sample of width `dim`."""
        return self.weight.numel() * dim


class MLP(nn.Sequential):
    """Linear maps with GELU between them (none after the last), optional dropout before each."""

    def __init__(self, sizes: Sequence[int], dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            if i:
                layers.append(nn.GELU())
            if dropout:
                layers.append(nn.Dropout(dropout))
            layers.append(nn.Linear(fan_in, fan_out))
        super().__init__(*layers)


class ByName(nn.ModuleDict):
    """Modules by names that users choose: a plain ModuleDict refuses those of its own attributes ("type", "items")."""

    def __setitem__(self, key: str, module: nn.Module) -> None:
        self._modules[key] = module


def linear_macs(module: nn.Module) -> int:
    """Multiply-adds per position of all `nn.Linear` inside a module."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


class PiecewiseLinear(nn.Module):
    """Dense features to inputs of a linear map: (B, n) standardised, NaN where missing -> (B, width).

    A feature with bin edges e_0 < ... < e_k gives k values clip((x - e_j) / (e_j+1 - e_j), 0, 1), so a linear map of them
    is a piecewise-linear function of x (Gorishniy et al., 2203.05556); one without edges gives x itself. Each feature
    adds a bit for "missing", and its other values are then 0.

    Args:
        edges: per feature its bin edges in standardised units; fewer than 2 for a linear feature.
    """

    slope: Tensor
    start: Tensor
    feature: Tensor
    lowest: Tensor
    highest: Tensor

    def __init__(self, edges: Sequence[Sequence[float]]) -> None:
        super().__init__()
        slope, start, feature = [], [], []
        for i, knots in enumerate(edges):
            for left, right in itertools.pairwise(knots):
                slope.append(1.0 / (right - left))
                start.append(-left / (right - left))
                feature.append(i)
        self.bins = len(slope)
        plain = [i for i, knots in enumerate(edges) if len(knots) < 2]
        # forward reads three copies of the columns: x with missing far below every edge, x with missing as 0, missing.
        feature += [len(edges) + i for i in plain] + [2 * len(edges) + i for i in range(len(edges))]
        same = len(feature) - self.bins
        lowest, highest = [0.0] * self.bins + [-torch.inf] * same, [1.0] * self.bins + [torch.inf] * same
        self.register_buffer("lowest", torch.tensor(lowest), persistent=False)
        self.register_buffer("highest", torch.tensor(highest), persistent=False)
        self.register_buffer("slope", torch.tensor(slope + [1.0] * same), persistent=False)
        self.register_buffer("start", torch.tensor(start + [0.0] * same), persistent=False)
        self.register_buffer("feature", torch.tensor(feature, dtype=torch.int64), persistent=False)
        self.width = len(feature)

    def forward(self, x: Tensor) -> Tensor:
        # One buffer, filled in place: it is 20 times as wide as x, and passes over it are what this costs.
        out = torch.cat([x.nan_to_num(-1e30), x.nan_to_num(0.0), x.isnan()], 1).index_select(1, self.feature)
        torch.addcmul(self.start, out, self.slope, out=out)
        # Whole, not a slice of its columns: torch.export would take a batch of one row for another layout.
        return out.clamp_(self.lowest, self.highest)


def rms_unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Rows of unit root mean square (no affine part)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
