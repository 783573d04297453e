"""How many threads work on a step: the choice on recorded times, and changes on a machine with restless neighbours."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.execution.cpu.native.crew import (
    PATIENCE,
    SETTLED,
    Crew,
    ThreadWatch,
    Times,
    candidates,
    choose,
    choose_threads,
    measure,
)
from engine.limits import Limits
from engine.scheduling.output import Chunk, Collect, ModelRunnerOutput, SchedulerOutput

# ---- the choice


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 2, 3, 4)), (6, (1, 3, 4, 6)), (16, (1, 4, 8, 12, 16)), (5, (1, 2, 3, 5))],
)
def test_sensible_counts(most: int, counts: tuple[int, ...]) -> None:
    assert candidates(most) == counts


RECORDED = {
    # milliseconds of a decode and a prefill step by count; 134.5 M model, two cores of a Xeon
    "quiet": ({1: (24.6, 176.0), 2: (13.9, 92.0)}, 2),
    "a neighbour on the second core": ({1: (24.9, 178.0), 2: (27.8, 190.0)}, 1),
    "read bandwidth is what counts, prompts gain a little": ({1: (21.0, 90.0), 2: (21.3, 86.0)}, 1),
    "decodes lose what prompts gain": ({1: (20.0, 100.0), 2: (26.0, 55.0)}, 2),
    "one socket of sixteen": ({1: (80, 900), 4: (24, 240), 8: (15, 130), 12: (14.5, 95), 16: (14.8, 96)}, 12),
}


@pytest.mark.parametrize(("times", "chosen"), RECORDED.values(), ids=RECORDED.keys())
def test_the_choice_on_recorded_times(times: dict[int, tuple[float, float]], chosen: int) -> None:
    assert choose({n: Times(*each) for n, each in times.items()}) == chosen


def test_every_count_is_measured_in_alternation_and_its_least_time_counts() -> None:
    asked = []
    noise = iter([3.0, 1.0, 1.0, 2.0] * 3)

    def run(threads: int, kind: str) -> float:
        asked.append((threads, kind))
        return next(noise) / threads

    assert measure((1, 2), run, 3, 10.0, lambda: 0.0) == {1: Times(3.0, 1.0), 2: Times(0.5, 1.0)}
    assert asked == [(1, "decode"), (1, "prefill"), (2, "decode"), (2, "prefill")] * 3


def test_slow_steps_are_measured_once() -> None:
    now = [0.0]

    def run(_threads: int, _kind: str) -> float:
        now[0] += 4.0
        return 4.0

    assert measure((1, 2), run, 5, 3.0, lambda: now[0]) == {1: Times(4.0, 4.0), 2: Times(4.0, 4.0)}
    assert now[0] == 16.0


# ---- while serving


@dataclass
class Machine:
    """Steps of 20 ms of work on a fake clock, half as long with two threads; a `busy` neighbour has half of the second
    core, so that a step on two waits for it. Seldom a step takes five times as long."""

    counts: tuple[int, ...] = (1, 2)
    threads: int = 2
    busy: bool = False
    now: float = 0.0
    changes: list[tuple[int, int]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(7)
        self.crew = Crew(self.counts, self.threads, lambda before, after: self.changes.append((before, after)))

    def step(self, rest: float = 0.0) -> None:
        threads = self.crew.choose()
        seconds = 0.020 / threads * (3.0 if self.busy and threads > 1 else 1.0) * self._random.uniform(0.95, 1.1)
        if self._random.random() < 0.02:
            seconds *= 5.0
        self.now += seconds + rest
        self.used.append(threads)
        self.crew.observe(seconds / 0.010, self.now)

    def run(self, steps: int, rest: float = 0.0) -> None:
        for _ in range(steps):
            self.step(rest)


def test_alone_nothing_changes() -> None:
    machine = Machine()
    machine.run(20_000)
    assert machine.changes == [] and machine.crew.threads == 2
    assert machine.used.count(1) < 0.01 * len(machine.used)  # trials are rare


def test_a_neighbour_that_comes_is_noticed_within_some_steps() -> None:
    machine = Machine()
    machine.run(200)
    machine.busy = True
    machine.run(3 * SETTLED)
    assert machine.changes == [(2, 1)]
    machine.run(500)
    assert machine.changes == [(2, 1)]


def test_one_that_goes_is_noticed_by_trials() -> None:
    machine = Machine(threads=1, busy=True)
    machine.run(500)
    machine.busy = False
    until = machine.now + PATIENCE[1] + 2.0
    while machine.now < until and not machine.changes:
        machine.step()
    assert machine.changes == [(1, 2)]
    machine.run(1000)
    assert machine.changes == [(1, 2)]


def test_who_comes_and_goes_all_the_time_does_not_make_it_restless() -> None:
    machine = Machine()
    for turn in range(200):
        machine.busy = turn % 2 == 0
        machine.run(10)
    assert len(machine.changes) <= 12


def test_of_many_counts_the_neighbours_are_tried() -> None:
    machine = Machine(counts=(1, 4, 8, 12, 16), threads=8)
    machine.run(200)
    for _ in range(3000):
        machine.step(rest=1.0)
    assert set(machine.used) <= {4, 8, 12, 16}
    assert machine.changes == [(8, 12), (12, 16)]


def test_a_step_that_may_not_take_so_long_is_no_part_of_a_trial() -> None:
    crew = Crew((1, 2), 2, lambda before, after: None)
    now, used = 0.0, {1.5: 0, 2.0: 0}
    for index in range(2000):
        now += 0.1
        longer = 1.5 if index % 3 else 2.0
        threads = crew.choose(longer)
        used[longer] += threads == 1
        crew.observe(2.0 if threads == 1 else 1.0, now)
    assert used[1.5] == 0 and used[2.0] >= 12


def test_a_trial_that_finds_no_steps_is_given_up() -> None:
    changes: list[tuple[int, int]] = []
    crew = Crew((1, 2), 2, lambda before, after: changes.append((before, after)))
    now = 0.0
    for index in range(4000):
        # the trial begins in an hour in which one thread is faster, and would end in another
        now += 0.1
        fits = index < 310 or index > 3800
        threads = crew.choose(2.0 if fits else 1.0)
        crew.observe(0.5 if threads == 1 and index < 310 else 1.0, now)
    assert changes == []


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_measurement_teaches_nothing(ratio: float) -> None:
    machine = Machine()
    machine.run(100)
    for _ in range(100):
        machine.crew.observe(ratio, machine.now + 1e6)
    assert machine.crew.threads == 2 and machine.changes == []


# ---- around a runner


class FakeRunner:
    """Steps of any content whose times `seconds(threads)` gives."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.threads, self.now = 0, 0.0
        self.sizes: list[int] = []
        self._seconds = seconds

    def resize(self, threads: int) -> None:
        self.threads = threads
        self.sizes.append(threads)

    def launch(self, output: SchedulerOutput) -> Collect:
        seconds = self._seconds(self.threads)
        self.now += seconds
        return lambda: ModelRunnerOutput(output.step_id, [0] * len(output.chunks), None, seconds)


