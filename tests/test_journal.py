"""Stored results are verified: damage of a journal costs a second run of exactly its lines, and no line its row."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from batch_tools import (
    add_batch,
    batch_server,
    eventually,
    jsonl,
    line,
    make_worker,
    never_ran,
    open_folder,
    submit,
    until,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.fuzz import fuzz

from engine.text.tokenizer import Tokenizer
from gateway.batch.finish import Finisher
from gateway.batch.line import LineAnswer, LineOrigin
from gateway.batch.results import RESULT_DAMAGED, frame, intact_parts, is_intact, response_row, unfinished_row, unframe
from gateway.batch.run import BatchLimits
from gateway.store.disk import Disk
from gateway.store.folder import StateFolder
from gateway.store.objects import BatchJob, BatchStatus, Usage

LIMITS = BatchLimits(window_lines=4, retry_seconds=0.001, tick_seconds=0.02)
LINES, ENDED = 16, 9
BATCH = "batch_" + "0" * 32


# ---- rows


@fuzz(100)
@given(
    st.integers(0, 49_999), st.booleans(), st.tuples(*[st.integers(0, 2**40)] * 4), st.binary(max_size=300), st.data()
)
def test_a_row_is_read_as_it_was_written_or_not_at_all(
    rank: int, succeeded: bool, used: tuple[int, ...], content: bytes, data: st.DataObject
) -> None:
    usage, row = Usage(*used), b'{"id":' + content + b"}\n"
    whole = frame(BATCH, rank, succeeded, usage, row)
    found = unframe(BATCH, rank, succeeded, whole)
    assert found is not None and found == (row, usage)
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(whole)
    changed[place] ^= 1 << bit
    assert unframe(BATCH, rank, succeeded, bytes(changed)) is None
    assert unframe(BATCH, rank, succeeded, whole[:place]) is None
    assert unframe(BATCH, rank, not succeeded, whole) is None
    assert unframe(BATCH, rank + 1, succeeded, whole) is None
    assert unframe("batch_" + "1" * 32, rank, succeeded, whole) is None


def test_every_changed_bit_of_a_result_row_is_found() -> None:
    for row in (response_row("a", 200, {"x": [1, "é"]}), unfinished_row(None, "c", "m")):
        assert row.endswith(b"\n") and is_intact(row[:-1]) and json.loads(row)["id"].startswith("batch_req_")
        for place in range(len(row) - 1):
            for bit in range(8):
                changed = bytearray(row[:-1])
                changed[place] ^= 1 << bit
                assert not is_intact(bytes(changed)), (place, bit)
    assert not is_intact(b'{"id":"batch_req_' + b"a" * 32 + b'","custom_id":"without a checksum"}')


def content_of(path: Path, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return b"".join(intact_parts(descriptor, size))
    finally:
        os.close(descriptor)


ROWS = [response_row(f"id-{i}", 200, {"text": "x" * (i * 40)}) for i in range(6)]


@fuzz(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, sum(map(len, ROWS)) - 1), length=st.integers(1, 60), value=st.integers(1, 255))
@example(place=len(ROWS[0]) - 1, length=1, value=7)  # a line end
@example(place=len(ROWS[0]) + 3, length=1, value=ord("b") ^ ord("\n"))  # a line end too many
def test_damage_of_a_result_file_costs_the_rows_that_it_touches(
    tmp_path: Path, place: int, length: int, value: int
) -> None:
    content = bytearray(b"".join(ROWS))
    size = len(content)
    for at in range(place, min(place + length, size)):
        content[at] ^= value
    path = tmp_path / "result"
    path.write_bytes(content)
    sent = content_of(path, size).splitlines(keepends=True)
    starts = [sum(map(len, ROWS[:i])) for i in range(len(ROWS) + 1)]
    untouched = [
        row for row, a, b in zip(ROWS, starts, starts[1:], strict=False) if b - 1 <= place or a >= place + length
    ]
    assert [row for row in sent if json.loads(row)["error"] is None] == untouched
    errors = [json.loads(row)["error"]["code"] for row in sent if row not in ROWS]
    assert set(errors) <= {RESULT_DAMAGED} and (bool(errors) or untouched == ROWS)
    assert content_of(path, size).splitlines(keepends=True) == sent, "the same at each download"


@pytest.mark.parametrize("left", [0, 1, len(ROWS[0]), len(ROWS[0]) + 9])
def test_a_result_file_that_ends_early_says_so(tmp_path: Path, left: int) -> None:
    whole = b"".join(ROWS)
    (tmp_path / "result").write_bytes(whole[:left])
    *_, last = content_of(tmp_path / "result", len(whole)).splitlines()
    assert f"{len(whole) - left} bytes too short" in json.loads(last)["error"]["message"]


def test_pages_that_the_disk_cannot_read_cost_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [response_row(f"id-{i}", 200, {"text": "x" * 1000}) for i in range(30)]
    (tmp_path / "result").write_bytes(b"".join(rows))
    real = os.pread

    def pread(descriptor: int, length: int, start: int) -> bytes:
        if start <= 8192 < start + length:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, length, start)

    monkeypatch.setattr(os, "pread", pread)
    sent = content_of(tmp_path / "result", sum(map(len, rows))).splitlines(keepends=True)
    assert 23 <= sum(row in rows for row in sent) <= 26 and sum(row not in rows for row in sent) == 1


async def test_a_damaged_result_file_is_delivered_without_its_damaged_rows(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with batch_server(tokenizer, tmp_path) as (_, client):
        batch = await until(client, (await submit(client, jsonl([line(i) for i in range(5)]))).id)
        path = tmp_path / "files" / batch.output_file_id
        content = bytearray(path.read_bytes())
        content[len(content.splitlines()[0]) // 2] ^= 1
        path.write_bytes(content)
        rows = [json.loads(row) for row in (await client.files.content(batch.output_file_id)).text.splitlines()]
        assert [row["error"] and row["error"]["code"] for row in rows] == [RESULT_DAMAGED, None, None, None, None]
        path = tmp_path / "files" / batch.input_file_id
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(Exception, match="Upload it again"):
            await client.files.content(batch.input_file_id)


# ---- a batch that was cut off


@dataclass
class Base:
    """A state folder with a batch that has `ENDED` results of `LINES`."""

    root: Path
    batch: BatchJob
    places: list[tuple[int, int, int]]

    @contextlib.contextmanager
    def copy(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            yield shutil.copytree(self.root, Path(folder) / "state")


class Engine:
    """Answers lines; no more than `limit`."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.seen: list[int] = []

    async def __call__(self, endpoint: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
        if len(self.seen) >= self.limit:
            await asyncio.Event().wait()
        self.seen.append(body["k"])
        if body["k"] % 5 == 1:
            return LineAnswer(400, {"answer": body["k"]})
        return LineAnswer(200, {"answer": body["k"]}, Usage(body["k"], 0, 1, 0))


async def stored(folder: StateFolder, batch: BatchJob, condition: Callable[[BatchJob], bool]) -> BatchJob:
    """Return the batch once it is so."""
    while True:
        found = await folder.store.load_batch(batch.id)
        if condition(found):
            return found
        await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    root = tmp_path_factory.mktemp("base") / "state"

    async def build() -> BatchJob:
        folder = await open_folder(root)
        worker = make_worker(folder, LIMITS, Engine(ENDED))
        await worker.start()
        lines = [{**line(i), "custom_id": f"c{i}", "body": {"k": i}} for i in range(LINES)]
        batch = await add_batch(folder, jsonl(lines), int(time.time()))
        worker.added(batch)
        found = await stored(folder, batch, lambda batch: batch.completed + batch.failed == ENDED)
        await worker.stop()
        await folder.close()
        return found

    batch = asyncio.run(build())
    rows = sql(root, "SELECT rank, result_start, result_length FROM lines WHERE succeeded IS NOT NULL ORDER BY 2")
    return Base(root, batch, rows)


def sql(root: Path, query: str, *values: Any) -> list[Any]:
    connection = sqlite3.connect(root / "tidemill.db", isolation_level=None)
    try:
        return connection.execute(query, values).fetchall()
    finally:
        connection.close()


async def resume(root: Path, batch: BatchJob, limits: BatchLimits = LIMITS) -> tuple[BatchJob, list[int]]:
    """Start on the folder, let the batch end; returns it and the lines that ran."""
    folder, engine = await open_folder(root), Engine()
    worker = make_worker(folder, limits, engine)
    try:
        await worker.start()
        await eventually(lambda: batch.id not in worker.states)
        await worker.stop()
        return await folder.store.load_batch(batch.id), engine.seen
    finally:
        await folder.close()


def rows_of(root: Path, batch: BatchJob) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    files = (batch.output_file_id, batch.error_file_id)
    output, errors = (
        [json.loads(row) for row in (root / "files" / name).read_bytes().splitlines()] if name else [] for name in files
    )
    return output, errors


def check_whole(root: Path, batch: BatchJob) -> None:
    """Every line has its one right row, and counts and usage are those of the rows."""
    output, errors = rows_of(root, batch)
    assert sorted(row["custom_id"] for row in output + errors) == sorted(f"c{i}" for i in range(LINES))
    for row in output + errors:
        assert row["response"]["body"] == {"answer": int(row["custom_id"][1:])}
        assert (row["response"]["status_code"] == 200) is (row in output)
    assert (batch.status.value, batch.total, batch.completed, batch.failed) == (
        "completed", LINES, len(output), len(errors)
    )  # fmt: skip
    assert batch.usage == Usage(sum(int(row["custom_id"][1:]) for row in output), 0, len(output), 0)
    assert not list((root / "journals").iterdir()) and not list((root / "tmp").iterdir())


Damage = Callable[[Path, Base], None]


async def check_damage(base: Base, damage: Damage, lost: int | None = None) -> None:
    """After the damage, exactly `lost` of the lines that had ended run again, and all rows are right."""
    with base.copy() as root:
        damage(root, base)
        batch, seen = await resume(root, base.batch)
        check_whole(root, batch)
        assert len(seen) == len(set(seen))
        if lost is not None:
            assert len(seen) == LINES - ENDED + lost


def journal(root: Path, base: Base) -> Path:
    return root / "journals" / base.batch.id


def nothing_but_zeros(root: Path, base: Base) -> None:
    path = journal(root, base)
    path.write_bytes(bytes(path.stat().st_size))


def swap_places(root: Path, base: Base) -> None:
    (a, start, length), (b, other, size) = base.places[:2]
    for rank, at, long in ((a, other, size), (b, start, length)):
        sql(root, "UPDATE lines SET result_start = ?, result_length = ? WHERE rank = ?", at, long, rank)


def all_at_one_place(root: Path, base: Base) -> None:
    _, start, length = base.places[0]
    query = "UPDATE lines SET result_start = ?, result_length = ? WHERE succeeded IS NOT NULL"
    sql(root, query, start, length)


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda root, base: journal(root, base).unlink(), ENDED),
        (nothing_but_zeros, ENDED),
        (swap_places, 2),
        (all_at_one_place, ENDED - 1),
        (lambda root, _: sql(root, "UPDATE lines SET result_start = result_start + 5 WHERE succeeded = 1"), None),
        (lambda root, _: sql(root, "UPDATE lines SET result_length = 1 << 60 WHERE succeeded IS NOT NULL"), ENDED),
        (lambda root, _: sql(root, "UPDATE lines SET result_start = -3 WHERE succeeded IS NOT NULL"), ENDED),
        (lambda root, _: sql(root, "UPDATE lines SET succeeded = 1 - succeeded WHERE rank = 0"), 1),
        (lambda root, _: sql(root, "UPDATE batches SET completed = 0, failed = 0, output_tokens = 77"), 0),
        (lambda root, _: sql(root, f"UPDATE batches SET completed = {LINES}, failed = 0"), 0),
        (lambda root, _: sql(root, "DELETE FROM lines WHERE rank % 3 = 0"), None),
        (lambda root, base: (journal(root, base).unlink(), sql(root, "DELETE FROM lines")), ENDED),
    ],
)  # fmt: skip
def test_damage_of_journal_and_index(base: Base, damage: Damage, lost: int | None) -> None:
    asyncio.run(check_damage(base, damage, lost))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_damage_of_the_journal_costs_exactly_its_rows(base: Base, data: st.DataObject) -> None:
    size = (base.root / "journals" / base.batch.id).stat().st_size
    changes = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 255)), max_size=4))
    ends = [start + length + extra for _, start, length in base.places for extra in (-1, 0, 1)]
    cuts = st.sampled_from([at for at in ends if at <= size]) | st.integers(0, size)
    end = data.draw(st.none() | cuts)
    tail = data.draw(st.binary(max_size=20))

    def damage(root: Path, base: Base) -> None:
        content = bytearray(journal(root, base).read_bytes())
        for place, value in changes:
            content[place] ^= value
        journal(root, base).write_bytes(bytes(content[:end]) + tail)

    before = (base.root / "journals" / base.batch.id).read_bytes()
    with base.copy() as root:
        damage(root, base)
        after = journal(root, base).read_bytes()
    lost = sum(before[start : start + length] != after[start : start + length] for _, start, length in base.places)
    asyncio.run(check_damage(base, damage, lost))


