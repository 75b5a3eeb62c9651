"""Where a streamed pass over a split stands, and how what is left of it is dealt to another number of ranks.

A pass is a row of pools (`gem_core.data.readers.stream`), numbered by seed and epoch alone. They are dealt to the ranks in
turn: of `world` ranks, rank r takes the r-th, the (r + world)-th, ... A rank's position is the number of pools that it
has finished and the place within the next one. `redistribute` writes the positions of all ranks of a deal into the
state; what they leave over is dealt anew, in the same manner, whenever that state is taken up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gem_core.errors import DataError

Item = tuple[int, int]
"""A pool, and its first request that is still to be given."""


@dataclass(frozen=True)
class Deal:
    """Pools dealt to `len(at)` ranks; `at`: (pools finished, requests given of the next) of each rank."""

    at: tuple[Item, ...]

    def left(self, items: Sequence[Item]) -> list[Item]:
        """What the ranks have not given of `items`, in order."""
        return sorted(item for rank, at in enumerate(self.at) for item in rest(items[rank :: len(self.at)], at))


def rest(items: Sequence[Item], at: Item) -> list[Item]:
    """What is left of a rank's pools at a position."""
    finished, request = at
    if request and finished < len(items):
        return [(items[finished][0], request), *items[finished + 1 :]]
    return list(items[finished:])


@dataclass(frozen=True)
class Position:
    """State of one rank. `log` stands for the row groups, `pool_rows` for how they are pooled."""

    epoch: int
    seed: int
    log: str
    pool_rows: int
    rank: int
    world: int
    deals: tuple[Deal, ...] = ()
    finished: int = 0
    request: int = 0

    def items(self, pools: int) -> list[Item]:
        """All that this rank has still to give, of so many pools."""
        items: list[Item] = [(pool, 0) for pool in range(pools)]
        for deal in self.deals:
            items = deal.left(items)
        return rest(items[self.rank :: self.world], (self.finished, self.request))

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "deals": [list(map(list, deal.at)) for deal in self.deals]}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Position:
        """Of JSON."""
        deals = tuple(Deal(tuple((int(a), int(b)) for a, b in at)) for at in state["deals"])
        return Position(**{**state, "deals": deals})


SAME = ("epoch", "seed", "log", "pool_rows", "world", "deals")


def redistribute(states: Sequence[Mapping[str, Any]], world: int) -> list[dict[str, Any]]:
    """States for `world` ranks that go on where `states`, those of all ranks in order, stand.

    Over the new ranks together, every row that the old ones had not given is given once, and no other. With as many
    ranks as before the states come back as they are. The states are those of a `Loader` or of a reader of tables.

    Raises:
        DataError: it cannot be done exactly; the message says why.
    """
    if not states or world < 1:
        raise DataError(f"cannot redistribute the states of {len(states)} ranks to {world}")
    if len(states) == world:
        return [dict(state) for state in states]
    held = [rank for rank, state in enumerate(states) if state.get("skip")]
    if held:
        raise DataError(
            f"cannot redistribute: the batcher of rank {held[0]} holds back rows that it has read; save where it holds "
            "none, or train with the batcher in_order"
        )
    begun = [state for state in states if set(state) != {"epoch"}]
    _check_same(states, ("epoch",))
    if not begun:
        return [dict(states[0]) for _ in range(world)]
    if "deals" not in begun[0]:  # a split held in memory: one order of requests, of which each rank's position tells
        _check_same(states, tuple(sorted(set().union(*states))))
        return [dict(begun[0]) for _ in range(world)]
    _check_same(begun, SAME)
    first = begun[0]
    if first["world"] != len(states):
        raise DataError(f"cannot redistribute: {len(states)} states of a run of {first['world']} ranks; give all")
    wrong = [rank for rank, state in enumerate(states) if state.get("rank", rank) != rank]
    if wrong:
        raise DataError(f"cannot redistribute: state {wrong[0]} is that of rank {states[wrong[0]]['rank']}")
    at = [[int(state.get("finished", 0)), int(state.get("request", 0))] for state in states]
    new = {**first, "world": world, "deals": [*first["deals"], at], "finished": 0, "request": 0}
    return [{**new, "rank": rank} for rank in range(world)]


def _check_same(states: Sequence[Mapping[str, Any]], names: Iterable[str]) -> None:
    for name in names:
        values = [state.get(name) for state in states]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise DataError(
                f"cannot redistribute: the ranks stand at different places: {name} is {values[0]} and {values[other]}"
            )
