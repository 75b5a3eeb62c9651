"""The ragged backend equals the reference: every variant of every op, result and every gradient, unwritten memory poisoned."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import (
    EDGES,
    HEADS,
    PAIRS,
    SEEDS,
    SIZES,
    VARIANTS,
    WIDTH,
    Case,
    gdpa,
    jagged,
    offsets_of,
    poisoned,
    small_tiles,
    values,
)

from gem_core import ops

BACKENDS = ("reference", "ragged")
TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-9}, torch.float32: {"rtol": 2e-4, "atol": 2e-4}}
SMALL = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8)


def assert_parity(case: Case) -> None:
    for dtype, tolerance in TOLERANCE.items():
        expected = case.evaluate("reference", dtype)
        with poisoned():
            found = case.evaluate("ragged", dtype)
        for e, f in zip(expected, found, strict=True):
            assert f.isfinite().all()
            torch.testing.assert_close(f, e, **tolerance)


def test_poison_shows() -> None:
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(3)).isnan().all()
        assert torch.ones(3).new_empty((2, 2)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("lengths", EDGES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_edges(variant: str, lengths: list[int]) -> None:
    assert_parity(VARIANTS[variant](lengths, lengths[::-1], 3, len(lengths)))


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(pairs=PAIRS, size=SIZES, seed=SEEDS)
def test_any_lengths(variant: str, pairs: list[tuple[int, int]], size: int, seed: int) -> None:
    assert_parity(VARIANTS[variant]([q for q, _ in pairs], [k for _, k in pairs], size, seed))


@pytest.mark.parametrize(
    "mask", [{}, {"mask": "causal"}, {"mask": "window", "window": 20}, {"mask": "prefix", "prefix": 3}]
)
def test_a_sequence_above_the_limits_of_a_tile(mask: dict[str, Any]) -> None:
    assert_parity(jagged([700, 3, 0, 1, 130, 2], [700, 3, 0, 1, 130, 2], **mask))


@pytest.mark.parametrize("op", ["gdpa", "gdpa_ffn"])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_activations(activation: str, op: str) -> None:
    assert_parity(gdpa([70, 0, 3, 150], 9, op=op, activation=activation, scale_inside=0.3, scale_outside=2.0))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.startswith("rote")])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(pairs=SMALL, size=SIZES, seed=SEEDS)
def test_many_small_tiles(variant: str, pairs: list[tuple[int, int]], size: int, seed: int) -> None:
    with small_tiles():
        assert_parity(VARIANTS[variant]([q for q, _ in pairs], [k for _, k in pairs], size, seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.endswith("shared")])
def test_a_broken_sequence_breaks_no_other(variant: str, backend: str) -> None:
    """NaN in one sequence reaches neither results nor gradients of the others (the seeds' gradient is theirs in common)."""
    lengths, bad = [5, 70, 0, 6, 2], 3
    case = VARIANTS[variant](lengths, lengths, 3, 0)
    clean = case.evaluate(backend)
    rows = slice(sum(lengths[:bad]), sum(lengths[: bad + 1]))

    def part(x: torch.Tensor) -> slice | int | None:
        """Where the broken sequence's part of a tensor lies; None in what all sequences share."""
        return rows if len(x) == sum(lengths) else bad if len(x) == len(lengths) else None

    broken = [x.clone() for x in case.inputs]
    for x in broken:
        if (where := part(x)) is not None:
            x[where] = float("nan")
    found = Case(case.op, case.run, tuple(broken)).evaluate(backend)
    assert found[0].isnan().any()
    for e, f in zip(clean, found, strict=True):
        if (where := part(e)) is not None:
            e[where], f[where] = 0, 0
            torch.testing.assert_close(f, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "variant", ["jagged causal", "jagged window", "block", "seed", "gdpa gelu", "gdpa_ffn gelu", "hstu causal", "rote"]
)
def test_sixteen_bits_accumulate_in_float32(variant: str, dtype: torch.dtype) -> None:
    """A 16-bit call agrees with float64 arithmetic on the same values to the type's last places."""
    case = VARIANTS[variant]([9, 0, 66], [9, 3, 66], 5, 3)
    rounded = Case(case.op, case.run, tuple(x.to(dtype) for x in case.inputs))
    step = 8 * torch.finfo(dtype).eps
    exact = rounded.evaluate("reference", torch.float64)
    for backend in BACKENDS:
        for e, f in zip(exact, rounded.evaluate(backend, dtype), strict=True):
            assert f.dtype == dtype
            torch.testing.assert_close(f.double(), e, rtol=step, atol=step * float(e.abs().max()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_strides_do_not_matter(variant: str, backend: str) -> None:
    """Values and the gradient of the result may be strided."""
    case = VARIANTS[variant]([9, 0, 66, 2], [9, 3, 66, 1], 5, 3)
    wide = [torch.stack((x, values(5, *x.shape)), -1)[..., 0].requires_grad_() for x in case.inputs]
    assert not any(x.is_contiguous() for x in wide)
    result, *expected = case.evaluate(backend)
    with ops.use_backend({case.op: backend}):
        out = case.run(*wide)
    torch.testing.assert_close(out.detach(), result)
    (summed,) = torch.autograd.grad(out.sum(), wide[:1])  # its gradient has stride 0
    with ops.use_backend({case.op: backend}):
        out = case.run(*wide)
    (ones,) = torch.autograd.grad(out, wide[:1], torch.ones_like(out).contiguous())
    torch.testing.assert_close(summed, ones)
    assert summed.shape == expected[0].shape


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_below_zero(backend: str, mask: str) -> None:
    """Scores of -1000: padding would have score 0 and take all the weight. Equal scores give the mean of the values."""
    lengths = [3, 1, 65]
    q, k = (torch.full((sum(lengths), HEADS, WIDTH), x, dtype=torch.float64) for x in (500.0, -1.0))
    v, offsets = values(1, sum(lengths), HEADS, WIDTH), offsets_of(lengths)
    with ops.use_backend({"jagged_attention": backend}):
        out = ops.jagged_attention(q, k, v, offsets, offsets, 65, 65, mask=mask)
    for rows, found in zip(v.split(lengths), out.split(lengths), strict=True):
        running = rows.cumsum(0) / torch.arange(1, len(rows) + 1)[:, None, None]
        torch.testing.assert_close(found, running if mask == "causal" else rows.mean(0).expand_as(rows))


def test_extras_are_the_same_in_both_backends() -> None:
    """The log-sum-exp is part of the contract: any backend may run the backward of another's forward."""
    q_offsets, k_offsets = offsets_of([40, 0, 3, 90]), offsets_of([40, 5, 0, 80])
    q, k = values(0, 133, HEADS, WIDTH), values(1, 125, HEADS, WIDTH)
    found = [
        torch.ops.gem.jagged_attention(q, k, k, q_offsets, k_offsets, None, 90, 90, "window", 4, 0.5, backend)[1]
        for backend in BACKENDS
    ]
    torch.testing.assert_close(*found)
    assert (found[1][40:43] == float("-inf")).all()  # no keys at all
