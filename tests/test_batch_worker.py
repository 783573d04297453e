"""The worker under power loss, faulty disks, many jobs and a clock that jumps.

Power loss: a scenario runs once over a recording disk; every prefix of its log, in three readings of the disk after a
crash, is started again and must keep each acknowledged change. Then each fsync and rename is left out of the log: each
time some image must break a promise, or the operation would be for nothing.
"""

import asyncio
import contextlib
import errno
import gc
import io
import itertools
import json
import os
import pickle
import sqlite3
import threading
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from batch_tools import (
    add_batch,
    add_file,
    answer,
    batch_server,
    batch_worker,
    check_ended,
    create,
    eventually,
    jsonl,
    leftovers,
    line,
    make_worker,
    open_folder,
    submit,
    until,
    upload,
)
from fake_engine import MODEL
from hypothesis import given
from hypothesis import strategies as st
from recording_disk import IO_ERROR, NO_SPACE, READINGS, FaultyDisk, Log, RecordingDisk, write_image
from support.http import get
from support.lazy import openai

from engine.api import RequestClass
from engine.text.tokenizer import Tokenizer
from gateway.batch.feeder import CONTROL_RANK, LineOrder
from gateway.batch.input import LinePlaces, check_input, prefix_key, read_lines
from gateway.batch.line import LineAnswer, LineOrigin
from gateway.batch.run import BatchLimits, FeedOrder, Job, LineSizes, Window, by_deadline
from gateway.batch.worker import BatchWorker
from gateway.generate.answering import at_half_speed
from gateway.models import ModelNames
from gateway.store.disk import Disk
from gateway.store.folder import StateFolder
from gateway.store.objects import BatchJob, BatchStatus, LineRef, new_batch_id

ONE_BY_ONE = BatchLimits(window_lines=2, retry_seconds=0.01, tick_seconds=0.05)


# ---- power loss


