"""Hierarchical seed pooling (HSP): K summary tokens of a ragged sequence, by seeds, attention and SumKronLinear.

Shape letters: Q sequences, T events (ragged), S seeds, K summary tokens, n target queries per row, B rows, D width,
H heads, d = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.model.layers import packed, rms_unit


@dataclass(frozen=True)
class Sequence:
    """Events of Q sequences as flat rows: values (sum T, D), offsets (Q + 1,), gaps (sum T,) int64 seconds before the
    request, positions (sum T,) int64 from the newest event."""

    values: Tensor
    offsets: Tensor
    max_length: int
    gaps: Tensor
    positions: Tensor

    def replace(self, values: Tensor) -> Sequence:
        """The same events with other vectors."""
        return Sequence(values, self.offsets, self.max_length, self.gaps, self.positions)

    def gather(self, index: Tensor) -> Sequence:
        """Whole sequences by index (B,), repeats allowed: each row's own copy of its request's events."""
        values, offsets = ops.gather_segments(self.values, self.offsets, index)
        gaps, _ = ops.gather_segments(self.gaps, self.offsets, index)
        positions, _ = ops.gather_segments(self.positions, self.offsets, index)
        return Sequence(values, offsets, self.max_length, gaps, positions)


class Rote(nn.Module):
    """Rotary temporal embedding: angle of pair i = position * theta_i + log(1 + gap / 1 hour) * phi_i, phi learned."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        theta = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.phi = nn.Parameter(theta.clone())

    def forward(self, x: Tensor, sequence: Sequence) -> Tensor:
        """x (sum T, H, d) -> the same, rotated."""
        return ops.rote(x, sequence.positions, sequence.gaps, self.phi)


class SumKronLinear(nn.Module):
    """Y = sum_i Z_i^T X W_i: (B, S, D) -> (B, K, D); equals the dense map sum_i kron(Z_i, W_i) on row-major vec, with
    k (S K + D^2) parameters."""

    def __init__(self, seeds: int, tokens: int, dim: int, terms: int) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(terms, seeds, tokens) * seeds**-0.5)
        self.w = nn.Parameter(torch.randn(terms, dim, dim) * (terms * dim) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        terms, seeds, tokens = self.z.shape
        # bmm, not matmul: faster on a processor (see TokenMap), and torch.export takes it for any B.
        maps = self.z.permute(0, 2, 1).reshape(terms * tokens, seeds).expand(x.shape[0], -1, -1)
        mixed = torch.bmm(maps, x)  # (B, k K, D)
        mixed = mixed.unflatten(1, (terms, tokens)).transpose(1, 2).flatten(2)  # (B, K, k D)
        return torch.matmul(mixed, self.w.flatten(0, 1))

    def macs(self) -> int:
        """Multiply-adds per sample."""
        terms, seeds, tokens = self.z.shape
        dim = self.w.shape[1]
        return terms * (seeds * tokens * dim + tokens * dim * dim)


class HierarchicalSeedPooling(nn.Module):
    """Seeds attend to a sequence's events, SumKronLinear compresses the S answers to K; a sequence without events
    gives what zeros give. With `target_queries`, queries made from the ad attend to the same keys as well.
    """

    def __init__(self, dim: int, heads: int, seeds: int, tokens: int, terms: int, rote: bool, target: bool) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.seeds = nn.Parameter(torch.randn(seeds, dim))
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.compress = SumKronLinear(seeds, tokens, dim, terms)
        self.norm = nn.LayerNorm(dim)
        self.rote = Rote(dim // heads) if rote else None
        self.target = nn.Linear(dim, dim, bias=False) if target else None
        self.target_out = nn.Linear(dim, dim, bias=False) if target else None

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.heads, self.dim // self.heads)

    def forward(
        self, sequence: Sequence, queries: Tensor | None, sequence_of_row: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """queries (B, n, D) or None; sequence_of_row (B,) or None where row b has sequence b. -> (Q, K, D), (B, n, D)."""
        key, value = self.key_value(self.norm(sequence.values)).chunk(2, dim=-1)
        k, v = self._split(key), self._split(packed(value))
        if self.rote is not None:
            k = self.rote(k, sequence)
        q = self._split(self.query(rms_unit(self.seeds)))
        pooled = ops.seed_attention(q, k, v, sequence.offsets, sequence.max_length)  # (Q, S, H, d)
        summary = self.compress(self.out(pooled.flatten(2)))
        if queries is None or self.target is None or self.target_out is None:
            return summary, None
        rows, n = queries.shape[:2]
        q = self._split(self.target(queries).flatten(0, 1))
        q_offsets = torch.arange(0, (rows + 1) * n, n, device=q.device)
        answer = ops.jagged_attention(
            q, k, v, q_offsets, sequence.offsets, n, sequence.max_length, k_index=sequence_of_row
        )
        return summary, self.target_out(answer.flatten(1)).view(rows, n, self.dim)

    def macs(self, rows: int, sequences: int, events: int, pairs: int, queries: int) -> int:
        """Multiply-adds: `pairs` is the sum over rows of their events, `queries` n."""
        d2, seeds = self.dim**2, self.seeds.shape[0]
        total = seeds * d2 + events * (2 * d2 + 2 * seeds * self.dim)
        total += sequences * (seeds * d2 + self.compress.macs())
        if self.target is not None:
            total += rows * queries * 2 * d2 + 2 * queries * pairs * self.dim
        return total
