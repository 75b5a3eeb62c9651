"""The reference of every op against its formula written out once more: values, and gradients by autograd through the formula."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import (
    HEADS,
    MIXED,
    PAIRS,
    SEEDS,
    SIZES,
    WIDTH,
    Case,
    block,
    gdpa,
    hstu,
    jagged,
    mask_options,
    offsets_of,
    rote,
    seeded,
    upstream,
    values,
)
from torch import Tensor

from gem_core import ops

REFERENCE = {"all": "reference"}
DRAWN = settings(max_examples=15, deadline=None, derandomize=True)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}

# The activations once more, by elementary functions (gelu_poly: the even polynomial of kernels.md 2).
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_poly": lambda x: 0.5 * x + 0.3989422804 * x**2 - 0.0664903801 * x**4 + 0.00997355701 * x**6,
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
}


def sees(mask: str, size: int, i: int, j: int) -> bool:
    """Whether query i sees key j."""
    return {
        "none": True,
        "causal": j <= i,
        "window": i - size <= j <= i + size,
        "block": i // max(size, 1) == j // max(size, 1),
        "prefix": j <= i or i < size,
    }[mask]


def table(mask: str, size: int, n: int, m: int) -> Tensor:
    """(n, m), True where a query sees a key."""
    return torch.tensor([[sees(mask, size, i, j) for j in range(m)] for i in range(n)], dtype=torch.bool).view(n, m)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """One sequence; the rows that see nothing give 0."""
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    some = seen.any(1)
    weights = scores[:, some].masked_fill(~seen[some], -math.inf).softmax(-1)
    return torch.zeros_like(q).index_copy(0, some.nonzero()[:, 0], torch.einsum("hij,jhd->ihd", weights, v))


def activated(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, ...], inside: float = 1.0) -> Tensor:
    """act(inside q k^T) v of one sequence, head by head."""
    heads = [FORMULAS[name](q[:, h] @ k[:, h].T * inside) @ v[:, h] for h, name in enumerate(names)]
    return torch.stack(heads, 1)


def assert_as_formula(case: Case, formula: Callable[..., Tensor]) -> None:
    """Values, and gradients against autograd through the formula."""
    inputs = [x.requires_grad_() for x in (x.clone() for x in case.inputs)]
    out = formula(*inputs)
    grads = torch.autograd.grad(out, inputs, upstream(out), allow_unused=True, materialize_grads=True)
    for e, f in zip([out, *grads], case.evaluate("reference"), strict=True):
        torch.testing.assert_close(f, e, **CLOSE)


def pieces(x: Tensor, lengths: list[int]) -> list[Tensor]:
    """Sequence by sequence."""
    return list(x.split(lengths)) if lengths else []


def stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    """One tensor again; no part: `like` times 0, which keeps autograd's graph."""
    return torch.cat(parts) if parts else like * 0


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name: str) -> None:
    z = torch.cat(
        (torch.linspace(-4, 4, 63, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    ).requires_grad_()
    act, up = ops.ACTIVATIONS[name], values(3, 64)
    expected = FORMULAS[name](z)
    torch.testing.assert_close(act.value(z), expected, **CLOSE)
    assert float(act.value(torch.zeros(()))) == 0.0
    away = z.detach().abs() > 0  # at its kink, any subgradient will do
    (slope,) = torch.autograd.grad(expected, z, up)
    torch.testing.assert_close(act.gradient(up, z.detach())[away], slope[away], **CLOSE)


def test_every_activation_has_a_formula() -> None:
    assert set(FORMULAS) == set(ops.ACTIVATIONS)


@pytest.mark.parametrize("mask", ops.MASKS)
@DRAWN
@given(pairs=PAIRS, size=SIZES, seed=SEEDS)
def test_jagged_attention(mask: str, pairs: list[tuple[int, int]], size: int, seed: int) -> None:
    queries, keys = [q for q, _ in pairs], [k for _, k in pairs]
    options = mask_options(mask, size)
    size = options.get(mask, 0)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(pieces(q, queries), pieces(k, keys), pieces(v, keys), strict=True)
        return stacked([softmax_attention(a, b, c, table(mask, size, len(a), len(b)), 0.5) for a, b, c in parts], q)

    assert WIDTH**-0.5 == 0.5
    assert_as_formula(jagged(queries, keys, seed, **options), formula)


@pytest.mark.parametrize("mask", ops.MASKS)
@DRAWN
@given(
    queries=st.lists(st.integers(0, 6), max_size=6),
    keys=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    size=SIZES,
    data=st.data(),
)
def test_shared_keys_are_copied_keys(
    mask: str, queries: list[int], keys: list[int], size: int, data: st.DataObject
) -> None:
    """k_index equals attention over the gathered keys; gradients of keys that are read more than once add up."""
    index = torch.tensor([data.draw(st.integers(0, len(keys) - 1)) for _ in queries], dtype=torch.int64)
    options = {**mask_options(mask, size), "scale": 0.7}
    shared = jagged(queries, keys, 1, k_index=index, **options)

    def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (k, at), (v, _) = (ops.gather_segments(x, offsets_of(keys), index) for x in (k, v))
        with ops.use_backend(REFERENCE):
            return ops.jagged_attention(q, k, v, offsets_of(queries), at, 6, 6, **options)

    assert_as_formula(shared, copied)


@DRAWN
@given(lengths=st.lists(st.integers(0, 30), max_size=4), size=st.integers(1, 9), data=st.data())
def test_block_attention_is_separate_blocks(lengths: list[int], size: int, data: st.DataObject) -> None:
    shift = data.draw(st.integers(0, size - 1))
    borders = [sorted({0, n, *(b for b in range(size - shift, n, size))}) for n in lengths]
    cuts = [b - a for ends in borders for a, b in itertools.pairwise(ends)]

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(pieces(x, cuts) for x in (q, k, v)), strict=True)
        return stacked([softmax_attention(a, b, c, table("none", 0, len(a), len(a)), 0.5) for a, b, c in parts], q)

    assert_as_formula(block(lengths, 5, block=size, shift=shift), formula)


@DRAWN
@given(lengths=st.lists(st.integers(0, 12), max_size=5), seeds=st.integers(0, 5), seed=SEEDS)
def test_seed_attention(lengths: list[int], seeds: int, seed: int) -> None:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(pieces(k, lengths), pieces(v, lengths), strict=True)
        out = [softmax_attention(q, a, b, table("none", 0, seeds, len(a)), 0.5) for a, b in parts]
        return torch.stack(out) if out else q.new_zeros((0, *q.shape)) * q.sum()

    assert_as_formula(seeded(lengths, seeds, seed), formula)


@pytest.mark.parametrize("activation", [*FORMULAS, MIXED], ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 9), max_size=4), hidden=st.integers(0, 6), seed=SEEDS)
def test_gdpa(activation: str | tuple[str, ...], lengths: list[int], hidden: int, seed: int) -> None:
    names = (activation,) * HEADS if isinstance(activation, str) else activation

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stacked([1.5 * activated(a, k[b], v[b], names, 0.4) for b, a in enumerate(pieces(q, lengths))], q)

    case = gdpa(lengths, hidden, seed, activation=activation, scale_inside=0.4, scale_outside=1.5)
    assert_as_formula(case, formula)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 9), max_size=4), hidden=st.integers(0, 6), seed=SEEDS)
