"""Choice of a backend: order, forcing, messages; validation; and the operators seen by autograd, compile and export."""

from __future__ import annotations

import pytest
import torch
from op_cases import HEADS, ONE_EACH, WIDTH, case_of, offsets_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gem_core import ops
from gem_core.errors import ConfigError, DataError


class Doubling:
    """A stranger's gdpa: twice the queries."""

    reason: str | None = None

    def supports(self, spec):
        assert spec.op == "gdpa" and spec.shapes["q"] == (7, HEADS, WIDTH) and spec.dtypes["k"] == torch.float64
        assert spec.options["activation"] == "silu"
        return self.reason

    def forward(self, q, k, v, offsets, **options):
        return (q * 2,)

    def backward(self, saved, grad, **options):
        _q, k, v, _ = saved.inputs
        return grad * 2, torch.zeros_like(k), torch.zeros_like(v)


@pytest.fixture
def doubling():
    backend = Doubling()
    ops.register_backend("gdpa", "doubling", backend, priority=50)
    yield backend
    ops.unregister_backend("gdpa", "doubling")


def test_the_first_by_priority_that_supports_a_call_runs(doubling):
    made = case_of("gdpa")
    q = made.inputs[0].requires_grad_()
    assert ops.registered()["gdpa"] == ("doubling", "ragged", "reference")
    out = made.run(*made.inputs)
    assert torch.equal(out, q * 2)
    out.sum().backward()
    assert (q.grad == 2).all()
    doubling.reason = "not today"
    assert not torch.equal(made.run(*made.inputs), q * 2)


def test_a_forced_backend(doubling, monkeypatch):
    made = case_of("gdpa")
    wanted = made.inputs[0] * 2
    with ops.use_backend({"gdpa": "ragged"}):
        assert not torch.equal(made.run(*made.inputs), wanted)
        with ops.use_backend({"gdpa": "doubling"}):
            assert torch.equal(made.run(*made.inputs), wanted)
        assert not torch.equal(made.run(*made.inputs), wanted)
    monkeypatch.setenv("GEM_OPS_BACKEND", "reference")
    assert not torch.equal(made.run(*made.inputs), wanted)
    ops.set_backends({"gdpa": "doubling"})  # code is nearer than the environment
    assert torch.equal(made.run(*made.inputs), wanted)
    ops.set_backends({})
    doubling.reason = "q is too green"
    with (
        pytest.raises(ConfigError, match='gdpa: backend "doubling" is forced but cannot run this call: q is too green'),
        ops.use_backend({"gdpa": "doubling"}),
    ):
        made.run(*made.inputs)


def test_a_backward_follows_its_forward():
    made, seen = case_of("gdpa"), []

    class Spy(Doubling):
        def backward(self, saved, grad, **options):
            seen.append("spy")
            return super().backward(saved, grad, **options)

    ops.register_backend("gdpa", "spy", Spy(), priority=-1)
    try:
        inputs = [x.requires_grad_() for x in made.inputs]
        with ops.use_backend({"gdpa": "spy"}):
            out = made.run(*inputs)
        out.sum().backward()
    finally:
        ops.unregister_backend("gdpa", "spy")
    assert seen == ["spy"]


def test_messages_about_backends(monkeypatch):
    with pytest.raises(
        ConfigError, match=r'attention backend "triton" is not installed: pip install gem-kernels\[triton\]'
    ):
        ops.set_backends({"jagged_attention": "triton"})
    with pytest.raises(ConfigError, match=r'gdpa backend "mine" is not installed \(op gdpa has: ragged, reference\)'):
        ops.set_backends({"gdpa": "mine"})
    with pytest.raises(ConfigError, match='there is no op "gdpaa"; did you mean "gdpa"'):
        ops.set_backends({"gdpaa": "ragged"})
    with pytest.raises(ConfigError, match='there is no op "soap"'):
        ops.register_backend("soap", "mine", Doubling())
    with pytest.raises(ConfigError, match='backend "ragged" of op gdpa is registered twice'):
        ops.register_backend("gdpa", "ragged", "my_package:Mine")
    monkeypatch.setenv("GEM_OPS_BACKEND", "triton")
    with pytest.raises(ConfigError, match='attention backend "triton" is not installed'):
        case_of("seed_attention").run(*case_of("seed_attention").inputs)


