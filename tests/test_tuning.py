"""The tuner: the load decides the budget in force, and the searches, comparisons and records."""

import asyncio
import contextlib
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from driver import has_ended, make_request
from test_keeper import CONFIG, MODEL
from windows import poisson_window

from engine.api import FinishReason, RequestClass, RequestOutput, RequestTimes
from engine.colocation.keeper import Colocation, replay_alone
from engine.colocation.replay import ReplayedServer, ReplayWindow, find_budget
from engine.colocation.tuner import (
    CONFIRM_STEPS,
    MIN_COMPARED,
    MIN_RECORDED,
    PAUSE_SECONDS,
    SEARCH_STEPS,
    BudgetTuner,
    LoadStore,
)
from engine.colocation.waits import initial_budget
from engine.core import EngineCore
from engine.machine import child
from engine.machine.child import NICENESS, TURNS, ChildError, Turn, run_child, step_aside
from engine.scheduling.output import Chunk, SchedulerOutput
from predictor.budget import BudgetParams
from predictor.budget_search import BudgetTable, Evaluated, SearchResult
from predictor.load import BUCKET, Lengths, LoadModel, OnlineArrival
from predictor.online import OnlineModel
from predictor.profile import ProfileKey
from predictor.slo import SLO

STEP = SchedulerOutput(0, (Chunk(0, 10, 1, True),))
USUAL = (Turn("usual", 900.0),)


