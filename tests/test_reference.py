"""The reference pages are what tools/reference.py makes of today's models."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools/reference.py"
spec = importlib.util.spec_from_file_location("reference", TOOL)
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


@pytest.mark.parametrize("name", reference.PAGES)
def test_page_is_in_step(name: str) -> None:
    assert (reference.FOLDER / name).read_text() == reference.PAGES[name](), "run python tools/reference.py"


def test_pages_say_what_may_be_written() -> None:
    schema, recipe = (reference.PAGES[name]() for name in ("schema.md", "recipe.md"))
    assert '| `level` | "row" or "request" | `"row"` |' in schema and "## Fitted" not in schema
    assert "| `workers` | integer, >= 0, <= 64 | `1` |" in recipe
    assert "### reader `csv`" in recipe and "### FeatureConfig" in recipe and recipe.count("### Split") == 1
