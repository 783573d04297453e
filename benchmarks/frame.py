"""The frame of a live comparison: arms that take turns, each on a server of its own, and a table that grows with them.

A benchmark says what its arms are (flags of their servers), what one run is and what stands in a line of its table.
Knows nothing of what is measured.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.live import server

Item = TypeVar("Item")
Run = TypeVar("Run")


def in_turn(items: Sequence[Item], number: int) -> list[Item]:
    """All items in the order of round `number`: each is the first in its turn."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


class Table:
    """Aligned lines of text. `columns`: the format of each value by its title; the first is a name, to the left."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._formats = tuple(columns.values())
        self._widths = [max(len(title), int(re.findall(r"\d+|$", form)[0] or 0)) for title, form in columns.items()]
        self.heading = self._join(columns)

    def line(self, *values: Any) -> str:
        """One line of the table."""
        return self._join(map(format, values, self._formats))

    def _join(self, cells: Iterable[str]) -> str:
        name, *others = zip(cells, self._widths, strict=True)
        return " ".join([name[0].ljust(name[1]), *(cell.rjust(width) for cell, width in others)])


def compare(
    folder: Path,
    flags: Sequence[str],
    arms: Mapping[str, Sequence[str]],
    rounds: int,
    measure: Callable[[str, int], Coroutine[Any, Any, Run]],
    table: Table,
    row: Callable[[str, Sequence[Run]], str],
    beside: Callable[[int], None] | None = None,
) -> dict[str, list[Run]]:
    """Every arm once a round, and the runs of each. `measure` takes a server's address and the round's number; `row` is
    a line of the table, pooled over runs: printed after each run, and for all at the end. `beside` is called at the
    end of each round."""
    found: dict[str, list[Run]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for place, arm in enumerate(in_turn(list(arms), number)):
            state = f"--state-dir={folder / f'state-{number}-{place}'}"
            with server(folder, 0, *flags, *arms[arm], state) as url:
                found[arm].append(asyncio.run(measure(url, number)))
            print("  " + row(arm, found[arm][-1:]), flush=True)
        if beside is not None:
            beside(number)
    print(table.heading)
    for arm, runs in found.items():
        print(row(arm, runs), flush=True)
    return found
