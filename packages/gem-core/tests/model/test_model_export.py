"""Models as one graph: torch.compile without graph breaks or recompilation, and export with dynamic rows, requests and events."""

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import make_batch, make_schema, same, stir

from gem_core.data.batch import Batch, Jagged
from gem_core.errors import DataError, GemError
from gem_core.export.program import Program, Tables, trace
from gem_core.export.signature import Signature
from gem_core.plugins import default_registry
from gem_core.protocols import Table
from gem_core.train.embedding import TorchEmbedding
from gem_core.train.precision import BFloat16, Float32

SCHEMA = make_schema()
CPU = torch.device("cpu")
# Little of everything: one layer with every module in it, match counts, and a tower that truncates.
KUNLUN: dict[str, Any] = {"layers": 1, "comp_skip": False, "match_bins": 3, "tower": {"max_events": 9}}
CASES = {name: (name, KUNLUN if name == "kunlun" else {}) for name in default_registry().entries["model"]}
CASES["kunlun, per row"] = ("kunlun", {**KUNLUN, "conditioning": "full", "history": {"click": 5}})


def build(name: str, options: dict[str, Any], precision: Float32 | None = None) -> tuple[torch.nn.Module, Program]:
    """A model over its own embedding, and the exportable form of the same weights."""
    registry = default_registry()
    embedding = TorchEmbedding(TorchEmbedding.Config(), 0)
    torch.manual_seed(0)
    model = stir(registry.create("model", name, options, "model", schema=SCHEMA, embedding=embedding).eval())
    tables = Tables(embedding.state())
    other = registry.create("model", name, options, "model", schema=SCHEMA, embedding=tables)
    other.load_state_dict(model.state_dict(), assign=True)
    precision = precision or Float32(Float32.Config())
    return model, Program(other, tables, Signature(SCHEMA), precision).eval()


def batches() -> list[Batch]:
    """Of many sizes: one row, none, no events at all, full histories."""
    return [
        make_batch(SCHEMA),
        make_batch(SCHEMA, (1, 5, 2, 0, 3), seed=3),
        make_batch(SCHEMA, (2, 2), {"click": [40, 0]}, seed=4),
        make_batch(SCHEMA, (1,), seed=5),
        make_batch(SCHEMA, (1,), {"click": [0], "view": [0]}, seed=6),
        make_batch(SCHEMA, (2, 3), {"click": [0, 0], "view": [0, 0]}, seed=7),
        make_batch(SCHEMA, ()),
    ]


@pytest.mark.slow
def test_one_graph_serves_every_shape() -> None:
    _, program = build("kunlun", KUNLUN)
    signature = Signature(SCHEMA)
    first, *others = (signature.tensors(batch) for batch in batches()[:3])
    for tensor in first.values():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # Inductor's decompositions without its code generation.
    compiled = torch.compile(program, backend="aot_eager_decomp_partition", fullgraph=True)
    same(compiled(first)["logits"], program(first)["logits"])
    with torch.compiler.set_stance("fail_on_recompile"):
        for other in others:
            same(compiled(other)["logits"], program(other)["logits"])
            gradients = []
            for run in (compiled, program):
                program.zero_grad()
                torch.stack([x.square().sum() for x in run(other)["logits"].values()]).sum().backward()
                gradients.append({n: p.grad.clone() for n, p in program.named_parameters() if p.grad is not None})
            assert gradients[0].keys() == gradients[1].keys()
            for name, gradient in gradients[1].items():
                torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_model_exports(case: str) -> None:
    model, program = build(*CASES[case])
    signature = Signature(SCHEMA)
    file = io.BytesIO()
    torch.export.save(trace(program, signature, CPU, case), file)
    exported = torch.export.load(io.BytesIO(file.getvalue())).module()
    with torch.no_grad():
        for batch in batches():
            wanted, found = model(batch).logits, exported(signature.tensors(batch))
            assert found.keys() == {"logits", "probabilities"}
            same(found["logits"], wanted)
            same(found["probabilities"], {task: logit.sigmoid() for task, logit in wanted.items()})
        tensors = signature.tensors(batches()[0])
        for wrong in (-1, 10):
            tensors["ids.ad.values"] = torch.full_like(tensors["ids.ad.values"], wrong)
            with pytest.raises(RuntimeError, match=r"feature ad: an id is outside table ad \(valid: 0\.\.9\)"):
                exported(tensors)


