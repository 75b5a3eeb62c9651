from pathlib import Path

import journey_source
import pyarrow as pa
import pytest

from gem_core.data.completejourney import prepare


@pytest.fixture(scope="session")
def content() -> dict[str, pa.Table]:
    """Tables of a tiny source."""
    return journey_source.tables()


@pytest.fixture(scope="session")
def source(content: dict[str, pa.Table], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of them."""
    return journey_source.write(tmp_path_factory.mktemp("source"), content)


@pytest.fixture(scope="session")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, prepared."""
    return prepare(tmp_path_factory.mktemp("cache"), source=source)
