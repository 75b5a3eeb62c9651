"""Options of a generated log. Importing this module needs no numpy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gem_core.protocols import ComponentConfig

ROWS_PER_USER = 128
"""Mean number of rows of a user where `users` is not given."""

MOST_ROWS_PER_USER = 10_000

START = 1_767_225_600
"""2026-01-01: the first second of the rows of every generated log, in seconds since 1970."""

DAY = 86_400
EVENTS = {"impression": 256, "click": 64, "conversion": 32}
"""Event types and the newest events of each that a request sees."""


class Conversion(BaseModel):
    """A kind of conversion: `rate` of the clicks on `advertisers` of its kind, exponential delay of mean `delay_days`
    after the click; one later than `window_days` still happens, but is not attributed (label 0)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: float = Field(gt=0, lt=1)
    window_days: float = Field(gt=0)
    delay_days: float = Field(gt=0)
    advertisers: Literal["shop", "app"] = "shop"


CONVERSIONS = {
    "add_to_cart": Conversion(rate=0.15, window_days=1, delay_days=0.2),
    "purchase": Conversion(rate=0.05, window_days=7, delay_days=2.5),
    "app_install": Conversion(rate=0.08, window_days=3, delay_days=0.5, advertisers="app"),
}


class GeneratedConfig(ComponentConfig):
    """`rows`, `users` (default: one per 128 rows): size of the log; the world (ads, tastes, effects) depends on neither.
    `ads`, `advertisers`, `categories`: the inventory; an ad runs for half of the time. `days`: of the rows, the last
    `validation_days` and `test_days` of them held out; `history_days` before them are there as events alone. `seed`: of
    the world and the log. `ctr`: clicks per row. `conversions`: kinds by name, in place of the three built in.
    `sequence`, `latent`, `drift`: strength of the planted effects of history, of user-ad interactions and of time.
    `max_length`: newest events that a request sees, by event type."""

    rows: int = Field(262_144, ge=1)
    users: int | None = Field(None, ge=1)
    ads: int = Field(4_000, ge=1)
    advertisers: int = Field(400, ge=1)
    categories: int = Field(24, ge=3, le=1_000)
    days: int = Field(90, ge=3)
    history_days: int = Field(60, ge=0)
    validation_days: int = Field(9, ge=1)
    test_days: int = Field(9, ge=1)
    seed: int = Field(0, ge=0)
    ctr: float = Field(0.04, gt=0, lt=1)
    conversions: dict[str, Conversion] = CONVERSIONS
    sequence: float = Field(1.0, ge=0)
    latent: float = Field(1.0, ge=0)
    drift: float = Field(1.0, ge=0)
    max_length: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.validation_days + self.test_days >= self.days:
            raise ValueError(
                f"validation_days + test_days: expected less than days ({self.days}), found "
                f"{self.validation_days + self.test_days}"
            )
        if not self.user_count <= self.rows <= MOST_ROWS_PER_USER * self.user_count:
            raise ValueError(
                f"users: expected 1 to {MOST_ROWS_PER_USER:,} rows per user on average, found {self.rows:,} rows and "
                f"{self.user_count:,} users"
            )
        if self.advertisers < self.categories:
            raise ValueError(f"advertisers: expected at least one per category ({self.categories})")
        if self.ads < 8 * self.categories:  # so that each category has a running ad at any time
            raise ValueError(f"ads: expected at least 8 per category ({8 * self.categories}), found {self.ads}")
        for name in self.conversions:
            if not name or name == "click" or "." in name or "/" in name:
                raise ValueError(f'conversions: {name!r} cannot be a name: not "click", nothing with "." or "/"')
        for event, length in self.max_length.items():
            if event not in EVENTS or length < 1:
                raise ValueError(
                    f"max_length: expected at least 1 event of {', '.join(EVENTS)}, found {event}: {length}"
                )
        return self

    @property
    def user_count(self) -> int:
        """Number of users."""
        return max(1, self.rows // ROWS_PER_USER) if self.users is None else self.users

    @property
    def tasks(self) -> tuple[str, ...]:
        """The objectives: click, then the kinds of conversions."""
        return ("click", *self.conversions)

    @property
    def first_second(self) -> int:
        """Where the events begin, in seconds since 1970."""
        return START - DAY * self.history_days

    @property
    def seconds(self) -> int:
        """From the first event to the last row."""
        return DAY * (self.history_days + self.days)

    def edges(self) -> tuple[int, int]:
        """Seconds since 1970 where validation and test begin."""
        test = START + DAY * (self.days - self.test_days)
        return test - DAY * self.validation_days, test
