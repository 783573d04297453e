"""Blame for deaths of the engine process, and the recorder of the last requests, on a virtual clock."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import flight
from engine.api import SamplingParams
from engine.flight import FlightRecorder
from engine.process.requests import RestartPolicy
from engine.process.suspects import HEAD_START, LONE_DEATHS, SUSPECT_AFTER, DeathVerdict, Suspects, at_least
from engine.scheduling.output import Chunk, ModelRunnerOutput, NewRequest, SchedulerOutput


def step(number: int, *chunks: Chunk, new: tuple[NewRequest, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(number, chunks, new)


def started(row: int, name: str, tokens: int = 8) -> NewRequest:
    return NewRequest(row, name, (7,) * tokens, tokens, SamplingParams(max_tokens=9), ())


def result(number: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(number, [1], None, 0.01)


def test_the_recorder_says_what_ran_at_the_end() -> None:
    memory = bytearray(flight.SIZE)
    recorder = FlightRecorder(memory)
    assert flight.in_flight(flight.read(memory)) == {}
    recorder.launched(step(1, Chunk(0, 0, 8, True), new=(started(0, "a"),)), 1.0)
    recorder.launched(step(2, Chunk(0, 8, 1, True), Chunk(1, 0, 4, False), new=(started(1, "b"),)), 2.0)
    assert flight.in_flight(flight.read(memory)) == {"a": 9, "b": 4}, "both steps of a pipeline"
    recorder.completed(result(1), 3.0)
    recorder.completed(result(2), 3.0)
    assert flight.in_flight(flight.read(memory)) == {"a": 9, "b": 4}, "the engine is busy with its output"
    recorder.launched(step(3, Chunk(1, 4, 4, True)), 4.0)
    assert flight.in_flight(flight.read(memory)) == {"b": 8}
    recorder.launched(step(4, Chunk(0, 9, 1, True)), 4.0)
    recorder.failed(step(3), ValueError("secret"), 5.0)
    assert flight.in_flight(flight.read(memory)) == {"a": 10, "b": 8}, "the one that failed is still in question"
    recorder.completed(result(4), 5.0)
    recorder.idle(5.0)
    recorder.idle(6.0)
    entries = flight.read(memory)
    assert flight.in_flight(entries) == {}
    assert [type(entry).__name__ for entry in entries[-3:]] == ["FailedStep", "Completed", "Idle"]
    assert b"secret" not in memory


def test_the_recorder_keeps_the_last_entries_and_reads_none_that_was_cut_off() -> None:
    memory = bytearray(flight.SIZE)
    recorder = FlightRecorder(memory)
    new = (started(0, "a"),)
    for number in range(3 * flight.SLOTS + 5):
        recorder.launched(step(number, Chunk(0, number, 1, True), new=new), float(number))
        new = ()
    entries = flight.read(memory)
    assert len(entries) == flight.SLOTS
    assert [entry.at for entry in entries] == [float(n) for n in range(2 * flight.SLOTS + 5, 3 * flight.SLOTS + 5)]
    last = (3 * flight.SLOTS + 5) % flight.SLOTS * flight.SLOT_BYTES
    memory[last : last + 8] = bytes(8)  # as it is while the slot is written
    assert flight.read(memory) == entries[:-1]
    memory[last : last + 12] = b"\xff" * 12
    assert flight.read(memory) == entries[:-1]


def test_one_death_costs_nobody_anything_and_a_second_only_those_who_were_in_both() -> None:
    suspects = Suspects()
    suspects.after([], 0.0)
    assert suspects.died("killed", {"a": 5, "b": 7}, 1.0) is None
    assert "a" not in suspects and suspects.apart_until("a") == 0
    suspects.after([], 1.0)
    suspects.got_on("b", 8)
    assert suspects.died("killed", {"a": 5, "b": 9, "c": 3}, 2.0) is None
    assert [each in suspects for each in "abc"] == [True, False, False]
    assert suspects.apart_until("a") == 6


def test_others_get_on_first_and_who_has_died_alone_comes_last() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.after([], 9.0)
        suspects.died("killed", {"a": 5, "b": 7}, 10.0)
    suspects.after(["c", "d"], now=10.0)
    assert suspects.next_trial(11.0) is None
    suspects.got_on("c", 1)
    suspects.forget("d")
    assert suspects.next_trial(11.0) == "a" and suspects.next_trial(11.0) is None
    assert _told(suspects.died("hung", {"a": 5}, 12.0)) == ("a", 3, False, True)
    suspects.after(["c"], now=20.0)
    assert suspects.next_trial(20.0 + HEAD_START) == "b", "not for ever"
    suspects.got_on("b", 8)
    for deaths in (4, 5):
        assert suspects.next_trial(26.0) == "a"
        verdict = suspects.died("killed", {"a": 5}, 26.001)
        assert _told(verdict) == ("a", deaths, deaths == 5, True)
        assert verdict is not None and verdict.suspicion.died_at == (10.0, 10.0, 12.0, 26.001, 26.001)[:deaths]
        suspects.after([], now=20.0)
    assert suspects.next_trial(27.0) is None


def _told(verdict: DeathVerdict | None) -> tuple[str, int, bool, bool] | None:
    return None if verdict is None else verdict[:4]


def test_no_request_is_to_blame_for_an_engine_that_cannot_step() -> None:
    suspects = Suspects()
    for cause in ("start", "sick", "renewed"):
        for _ in range(9):
            suspects.after([], 0.0)
            assert suspects.died(cause, {"a": 5}, 1.0) is None
        suspects.after([], 0.0)
        assert suspects.next_trial(99.0) is None


def test_who_gets_past_its_place_between_deaths_is_never_suspected() -> None:
    suspects = Suspects()
    for tokens in range(1, 40):
        suspects.after([], 0.0)
        assert suspects.died("killed", {"a": tokens}, 1.0) is None
        suspects.got_on("a", tokens + 1)
        assert "a" not in suspects


def test_a_death_beside_others_proves_nothing_against_the_one_on_trial() -> None:
    suspects = Suspects()
    for _ in range(9):
        suspects.after([], 0.0)
        suspects.next_trial(99.0)
        assert suspects.died("killed", {"a": 5, "b": 5}, 100.0) is None
    suspects.after([], 0.0)
    assert suspects.died("killed", {}, 100.0) is None


def test_deaths_that_are_forgiven_do_not_count() -> None:
    policy = RestartPolicy(max_deaths=3)
    policy.died(0.0)
    policy.died(1.0)
    policy.forgive({0.0, 1.0, 99.0})
    assert policy.died(2.0) == 0.0 and policy.died(3.0) == 1.0
    assert [policy.died(4.0, counts=False) for _ in range(9)] == [1.0] * 9
    assert policy.died(5.0) is None


class World:
    """A server on the virtual clock. Ordinary steps hold up to `width` requests and alternate with steps of the one on
    trial; a process that starts computes the tokens known of a request in one step. The poisonous end the process in a
    step that would compute their token `at`; kills from outside come at any time, `rate` a second."""

    def __init__(
        self, seed: int, others: int, poisons: int, *, rate: float, step: float, start: float, at: int, width: int = 64
    ) -> None:
        self.dice, self.rate, self.step, self.start, self.at, self.width = Random(seed), rate, step, start, at, width
        self.bad = [f"poison{i}" for i in range(poisons)]
        self.names = [*(f"r{i}" for i in range(others)), *self.bad]
        self.dice.shuffle(self.names)
        self.length = self.dice.choice([10, 40])
        self.suspects, self.now = Suspects(), 0.0
        self.given, self.ended = dict.fromkeys(self.names, 0), dict[str, bool]()
        self.lone_deaths = Counter[str]()
        self.next_kill = self.rest_of_kills()

    def rest_of_kills(self) -> float:
        return self.now + self.dice.expovariate(self.rate) if self.rate else math.inf

    def passes(self, until: float) -> bool:
        """Whether no request kills the process before then."""
        if self.next_kill >= until:
            self.now = until
            return True
        self.now = self.next_kill
        self.next_kill = self.rest_of_kills()
        return False

    def die(self, in_flight: Mapping[str, int]) -> None:
        if (trial := self.suspects.trial) is not None and list(in_flight) == [trial]:
            self.lone_deaths[trial] += 1
        verdict = self.suspects.died("killed", in_flight, self.now)
        if verdict is not None and verdict.guilty:
            self.ended[verdict.request_id] = False

    @property
    def open(self) -> list[str]:
        return [name for name in self.names if name not in self.ended]

    def run(self, seconds: float) -> None:
        """One process after another, until no request is left."""
        while self.open and self.now < seconds:
            while not self.passes(self.now + self.start):
                self.die({})
            beside_others = [name for name in self.open if name not in self.suspects]
            self.suspects.after([name for name in beside_others if self.given[name]], self.now)
            self._live()

    def _live(self) -> None:
        computed = set[str]()
        for turn in itertools.count():
            if not self.open:
                return
            self.suspects.next_trial(self.now)
            ordinary = [name for name in self.open if name not in self.suspects][: self.width]
            groups = [group for group in (ordinary, [self.suspects.trial or ""]) if any(group)]
            if not groups:
                if self.passes(self.now + 0.05):
                    continue
                self.die({})
                return
            group = groups[turn % len(groups)]
            reached = {name: self.given[name] + 1 for name in group}
            takes = self.step * self.dice.uniform(0.5, 1.5) * (1 + sum(name not in computed for name in group) / 5)
            ends = any(name in self.bad and reached[name] >= self.at for name in group)
            if not self.passes(self.now + takes * (self.dice.random() if ends else 1.0)) or ends:
                self.die(reached)
                return
            computed.update(group)
            for name in group:
                self.given[name] = reached[name]
                self.suspects.got_on(name, self.given[name])
                if self.given[name] == self.length:
                    self.ended[name] = True
                    self.suspects.forget(name)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    others=st.sampled_from([0, 1, 3, 12, 64]),
    poisons=st.integers(0, 3),
    rate=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    step=st.sampled_from([0.005, 0.05, 0.3]),
    start=st.sampled_from([0.1, 0.5, 2.0]),
    at=st.integers(1, 6),
    width=st.sampled_from([1, 8, 64]),
)
def test_the_guilty_end_and_nobody_else(
    seed: int, others: int, poisons: int, rate: float, step: float, start: float, at: int, width: int
) -> None:
    """However often processes are killed from outside as well: up to every second of steps that take a third of one."""
    world = World(seed, others, poisons, rate=rate, step=step, start=start, at=at, width=width)
    world.run(1e6)
    assert not world.open, "no request is tried for ever"
    assert {name for name, well in world.ended.items() if not well} == set(world.bad)
    bound = (9 if rate * step < 0.02 else 30) if poisons <= 1 else 40
    assert max((world.lone_deaths[name] for name in world.bad), default=0) <= bound


def test_what_a_process_sees_itself_needs_no_comparison() -> None:
    """A step that hung takes long, and no kill from outside looks like that."""
    suspects = Suspects()
    for number in range(SUSPECT_AFTER + LONE_DEATHS):
        suspects.after([], 100.0 * number)
        suspects.next_trial(100.0 * number + 10.0)
        verdict = suspects.died("hung", {"a": 5}, 100.0 * number + 90.0)
    assert verdict is not None and verdict.guilty


def test_who_has_died_alone_rests_for_twice_as_long_each_time() -> None:
    suspects = Suspects()
    for _ in range(SUSPECT_AFTER):
        suspects.after([], 0.0)
        suspects.died("killed", {"a": 5}, 0.0)
    now = 0.0
    for seconds in (0.0, 0.5, 1.0, 2.0, 4.0):
        suspects.after([], now)
        if seconds:
            assert suspects.next_trial(now + 0.99 * seconds) is None
        assert suspects.next_trial(now + seconds) == "a"
        now += seconds + 3.0  # so long does it take to die, every time
        assert suspects.died("killed", {"a": 5}, now) is not None


def test_the_probability_of_a_coincidence() -> None:
    assert at_least(2, 3, 0.5) == pytest.approx(0.5)
    assert at_least(3, 5, 0.1) == pytest.approx(10 * 1e-3 * 0.81 + 5 * 1e-4 * 0.9 + 1e-5)
    assert at_least(3, 5, 0.0) == 0.0 and at_least(3, 5, 1.0) == 1.0
    assert 0.0 < at_least(30, 5000, 0.001) < 1e-10, "however many deaths there were"