class Job(NamedTuple):
    """A call that a child process executes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


Answer = Callable[[Job], Any]


class Bench:
    """A keeper and its tuner on a clock of the test; `answer` stands for the child process, `jobs` are its calls."""

    def __init__(
        self,
        answer: Answer,
        slo: str = "ttft_p99=500ms,tbt_p99=60ms",
        store: LoadStore | None = None,
        start: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.jobs: list[Job] = []
        self.answer = answer
        parsed, model = SLO.parse(slo), OnlineModel(MODEL)
        self.core = EngineCore(CONFIG, model=model)
        load, table = LoadModel(start), BudgetTable()
        if store is not None:
            load, table = store.read(start, lambda _line: None)
        budget = initial_budget(parsed, MODEL)
        self.keeper = Colocation(self.core, model, parsed, budget, calendar=start, load=load)
        server = ReplayedServer(MODEL, parsed, CONFIG)
        self.tuner = BudgetTuner(self.keeper, server, table, store, clock=lambda: self.now, child=self._child)

    async def _child(self, function: Callable[..., Any], *arguments: Any, **_turns: Any) -> Any:
        job = Job(function, arguments)
        self.jobs.append(job)
        answer = self.answer(job)
        if isinstance(answer, Exception):
            raise answer
        return await answer if isinstance(answer, Awaitable) else answer

    @property
    def budget(self) -> float:
        return self.core.state.objective.budget.latency_budget

    def queue_a_job(self) -> None:
        self.core.add_request(make_request("job", range(80), 12, request_class=RequestClass.OFFLINE), self.now)

    async def serve(self, count: int, rate: float, prompt: int = 100, gap: float = 0.01, step: float = 0.0082) -> None:
        """Online requests at a steady rate, each of two tokens, by steps of so many seconds."""
        for _ in range(count):
            self.now += 1.0 / rate
            self.keeper.on_arrival(RequestClass.ONLINE, self.now)
            for index in (1, 2):
                times = RequestTimes(self.now, first_token=self.now + 0.02)
                reason = FinishReason.LENGTH if index == 2 else None
                output = RequestOutput("r", [1], None, times, prompt, 0, index, reason, beside_offline=True)
                self.keeper.on_step(STEP, step, [output], self.now + 0.02 + gap * (index - 1))
            await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def tuned(answer: Answer, *, job: bool = True, **options: Any) -> AsyncIterator[Bench]:
    """Run a tuner, with a job in its queue or without."""
    bench = Bench(answer, **options)
    bench.tuner.start()
    if job:
        bench.queue_a_job()
    yield bench
    await bench.tuner.stop()


def found(budget: float) -> SearchResult:
    best = Evaluated(BudgetParams("tidemill", budget), {}, {})
    return SearchResult(best, best, (best,), True, True, 1)


def rates_of(jobs: list[Job]) -> list[float]:
    """The rates of the windows that were searched."""
    windows = [job.arguments[1][0] for job in jobs if job.function is find_budget]
    return [len(window.arrivals) / window.seconds for window in windows]


async def test_the_load_that_comes_is_searched_and_then_the_next_higher_one() -> None:
    async with tuned(lambda job: found(0.02 / (1 + rates_of([job])[0]))) as bench:
        initial = bench.budget
        await bench.serve(MIN_RECORDED - 1, 1.0)
        assert not bench.jobs and bench.budget == initial
        await bench.serve(10, 1.0)
        first, second = rates_of(bench.jobs)[:2]
        assert first == pytest.approx(1.0, rel=0.3) and second == pytest.approx(1.5 * first, rel=0.3)
        assert len(bench.jobs) == 2, "all is known now"
        assert bench.budget == pytest.approx(0.02 / (1 + first), rel=1e-6)
        window, others, _server = bench.jobs[0].arguments
        steps = [each.seconds / bench.tuner._pace() for each in (window, *others)]
        assert [step <= most for step, most in zip(steps, (SEARCH_STEPS, CONFIRM_STEPS), strict=True)] == [True, True]
        assert len(window.arrivals) >= 20 and len(others[0].arrivals) >= 60
        assert window.offline_lengths == ((80, 12, 0),), "the job that waits"


async def test_a_load_above_all_that_was_searched_gets_less_than_any_of_them() -> None:
    async with tuned(lambda job: found(0.0123)) as bench:
        initial = bench.budget
        await bench.serve(60, 0.5)
        assert bench.budget == 0.0123
        bench.answer = lambda job: ChildError("busy")
        await bench.serve(300, 5.0)
        assert bench.budget < 0.0123 / 5 < initial, "so much less as the rate is higher"
        assert "less of it" in bench.keeper.stats(bench.now).budget_origin
        learned = bench.keeper.stats(bench.now).learned
        assert learned["searches_made"] >= 1 <= learned["searches_failed"]
        assert learned["searches_made"] + learned["searches_failed"] == len(bench.jobs)
        await bench.serve(300, 0.1)
        assert bench.budget == 0.0123


async def test_a_tolerance_is_searched_at_both_edges_of_a_cell_and_held_to_less_at_every_other_rate() -> None:
    """Chats that come more rarely have shorter steps alone: five per cent of their time was never searched."""
    async with tuned(lambda job: found(0.004), slo="5%") as bench:
        await bench.serve(60, 4.0)
        assert bench.budget == 0.004
        job = next(job for job in bench.jobs if job.function is find_budget)
        upper, lower, again = (len(each.arrivals) / each.seconds for each in job.arguments[1])
        assert lower == pytest.approx(upper / (1.5 * 1.1), rel=0.15)
        assert again == pytest.approx(upper, rel=0.15), "once more for P99"
        bench.answer = lambda job: ChildError("busy")
        await bench.serve(300, 0.5)
        assert 0.0 < bench.budget < 0.004 / 5
        assert "less of it" in bench.keeper.stats(bench.now).budget_origin


@pytest.mark.slow
async def test_a_long_search_goes_on_while_the_load_changes_and_is_followed() -> None:
    async with tuned(lambda job: found(0.02 / (1 + rates_of([job])[0]))) as bench:
        await bench.serve(60, 1.0)
        release = asyncio.Event()

        async def late(job: Job) -> Any:
            await release.wait()
            return found(0.001)

        bench.answer = late
        searched = len(bench.jobs)
        await bench.serve(200, 2.0)
        await bench.serve(60, 0.2)
        assert bench.budget > 0.009, "the load of before is looked up meanwhile"
        await bench.serve(2000, 8.0)
        assert len(bench.jobs) == searched + 1, "one search at a time, and none is given up"
        release.set()
        await bench.serve(40, 8.0)
        assert rates_of(bench.jobs)[-1] > 4.0, "the next one is for the load that there is"


async def test_other_lengths_and_an_hour_are_searched_again() -> None:
    async with tuned(lambda job: found(0.0123)) as bench:
        await bench.serve(60, 1.0)
        count = len(bench.jobs)
        await bench.serve(120, 1.0)
        assert len(bench.jobs) == count, "nothing has changed"
        await bench.serve(250, 1.0, prompt=400)
        changed = len(bench.jobs)
        assert changed > count
        bench.now += 3700.0
        await bench.serve(60, 1.0, prompt=400)
        assert len(bench.jobs) > changed


async def test_without_offline_work_nothing_is_searched() -> None:
    async with tuned(lambda job: found(0.0123), job=False) as bench:
        await bench.serve(100, 1.0)
        assert not bench.jobs


async def test_a_machine_that_is_faster_for_a_moment_takes_no_answer_out_of_force() -> None:
    async with tuned(lambda job: found(0.0)) as bench:
        await bench.serve(400, 1.0)
        assert bench.keeper.stats(bench.now).held
        searched = len(bench.jobs)
        for _ in range(2):
            await bench.serve(60, 1.0, step=0.0055)
            assert bench.keeper.model.scale < 0.75
            assert bench.keeper.stats(bench.now).held and len(bench.jobs) == searched
            await bench.serve(60, 1.0)


async def test_an_answer_is_proven_once_not_whenever_the_load_comes_back() -> None:
    """What misses have taken away stays away, also when the load has gone to another cell and back."""
    async with tuned(lambda job: found(0.02 / (1 + rates_of([job])[0]))) as bench:
        await bench.serve(60, 1.0)
        first = bench.budget
        assert bench.keeper.stats(bench.now).offline_share == 1.0
        await bench.serve(120, 1.4)
        assert bench.budget < first and bench.keeper.stats(bench.now).offline_share == 1.0
        await bench.serve(2, 1.4, gap=0.5)
        assert bench.keeper.stats(bench.now).offline_share < 0.5
        await bench.serve(60, 0.9)
        assert bench.budget == first and 0.5 < bench.keeper.stats(bench.now).offline_share < 1.0


async def test_a_failed_search_changes_nothing_and_is_not_made_again_at_once() -> None:
    async with tuned(lambda job: ChildError("no room")) as bench:
        initial = bench.budget
        await bench.serve(200, 1.0)
        assert len(bench.jobs) == 1 and bench.budget == initial
        bench.answer = lambda job: ValueError("too few arrivals")
        bench.now += PAUSE_SECONDS
        await bench.serve(40, 1.0)
        assert len(bench.jobs) == 2 and bench.budget == initial


async def test_a_budget_under_which_the_breaker_opens_again_and_again_is_searched_anew() -> None:
    async with tuned(lambda job: found(0.0123)) as bench:
        await bench.serve(60, 1.0)
        count = len(bench.jobs)
        await bench.serve(40, 1.0, gap=0.5)
        assert bench.keeper.num_openings >= 2 and len(bench.jobs) == count
        await bench.serve(round(PAUSE_SECONDS), 1.0)
        assert len(bench.jobs) > count


async def test_what_was_learned_is_kept_and_used_by_the_next_server(tmp_path: Path) -> None:
    store = LoadStore(tmp_path, ProfileKey("m", "d", "t", "v"), "")
    async with tuned(lambda job: found(0.0123), store=store, start=1000 * BUCKET) as first:
        await first.serve(700, 1.0)
    second = tuned(lambda job: found(0.9), job=False, store=store, start=1000 * BUCKET + 86_400.0)
    async with second as bench:
        await bench.settle()
        assert bench.budget == 0.0123, "the calendar lets expect that load before the first request"


async def test_a_place_that_cannot_be_written_is_said_and_stops_nothing(tmp_path: Path, caplog: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    async with tuned(
        lambda job: found(0.0123), store=LoadStore(blocked, ProfileKey("m", "d", "t", "v"), ""), job=False
    ) as bench:
        await bench.settle()
    assert "cannot be stored" in caplog.text


async def test_a_tolerance_is_compared_beside_the_searches() -> None:
    def alone(job: Job) -> Any:
        if job.function is find_budget:
            return found(0.0123)
        count = len(job.arguments[2])
        keys = ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99")
        return dict.fromkeys(keys, 0.005), [(0.005, 0.005)] * count

    async with tuned(alone, slo="5%") as bench:
        bench.tuner._compare.set()
        await bench.settle()
        assert not bench.jobs, "no request is recent"
        await bench.serve(MIN_COMPARED + 40, 1.0)
        jobs = [job for job in bench.jobs if job.function is replay_alone]
        assert 1 <= len(jobs) <= 2, "at most every half a minute"
        stats = bench.keeper.stats(bench.now)
        assert stats.learned["baselines_made"] == len(jobs)
        assert stats.breaker_openings >= 1 and stats.objectives[0].bound == pytest.approx(0.00525)


# The child process itself


@pytest.mark.slow
@pytest.mark.timeout(900)  # three Python processes on busy cores
async def test_jobs_run_in_a_process_of_their_own() -> None:
    first, second = (poisson_window(2.0, 100, 20, 4.0, seed) for seed in (1, 2))
    server = ReplayedServer(MODEL, SLO.parse("ttft_p99=500ms,tbt_p99=60ms"), CONFIG)
    result = await run_child(find_budget, first, [second], server, turns=USUAL, keeps_notes=True)
    assert result.params.latency_budget > 0
    counted = [True] * len(first.arrivals)
    aggregates, own = await run_child(replay_alone, first, server, counted, turns=USUAL)
    assert aggregates["tbt_p99"] == pytest.approx(0.0085, rel=0.1) and len(own) == len(counted)
    with pytest.raises(ChildError, match="ValueError"):
        await run_child(int, "no number", turns=(Turn("idle", 0.0, 9.0), *USUAL))


@pytest.mark.slow
async def test_a_child_that_gets_no_time_is_continued_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last attempt has no limit on the clock; it starts from the notes of earlier attempts."""
    with pytest.raises(ChildError, match="no core had time for it within 0 s"):
        await run_child(time.sleep, 60.0, turns=(Turn("idle", 0.0, 9.0), Turn("low", 0.0, 9.0)))
    numbers, chats = range(10**8), iter([True] * 10)  # a child that is stopped is not replaced, and goes on
    options: Any = {"turns": [Turn("idle", 0.1, -1.0)], "busy": lambda: next(chats, False)}
    assert await run_child(sum, numbers, **options) == sum(numbers)
    assert [turn.priority for turn in TURNS] == ["idle", "low"] and math.isinf(TURNS[-1].seconds)

    async def attempt(job: tuple[Any, Any, list[str]], turn: Turn, _busy: object, limit: asyncio.Timeout) -> list[str]:
        job[2].append(turn.priority)
        if turn.priority == "idle":
            limit.reschedule(0.0)
            await asyncio.Event().wait()
        return job[2]

    monkeypatch.setattr(child, "_run", attempt)
    turns = Turn("idle", 0.0), Turn("low")
    assert await run_child(find_budget, turns=turns, keeps_notes=True) == ["idle", "low"]


