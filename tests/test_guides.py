"""The guides do what they say: each block of docs/guides/*.md is carried out in order, in an empty folder.

A `bash` block is run by bash, a `python` block by Python; a block of any language after the line
`<!-- file: NAME -->` is written to NAME. The first command that fails fails the test. A `text` block is the output of the
command before it, with "..." for whatever may differ and any white space for any other.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

GUIDES = sorted((Path(__file__).parent.parent / "docs/guides").glob("*.md"))
BLOCK = re.compile(r"(?:^<!-- file: (\S+) -->\n+)?^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: the file that it is written to, or empty; its language; its text."""

    file: str
    language: str
    text: str


def blocks(markdown: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(markdown)]


def test_blocks_are_found_with_their_files() -> None:
    text = "Text.\n\n<!-- file: a/b.yaml -->\n```yaml\nx: 1\n```\n\n```bash\nls\n```\n"
    assert blocks(text) == [Block("a/b.yaml", "yaml", "x: 1\n"), Block("", "bash", "ls\n")]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_guide(guide: Path, tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    interpreters = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    same = doctest.OutputChecker().check_output
    ran = 0
    output = ""
    for block in blocks(guide.read_text()):
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text)
        elif block.language in interpreters:
            command = [*interpreters[block.language], block.text]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{block.text}\n--- output ---\n{done.stdout}{done.stderr}"
            ran += 1
            output = done.stdout
        elif block.language == "text":
            expected = block.text.rstrip("\n")
            fits = same(expected, output.rstrip("\n"), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            assert fits, f"expected:\n{expected}\n--- output ---\n{output}"
    assert ran, f"{guide.name} has no block to run"
