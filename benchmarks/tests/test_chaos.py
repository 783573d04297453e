"""`benchmarks chaos`: its counts and faults."""

import math
from pathlib import Path

import pytest
from fakes.runner import FakeRunner

from benchmarks.chaos import engine, main, promises, work
from benchmarks.chaos import server as chaos_server
from benchmarks.chaos.child import POISON, SabotagedRunner
from benchmarks.chaos.engine import Run, Saboteur
from benchmarks.chaos.oracle import Answer
from benchmarks.chaos.promises import Promise, Scale
from engine.api import SamplingParams
from engine.scheduling.output import Chunk, NewRequest, SchedulerOutput
from gateway.http.keys import KeyStore


def test_a_pause_is_what_a_gap_lasts_beyond_the_time_without_an_engine() -> None:
    gaps = [(0.0, 0.1), (1.0, 6.0), (10.0, 12.0), (20.0, 30.0)]
    down = [(1.5, 5.5), (21.0, 24.0), (25.0, 29.0)]
    assert engine.pauses(gaps, down) == pytest.approx([1.0, 3.0]), "no fault touched the third"


def test_the_lag_is_the_bound_that_the_looks_between_two_pages_kept() -> None:
    before, after = {0.01: 5.0, 0.1: 5.0, math.inf: 6.0}, {0.01: 104.0, 0.1: 105.0, math.inf: 106.0}
    assert chaos_server.lag_within(before, after, 0.99) == 0.01 and chaos_server.lag_within(before, after, 1.0) == 0.1


def test_one_broken_promise_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    late = Promise("pause", "9 s", "1 s", kept=False, timing=True)
    assert promises.show([Promise("streams", "8"), Promise("lost", "0", "0", kept=True), late], loose=True)
    assert "BROKEN" not in capsys.readouterr().out
    assert not promises.show([late], loose=False)
    assert not promises.show([Promise("lost", "1", "0", kept=False)], loose=True)
    assert "BROKEN" in capsys.readouterr().out


async def test_everything_that_goes_wrong_breaks_a_promise() -> None:
    server = chaos_server.Server("", 0, Path())
    run = Run(Saboteur(None, server, None))  # type: ignore[arg-type]
    greedy, other = (Answer({0: ([token, 5], "length")}, tokens=2) for token in (3, 4))
    run.tally.add(1, greedy, greedy)
    assert all(promise.kept is not False for promise in await work.of_answers(None, run.tally))  # type: ignore[arg-type]
    sampled, structured = 1, 7
    for number in (sampled, sampled, structured):
        run.tally.add(number, greedy, other)
    run.tally.add(1, greedy, Answer(error="engine_error: gone"))
    broken = await work.of_answers(None, run.tally)  # type: ignore[arg-type]
    assert [promise.name for promise in broken if promise.kept is False] == [
        "answers that differ", "sampled answers that differ", "answers that failed",
    ]  # fmt: skip
    before, after = work.Holdings(5, 0, 0, 0, 9), work.Holdings(9, 1, 2, 99_000_000, 99)
    assert [promise.kept for promise in work.of_holdings(before, before, 0)] == [True] * 5
    assert [promise.kept for promise in work.of_holdings(before, after, 5)] == [False] * 5
    late = {0.01: 0.0, 0.1: 0.0, math.inf: 0.0}, {0.01: 9.0, 0.1: 99.0, math.inf: 100.0}
    in_time = {0.01: 0.0, 0.1: 0.0, math.inf: 0.0}, {0.01: 100.0, 0.1: 100.0, math.inf: 100.0}
    run.memory = [10, *[2**20] * 9, 300 * 2**20]
    run.lag, run.own_lag = late, late
    assert [promise.kept for promise in engine.of_loop(run)] == [None, None, False, False, False]
    run.own_lag = in_time
    assert [promise.kept for promise in engine.of_loop(run)] == [None, None, True, True, False]
    run.saboteur.down, run.tally.gaps = [(1.0, 2.0)], [(1.0, 6.0)]
    assert [promise.kept for promise in engine.of_pauses(run)] == [None, None, False, False]


def test_parts_are_known_by_name_and_scaled_by_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--parts", "kill,nonsense"])
    known = "known: kill, hang, fail, poison, bombs, tenant, storm, inputs, blanks"
    assert known in capsys.readouterr().err
    assert Scale(1, 600.0, 8).of(200) == 200 and Scale(1, 60.0, 8).of(200) == 20 and Scale(1, 6.0, 8).of(20, 2) == 2


def test_the_key_file_is_one_that_the_server_reads(tmp_path: Path) -> None:
    keys = KeyStore((), str(chaos_server._key_file(tmp_path, engine.TENANTS)))
    assert keys.quota("heavy").requests == 8 and keys.quota("light").requests is None


def test_a_step_fails_while_it_is_told_to(tmp_path: Path) -> None:
    runner = SabotagedRunner(FakeRunner(block_size=4, vocab_size=100), tmp_path)
    empty = SchedulerOutput(0, ())
    (tmp_path / "fail").touch()
    with pytest.raises(RuntimeError):
        runner.launch(empty)
    (tmp_path / "fail").unlink()
    assert runner.launch(empty)().token_ids == []


def test_poison_is_known_by_its_row_until_that_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: killed.append(number))
    runner = SabotagedRunner(FakeRunner(block_size=4, vocab_size=100), tmp_path)
    poison = NewRequest(3, "p", (*POISON, 1), 9, SamplingParams(max_tokens=1), ())
    runner.launch(SchedulerOutput(0, (), (poison,)))
    runner.launch(SchedulerOutput(1, (Chunk(2, 0, 1, False),)))
    assert not killed
    runner.launch(SchedulerOutput(2, (Chunk(2, 0, 1, False), Chunk(3, 0, 1, False))))
    assert len(killed) == 1
    runner.launch(SchedulerOutput(3, (Chunk(3, 0, 1, False),), released_rows=(3,)))
    assert len(killed) == 1
