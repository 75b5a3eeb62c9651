"""Backends of the ops: registration, choice, and the one torch.library operator per op that wraps them all.

An op has a reference (plain PyTorch, the truth) and any number of backends. Each backend is asked by `supports(spec)`, on metadata
only, and the first by priority that says yes runs. Inside `torch.compile`, `torch.export` and autograd an op is one opaque node.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gem_core.errors import ConfigError, nearest

ENVIRONMENT = "GEM_OPS_BACKEND"
PACKAGES = {
    "triton": "gem-kernels[triton]",
    "cpu": "gem-kernels",
    "mx": "gem-kernels",
}  # who gives a backend that is missing

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class OpSpec:
    """What one call looks like, without its values: enough for a backend to say whether it can run it."""

    op: str
    shapes: dict[str, tuple[int, ...]]  # by tensor argument; absent optional tensors are left out
    dtypes: dict[str, torch.dtype]
    device: torch.device
    options: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """What a backward gets: the forward's tensor arguments in order, and all its outputs (the result, then the extras)."""

    inputs: tuple[Any, ...]  # tensors, None for an optional one that was not given
    outputs: tuple[Tensor, ...]


class OpBackend(Protocol):
    """One implementation of one op. Extras are fixed per op, so any backend can run the backward of any other's forward."""

    def supports(self, spec: OpSpec) -> str | None:
        """None if this backend can run such a call, else the reason why not."""

    def forward(self, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        """The result and the op's extras."""

    def backward(self, saved: Saved, grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """Gradients of the op's differentiable arguments, in order, from the gradient of the result."""


@dataclass
class _Entry:
    target: OpBackend | str
    priority: int

    def load(self) -> OpBackend:
        if isinstance(self.target, str):
            module, _, attribute = self.target.partition(":")
            loaded = getattr(importlib.import_module(module), attribute)
            self.target = cast(OpBackend, loaded() if isinstance(loaded, type) else loaded)
        return self.target


_backends: dict[str, dict[str, _Entry]] = {}
_chosen: dict[str, str] = {}


def register_backend(op: str, name: str, backend: OpBackend | str, priority: int = 0) -> None:
    """Add a backend of `op`: an object, or "module:attribute" of an object or class, imported on first use.

    Higher priority is asked first; the reference has 0.
    """
    entries = _op(op)
    if name in entries:
        raise ConfigError(
            f'backend "{name}" of op {op} is registered twice: by {entries[name].target} and by {backend}'
        )
    entries[name] = _Entry(backend, priority)
    _backends[op] = dict(sorted(entries.items(), key=lambda item: -item[1].priority))


def unregister_backend(op: str, name: str) -> None:
    """Take a backend out again (tests, plugins that are switched off)."""
    del _backends[op][name]


def registered() -> dict[str, tuple[str, ...]]:
    """The backends of every op, in the order in which they are asked."""
    return {op: tuple(entries) for op, entries in _backends.items()}


def set_backends(mapping: Mapping[str, str]) -> None:
    """Force backends by op, for the whole process: `{"gdpa": "reference"}`. The key "all" stands for every op; `{}` clears."""
    for op, name in mapping.items():
        for each in _backends if op == "all" else (op,):
            _entry(each, name)
    _chosen.clear()
    _chosen.update(mapping)


@contextmanager
def use_backend(mapping: Mapping[str, str]) -> Iterator[None]:
    """`set_backends` for the length of a `with` block, on top of what is set; a backward follows its forward's choice."""
    before = dict(_chosen)
    set_backends({**before, **mapping})
    try:
        yield
    finally:
        set_backends(before)


def chosen(op: str) -> str:
    """The backend that the user forces for `op` through `set_backends`, or "" for none."""
    return _chosen.get(op) or _chosen.get("all") or ""


def _op(op: str) -> dict[str, _Entry]:
    if op not in _backends:
        raise ConfigError(f'there is no op "{op}"{nearest(op, _backends)}')
    return _backends[op]


def _entry(op: str, name: str) -> _Entry:
    entries = _op(op)
    if name not in entries:
        kind = "attention" if op.endswith("attention") else op
        cure = f": pip install {PACKAGES[name]}" if name in PACKAGES else ""
        raise ConfigError(f'{kind} backend "{name}" is not installed{cure} (op {op} has: {", ".join(entries)})')
    return entries[name]


def resolve(spec: OpSpec, forced: str = "") -> OpBackend:
    """The backend for such a call: `forced`, else the environment's, else the first by priority that supports it."""
    name = forced or os.environ.get(ENVIRONMENT, "")
    if name:
        backend, reason = _ask(_entry(spec.op, name), spec)
        if backend is None:
            raise ConfigError(f'{spec.op}: backend "{name}" is forced but cannot run this call: {reason}')
        return backend
    reasons = []
    for name, entry in _backends[spec.op].items():
        backend, reason = _ask(entry, spec)
        if backend is not None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f"{spec.op}: no backend can run this call; {'; '.join(reasons)}")


def _ask(entry: _Entry, spec: OpSpec) -> tuple[OpBackend | None, str | None]:
    """The backend if it supports such a call, else the reason; one whose import fails says so and stays out."""
    try:
        backend = entry.load()
    except (ImportError, AttributeError) as error:
        return None, f"cannot import {entry.target}: {error}"
    reason = backend.supports(spec)
    return (backend, None) if reason is None else (None, reason)


_library = torch.library.Library("gem", "DEF")


class Op:
    """An op's torch.library operators, `gem::<name>` and `gem::<name>_backward`, over all its backends.

    schema: the arguments, tensors first, without the last one, `str backend`, which every op has.
    grads: the tensor arguments that get a gradient.
    check: validates the real arguments before any backend sees them (never runs on fake tensors).
    fake: shapes and types of the outputs, as new empty tensors; the first is the result.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        outputs: int,
        grads: tuple[str, ...],
        check: Callable[..., None],
        fake: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        self.name, self.grads, self.check, self.fake = name, grads, check, fake
        arguments = torch._C.parse_schema(f"{name}({schema}) -> ()").arguments
        self.arguments = [argument.name for argument in arguments]
        self.tensors = [argument.name for argument in arguments if "Tensor" in str(argument.type)]
        self.options = self.arguments[len(self.tensors) :]
        self.outputs = outputs
        _backends[name] = {}
        self._define(schema)

    def __call__(self, *arguments: Any) -> Tensor:
        """The result alone; tensors are positional, then the options in the schema's order."""
        outputs = self.forward(*arguments, chosen(self.name))
        return cast(Tensor, outputs[0] if self.outputs > 1 else outputs)

    def _define(self, schema: str) -> None:
        count = {1: "Tensor"}
        returns = count.get(self.outputs, "(" + ", ".join(["Tensor"] * self.outputs) + ")")
        given = count.get(len(self.grads), "(" + ", ".join(["Tensor"] * len(self.grads)) + ")")
        saved = ", ".join(f"Tensor saved_{i}" for i in range(self.outputs))
        tag = (torch.Tag.pt2_compliant_tag,)
        _library.define(f"{self.name}({schema}, str backend) -> {returns}", tags=tag)
        _library.define(f"{self.name}_backward(Tensor grad, {saved}, {schema}, str backend) -> {given}", tags=tag)
        _library.impl(self.name, self._run_forward, "CompositeExplicitAutograd")
        _library.impl(f"{self.name}_backward", self._run_backward, "CompositeExplicitAutograd")
        qualified = f"gem::{self.name}"
        torch.library.register_fake(qualified, self._fake_forward, lib=_library)
        torch.library.register_fake(f"{qualified}_backward", self._fake_backward, lib=_library)
        torch.library.register_autograd(qualified, self._autograd, setup_context=self._setup, lib=_library)
        torch.library.register_autograd(f"{qualified}_backward", self._second, lib=_library)
        self.forward = getattr(torch.ops.gem, self.name).default
        self.backward = getattr(torch.ops.gem, f"{self.name}_backward").default

    def _spec(self, values: tuple[Any, ...]) -> OpSpec:
        tensors = {n: t for n, t in zip(self.tensors, values, strict=False) if t is not None}
        return OpSpec(
            op=self.name,
            shapes={n: tuple(t.shape) for n, t in tensors.items()},
            dtypes={n: t.dtype for n, t in tensors.items()},
            device=values[0].device,
            options=dict(zip(self.options, values[len(self.tensors) :], strict=True)),
        )

    def _run_forward(self, *values: Any) -> Any:
        *arguments, forced = values
        self.check(*arguments)
        spec = self._spec(tuple(arguments))
        backend = resolve(spec, forced)
        with _no_autocast(spec.device.type):
            return _plain(backend.forward(*arguments[: len(self.tensors)], **spec.options))

    def _run_backward(self, grad: Tensor, *values: Any) -> Any:
        saved, arguments, forced = values[: self.outputs], values[self.outputs : -1], values[-1]
        spec = self._spec(arguments)
        backend = resolve(spec, forced)
        with _no_autocast(spec.device.type):
            return _plain(backend.backward(Saved(arguments[: len(self.tensors)], saved), grad, **spec.options))

    def _fake_forward(self, *values: Any) -> Any:
        return _plain(self.fake(*values[:-1]))

    def _fake_backward(self, grad: Tensor, *values: Any) -> Any:
        named = dict(zip(self.tensors, values[self.outputs :], strict=False))
        return _plain(tuple(named[n].new_empty(named[n].shape) for n in self.grads))

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if self.outputs > 1 else (output,)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*outputs, *inputs[: len(self.tensors)])
        ctx.rest = inputs[len(self.tensors) :]

    def _autograd(self, ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (len(self.arguments) + 1)
        grads = self.backward(grad, *ctx.saved_tensors, *ctx.rest)
        by_name = dict(zip(self.grads, grads if len(self.grads) > 1 else (grads,), strict=True))
        return (*(by_name.get(name) for name in self.arguments), None)

    def _second(self, ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{self.name} has no second derivative: call backward without create_graph=True")


def _no_autocast(kind: str) -> AbstractContextManager[Any]:
    """The public functions have applied autocast already; inside a backend it would change types once more."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _plain(outputs: tuple[Tensor, ...]) -> Any:
    """Contiguous, as the fake outputs say; one output is returned bare, as its schema says."""
    result = tuple(t.contiguous() for t in outputs)
    return result if len(result) > 1 else result[0]