def test_a_lazy_backend_that_cannot_be_imported():
    made = case_of("gdpa")
    ops.register_backend("gdpa", "broken", "package_that_is_not_there.ops:Gdpa", priority=50)
    try:
        assert made.run(*made.inputs).shape == made.inputs[0].shape  # skipped
        with (
            ops.use_backend({"gdpa": "broken"}),
            pytest.raises(ConfigError, match=r'gdpa: backend "broken".*No module named'),
        ):
            made.run(*made.inputs)
    finally:
        ops.unregister_backend("gdpa", "broken")


def test_no_backend_can_run_a_call():
    made = case_of("gdpa")
    for backend in ("ragged", "reference"):
        ops.unregister_backend("gdpa", backend)
    try:
        with pytest.raises(ConfigError, match="gdpa: no backend can run this call"):
            made.run(*made.inputs)
    finally:
        ops.register_backend("gdpa", "reference", "gem_core.ops.reference:GdpaReference", priority=0)
        ops.register_backend("gdpa", "ragged", "gem_core.ops.ragged:RaggedGdpa", priority=10)


Q, K, O = torch.zeros(9, 2, 4), torch.zeros(4, 5, 2, 4), offsets_of([3, 0, 5, 1])  # noqa: E741
E9 = torch.zeros(9, 2, 4)
WRONG = {
    "q: expected a float type, found torch.int64": lambda: ops.gdpa(Q.long(), K, K, O, 9),
    "k: expected torch.float32 as the first argument, found torch.float64": lambda: ops.gdpa(Q, K.double(), K, O, 9),
    r"q: expected shape \(sum T, H, d\), found \(9, 8\)": lambda: ops.gdpa(Q.flatten(1), K, K, O, 9, activation="relu"),
    r"k: expected shape \(4, F, 2, 4\), found \(4, 5, 2, 3\)": lambda: ops.gdpa(Q, K[..., :3], K, O, 9),
    "offsets: expected torch.int64, found torch.int32": lambda: ops.gdpa(Q, K, K, O.int(), 9),
    r"offsets: expected shape \(B \+ 1\), found \(0,\)": lambda: ops.gdpa(Q, K, K, O[:0], 9),
    r"offsets: expected the first to be 0 and the last 9 \(the rows\), found 0 and 8": lambda: ops.gdpa(
        Q, K, K, O.clamp(max=8), 9
    ),
    "offsets: expected offsets that never fall, found a step of -2 at 1": lambda: ops.gdpa(
        Q, K, K, torch.tensor([0, 3, 1, 8, 9]), 9
    ),
    "sequence 2 has length 5, above the declared maximum 4": lambda: ops.gdpa(Q, K, K, O, 4),
    "k_offsets: expected 5 offsets as q_offsets": lambda: ops.jagged_attention(
        Q, E9, E9, O, torch.tensor([0, 9]), 9, 9
    ),
    r"k_index: expected numbers in \[0, 1\), found 0 to 2": lambda: ops.jagged_attention(
        Q, E9, E9, O, torch.tensor([0, 9]), 9, 9, k_index=torch.tensor([0, 2, 0, 0])
    ),
    r"k_index: expected shape \(4\), found \(3,\)": lambda: ops.jagged_attention(
        Q, E9, E9, O, torch.tensor([0, 9]), 9, 9, k_index=torch.zeros(3, dtype=torch.int64)
    ),
    "hstu_attention: k_offsets: expected 5 offsets": lambda: ops.hstu_attention(
        Q, E9, E9, O, torch.tensor([0, 9]), 9, 9
    ),
    r"block_attention: k: expected shape \(9, 2, 4\)": lambda: ops.block_attention(Q, E9[:8], E9, O, 9),
    r"seed_attention: v: expected shape \(9, 2, 4\)": lambda: ops.seed_attention(Q[:2], E9, E9[:8], O, 9),
    "rote: gaps: expected seconds >= 0": lambda: ops.rote(
        Q, torch.zeros(9).long(), torch.zeros(9).long() - 1, torch.zeros(2)
    ),
    "rote: x: expected an even head width, found 3": lambda: ops.rote(
        Q[..., :3], torch.zeros(9).long(), torch.zeros(9).long(), torch.zeros(1)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tensors_are_refused_with_the_place(message):
    with pytest.raises(DataError, match=message):
        WRONG[message]()


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            'mask: expected one of none, causal.*found "band"',
            lambda: ops.jagged_attention(Q, E9, E9, O, O, 9, 9, mask="band"),
        ),
        ('window: only mask="window" takes it', lambda: ops.jagged_attention(Q, E9, E9, O, O, 9, 9, window=3)),
        ("needs a positive number, found 0", lambda: ops.jagged_attention(Q, E9, E9, O, O, 9, 9, mask="block")),
        (
            "window: expected a number >= 0",
            lambda: ops.jagged_attention(Q, E9, E9, O, O, 9, 9, mask="window", window=-1),
        ),
        ("0 <= shift < block", lambda: ops.block_attention(Q, E9, E9, O, 9, shift=64)),
        ('activation: unknown "gelo"; did you mean "gelu"', lambda: ops.gdpa(Q, K, K, O, 9, activation="gelo")),
        (r"one per head \(2\), found 3", lambda: ops.gdpa(Q, K, K, O, 9, activation=("gelu", "gelu", "relu"))),
        ("expected base > 0", lambda: ops.rote(Q, O, O, Q, base=0)),
    ],
)
def test_wrong_options_are_refused(message, call):
    with pytest.raises(ConfigError, match=message):
        call()


