"""`export`: write a run's model in formats that need none of its code, and prove each against the model itself.

    <run>/export/step-00000123/
        program.pt2               torch.export: model and tables as one graph
        program.aoti.pt2          the same, compiled by AOTInductor for this kind of processor
        weights.safetensors       parameters, buffers and "tables.<name>.weight"
        schema.json recipe.yaml   fitted schema, resolved recipe
        manifest.json             versions, inputs, outputs, parity, size and SHA-256 of every file

The folder is written under a hidden name and renamed when everything in it has been loaded again and found equal.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from gem_core import __version__, ops
from gem_core.errors import ConfigError, GemError, nearest
from gem_core.export import fresh
from gem_core.export.exported import FORMAT
from gem_core.export.parity import Parity, compare, expected, in_fresh_process, samples
from gem_core.export.program import any_size, program_of, trace
from gem_core.export.signature import Signature
from gem_core.plugins import Registry
from gem_core.train.build import Parts, restore
from gem_core.train.checkpoint import MANIFEST, Checkpoint, digest, find, flush
from gem_core.train.folder import unwritable
from gem_core.train.memory import enough_memory

WEIGHTS = "weights.safetensors"
FORMATS = (*fresh.FILES, "safetensors")
TOLERANCE = 1e-4
"""Of logits and probabilities, absolute: float32 differs by the order of its sums."""


@dataclass(frozen=True)
class Written:
    """What was exported: the folder, bytes by file, parity by format of a program, batch by batch."""

    folder: Path
    files: dict[str, int]
    parity: dict[str, list[Parity]]


@enough_memory()
def export(
    run: str | Path,
    to: str | Path | None = None,
    formats: Sequence[str] = ("torch-export",),
    overrides: Sequence[str] = (),
    registry: Registry | None = None,
    reader: Mapping[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> Written:
    """Export a run's model; each program is loaded in a fresh process and compared with the model on real batches.

    Args:
        run: a run's folder (its best checkpoint, else its newest) or a checkpoint's.
        to: a folder that is not there yet; by default "export/<step>" in the run's folder.
        formats: of `FORMATS`.
        overrides: `key.path=value` changes to the checkpoint's recipe.
        reader: in place of the recipe's `data.reader`; the batches to compare on come from its test split, else from
            its validation or training split.
        tolerance: largest absolute difference of a logit or probability.

    Raises:
        ConfigError: no checkpoint there, an unknown format, a folder that is there already, no C++ compiler for "aoti",
            no safetensors.
        GemError: the model cannot be traced, or what was written differs from it; nothing is left behind.
    """
    _check_formats(formats)
    checkpoint = find(run)
    step = checkpoint.path.name
    target = checkpoint.path.parent.parent / "export" / step if to is None else Path(to)
    if target.exists():
        raise ConfigError(f"{target} is already there: delete it, or export to another folder")
    parts = restore(checkpoint.path, registry, overrides, reader)
    batches = _samples(parts)
    wanted = [expected(parts, batch) for batch in batches]
    # The process that loads a program chooses the backends of its ops; only those of a precision are part of the model.
    variants = {op: parts.precision.op_variant(op) for op in ops.registered()}
    ops.set_backends({op: name for op, name in variants.items() if name is not None})
    signature = Signature(parts.schema)
    inputs = [signature.tensors(batch) for batch in batches]
    with _folder(target) as hidden:
        parity: dict[str, list[Parity]] = {}
        programs = [form for form in fresh.FILES if form in formats]
        if programs:
            exported = trace(program_of(parts), signature, parts.strategy.device, parts.recipe.model.name)
        for form in programs:
            file = hidden / fresh.FILES[form]
            _save(exported, form, file)
            found = in_fresh_process(form, file, inputs)["scores"]
            parity[form] = compare(form, batches, wanted, found)
            _check_parity(form, parity[form], tolerance)
        if "safetensors" in formats:
            _save_weights(parts, hidden / WEIGHTS)
        (hidden / "recipe.yaml").write_text(parts.recipe.to_yaml())
        parts.schema.save(hidden / "schema.json")
        manifest = _manifest(checkpoint, parts, signature, wanted[0], parity, tolerance, hidden)
        (hidden / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return Written(target, {f.name: f.stat().st_size for f in sorted(target.iterdir())}, parity)


def _check_formats(formats: Sequence[str]) -> None:
    for form in formats:
        if form not in FORMATS:
            raise ConfigError(f'export: there is no format "{form}"{nearest(form, FORMATS)}')
    if not formats:
        raise ConfigError(f"export: no format was asked for; valid: {', '.join(FORMATS)}")
    if "safetensors" in formats and importlib.util.find_spec("safetensors") is None:
        raise ConfigError('export: format "safetensors" needs the package: pip install "gem-core[safetensors]"')
    if "aoti" in formats:
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise ConfigError(
                'export: format "aoti" needs a C++ compiler and none was found: install g++ or clang++, or name one by '
                "the environment variable CXX"
            ) from error


def _samples(parts: Parts) -> list[Any]:
    splits = parts.reader.splits()
    split = next(s for s in ("test", "validation", "train") if s in splits)
    with closing(parts.batches(split)) as stream:
        return samples(batch for batch, _ in stream)


@contextmanager
def _folder(target: Path) -> Iterator[Path]:
    """A hidden folder, renamed to `target` when all went well, else deleted."""
    hidden = target.with_name(f".{target.name}")
    try:
        shutil.rmtree(hidden, ignore_errors=True)  # left by an export that was killed
        hidden.mkdir(parents=True)
        yield hidden
        for file in hidden.iterdir():
            flush(file)
        flush(hidden)
        hidden.rename(target)
    except OSError as error:
        raise GemError(unwritable(f"export {target}", error)) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _save(exported: ExportedProgram, form: str, file: Path) -> None:
    if form == "torch-export":
        torch.export.save(exported, file)
        return
    try:
        with any_size():
            torch._inductor.aoti_compile_and_package(exported, package_path=str(file))
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise GemError(f"export: AOTInductor failed: {type(error).__name__}: {said} (--debug shows all)") from error


def _save_weights(parts: Parts, file: Path) -> None:
    """Write the weights; raises GemError if the file does not hold them."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    tables = {name: t for name, t in parts.embedding.state().items() if name.endswith(".weight")}
    weights = {name: t.detach().contiguous().cpu() for name, t in (parts.strategy.state() | tables).items()}
    save_file(weights, file, {"format": "pt", "gem_core": __version__})
    with safe_open(file, "pt") as written:
        for name, tensor in weights.items():
            if name not in written.keys() or not torch.equal(written.get_tensor(name), tensor):  # noqa: SIM118
                raise GemError(f'export: {WEIGHTS}: "{name}" was not written as it is')


