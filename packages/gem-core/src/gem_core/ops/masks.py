"""Which keys a query sees: the masks of the attention ops, and the count of pairs that they leave."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.errors import ConfigError

MASKS = ("none", "causal", "window", "block", "prefix")


def mask_size(mask: str, *, window: int, block: int, prefix: int) -> int:
    """The one number that `mask` needs (0 for none and causal), after checking that no other is given."""
    if mask not in MASKS:
        raise ConfigError(f'mask: expected one of {", ".join(MASKS)}, found "{mask}"')
    given = {"window": window, "block": block, "prefix": prefix}
    size = given.pop(mask, 0)
    for name, value in given.items():
        if value:
            raise ConfigError(f'{name}: only mask="{name}" takes it, found {name}={value} with mask="{mask}"')
    if mask in ("block", "prefix") and size < 1:
        raise ConfigError(f'{mask}: mask="{mask}" needs a positive number, found {size}')
    if size < 0:
        raise ConfigError(f"{mask}: expected a number >= 0, found {size}")
    return size


def visible(mask: str, size: int, shift: int, i: Tensor, j: Tensor) -> Tensor:
    """True where query position i (n, 1) sees key position j (1, m); positions count from each sequence's start.

    causal: j <= i. window: |i - j| <= size. block: i and j in one block of `size`, borders moved to the left by `shift`.
    prefix: causal, but the first `size` queries see every key.
    """
    if mask == "causal":
        return j <= i
    if mask == "window":
        return (i - j).abs() <= size
    if mask == "block":
        return (i + shift) // size == (j + shift) // size
    if mask == "prefix":
        return (j <= i) | (i < size)
    return torch.ones((), dtype=torch.bool, device=i.device).expand(i.shape[0], j.shape[1])


def dense_mask(mask: str, size: int, shift: int, n_q: int, n_k: int, device: torch.device) -> Tensor:
    """The whole (n_q, n_k) boolean mask of one sequence."""
    i, j = torch.arange(n_q, device=device), torch.arange(n_k, device=device)
    return visible(mask, size, shift, i[:, None], j[None, :])


def pairs(mask: str, size: int, shift: int, n_q: int, n_k: int) -> int:
    """How many (query, key) pairs of one sequence the mask leaves."""
    if mask == "none" or n_q == 0 or n_k == 0:
        return n_q * n_k
    if mask == "block":
        blocks = range(0, min(n_q, n_k) + shift, size)
        return sum((_inside(b, size, shift, n_q)) * _inside(b, size, shift, n_k) for b in blocks)
    if mask == "window":
        return sum(max(0, min(n_k, i + size + 1) - max(0, i - size)) for i in range(n_q))
    full = min(size, n_q) if mask == "prefix" else 0
    return full * n_k + sum(min(i + 1, n_k) for i in range(full, n_q))


def _inside(start: int, size: int, shift: int, length: int) -> int:
    return max(0, min(start + size - shift, length) - max(0, start - shift))