def test_a_child_runs_without_chats_and_for_a_share_of_the_time_beside_them() -> None:
    duty, look = child.Duty(), child.DUTY_SECONDS
    assert all(duty.decide(False, look) for _ in range(20))
    ran = [duty.decide(True, look) for _ in range(20_000)]
    assert not any(ran[:50]) and sum(ran) == pytest.approx(child.BUSY_SHARE * 20_000, rel=0.1)
    assert "".join("01"[each] for each in ran).count("01") <= sum(ran) * look / (0.8 * child.BURST)
    assert duty.decide(False, look)


class CpuClock:
    """A CPU clock on which each replay takes `seconds`; it fails after `replays`, as a killed process does."""

    def __init__(self, seconds: float, replays: int = 1000) -> None:
        self._seconds, self._replays, self._looks = seconds, replays, 0

    def __call__(self) -> float:
        self._looks += 1
        if self._looks > 2 * self._replays:
            raise KeyboardInterrupt
        return self._seconds * (self._looks // 2)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "searched"), [(1.0, 20), (3.0, 7), (1000.0, 5)])
def test_a_search_ends_after_its_cpu_time_and_an_interrupted_one_goes_on(seconds: float, searched: int) -> None:
    first, second = (poisson_window(2.0, 100, 20, 4.0, seed) for seed in (1, 2))
    server = ReplayedServer(MODEL, SLO.parse("ttft_p99=500ms,tbt_p99=60ms"), CONFIG)
    search = partial(find_budget, first, [second], server, 40, BudgetParams("tidemill", 0.03), 20.0)
    notes: list[Any] = []
    whole = search(clock=CpuClock(seconds))
    for replays in (2, 4, 1000):
        with contextlib.suppress(KeyboardInterrupt):
            found = search(notes=notes, clock=CpuClock(seconds, replays))
    assert found == whole and len(notes) == whole.num_evaluations, "no replay is made twice"
    assert len(whole.surface) == searched and whole.confirmed and whole.params.latency_budget > 0.0


def test_a_window_is_short_in_steps_and_leaves_out_hours_without_chats() -> None:
    recorded = [OnlineArrival(10.0 * index, Lengths(100, 20)) for index in range(100)]
    usual = ReplayWindow.recorded(recorded, (), 0.1, 50, 1)
    short = ReplayWindow.recorded(recorded, (), 0.1, 50, 1, longest=30.0, idle=2.0)
    assert usual.seconds == pytest.approx(500.0) and len(usual.arrivals) == 50
    assert short.seconds == pytest.approx(30.0) and len(short.arrivals) == 15


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux")
@pytest.mark.parametrize("priority", ["idle", "low", "usual"])
def test_priorities_are_those_of_the_name(priority: str) -> None:
    """In a thread: there a thread has its own, and it cannot raise its priority again."""

    def found() -> tuple[bool, int]:
        step_aside(priority)
        return os.sched_getscheduler(0) == os.SCHED_IDLE, os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as executor:
        niceness = NICENESS.get(priority, os.getpriority(os.PRIO_PROCESS, 0))
        assert executor.submit(found).result() == (priority == "idle", niceness)


WAITS = """
import asyncio, pickle, sys
from engine.machine.child import Turn, run_child
function, arguments = pickle.load(sys.stdin.buffer)
asyncio.run(run_child(function, *arguments, turns=(Turn("usual", 900.0),)))
"""


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="Linux")
def test_a_child_ends_with_a_server_that_was_killed() -> None:
    """SIGKILL of the server leaves no process to end the child, which computed for minutes beside the next engine."""
    window = ReplayWindow(tuple(OnlineArrival(i / 10, Lengths(200, 100)) for i in range(20_000)), 2000.0)
    job = find_budget, (window, [window], ReplayedServer(MODEL, SLO.parse("tbt_p99=60ms"), CONFIG))
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) as server:
        assert server.stdin is not None
        server.stdin.write(pickle.dumps(job))
        server.stdin.close()
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        while not (found := children.read_text().split()):
            assert server.poll() is None
            time.sleep(0.05)
        server.kill()
    while not has_ended(int(found[0])):
        time.sleep(0.05)  # the test's own time limit says that it never ends


def test_a_budget_in_words() -> None:
    assert str(BudgetParams("tidemill", 0.0025)) == "L 2.5 ms, flat"
    assert str(BudgetParams("tidemill", 0.1, 0.25, 4.0, "tbt_mean")) == "L 100.0 ms, tbt_mean, λ 0.25, δ 4"
    assert str(BudgetParams("hygen", 0.0)) == "online only"
