"""Co-location by turns: which requests count, what changes are, and clients that come and go with their spells."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from test_bench_steps import record

from benchmarks import live
from benchmarks.alternate import Spell, Turns, measure, promise, spells_of
from predictor.slo import SLO

KEYS = ("ttft_mean", "tbt_mean")


def test_spells_come_in_pairs_and_borders_do_not_count() -> None:
    spells = spells_of(100.0, 15.0)
    assert [s.beside for s in spells] == [False, True] * 3 and spells[-1].end == 90.0
    assert not spells[1].counts(record(16.0, 0.1)) and spells[1].counts(record(17.0, 0.1))
    assert spells[1].counts(record(27.9, 0.1)) and not spells[1].counts(record(28.0, 0.1))


def test_a_change_is_that_of_all_requests_of_the_arms() -> None:
    spells = spells_of(80.0, 10.0)
    records = [record(s.begin + 5.0, 0.2 if s.beside else 0.1, (0.02, 0.04)) for s in spells]
    near_a_border = [record(s.begin + 1.0, 9.0) for s in spells]
    ttft, tbt = measure(records + near_a_border, spells, KEYS, 1)
    assert (ttft.alone, ttft.beside, ttft.low, ttft.high) == pytest.approx((0.1, 0.2, 1.0, 1.0))
    assert ttft.ratio == pytest.approx(1.0) and tbt.ratio == pytest.approx(0.0) and tbt.alone == pytest.approx(0.03)
    with pytest.raises(ValueError, match="both arms"):
        measure(records[:1], spells, KEYS, 1)


def test_the_interval_is_as_wide_as_pairs_differ() -> None:
    spells = spells_of(400.0, 10.0)
    records = [record(s.begin + 5.0, 0.1 + 0.01 * (i % 8 == 1)) for i, s in enumerate(spells)]
    (change,) = measure(records, spells, ("ttft_mean",), 1)
    assert change.low < change.ratio < change.high and change.ratio == pytest.approx(0.025, abs=0.01)


def test_what_was_promised_is_said() -> None:
    assert [promise(o) for o in SLO.parse("5%").objectives] == ["+5.0%"] * 4
    assert [promise(o) for o in SLO.parse("ttft_p99=1s").objectives] == ["1000 ms"]


def test_clients_come_and_go_with_their_spells(monkeypatch: pytest.MonkeyPatch) -> None:
    open_at: list[tuple[float, int]] = []
    tokens = iter((100.0, 400.0, 400.0, 1000.0))
    num_open = 0

    @asynccontextmanager
    async def completions(_url: str, concurrency: int) -> AsyncIterator[live.Ask]:
        async def ask(**fields: Any) -> tuple[int, Any]:
            nonlocal num_open
            assert fields["service_tier"] == "flex" and len(fields["prompt"]) == 256
            num_open += 1
            open_at.append((time.monotonic() - start, num_open))
            try:
                await asyncio.Event().wait()
            finally:
                num_open -= 1
            return 200, None

        assert concurrency == 24
        yield ask

    async def page(_url: str) -> str:
        return f"tidemill_offline_tokens_total {next(tokens)}\n"

    monkeypatch.setattr(live, "completions", completions)
    monkeypatch.setattr(live, "metrics_page", page)
    spells = [Spell(0.0, 0.1, False), Spell(0.1, 0.2, True), Spell(0.2, 0.3, False), Spell(0.3, 0.4, True)]

    async def follow() -> None:
        task = asyncio.create_task(turns.follow("", start))
        while turns.tokens < 900.0 and not task.done():  # noqa: ASYNC110 (nobody says when a spell is over)
            await asyncio.sleep(0.01)
        assert num_open == 0 and not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    turns, start = Turns(spells, 1), time.monotonic()
    asyncio.run(follow())
    assert len(open_at) == 48 and max(number for _, number in open_at) == 24 and turns.tokens == 900.0


def test_a_refused_offline_request_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def completions(_url: str, _concurrency: int) -> AsyncIterator[live.Ask]:
        async def ask(**_fields: Any) -> tuple[int, Any]:
            return 429, "full"

        yield ask

    async def page(_url: str) -> str:
        return "tidemill_offline_tokens_total 0\n"

    monkeypatch.setattr(live, "completions", completions)
    monkeypatch.setattr(live, "metrics_page", page)
    with pytest.raises(SystemExit, match="429"):
        asyncio.run(Turns([Spell(0.0, 0.01, True)], 1).follow("", time.monotonic()))
