"""The part `store`: a server stopped in the middle of a batch, its state damaged, and started again."""

import asyncio
import hashlib
import json
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos import load
from benchmarks.chaos.damages import Damage, State, damages
from benchmarks.chaos.promises import Promise, Scale, none_of, shown
from benchmarks.chaos.server import HANGS, Server, StartError

LINES, ENDED_LINES, DONE = 24, 4, 10
"""Lines of the batches, and how many of the second one have ended before the server is stopped."""
WAIT_SECONDS = 90.0
LEVELS = (" WARNING ", " ERROR ", " CRITICAL ")


@dataclass(slots=True)
class Found:
    """What a start on damaged state did. `known`: the server knows the running batch; `harm`: by kind."""

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
    """Damage a copy of the state, start a server on it, and look at what has become of the batches."""
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
