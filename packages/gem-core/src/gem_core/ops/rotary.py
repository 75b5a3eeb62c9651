"""ROTE, rotary temporal embedding (model.md 2): rotation by position and by log time gap."""

from __future__ import annotations

from torch import Tensor

from gem_core.errors import ConfigError, DataError
from gem_core.ops import checks
from gem_core.ops.dispatch import Op

ROTE = "rote"


def _check(x: Tensor, positions: Tensor, gaps: Tensor, phi: Tensor, *_: object) -> None:
    checks.values(ROTE, x, x=x)
    checks.shape(ROTE, "x", x, "N", "H", "d")
    rows, width = x.shape[0], x.shape[2]
    if width % 2:
        raise DataError(f"{ROTE}: x: expected an even head width, found {width}")
    for name, tensor in (("positions", positions), ("gaps", gaps)):
        checks.integers(ROTE, name, tensor, x)
        checks.shape(ROTE, name, tensor, rows)
    checks.shape(ROTE, "phi", phi, width // 2)
    checks.values(ROTE, phi, phi=phi)
    if rows and gaps.device.type == "cpu" and int(gaps.min()) < 0:
        raise DataError(f"{ROTE}: gaps: expected seconds >= 0 (request time - event time), found {int(gaps.min())}")


rote_op = Op(
    ROTE,
    "Tensor x, Tensor positions, Tensor gaps, Tensor phi, float base, float time_scale",
    outputs=1,
    grads=("x", "phi"),
    check=_check,
    fake=lambda x, *_: (x.new_empty(x.shape),),
)


def rote(
    x: Tensor, positions: Tensor, gaps: Tensor, phi: Tensor, *, base: float = 10000.0, time_scale: float = 3600.0
) -> Tensor:
    """Rotate each pair (2i, 2i + 1) of x by positions * theta_i + log1p(gaps / time_scale) * phi_i, theta_i = base^(-2i / d).

    x (N, H, d), d even; positions (N,) int64, within each sequence; gaps (N,) int64, seconds from the event to the request, >= 0;
    phi (d / 2), learnable, usually started at theta. Computed in float32 (float64 for float64). Queries and keys with the same
    angles cost less in one call, joined along H. Returns x's shape and type.
    """
    if base <= 0 or time_scale <= 0:
        raise ConfigError(f"{ROTE}: expected base > 0 and time_scale > 0, found base={base}, time_scale={time_scale}")
    return rote_op(x, positions, gaps, phi, base, time_scale)