def test_gdpa_ffn_data_flow(lengths: list[int], hidden: int, seed: int) -> None:
    """LayerNorm, gdpa + the normalised q, RMSNorm, + the raw q; both norms over H * d jointly."""

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = q.flatten(1)
        lq = (
            (x - x.mean(1, keepdim=True)) / ((x - x.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True).add(1e-5).sqrt()
        ).view_as(q)
        inner = [activated(a, k[b], v[b], ("silu",) * HEADS) for b, a in enumerate(pieces(lq, lengths))]
        g = stacked(inner, lq) + lq
        return g / (g.square().mean((1, 2), keepdim=True) + 1e-5).sqrt() + q

    assert_as_formula(gdpa(lengths, hidden, seed, op="gdpa_ffn", activation="silu"), formula)


@pytest.mark.parametrize("mask", ops.MASKS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(pairs=PAIRS, size=SIZES, seed=SEEDS)
def test_hstu_attention(mask: str, pairs: list[tuple[int, int]], size: int, seed: int) -> None:
    queries, keys = [q for q, _ in pairs], [k for _, k in pairs]
    options = mask_options(mask, size)
    size, divisor = options.get(mask, 0), max(keys, default=0) or 1

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for a, b, c in zip(pieces(q, queries), pieces(k, keys), pieces(v, keys), strict=True):
            weights = F.silu(0.3 * torch.einsum("ihd,jhd->hij", a, b)) * table(mask, size, len(a), len(b))
            out.append(torch.einsum("hij,jhd->ihd", weights, c) / divisor)
        return stacked(out, q)

    assert_as_formula(hstu(queries, keys, seed, alpha=0.3, **options), formula)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 9), max_size=4), seed=SEEDS)
def test_rote_is_a_complex_rotation(lengths: list[int], seed: int) -> None:
    n = sum(lengths)
    gaps = torch.randint(0, 10**7, (n,), generator=torch.Generator().manual_seed(seed))
    at = torch.tensor([i for length in lengths for i in range(length)], dtype=torch.float64)

    def formula(x: Tensor, phi: Tensor) -> Tensor:
        theta = torch.tensor([100.0 ** (-2 * i / WIDTH) for i in range(WIDTH // 2)], dtype=torch.float64)
        angle = at[:, None] * theta + torch.log1p(gaps.double() / 60.0)[:, None] * phi
        turned = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.view_as_real(turned).reshape(x.shape)

    assert_as_formula(rote(lengths, seed, base=100.0, time_scale=60.0), formula)


@pytest.mark.parametrize("backend", ["reference", "ragged"])
@pytest.mark.parametrize("mask", ops.MASKS)
def test_no_keys_give_zero_and_no_gradient(mask: str, backend: str) -> None:
    """Sequence 1 has no keys: its queries give 0 and get 0, and the others are as without it."""
    for make in (jagged, hstu):
        case = make([3, 4, 2], [3, 0, 5], 1, **mask_options(mask, 2))
        out, dq, dk, dv = case.evaluate(backend)
        assert not out[3:7].any() and not dq[3:7].any()
        assert out[:3].any() and dq[:3].any() and dk.any() and dv.any()


@pytest.mark.parametrize("backend", ["reference", "ragged"])
def test_queries_outside_the_mask_give_zero(backend: str) -> None:
    """Window and block masks: queries beyond the last key see nothing."""
    for options, seen in (({"mask": "window", "window": 2}, 5), ({"mask": "block", "block": 4}, 4)):
        out, dq, _, _ = jagged([9], [3], 1, **options).evaluate(backend)
        assert not out[seen:].any() and not dq[seen:].any()
        assert (out[:seen] != 0).all()


@pytest.mark.parametrize("backend", ["reference", "ragged"])
def test_seeds_without_keys_give_zero(backend: str) -> None:
    out, dq, _, _ = seeded([0, 3], 2).evaluate(backend)
    assert out.shape == (2, 2, HEADS, WIDTH)
    assert not out[0].any() and out[1].any() and dq.any()
    out, dq, _, _ = seeded([0, 0], 2).evaluate(backend)
    assert not out.any() and not dq.any()
