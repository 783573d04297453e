"""Learned answer lengths, and the order of lines that follows from them."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from batch_tools import add_batch, batch_worker, eventually, jsonl, line
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.lengths import RANGES, AnswerLengths
from gateway.batch.limits import BatchLimits
from gateway.batch.line import LineAnswer, LineOrigin
from gateway.batch.line_order import RUN_LINES, Runs
from gateway.store.objects import LineRef, Usage

LINES = 1000
SMALL = BatchLimits(window_lines=64, retry_seconds=0.01, tick_seconds=0.05)


def learned(tokens: Any, seen: Any = lambda rank: rank % 5 == 0) -> tuple[AnswerLengths, list[LineRef]]:
    """Lengths of LINES lines of random size, of which the `seen` ones answered `tokens(ref)` tokens."""
    draw = random.Random(1)
    refs = [LineRef(rank, rank, 0, draw.randint(100, 1000)) for rank in range(LINES)]
    lengths = AnswerLengths(LINES)
    for ref in refs:
        if seen(ref.rank):
            lengths.add(ref, tokens(ref))
    return lengths, [ref for ref in refs if not seen(ref.rank)]


NOISE = random.Random(2)
CASES = {
    "equal": (lambda _: 50, 0.0),
    "noise": (lambda _: NOISE.randint(1, 99), 0.2),
    "by length": (lambda ref: ref.length // 4, 0.02),
    "by prefix": (lambda ref: 900 if ref.rank >= LINES // 2 else 3, 0.02),
    "by both": (lambda ref: ref.length // 4 + (900 if ref.rank >= LINES // 2 else 3) + NOISE.randint(-20, 20), 0.05),
}


@pytest.mark.parametrize("name", CASES)
def test_lengths_of_unfinished_lines_follow_from_the_finished_ones(name: str) -> None:
    tokens, error = CASES[name]
    lengths, rest = learned(tokens)
    truth, expected = [tokens(ref) for ref in rest], lengths.predictor()
    mean = sum(truth) / len(rest)
    assert lengths.left(sum(ref.length for ref in rest) / len(rest)) == pytest.approx(mean, rel=error + 1e-6)
    assert sum(map(expected, rest)) / len(rest) == pytest.approx(mean, rel=error + 1e-6)
    if name in ("by length", "by prefix", "by both"):
        pairs = random.Random(3).sample(list(zip(rest, truth, strict=True)), 200)
        told = [(expected(a) > expected(b)) == (x > y) for (a, x), (b, y) in zip(pairs[::2], pairs[1::2], strict=True)]
        assert sum(told) >= (45 if name == "by prefix" else 90), "which line of two is longer"
        assert lengths.stretch > 1.5
    else:
        assert lengths.stretch < 1.5, "chance is not learned"


@given(st.integers(1, RANGES), st.lists(st.tuples(st.integers(0, 999), st.integers(1, 10**6), st.integers(0, 10**5))))
def test_every_length_is_finite_whatever_has_finished(least: int, lines: list[tuple[int, int, int]]) -> None:
    lengths = AnswerLengths(1000)
    for rank, size, tokens in [*lines, *[(rank, 1, 0) for rank in range(least)]]:
        lengths.add(LineRef(rank, rank, 0, size), tokens)
    most = max((tokens for _, _, tokens in lines), default=0)
    expected = lengths.predictor()
    for rank in (0, 500, 999):
        assert 0.0 <= expected(LineRef(rank, 0, 0, 10**9)) <= 1000 * most + 1
    assert 0.0 <= lengths.left(500.0) <= 1000 * most + 1 and 1.0 <= lengths.stretch < 1e9
    lengths.clear()
    assert not lengths.ended and not lengths.is_known


@given(st.integers(0, 20_000), st.booleans())
def test_runs_cover_each_rank_once_and_every_part_is_a_sample(lines: int, in_order: bool) -> None:
    runs = Runs(lines, in_order=in_order)
    ranks = [rank for index in range(runs.count) for rank in runs.ranks(index)]
    assert sorted(ranks) == list(range(lines))
    if in_order:
        assert ranks == sorted(ranks)
    elif lines > 64 * RUN_LINES[1]:
        for part in (lines // 5, lines // 2):
            low = sum(rank < lines / 2 for rank in ranks[:part])
            assert 0.4 < low / part < 0.6


async def test_the_last_lines_are_short_and_lengths_survive_a_restart(tmp_path: Path) -> None:
    """Long answers have another prefix. The first worker stops in the middle."""
    kinds = ["x long", "a short"]
    content = jsonl(line(i, prompt=f"{kinds[i % 2]} {i:05}") for i in range(800))
    ran: list[str] = []
    stop = asyncio.Event()

    async def run(_: str, body: dict[str, Any], _origin: LineOrigin) -> LineAnswer:
        if len(ran) >= 300 and not stop.is_set():
            await stop.wait()
        ran.append(body["prompt"])
        await asyncio.sleep(0)
        return LineAnswer(200, {}, Usage(10, 0, 500 if "long" in body["prompt"] else 2))

    async with batch_worker(tmp_path, run, SMALL) as worker:
        batch = await add_batch(worker._folder, content, int(time.time()))
        await worker.start()
        await eventually(lambda: len(ran) >= 300)
        assert 0.3 < sum("long" in prompt for prompt in ran) / len(ran) < 0.7, "a sample of both"
    stop.set()
    async with batch_worker(tmp_path, run, SMALL) as worker:
        await worker.start()
        await eventually(lambda: batch.id in worker.jobs)
        assert worker.jobs[batch.id].answers.ended >= 200, "learned again from the stored results"
        await eventually(lambda: not worker.states)
        assert (await worker._store.load_batch(batch.id)).completed == 800
    assert not any("long" in prompt for prompt in ran[-40:])
    assert set(ran) == {f"{kinds[i % 2]} {i:05}" for i in range(800)}


async def test_without_learned_lengths_lines_run_by_rank(tmp_path: Path) -> None:
    ran: list[str] = []

    async def run(_: str, body: dict[str, Any], _origin: LineOrigin) -> LineAnswer:
        ran.append(body["prompt"])
        return LineAnswer(200, {}, Usage(10, 0, len(ran)))

    async with batch_worker(tmp_path, run, BatchLimits(window_lines=8, tail_lines=0, tick_seconds=0.05)) as worker:
        content = jsonl(line(i, prompt=f"{7 * i % 200:03}") for i in range(200))
        await add_batch(worker._folder, content, int(time.time()))
        await worker.start()
        await eventually(lambda: len(ran) == 200)
    assert ran == sorted(ran) and len(ran) == 200
