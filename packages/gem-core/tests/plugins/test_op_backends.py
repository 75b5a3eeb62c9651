"""Op backends of plugins: asked before the built-in ones, imported at the first call, named with their owner."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.errors import ConfigError, GemError
from gem_core.ops.dispatch import PACKAGES
from gem_core.ops.reference import SeedReference
from gem_core.plugins import Registry, hookimpl
from gem_core.plugins.registry import GIVEN_BY

SEEDS = torch.randn(2, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
KEYS = torch.randn(3, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def attention() -> Tensor:
    return ops.seed_attention(SEEDS, KEYS, KEYS, torch.tensor([0, 0, 3]), 3)


class Counting(SeedReference):
    """The reference, counted."""

    calls: list[str] = []

    def forward(self, *tensors: Tensor | None, **options: object) -> tuple[Tensor, ...]:
        self.calls.append("forward")
        return super().forward(*tensors, **options)

    def backward(self, saved: ops.Saved, grad: Tensor, **options: object) -> tuple[Tensor, ...]:
        self.calls.append("backward")
        return super().backward(saved, grad, **options)


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A registry whose backends are taken out of gem_core.ops again."""
    before = ops.registered()
    yield Registry()
    for op, backends in ops.registered().items():
        for backend in set(backends) - set(before[op]):
            ops.unregister_backend(op, backend)


def offer(registry: Registry, name: str, target: object) -> None:
    module = types.ModuleType("made_up")
    module.gem_register_op = hookimpl(lambda register: register(name, target))  # type: ignore[attr-defined]
    registry.register_plugin(module, "owner")


@pytest.mark.parametrize("target", [Counting, Counting(), f"{__name__}:Counting"], ids=["class", "object", "lazy"])
def test_a_plugins_backend_runs_forward_and_backward(target: object, registry: Registry) -> None:
    Counting.calls.clear()
    offer(registry, "seed_attention:counting", target)
    registry.install_ops()
    registry.install_ops()  # each run does
    expected = ops.registered()["seed_attention"]
    assert expected[0] == "counting" and expected.count("counting") == 1
    out = attention()
    (grad,) = torch.autograd.grad(out.sum(), KEYS)
    assert Counting.calls == ["forward", "backward"]
    with ops.use_backend({"seed_attention": "reference"}):
        truth = attention()
        torch.testing.assert_close(out, truth)
        torch.testing.assert_close(grad, torch.autograd.grad(truth.sum(), KEYS)[0])
    assert len(Counting.calls) == 2


def test_nothing_is_imported_before_the_first_call(registry: Registry) -> None:
    offer(registry, "seed_attention:lazy", "no_such_module_anywhere:Backend")
    registry.install_ops()
    with ops.use_backend({"seed_attention": "reference"}):
        attention()
    assert "no_such_module_anywhere" not in sys.modules
    with pytest.raises(GemError, match='op "seed_attention:lazy" of plugin owner cannot be loaded'):
        attention()


def test_a_backend_of_an_op_that_is_none(registry: Registry) -> None:
    offer(registry, "sed_attention:mine", Counting)
    with pytest.raises(
        ConfigError, match='plugin owner: there is no op "sed_attention"; did you mean "seed_attention"'
    ):
        registry.install_ops()


def test_the_packages_of_missing_backends_are_one_list() -> None:
    assert GIVEN_BY["op"] == PACKAGES
