"""Wukong block (2403.02545) and the mixture of Wukong experts: feature interaction over tokens.

Shape letters: B samples, n tokens, k rank of the factorisation machine, D width, M experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core.errors import ConfigError
from gem_core.model.layers import MLP, TokenMap, join, linear_macs, map_tokens, packed
from gem_core.protocols import ComponentConfig


class WukongConfig(ComponentConfig):
    """`fm_tokens` + `linear_tokens` leave a block.

    `projection` makes the FM's Y (n, k): "attentive", by an MLP of `compressed` tokens, or "static", a parameter (then a
    block without MLP doubles the interaction order exactly). `norm`: the LayerNorm of a block's output; without it a token
    keeps its magnitude, which is evidence where tokens are few and narrow.
    """

    fm_tokens: int = Field(8, ge=1)
    linear_tokens: int = Field(8, ge=1)
    rank: int = Field(8, ge=1)
    hidden: tuple[int, ...] = (128,)
    projection: Literal["attentive", "static"] = "attentive"
    compressed: int = Field(2, ge=1)
    norm: bool = True
    dropout: float = Field(0.0, ge=0, lt=1)

    @property
    def tokens_out(self) -> int:
        return self.fm_tokens + self.linear_tokens


class WukongBlock(nn.Module):
    """X' = LN(concat[FMB(X), LCB(X)] + residual(X)): (B, n, D) -> (B, tokens_out, D).

    FM(X) = X (X^T Y), linear in n; FMB = MLP(LN(flatten(FM(X)))) as tokens; LCB = W_L X; the residual is a token-axis map
    where the numbers of tokens differ.
    """

    def __init__(self, tokens_in: int, dim: int, config: WukongConfig) -> None:
        super().__init__()
        self.config, self.dim, self.tokens_in = config, dim, tokens_in
        flat = tokens_in * config.rank
        if config.projection == "attentive":
            self.compress = TokenMap(tokens_in, config.compressed)
            self.project = MLP([config.compressed * dim, dim, flat])
        else:
            self.static = nn.Parameter(torch.randn(tokens_in, config.rank) * tokens_in**-0.5)
        self.norm = nn.LayerNorm(flat)
        self.mlp = MLP([flat, *config.hidden, config.fm_tokens * dim], config.dropout)
        self.linear = TokenMap(tokens_in, config.linear_tokens)
        same = tokens_in == config.tokens_out
        self.residual = nn.Identity() if same else TokenMap(tokens_in, config.tokens_out)
        self.out_norm = nn.LayerNorm(dim) if config.norm else nn.Identity()

    def interaction(self, x: Tensor, compressed: Tensor | None) -> Tensor:
        """FM(X) = X (X^T Y): (B, n, k); Y of `compressed` tokens, or the parameter where there are none."""
        if compressed is None:
            y = self.static
        else:
            y = self.project(compressed.flatten(1)).view(-1, self.tokens_in, self.config.rank)
        scale: float = (self.dim * self.tokens_in) ** -0.5
        return torch.matmul(x, torch.matmul(x.transpose(1, 2), y)) * scale

    def forward(self, x: Tensor) -> Tensor:
        # The maps of one input in one product: small products cost by their number.
        linear = F.pad(self.linear.weight, (0, 0, self.config.fm_tokens, 0))  # to the last tokens of the output
        if isinstance(self.residual, TokenMap):
            linear = linear + self.residual.weight
        attentive = self.config.projection == "attentive"
        mapped = map_tokens(torch.cat([linear, self.compress.weight]) if attentive else linear, x)
        kept = mapped[:, : self.config.tokens_out]
        compressed = packed(mapped[:, self.config.tokens_out :]) if attentive else None
        fm = self.mlp(self.norm(self.interaction(x, compressed).flatten(1))).view(-1, self.config.fm_tokens, self.dim)
        out = kept if isinstance(self.residual, TokenMap) else kept + x
        result: Tensor = self.out_norm(out + F.pad(fm, (0, 0, 0, self.config.linear_tokens)))
        return result

    def macs(self) -> int:
        """Multiply-adds per sample."""
        c = self.config
        mapped = c.tokens_out + (c.compressed if c.projection == "attentive" else 0)
        return self.tokens_in * self.dim * (mapped + 2 * c.rank) + linear_macs(self)


class WukongExperts(nn.Module):
    """Mixture of Wukong experts: expert m owns a designated part of the tokens (no router).

    The tokens are dealt to the experts in turn (token i to expert i mod M), so that each part holds tokens of every
    kind. Outputs are concatenated over the token axis ("concat"), or summed ("sum", the form that a reduce-scatter over
    an expert-parallel group gives).
    """

    def __init__(
        self, tokens_in: int, dim: int, experts: int, combine: Literal["sum", "concat"], config: WukongConfig
    ) -> None:
        super().__init__()
        if experts > tokens_in:
            raise ConfigError(f"model.experts: expected at most one expert per token ({tokens_in}), found {experts}")
        self.tokens_out = config.tokens_out * (experts if combine == "concat" else 1)
        self.parts = [list(range(m, tokens_in, experts)) for m in range(experts)]
        self.combine = combine
        self.experts = nn.ModuleList(WukongBlock(len(part), dim, config) for part in self.parts)

    def forward(self, x: Tensor) -> Tensor:
        m = len(self.parts)
        outputs = [expert(x[:, i::m] if m > 1 else x) for i, expert in enumerate(self.experts)]
        return join(outputs) if self.combine == "concat" else torch.stack(outputs).sum(0)

    def macs(self) -> int:
        """Multiply-adds per sample."""
        return sum(expert.macs() for expert in self.experts if isinstance(expert, WukongBlock))
