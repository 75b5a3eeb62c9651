"""Schemas, batches and models of any shape for the tests of gem_core.model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.data.batch import Batch, Jagged
from gem_core.model.dcnv2 import DCNv2
from gem_core.model.din import DIN
from gem_core.model.hstu import HSTU
from gem_core.model.interformer import InterFormer
from gem_core.model.kunlun import Kunlun
from gem_core.model.wukong_model import Wukong
from gem_core.schema import FIRST_KNOWN, DenseStats, Fitted, Schema
from gem_core.train.embedding import TorchEmbedding

NOW = 10**9
KNOWN = 8  # values in each vocabulary: few, so that events match rows often
MODELS = {
    "kunlun": Kunlun, "interformer": InterFormer, "wukong": Wukong, "hstu": HSTU, "din": DIN, "dcnv2": DCNv2,
}  # fmt: skip

FULL: dict[str, Any] = {
    "user": "u",
    "time": "t",
    "surface": "s",
    "surfaces": ["feed", "reels"],
    "dense": {"x": {"encoding": "piecewise"}, "y": {}, "age": {"level": "request"}},
    "sparse": {"ad": {}, "cat": {}, "tags": {"multi": True}, "segment": {"level": "request"}},
    "vectors": {"creative": {"width": 5}, "taste": {"width": 3, "level": "request"}},
    "events": {
        "click": {"max_length": 40, "fields": {"ad": {}, "cat": {}, "price": {"kind": "dense"}}},
        "view": {"max_length": 20, "fields": ["cat"]},
    },
    "objectives": {"click": {"label": "c"}, "buy": {"label": "b"}},
}


def make_schema(**changes: Any) -> Schema:
    """FULL with some parts replaced, fitted."""
    value = {**FULL, **changes}
    if "surface" in changes and changes["surface"] is None:
        value["surfaces"] = None
    return fitted(Schema.parse(value))


def fitted(schema: Schema) -> Schema:
    """The schema with statistics and small vocabularies."""
    dense = {
        name: DenseStats(mean=0, std=1, edges=[-1.0, -0.3, 0.2, 1.5] if f.encoding == "piecewise" else [])
        for name, f in schema.dense.items()
    }
    statistics = Fitted(
        rows=100,
        dense=dense,
        vocabularies={table: list(range(KNOWN)) for table in schema.tables()},
        surfaces=schema.surfaces or ["all"],
        base_rates=dict.fromkeys(schema.heads(), 0.3),
    )
    return schema.model_copy(update={"fitted": statistics})


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def make_batch(
    schema: Schema,
    rows: Sequence[int] = (3, 1, 4, 2),
    lengths: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    missing: float = 0.1,
) -> Batch:
    """A random batch: `rows` of each request, `lengths` of each request's sequence by event type."""
    rng = torch.Generator().manual_seed(seed)
    requests, total = len(rows), sum(rows)

    def ids(n: int) -> Tensor:
        return torch.randint(0, FIRST_KNOWN + KNOWN, (n,), generator=rng)

    def numbers(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=rng)
        return torch.where(torch.rand(shape, generator=rng) < missing, float("nan"), values)

    def sparse(level: str, n: int) -> dict[str, Jagged]:
        out = {}
        for name in schema.names("sparse", level):  # type: ignore[arg-type]
            feature = schema.sparse[name]
            size = torch.randint(0, 4, (n,), generator=rng).tolist() if feature.multi else [1] * n
            out[name] = Jagged(ids(sum(size)), offsets_of(size), feature.max_length if feature.multi else 1)
        return out

    def vectors(level: str, n: int) -> dict[str, Tensor]:
        names = schema.names("vectors", level)  # type: ignore[arg-type]
        return {name: torch.randn(n, schema.vectors[name].width, generator=rng) for name in names}

    events = {}
    for event, kind in schema.events.items():
        default = [(7 * i + 5) % (kind.max_length + 1) if i else kind.max_length for i in range(requests)]
        size = list((lengths or {}).get(event, default))
        offsets, n = offsets_of(size), sum(size)
        fields = {
            name: Jagged(ids(n) if f.kind == "sparse" else numbers(n), offsets, kind.max_length)
            for name, f in kind.fields.items()
        }
        times = NOW - torch.randint(1, 10**8, (n,), generator=rng)
        fields["time"] = Jagged(times, offsets, kind.max_length)
        events[event] = fields
    return Batch(
        dense=numbers(total, len(schema.names("dense", "row"))),
        ids=sparse("row", total),
        vectors=vectors("row", total),
        request_dense=numbers(requests, len(schema.names("dense", "request"))),
        request_ids=sparse("request", requests),
        request_vectors=vectors("request", requests),
        events=events,
        request=torch.arange(requests).repeat_interleave(torch.tensor(rows, dtype=torch.int64)),
        request_time=torch.full((requests,), NOW),
        user=torch.arange(requests),
        surface=torch.randint(0, len(schema.surface_names()), (total,), generator=rng),
        row_id=torch.arange(total),
    )


def make_model(name: str, schema: Schema, seed: int = 0, **options: Any) -> nn.Module:
    """A model in evaluation mode; the same seed gives the same parameters and tables."""
    kind = MODELS[name]
    torch.manual_seed(seed)
    model: nn.Module = kind(
        kind.Config(**options), schema=schema, embedding=TorchEmbedding(TorchEmbedding.Config(), seed)
    )
    return model.eval()


def stir(model: nn.Module) -> nn.Module:
    """Parameters that start at zero get values, so that no path is hidden by its start."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model


def regroup(batch: Batch, rows: Sequence[int], source: Sequence[int], request: Sequence[int]) -> Batch:
    """The chosen rows, over requests copied from `source`; `request` is each chosen row's new request."""
    at, origin = torch.tensor(rows, dtype=torch.int64), torch.tensor(source, dtype=torch.int64)

    def pick(jagged: Jagged, index: Tensor) -> Jagged:
        return Jagged(*ops.gather_segments(jagged.values, jagged.offsets, index), jagged.max_length)

    return Batch(
        dense=batch.dense[at],
        ids={k: pick(v, at) for k, v in batch.ids.items()},
        vectors={k: v[at] for k, v in batch.vectors.items()},
        request_dense=batch.request_dense[origin],
        request_ids={k: pick(v, origin) for k, v in batch.request_ids.items()},
        request_vectors={k: v[origin] for k, v in batch.request_vectors.items()},
        events={e: {k: pick(v, origin) for k, v in fields.items()} for e, fields in batch.events.items()},
        request=torch.tensor(request, dtype=torch.int64),
        request_time=batch.request_time[origin],
        user=batch.user[origin],
        surface=batch.surface[at],
        row_id=batch.row_id[at],
    )


def one_request_per_row(batch: Batch) -> Batch:
    """The same rows, each as a request of its own."""
    rows = range(batch.rows)
    return regroup(batch, list(rows), batch.request.tolist(), list(rows))


def single_row(batch: Batch, row: int) -> Batch:
    """One row alone, with its request."""
    return regroup(batch, [row], [int(batch.request[row])], [0])


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float = 2e-5) -> None:
    """Equal logits of every task."""
    assert left.keys() == right.keys()
    for task in left:
        torch.testing.assert_close(left[task], right[task], rtol=tolerance, atol=tolerance)
