"""The ragged backend equals the reference: results and every gradient, over ragged shapes, on poisoned memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import EDGES, HEADS, PAIRS, SEEDS, SIZES, VARIANTS, WIDTH, Case, offsets_of, poisoned, small_tiles, values

from gem_core import ops

TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-9}, torch.float32: {"rtol": 2e-4, "atol": 2e-4}}


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
@settings(max_examples=10, deadline=None, derandomize=True)
@given(pairs=PAIRS, size=SIZES, seed=SEEDS)
def test_drawn_shapes(variant: str, pairs: list[tuple[int, int]], size: int, seed: int) -> None:
    assert_parity(VARIANTS[variant]([q for q, _ in pairs], [k for _, k in pairs], size, seed))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.startswith("rote")])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8), size=SIZES, seed=SEEDS)
def test_many_small_tiles(variant: str, pairs: list[tuple[int, int]], size: int, seed: int) -> None:
    with small_tiles():
        assert_parity(VARIANTS[variant]([q for q, _ in pairs], [k for _, k in pairs], size, seed))


@pytest.mark.parametrize("backend", ["reference", "ragged"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_sequence_breaks_no_other(variant: str, backend: str) -> None:
    """NaN in one sequence reaches neither results nor gradients of the others (the seeds' gradient is theirs in common)."""
    lengths, bad = [5, 70, 0, 6, 2], 3
    if variant.endswith("shared"):
        pytest.skip("sequences that share keys are not apart")
    case = VARIANTS[variant](lengths, lengths, 3, 0)
    clean = case.evaluate(backend)
    rows = slice(sum(lengths[:bad]), sum(lengths[: bad + 1]))

    def per_sequence(x: torch.Tensor) -> slice | int | None:
        """Where the broken sequence's part of a tensor lies."""
        return rows if len(x) == sum(lengths) else bad if len(x) == len(lengths) else None

    broken = []
    for x in case.inputs:
        y = x.clone()
        if (where := per_sequence(x)) is not None:
            y[where] = float("nan")
        broken.append(y)
    found = Case(case.op, case.run, tuple(broken)).evaluate(backend)
    for e, f in zip(clean, found, strict=True):
        if (where := per_sequence(e)) is not None:
            assert f[where].isnan().any() or f[where].numel() == 0
            e, f = e.clone(), f.clone()
            e[where], f[where] = 0, 0
            torch.testing.assert_close(f, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["jagged causal", "block", "seed", "gdpa gelu", "gdpa_ffn relu", "hstu causal", "rote"])
def test_sixteen_bits_accumulate_in_float32(variant: str, dtype: torch.dtype) -> None:
    """A 16-bit call is the float32 one of the rounded values, rounded: both backends agree to the type's last places."""
    case = VARIANTS[variant]([9, 0, 66], [9, 3, 66], 5, 3)
    rounded = Case(case.op, case.run, tuple(x.to(dtype) for x in case.inputs))
    step = 8 * torch.finfo(dtype).eps
    exact = rounded.evaluate("reference", torch.float64)
    for backend in ("reference", "ragged"):
        for e, f in zip(exact, rounded.evaluate(backend, dtype), strict=True):
            assert f.dtype == dtype
            torch.testing.assert_close(f.double(), e, rtol=step, atol=step * float(e.abs().max()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_strides_do_not_matter(variant: str) -> None:
    case = VARIANTS[variant]([9, 0, 66, 2], [9, 3, 66, 1], 5, 3)
    wide = tuple(torch.stack((x, values(5, *x.shape)), -1)[..., 0] for x in case.inputs)
    assert not any(x.is_contiguous() for x in wide)
    for backend in ("reference", "ragged"):
        with ops.use_backend({case.op: backend}):
            torch.testing.assert_close(case.run(*wide), case.run(*case.inputs))


def test_scores_far_below_zero() -> None:
    """All valid scores at -1000: the softmax stays exact, and no padding takes weight."""
    lengths = [3, 1, 65]
    n = sum(lengths)
    q, k, v = torch.full((n, HEADS, WIDTH), 500.0), torch.full((n, HEADS, WIDTH), -1.0), torch.ones(n, HEADS, WIDTH)
    for backend in ("reference", "ragged"):
        with ops.use_backend({"jagged_attention": backend}):
            out = ops.jagged_attention(q, k, v, offsets_of(lengths), offsets_of(lengths), 65, 65, mask="causal")
        torch.testing.assert_close(out, v)
