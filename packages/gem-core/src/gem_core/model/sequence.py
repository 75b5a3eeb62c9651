"""What a Kunlun layer does to a sequence: the GDPA feed-forward (its weights made from non-sequence tokens) and
self-attention with rotary temporal embedding.

Shape letters: Q sequences, T events (ragged), R compressed tokens, F generated hidden units, D width of the tokens, E width
of the events, H heads, d = E / H.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.model.layers import TokenMap, packed, rms_unit
from gem_core.model.pooling import Rote, Sequence

Attention = Literal["block", "window", "full", "causal"]


class GdpaFeedForward(nn.Module):
    """S -> RMSNorm(act(LN(S) K^T) V + LN(S)) + S with K, V (F, H, d) generated from Xsum (R, D) by token-axis maps.

    Xsum has unit rows and the maps are drawn so that K and V have unit variance; with the scales 1/sqrt(d) inside and
    1/sqrt(F) outside, scores have unit variance and the activations' sum stays below unit RMS, whatever the lengths.
    """

    def __init__(self, tokens: int, dim: int, width: int, heads: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.heads, self.hidden, self.width, self.activation = heads, hidden, width, activation
        self.key = TokenMap(tokens, hidden)
        self.value = TokenMap(tokens, hidden)
        self.resize = nn.Identity() if dim == width else nn.Linear(dim, width, bias=False)
        if isinstance(self.resize, nn.Linear):
            nn.init.normal_(self.resize.weight, std=dim**-0.5)  # unit rows stay so

    def forward(self, sequence: Sequence, xsum: Tensor) -> Sequence:
        x = self.resize(rms_unit(xsum))
        shape = (xsum.shape[0], self.hidden, self.heads, self.width // self.heads)
        out = ops.gdpa_ffn(
            sequence.values.view(-1, *shape[2:]),
            self.key(x).view(shape),
            self.value(x).view(shape),
            sequence.offsets,
            sequence.max_length,
            activation=self.activation,
            scale_inside=shape[3] ** -0.5,
            scale_outside=self.hidden**-0.5,
        )
        return sequence.replace(out.flatten(1))

    def macs(self, sequences: int, events: int) -> int:
        """Multiply-adds."""
        tokens = self.key.weight.shape[1]
        generate = self.key.macs(self.width) + self.value.macs(self.width)
        if isinstance(self.resize, nn.Linear):
            generate += tokens * self.resize.weight.numel()
        return sequences * generate + events * 2 * self.hidden * self.width


class SequenceAttention(nn.Module):
    """S -> S + MHA(norm(S)) with rotated queries and keys; `kind` says which events see each other.

    block: blocks of `size` events from the newest on (moved by half a block where `shift`); window: |i - j| <= `size`;
    full; causal: only older events see newer ones (events are stored newest first).
    """

    def __init__(self, width: int, heads: int, kind: Attention, size: int, shift: bool, rote: bool) -> None:
        super().__init__()
        self.heads, self.kind, self.size = heads, kind, size
        self.shift = size // 2 if shift else 0
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.out.weight, std=0.5 * width**-0.5)
        self.rote = Rote(width // heads) if rote else None

    def forward(self, sequence: Sequence) -> Sequence:
        x = sequence.values
        qkv = self.qkv(self.norm(x)).view(x.shape[0], 3, self.heads, x.shape[1] // self.heads)
        q, k = (packed(x) if self.rote is None else self.rote(x, sequence) for x in (qkv[:, 0], qkv[:, 1]))
        v = packed(qkv[:, 2])
        offsets, longest = sequence.offsets, sequence.max_length
        if self.kind == "block":
            out = ops.block_attention(q, k, v, offsets, longest, block=self.size, shift=self.shift)
        elif self.kind == "window":
            out = ops.jagged_attention(q, k, v, offsets, offsets, longest, longest, mask="window", window=self.size)
        else:
            mask = "causal" if self.kind == "causal" else "none"
            out = ops.jagged_attention(q, k, v, offsets, offsets, longest, longest, mask=mask)
        return sequence.replace(x + self.out(out.flatten(1)))

    def macs(self, lengths: Tensor) -> int:
        """Multiply-adds of sequences of these lengths."""
        width = self.out.weight.shape[0]
        n = lengths.double()
        if self.kind == "block":
            first = torch.clamp(n, max=self.size - self.shift)  # borders are moved to the left
            whole, rest = (n - first) // self.size, (n - first) % self.size
            pairs = first**2 + whole * self.size**2 + rest**2
        elif self.kind == "window":
            # Rows away from both ends see 2 w + 1 events; each end misses w (w + 1) / 2.
            w = torch.clamp(n - 1, max=self.size)
            pairs = n * (2 * w + 1) - w * (w + 1)
        else:
            pairs = n * n if self.kind == "full" else n * (n + 1) / 2
        return int(n.sum()) * 4 * width**2 + int(pairs.sum()) * 2 * width
