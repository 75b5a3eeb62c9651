"""What users do with what they see: clicks, whose history changes later clicks, and conversions after a delay.

The history of a user enters the truth through three decaying counts, each kept per (user, category) or (user,
advertiser) and brought to a request's time when it is used: one pass over the k-th requests of all users at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_core.data.generated.config import DAY, GeneratedConfig
from gem_core.data.generated.exposure import Exposure
from gem_core.data.generated.world import (
    CONVERSION_SHARE,
    INTEREST,
    INTEREST_DAYS,
    NEED,
    PRICE,
    SEEN,
    SEEN_DAYS,
    Floats,
    Ints,
    World,
)

Bools = NDArray[np.bool_]

PILOT_ROWS, PILOT_USERS, PILOT_ROUNDS = 32_768, (32, 512), 12
"""The intercepts that give the asked-for rates are found on users of their own, in so many rounds."""


@dataclass(frozen=True)
class Truth:
    """A world with the intercept of each task: click, then the kinds of conversions."""

    world: World
    intercepts: tuple[float, ...]


@dataclass(frozen=True)
class Response:
    """Of R rows and T tasks (click, then conversions).

    Attributes:
        clicked: (R,). click_time: (R,) seconds since the first; a user's clicks come before its next request.
        converted: (T - 1, R) whether a click led to it, at any time; convert_time: (T - 1, R) likewise.
        probability: (T, R) of the label, given all that came before the request; static: the same without the effects
            of history.
    """

    clicked: Bools
    click_time: Ints
    converted: Bools
    convert_time: Ints
    probability: Floats
    static: Floats

    def labels(self, config: GeneratedConfig) -> Bools:
        """(T, R): a conversion counts within its attribution window."""
        window = np.array([DAY * c.window_days for c in config.conversions.values()])
        delay = self.convert_time - self.click_time
        return np.concatenate([self.clicked[None], self.converted & (delay <= window[:, None])])


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    out: Floats = 1 / (1 + np.exp(-x))
    return out


def calibrate(world: World) -> Truth:
    """Intercepts for the configuration's rates."""
    config = world.config
    each = config.rows / config.user_count
    users = int(np.clip(PILOT_ROWS / each, *PILOT_USERS))
    exposure = Exposure.draw(
        world, rng := np.random.default_rng([config.seed, 2]), users, max(users, round(users * each))
    )
    logits, uniform = static_logits(world, exposure), rng.random(len(exposure.ad))
    counted = exposure.time[exposure.request] >= DAY * config.history_days
    low, high = _logit(config.ctr) - 4, _logit(config.ctr) + 4
    for _ in range(PILOT_ROUNDS):  # clicks lead to clicks: only bisection is sure to end
        intercept = (low + high) / 2
        _, sequence = clicks(world, exposure, logits[0] + intercept, uniform)
        clicking = sigmoid(logits[0] + intercept + sequence)
        low, high = (intercept, high) if clicking[counted].mean() < config.ctr else (low, intercept)
    intercepts = [intercept]
    for kind, own in zip(config.conversions.values(), logits[1:], strict=True):
        eligible = clicking * counted * (world.app[exposure.ad] == (kind.advertisers == "app"))
        intercepts.append(_solve(own + CONVERSION_SHARE * sequence, eligible, kind.rate, _logit(kind.rate)))
    return Truth(world, tuple(intercepts))


def _logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def _solve(logits: Floats, weight: Floats, rate: float, start: float) -> float:
    """The b for which the weighted mean of sigmoid(logits + b) is `rate` (Newton's method on its logit)."""
    if not weight.any():
        return start
    b = start
    for _ in range(20):
        b += _logit(rate) - _logit(float((sigmoid(logits + b) * weight).sum() / weight.sum()))
    return b


