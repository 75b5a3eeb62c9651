"""Memory that is not enough: one message in place of an allocator's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gem_core.errors import GemError


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raise a GemError where an allocation within fails, of the processor's memory or a GPU's."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error).splitlines()[0] if str(error) else "an allocation failed"
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in said:
            raise
        raise GemError(
            f"out of memory: {said.rpartition('] ')[2]}. Make the model or its tables smaller (dim, layers; a feature's "
            "hash or max_vocabulary), or lower data.batch_rows; gem train RECIPE --summary counts what the model holds"
        ) from error
