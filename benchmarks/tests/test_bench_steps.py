"""The stepped benchmark of co-location: arrivals, what a request is judged by, tables, and which arms are shared."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import colocation, steps
from benchmarks.colocation import Run
from benchmarks.steps import Step, compare, curve_of, document, is_good, markdown, slo_of, steps_of
from loadgen.records import RequestRecord
from predictor.slo import SLO


def record(at: float, ttft: float, gaps: tuple[float, ...] = (0.02, 0.02), outcome: str = "ok") -> RequestRecord:
    made = RequestRecord(0, "online", at, 128, len(gaps) + 1, outcome=outcome)  # type: ignore[arg-type]
    stamps = [at + ttft]
    for gap in gaps:
        stamps.append(stamps[-1] + gap)
    made.chunk_at, made.chunk_tokens = stamps, [1] * len(stamps)
    made.first_token_at, made.ended_at = stamps[0], stamps[-1]
    return made


def test_arrivals_follow_the_steps_and_the_seed() -> None:
    curve, windows = curve_of([0.3, 2.0, 0.0, 1.0], 100.0), steps_of([0.3, 2.0, 0.0, 1.0], 100.0)
    arrivals = colocation.poisson(curve, 400.0, 7)
    assert arrivals == colocation.poisson(curve, 400.0, 7) != colocation.poisson(curve, 400.0, 8)
    counts = [sum(step.begin <= at < step.end for at in arrivals) for step in windows]
    assert counts[2] == 0 and 15 < counts[0] < 50 and 150 < counts[1] < 250 and 70 < counts[3] < 130


def test_a_request_is_judged_by_the_limits_of_the_form() -> None:
    slow, uneven = record(0.0, 1.5), record(0.0, 0.2, (0.01, 0.15, 0.01, 0.01))
    p99, mean = slo_of("tbt_p99", 1.0, 0.1), slo_of("tbt_mean", 1.0, 0.1)
    assert str(p99) == "ttft_p99=1s,tbt_p99=100ms" and str(mean) == "ttft_p99=1s,tbt_mean=50ms"
    for slo, kept in ((p99, False), (mean, True)):
        bounds = steps.bounds_of(slo, [])
        assert not is_good(slow, bounds) and is_good(uneven, bounds) is kept
        assert not is_good(record(0.0, 0.1, outcome="http_error"), bounds)
        assert is_good(record(0.0, 0.1, ()), bounds), "an answer of one token has no gap"


def test_a_tolerance_is_judged_by_the_same_step_alone() -> None:
    alone = Run([record(float(at), 0.1 + 0.01 * at) for at in range(10)], [], 20.0)
    beside = Run([record(float(at), 0.1 + 0.02 * at) for at in range(10)], [(5.0, 300.0), (15.0, 100.0)], 20.0)
    rows = compare(SLO.parse("5%"), [Step(1.0, 0.0, 10.0), Step(0.0, 10.0, 20.0)], alone, beside)
    first, second, whole = rows
    assert first.alone.attainment == 1.0 and first.beside.good == 5, "at most 1.05 x 190 ms"
    assert first.points == pytest.approx(-50.0)
    assert (first.beside.offline, second.beside.offline, whole.beside.offline) == (30.0, 10.0, 20.0)
    assert second.points is None and second.alone.ttft_mean is None, "nobody came"
    text = markdown("5%", SLO.parse("5%"), rows)
    assert text.count("\n") == 6 and "| all (0.5) | 10 | 100.0 % | 50.0 % | -50.0 |" in text
    assert "| 0 | 0 | - | - | - | - | - | - | - | 10 |" in text
    assert json.loads(json.dumps(document("5%", SLO.parse("5%"), rows)))["rows"][0]["beside"]["attainment"] == 0.5


def test_a_p99_of_few_requests_is_called_what_it_is() -> None:
    run = Run([record(1.0, 0.3)], [], 10.0)
    slo = slo_of("tbt_p99", 1.0, 0.1)
    assert "300 (max)" in markdown("tbt_p99", slo, compare(slo, [Step(0.1, 0.0, 10.0)], run, run))


def test_forms_share_the_arm_alone_only_where_the_server_does_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str | None]] = []
    seen: list[set[str]] = []
    slo_in_force: list[str] = []

    @contextmanager
    def serve(slo: str, profiles: Path) -> Iterator[str]:
        folder = profiles / "tidemill" / "profiles"
        seen.append({path.name for path in folder.iterdir()})
        (folder / "a.json").write_text("profile")
        (folder / "a.load.json").write_text("load")
        slo_in_force.append(slo)
        yield "http://x"

    def run_alone(serve, rate, arrivals, seconds, tier, seed, *, job_rate):  # type: ignore[no-untyped-def]
        assert job_rate == 6000.0
        with serve():
            ran.append((slo_in_force[-1], tier))
        return Run([], [], seconds)

    monkeypatch.setattr(colocation, "run_alone", run_alone)
    arms = steps.Arms(serve, tmp_path, curve_of([1.0], 10.0), [0.5], 10.0, 6000.0)
    for text in ("5%", "10%", "ttft_p99=1s,tbt_p99=100ms", "ttft_p99=1s,tbt_mean=100ms"):
        arms.alone(SLO.parse(text), 1)
    arms.run(SLO.parse("5%"), "job", 1)
    assert [tier for _, tier in ran] == [None, None, None, "job"], "two tolerances are alike without offline work"
    assert seen == [set(), {"a.json"}, {"a.json"}, {"a.json"}], "what one arm learned of the load is no other's"


def test_options_go_to_the_one_benchmark_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[object] = []
    monkeypatch.setattr(steps, "run_steps", lambda *args, **named: got.append((args, named)))
    words = ["colocation", "--steps", "0.3,1", "--step-seconds", "20", "--slos", "5%,tbt_p99"]
    monkeypatch.setattr("sys.argv", ["bench", *words])
    bench.main()
    ((rates, seconds, forms, limits), _named) = got[0]  # type: ignore[misc]
    assert (rates, seconds, forms, limits) == ((0.3, 1.0), 20.0, ("5%", "tbt_p99"), (1.0, 0.1))
    for wrong in (
        ["serving", "colocation", "--steps", "1"],
        ["colocation", "--steps", "1,x"],
        ["colocation", "--steps", "0"],
        ["colocation", "--steps", "1", "--slos", "fast"],
    ):
        monkeypatch.setattr("sys.argv", ["bench", *wrong])
        with pytest.raises(SystemExit):
            bench.main()
