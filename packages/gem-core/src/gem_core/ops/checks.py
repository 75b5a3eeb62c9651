"""Validation of the ops' arguments, in one place, before any backend sees them. Messages name argument, expected, found."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.errors import DataError

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def values(op: str, like: Tensor, **tensors: Tensor) -> None:
    """Values have a float type, and one type and device with `like`, the op's first argument."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise DataError(f"{op}: {name}: expected a float type, found {tensor.dtype}")
        if tensor.dtype != like.dtype:
            raise DataError(f"{op}: {name}: expected {like.dtype} as the first argument, found {tensor.dtype}")
        if tensor.device != like.device:
            raise DataError(f"{op}: {name}: expected device {like.device} as the first argument, found {tensor.device}")


def shape(op: str, name: str, tensor: Tensor, *expected: int | str) -> None:
    """The shape is `expected`, where a word stands for any size."""
    fits = tensor.dim() == len(expected) and all(
        isinstance(e, str) or e == n for e, n in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(e) for e in expected)
        raise DataError(f"{op}: {name}: expected shape ({wanted}), found {tuple(tensor.shape)}")


def offsets(op: str, name: str, tensor: Tensor, rows: int, max_length: int, like: Tensor) -> None:
    """Offsets start at 0, never fall, end at the number of rows, and no length is above the declared maximum."""
    integers(op, name, tensor, like)
    if tensor.dim() != 1 or tensor.numel() == 0:
        raise DataError(f"{op}: {name}: expected shape (B + 1), found {tuple(tensor.shape)}")
    if tensor.device.type != "cpu":
        lengths = tensor.diff()
        fine = (tensor[0] == 0) & (tensor[-1] == rows) & (lengths >= 0).all() & (lengths <= max_length).all()
        torch._assert_async(fine, f"{op}: {name}: not offsets of {rows} rows with lengths of 0 to {max_length}")
        return
    first, last = int(tensor[0]), int(tensor[-1])
    if first != 0 or last != rows:
        raise DataError(
            f"{op}: {name}: expected the first to be 0 and the last {rows} (the rows), found {first} and {last}"
        )
    if tensor.numel() == 1:
        return
    lengths = tensor.diff()
    low, high = (int(t) for t in torch.aminmax(lengths))
    if low < 0:
        raise DataError(
            f"{op}: {name}: expected offsets that never fall, found a step of {low} at {int(lengths.argmin())}"
        )
    if high > max_length:
        raise DataError(
            f"{op}: {name}: sequence {int(lengths.argmax())} has length {high}, above the declared maximum {max_length}"
        )


def index(op: str, name: str, tensor: Tensor, size: int, below: int, like: Tensor) -> None:
    """An int64 index of `size` numbers in [0, below)."""
    integers(op, name, tensor, like)
    shape(op, name, tensor, size)
    if size == 0:
        return
    if tensor.device.type != "cpu":
        torch._assert_async(((tensor >= 0) & (tensor < below)).all(), f"{op}: {name}: not all in [0, {below})")
        return
    low, high = (int(t) for t in torch.aminmax(tensor))
    if low < 0 or high >= below:
        raise DataError(f"{op}: {name}: expected numbers in [0, {below}), found {low} to {high}")


def integers(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    """An int64 tensor on the device of the values."""
    if tensor.dtype != torch.int64:
        raise DataError(f"{op}: {name}: expected torch.int64, found {tensor.dtype}")
    if tensor.device != like.device:
        raise DataError(f"{op}: {name}: expected device {like.device}, found {tensor.device}")
