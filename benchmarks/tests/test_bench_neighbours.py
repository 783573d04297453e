"""The benchmark beside neighbours: that they come and go, and what its table says."""

import signal

import pytest
from test_bench_steps import record

from benchmarks.neighbours import Situation, fair_share, report, restless
from loadgen.records import RequestRecord


def test_neighbours_live_as_long_as_the_situation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.neighbours.SETTLE", 0.0)
    with restless(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    with restless(0) as none:
        assert none == []


def test_the_table_is_in_ratios_to_the_quiet_situation(capsys: pytest.CaptureFixture[str]) -> None:
    quiet, beside = Situation(0), Situation(2)
    for gap, prompt in ((0.01, 0.5), (0.02, 1.0), (0.01, 0.5)):
        quiet.add([record(0.0, 0.1, (gap,) * 4)], sent(prompt))
        beside.add([record(0.0, 0.1, (gap, gap, 3 * gap, 3 * gap))], sent(4 * prompt))
    report([quiet, beside], 2, sessions=False)
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["0", "100.0", "1.00", "1.00", "20", "2.0", "0.50", "1.0"]
    assert second.split() == ["2", "50.0", "0.50", "0.50", "60", "6.0", "2.00", "4.0"]


def test_beside_sessions_all_of_a_server_gets_what_one_of_them_gets() -> None:
    shares = {(m, sessions): fair_share(m, 2, sessions=sessions) for m in (0, 2, 6) for sessions in (False, True)}
    assert shares == {
        (0, False): 1.0, (0, True): 1.0, (2, False): 0.5, (2, True): 1 / 3, (6, False): 0.25, (6, True): 1 / 7,
    }  # fmt: skip


def sent(ttft: float) -> RequestRecord:
    made = record(0.0, ttft)
    made.sent_at = 0.0
    return made