def static_logits(world: World, exposure: Exposure) -> Floats:
    """(T, R) logits without intercepts and effects of history: of a click, and of each conversion given the click."""
    e, ad = exposure, exposure.ad
    user, surface, time = e.user[e.request], e.surface[e.request], e.time[e.request]
    match: Floats = np.einsum("rk,tk->tr", e.taste[user] * world.factors[ad], world.weights)
    match[0] += e.activity[user] + world.quality[ad] + world.surface[surface]
    match[0] += np.array([0.0, 0.15, -0.15])[world.format[ad]] + world.hour[time // 3600 % 24]
    match[0] += world.drift(world.category[ad], surface, time.astype(np.float64))
    match[1:] += PRICE * (np.log(world.price[ad]) - 3)
    return match


def clicks(world: World, exposure: Exposure, logits: Floats, uniform: Floats) -> tuple[Bools, Floats]:
    """(R,) clicks, and what history adds to the logit of a click.

    Args:
        logits: (R,) of a click without it. uniform: (R,) in [0, 1).
    """
    e = exposure
    user = e.user[e.request]
    category, advertiser = world.category[e.ad], world.advertiser[e.ad]
    pair, pairs = user * world.config.categories + category, len(e.taste) * world.config.categories
    of_advertiser, known = np.unique(user * world.config.advertisers + advertiser, return_inverse=True)
    # Rows in the order of the pass: the first requests of all users, then the second ones, ...
    turn = (np.arange(len(e.user)) - np.searchsorted(e.user, e.user))[e.request]
    order = np.argsort(turn.astype(np.min_scalar_type(turn.max())), kind="stable")  # a radix sort
    ends = np.cumsum(np.bincount(turn))
    pair, known, logits, uniform = pair[order], known[order], logits[order], uniform[order]
    time = e.time[e.request][order].astype(np.float64)
    tau = world.need_tau[category][order]

    interest, needs = np.zeros(pairs), np.zeros((3, pairs))
    seen = np.zeros(len(of_advertiser))
    at_category, at_advertiser = np.zeros(pairs), np.zeros(len(of_advertiser))
    clicked, effect = np.zeros(len(order), np.bool_), np.zeros(len(order))
    begin = 0
    for end in ends.tolist():
        now, p, a, t = slice(begin, end), pair[begin:end], known[begin:end], time[begin:end]
        age = t - at_category[p]
        short = interest[p] * np.exp(age * (-1 / (DAY * INTEREST_DAYS)))
        r = age / tau[now]
        x1, x2, x3 = needs[:, p] * np.exp(-r)
        x2, x3 = x2 + r * x1, x3 + r * x2 + r * r * (0.5 * x1)
        before = seen[a] * np.exp((t - at_advertiser[a]) * (-1 / (DAY * SEEN_DAYS)))
        own = -INTEREST * np.expm1(-short) - NEED * np.expm1(-4 * x3) + SEEN * np.log1p(before)
        effect[now] = world.config.sequence * own
        clicked[now] = uniform[now] < sigmoid(logits[now] + effect[now])
        # Rows of one pair share request, time and state, so these assignments agree.
        interest[p], needs[:, p], at_category[p] = short, (x1, x2, x3), t
        seen[a], at_advertiser[a] = before, t
        hit = p[clicked[now]]
        np.add.at(interest, hit, 1.0)
        np.add.at(needs[0], hit, 1.0)
        np.add.at(seen, a, 1.0)
        begin = end
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return clicked[back], effect[back]


def respond(truth: Truth, exposure: Exposure, rng: np.random.Generator) -> Response:
    """Draw what users do."""
    world, rows = truth.world, len(exposure.ad)
    kinds = list(world.config.conversions.values())
    logits = static_logits(world, exposure) + np.array(truth.intercepts)[:, None]
    clicked, sequence = clicks(world, exposure, logits[0], rng.random(rows))
    click_time = exposure.time[exposure.request] + rng.integers(1, 60, rows)
    converted = np.zeros((len(kinds), rows), np.bool_)
    convert_time = np.zeros((len(kinds), rows), np.int64)
    probability, static = np.empty_like(logits), np.empty_like(logits)
    probability[0], static[0] = sigmoid(logits[0] + sequence), sigmoid(logits[0])
    at = np.flatnonzero(clicked)
    for i, kind in enumerate(kinds):
        given_click = sigmoid(logits[1 + i] + CONVERSION_SHARE * sequence)
        possible = world.app[exposure.ad] == (kind.advertisers == "app")
        happens = rng.random(len(at)) < given_click[at]
        delay = 1 + np.floor(rng.exponential(DAY * kind.delay_days, len(at))).astype(np.int64)
        converted[i, at] = happens & possible[at]
        convert_time[i, at] = click_time[at] + delay
        # P(1 + floor(delay) <= window) of a whole number of seconds.
        within = 1 - np.exp(-np.floor(DAY * kind.window_days) / (DAY * kind.delay_days))
        probability[1 + i] = probability[0] * given_click * within
        static[1 + i] = static[0] * sigmoid(logits[1 + i]) * within
    return Response(clicked, click_time, converted, convert_time, probability, static)
