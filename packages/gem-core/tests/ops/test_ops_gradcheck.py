"""Closed-form gradients of the references against finite differences, in float64."""

from __future__ import annotations

import pytest
import torch
from ops_cases import ALL, MASKS, case, offsets_of

from gem_core import ops


def leaves(inputs):
    return [x.detach().clone().requires_grad_() for x in inputs]


@pytest.mark.parametrize("backend", ["reference", "ragged"])
@pytest.mark.parametrize("op", ALL)
def test_gradcheck(op, backend):
    made = case(op, torch.float64)
    with ops.use_backend({"all": backend}):
        assert torch.autograd.gradcheck(made.call, leaves(made.inputs), fast_mode=True)


@pytest.mark.parametrize(
    "mask", [m for m in MASKS if max([0, *(v for v in m.values() if isinstance(v, int))]) < 10], ids=str
)
@pytest.mark.parametrize("function", [ops.jagged_attention, ops.hstu_attention])
def test_gradcheck_of_masks(function, mask):
    made, q_offsets, k_offsets = (
        case("jagged_attention", torch.float64),
        offsets_of([3, 0, 5, 1]),
        offsets_of([4, 2, 0, 6]),
    )
    with ops.use_backend({"all": "reference"}):
        assert torch.autograd.gradcheck(
            lambda q, k, v: function(q, k, v, q_offsets, k_offsets, 9, 9, **mask), leaves(made.inputs), fast_mode=True
        )


@pytest.mark.parametrize("activation", [*ops.ACTIVATIONS, ("gelu", "relu")], ids=str)
@pytest.mark.parametrize("function", [ops.gdpa, ops.gdpa_ffn])
def test_gradcheck_of_activations(function, activation):
    made, offsets = case("gdpa", torch.float64), offsets_of([3, 0, 5, 1])
    with ops.use_backend({"all": "reference"}):
        assert torch.autograd.gradcheck(
            lambda q, k, v: function(q, k, v, offsets, 9, activation=activation, scale_inside=0.3, scale_outside=2.0),
            leaves(made.inputs),
            fast_mode=True,
        )


@pytest.mark.parametrize("op", ALL)
def test_a_second_derivative_is_refused(op):
    made = case(op)
    inputs = leaves(made.inputs)
    grads = torch.autograd.grad(made.call(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{op} has no second derivative"):
        sum(g.sum() for g in grads).backward()


@pytest.mark.parametrize("op", ALL)
def test_frozen_inputs_get_no_gradient(op):
    made = case(op)
    first, *rest = made.inputs
    first = first.clone().requires_grad_()
    made.call(first, *rest).sum().backward()
    assert first.grad is not None and all(x.grad is None for x in rest)
