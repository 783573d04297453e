"""The part `store`: a server stopped in the middle of a batch, its state damaged, and started again."""

import asyncio
import hashlib
import json
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos import load
from benchmarks.chaos.promises import Promise, Scale, none_of, shown
from benchmarks.chaos.server import HANGS, Server, StartError


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


LINES, ENDED_LINES, DONE = 24, 4, 10
"""Lines of the batches, and how many of the second one have ended before the server is stopped."""
WAIT_SECONDS = 90.0
LEVELS = (" WARNING ", " ERROR ", " CRITICAL ")


@dataclass(slots=True)
class Found:
    """Result of a start on damaged state. `known`: the server knows the running batch; `harm`: by kind."""

    name: str
    started: bool = False
    known: bool = False
    message: str = ""
    harm: Counter[str] = field(default_factory=Counter)


def lines(count: int) -> list[str]:
    """Return lines that end one after another."""
    return [
        load.line(str(i), json.dumps(load.body_of([30 + i, *range(40, 52)], 10 + 5 * i if count > ENDED_LINES else 4)))
        for i in range(count)
    ]


async def make_base(folder: Path) -> State:
    """Run one batch to its end and a second one to its middle; kill the server there."""
    server, older = Server(folder, "--max-num-seqs", "4"), folder / "older.db"
    server.begin()
    try:
        async with server.session(seconds=WAIT_SECONDS) as session:
            ended = await load.submit(session, lines(ENDED_LINES))
            first = await load.wait_batch(session, ended, time.monotonic() + WAIT_SECONDS)
            with (
                closing(sqlite3.connect(server.state / "tidemill.db")) as known,
                closing(sqlite3.connect(older)) as copy,
            ):
                known.backup(copy)
            running = await load.submit(session, lines(LINES))
            while True:
                async with session.get(f"/v1/batches/{running}") as response:
                    state = await response.json()
                if state["request_counts"]["completed"] >= DONE:
                    break
                await asyncio.sleep(0.01)
        server.kill()
    finally:
        server.end()
    return State(server.state, ended, running, first["input_file_id"], state["input_file_id"], older)


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder, by path."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


async def try_damage(base: State, damage: Damage, folder: Path, expected: dict[str, Any]) -> Found:
    """Damage a copy of the state, start a server on it, and check the batches."""
    shutil.copytree(base.folder, folder / "state")
    state = State(folder / "state", base.ended, base.running, base.ended_input, base.running_input, base.older)
    damage.act(state)
    before = contents(state.folder)
    found, server = Found(damage.name), Server(folder, state=state.folder)
    try:
        await asyncio.to_thread(server.begin)
        found.started = True
        _look_for_bodies(found, damage, before, state.folder)
        async with server.session(seconds=WAIT_SECONDS) as session:
            await _look_at_batches(session, found, damage, state, expected)
    except StartError as error:
        found.harm["starts that hang"] += HANGS in str(error)
        _look_at_refusal(found, damage, before, state.folder)
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
        found.harm[f"unexpected {type(error).__name__}: {error}"[:200]] += 1
    finally:
        await asyncio.to_thread(server.end)
    _look_at_log(found, damage, server.log.read_text(errors="replace"))
    return found


def _look_for_bodies(found: Found, damage: Damage, before: dict[str, str], folder: Path) -> None:
    """Count bodies that have gone, and journals that only a lost database could explain."""
    folders = ("files/", "journals/") if damage.forgotten else ("files/",)
    left = Counter(contents(folder).values())
    left.subtract(digest for path, digest in before.items() if path.startswith(folders))
    found.harm["files deleted"] += sum(-count for count in left.values() if count < 0)


def _look_at_refusal(found: Found, damage: Damage, before: dict[str, str], folder: Path) -> None:
    found.harm["starts refused"] += not damage.refusable
    after = contents(folder)
    for path in before:
        if not path.endswith(("-shm", "lock", "engine.pid")):
            found.harm[f"changes of {path} by a refused start"] += after.get(path) != before[path]


