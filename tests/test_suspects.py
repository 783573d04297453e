"""Blame for deaths of the engine process, and the recorder that says who ran: without a process, on a virtual clock."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from engine.api import SamplingParams
from engine.flight import recorder as flight
from engine.flight.recorder import FlightRecorder
from engine.process.policy import RestartPolicy
from engine.process.suspects import HEAD_START, LONE_DEATHS, SUSPECT_AFTER, Suspects, Verdict
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
    assert flight.in_flight(flight.read(memory)) == {"a": 9, "b": 4}, "the engine is busy with what it gave"
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
    assert [type(entry).__name__ for entry in entries[-3:]] == ["Failed", "Completed", "Idle"]
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
    assert suspects.died("killed", {"a": 5, "b": 7}) is None
    assert "a" not in suspects and suspects.apart_until("a") == 0
    suspects.got_on("b", 8)
    assert suspects.died("killed", {"a": 5, "b": 9, "c": 3}) is None
    assert [each in suspects for each in "abc"] == [True, False, False]
    assert suspects.apart_until("a") == 6


def test_others_get_on_first_and_who_has_died_alone_comes_last() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.died("killed", {"a": 5, "b": 7})
    suspects.after(["c", "d"], now=10.0)
    assert suspects.next_trial(11.0) is None
    suspects.got_on("c", 1)
    suspects.forget("d")
    assert suspects.next_trial(11.0) == "a" and suspects.next_trial(11.0) is None
    assert suspects.died("hung", {"a": 5}) == Verdict("a", 3, guilty=False, others_well=True)
    suspects.after(["c"], now=20.0)
    assert suspects.next_trial(20.0 + HEAD_START) == "b", "not for ever"
    suspects.got_on("b", 8)
    for deaths in (4, 5):
        assert suspects.next_trial(26.0) == "a"
        assert suspects.died("killed", {"a": 5}) == Verdict("a", deaths, guilty=deaths == 5, others_well=True)
    assert suspects.next_trial(27.0) is None


def test_no_request_is_to_blame_for_an_engine_that_cannot_step() -> None:
    suspects = Suspects()
    for cause in ("start", "sick"):
        for _ in range(9):
            assert suspects.died(cause, {"a": 5}) is None and suspects.next_trial(99.0) is None


def test_who_gets_past_its_place_between_deaths_is_never_suspected() -> None:
    suspects = Suspects()
    for tokens in range(1, 40):
        assert suspects.died("killed", {"a": tokens}) is None
        suspects.got_on("a", tokens + 1)
        assert "a" not in suspects


def test_a_death_beside_others_proves_nothing_against_the_one_on_trial() -> None:
    suspects = Suspects()
    for _ in range(9):
        assert suspects.died("killed", {"a": 5, "b": 5}) is None
        suspects.next_trial(99.0)
    assert suspects.died("killed", {}) is None


def test_deaths_that_are_forgiven_do_not_count() -> None:
    policy = RestartPolicy(max_deaths=3)
    policy.died(0.0)
    policy.died(1.0)
    policy.forgive(2)
    assert policy.died(2.0) == 0.0 and policy.died(3.0) == 1.0 and policy.died(4.0) is None
    policy.forgive(9)


@given(
    others=st.integers(0, 12),
    poison=st.sets(st.integers(0, 12), min_size=1, max_size=3),
    at=st.integers(1, 6),
    width=st.integers(1, 13),
)
def test_the_guilty_end_and_nobody_else(others: int, poison: set[int], at: int, width: int) -> None:
    """Ordinary steps hold up to `width` requests; each computes a token a step and ends at ten."""
    names = [f"r{i}" for i in range(others + 1)]
    bad = {f"r{i}" for i in poison if i <= others}
    tokens = dict.fromkeys(names, 0)
    given = dict.fromkeys(names, 0)
    suspects, ended, deaths = Suspects(), dict[str, bool](), 0
    now = 0.0

    def run(group: list[str]) -> Mapping[str, int] | None:
        """What the step held if it killed the process."""
        reached = {name: tokens[name] + 1 for name in group}
        if any(name in bad and reached[name] >= at for name in group):
            return reached
        tokens.update(reached)
        for name in group:
            given[name] = max(given[name], tokens[name])
            suspects.got_on(name, given[name])
            if tokens[name] == 10:
                ended[name] = True
                suspects.forget(name)
        return None

    for _ in range(2_000):
        if len(ended) == len(names):
            break
        now += 1.0
        ordinary = [name for name in names if name not in ended and name not in suspects][:width]
        suspects.next_trial(now)
        alone = [suspects.trial] if suspects.trial else []
        dead = (run(ordinary) if ordinary else None) or (run(alone) if alone else None)
        if dead is None:
            continue
        deaths += 1
        tokens = dict.fromkeys(names, 0)
        verdict = suspects.died("killed", dead)
        if verdict is not None and verdict.guilty:
            assert verdict.request_id in bad
            ended[verdict.request_id] = False
        suspects.after([name for name in names if name not in ended and name not in suspects and given[name]], now)
    assert {name for name, well in ended.items() if not well} == bad and len(ended) == len(names)
    assert deaths <= len(bad) * (SUSPECT_AFTER + LONE_DEATHS)
