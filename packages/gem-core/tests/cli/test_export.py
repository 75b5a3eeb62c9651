"""`gem export` and `gem_core.export`: what is written, how it is proved, and what it needs to be loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from gem_core.cli import main
from gem_core.data.batch import Batch
from gem_core.errors import ConfigError, DataError
from gem_core.export import export, load, write
from gem_core.export.parity import Parity, samples
from gem_core.train import predict, restore

pytestmark = pytest.mark.slow

RUN = "runs/small"
STEP = "step-00000003"


@pytest.fixture(scope="module")
def folder(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log, a run, and its export in "out"."""
    folder = tmp_path_factory.mktemp("exported")
    shutil.copytree(run_folder, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        formats = ["--format", "torch-export", "--format", "safetensors"]
        arguments = ["export", RUN, "data.workers=1", "--to", "out", *formats]  # batches as reader processes send them
        assert main(arguments) == 0
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def batches(**options: Any) -> list[Batch]:
    parts = restore(RUN, **options)
    return [batch for batch, _ in parts.batches("test")]


def test_the_folder_says_what_it_holds(here: Path) -> None:
    manifest = json.loads(Path("out/manifest.json").read_text())
    names = {"program.pt2", "weights.safetensors", "schema.json", "recipe.yaml"}
    assert manifest["files"].keys() == names
    assert {file.name for file in Path("out").iterdir()} == names | {"manifest.json"}
    assert manifest["versions"]["torch"] == torch.__version__ and manifest["step"] == 3
    inputs = {each["name"]: (each["dtype"], each["shape"]) for each in manifest["inputs"]}
    assert inputs["dense"] == ("float32", ["rows", 1])
    assert inputs["events.click.offsets"] == ("int64", ["requests + 1"])
    assert inputs["events.click.ad.values"] == ("int64", ["events.click"])
    outputs = [each["name"] for each in manifest["outputs"]]
    assert outputs == ["logits.click", "logits.buy", "probabilities.click", "probabilities.buy"]
    compared = manifest["parity"]["torch-export"]
    assert {(b["rows"], b["events"]) for b in compared} >= {(1, 0)}
    assert len({b["rows"] for b in compared}) >= 3 and max(b["events"] for b in compared) > 0
    assert all(b["logits"] <= 1e-5 and b["probabilities"] <= 1e-5 for b in compared)


def test_a_loaded_program_predicts_as_the_run_does(here: Path) -> None:
    exported = load("out")
    assert exported.form == "torch-export" and exported.device == torch.device("cpu")
    predict(RUN, "predicted.parquet")
    wanted = pyarrow.parquet.read_table("predicted.parquet")
    scores = [exported(batch)["probabilities"] for batch in batches()]
    for task in ("click", "buy"):
        found = torch.cat([each[task] for each in scores])
        torch.testing.assert_close(found, torch.tensor(wanted[task].to_pylist()), rtol=1e-5, atol=1e-6)


def test_a_request_of_a_server_is_encoded_by_the_exported_schema(here: Path) -> None:
    exported = load("out")
    row = {"user": "u1", "time": 2000, "place": "feed", "price": 1.5, "age": 21, "ad": "a1", "category": "c1"}
    past = {"click.time": [1000, 1500], "click.ad": ["a1", "a2"], "click.category": ["c1", "c0"]}
    scores = exported(exported.schema.encode([{**row, **past}, {**row, **past, "ad": "never seen"}]))
    assert scores["probabilities"]["click"].shape == (2,)
    batch = exported.schema.encode([{**row, **past}])
    wrong = batch.map(lambda t: t + 1000 if t.dtype == torch.int64 and t is batch.ids["ad"].values else t)
    with pytest.raises(RuntimeError, match="feature ad: an id is outside"):
        exported(wrong)


def test_loading_needs_gem_core_ops_alone(here: Path) -> None:
    tensors = load("out").signature.tensors(batches()[0])
    torch.save(tensors, "tensors.pt")
    code = (
        "import sys, torch, gem_core.ops\n"
        "program = torch.export.load('out/program.pt2').module()\n"
        "print(sorted(program(torch.load('tensors.pt'))['probabilities']))\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'pydantic', 'pyarrow', 'yaml', 'pluggy', 'click'}))\n"
        "print([m for m in sys.modules if m.startswith('gem_core.') and not m.startswith(('gem_core.ops', 'gem_core.errors'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['buy', 'click']", "[]", "[]"]


def test_weights_have_the_names_of_the_model_and_its_tables(here: Path) -> None:
    parts, weights = restore(RUN), load_file("out/weights.safetensors")
    dense = dict(parts.model.state_dict())
    tables = {name for name in parts.embedding.state() if name.endswith(".weight")}
    assert weights.keys() == dense.keys() | tables and tables
    assert torch.equal(weights["heads.surface_bias"], dense["heads.surface_bias"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler and there is no g++")
def test_aoti(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"{RUN}/checkpoints/{STEP}", "--format", "aoti", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["folder"] == f"{RUN}/export/{STEP}" and "program.aoti.pt2" in written["files"]
    assert max(each["logits"] for each in written["parity"]["aoti"]) <= 1e-4
    with pytest.raises(ConfigError, match='format "torch-export" is not in this export; there is: aoti'):
        load(written["folder"], "torch-export")
    exported, batch = load(written["folder"]), batches()[0]
    assert exported.form == "aoti"
    torch.testing.assert_close(exported(batch), load("out")(batch), rtol=1e-4, atol=1e-4)


# ---- what fails ----------------------------------------------------------------------------------------------------


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    capsys.readouterr()
    assert main(["export", *arguments]) == code
    assert not Path("bad").exists() and not Path(".bad").exists()
    return capsys.readouterr().err


def test_wrong_use(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "out is already there" in fails(capsys, RUN, "--to", "out", code=2)
    assert "neither a checkpoint nor a run" in fails(capsys, "nowhere", "--to", "bad", code=2)
    with pytest.raises(ConfigError, match='no format "onnx"; valid: aoti, safetensors, torch-export'):
        export(RUN, "bad", ["onnx"])
    with pytest.raises(ConfigError, match="no format was asked for"):
        export(RUN, "bad", [])
    monkeypatch.setattr(write.importlib.util, "find_spec", lambda name: None)
    assert 'pip install "gem-core[safetensors]"' in fails(capsys, RUN, "--to", "bad", "--format", "safetensors", code=2)


def test_no_compiler(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none() -> str:
        raise RuntimeError("no working compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert "needs a C++ compiler and none was found" in fails(capsys, RUN, "--to", "bad", "--format", "aoti", code=2)


Change = Callable[[list[dict[str, dict[str, torch.Tensor]]]], None]


def shift(scores: list[Any]) -> None:
    scores[0]["logits"]["click"] += 0.01


def poison(scores: list[Any]) -> None:
    scores[-1]["probabilities"]["buy"][0] = float("nan")


def lose(scores: list[Any]) -> None:
    del scores[1]["logits"]["buy"]


def shorten(scores: list[Any]) -> None:
    scores[0]["logits"]["buy"] = scores[0]["logits"]["buy"][:-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shift, "differs from the model by 0.01 on a batch of"),
        (poison, "differs from the model by nan on a batch of 1 rows, 1 requests and 0 events"),
        (
            lose,
            "gives ['logits.click', 'probabilities.click', 'probabilities.buy'], the model ['logits.click', 'logits.buy'",
        ),
        (shorten, "logits.buy: the torch-export program gives shape"),
    ],
)
def test_a_program_that_differs_is_not_kept(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: Change, said: str
) -> None:
    real = write.in_fresh_process

    def altered(form: str, file: Path, inputs: Any) -> dict[str, Any]:
        result = real(form, Path("out/program.pt2"), inputs)
        change(result["scores"])
        return result

    # What is at stake is what follows from a difference: the program is that of the module's fixture.
    monkeypatch.setattr(write, "trace", lambda *_: None)
    monkeypatch.setattr(write, "_save", lambda exported, form, file: file.write_bytes(b"a program"))
    monkeypatch.setattr(write, "in_fresh_process", altered)
    assert said in fails(capsys, RUN, "--to", "bad", code=1)


def test_a_program_that_does_not_load_is_not_kept(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "trace", lambda *_: None)
    monkeypatch.setattr(write, "_save", lambda exported, form, file: file.write_bytes(b"a program"))
    assert "the torch-export program fails in a process of its own: " in fails(capsys, RUN, "--to", "bad", code=1)


def test_a_folder_that_cannot_be_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("")
    assert "expected a folder, found a file there" in fails(
        capsys, RUN, "--to", "file/out", "--format", "safetensors", code=1
    )


def test_what_was_altered_is_refused(here: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no export there"):
        load("nowhere")
    copy = tmp_path / "copy"
    shutil.copytree("out", copy)
    with (copy / "program.pt2").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"program\.pt2 is missing or was altered"):
        load(copy)
    with pytest.raises(ConfigError, match='format "aoti" is not in this export; there is: torch-export'):
        load(copy, "aoti")
    (copy / "manifest.json").write_text('{"export_format": 9}')
    with pytest.raises(ConfigError, match="not that of an export of format 1"):
        load(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        load(copy)


def test_another_torch_is_warned_of(here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree("out", tmp_path / "copy")
    file = tmp_path / "copy" / "manifest.json"
    file.write_text(file.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.0.0"'))
    load(tmp_path / "copy")
    assert "was exported with torch 2.0.0" in caplog.text


def test_samples_need_a_row() -> None:
    with pytest.raises(DataError, match="no row to compare"):
        samples([])


def test_the_worst_batch_is_named() -> None:
    write._check_parity("aoti", [Parity(3, 2, 1, 1e-5, 1e-6)], 1e-4)
