"""The frame of a live comparison: arms that take turns, each on servers of its own, and a table of their runs."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.live import server

Item = TypeVar("Item")
Run = TypeVar("Run")


def in_turn(items: Sequence[Item], number: int) -> list[Item]:
    """Return all items in the order of round `number`: each round begins with another item."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


class Table:
    """Aligned lines of text. `columns`: the format of each value by its title; the first column is to the left."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._formats = tuple(columns.values())
        self._widths = [max(len(title), int(re.findall(r"\d+|$", form)[0] or 0)) for title, form in columns.items()]
        self.heading = self._join(columns)

    def line(self, *values: Any) -> str:
        return self._join(map(format, values, self._formats))

    def _join(self, cells: Iterable[str]) -> str:
        name, *others = zip(cells, self._widths, strict=True)
        return " ".join([name[0].ljust(name[1]), *(cell.rjust(width) for cell, width in others)])


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison: flags of its servers, their number, and settings of the load."""

    flags: Sequence[str] = ()
    servers: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


def compare(
    folder: Path,
    flags: Sequence[str],
    arms: Mapping[str, Arm],
    rounds: int,
    measure: Callable[[list[str], int, Arm], Coroutine[Any, Any, Run]],
    table: Table,
    row: Callable[[str, Sequence[Run]], str],
) -> dict[str, list[Run]]:
    """Run every arm once a round and return the runs of each arm.

    `measure` takes the addresses of an arm's servers and the number of the round. `row` makes a line of the table,
    pooled over runs: it is printed after each run, and for all runs at the end.
    """
    found: dict[str, list[Run]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for place, name in enumerate(in_turn(list(arms), number)):
            arm = arms[name]
            with ExitStack() as stack:
                states = [f"--state-dir={folder / f'state-{number}-{place}-{i}'}" for i in range(arm.servers)]
                urls = [stack.enter_context(server(folder, 0, *flags, *arm.flags, state)) for state in states]
                found[name].append(asyncio.run(measure(urls, number, arm)))
            print("  " + row(name, found[name][-1:]), flush=True)
    print(table.heading)
    for name, runs in found.items():
        print(row(name, runs), flush=True)
    return found
