"""A small generated log."""

from __future__ import annotations

import pytest
from generated_small import SMALL

from gem_core.data.generated import Block, Log


@pytest.fixture(scope="session")
def blocks() -> list[Block]:
    return list(Log(SMALL).blocks())
