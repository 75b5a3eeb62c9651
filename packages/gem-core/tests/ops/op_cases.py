"""Calls of every op over ragged shapes, for the tests of gem_core.ops."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from gem_core import ops
from gem_core.ops import ragged

HEADS, WIDTH = 3, 4

# Batches that deserve a test of their own: none, all empty, one row, odd, more than a tile, long among short, equal, many.
EDGES: list[list[int]] = [[], [0, 0, 0], [1], [65], [3, 0, 140, 7, 1, 0], [31, 33, 32, 64, 63], [65] * 4, [2] * 50]
LENGTH = st.one_of(st.sampled_from([0, 0, 1, 63, 64, 65]), st.integers(0, 9))
PAIRS = st.lists(st.tuples(LENGTH, LENGTH), max_size=5)  # queries and keys of each sequence
SIZES = st.sampled_from([0, 1, 2, 3, 5, 64, 70])
SEEDS = st.integers(0, 2**16)


@dataclass(frozen=True)
class Case:
    """One call: `run` takes the differentiable arguments, which are `inputs`."""

    op: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]

    def evaluate(self, backend: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """The result, and the gradient of each input for a fixed gradient of the result."""
        inputs = [x.to(dtype).requires_grad_() for x in self.inputs]
        with ops.use_backend({self.op: backend}):
            out = self.run(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream(out))]


def upstream(out: Tensor) -> Tensor:
    """A gradient of the result, the same for each backend and type."""
    return values(7, *out.shape).to(out.dtype)


def values(seed: int, *shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def offsets_of(lengths: Sequence[int]) -> Tensor:
    """(B + 1) int64."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


