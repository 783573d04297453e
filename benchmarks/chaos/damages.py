"""Damages to the state folder of a server that has stopped in the middle of a batch."""

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class State:
    """A state folder with one batch that has ended and one that runs, their inputs, and a copy of the database from
    before the second one."""

    folder: Path
    ended: str
    running: str
    ended_input: str
    running_input: str
    older: Path

    @property
    def database(self) -> Path:
        return self.folder / "tidemill.db"

    @property
    def journal(self) -> Path:
        return self.folder / "journals" / self.running

    @property
    def input(self) -> Path:
        return self.folder / "files" / self.running_input


@dataclass(frozen=True, slots=True)
class Damage:
    """`lost`: the most lines that may become error rows. `refusable`: the server may refuse to start, with nothing
    changed. `told`: a message is due. `forgotten`: the server cannot know the running batch any more. `cancel`: cancel
    the batch after the start."""

    name: str
    act: Callable[[State], None]
    lost: int = 0
    refusable: bool = False
    told: bool = True
    forgotten: bool = False
    cancel: bool = False


def flip(path: Path, at: int, count: int = 1) -> None:
    """Invert bytes of a file."""
    data = bytearray(path.read_bytes())
    data[at : at + count] = bytes(byte ^ 0xFF for byte in data[at : at + count])
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def run_sql(state: State, query: str, *values: object) -> None:
    connection = sqlite3.connect(state.database, isolation_level=None)
    connection.execute(query, values)
    connection.close()


def _remove_database(state: State) -> None:
    for path in state.folder.glob("tidemill.db*"):
        path.unlink()


def _replace_database(state: State, content: bytes) -> None:
    _remove_database(state)
    state.database.write_bytes(content)


def _change_digit(state: State) -> None:
    """Change one letter of an answer so that its row stays JSON."""
    data = bytearray(state.journal.read_bytes())
    at = data.index(b'"completion_tokens":') + len(b'"completion_tokens":')
    data[at] = ord("9") if data[at] != ord("9") else ord("8")
    state.journal.write_bytes(data)


def of_journal(state: State) -> Iterator[Damage]:
    """Yield a journal cut at every row and within every row, flipped, and gone."""
    data, start = state.journal.read_bytes(), 0
    for number, row in enumerate(data.splitlines(keepends=True)):
        for where, at in (("before", start), ("within", start + len(row) // 2)):
            yield Damage(f"journal cut {where} row {number}", lambda s, at=at: cut(s.journal, at))  # type: ignore[misc]
        start += len(row)
    for part in range(1, 5):
        at = len(data) * part // 5
        yield Damage(f"journal flipped at {part}/5", lambda s, at=at: flip(s.journal, at))  # type: ignore[misc]
    yield Damage("a digit of an answer changed", _change_digit)
    yield Damage("journal gone", lambda s: s.journal.unlink())
    yield Damage("journal empty", lambda s: cut(s.journal, 0))


def of_database() -> Iterator[Damage]:
    """Yield a database that is gone, empty, older, cut and flipped, and single rows that are broken."""
    lost = {"refusable": True, "forgotten": True}
    yield Damage("database gone", _remove_database, **lost)
    yield Damage("database empty", lambda s: _replace_database(s, b""), **lost)
    yield Damage("database older", lambda s: _replace_database(s, s.older.read_bytes()), **lost)
    yield Damage("database cut", lambda s: cut(s.database, s.database.stat().st_size // 2), **lost)
    yield Damage("database header flipped", lambda s: flip(s.database, 0, 8), **lost)
    yield Damage("database page flipped", lambda s: flip(s.database, 4096, 200), **lost)
    yield Damage("database of a newer version", lambda s: run_sql(s, "PRAGMA user_version = 99"), **lost)
    for column, value in (("times", "{bad"), ("status", "frog"), ("errors", "[bad"), ("metadata", "{bad")):
        query = f"UPDATE batches SET {column} = ? WHERE id = ?"
        yield Damage(f"{column} of the ended batch broken",
                     lambda s, query=query, value=value: run_sql(s, query, value, s.ended))  # type: ignore[misc]  # fmt: skip
        yield Damage(f"{column} of the running batch broken",
                     lambda s, query=query, value=value: run_sql(s, query, value, s.running), forgotten=True)  # type: ignore[misc]  # fmt: skip
    query = "UPDATE lines SET result_start = result_start + 5 WHERE succeeded = 1 AND rank % 3 = 0"
    yield Damage("places of results wrong", lambda s: run_sql(s, query))


def of_input(state: State) -> Iterator[Damage]:
    """Yield an input with flipped bytes in its first and last line, cut, and gone."""
    size, lines = state.input.stat().st_size, state.input.read_bytes().count(b"\n")
    for cancel in (False, True):
        also = ", then cancelled" if cancel else ""
        told = not cancel
        yield Damage(
            f"first line of the input flipped{also}", lambda s: flip(s.input, 40), 1, told=False, cancel=cancel
        )
        yield Damage(f"last line of the input flipped{also}",
                     lambda s: flip(s.input, size - 40), 1, told=told, cancel=cancel)  # fmt: skip
        yield Damage(f"input gone{also}", lambda s: s.input.unlink(), lines, told=told, cancel=cancel)
    yield Damage("input cut", lambda s: cut(s.input, size // 2), lines)


def damages(state: State) -> list[Damage]:
    """List all damages for a state folder, the undamaged one first."""
    nothing = Damage("nothing", lambda _: None, told=False)
    return [nothing, *of_journal(state), *of_database(), *of_input(state)]
