"""Interactions of tokens for InterFormer's layers: dot products, DCNv2's crosses, or both (DHEN).

Shape letters: B samples, N tokens, M tokens after, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from gem_core.model.dcnv2 import CrossLayer
from gem_core.model.layers import MLP, TokenMap, linear_macs

Kind = Literal["dot", "dcnv2", "dhen"]


class Interaction(nn.Module):
    """X' = LN(MLP(Interaction(X)) + residual(X)): (B, N, D) -> (B, M, D); the residual is a token-axis map.

    dot: the N (N - 1) / 2 dot products of the tokens; dcnv2: a low-rank cross of all their numbers; dhen (2203.11014):
    the sum of both, each with its MLP.
    """

    pairs: Tensor

    def __init__(
        self, tokens_in: int, tokens_out: int, dim: int, kind: Kind, hidden: Sequence[int], rank: int, dropout: float
    ) -> None:
        super().__init__()
        self.dim, self.tokens_in, self.tokens_out = dim, tokens_in, tokens_out
        flat, out = tokens_in * dim, tokens_out * dim
        crossed = kind != "dot" or tokens_in == 1  # one token has no pair
        self.cross = CrossLayer(flat, rank) if crossed else None
        self.cross_mlp = MLP([flat, *hidden, out], dropout) if crossed else None
        dotted = kind != "dcnv2" and tokens_in > 1
        pairs = torch.triu_indices(tokens_in, tokens_in, 1)
        self.register_buffer("pairs", pairs[0] * tokens_in + pairs[1], persistent=False)
        self.dot_mlp = MLP([pairs.shape[1], *hidden, out], dropout) if dotted else None
        self.residual = TokenMap(tokens_in, tokens_out, near_identity=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        total = self.residual(x)
        if self.cross is not None and self.cross_mlp is not None:
            flat = x.flatten(1)
            total = total + self.cross_mlp(self.cross(flat, flat)).view_as(total)
        if self.dot_mlp is not None:
            products = torch.bmm(x, x.transpose(1, 2)).flatten(1) * self.dim**-0.5
            total = total + self.dot_mlp(products.index_select(1, self.pairs)).view_as(total)
        out: Tensor = self.norm(total)
        return out

    def macs(self) -> int:
        """Multiply-adds per sample."""
        products = self.tokens_in**2 * self.dim if self.dot_mlp is not None else 0
        return products + linear_macs(self) + self.residual.macs(self.dim)
