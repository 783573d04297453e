"""Failures of batch lines: error rows, retries, and their report to the client and the operator."""

import asyncio
import errno
import io
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from sqlite3 import DatabaseError
from typing import Any

import httpx
import pytest
from batch_tools import (
    add_batch,
    batch_server,
    batch_worker,
    check_ended,
    eventually,
    jsonl,
    line,
    rows_of,
    submit,
    until,
)
from support.tables import for_each

from engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineStepError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RetryableError,
    StreamingError,
    TidemillError,
)
from engine.text.tokenizer import Tokenizer
from gateway.batch.failures import COMMON, Cause, cause_of, kind_of, retry_after
from gateway.batch.line import LineAnswer, LineOrigin, LineRunner
from gateway.batch.run import BatchLimits
from gateway.batch.worker import BatchWorker
from gateway.http.errors import ApiError
from gateway.store.disk import StorageError
from gateway.store.objects import BatchJob, BatchStatus

QUICK = BatchLimits(retry_seconds=1e-6, tick_seconds=0.01)
NO_THREAD = RuntimeError("can't start new thread")


class GrammarQueueFull(RetryableError):
    """A busy answer of the engine that the gateway does not know by name."""


TABLE: list[tuple[BaseException, Cause]] = [
    *((OSError(code, "x"), Cause.SYSTEM) for code in sorted(errno.errorcode)),
    (ConnectionResetError(), Cause.SYSTEM),
    (MemoryError(), Cause.SYSTEM),
    (NO_THREAD, Cause.SYSTEM),
    (StorageError(), Cause.SYSTEM),
    (StreamingError("x"), Cause.SYSTEM),
    (ExceptionGroup("x", [ValueError(), ExceptionGroup("y", [OSError(errno.EMFILE, "x")])]), Cause.SYSTEM),
    (QueueFullError("x"), Cause.BUSY),
    (EngineUnavailableError("x"), Cause.BUSY),
    (GrammarQueueFull("x"), Cause.BUSY),
    (ApiError(408), Cause.BUSY),
    (ApiError(429), Cause.BUSY),
    (ApiError(503), Cause.BUSY),
    (ApiError(400), Cause.REQUEST),
    (ApiError(404), Cause.REQUEST),
    (InvalidRequestError("x"), Cause.REQUEST),
    (ContextLengthError("x"), Cause.REQUEST),
    (EngineStepError("x"), Cause.REQUEST),
    (ApiError(500), Cause.UNKNOWN),
    (TidemillError("x"), Cause.UNKNOWN),
    (ConfigError("x"), Cause.UNKNOWN),
    (TimeoutError(), Cause.UNKNOWN),
    (io.UnsupportedOperation(), Cause.UNKNOWN),
    (RuntimeError("x"), Cause.UNKNOWN),
    (RecursionError(), Cause.UNKNOWN),
    (KeyError("x"), Cause.UNKNOWN),
    (ExceptionGroup("x", [ValueError(), InvalidRequestError("x")]), Cause.UNKNOWN),
]


@for_each(("error", "cause"), TABLE)
def test_the_table_of_causes(error: BaseException, cause: Cause) -> None:
    assert cause_of(error) is cause


def test_a_busy_answer_says_when_to_try_again() -> None:
    assert retry_after(GrammarQueueFull("x", retry_after=7.0)) == 7.0
    assert retry_after(ApiError(429, headers={"retry-after": "3"})) == 3.0
    assert retry_after(ApiError(429, headers={"retry-after": "soon"})) == retry_after(ApiError(503)) > 0.0


def test_the_kind_of_an_error_is_its_type_and_place_and_no_text() -> None:
    try:
        raise ExceptionGroup("secret", [OSError(errno.EMFILE, "secret")])
    except ExceptionGroup as group:
        assert kind_of(group) == f"OSError {errno.EMFILE}"
    try:
        raise KeyError("secret")
    except KeyError as error:
        assert kind_of(error).startswith("KeyError at test_line_failures.py:") and "secret" not in kind_of(error)