def _check_parity(form: str, parity: Sequence[Parity], tolerance: float) -> None:
    for each in parity:
        largest = max(each.logits, each.probabilities, key=lambda x: (x != x, x))
        if not largest <= tolerance:
            raise GemError(
                f"export: the {form} program differs from the model by {largest:.3g} on a batch of {each.rows} rows, "
                f"{each.requests} requests and {each.events} events (tolerance {tolerance:g}): its forward depends on "
                "something that is no input (a Python value, a row's id); in bf16, where rounding shows, raise the tolerance"
            )


def _manifest(
    checkpoint: Checkpoint,
    parts: Parts,
    signature: Signature,
    scores: Mapping[str, Mapping[str, Tensor]],
    parity: Mapping[str, Sequence[Parity]],
    tolerance: float,
    folder: Path,
) -> dict[str, Any]:
    def dtype(of: torch.dtype) -> str:
        return str(of).removeprefix("torch.")

    return {
        "export_format": FORMAT,
        "step": checkpoint.step,
        "model": parts.recipe.model.name,
        "precision": parts.recipe.precision.name,
        "device": str(parts.strategy.device),
        "versions": {"gem_core": __version__, "torch": torch.__version__},
        "inputs": [{"name": i.name, "dtype": dtype(i.dtype), "shape": i.dims()} for i in signature.inputs],
        "outputs": [
            {"name": f"{kind}.{task}", "dtype": dtype(value.dtype), "shape": ["rows"]}
            for kind, tasks in scores.items()
            for task, value in tasks.items()
        ],
        "tolerance": tolerance,
        "parity": {form: [asdict(each) for each in batches] for form, batches in parity.items()},
        "files": {f.name: {"bytes": f.stat().st_size, "sha256": digest(f)} for f in sorted(folder.iterdir())},
    }
