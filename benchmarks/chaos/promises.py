"""Promises of a part, how much of a part runs, and the table of both."""

import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Promise:
    """One row of the table. `kept`: None for a figure without a limit. `timing`: the load of the machine changes it."""

    name: str
    value: str
    limit: str = ""
    kept: bool | None = None
    timing: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a part. The promises are stated for a `whole` of 1."""

    seed: int
    seconds: float
    clients: int

    @property
    def whole(self) -> float:
        return self.seconds / 600.0

    def of(self, number: float, least: int = 1) -> int:
        """Scale a number of a whole run."""
        return max(least, round(number * self.whole))

    def some(self, items: Sequence[ItemT], least: int) -> list[ItemT]:
        """Draw as many items as the scale asks for, in random order."""
        return self.dice().sample(items, min(len(items), self.of(len(items), least)))

    def dice(self) -> random.Random:
        return random.Random(self.seed)


def never(name: str, count: int) -> Promise:
    return Promise(name, str(count), "0", count == 0)


def none_of(name: str, counts: Mapping[str, int]) -> Promise:
    """Promise that nothing of several kinds happened, and print the kinds that did."""
    if happened := {kind: count for kind, count in counts.items() if count}:
        print(f"  {name}: " + ", ".join(f"{count} {kind}" for kind, count in happened.items()), flush=True)
    return never(name, sum(happened.values()))


def at_most(name: str, value: float, limit: float, unit: str) -> Promise:
    return Promise(name, f"{value:.3g} {unit}", f"{limit:.3g} {unit}", value <= limit, timing=True)


def shown(name: str, value: float | str, unit: str = "") -> Promise:
    return Promise(name, f"{value:.3g} {unit}".strip() if isinstance(value, float) else value)


def show(promises: Sequence[Promise], *, loose: bool) -> bool:
    """Print the table and return whether every promise was kept. `loose`: do not count promises of time."""
    kept = True
    for promise in promises:
        counts = promise.kept is not None and not (loose and promise.timing)
        verdict = "" if promise.kept is None else "kept" if promise.kept else "BROKEN" if counts else "missed"
        kept = kept and not (counts and not promise.kept)
        print(f"  {promise.name:45} {promise.value:>14} {promise.limit:>10}  {verdict}".rstrip(), flush=True)
    return kept


Part = Callable[[Scale], Coroutine[Any, Any, list[Promise]]]
