"""An exported model, loaded: batches in, logits and probabilities out, without the model's code, recipe or plugins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_core.data.batch import Batch
from gem_core.errors import ConfigError, DataError, looked_for, warn
from gem_core.export import fresh
from gem_core.export.program import Scores
from gem_core.export.signature import Signature
from gem_core.schema import Schema
from gem_core.train.checkpoint import MANIFEST, digest

FORMAT = 1
"""Of the manifest."""


class Exported:
    """A callable: `Batch` (encoded by `schema`, on `device`) -> `Scores`.

    Attributes:
        schema: fitted; `schema.encode(records)` makes batches.
        manifest: what manifest.json says.
        form: "torch-export" or "aoti".
    """

    def __init__(
        self, schema: Schema, manifest: dict[str, Any], form: str, run: Callable[[dict[str, Tensor]], Scores]
    ) -> None:
        self.schema, self.manifest, self.form = schema, manifest, form
        self.signature = Signature(schema)
        self._run = run

    @property
    def device(self) -> torch.device:
        """Where the program computes."""
        return torch.device(self.manifest["device"])

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Scores:
        """{"logits": {task: (B,)}, "probabilities": {task: (B,)}}.

        Raises:
            DataError: the batch is not of this schema; names the input.
            RuntimeError: an id outside its table.
        """
        return self._run(self.signature.tensors(batch))


def load(path: str | Path, form: str | None = None) -> Exported:
    """The program of an export's folder, its files verified.

    Args:
        form: "torch-export" or "aoti"; by default the faster one of those that are there.

    Raises:
        ConfigError: no export there, or not of that format.
        DataError: a file is missing or was altered.
    """
    folder = Path(path)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except OSError as error:
        raise ConfigError(f"{folder}: no export there: {MANIFEST}: {error.strerror}{looked_for(folder)}") from error
    except ValueError as error:
        raise DataError(f"{folder}: {MANIFEST} is not JSON: export again") from error
    if not isinstance(manifest, dict) or manifest.get("export_format") != FORMAT:
        raise ConfigError(
            f"{folder}: {MANIFEST} is not that of an export of format {FORMAT}, which this gem-core reads"
        )
    files = manifest["files"]
    there = [each for each in ("aoti", "torch-export") if fresh.FILES[each] in files]
    chosen = form if form is not None or not there else there[0]
    if chosen is None or chosen not in there:
        what = "a program" if form is None else f'format "{form}"'
        raise ConfigError(f"{folder}: {what} is not in this export; there is: {', '.join(there) or 'none to run'}")
    for name in (fresh.FILES[chosen], "schema.json"):
        file = folder / name
        if not file.is_file() or digest(file) != files[name]["sha256"]:
            raise DataError(
                f"{folder}: {name} is missing or was altered (its SHA-256 differs): copy or export it again"
            )
    if manifest["versions"]["torch"] != torch.__version__:
        warn(f"{folder} was exported with torch {manifest['versions']['torch']}, this is {torch.__version__}")
    run = fresh.program(chosen, str(folder / fresh.FILES[chosen]))
    return Exported(Schema.load(folder / "schema.json"), manifest, chosen, run)