@dataclass
class Recorded:
    """A log with acknowledgements, and the uploaded content."""

    log: Log
    content: bytes
    ids: set[str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Upload, batch, results in several groups, completion, deletion; each answer is noted in the log as it came."""
    root = tmp_path_factory.mktemp("recorded") / "state"
    log = Log(root)
    content = jsonl([line(1), line(2, prompt="bad"), line(3)])

    async def record() -> None:
        folder = await open_folder(root, RecordingDisk(log), log.on_commit)
        worker = make_worker(folder, ONE_BY_ONE, answer)
        await worker.start()
        file = await add_file(folder, content)
        log.add("ack", "file", file.id)
        batch = await folder.store.create_batch(
            BatchJob(new_batch_id(), "", "/v1/completions", file.id, "24h", 1, 2**40)
        )
        log.add("ack", "batch", batch.id)
        worker.added(batch)
        seen = 0
        while (now := await folder.store.load_batch(batch.id)).status is not BatchStatus.COMPLETED:
            if now.completed + now.failed > seen:
                seen = now.completed + now.failed
                log.add("ack", "counted", seen)
            await asyncio.sleep(0)
        log.add("ack", "completed", [now.output_file_id, now.error_file_id])
        await worker.stop()
        await folder.close()

    asyncio.run(record())
    return Recorded(log, content, {"id-1", "id-2", "id-3"})


async def broken_promise(recorded: Recorded, log: Log, end: int, reading: str, target: Path) -> str | None:
    """Start from an image, let the batch end, and look; None if everything that was promised holds."""
    await asyncio.to_thread(write_image, log, end, reading, target)
    folder = await open_folder(target)
    executed = 0

    async def counted(endpoint: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
        nonlocal executed
        executed += 1
        return await answer(endpoint, body, origin)

    try:
        worker = make_worker(folder, ONE_BY_ONE, counted)
        promised = dict(log.acknowledged(end))
        rows = await _stored(folder)
        await worker.start()
        try:
            for file_id, size in rows["files"]:
                path = folder.file_path(file_id)
                if not path.exists() or path.stat().st_size != size:
                    return "a row's file is not there, whole"
            if "file" in promised and promised["file"] not in dict(rows["files"]):
                return "an acknowledged upload is lost"
            if "batch" in promised and promised["batch"] not in rows["batches"]:
                return "an acknowledged batch is lost"
            for batch_id in rows["batches"]:
                before = rows["batches"][batch_id]
                if before[1] < promised.get("counted", 0):
                    return "counted results are lost"
                if "completed" in promised and before[0] != "completed":
                    return "an acknowledged end is lost"
                found = await _end_of(folder, worker, batch_id, recorded.ids)
                if found is not None:
                    return found
                if executed > max(0, len(recorded.ids) - before[1]):
                    return "a counted line ran again"
        finally:
            await worker.stop()
        found_files = set(leftovers(target)["files"])
        known = {file_id for file_id, _ in (await _stored(folder))["files"]}
        if found_files != known or leftovers(target)["tmp"] or leftovers(target)["journals"]:
            return "orphans are left"
        if (target / "lost+found").exists():
            return "a body that the database should know is lost"
        return None
    finally:
        await folder.close()


async def _stored(folder: StateFolder) -> dict[str, Any]:
    def work(connection: sqlite3.Connection) -> dict[str, Any]:
        files = connection.execute("SELECT id, bytes FROM files WHERE deleted_at IS NULL").fetchall()
        batches = connection.execute("SELECT id, status, completed + failed FROM batches").fetchall()
        return {"files": [tuple(row) for row in files], "batches": {row[0]: tuple(row[1:]) for row in batches}}

    return await folder.store._writer.run(work)


async def _end_of(folder: StateFolder, worker: BatchWorker, batch_id: str, ids: set[str]) -> str | None:
    for _ in range(20_000):
        if batch_id not in worker.states:
            break
        await asyncio.sleep(0.001)
    batch = await folder.store.load_batch(batch_id)
    if batch.status is not BatchStatus.COMPLETED:
        return f"stuck in {batch.status}"
    found: list[str] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        for row in folder.file_path(file_id).read_bytes().splitlines():
            try:
                found.append(json.loads(row)["custom_id"])
            except ValueError:
                return "a result row is damaged"
    if sorted(found) != sorted(ids) or (batch.completed, batch.failed) != (2, 1):
        return "a line has no row, or two"
    return None


@pytest.mark.slow
async def test_every_crash_keeps_every_promise(recorded: Recorded, tmp_path: Path) -> None:
    log = recorded.log
    kinds = [kind for kind, _, _ in log.entries]
    assert kinds.count("ack") >= 4 and kinds.count("rename") == 3, "an upload and two results"
    for end in range(len(log.entries) + 1):
        for reading in READINGS:
            found = await broken_promise(recorded, log, end, reading, tmp_path / f"{end}-{reading}")
            assert found is None, f"{found}: crash before {log.entries[end : end + 1]}, {reading}"


@pytest.mark.slow
def test_no_fsync_and_no_rename_is_for_nothing(recorded: Recorded, tmp_path: Path) -> None:
    """Without any of these operations some crash breaks a promise. (The journal needs one fsync per group, before the
    acknowledgement of the group.)"""
    barriers = recorded.log.barriers()
    assert len(barriers) >= 9
    for number in barriers:
        without = recorded.log.without(number)

        async def search(without: Log = without, number: int = number) -> bool:
            for end in range(number, len(without.entries) + 1):
                for reading in READINGS:
                    target = tmp_path / f"{number}-{end}-{reading}"
                    if await broken_promise(recorded, without, end, reading, target) is not None:
                        return True
            return False

        assert asyncio.run(search()), f"nothing broke without {recorded.log.entries[number][:2]}"


# ---- faults of the disk


@pytest.mark.slow
async def test_a_fault_at_any_operation_pauses_and_goes_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The N-th operation fails, for every N of a whole batch, results included; nothing is lost, nothing is twice."""
    disk = FaultyDisk({})
    async with batch_server(tokenizer, tmp_path, disk=disk) as (_, client):
        content = jsonl([line(i) if i % 3 else line(i, temperature=9) for i in range(4)])
        number = 0
        while True:
            file = await upload(client, content)
            disk.count, disk.faults = 0, {number: NO_SPACE}
            batch = await create(client, file.id)
            ended = await until(client, batch.id)
            assert ended.status == "completed"
            _, errors = await check_ended(client, ended, [f"id-{i}" for i in range(4)])
            assert set(errors) == {"id-0", "id-3"}
            if disk.count <= number:
                break
            number += 1
            for file_id in (ended.input_file_id, ended.output_file_id, ended.error_file_id):
                await client.files.delete(file_id)
        assert number >= 8, "journal: write, sync, folder; two results: create, write, sync, rename, folder"
        await eventually(lambda: not leftovers(tmp_path)["journals"])  # a thread removes it after the end is known
        state = leftovers(tmp_path)
        assert len(state["files"]) == 3 and not state["tmp"]


async def test_any_errno_pauses_a_batch_and_runs_no_line_again(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of the next ten operations of the disk fails with it."""
    disk = FaultyDisk({})
    limits = BatchLimits(retry_seconds=0.0005, tick_seconds=0.05)
    async with batch_server(tokenizer, tmp_path, disk=disk, limits=limits) as (served, client):
        file = await upload(client, jsonl([line(i) for i in range(2)]))
        codes = errno.ESTALE, errno.ENXIO, errno.ENOMEM, errno.EACCES, errno.EINVAL
        for code in (*codes, *sorted(errno.errorcode)[::32]):
            before = len(served.engine.requests)
            disk.count, disk.faults = 0, dict.fromkeys(range(10), code)
            batch = await create(client, file.id)
            await check_ended(client, await until(client, batch.id), ["id-0", "id-1"])
            assert disk.count > 10 and len(served.engine.requests) == before + 2, errno.errorcode[code]
    assert not [message for message in caplog.messages if "unexpected" in message]


async def test_a_fault_of_the_whole_disk_costs_no_line(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that fail for longer than a damaged file is read again, on a disk that takes no data either."""
    disk, real, reads = FaultyDisk({}), Disk().read_at, 0
    limits = BatchLimits(window_lines=2, retry_seconds=0.0005, tick_seconds=0.05, read_attempts=2)

    def read_at(*arguments: int) -> bytes:
        nonlocal reads
        if disk.faults:
            reads += 1
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(disk, "read_at", read_at)
    async with batch_server(tokenizer, tmp_path, "x", limits=limits, disk=disk, hold_after=0) as (served, client):
        batch = await submit(client, jsonl([line(i) for i in range(6)]))
        await served.engine.wait_for_event("add", 2)
        disk.faults = dict.fromkeys(range(disk.count, 10**5), IO_ERROR)
        served.engine.release()
        jobs = served.app.state.batches.jobs
        await eventually(lambda: jobs.paused and jobs._folder.disk.health.fault is not None)
        await asyncio.sleep(0.05)
        disk.faults = {}
        await check_ended(client, await until(client, batch.id), [f"id-{i}" for i in range(6)])
        assert len(served.engine.requests) == 6


async def test_a_long_fault_pauses_jobs_answers_507_and_spares_online(tokenizer: Tokenizer, tmp_path: Path) -> None:
    disk = FaultyDisk({})
    async with batch_server(tokenizer, tmp_path, disk=disk, limits=ONE_BY_ONE) as (served, client):
        disk.faults = dict.fromkeys(range(disk.count + 5, 10_000), NO_SPACE)  # the upload itself gets through
        batch = await submit(client, jsonl([line(i) for i in range(10)]))
        worker = served.app.state.batches.jobs
        await eventually(lambda: worker.paused)
        with pytest.raises(openai.InternalServerError) as caught:
            await upload(client, b"x")
        assert caught.value.status_code == 507
        online = await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert online.choices[0].text == "done"[: len(online.choices[0].text)]
        offline = [r for r in served.engine.requests if r.request_class is RequestClass.OFFLINE]
        assert len(offline) <= ONE_BY_ONE.window_lines, "no lines are run whose results cannot be kept"
        assert "tidemill_storage_fault 1.0" in (await get(served, "/metrics")).text
        ready = await get(served, "/ready")
        assert ready.status_code == 200, "chats are served"
        assert ready.json()["status"] == "degraded" and "batches pause" in ready.json()["storage"]
        disk.faults = {}
        await check_ended(client, await until(client, batch.id), [f"id-{i}" for i in range(10)])
        assert len(served.engine.requests) == 11, "nothing ran twice"


async def test_a_lost_state_folder_is_said_by_ready_and_metrics_while_chats_go_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Before the first upload, and until the folder is back."""
    place, away = tmp_path / "state", tmp_path / "away"
    async with batch_server(tokenizer, place) as (served, client):

        async def status() -> tuple[str, str]:
            answer = await get(served, "/ready")
            assert answer.status_code == 200
            return answer.json()["status"], answer.json().get("storage", "")

        async def fault() -> bool:
            return "tidemill_storage_fault 1.0" in (await get(served, "/metrics")).text

        assert await status() == ("ok", "") and not await fault()
        place.rename(away)
        degraded, why = await status()
        assert degraded == "degraded" and "state folder" in why and await fault()
        assert str(tmp_path) not in why, "anybody may ask"
        online = await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert online.choices[0].finish_reason
        away.rename(place)
        assert await status() == ("ok", "") and not await fault()


async def test_a_disk_that_hangs_does_not_hold_up_who_asks_whether_the_server_is_ready(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    answers = threading.Event()
    async with batch_server(tokenizer, tmp_path) as (served, _):
        served.app.state.context.lifecycle.ask_storage = answers.wait
        for _ in range(3):
            ready = await get(served, "/ready")
            assert (ready.status_code, ready.json()["storage"]) == (200, "the state folder does not answer")
        answers.set()


async def test_an_input_that_somebody_removed_does_not_hold_up_the_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, "x", limits=ONE_BY_ONE, hold_after=0) as (served, client):
        batch = await submit(client, jsonl([line(i) for i in range(6)]))
        await served.engine.wait_for_event("add", 2)
        (tmp_path / "files" / batch.input_file_id).unlink()
        served.engine.release()
        ended = await until(client, batch.id)
        assert ended.status == "completed" and ended.request_counts.total == 6
        assert ended.request_counts.completed + ended.request_counts.failed == 6


# ---- time


async def test_a_clock_that_jumps_a_day(tmp_path: Path) -> None:
    clock = [1_000_000.0]
    gate = asyncio.Event()

    async def held(*_: Any) -> LineAnswer:
        await gate.wait()
        return LineAnswer(200, {})

    async with batch_worker(tmp_path, held, clock=lambda: clock[0]) as worker:
        await worker.start()
        batch = await add_batch(worker._folder, jsonl([line(i) for i in range(5)]))
        worker.added(batch)
        await eventually(lambda: worker.states.get(batch.id) is BatchStatus.IN_PROGRESS)
        clock[0] -= 86_400
        await worker.tick()
        await asyncio.sleep(0.1)
        assert (await worker._store.load_batch(batch.id)).status is BatchStatus.IN_PROGRESS
        clock[0] += 3 * 86_400  # too far to be believed at once
        await worker.tick()
        await asyncio.sleep(0.1)
        assert (await worker._store.load_batch(batch.id)).status is BatchStatus.IN_PROGRESS
        for clock[0] in (1_000_000.0, 1_086_400.0):
            await worker.tick()
        await eventually(lambda: batch.id not in worker.states)
        ended = await worker._store.load_batch(batch.id)
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.EXPIRED, 0, 0)
        assert ended.times["expired_at"] == int(clock[0])


# ---- many jobs


async def test_jobs_of_a_tenant_run_by_deadline_and_memory_is_bounded(tmp_path: Path) -> None:
    """A long job has the earliest deadline. No line ends before all jobs are there."""
    running, most, ended, gate = 0, 0, [], asyncio.Event()

    async def count(endpoint: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        ended.append(body["prompt"].split()[0])
        return LineAnswer(200, {})

    async with batch_worker(tmp_path, count, BatchLimits(window_lines=16, retry_seconds=0.01)) as worker:
        jobs = [("urgent", 400, 10), *((f"job-{n}", 4, 1000) for n in range(10))]
        batches = [
            await add_batch(worker._folder, jsonl([line(i, prompt=f"{name} {i}") for i in range(size)]), 10**10, window)
            for name, size, window in jobs
        ]
        await worker.start()
        await eventually(lambda: len(worker.jobs) == len(jobs))
        gate.set()
        await eventually(lambda: not worker.states)
        assert {(await worker._store.load_batch(b.id)).status for b in batches} == {BatchStatus.COMPLETED}
    assert most <= 16
    assert ended[100:384] == ["urgent"] * 284 and len(ended) == 440


async def test_lines_are_fed_in_groups_of_equal_prefixes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [line(f"{i}-{topic}", prompt=f"topic {topic} " * 30 + str(i)) for i in range(8) for topic in "cab"]
    limits = BatchLimits(window_lines=4, retry_seconds=0.01)
    async with batch_server(tokenizer, tmp_path, limits=limits) as (served, client):
        content = jsonl([{**item, "body": {**item["body"], "max_tokens": 1}} for item in lines])
        batch = await submit(client, content)
        await until(client, batch.id)
        topics = [tokenizer.decode(r.prompt_token_ids).split()[1] for r in served.engine.requests]
        changes = sum(a != b for a, b in itertools.pairwise(topics))
        assert changes <= 2 + 2 * limits.window_lines, topics


def a_job(expires_at: int, tenant: str = "", **fields: Any) -> Job:
    return Job(BatchJob("b", tenant, "e", "f", "24h", 0, expires_at), LineSizes(100.0), **fields)


def test_a_job_is_hungry_while_it_has_lines_and_neither_rests_nor_is_settled() -> None:
    job, ref = a_job(1), LineRef(0, 1, 0, 1)
    assert FeedOrder(64).pick() is None and job.hungry
    job.exhausted = True
    assert not job.hungry
    job.retry.append(ref)
    assert job.hungry
    job.resting = True
    assert not job.hungry
    job.resting, job.write_faults = False, 1
    assert not job.hungry
    job.write_faults = 0
    job.settled.set()
    assert not job.hungry


def by_scan(jobs: list[Job], urgent_lines: int) -> Job | None:
    """The definition of a turn, over all jobs."""
    hungry = [job for job in jobs if job.hungry]
    urgent = [job for job in hungry if job.at_risk]
    if urgent and len(urgent) < len(hungry):
        is_full = sum(job.num_held for job in jobs if job.at_risk) >= urgent_lines
        hungry = [job for job in hungry if job.at_risk is not is_full]
    held = Counter[str]()
    for job in jobs:
        held[job.batch.tenant] += job.num_held
    keys = {job: (held[job.batch.tenant], by_deadline(job.batch)) for job in hungry}
    return min(keys, key=lambda job: keys[job]) if keys else None


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_those_of_a_scan_over_all_jobs(seed: int) -> None:
    random = Random(seed)
    order = FeedOrder(16)
    assert order.quantum == 4, "a quarter of the window"
    jobs = [a_job(i, tenant=random.choice("abc"), at_risk=random.random() < 0.3) for i in range(60)]
    for job in jobs:
        order.offer(job)
    for _ in range(1500):
        match random.randrange(8):
            case 0 | 1 | 2 | 3:
                expected = by_scan(jobs, 12)
                found = order.pick()
                assert found is expected
                if found is not None:
                    found.unwritten += random.randrange(5)
            case 4 | 5:
                for job in jobs:
                    if job.unwritten and random.random() < 0.5:
                        job.unwritten -= 1
                        order.offer(job)
            case 6:
                job = random.choice(jobs)
                job.at_risk = not job.at_risk
                order.offer(job)
            case _:
                job = random.choice(jobs)
                if random.random() < 0.05:
                    job.settled.set()
                job.resting, job.exhausted = random.random() < 0.3, random.random() < 0.4
                order.offer(job)


def test_the_window_counts_lines_and_bytes() -> None:
    window = Window(4, 100)
    refs = [LineRef(i, i, 0, 40) for i in range(6)]
    assert window.fitting(refs) == refs[:2]
    window.take(refs[:2])
    assert window.fitting(refs[2:]) == [] and not window.is_full
    window.release(refs[:2])
    huge = LineRef(9, 9, 0, 10**6)
    assert window.fitting([huge, *refs]) == [huge], "a line alone may have any size"
    window.take([huge])
    assert window.is_full and window.fitting(refs) == []
    small = [LineRef(i, i, 0, 1) for i in range(6)]
    window.release([huge])
    assert window.fitting(small) == small[:4]


# ---- reading input


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 10**6])
def test_lines_are_found_whatever_the_pieces(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batch.input.READ_BYTES", chunk)
    content = b'first\r\n\n  \nse"co\rnd\n' + b"x" * 50 + b"\nlast"
    found = [(r.number, r.content) for r in read_lines(io.BytesIO(content), 20)]
    assert found == [(1, b"first"), (4, b'se"co\rnd'), (5, None), (6, b"last")]
    for raw in read_lines(io.BytesIO(content), 100):
        assert content[raw.start : raw.start + raw.length] == raw.content


def test_one_long_line_costs_no_memory() -> None:
    content = io.BytesIO(b'{"a": "' + b"x" * 30_000_000 + b'"}\n' + jsonl([line(1)]))
    tracemalloc.start()
    report = check_input(content, "/v1/completions", 50_000, 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(e.code, e.line) for e in report.errors] == [("invalid_request", 1)] and peak < 8_000_000


def test_names_of_one_model_are_one_model() -> None:
    names = ModelNames(("m", "alias"), ("sql",))
    for models, code in (
        (("m", "m:flex", "alias", ""), None), (("sql", "m:sql", "sql:flex"), None), (("m", "sql"), "model_mismatch"),
        (("m", "x"), None), (("x", "y"), "model_not_found"),
    ):  # fmt: skip
        content = io.BytesIO(jsonl(line(i, model=model) for i, model in enumerate(models)))
        errors = check_input(content, "/v1/completions", 100, 1000, names).errors
        assert (errors[0].code if errors else None) == code, models


def test_prefix_keys_group_equal_beginnings() -> None:
    system = {"role": "system", "content": "s" * 600}
    keys = {prefix_key({"messages": [system, {"role": "user", "content": str(i)}]}) for i in range(5)}
    assert len(keys) == 1 and len(keys.pop()) <= 512
    assert prefix_key({"prompt": "abc"}) == b"abc"
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "image_url"}]}]
    assert prefix_key({"messages": parts}) == prefix_key({"messages": [{"role": "user", "content": "abc"}]})
    odd: list[Any] = [{}, {"prompt": [1, 2, 3]}, {"prompt": None}, {"messages": "x"}, {"messages": [1, None, {}]}]
    odd += [{"prompt": {"a": 1}}, {"messages": [{"content": [1, {"text": 5}]}]}, {"prompt": "ü" * 600}]
    assert all(len(prefix_key(body)) <= 512 for body in odd)


def test_lines_are_sorted_on_the_disk_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = jsonl(line(i, prompt=f"{7 * i % 100:03}") for i in range(100))
    expected = check_input(io.BytesIO(content), "/v1/completions", 100, 1000).lines.rows(0, 100)
    for size in (100, 99, 33):
        monkeypatch.setattr("gateway.batch.input.SPILL_LINES", size)
        found = check_input(io.BytesIO(content), "/v1/completions", 100, 1000, folder=str(tmp_path))
        assert found.lines.rows(0, 100) == expected and not list(tmp_path.iterdir())
    assert [ref.number for ref in expected[:2]] == [1, 44]


def test_places_of_lines_are_packed() -> None:
    places = LinePlaces([(1, 0, 10), (3, 20, 2**40)])
    assert len(places) == 2 and len(LinePlaces()) == 0 and LinePlaces().rows(0, 5) == []
    assert places.rows(0, 1) == [LineRef(0, 1, 0, 10)] and places.rows(1, 9) == [LineRef(1, 3, 20, 2**40)]
    assert pickle.loads(pickle.dumps(places)).rows(0, 2) == places.rows(0, 2)


def readers(path: Path) -> list[str]:
    """Other processes that have a file open."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(path) and link.parts[2] != str(os.getpid()):
                found.append(link.parts[2])
    return found


async def test_a_stop_ends_a_validation(tmp_path: Path) -> None:
    """Here it reads from a pipe without a writer: the process ends with the server, and the batch begins anew."""
    content = jsonl([line(1)])
    async with batch_worker(tmp_path, clock=lambda: 1000.0, apart=True) as worker:
        batch = await add_batch(worker._folder, content, now=1000, window=1000)
        path = worker._folder.file_path(batch.input_file_id)
        path.unlink()
        os.mkfifo(path)
        held = os.open(path, os.O_RDWR)  # else it could not even be opened
        await worker.start()
        await eventually(lambda: readers(path))
    await eventually(lambda: not readers(path))
    os.close(held)
    path.unlink()
    path.write_bytes(content)
    async with batch_worker(tmp_path, clock=lambda: 1000.0) as again:
        assert (await again._store.load_batch(batch.id)).status is BatchStatus.VALIDATING
        await again.start()
        await eventually(lambda: not again.states)
        assert (await again._store.load_batch(batch.id)).status is BatchStatus.COMPLETED


# ---- cancelling in every state


async def test_cancelling_under_validation_gives_every_line_its_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path) as (served, client):
        async with served.app.state.batches.jobs._finisher._turn:
            good, bad = [await submit(client, jsonl(lines)) for lines in ([line(1), line(2)], [line(1), line(1)])]
            for batch in (good, bad):
                assert (await client.batches.cancel(batch.id)).status == "cancelling"
        ended = await until(client, good.id)
        _, errors = await check_ended(client, ended, ["id-1", "id-2"])
        assert ended.status == "cancelled" and not served.engine.requests
        assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
        ended = await until(client, bad.id)
        assert ended.status == "cancelled" and ended.errors.data[0].code == "duplicate_custom_id"
        await check_ended(client, ended, [])


async def test_a_window_that_closes_under_validation(tmp_path: Path) -> None:
    clock = [1000.0]
    async with batch_worker(tmp_path, clock=lambda: clock[0]) as worker:
        await worker.start()
        async with worker._finisher._turn:
            batch = await add_batch(worker._folder, jsonl([line(i) for i in range(5)]), now=1000, window=10)
            worker.added(batch)
            clock[0] = 1010.0
        await eventually(lambda: not worker.states)
        ended = await worker._store.load_batch(batch.id)
        assert (ended.status, ended.total, ended.completed, ended.failed) == (BatchStatus.EXPIRED, 5, 0, 0)


async def test_cancelling_while_finalizing_comes_too_late(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, "x", hold_after=0) as (served, client):
        batch = await submit(client, jsonl([line(1)]))
        await served.engine.wait_for_event("add")
        async with served.app.state.batches.jobs._finisher._turn:
            served.engine.release()
            await until(client, batch.id, "finalizing")
            late = await client.batches.cancel(batch.id)
            assert late.status == "finalizing" and late.cancelling_at is None
        assert (await until(client, batch.id)).status == "completed"


@pytest.mark.slow
async def test_a_queued_batch_costs_the_same_whatever_its_length(tmp_path: Path) -> None:
    """The lines of batches that wait stay on the disk."""
    gate = asyncio.Event()

    async def held(*_: Any) -> LineAnswer:
        await gate.wait()
        return LineAnswer(200, {})

    async def held_bytes(lines: int, batches: int = 10) -> int:
        async with batch_worker(tmp_path / str(lines), held, BatchLimits(window_lines=8)) as worker:
            await worker.start()
            file = await add_file(worker._folder, jsonl([line(i) for i in range(lines)]))
            tracemalloc.start()
            for _ in range(batches):
                batch = BatchJob(new_batch_id(), "", "/v1/completions", file.id, "24h", 1, 2**40)
                worker.added(await worker._store.create_batch(batch))
            await eventually(lambda: len(worker.jobs) == batches and worker.window.lines == 8)
            gc.collect()
            size, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert sum(len(job.running) + len(job.retry) + job.unwritten for job in worker.jobs.values()) == 8
        return size

    short, long = await held_bytes(20), await held_bytes(2000)
    assert long < short + 10 * 2000 * 8, "less than a pointer per line"
    assert long / 10 < 64 * 1024


# ---- beside model steps


def test_work_that_nobody_waits_for_rests_as_long_as_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    now, rests = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", rests.append)

    def work(seconds: float) -> str:
        now[0] += seconds
        return "done"

    assert [at_half_speed(lambda seconds=seconds: work(seconds)) for seconds in (0.003, 7.0)] == ["done"] * 2
    assert rests == [pytest.approx(0.003), 0.05]


async def test_only_a_long_line_of_a_batch_rests(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[int] = []

    def count(work: Any) -> Any:
        rests.append(1)
        return work()

    monkeypatch.setattr("gateway.generate.answering.at_half_speed", count)
    async with batch_server(tokenizer, tmp_path) as (_, client):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert not rests
        await until(client, (await submit(client, jsonl([line(1)]))).id)
        assert not rests, "a short one asks no thread"
        await until(client, (await submit(client, jsonl([line(2, prompt="long " * 2_000)]))).id)
        assert rests


# ---- the choice of lines


class LinesAt:
    async def lines_at(self, _batch_id: str, ranks: list[int]) -> list[LineRef]:
        return [LineRef(rank, rank + 1, 100 * rank, 100) for rank in ranks]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 12), st.integers(1, 20), st.booleans(), st.booleans())
async def test_no_line_is_lost_by_a_turn(
    num_old: int, num_ahead: int, room: int, most: int, fails: bool, has_control: bool
) -> None:
    """Every line is fed or waits for any room of the window, also while a batch pauses for a common cause."""
    window = Window(room + 1, 2**30)  # a turn begins only while there is room
    run = SimpleNamespace(window=window, store=LinesAt())
    job = a_job(9, exhausted=True)
    job.retry.extend(LineRef(rank, rank + 1, 0, 100) for rank in range(num_old))
    job.ahead = list(range(num_old, num_old + num_ahead))
    job.trials.pauses = int(fails)
    job.trials.control = LineRef(CONTROL_RANK, 1, 0, 100) if has_control else None
    taken = await LineOrder(cast(Any, run), cast(Any, None)).take(job, most)
    assert len(taken) <= room + 1 and (taken or not (num_old or num_ahead))
    fed = [ref.rank for ref in taken if ref.rank != CONTROL_RANK]
    assert sorted([*fed, *(ref.rank for ref in job.retry), *job.ahead]) == list(range(num_old + num_ahead))
