"""The installed plugin is found by its entry point, and a recipe that names its parts really runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from gem_plugin_example.backend import SegmentSeedAttention
from gem_plugin_example.generate import generate
from gem_plugin_example.model import TwoLayer
from gem_plugin_example.reader import JsonLinesReader
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core import ops
from gem_core.cli import main
from gem_core.plugins import default_registry

RECIPE = Path(__file__).parent.parent / "example.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the recipe and its log."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(RECIPE, tmp_path)
    generate(tmp_path / "clicks.jsonl")
    return tmp_path


def test_installed_and_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json", "--strict-plugins"]) == 0
    listed = json.loads(capsys.readouterr().out)["components"]
    ours = {(c["kind"], c["name"]) for c in listed if c["plugin"] == "example"}
    assert ours == {("reader", "json-lines"), ("model", "two-layer"), ("op", "seed_attention:example")}
    plugin = next(p for p in default_registry().plugins if p.name == "example")
    assert plugin.distribution == "gem-plugin-example"


def test_recipe_uses_every_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = dict.fromkeys(["reader", "model", "forward", "backward"], 0)

    def counted(name: str, owner: type, method: str) -> None:
        original = getattr(owner, method)

        def wrapper(*arguments: object, **options: object) -> object:
            calls[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, wrapper)

    counted("reader", JsonLinesReader, "row_tables")
    counted("model", TwoLayer, "forward")
    counted("forward", SegmentSeedAttention, "forward")
    counted("backward", SegmentSeedAttention, "backward")

    assert main(["train", "example.yaml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "finished"
    assert calls["reader"] >= 3, "train, validation, test"
    assert calls["model"] == calls["forward"] > result["step"]
    assert calls["backward"] == result["step"]
    assert result["test"]["click/auc"] > 0.65 and result["test"]["click/ne"] < 0.97, "it learns what the log holds"

    assert main(["eval", "runs/example", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(result["test"])
    assert main(["predict", "runs/example", "--rows", "clicks.jsonl", "--out", "scores.csv"]) == 0
    assert len((folder / "scores.csv").read_text().splitlines()) == 1 + len(
        (folder / "clicks.jsonl").read_text().splitlines()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["model.hiden=3"],
            'override "model.hiden=3": unknown key "model.hiden" of model "two-layer"; did you mean "hidden"?',
        ),
        (["data.reader.rows=none.jsonl"], "none.jsonl: cannot be read as JSON lines"),
        (
            ["model.hidden=0"],
            'override "model.hidden=0": model.hidden: expected a value greater than or equal to 1, found 0',
        ),
        (["precision=bf16"], 'backend "example" is forced but cannot run this call: expects float32 or float64'),
    ],
)
def test_mistakes_are_one_message(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "example.yaml", *arguments]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_broken_line_names_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "clicks.jsonl").open("a") as file:
        file.write('{"user": \n')
    assert main(["train", "example.yaml"]) == 1
    assert "error: clicks.jsonl: cannot be read as JSON lines: JSON parse error" in capsys.readouterr().err


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6), max_size=6), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**31))
def test_backend_equals_the_reference(lengths: list[int], seeds: int, heads: int, seed: int) -> None:
    default_registry().install_ops()
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    events = int(offsets[-1])
    q, k, v = (
        torch.randn(n, heads, 4, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (seeds, events, events)
    )
    grad = torch.randn(len(lengths), seeds, heads, 4, dtype=torch.float64, generator=generator)
    found = {}
    for backend in ("reference", "example"):
        with ops.use_backend({"seed_attention": backend}):
            out = ops.seed_attention(q, k, v, offsets, 6, scale=0.7)
            found[backend] = (out, *torch.autograd.grad(out, (q, k, v), grad))
    for ours, truth in zip(found["example"], found["reference"], strict=True):
        torch.testing.assert_close(ours, truth)