class Calls(TorchDispatchMode):
    """Keeps the arguments of the calls of gem's operators."""

    def __init__(self):
        super().__init__()
        self.arguments = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gem":
            self.arguments.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", ONE_EACH)
def test_opcheck(op):
    """Schema, fake implementation, autograd registration, and tracing by AOT with dynamic shapes."""
    made = case_of(op)
    with Calls() as calls:
        made.run(*made.inputs)
    (arguments,) = calls.arguments
    arguments = [x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    torch.library.opcheck(getattr(torch.ops.gem, op).default, tuple(arguments))


class Everything(nn.Module):
    """A small module that uses each op."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(3, 2, 4))
        self.phi = nn.Parameter(torch.rand(2))

    def forward(self, x, offsets, gaps, made):
        at = ops.positions(offsets, x.shape[0])
        x = ops.rote(x, at, gaps, self.phi)
        x = x + ops.jagged_attention(x, x, x, offsets, offsets, 50, 50, mask="window", window=3)
        x = x + ops.block_attention(x, x, x, offsets, 50, block=4)
        x = x + ops.hstu_attention(x, x, x, offsets, offsets, 50, 50)
        x = ops.gdpa_ffn(x + ops.gdpa(x, made, made, offsets, 50), made, made, offsets, 50, activation="silu")
        return ops.seed_attention(self.seeds, x, x, offsets, 50), ops.segment_mean(ops.rms_norm(x), offsets)


def arguments(lengths):
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    made = torch.randn(len(lengths), 5, 2, 4, generator=generator)
    return torch.randn(total, 2, 4, generator=generator), offsets_of(lengths), torch.arange(total) * 99, made


def test_compile_with_changing_lengths():
    torch.manual_seed(0)
    module = Everything()
    compiled = torch.compile(module, backend="aot_eager", dynamic=True, fullgraph=True)
    for lengths in ([3, 0, 20], [40, 1, 7, 7], [2, 2]):
        given = arguments(lengths)
        x = given[0].requires_grad_()
        wanted, found = module(*given), compiled(*given)
        torch.testing.assert_close(found, wanted)
        one = torch.autograd.grad(sum(y.sum() for y in wanted), [x, module.seeds, module.phi])
        two = torch.autograd.grad(sum(y.sum() for y in found), [x, module.seeds, module.phi])
        torch.testing.assert_close(two, one)


def test_a_compiled_call_still_refuses_a_length_above_the_maximum():
    compiled = torch.compile(lambda q, k, o: ops.gdpa(q, k, k, o, 4), backend="aot_eager", fullgraph=True)
    with pytest.raises(DataError, match="above the declared maximum 4"):
        compiled(Q, K, O)


def test_export_with_dynamic_lengths():
    torch.manual_seed(0)
    module = Everything()
    rows, batch = torch.export.Dim("rows", min=2), torch.export.Dim("batch", min=2)
    shapes = ({0: rows}, {0: batch + 1}, {0: rows}, {0: batch})
    exported = torch.export.export(module, arguments([3, 0, 20]), dynamic_shapes=shapes).module()
    for lengths in ([40, 1, 7, 7], [2, 2]):
        given = arguments(lengths)
        torch.testing.assert_close(exported(*given), module(*given))


@pytest.mark.parametrize("op", [op for op in ONE_EACH if op != "rote"])
def test_autocast_runs_in_the_lower_type(op):
    made = case_of(op)
    inputs = [x.float().requires_grad_() for x in made.inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made.run(*inputs)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made.run(*made.inputs).dtype == torch.float64


def test_flops_are_those_of_the_real_lengths():
    lengths, pairs = [3, 0, 20, 70], 9 + 400 + 4900
    offsets = offsets_of(lengths)
    x = torch.randn(93, 2, 4, requires_grad=True)
    made = torch.randn(4, 5, 2, 4)
    expected = {
        4 * pairs * 8: lambda: ops.jagged_attention(x, x, x, offsets, offsets, 70, 70),
        4 * (9 + 400 + 64 * 64 + 36) * 8: lambda: ops.block_attention(x, x, x, offsets, 70),
        4 * (6 + 210 + 2485) * 8: lambda: ops.hstu_attention(x, x, x, offsets, offsets, 70, 70),
        4 * 93 * 6 * 8: lambda: ops.seed_attention(x[:6], x, x, offsets, 70),
        4 * 93 * 5 * 8: lambda: ops.gdpa_ffn(x, made, made, offsets, 70),
    }
    for flops, call in expected.items():
        with FlopCounterMode(display=False) as counter:
            out = call()
            forward = counter.get_total_flops()
            out.sum().backward()
        assert (forward, counter.get_total_flops()) == (flops, 3 * flops)
    shared = torch.tensor([2, 2, 2])
    with FlopCounterMode(display=False) as counter:
        ops.jagged_attention(x[:6], x, x, torch.tensor([0, 1, 3, 6]), offsets, 3, 70, k_index=shared)
    assert counter.get_total_flops() == 4 * 6 * 20 * 8


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        ({"mask": "window", "window": 2}, 5 * 20 - 6),
        ({"mask": "prefix", "prefix": 3}, 3 * 20 + sum(range(4, 21))),
        ({"mask": "block", "block": 8}, 64 + 64 + 16),
    ],
)
def test_flops_of_masks(mask, count):
    x, offsets = torch.randn(20, 1, 4), offsets_of([20])
    with FlopCounterMode(display=False) as counter:
        ops.jagged_attention(x, x, x, offsets, offsets, 20, 20, **mask)
    assert counter.get_total_flops() == 4 * count * 4
