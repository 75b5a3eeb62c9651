"""Closed-form gradients of both backends against finite differences, in float64."""

from __future__ import annotations

import pytest
import torch
from op_cases import ONE_EACH, case_of, gdpa

from gem_core import ops


def leaves(inputs):
    return [x.detach().clone().requires_grad_() for x in inputs]


@pytest.mark.parametrize("backend", ["reference", "ragged"])
@pytest.mark.parametrize("op", ONE_EACH)
def test_gradcheck(op, backend):
    made = case_of(op)
    with ops.use_backend({op: backend}):
        assert torch.autograd.gradcheck(made.run, leaves(made.inputs), fast_mode=True)


@pytest.mark.parametrize("activation", [*ops.ACTIVATIONS, ("gelu", "relu", "relu")], ids=str)
@pytest.mark.parametrize("op", ["gdpa", "gdpa_ffn"])
def test_gradcheck_of_activations(op, activation):
    made = gdpa([3, 0, 5, 1], 5, op=op, activation=activation, scale_inside=0.3, scale_outside=2.0)
    with ops.use_backend({op: "reference"}):
        assert torch.autograd.gradcheck(made.run, leaves(made.inputs), fast_mode=True)


@pytest.mark.parametrize("op", ONE_EACH)
def test_a_second_derivative_is_refused(op):
    made = case_of(op)
    inputs = leaves(made.inputs)
    grads = torch.autograd.grad(made.run(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{op} has no second derivative"):
        sum(g.sum() for g in grads).backward()


@pytest.mark.parametrize("op", ONE_EACH)
def test_frozen_inputs_get_no_gradient(op):
    made = case_of(op)
    first, *rest = made.inputs
    first = first.clone().requires_grad_()
    made.run(first, *rest).sum().backward()
    assert first.grad is not None and all(x.grad is None for x in rest)
