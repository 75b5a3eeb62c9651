"""TorchEmbedding against autograd and row-wise AdaGrad written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_core.data.batch import Jagged
from gem_core.errors import ConfigError, DataError
from gem_core.protocols import Table
from gem_core.train import TorchEmbedding
from gem_core.train import embedding as module


def make(*tables: Table, seed: int = 0, **options: object) -> TorchEmbedding:
    out = TorchEmbedding(TorchEmbedding.Config.model_validate(options), seed=seed)
    out.setup(tables)
    return out


def segments(lengths: list[int], rows: int, generator: torch.Generator) -> Jagged:
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    return Jagged(torch.randint(0, rows, (int(offsets[-1]),), generator=generator), offsets, 16)


def pooled(weight: Tensor, ids: Tensor | Jagged, pooling: str) -> Tensor:
    """The lookup written out."""
    if isinstance(ids, Tensor):
        return weight[ids]
    parts = [weight[part] for part in ids.values.split(ids.lengths().tolist())]
    reduce = torch.sum if pooling == "sum" else torch.mean
    return torch.stack([reduce(p, 0) if len(p) else weight.new_zeros(weight.shape[1]) for p in parts])


def adagrad(weight: Tensor, moment: Tensor, grad: Tensor, lr: float, clip: float | None = None) -> None:
    for row in grad.any(1).nonzero().squeeze(1).tolist():
        g = grad[row]
        if clip is not None and g.norm() > clip:
            g = g * clip / g.norm()
        moment[row] += g.square().mean()
        weight[row] -= lr * g / (moment[row].sqrt() + 1e-8)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    singles=st.integers(0, 12),
    rows=st.sampled_from([1, 3, 17, 5_000]),
    pooling=st.sampled_from(["sum", "mean"]),
    clip=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 1000),
)
def test_two_steps_equal_autograd_with_row_wise_adagrad(
    lengths: list[int], singles: int, rows: int, pooling: str, clip: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    embedding = make(Table("t", rows, 3, ("bag", "one"), pooling), clip=clip)
    state = embedding.state()
    weight, moment = state["tables.t.weight"].clone(), state["tables.t.moment"].clone()
    for _ in range(2):
        ids: dict[str, Tensor | Jagged] = {
            "bag": segments(lengths, rows, generator),
            "one": torch.randint(0, rows, (singles,), generator=generator),
        }
        leaf = weight.clone().requires_grad_()
        expected = {name: pooled(leaf, i, pooling) for name, i in ids.items()}
        got = embedding.lookup(ids)
        scale = {name: torch.randn(out.shape, generator=generator) for name, out in expected.items()}
        for name, out in expected.items():
            torch.testing.assert_close(got[name], out)
        sum((scale[n] * out).sum() for n, out in expected.items()).backward()  # type: ignore[union-attr]
        sum((scale[n] * out).sum() for n, out in got.items()).backward()  # type: ignore[union-attr]
        embedding.step(0.1)
        assert leaf.grad is not None
        adagrad(weight, moment, leaf.grad, 0.1, clip)
        torch.testing.assert_close(embedding.state()["tables.t.weight"], weight)
        torch.testing.assert_close(embedding.state()["tables.t.moment"], moment)


@pytest.mark.parametrize(("dense_up_to", "bitmap_up_to"), [(0.0, 1e9), (0.0, 0.0), (1e9, 0.0)])
def test_every_form_of_update_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, dense_up_to: float, bitmap_up_to: float
) -> None:
    ids = torch.tensor([0, 6, 3, 3, 6, 9, 0, 3])
    grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for forms in [(module.DENSE_UP_TO, module.BITMAP_UP_TO), (dense_up_to, bitmap_up_to)]:
        monkeypatch.setattr(module, "DENSE_UP_TO", forms[0])
        monkeypatch.setattr(module, "BITMAP_UP_TO", forms[1])
        embedding = make(Table("t", 10, 4, ("f",)))
        embedding.lookup({"f": ids})["f"].backward(grad)
        embedding.step(0.5)
        results.append(embedding.state())
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value)


def test_untouched_rows_stay_bit_for_bit() -> None:
    embedding = make(Table("small", 4, 3, ("a",)), Table("large", 400, 3, ("b",)))
    before = {name: value.clone() for name, value in embedding.state().items()}
    out = embedding.lookup({"a": torch.tensor([1, 1, 1, 2, 2]), "b": torch.tensor([7])})
    (out["a"].sum() + out["b"].sum()).backward()
    embedding.step(0.1)
    for name, touched in {"small": [1, 2], "large": [7]}.items():
        changed = (embedding.state()[f"tables.{name}.weight"] != before[f"tables.{name}.weight"]).any(1)
        assert changed.nonzero().squeeze(1).tolist() == touched


def test_accumulated_lookups_equal_one_large_lookup() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, grad = torch.randint(0, 20, (12,), generator=generator), torch.randn(12, 4, generator=generator)
    whole, parts = (make(Table("t", 20, 4, ("f",))) for _ in range(2))
    whole.lookup({"f": ids})["f"].backward(grad)
    for i in range(0, 12, 4):
        parts.lookup({"f": ids[i : i + 4]})["f"].backward(grad[i : i + 4])
    whole.step(0.1)
    parts.step(0.1)
    assert torch.equal(whole.state()["tables.t.weight"], parts.state()["tables.t.weight"])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_any_number_of_tables(count: int) -> None:
    embedding = make(*(Table(f"t{i}", 5, 2, (f"f{i}",)) for i in range(count)))
    out = embedding.lookup({f"f{i}": torch.tensor([0, 4]) for i in range(count)})
    assert {name: tuple(v.shape) for name, v in out.items()} == {f"f{i}": (2, 2) for i in range(count)}
    for value in out.values():
        value.sum().backward()
    embedding.step(0.1)
    assert len(embedding.state()) == 2 * count
    assert [t.name for t in embedding.tables] == [f"t{i}" for i in range(count)]


def test_tables_depend_on_seed_and_name_alone() -> None:
    a, b = Table("a", 1000, 16, ("a",)), Table("b", 1000, 16, ("b",))
    first, second = make(a, b).state(), make(b, a).state()
    assert torch.equal(first["tables.a.weight"], second["tables.a.weight"])
    assert not torch.equal(first["tables.a.weight"], first["tables.b.weight"])
    assert not torch.equal(first["tables.a.weight"], make(a, seed=1).state()["tables.a.weight"])
    assert first["tables.a.weight"].std().item() == pytest.approx(1 / 4, rel=0.03)
    assert make(a, init_std=0.01).state()["tables.a.weight"].std().item() == pytest.approx(0.01, rel=0.03)
    assert make(a, initial_moment=0.5).state()["tables.a.moment"].unique().tolist() == [0.5]


@pytest.mark.parametrize("bad", [-1, 5])
@pytest.mark.parametrize("ragged", [False, True])
def test_an_id_outside_its_table_names_feature_table_and_rows(bad: int, ragged: bool) -> None:
    values = torch.tensor([0, bad, 2])
    ids = Jagged(values, torch.tensor([0, 3]), 4) if ragged else values
    with pytest.raises(DataError, match=rf'feature "click.ad": id {bad} is outside table "ad" of 5 rows'):
        make(Table("ad", 5, 2, ("ad", "click.ad"))).lookup({"ad": torch.tensor([4]), "click.ad": ids})


def test_discard_forgets_the_gradients() -> None:
    embedding = make(Table("t", 5, 2, ("f",)))
    before = embedding.state()["tables.t.weight"].clone()
    embedding.lookup({"f": torch.tensor([1])})["f"].sum().backward()
    embedding.discard()
    embedding.step(0.1)
    assert torch.equal(embedding.state()["tables.t.weight"], before)


def test_lookups_without_gradient_leave_nothing_pending() -> None:
    embedding = make(Table("t", 5, 2, ("f",)))
    with torch.no_grad():
        assert not embedding.lookup({"f": torch.tensor([1])})["f"].requires_grad


def test_an_unused_feature_of_a_lookup_gets_no_update() -> None:
    embedding = make(Table("t", 5, 2, ("f", "g")))
    before = embedding.state()["tables.t.weight"].clone()
    embedding.lookup({"f": torch.tensor([1]), "g": torch.tensor([2])})["f"].sum().backward()
    embedding.step(0.1)
    assert (embedding.state()["tables.t.weight"] != before).any(1).tolist() == [False, True, False, False, False]


def test_state_round_trip_and_its_errors() -> None:
    table = Table("t", 5, 2, ("f",))
    one, two = make(table), make(table, seed=9)
    two.load(one.state())
    assert torch.equal(two.state()["tables.t.weight"], one.state()["tables.t.weight"])
    with pytest.raises(DataError, match=r"missing \['tables.t.moment'\]"):
        two.load({"tables.t.weight": torch.zeros(5, 2)})
    with pytest.raises(DataError, match=r"unknown \['tables.u.weight'\]"):
        two.load({**one.state(), "tables.u.weight": torch.zeros(5, 2)})
    with pytest.raises(DataError, match=r'"tables.t.weight": expected shape \(5, 2\), found \(6, 2\)'):
        two.load({**one.state(), "tables.t.weight": torch.zeros(6, 2)})


def test_wrong_set_up() -> None:
    embedding = make(Table("t", 5, 2, ("f",)))
    with pytest.raises(ConfigError, match='"t" is set up twice'):
        embedding.setup([Table("t", 5, 2, ("g",))])
    with pytest.raises(ConfigError, match='feature "f" is served by both tables "t" and "u"'):
        embedding.setup([Table("u", 5, 2, ("f",))])
    with pytest.raises(ConfigError, match="not sharded"):
        embedding.setup([], mesh=object())
    with pytest.raises(ConfigError, match='feature "x" has no embedding table'):
        embedding.lookup({"x": torch.tensor([0])})
