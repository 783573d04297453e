"""The part `store` of the chaos benchmark: damages happen, and harm by a start on damaged state breaks a promise."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.damages import Damage, State, damages
from benchmarks.chaos.store import (
    DONE,
    LINES,
    Found,
    _look_at_log,
    _look_at_refusal,
    _look_for_bodies,
    contents,
    judge_rows,
)
from gateway.store.schema import SCHEMA


@pytest.fixture
def state(tmp_path: Path) -> State:
    """A state folder of two batches, two inputs and a journal of four rows."""
    folder = tmp_path / "state"
    for name in ("files", "journals"):
        (folder / name).mkdir(parents=True)
    connection = sqlite3.connect(folder / "tidemill.db")
    connection.executescript(SCHEMA)
    columns = "(id, tenant, endpoint, input_file_id, completion_window, created_at, expires_at, status)"
    for name in ("ended", "running"):
        connection.execute(f"INSERT INTO batches {columns} VALUES (?, '', '', ?, '', 0, 0, '')", (name, f"in-{name}"))
        (folder / "files" / f"in-{name}").write_text(
            "".join(f'{{"custom_id":"{i}","body":{"x" * 99}}}\n' for i in range(4))
        )
    connection.execute("INSERT INTO lines VALUES (1, 0, 0, 0, 9, 1, 0, 9, 3)")
    connection.commit()
    connection.close()
    (folder / "journals" / "running").write_text('{"usage":{"completion_tokens":12}}\n' * 4)
    (tmp_path / "older").write_bytes((folder / "tidemill.db").read_bytes()[:8192])
    return State(folder, "ended", "running", "in-ended", "in-running", tmp_path / "older")


def test_every_damage_changes_the_state(state: State, tmp_path: Path) -> None:
    whole = {path: path.read_bytes() for path in state.folder.rglob("*") if path.is_file()}
    found = damages(state)
    assert len({damage.name for damage in found}) == len(found) >= 38
    for damage in found:
        before = contents(state.folder)
        damage.act(state)
        assert (contents(state.folder) == before) == (damage.name == "nothing"), damage.name
        for path, content in whole.items():
            path.write_bytes(content)


def harm(found: Found) -> dict[str, int]:
    return {kind: count for kind, count in found.harm.items() if count}


def test_a_body_that_has_gone_is_harm_wherever_it_was(state: State) -> None:
    before, forgotten = contents(state.folder), Damage("x", lambda _: None, forgotten=True)
    (state.folder / "lost+found").mkdir()
    state.input.rename(state.folder / "lost+found" / "in")
    state.journal.rename(state.folder / "lost+found" / "journal")
    found = Found("x")
    _look_for_bodies(found, forgotten, before, state.folder)
    assert not harm(found), "the bodies were set aside"
    (state.folder / "lost+found" / "journal").unlink()
    _look_for_bodies(found, Damage("x", lambda _: None), before, state.folder)
    assert not harm(found), "the batch may have ended meanwhile"
    _look_for_bodies(found, forgotten, before, state.folder)
    assert harm(found) == {"files deleted": 1}


def test_a_refusal_is_right_for_some_damages_and_changes_nothing(state: State) -> None:
    before = contents(state.folder)
    found = Found("x")
    _look_at_refusal(found, Damage("x", lambda _: None, refusable=True), before, state.folder)
    assert not harm(found)
    state.journal.unlink()
    _look_at_refusal(found, Damage("x", lambda _: None), before, state.folder)
    assert harm(found) == {"starts refused": 1, "changes of journals/running by a refused start": 1}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("2026 WARNING tidemill.gateway: the journal is short\n", set()),
        ("2026 INFO tidemill.gateway: all is well\n", {"damages without a message"}),
        ("2026 ERROR x\nTraceback (most recent call last)\n", {"tracebacks"}),
    ],
)
def test_a_damage_needs_a_message_without_a_traceback(text: str, kinds: set[str]) -> None:
    found = Found("x", started=True)
    _look_at_log(found, Damage("x", lambda _: None), text)
    assert set(harm(found)) == kinds


def row(name: str, text: str = "a") -> dict[str, Any]:
    return {"custom_id": name, "response": {"body": {"choices": [{"text": text}], "usage": {"completion_tokens": 1}}}}


def test_lost_and_changed_answers_are_harm() -> None:
    names, expected, found = [str(i) for i in range(LINES)], dict[str, Any](), Found("x")
    whole, one = Damage("x", lambda _: None), Damage("x", lambda _: None, lost=1)
    judge_rows(found, whole, names, [row(name) for name in names], [], expected)
    assert not harm(found) and len(expected) == LINES
    judge_rows(found, one, names, [row(name) for name in names[1:]], [{"custom_id": "garbled"}], expected)
    assert not harm(found), "one line may be unreadable"
    judge_rows(found, whole, names, [row(name) for name in names[1:]], [{"custom_id": "0"}], expected)
    assert harm(found) == {"answers lost": 1}
    found = Found("x")
    rows = [row("0", "b"), {"custom_id": "unreadable"}, *map(row, names[2:])]
    judge_rows(found, whole, names, rows, [], expected)
    assert harm(found) == {"answers changed": 1, "unreadable rows": 1, "lines without one row": 1, "answers lost": 1}
    found = Found("x")
    cancelled = Damage("x", lambda _: None, cancel=True)
    judge_rows(found, cancelled, names, [], [{"custom_id": name} for name in names], expected)
    assert harm(found) == {"answers lost": DONE} and json.dumps(expected)