def _look_at_log(found: Found, damage: Damage, text: str) -> None:
    rows = [row for row in text.splitlines() if any(level in row for level in LEVELS)]
    if not found.started:
        rows = text.splitlines()[-1:]
    found.message = next(iter(rows), "")
    found.harm["tracebacks"] += "Traceback" in text
    due = damage.told and not (damage.forgotten and found.known)
    found.harm["damages without a message"] += due and not rows


async def _look_at_batches(
    session: aiohttp.ClientSession, found: Found, damage: Damage, state: State, expected: dict[str, Any]
) -> None:
    async with session.get("/v1/batches") as response:
        found.harm[f"lists that answer {response.status}"] += response.status != 200
        listed = {batch["id"]: batch for batch in (await response.json()).get("data", ())}
    found.known = state.running in listed
    if not found.known:
        found.harm["batches forgotten"] += not damage.forgotten
        return
    if damage.cancel:
        async with session.post(f"/v1/batches/{state.running}/cancel") as response:
            found.harm[f"cancels that answer {response.status}"] += response.status != 200
    batch = await load.wait_batch(session, state.running, time.monotonic() + WAIT_SECONDS)
    if damage.forgotten and batch["status"] == "failed":
        return
    rows, errors = await load.read_rows(session, batch)
    names = [str(i) for i in range(LINES)]
    judge_rows(found, damage, names, rows, errors, expected)
    wanted = {"cancelled"} if damage.cancel else {"completed"}
    found.harm[f"batches that are {batch['status']}"] += batch["status"] not in wanted
    counts = batch["request_counts"]
    right = (counts["total"], counts["completed"], counts["failed"]) == (LINES, len(rows), len(errors))
    found.harm[f"wrong counts {counts}"] += not right


def judge_rows(
    found: Found,
    damage: Damage,
    names: list[str],
    rows: list[dict[str, Any]],
    errors: list[dict[str, Any]],
    expected: dict[str, Any],
) -> None:
    """Count lines without one row, answers that differ, and answers that are lost. `expected`: answers of the
    undamaged run, by line; empty: this is it."""
    unnamed = sum(row["custom_id"] not in names for row in errors)
    found.harm["lines without one row"] += max(0, load.miscounted(names, rows + errors) - min(unnamed, damage.lost))
    found.harm["unreadable rows"] += sum("response" not in row for row in rows)
    answers = {row["custom_id"]: answer_of(row) for row in rows if "response" in row}
    found.harm["answers changed"] += sum(bool(expected) and expected[name] != answers[name] for name in answers)
    found.harm["answers lost"] += max(
        0, (DONE if damage.cancel or damage.lost > 1 else LINES - damage.lost) - len(answers)
    )
    if not expected:
        expected.update(answers)


def answer_of(row: dict[str, Any]) -> tuple[str, int]:
    """Return the text and the number of tokens of a row."""
    body = row["response"]["body"]
    return body["choices"][0]["text"], body["usage"]["completion_tokens"]


async def store(scale: Scale) -> list[Promise]:
    """Journals cut at every row, bytes flipped, databases gone, older and broken, while the server is stopped."""
    promises: list[Promise] = []
    with tempfile.TemporaryDirectory(prefix="tidemill-chaos-") as name:
        base = await make_base(Path(name))
        known, *others = damages(base)
        chosen = scale.some(others, 6)
        expected: dict[str, Any] = {}
        started = 0
        for number, damage in enumerate([known, *chosen]):
            folder = Path(name) / f"damaged-{number}"
            folder.mkdir()
            _share_profile(Path(name), folder)
            found = await try_damage(base, damage, folder, expected)
            shutil.rmtree(folder)
            started += found.started
            print(f"  {damage.name}: {'started' if found.started else 'refused'}; {found.message[:200]}", flush=True)
            promises.append(none_of(damage.name, found.harm))
        promises.append(shown("starts on damaged state", f"{started} of {1 + len(chosen)}"))
    return promises


def _share_profile(source: Path, target: Path) -> None:
    """Let a server start without a measurement of its own."""
    for path in source.glob("*.json"):
        shutil.copy(path, target)
