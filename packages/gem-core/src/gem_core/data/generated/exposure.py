"""Who sees which ads, when and where: what does not depend on responses, drawn for a block of users at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gem_core.data.generated.config import DAY
from gem_core.data.generated.world import AGES, COUNTRIES, DEVICES, FACTORS, Floats, Ints, World

SLATE = 4
"""Mean number of ads of a request (geometric)."""

GAP = 60
"""Least seconds between requests of a user: its clicks come before its next request."""

ACTIVITY_SIGMA, ACTIVITY_MAX = 1.0, 4.0
"""Rows per user: lognormal, at most ACTIVITY_MAX times the median."""

FAVOURITES, TARGETED = 3, 0.5
"""So many categories that fit a user's tastes best; the share of ads from these."""


@dataclass(frozen=True)
class Exposure:
    """R rows of Q requests of U users, ordered by user and time.

    Attributes:
        request: (R,) place of a row's request; `user`: (Q,) place of a request's user.
        time: (Q,) whole seconds since the first of history.
        taste: (U, 8) w; activity: (U,) what a user adds to the logit of a click.
    """

    request: Ints
    user: Ints
    time: Ints
    surface: Ints
    device: Ints
    ad: Ints
    country: Ints
    age: Ints
    taste: Floats
    activity: Floats

    @staticmethod
    def draw(world: World, rng: np.random.Generator, users: int, rows: int) -> Exposure:
        """Exactly `rows` rows of `users` users within the days of rows, and as many a day in those of history."""
        config = world.config
        country, age = rng.integers(0, len(COUNTRIES), users), rng.integers(0, len(AGES), users)
        taste = world.country_factors[country] + world.age_factors[age] + 0.7 * rng.normal(size=(users, FACTORS))
        affinity = np.einsum("uk,ck->uc", taste, world.category_factors)
        favourites = np.argsort(-affinity, axis=1, kind="stable")[:, :FAVOURITES]

        weight = np.cumsum(np.minimum(np.exp(ACTIVITY_SIGMA * rng.normal(size=users)), ACTIVITY_MAX))
        own = np.diff(np.rint(weight / weight[-1] * rows), prepend=0)
        past = np.rint(own * (config.history_days / config.days))
        counts = np.stack([past, own], 1).astype(np.int64).ravel()  # of each user, first those of history
        segment = np.repeat(np.arange(2 * users), counts)
        begins = rng.random(len(segment)) < 1 / SLATE
        begins[0] = True
        begins[1:] |= segment[1:] != segment[:-1]
        request = np.cumsum(begins) - 1
        time = _times(rng, segment[begins], DAY * config.history_days, DAY * config.days)
        user, user_of_row, rows = segment[begins] // 2, segment // 2, len(segment)

        pick, source, choice = rng.random(rows), rng.random(rows), rng.random(rows)
        popular = np.searchsorted(world.category_popularity, pick * world.category_popularity[-1], side="right")
        liked = favourites[user_of_row, (pick * FAVOURITES).astype(np.int64)]
        category = np.where(source < TARGETED, liked, popular)
        return Exposure(
            request=request,
            user=user,
            time=time,
            surface=np.searchsorted(world.surface_popularity, rng.random(len(user)), side="right"),
            device=rng.integers(0, len(DEVICES), len(user)),
            ad=world.running(category, time[request].astype(np.float64), choice),
            country=country,
            age=age,
            taste=taste,
            activity=0.4 * rng.normal(size=users),
        )


def _times(rng: np.random.Generator, segment: Ints, history: int, rows: int) -> Ints:
    """(Q,) times of requests, uniform over the seconds of history (even segments), then of rows (odd ones), at least GAP
    apart and increasing within a user."""
    place = np.arange(len(segment)) - np.searchsorted(segment, segment)
    late = segment % 2
    free = np.where(late, rows, history) - GAP * np.bincount(segment)[segment]
    drawn = (rng.random(len(segment)) * free).astype(np.int64)
    return late * history + drawn[np.lexsort((drawn, segment))] + GAP * place
