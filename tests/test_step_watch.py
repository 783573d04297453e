"""A slow step is not a hung one: the seconds that count against it, and their source in /proc."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from driver import until
from test_process import collect, engine_process, request, summed, undisturbed

from engine.loop.watchdog import LOOKS, ON_A_CORE, WAITING, StepLimits, StepWatch, charged
from engine.machine.activity import Activity, ThreadActivity, read_activity

__all__ = ["undisturbed"]


def sample(at: float, *threads: tuple[float, float | None, str]) -> Activity:
    return Activity(at, {number: ThreadActivity(*thread) for number, thread in enumerate(threads)})


IDLE = (5.0, 1.0, "S")


@pytest.mark.parametrize(
    ("threads", "seconds"),
    [
        ([IDLE, IDLE], 1.0),
        ([(6.0, 1.0, "R"), IDLE], ON_A_CORE),
        ([(5.0, 2.0, "R"), IDLE], WAITING),
        ([(5.5, 1.5, "R"), IDLE], 0.5 * ON_A_CORE + 0.5 * WAITING),
        ([(5.5, 1.0, "S"), (5.0, 1.5, "R")], 0.5 * ON_A_CORE + 0.5 * WAITING),
        ([(5.2, 1.0, "S"), IDLE], 0.8 + 0.2 * ON_A_CORE),
        ([(6.0, 1.0, "R"), (6.0, 1.0, "R")], ON_A_CORE),
        ([(5.0, 1.0, "D"), IDLE], ON_A_CORE),
        ([(5.0, 1.0, "T"), (5.0, 1.0, "T")], 1.0),
        ([(5.0, 1.2, "R"), IDLE], WAITING),
        ([(5.0, 4.0, "R"), (8.0, 1.0, "R")], WAITING),
        ([(5.0, None, "R"), IDLE], WAITING),
        ([(5.0, None, "S"), IDLE], 1.0),
        ([], 1.0),
    ],
    ids=[
        "asleep", "computes", "waits for a core", "shares a core", "waits for a thread that waits", "computes a little",
        "computes on two", "waits for a disk", "stopped", "still waits", "more than there was",
        "waits, and the kernel does not count", "sleeps, and the kernel does not count", "threads have ended",
    ],
)  # fmt: skip
def test_which_part_of_a_second_counts(threads: Sequence[tuple[float, float | None, str]], seconds: float) -> None:
    assert charged(sample(10.0, IDLE, IDLE), sample(11.0, *threads), 1.0) == pytest.approx(seconds)


def test_a_thread_that_is_new_counts_from_its_beginning() -> None:
    assert charged(sample(0.0, IDLE), sample(1.0, IDLE, (0.5, 0.5, "R")), 1.0) == pytest.approx(
        0.5 * ON_A_CORE + 0.5 * WAITING
    )


def test_time_in_which_nobody_watched_does_not_count() -> None:
    assert charged(sample(0.0, IDLE), sample(100.0, IDLE), 1.0) == 2.0
    assert charged(sample(0.0, IDLE), sample(0.0, IDLE), 1.0) == 0.0
    half_busy = charged(sample(0.0, (0.0, 0.0, "S")), sample(100.0, (50.0, 0.0, "S")), 1.0)
    assert half_busy == pytest.approx(1.0 + 1.0 * ON_A_CORE)


class Script:
    """Return samples one interval apart, with the same work of a thread in each."""

    def __init__(self, interval: float, cpu: float, waited: float) -> None:
        self._interval, self._cpu, self._waited = interval, cpu, waited
        self.looks = 0

    def read(self) -> Activity:
        self.looks += 1
        at = self.looks * self._interval
        return sample(at, (at * self._cpu, at * self._waited, "S"))


@pytest.mark.parametrize(
    ("cpu", "waited", "least", "most"),
    [(0.0, 0.0, 1.0, 1.0), (1.0, 0.0, 3.0, 4.0), (0.2, 0.8, 8.5, 12.0), (0.0, 1.0, 14.0, 16.0)],
    ids=["asleep", "computes", "has a fifth of a core", "has no core"],
)
async def test_a_step_is_hung_after_so_many_limits(cpu: float, waited: float, least: float, most: float) -> None:
    """It is found in any case, and at the limit where nothing happens."""
    limit = 0.04
    script, hung = Script(limit / LOOKS, cpu, waited), asyncio.Event()
    watch = StepWatch(StepLimits(floor=limit), lambda _: hung.set(), script.read)
    watch.begin(0.0)
    await asyncio.wait_for(hung.wait(), 60.0)
    assert least * LOOKS <= script.looks <= most * LOOKS + 1
    seen = script.looks
    await asyncio.sleep(2 * limit / LOOKS)
    assert script.looks == seen, "it is told once"


async def test_each_step_begins_anew() -> None:
    script, told = Script(0.01, 0.0, 0.0), []
    watch = StepWatch(StepLimits(floor=0.04), told.append, script.read)
    for _ in range(4):
        watch.begin(0.0)
        await until(lambda: script.looks % 3 == 2)
        watch.end()
        script.looks += 1
        assert watch._last is None and watch._charged == 0.0
    assert not told


async def test_a_prediction_is_not_trusted_for_a_step_far_larger_than_any_before() -> None:
    told: list[float] = []
    watch = StepWatch(StepLimits(floor=0.01, unknown=0.08), told.append)
    for tokens, largest, limit in ((8, 0, 0.08), (8, 2, 0.01), (9, 2, 0.08), (9, 3, 0.01)):
        watch.succeeded(largest)
        watch.begin(0.0, tokens)
        await until(lambda: bool(told))
        assert told == [limit], (tokens, largest)
        told.clear()
    assert StepLimits().limit(10.0, trusted=False) == 200.0, "never less than for a trusted prediction"


BUSY = "import time\nend = time.thread_time() + 120\nwhile time.thread_time() < end: pass"

linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


@pytest.mark.slow
@linux
def test_the_kernel_tells_a_thread_that_computes_from_one_that_waits_and_one_that_is_stopped() -> None:
    """Of two on one core the one with the least weight waits, as it cannot get more than a part of it."""
    core = min(os.sched_getaffinity(0))
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=lambda nice=nice: _on_core(core, nice))
        for nice in (0, 19)
    ]
    stopped = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        stopped.send_signal(signal.SIGSTOP)
        pids = [process.pid for process in processes]
        first, last = _wait_until_computed(pids, 0.4)
        waits = last[1].threads[pids[1]]
        before = first[1].threads[pids[1]]
        assert waits.waited is not None and before.waited is not None
        assert waits.waited - before.waited > waits.cpu - before.cpu
        alone = charged(first[1], last[1], 60.0)
        assert alone < 0.25 * (last[1].at - first[1].at)
        held = read_activity([stopped.pid])
        assert held is not None and held.threads[stopped.pid].state == "T"
    finally:
        for process in [*processes, stopped]:
            process.kill()
            process.wait()


def _on_core(core: int, nice: int) -> None:
    os.sched_setaffinity(0, {core})
    os.nice(nice)


def _wait_until_computed(pids: list[int], seconds: float) -> tuple[list[Activity], list[Activity]]:
    first: list[Activity] = []
    while True:
        time.sleep(0.05)
        now = [found for pid in pids if (found := read_activity([pid])) is not None]
        first = first or now
        if now[0].threads[pids[0]].cpu - first[0].threads[pids[0]].cpu > seconds:
            return first, now


@linux
def test_all_threads_are_read_but_the_one_that_asks() -> None:
    ended, numbers = threading.Event(), []

    def wait() -> None:
        numbers.append(threading.get_native_id())
        ended.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        while not numbers:
            time.sleep(0.001)
        found = read_activity([os.getpid(), 2**30])
        assert found is not None
        assert numbers[0] in found.threads and threading.get_native_id() not in found.threads
    finally:
        ended.set()
        thread.join()
    assert read_activity([2**30]) is None


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "causes"), [("slow:3", {}), ("spin:3", {"hung": 1}), ("hang:3", {"hung": 1})])
async def test_a_process_ends_only_for_a_step_that_gets_nowhere(
    fault: str, causes: dict[str, int], tmp_path: Path, undisturbed: dict[str, tuple[object, ...]]
) -> None:
    async with engine_process(tmp_path / "children", fault) as engine:
        assert summed(await collect(engine, request("seeded", seed=3))) == undisturbed["seeded"]
        assert (await engine.stats()).restarts == causes