def _pair(seed: int, queries: Sequence[int], keys: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    q, n_k = values(seed, sum(queries), HEADS, WIDTH), sum(keys)
    return q, values(seed + 1, n_k, HEADS, WIDTH), values(seed + 2, n_k, HEADS, WIDTH)


def jagged(queries: Sequence[int], keys: Sequence[int], seed: int = 0, **options: Any) -> Case:
    layout = offsets_of(queries), offsets_of(keys), max(queries, default=0), max(keys, default=0)
    return Case(
        "jagged_attention",
        lambda q, k, v: ops.jagged_attention(q, k, v, *layout, **options),
        _pair(seed, queries, keys),
    )


def hstu(queries: Sequence[int], keys: Sequence[int], seed: int = 0, **options: Any) -> Case:
    layout = offsets_of(queries), offsets_of(keys), max(queries, default=0), max(keys, default=0)
    return Case(
        "hstu_attention", lambda q, k, v: ops.hstu_attention(q, k, v, *layout, **options), _pair(seed, queries, keys)
    )


def block(lengths: Sequence[int], seed: int = 0, **options: Any) -> Case:
    layout = offsets_of(lengths), max(lengths, default=0)
    return Case(
        "block_attention",
        lambda q, k, v: ops.block_attention(q, k, v, *layout, **options),
        _pair(seed, lengths, lengths),
    )


def seeded(lengths: Sequence[int], seeds: int, seed: int = 0, **options: Any) -> Case:
    layout = offsets_of(lengths), max(lengths, default=0)
    return Case(
        "seed_attention",
        lambda q, k, v: ops.seed_attention(q, k, v, *layout, **options),
        _pair(seed, [seeds], lengths),
    )


def gdpa(lengths: Sequence[int], hidden: int, seed: int = 0, *, op: str = "gdpa", **options: Any) -> Case:
    layout = offsets_of(lengths), max(lengths, default=0)
    shape = len(lengths), hidden, HEADS, WIDTH
    inputs = values(seed, sum(lengths), HEADS, WIDTH), values(seed + 1, *shape) / 2, values(seed + 2, *shape)
    return Case(op, lambda q, k, v: getattr(ops, op)(q, k, v, *layout, **options), inputs)


def rote(lengths: Sequence[int], seed: int = 0, **options: Any) -> Case:
    n = sum(lengths)
    gaps = torch.randint(0, 10**7, (n,), generator=torch.Generator().manual_seed(seed))
    positions = ops.positions(offsets_of(lengths), n)
    inputs = values(seed, n, HEADS, WIDTH), values(seed + 1, WIDTH // 2)
    return Case("rote", lambda x, phi: ops.rote(x, positions, gaps, phi, **options), inputs)


def mask_options(mask: str, size: int) -> dict[str, Any]:
    """The options of a mask; `size` is its number where it takes one."""
    if mask in ("none", "causal"):
        return {"mask": mask}
    return {"mask": mask, mask: size if mask == "window" else max(size, 1)}


def _shared(queries: Sequence[int], keys: Sequence[int], seed: int, **options: Any) -> Case:
    index = torch.randint(0, max(len(keys), 1), (len(queries),), generator=torch.Generator().manual_seed(seed))
    return jagged(queries, keys, seed, k_index=index.sort().values if seed % 2 else index, **options)


Build = Callable[[Sequence[int], Sequence[int], int, int], Case]
MIXED = tuple(itertools.islice(itertools.cycle(("relu", "gelu", "gelu")), HEADS))
SCALES = {"scale_inside": 0.6, "scale_outside": -1.7}


def _variants() -> dict[str, Build]:
    """Every op with every option that changes what it computes, from lengths of queries and keys, a size and a seed."""
    found: dict[str, Build] = {
        "jagged scale": lambda q, k, n, s: jagged(q, k, s, scale=0.9),
        "block": lambda q, k, n, s: block(q, s, block=max(n, 1)),
        "block shift": lambda q, k, n, s: block(q, s, block=max(n, 1), shift=s % max(n, 1), scale=0.3),
        "seed": lambda q, k, n, s: seeded(k, n % 6, s),
        "seed scale": lambda q, k, n, s: seeded(k, 2, s, scale=1.1),
        "rote": lambda q, k, n, s: rote(q, s),
        "rote scales": lambda q, k, n, s: rote(q, s, base=50.0, time_scale=60.0),
        "hstu alpha": lambda q, k, n, s: hstu(q, k, s, alpha=1.5),
    }
    for mask in ops.MASKS:
        found[f"jagged {mask}"] = lambda q, k, n, s, m=mask: jagged(q, k, s, **mask_options(m, n))
        found[f"jagged {mask} shared"] = lambda q, k, n, s, m=mask: _shared(q, k, s, **mask_options(m, n))
        found[f"hstu {mask}"] = lambda q, k, n, s, m=mask: hstu(q, k, s, **mask_options(m, n))
    for op in ("gdpa", "gdpa_ffn"):
        for act in ("gelu", MIXED):  # each activation has tests of its own
            name = f"{op} {act if isinstance(act, str) else 'mixed'}"
            found[name] = lambda q, k, n, s, o=op, a=act: gdpa(q, n % 7, s, op=o, activation=a)
        found[f"{op} scales"] = lambda q, k, n, s, o=op: gdpa(q, 5, s, op=o, activation="silu", **SCALES)
    return found


VARIANTS = _variants()
ONE_EACH = {  # one call of each op, for tests of the machinery
    "jagged_attention": VARIANTS["jagged causal"],
    "block_attention": VARIANTS["block shift"],
    "seed_attention": VARIANTS["seed scale"],
    "gdpa": VARIANTS["gdpa scales"],
    "gdpa_ffn": VARIANTS["gdpa_ffn gelu"],
    "hstu_attention": VARIANTS["hstu window"],
    "rote": VARIANTS["rote"],
}


def case_of(op: str) -> Case:
    """A small call of any op."""
    return ONE_EACH[op]([4, 0, 3], [2, 1, 5], 2, 1)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN (or a huge integer), so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def small_tiles() -> Iterator[None]:
    """The limits of the ragged backend's tiles, packs and chunks, so small that a small case meets all of them."""
    modules = [getattr(ragged, name) for name in ("pointwise", "runs", "softmax", "tiles")]
    limits = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and type(value) is int and value < 2**32
    ]
    assert limits, "the ragged backend has limits"
    for module, name, _ in limits:
        setattr(module, name, 6)
    try:
        yield
    finally:
        for module, name, value in limits:
            setattr(module, name, value)
