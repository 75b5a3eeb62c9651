"""A trained model and its tables as one module over plain tensors, and its trace by torch.export."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental import _config

from gem_core import ops
from gem_core.data.batch import Jagged
from gem_core.errors import GemError
from gem_core.export.signature import Signature
from gem_core.protocols import Precision, Table
from gem_core.train.build import Parts, create
from gem_core.train.calibration import Calibrator
from gem_core.train.precision import apply

Scores = dict[str, dict[str, Tensor]]
"""{"logits": {task: (B,) float32}, "probabilities": {task: (B,) float32}}."""


class Tables(nn.Module):
    """An embedding that only looks up, in weights that are parameters of the exported module."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._state = state
        self._of: dict[str, tuple[Table, int]] = {}
        self.weights = nn.ParameterList()

    def setup(self, tables: Sequence[Table], mesh: None = None, plan: None = None) -> None:
        """Take over the trained weights; they share their memory."""
        for table in tables:
            self._of |= dict.fromkeys(table.features, (table, len(self.weights)))
            self.weights.append(nn.Parameter(self._state[f"tables.{table.name}.weight"], requires_grad=False))

    def lookup(self, ids: Mapping[str, Tensor | Jagged]) -> dict[str, Tensor]:
        """As `Embedding.lookup`; an id outside its table ends the call with a RuntimeError that says so."""
        out = {}
        for feature, value in ids.items():
            table, index = self._of[feature]
            flat = value.values if isinstance(value, Jagged) else value
            said = (
                f"feature {feature}: an id is outside table {table.name} (valid: 0..{table.rows - 1}); "
                "encode the data with the schema that was exported"
            )
            # AOTInductor puts the message between quotes of C++ as it is.
            said = re.sub(r'["\\\x00-\x1f]', "?", said)
            torch._assert_async(((flat >= 0) & (flat < table.rows)).all(), said)
            rows = self.weights[index].index_select(0, flat)
            if isinstance(value, Jagged):
                pool = ops.segment_sum if table.pooling == "sum" else ops.segment_mean
                rows = pool(rows, value.offsets)
            out[feature] = rows
        return out


class Program(nn.Module):
    """Tensors by name (see `Signature`) -> `Scores`, in the precision of the run and calibrated as in the run."""

    def __init__(
        self,
        model: nn.Module,
        tables: Tables,
        signature: Signature,
        precision: Precision,
        calibrator: Calibrator | None = None,
    ) -> None:
        super().__init__()
        self.model, self.tables = model, tables
        self._signature, self._precision, self._calibrator = signature, precision, calibrator

    def forward(self, inputs: dict[str, Tensor]) -> Scores:
        batch = self._signature.batch(inputs)
        with self._precision.autocast(inputs["request"].device):
            logits = self.model(batch).logits
        if self._calibrator is not None:
            logits = self._calibrator(logits, batch.surface)
        logits = {task: logit.float() for task, logit in logits.items()}
        return {"logits": logits, "probabilities": {task: logit.sigmoid() for task, logit in logits.items()}}


def program_of(parts: Parts) -> Program:
    """The exportable form of a restored run's model; parameters and tables share their memory with it."""
    tables = Tables(parts.embedding.state())
    with parts.strategy.device:
        model: nn.Module = create(
            parts.registry, "model", parts.recipe.model, "model", schema=parts.schema, embedding=tables
        )
    apply(parts.precision, model).load_state_dict(parts.strategy.state(), assign=True)
    program = Program(model, tables, Signature(parts.schema), parts.precision, parts.calibrator)
    return program.eval().requires_grad_(False)


def any_size() -> AbstractContextManager[object]:
    """Sizes are symbols from 0 on; else torch makes one row, or no events, another graph, and compiles for 2 and more."""
    out: AbstractContextManager[object] = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return out


def trace(program: Program, signature: Signature, device: torch.device, model: str) -> ExportedProgram:
    """The program as a graph, for any number of rows, requests and events.

    Raises:
        GemError: the model computes something that depends on its data in a way that no graph can hold.
    """
    try:
        with torch.no_grad(), any_size():
            return torch.export.export(
                program, (signature.example(device),), dynamic_shapes=(signature.dynamic_shapes(),), strict=False
            )
    except Exception as error:
        said = " ".join(str(error).partition("The error above")[0].split())
        raise GemError(
            f'model "{model}" cannot be exported: {type(error).__name__}: {said}; its forward must hold no Python branch on '
            "values or on whether a size is 0 or 1 (--debug shows where)"
        ) from error