STEP = SchedulerOutput(0, (Chunk(0, 0, 1, True),), predicted_latency=0.01, spare=0.02)


def test_the_team_follows_the_crew() -> None:
    slow = {1: 0.01, 2: 0.01}
    runner = FakeRunner(lambda threads: slow[threads])
    watch = ThreadWatch((1, 2), 2, runner.resize, lambda: runner.now)
    for _ in range(100):
        watch.launch(runner.launch, STEP)()
    assert runner.sizes == [2]
    slow[2] = 0.03
    for _ in range(150):
        watch.launch(runner.launch, STEP)()
    assert runner.threads == 1


def test_what_a_trial_took_is_marked_and_steps_that_must_be_in_time_are_spared() -> None:
    runner = FakeRunner(lambda threads: 0.02 / threads)
    watch = ThreadWatch((1, 2), 2, runner.resize, lambda: runner.now)
    tight = SchedulerOutput(0, (Chunk(0, 0, 1, True),), predicted_latency=0.01, spare=0.009)
    for _ in range(8000):  # longer than it takes until another count is tried
        assert not watch.launch(runner.launch, tight)().trial and runner.threads == 2
    results = [watch.launch(runner.launch, STEP)() for _ in range(100)]
    assert {(result.latency, result.trial) for result in results} == {(0.01, False), (0.02, True)}


def test_steps_without_a_prediction_teach_nothing() -> None:
    runner = FakeRunner(lambda threads: 100.0)
    watch = ThreadWatch((1, 2), 2, runner.resize, lambda: runner.now)
    for _ in range(1000):
        step = SchedulerOutput(0, (Chunk(0, 0, 1, True),))
        watch.launch(runner.launch, step)()
    assert runner.sizes == [2]


@pytest.mark.parametrize(("seconds", "chosen"), [((0.02, 0.01), 2), ((0.02, 0.05), 1)])
@pytest.mark.parametrize("limits", [Limits(64, 512, 2048, 1000, 16), Limits(1, 8, 8, 2, 16), Limits(4, 512, 9, 2, 1)])
def test_the_start_measures_and_says_so(seconds: tuple[float, float], chosen: int, limits: Limits) -> None:
    runner = FakeRunner(lambda threads: seconds[threads - 1])
    threads, line = choose_threads(runner, limits, 100, 2, runner.resize, lambda: runner.now)
    assert threads == chosen
    assert line.startswith(f"steps use {chosen} of 2 threads") and "1: 20.0 / 20.0 ms" in line
