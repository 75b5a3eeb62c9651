"""Sphinx configuration; `nox -s docs` builds with warnings as errors."""

import tomllib
from pathlib import Path

project = "GEM"
author = "The GEM authors"
copyright = "The GEM authors"
release = tomllib.loads((Path(__file__).parent.parent / "packages/gem-core/pyproject.toml").read_text())["project"][
    "version"
]

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_static_path = ["_static"]
exclude_patterns = ["_build"]
