"""The planted truth's parameters, drawn from the seed alone: ads, tastes, effects. Nothing here depends on the log's size.

    click      ~ sigmoid(b + user + ad + surface + format + hour + <w_user, v_ad> + drift(category, surface, day) + S)
    conversion ~ sigmoid(b' + .5 <w_user, a * v_ad> + .5 S - .3 price)    given the click, for each kind, with its own a
    S           = sequence * (.7 (1 - exp(-interest)) + 2.2 (1 - exp(-4 need)) - .4 log(1 + seen))

`interest`: clicks in the ad's category, forgotten within days. `need`: clicks in the ad's category again, through the
kernel r^2 / 2 exp(-r), r = age / tau, which peaks at an age of 2 tau, 20 to 40 days by category: the need comes back.
`seen`: impressions of the ad's advertiser, forgotten within weeks. Kinds of conversions reweigh the factors v of clicks
by their own `a`: clicks teach most of what a rare conversion needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_core.data.generated.config import DAY, GeneratedConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FACTORS = 8
SURFACES = ("feed", "stories", "search", "video")
FORMATS = ("image", "video", "carousel")
COUNTRIES = ("br", "de", "fr", "gb", "in", "jp", "mx", "us")
AGES = ("18-24", "25-34", "35-44", "45-54", "55-64", "65+")
DEVICES = ("android", "ios", "desktop")
CATEGORIES_OF_DEPARTMENT = 4
INTEREST_DAYS, SEEN_DAYS, NEED_DAYS = 2.0, 20.0, (10.0, 20.0)
INTEREST, NEED, SEEN = 0.7, 2.2, -0.4
CONVERSION_SHARE, PRICE = 0.5, -0.3


@dataclass(frozen=True)
class World:
    """Parameters by category (C), ad (A, ordered by category, then start), user attribute and task.

    Attributes:
        first_ad: (C + 1,) where each category's ads begin.
        start: (A,) second when an ad begins to run; `life`: seconds that it runs, half of all.
        popularity: (A + 1,) running sum of the ads' weights, Zipf within a category.
        app: (A,) whether the ad's advertiser sells apps, else goods.
        factors: (A, 8) v. weights: (tasks, 8) per task, 1 for click, CONVERSION_SHARE * a for a conversion.
        need_tau: (C,) seconds.
    """

    config: GeneratedConfig
    first_ad: Ints
    start: Floats
    life: float
    category: Ints
    advertiser: Ints
    format: Ints
    price: Floats
    popularity: Floats
    category_popularity: Floats
    app: NDArray[np.bool_]
    quality: Floats
    factors: Floats
    category_factors: Floats
    country_factors: Floats
    age_factors: Floats
    weights: Floats
    surface_popularity: Floats
    surface: Floats
    surface_slope: Floats
    hour: Floats
    wave: Floats
    phase: Floats
    need_tau: Floats

    @staticmethod
    def draw(config: GeneratedConfig) -> World:
        """The world of a configuration's seed."""
        rng = np.random.default_rng([config.seed, 0])
        ads, categories, life = config.ads, config.categories, config.seconds / 2
        category = np.arange(ads) * categories // ads
        first_ad = np.searchsorted(category, np.arange(categories + 1))
        place, size = np.arange(ads) - first_ad[category], np.diff(first_ad)[category]
        # Evenly spaced starts, jittered: ads come all the time, and a category never runs out of them.
        start = life * (3 * (place + rng.random(ads)) / size - 1)
        rank = 1 + np.argsort(np.lexsort((rng.random(ads), category))) - first_ad[category]
        first_advertiser = np.arange(categories + 1) * config.advertisers // categories
        width = np.diff(first_advertiser)[category]
        advertiser = first_advertiser[category] + (rng.random(ads) ** 2 * width).astype(np.int64)
        centre = rng.normal(size=(categories, FACTORS))
        of_advertiser = rng.normal(size=(config.advertisers, FACTORS))
        factors = centre[category] + 0.6 * of_advertiser[advertiser] + 0.3 * rng.normal(size=(ads, FACTORS))
        own = 1 + 0.5 * rng.normal(size=(len(config.conversions), FACTORS))
        strength = 0.7 * config.latent / np.sqrt(1.45 * FACTORS)
        return World(
            config=config,
            first_ad=first_ad,
            start=start,
            life=life,
            category=category,
            advertiser=advertiser,
            format=rng.integers(0, len(FORMATS), ads),
            price=np.exp(rng.normal(3, 0.7, categories)[category] + 0.5 * rng.normal(size=ads)),
            popularity=np.concatenate([[0.0], np.cumsum(rank**-1.0)]),
            category_popularity=np.cumsum(rng.permutation(np.arange(1, categories + 1) ** -0.7)),
            app=(rng.random(config.advertisers) < 0.3)[advertiser],
            quality=0.3 * rng.normal(size=ads),
            factors=factors,
            category_factors=centre,
            country_factors=0.5 * rng.normal(size=(len(COUNTRIES), FACTORS)),
            age_factors=0.5 * rng.normal(size=(len(AGES), FACTORS)),
            weights=strength * np.concatenate([np.ones((1, FACTORS)), CONVERSION_SHARE * own]),
            surface_popularity=np.cumsum([0.5, 0.2, 0.15, 0.15]),
            surface=np.array([0.0, -0.4, 0.7, -0.2]) + 0.1 * rng.normal(size=len(SURFACES)),
            surface_slope=0.8 * config.drift * rng.permutation(np.linspace(-0.5, 0.5, len(SURFACES))),
            hour=0.2 * np.sin(2 * np.pi * (np.arange(24) - 14) / 24),
            wave=2 * np.pi / (DAY * rng.uniform(40, 120, categories)),
            phase=rng.uniform(0, 2 * np.pi, categories),
            need_tau=DAY * rng.uniform(*NEED_DAYS, categories),
        )

    def running(self, category: Ints, time: Floats, uniform: Floats) -> Ints:
        """(n,) an ad of each category that runs at each time (seconds since the first), by popularity and a uniform draw."""
        first, last = self._started(category, time - self.life), self._started(category, time)
        low, high = self.popularity[first], self.popularity[last]
        found = np.searchsorted(self.popularity, low + uniform * (high - low), side="right") - 1
        return np.clip(found, first, last - 1)

    def _started(self, category: Ints, time: Floats) -> Ints:
        """(n,) the first ad of each category that has not begun by `time`: each has one cell of equal length to begin in."""
        size = self.first_ad[category + 1] - self.first_ad[category]
        cell = np.clip((time / self.life + 1) / 3 * size, 0, size - 1).astype(np.int64) + self.first_ad[category]
        out: Ints = cell + (self.start[cell] <= time)
        return out

    def drift(self, category: Ints, surface: Ints, time: Floats) -> Floats:
        """(n,) what time (seconds since the first) adds to the logit of a click."""
        share = time / self.config.seconds - 0.5
        trend = 0.4 * self.config.drift * np.sin(time * self.wave[category] + self.phase[category])
        out: Floats = trend + share * self.surface_slope[surface]
        return out
