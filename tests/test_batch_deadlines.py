"""Every batch ends, whatever bug it meets on its way, and lets go of its input."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from batch_tools import FAST, add_batch, batch_server, batch_worker, check_ended, eventually, jsonl, line, submit, until

from engine.text.tokenizer import Tokenizer
from gateway.batch import finish as batch_finish
from gateway.batch.input import InputReport
from gateway.batch.results import ResultBuilder
from gateway.batch.run import BatchLimits
from gateway.store.objects import BatchStatus

LINES = [line(i) for i in range(3)]
QUICK = {"retry_seconds": 0.001, "tick_seconds": 0.01}


class Faults:
    """Takes the place of `work`: raises the first `count` times it is called."""

    def __init__(self, work: Any, count: float) -> None:
        self.work, self.left, self.calls = work, count, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("a bug")
        return self.work(*args)


def fail_checks(monkeypatch: pytest.MonkeyPatch, count: float) -> Faults:
    faults = Faults(batch_finish.check_apart, count)
    monkeypatch.setattr(batch_finish, "check_apart", faults)
    return faults


def fail_builds(monkeypatch: pytest.MonkeyPatch, count: float) -> Faults:
    faults = Faults(ResultBuilder.publish, count)
    monkeypatch.setattr(ResultBuilder, "publish", lambda *args: faults(*args))
    return faults


def hang_checks(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    begun = asyncio.Event()

    async def check(*_: Any) -> InputReport:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(batch_finish, "check_apart", check)
    return begun


async def test_a_validation_that_always_fails_or_hangs_fails_its_batch(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in ("raises", "hangs"):
        faults = fail_checks(monkeypatch, float("inf")) if check == "raises" else None
        if faults is None:
            hang_checks(monkeypatch)
        limits = FAST if faults else BatchLimits(**QUICK, check_seconds=0.01)
        async with batch_server(tokenizer, tmp_path / check, limits=limits) as (served, client):
            batch = await until(client, (await submit(client, jsonl(LINES))).id)
            assert batch.status == "failed" and [e.code for e in batch.errors.data] == ["internal_error"]
            assert (batch.request_counts.total, batch.failed_at is not None) == (0, True)
            assert (faults is None or faults.calls == FAST.attempts) and not served.engine.requests
            assert (await client.files.delete(batch.input_file_id)).deleted


async def test_a_validation_that_fails_a_few_times_costs_nothing(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_checks(monkeypatch, FAST.attempts - 1)
    async with batch_server(tokenizer, tmp_path) as (_, client):
        batch = await until(client, (await submit(client, jsonl(LINES))).id)
        assert batch.status == "completed" and batch.errors is None
        await check_ended(client, batch, ["id-0", "id-1", "id-2"])


@pytest.mark.parametrize("when", ["before it hangs", "while it hangs", "while it fails"])
async def test_cancelling_does_not_wait_for_a_validation(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    begun = hang_checks(monkeypatch)
    faults = fail_checks(monkeypatch, float("inf")) if when == "while it fails" else None
    limits = BatchLimits(retry_seconds=0.05, tick_seconds=0.01, check_seconds=1e6, cancel_seconds=0.01)
    async with batch_server(tokenizer, tmp_path, limits=limits) as (served, client):
        busy = served.app.state.batches.jobs._finisher._turn if when == "before it hangs" else nullcontext()
        async with busy:
            batch = await submit(client, jsonl(LINES))
            if when != "before it hangs":
                await eventually(lambda: begun.is_set() if faults is None else faults.calls == 1)
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await until(client, batch.id)
        assert batch.status == "cancelled" and batch.errors.data[0].code == "internal_error"
        assert (await client.files.delete(batch.input_file_id)).deleted


async def test_cancelling_ends_where_results_cannot_be_built(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = fail_builds(monkeypatch, float("inf"))
    async with batch_server(tokenizer, tmp_path, "x", hold_after=0) as (served, client):
        batch = await submit(client, jsonl(LINES))
        await served.engine.wait_for_event("add")
        await client.batches.cancel(batch.id)
        batch = await until(client, batch.id)
        assert batch.status == "cancelled" and batch.errors.data[0].code == "internal_error"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (0, 3)
        assert batch.output_file_id is None and batch.error_file_id is None and faults.calls == FAST.attempts


@pytest.mark.parametrize("window", ["open", "closed"])
async def test_results_that_cannot_be_built_are_kept_until_the_window_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    """A bug that is gone by then has cost nothing."""
    clock = [1000.0]
    faults = fail_builds(monkeypatch, FAST.attempts + 3 if window == "open" else float("inf"))
    async with batch_worker(tmp_path, limits=BatchLimits(**QUICK), clock=lambda: clock[0]) as worker:
        await worker.start()
        batch = await add_batch(worker._folder, jsonl(LINES), now=1000, window=100)
        worker.added(batch)
        await eventually(lambda: faults.calls > FAST.attempts)
        assert (await worker._store.load_batch(batch.id)).status is BatchStatus.FINALIZING
        clock[0] = 1100.0 if window == "closed" else clock[0]
        await eventually(lambda: not worker.states)
        ended = await worker._store.load_batch(batch.id)
    if window == "open":
        assert (ended.status, ended.completed, ended.errors) == (BatchStatus.COMPLETED, 3, ())
    else:
        assert (ended.status, ended.total, ended.completed, ended.failed) == (BatchStatus.FAILED, 0, 0, 0)
        assert [error.code for error in ended.errors] == ["internal_error"] and ended.output_file_id is None


async def test_a_window_closes_also_over_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    async with batch_worker(tmp_path, limits=BatchLimits(**QUICK), clock=lambda: clock[0]) as worker:
        monkeypatch.setattr(worker, "_process", Faults(None, float("inf")))
        await worker.start()
        batch = await add_batch(worker._folder, jsonl(LINES), now=1000, window=100)
        worker.added(batch)
        await eventually(lambda: worker.states.get(batch.id) is BatchStatus.IN_PROGRESS)
        clock[0] = 1100.0
        await eventually(lambda: not worker.states)
        ended = await worker._store.load_batch(batch.id)
        assert (ended.status, ended.total, ended.failed) == (BatchStatus.EXPIRED, 3, 3)