def test_no_name_ends_the_string_that_a_message_is_in_compiled_code() -> None:
    name = 'say "ad"\\'
    tables = Tables({f"tables.{name}.weight": torch.zeros(3, 2)})
    tables.setup([Table(name, rows=3, dim=2, features=(name,))])
    with pytest.raises(RuntimeError, match=r"feature say \?ad\?\?: an id is outside table say \?ad\?\? "):
        tables.lookup({name: torch.tensor([3])})


def test_bf16_is_part_of_the_program() -> None:
    precision = BFloat16(BFloat16.Config())
    model, program = build("dcnv2", {}, precision)
    signature, batch = Signature(SCHEMA), make_batch(SCHEMA)
    exported = trace(program, signature, CPU, "dcnv2").module()
    with torch.no_grad():
        with precision.autocast(CPU):
            wanted = model(batch).logits
        same(exported(signature.tensors(batch))["logits"], wanted, tolerance=1e-3)


class Branching(torch.nn.Module):
    def forward(self, batch: Batch) -> Any:
        if batch.dense.nan_to_num().sum() > 0:
            raise AssertionError
        return batch


def test_a_model_that_cannot_be_traced_is_named() -> None:
    signature = Signature(SCHEMA)
    program = Program(Branching(), Tables({}), signature, Float32(Float32.Config()))
    with pytest.raises(GemError, match=r'model "branching" cannot be exported: .*no Python branch'):
        trace(program, signature, CPU, "branching")


# ---- signature -----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 99))
def test_a_batch_returns_from_its_tensors(rows: list[int], seed: int) -> None:
    batch, signature = make_batch(SCHEMA, rows, seed=seed), Signature(SCHEMA)
    tensors = signature.tensors(batch)
    again = signature.batch(tensors)
    for name, tensor in signature.tensors(again).items():
        assert tensor is tensors[name]
    for event, fields in batch.events.items():
        for name, jagged in fields.items():
            assert torch.equal(again.events[event][name].offsets, jagged.offsets)
            assert again.events[event][name].max_length == jagged.max_length
    for name, jagged in batch.ids.items():
        assert torch.equal(again.ids[name].offsets, jagged.offsets)


def test_what_has_no_columns_is_no_input() -> None:
    schema = make_schema(dense={}, vectors={}, sparse={"ad": {}}, events={})
    signature = Signature(schema)
    assert [each.name for each in signature.inputs] == ["ids.ad.values", "request", "request_time", "surface"]
    again = signature.batch(signature.tensors(make_batch(schema)))
    assert again.dense.shape == (10, 0) and again.request_dense.shape == (4, 0)


def changed(**fields: Any) -> Batch:
    return Batch(**{**vars(make_batch(SCHEMA)), **fields})


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            changed(dense=torch.zeros(10, 3)),
            "\"dense\": expected torch.float32 of shape \\['rows', 2\\] with rows = 10",
        ),
        (changed(surface=torch.zeros(10)), '"surface": expected torch.int64 .*found torch.float32'),
        (changed(surface=torch.tensor(0)), '"surface": .*found torch.int64 of shape \\[\\]'),
        (changed(request_ids={}), 'the batch has no "request_ids.segment.values": no "segment"'),
        (
            changed(
                ids={**make_batch(SCHEMA).ids, "ad": Jagged(torch.zeros(9, dtype=torch.int64), torch.arange(11), 1)}
            ),
            '"ids.ad.values": .*found torch.int64 of shape \\[9\\]',
        ),
    ],
)
def test_a_batch_of_another_schema_is_refused(batch: Batch, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Signature(SCHEMA).tensors(batch)
