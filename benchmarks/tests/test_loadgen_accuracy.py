"""The accuracy benchmark: its script, its arithmetic, and one run against its server without looking at the clock."""

import asyncio

import numpy as np
import pytest
from aiohttp import web

from benchmarks import accuracy, scripted
from benchmarks.scripted import STALL_SECONDS, STALL_TEXT, answer_to
from loadgen.client import Client, StreamEvents
from loadgen.records import RequestRecord
from loadgen.runner import MonotonicClock, Run

SEED = 7
PROMPTS = accuracy.texts(300, 3, None)


def played(prompts: tuple[str, ...], late: float = 0.0, role_at: float | None = None) -> list[RequestRecord]:
    """What a client would record of the script when every chunk with tokens came `late` seconds late."""
    records = []
    truth = accuracy.true_times(prompts, [float(n) for n in range(len(prompts))])
    for index, text in enumerate(prompts):
        record = RequestRecord(index, "online", float(index), 8, 100, sent_at=float(index))
        events, answer = StreamEvents(record), answer_to(text)
        events.feed(scripted.chunk(0, role=True), index + (0.0 if role_at is None else role_at))
        for number, (at, (_, tokens)) in enumerate(zip(truth[index], answer.chunks, strict=True)):
            events.feed(scripted.chunk(tokens, last=number == len(answer.chunks) - 1), at + late)
        events.close(truth[index][-1] + late)
        records.append(record)
    return records


def test_the_script_has_everything_it_promises_and_repeats_itself() -> None:
    answers = [answer_to(text) for text in PROMPTS]
    assert {answer.kind for answer in answers} == {"ok", "429", "cut", "hang"}
    assert answers == [answer_to(text) for text in PROMPTS]
    sizes = {b - a for answer in answers for (_, a), (_, b) in zip(answer.chunks, answer.chunks[1:], strict=False)}
    assert sizes == {1, 2, 4}
    assert all(0.005 <= answer.chunks[0][0] <= 0.2 for answer in answers)


def test_errors_are_what_was_added() -> None:
    records = played(PROMPTS, late=0.003)
    errors = accuracy.against(records, accuracy.true_times(PROMPTS, [float(n) for n in range(300)]))
    assert errors.ttft == pytest.approx(np.full(300, 0.003))
    assert errors.tbt == pytest.approx(np.zeros(sum(len(answer_to(text).chunks) - 1 for text in PROMPTS)), abs=1e-9)
    stamps = {
        text: [0.0, *(offset - 0.001 for offset, _ in answer_to(text).chunks)] for text in PROMPTS
    }  # written 1 ms before the script
    assert accuracy.written(records, PROMPTS, stamps).ttft == pytest.approx(np.full(300, 0.004))


def test_a_role_only_chunk_that_were_taken_for_a_token_would_show() -> None:
    records = played(PROMPTS, role_at=0.001)
    truth = accuracy.true_times(PROMPTS, [float(n) for n in range(300)])
    assert np.abs(accuracy.against(records, truth).ttft).max() < 1e-9
    for record in records:  # what a tool without the rule would keep
        record.first_token_at = record.scheduled_at + 0.001
    assert np.abs(accuracy.against(records, truth).ttft).max() > 0.1


def test_a_stall_moves_the_p99_of_the_script() -> None:
    prompts, arrived = accuracy.texts(200, 1, 100), [0.04 * n for n in range(200)]
    assert prompts[100].startswith(STALL_TEXT)
    truth = accuracy.true_times(prompts, arrived)
    first = [times[0] - at for times, at in zip(truth, arrived, strict=True)]
    begin = arrived[100]
    assert first[100] == pytest.approx(STALL_SECONDS)
    held = [at for at in arrived if begin <= at < begin + STALL_SECONDS - 0.2]
    assert len(held) >= 40 and sum(value > 0.2 for value in first) >= len(held)
    assert max(first) <= STALL_SECONDS + 0.2


def test_outcomes_that_are_not_the_scripted_ones_are_named() -> None:
    kinds = [answer_to(text).kind for text in PROMPTS]
    problems = accuracy.wrong_outcomes(played(PROMPTS), PROMPTS)  # everything answered whole
    assert len(problems) == sum(kind != "ok" for kind in kinds) > 0
    short = played(PROMPTS)
    good = next(record for record in short if kinds[record.index] == "ok" and record.chunk_tokens[-1] == 1)
    good.chunk_tokens[-1] = 2
    assert any(f"request {good.index}:" in text for text in accuracy.wrong_outcomes(short, PROMPTS))


async def test_the_client_records_what_the_server_says_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client and server in one loop; nothing here depends on how long anything took."""
    monkeypatch.setattr(accuracy, "TIMEOUT", 2.0)
    prompts = accuracy.texts(60, SEED, None)
    assert {answer_to(text).kind for text in prompts} == {"ok", "429", "cut", "hang"}
    runner = web.AppRunner(scripted.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    plan = accuracy.make_plan(f"http://{host}:{port}", prompts, 100.0, 0)
    clock = MonotonicClock()
    async with Client(plan.target, clock.now) as client:
        run = Run(plan, clock, client)
        clock.start(asyncio.get_running_loop().time())
        records = (await run.execute()).requests
    await runner.cleanup()
    assert len(records) == 60 and accuracy.wrong_outcomes(records, prompts) == []