Raises = Callable[[int], Exception | None]
"""The failure of the line with this number, or None."""


class Engine:
    """Runs lines: `raises` is asked at each run; `runs` counts them. No run ends before `together` lines have begun."""

    together = 0

    def __init__(self, raises: Raises) -> None:
        self.raises = raises
        self.runs: Counter[int] = Counter()

    async def run(self, endpoint: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
        number = int(body["prompt"].split()[-1])
        self.runs[number] += 1
        error = self.raises(number)
        await eventually(lambda: len(self.runs) >= self.together)
        await asyncio.sleep(0)
        if error is not None:
            raise error
        await asyncio.sleep(0.001)
        return LineAnswer(200, {"number": number})


@asynccontextmanager
async def running(
    root: Path, engine: Engine, *sizes: int, limits: BatchLimits = QUICK, fails: Raises = lambda _: None
) -> AsyncIterator[tuple[BatchWorker, list[BatchJob]]]:
    """Start a worker with batches of the given sizes.

    `fails`: the failure, or None, when results of the batch with this number are to be stored."""
    batches, first = list[BatchJob](), 0
    async with batch_worker(root, engine.run, limits) as worker:
        for size in sizes:
            lines = jsonl(line(i) for i in range(first, first + size))
            batches.append(await add_batch(worker._folder, lines, 10**10, 1000))
            first += size
        add_results = worker._store.add_results

        async def store(batch_id: str, *args: Any) -> Any:
            error = fails([batch.id for batch in batches].index(batch_id))
            if error is not None:
                raise error
            return await add_results(batch_id, *args)

        worker._store.add_results = store  # type: ignore[method-assign]
        await worker.start()
        yield worker, batches


async def counts(worker: BatchWorker, batch: BatchJob) -> tuple[BatchStatus, int, int]:
    ended = await worker._store.load_batch(batch.id)
    return ended.status, ended.completed, ended.failed


def pauses(worker: BatchWorker, batch: BatchJob) -> int:
    return worker.jobs[batch.id].trials.pauses if batch.id in worker.jobs else 0


SYSTEM_FAULTS = [
    *(OSError(code, "x") for code in (errno.EMFILE, errno.ENFILE, errno.EINVAL, errno.EAGAIN, errno.ESTALE)),
    MemoryError(),
    NO_THREAD,
    StorageError(),
]


@pytest.mark.parametrize("error", [*SYSTEM_FAULTS, ValueError("a bug")], ids=repr)
async def test_a_fault_of_the_system_or_a_bug_under_all_lines_is_never_a_row(tmp_path: Path, error: Exception) -> None:
    engine, is_bug = Engine(lambda number: error), isinstance(error, ValueError)
    size = 600 if is_bug else 10
    async with running(tmp_path, engine, size) as (worker, (batch,)):
        tries = lambda: pauses(worker, batch) if is_bug else max(engine.runs.values(), default=0)  # noqa: E731
        await eventually(lambda: tries() > 2 * QUICK.attempts)
        assert not worker.lines_ended, "many attempts, and no row"
        told = "1 batches fail" if is_bug else "a system failure"
        assert told in (worker.feeder.trouble() or "") and worker.feeder.num_paused == is_bug
        engine.raises = lambda number: None
        await eventually(lambda: not worker.states)
        assert await counts(worker, batch) == (BatchStatus.COMPLETED, size, 0)
        assert worker.feeder.trouble() is None and not worker.feeder.num_paused
        assert is_bug or worker.feeder.retries[Cause.SYSTEM] > 0


async def test_a_bug_that_begins_in_the_middle_ends_no_line(tmp_path: Path) -> None:
    left, engine = [25], Engine(lambda number: None)

    def breaks(number: int) -> Exception | None:
        left[0] -= 1
        return None if left[0] >= 0 else ValueError("a bug")

    engine.raises = breaks
    async with running(tmp_path, engine, 60) as (worker, (batch,)):
        await eventually(lambda: pauses(worker, batch) > 2 * QUICK.attempts)
        assert worker.lines_ended == {True: 25}
        engine.raises = lambda number: None
        await eventually(lambda: not worker.states)
        assert await counts(worker, batch) == (BatchStatus.COMPLETED, 60, 0)


async def test_many_batches_of_one_line_have_a_bug_in_common(tmp_path: Path) -> None:
    engine = Engine(lambda number: ValueError("a bug"))
    engine.together = 8
    async with running(tmp_path, engine, *[1] * 8, limits=replace(QUICK, retry_seconds=0.02)) as (worker, batches):
        await eventually(lambda: len(engine.runs) == 8 and min(engine.runs.values()) > QUICK.attempts)
        assert not worker.lines_ended
        engine.raises = lambda number: None
        await eventually(lambda: not worker.states)
        assert [await counts(worker, batch) for batch in batches] == [(BatchStatus.COMPLETED, 1, 0)] * 8


@pytest.mark.parametrize("size", [1, 2, 40, 300])
@pytest.mark.parametrize("poison", [1, COMMON + 2])
async def test_only_a_line_that_fails_beside_others_is_a_row(tmp_path: Path, size: int, poison: int) -> None:
    """Also if the lines that fail are the last ones of their batch, which have nothing else to run beside."""
    bad = set(range(0, size, max(1, size // poison)))
    if len(bad) == size >= COMMON:
        return
    engine = Engine(lambda number: ValueError("a bug") if number in bad else None)
    async with running(tmp_path, engine, size) as (worker, (batch,)):
        await eventually(lambda: not worker.states)
        assert await counts(worker, batch) == (BatchStatus.COMPLETED, size - len(bad), len(bad))
        assert all(engine.runs[number] >= QUICK.attempts for number in bad), "several attempts"
        assert not worker.feeder.num_paused and not worker.window.lines and not worker.window.bytes


async def test_a_batch_that_fails_does_not_hold_up_another(tmp_path: Path) -> None:
    engine = Engine(lambda number: ValueError("a bug") if number < 300 else None)
    async with running(tmp_path, engine, 300, 300) as (worker, (bad, good)):
        await eventually(lambda: good.id not in worker.states)
        assert await counts(worker, good) == (BatchStatus.COMPLETED, 300, 0)
        assert (await counts(worker, bad))[1:] == (0, 0) and worker.feeder.num_paused == 1


async def test_a_busy_engine_is_a_retry(tmp_path: Path) -> None:
    engine = Engine(lambda number: GrammarQueueFull("x", retry_after=0.001) if engine.runs[number] < 9 else None)
    async with running(tmp_path, engine, 20) as (worker, (batch,)):
        await eventually(lambda: not worker.states)
        assert await counts(worker, batch) == (BatchStatus.COMPLETED, 20, 0)
        assert worker.feeder.retries[Cause.BUSY] == 8 * 20 and worker.feeder.trouble() is None


async def test_a_line_too_large_for_the_room_waits_for_it(tmp_path: Path) -> None:
    """A line that runs again does not fit beside a line that takes long: the event loop must go on."""
    release, begun, fails = asyncio.Event(), asyncio.Event(), [True]

    async def run(endpoint: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
        if body["prompt"] == "small":
            begun.set()
            await release.wait()
        elif fails:
            await eventually(lambda: len(worker.jobs) == 2)
            fails.clear()
            raise QueueFullError("x", retry_after=0.01)
        return LineAnswer(200, {})

    limits = BatchLimits(retry_seconds=1e-6, window_lines=8, window_bytes=300)
    async with batch_worker(tmp_path, run, limits) as worker:
        prompts = "x" * 250, "small"
        batches = [await add_batch(worker._folder, jsonl([line(0, prompt=each)]), 10**10, 1000) for each in prompts]
        await worker.start()
        await eventually(lambda: not fails and begun.is_set() and worker.window.lines == 1)
        await asyncio.sleep(0.05)
        release.set()
        await eventually(lambda: not worker.states)
        for batch in batches:
            assert await counts(worker, batch) == (BatchStatus.COMPLETED, 1, 0)


async def test_results_that_cannot_be_stored_are_not_computed_again(tmp_path: Path) -> None:
    engine, limits = Engine(lambda number: None), replace(QUICK, window_lines=1000)
    errors: list[Exception] = [DatabaseError("malformed"), MemoryError(), KeyError("x"), DatabaseError("malformed")]
    fails: Raises = lambda _: errors.pop() if errors else None  # noqa: E731
    async with running(tmp_path, engine, 100, limits=limits, fails=fails) as (worker, (batch,)):
        await eventually(lambda: not worker.states)
        assert not errors and await counts(worker, batch) == (BatchStatus.COMPLETED, 100, 0)
        assert set(engine.runs.values()) == {1} and worker.trouble() is None
        assert not worker.window.lines and not worker.window.bytes


async def test_one_batch_whose_results_cannot_be_stored_leaves_room_to_others(tmp_path: Path) -> None:
    engine, limits, broken = Engine(lambda number: None), replace(QUICK, window_lines=16), {0}
    fails: Raises = lambda number: DatabaseError("malformed") if number in broken else None  # noqa: E731
    async with running(tmp_path, engine, 60, 60, limits=limits, fails=fails) as (worker, (bad, good)):
        await eventually(lambda: good.id not in worker.states)
        assert await counts(worker, good) == (BatchStatus.COMPLETED, 60, 0)
        assert sum(engine.runs[number] for number in range(60)) <= limits.window_lines
        broken.clear()
        await eventually(lambda: not worker.states)
        assert await counts(worker, bad) == (BatchStatus.COMPLETED, 60, 0)
        assert sum(engine.runs[number] for number in range(60)) <= 60 + limits.window_lines


@pytest.mark.parametrize("end", ["stop", "cancel"])
async def test_results_that_cannot_be_stored_do_not_hold_up_an_end(tmp_path: Path, end: str) -> None:
    engine, limits = Engine(lambda number: None), BatchLimits(retry_seconds=1e6)
    fails: Raises = lambda _: DatabaseError("malformed")  # noqa: E731
    async with running(tmp_path, engine, 10, limits=limits, fails=fails) as (worker, (batch,)):
        await eventually(lambda: worker.trouble() is not None)
        if end == "cancel":
            cancelling = await worker._store.cancel_batch("", batch.id, 1)
            assert cancelling is not None
            worker.cancelled(cancelling)
            await eventually(lambda: not worker.states)
    async with batch_worker(tmp_path, engine.run, QUICK) as again:
        await again.start()
        await eventually(lambda: not again.states)
        status = BatchStatus.COMPLETED if end == "stop" else BatchStatus.CANCELLED
        assert (await counts(again, batch))[0] is status


async def test_ready_and_metrics_tell_of_a_bug(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, broken = LineRunner.run, [True]

    async def fails(*args: Any) -> LineAnswer:
        if broken[0]:
            raise ValueError("a bug")
        return await answers(*args)

    monkeypatch.setattr(LineRunner, "run", fails)
    async with (
        batch_server(tokenizer, tmp_path, limits=QUICK) as (served, client),
        httpx.AsyncClient(base_url=served.url, timeout=60) as http,
    ):
        batch = await submit(client, jsonl(line(i) for i in range(20)))
        await eventually(lambda: served.app.state.batches.jobs.feeder.num_paused == 1)
        ready = (await http.get("/ready")).json()
        assert ready["status"] == "degraded" and "unexpected error" in ready["batches"] and "storage" not in ready
        metrics = (await http.get("/metrics")).text
        assert "tidemill_batch_jobs_pausing 1.0" in metrics
        assert 'tidemill_batch_line_retries_total{cause="unknown"}' in metrics
        broken[0] = False
        ended = await until(client, batch.id)
        await check_ended(client, ended, [f"id-{i}" for i in range(20)])
        assert len(await rows_of(client, ended.output_file_id)) == 20
        assert (await http.get("/ready")).json()["status"] == "ok"
