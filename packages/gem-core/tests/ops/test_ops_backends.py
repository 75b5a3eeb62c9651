"""Backends under use: lazy loading, scope of a choice, compiled functions; arguments on other devices."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from op_cases import ONE_EACH, WIDTH, case_of, offsets_of
from torch import Tensor

from gem_core import ops
from gem_core.errors import ConfigError, DataError
from gem_core.ops import checks
from gem_core.ops.reference import GdpaReference


class Counting(GdpaReference):
    """The reference, counting its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, *tensors: Tensor, **o: Any) -> tuple[Tensor, ...]:
        self.calls += 1
        return super().forward(*tensors, **o)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A stranger's module with a backend, as a class and as an object."""
    module = ModuleType("strangers_ops")
    module.Backend, module.backend = Counting, Counting()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "strangers_ops", module)
    before = ops.registered()["gdpa"]
    yield module
    ops.set_backends({})
    for name in set(ops.registered()["gdpa"]) - set(before):
        ops.unregister_backend("gdpa", name)
    assert ops.registered()["gdpa"] == before


def test_every_op_has_the_ragged_backend_before_its_reference() -> None:
    assert set(ops.registered()) >= set(ONE_EACH)
    for op in ONE_EACH:
        assert ops.registered()[op][-2:] == ("ragged", "reference")


def test_lazy_backends_are_made_once_on_first_use(plugin: ModuleType) -> None:
    ops.register_backend("gdpa", "class", "strangers_ops:Backend", priority=-1)
    ops.register_backend("gdpa", "object", "strangers_ops:backend", priority=-2)
    case = case_of("gdpa")
    reference = case.evaluate("reference")
    for name in ("class", "object"):
        for e, f in zip(reference, case.evaluate(name), strict=True):
            assert torch.equal(e, f)
    case.evaluate("object")
    assert plugin.backend.calls == 2


def test_a_choice_ends_with_its_block_even_by_an_error(plugin: ModuleType) -> None:
    ops.register_backend("gdpa", "counting", plugin.backend, priority=-1)
    case = case_of("gdpa")
    with pytest.raises(ZeroDivisionError), ops.use_backend({"gdpa": "counting"}):
        case.run(*case.inputs)
        raise ZeroDivisionError
    case.run(*case.inputs)
    assert plugin.backend.calls == 1


def test_an_op_by_name_is_nearer_than_all(plugin: ModuleType) -> None:
    ops.register_backend("gdpa", "counting", plugin.backend, priority=-1)
    case = case_of("gdpa")
    ops.set_backends({"all": "reference", "gdpa": "counting"})
    case.run(*case.inputs)
    assert plugin.backend.calls == 1
    with ops.use_backend({"gdpa": "ragged"}):
        case.run(*case.inputs)
    assert plugin.backend.calls == 1
    ops.set_backends({"all": "reference"})
    case.run(*case.inputs)
    assert plugin.backend.calls == 1


def test_a_wrong_choice_changes_nothing(plugin: ModuleType) -> None:
    """The names are checked before any is set; "all" needs the backend for each op."""
    ops.register_backend("gdpa", "counting", plugin.backend, priority=-1)
    ops.set_backends({"gdpa": "counting"})
    for wrong in ({"gdpa": "ragged", "rote": "nothing"}, {"all": "counting"}):
        with pytest.raises(ConfigError, match="is not installed"):
            ops.set_backends(wrong)
    case = case_of("gdpa")
    case.run(*case.inputs)
    assert plugin.backend.calls == 1


def test_compiled_functions_follow_the_choice(plugin: ModuleType) -> None:
    """A compiled function does not keep the backend that was chosen while it was traced."""
    ops.register_backend("gdpa", "counting", plugin.backend, priority=-1)
    case = case_of("gdpa")
    compiled = torch.compile(lambda q, k, v: case.run(q, k, v) * 2, backend="eager", fullgraph=True)
    expected = case.run(*case.inputs) * 2
    torch.testing.assert_close(compiled(*case.inputs), expected)
    assert plugin.backend.calls == 0
    with ops.use_backend({"gdpa": "counting"}):
        torch.testing.assert_close(compiled(*case.inputs), expected)
    assert plugin.backend.calls == 1
    compiled(*case.inputs)
    assert plugin.backend.calls == 1


@pytest.mark.parametrize("op", ONE_EACH)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(op: str, mode: Any) -> None:
    case = case_of(op)
    expected = case.run(*case.inputs)
    with mode():
        found = case.run(*(x.clone().requires_grad_() for x in case.inputs))
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


def test_another_device_is_refused() -> None:
    cpu, meta = torch.zeros(3, 2, WIDTH), torch.zeros(3, 2, WIDTH, device="meta")
    with pytest.raises(DataError, match="op: k: expected device cpu as the first argument, found meta"):
        checks.values("op", cpu, k=meta)
    with pytest.raises(DataError, match="op: offsets: expected device meta, found cpu"):
        checks.offsets("op", "offsets", offsets_of([3]), 3, 3, meta)
    with pytest.raises(DataError, match="op: index: expected device cpu, found meta"):
        checks.index("op", "index", offsets_of([3]).to("meta"), 2, 4, cpu)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_of_indices_are_checked_on_any_device(device: str) -> None:
    like, offsets = torch.zeros(3, device=device), offsets_of([1, 2]).to(device)
    checks.offsets("op", "offsets", offsets, 3, 2, like)
    checks.index("op", "index", offsets, 3, 4, like)
    with pytest.raises(DataError, match=r"op: offsets: expected shape \(B \+ 1\), found \(\)"):
        checks.offsets("op", "offsets", offsets[0], 3, 2, like)
    with pytest.raises(DataError, match=r"op: index: expected shape \(2\), found \(3,\)"):
        checks.index("op", "index", offsets, 2, 4, like)