@pytest.fixture
def root(base: Base) -> Iterator[Path]:
    """The state folder of the batch that was cut off, to be damaged."""
    with base.copy() as copied:
        yield copied


async def until_finalizing(root: Path, batch: BatchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all lines end, and stop before the result files are built."""
    with monkeypatch.context() as patch:
        patch.setattr(Finisher, "finish", lambda *_: asyncio.Event().wait())
        folder = await open_folder(root)
        worker = make_worker(folder, LIMITS, Engine())
        await worker.start()
        await stored(folder, batch, lambda batch: batch.status is BatchStatus.FINALIZING)
        await worker.stop()
        await folder.close()


@pytest.mark.parametrize("lost", [1, LINES])
async def test_a_batch_that_was_finalizing_runs_lost_lines_again(
    base: Base, root: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    await until_finalizing(root, base.batch, monkeypatch)
    path = journal(root, base)
    os.truncate(path, path.stat().st_size - 1 if lost == 1 else 0)
    batch, seen = await resume(root, base.batch)
    check_whole(root, batch)
    assert len(seen) == lost


async def test_damage_while_the_batch_runs_is_found_at_its_end(
    base: Base, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Finisher.finish

    async def finish(finisher: Finisher, batch: BatchJob, status: BatchStatus) -> None:
        if path.exists() and not damaged:
            damaged.append(path.write_bytes(b"?" + path.read_bytes()[1:]))
        await real(finisher, batch, status)

    path, damaged = journal(root, base), list[int]()
    monkeypatch.setattr(Finisher, "finish", finish)
    batch, seen = await resume(root, base.batch)
    check_whole(root, batch)
    assert len(seen) == LINES - ENDED + 1 and damaged


async def test_a_disk_that_spoils_every_row_ends_its_batch_with_error_rows(
    base: Base, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "read_at", spoil_journal(Disk().read_at))
    limits = BatchLimits(window_lines=4, retry_seconds=0.001, tick_seconds=0.02, attempts=2)
    batch, seen = await resume(root, base.batch, limits)
    output, errors = rows_of(root, batch)
    assert (batch.status.value, batch.completed, batch.failed) == ("completed", 0, LINES) and not output
    assert {row["error"]["code"] for row in errors} == {"result_unavailable"} and batch.usage == Usage()
    assert sorted(row["custom_id"] for row in errors) == sorted(f"c{i}" for i in range(LINES))
    assert len(seen) == LINES * 3, "at the start, and twice at the end"


def spoil_journal(real: Any) -> Any:
    def read_at(_: Disk, descriptor: int, start: int, length: int) -> bytes:
        data = bytes(real(descriptor, start, length))
        inside = "/journals/" in os.readlink(f"/proc/self/fd/{descriptor}")
        return b"\1" + data[1:] if inside else data

    return read_at


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_a_batch_that_ends_early_delivers_the_rows_that_are_left(base: Base, root: Path, end: str) -> None:
    """A damaged row and a damaged input line cost themselves alone."""
    if end == "cancelled":
        sql(
            root, "UPDATE batches SET status = 'cancelling', times = ?", json.dumps({"cancelling_at": int(time.time())})
        )
    else:
        sql(root, "UPDATE batches SET expires_at = 5")
    content = bytearray(journal(root, base).read_bytes())
    content[base.places[2][1] + 20] ^= 8
    journal(root, base).write_bytes(content)
    source = root / "files" / base.batch.input_file_id
    text = source.read_bytes()
    (start,), *_ = sql(root, "SELECT start FROM lines WHERE succeeded IS NULL")
    source.write_bytes(text[:start] + b"\xff" * 9 + text[start + 9 :])
    batch, seen = await resume(root, base.batch)
    output, errors = rows_of(root, batch)
    assert (batch.status.value, seen) == (end, [])
    failed = [row for row in errors if not never_ran(row)]
    assert (batch.completed, batch.failed, len(output) + len(errors)) == (len(output), len(failed), LINES)
    codes = [row["error"]["code"] for row in errors if row["error"]]
    unfinished = LINES - ENDED + (end == "expired")  # an expired batch was checked while it could still run
    assert codes.count(f"batch_{end}") == unfinished and len(codes) == LINES - ENDED + 1
    assert [row["custom_id"] for row in errors].count(None) == 1
    assert batch.usage == Usage(sum(int(row["custom_id"][1:]) for row in output), 0, len(output), 0)
