"""`tidemill bench` from end to end against a scripted server: folders, reports, exit codes."""

import csv
import gzip
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from loadgen_server import Script, serving_in_thread

from loadgen import InputError, checks, cli, compare, flags, folder, report, svg, workers
from loadgen.cli import main
from loadgen.records import RequestRecord
from loadgen.svg import Mark, Series

SVG = "{http://www.w3.org/2000/svg}svg"
KEYS = [
    *(f"{name}_{key}" for name in ("ttft", "tbt") for key in ("mean", "p50", "p99")),
    "normalized_ttft_p50",
    "slo_attainment",
]
QUICK = ["--num-warmups", "1", "--quiet", "--request-rate", "40", "--poll-interval", "0.05", "--salt", "7"]


def bench(url: str, path: Path, *more: str) -> int:
    """A quick `tiny` run into `path`."""
    return main(["run", "--base-url", url, "--workload", "tiny", *QUICK, "--output", str(path), *more])


def sweep(url: str, path: Path, rates: str, count: int = 8) -> int:
    """A quick sweep of `tiny` chats into `path`."""
    flags = [
        "--only",
        "online",
        "--num-prompts",
        str(count),
        "--goodput",
        "ttft:60000",
        "--quiet",
        "--output",
        str(path),
    ]
    return main(["sweep", "--base-url", url, "--workload", "tiny", "--request-rates", rates, *flags])


def summary_of(path: Path) -> dict:
    return json.loads((path / "summary.json").read_text())


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs begin at once, without a collection of garbage."""
    monkeypatch.setattr(workers, "LEAD", 0.02)
    monkeypatch.setattr(workers, "gc", Mock())


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may be busy: what it does to a schedule is not under test here."""
    monkeypatch.setattr("loadgen.checks.MAX_LAG", 60.0)
    monkeypatch.setattr("loadgen.checks.MAX_LAG_SHARE", 1e9)
    monkeypatch.setattr("loadgen.checks.MAX_RATE_ERROR", 1e9)
    monkeypatch.setattr("loadgen.checks.MAX_CPU", 1e9)


def test_a_run_writes_its_folder(tmp_path, capsys, calm) -> None:
    script = Script()
    with serving_in_thread(script) as url:
        code = bench(
            url, tmp_path / "a", "--goodput", "ttft:60000", "tbt_p99:60000", "--api-key", "secret", "--label", "x"
        )
    assert code == 0
    found = summary_of(tmp_path / "a")
    assert set(KEYS) <= set(found["online"]) and "offline_throughput" in found["offline"]
    assert found["schema_version"] == 1 and found["seeds"] == {"seed": 0, "salt": 7} and found["label"] == "x"
    assert found["server"]["version"] == {"version": "9.9", "device": "paper"} and found["device"] == "paper"
    assert found["server"]["model"] == "scripted" and found["valid"] is True
    assert found["online"]["requests"] == 20 and found["online"]["outcomes"] == {"ok": 20}
    assert found["online"]["slo_attainment"] == 1.0 and found["online"]["counts"]["tbt"] == 20 * 11
    assert found["offline"]["jobs"][0]["completed_lines"] == 20 and found["offline"]["jobs"][0]["missing_lines"] == 0
    assert found["honesty"]["lengths"]["input_asked"] == found["honesty"]["lengths"]["input_got"] == 960
    assert found["honesty"]["lengths"]["output_differs"] == 0
    text = (tmp_path / "a" / "summary.json").read_text()
    assert "secret" not in text and "***" in found["command"]
    with gzip.open(tmp_path / "a" / "requests.jsonl.gz") as stream:
        rows = [json.loads(line) for line in stream]
    assert len(rows) == 20 and {row["class"] for row in rows} == {"online"} and len(rows[0]["chunk_at"]) == 12
    with (tmp_path / "a" / "timeline.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert sum(float(line["online_tokens"]) for line in lines) == pytest.approx(20 * 60, rel=1e-3)
    assert "SLO attainment" in capsys.readouterr().out


def test_the_report_is_one_well_formed_page_without_links(tmp_path, calm) -> None:
    with serving_in_thread(Script()) as url:
        bench(url, tmp_path / "a", "--goodput", "ttft:5", "tbt_p99:5", "--metadata", "k=<&>")
    text = (tmp_path / "a" / "report.html").read_text()
    page = ElementTree.fromstring(text)
    assert len(list(page.iter(SVG))) == 5
    assert "SLO 5 ms" in text and "http-equiv" not in text and "<script" not in text and "src=" not in text


def test_bodies_seen_by_the_server(tmp_path, calm) -> None:
    script = Script()
    with serving_in_thread(script) as url:
        bench(url, tmp_path / "a", "--only", "online", "--extra-body", '{"top_k": 3}', "--header", "X-Team=a")
        bench(url, tmp_path / "b", "--only", "online", "--salt", "8")
    warm, measured, salted = script.bodies[0], script.bodies[1:21], script.bodies[22:]
    assert len(measured) == len(salted) == 20 and warm["max_tokens"] == 4
    body = measured[0]
    assert len(body["prompt"]) == 48 and body["max_tokens"] == body["min_tokens"] == 12 and body["ignore_eos"] is True
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["top_k"] == 3 and "service_tier" not in body and script.headers[1]["X-Team"] == "a"
    prompts = [tuple(item["prompt"]) for item in [warm, *measured, *salted]]
    assert len(set(prompts)) == 41, "no prompt repeats, within a run or from one salt to the next"


def test_chat_prompts_are_calibrated_to_the_token(tmp_path, calm) -> None:
    script = Script()
    with serving_in_thread(script) as url:
        code = bench(url, tmp_path / "a", "--endpoint", "/v1/chat/completions", "--offline-mode", "flex")
    found = summary_of(tmp_path / "a")
    assert code == 0 and found["honesty"]["lengths"]["input_differs"] == 0 and found["offline"]["requests"] > 0
    assert found["honesty"]["lengths"]["input_got"] > 0
    assert {body.get("service_tier") for body in script.bodies if body.get("stream")} == {None, "flex"}


def test_refused_and_cut_requests_count_against_attainment(tmp_path, calm) -> None:
    kinds = {2: "429", 5: "cut"}
    with serving_in_thread(Script(answer=lambda number, body: kinds.get(number, "ok"))) as url:
        more = ["--only", "online", "--goodput", "ttft:60000", "--assert", "online.slo_attainment>=0.99"]
        assert bench(url, tmp_path / "a", *more) == 1
    found = summary_of(tmp_path / "a")["online"]
    assert found["outcomes"] == {"ok": 18, "http_error": 1, "cut": 1} and found["slo_attainment"] == 0.9


def test_a_run_in_which_nothing_succeeds_fails_and_says_why(tmp_path, capsys, calm) -> None:
    with serving_in_thread(Script(answer=lambda number, body: "ok" if number < 1 else "429")) as url:
        assert bench(url, tmp_path / "a", "--only", "online") == 1
    shown = capsys.readouterr()
    assert "no online request succeeded" in shown.err and "the queue is full" in shown.out
    assert summary_of(tmp_path / "a")["online"]["errors"] == {"the queue is full": 20}
    assert "the queue is full" in (tmp_path / "a" / "report.html").read_text()


def test_the_warm_up_shows_what_a_server_refuses(tmp_path, capsys, calm) -> None:
    script = Script(answer=lambda number, body: "429")
    with serving_in_thread(script) as url:
        assert bench(url, tmp_path / "a", "--only", "online", "--model", "named") == 1
    assert "a warm-up request failed (http_error): 429" in capsys.readouterr().err
    warm = script.bodies[0]
    assert warm["min_tokens"] == warm["max_tokens"] == 4 and warm["ignore_eos"] is True and warm["model"] == "named"
    with serving_in_thread(Script(answer=lambda number, body: "404")) as url:
        assert bench(url, tmp_path / "a", "--only", "online", "--model", "other") == 1
    assert "no such model; the server has no model other, set --model to one of scripted" in capsys.readouterr().err


def test_an_invalid_run_exits_with_2_and_still_writes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("loadgen.checks.MAX_LAG", -1.0)
    with serving_in_thread(Script()) as url:
        assert bench(url, tmp_path / "a", "--only", "online") == 2
        assert summary_of(tmp_path / "a")["valid"] is False and "INVALID" in capsys.readouterr().err
        assert "INVALID" in (tmp_path / "a" / "report.html").read_text()
        assert sweep(url, tmp_path, "30", 4) == 2
    assert "INVALID: at 30/s: P99 send lag" in capsys.readouterr().err


def test_baselines_add_interference_and_harvest_and_compare_reads_folders(tmp_path, capsys, calm) -> None:
    slo = ["--goodput", "ttft:60000", "tbt_p99:60000"]
    with serving_in_thread(Script(job_usage=True)) as url:
        for arm, more in (("on", ["--only", "online"]), ("both", [])):
            for seed in ("1", "2"):
                assert bench(url, tmp_path / arm / seed, "--seed", seed, *slo, *more) == 0
        assert bench(url, tmp_path / "off", "--only", "offline") == 0
        references = ["--online-baseline", str(tmp_path / "on" / "1"), "--offline-baseline", str(tmp_path / "off")]
        assert bench(url, tmp_path / "ours", "--seed", "1", *slo, *references, "--assert", "harvest>0") == 0
    found = summary_of(tmp_path / "ours")
    assert {f"interference_{name}_{key}" for name in ("ttft", "tbt") for key in ("mean", "p99")} <= set(found["online"])
    assert found["total"]["harvest"] > 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "on"), str(tmp_path / "both"), "--rounds", "50", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["metric"]: row for row in result["rows"]}
    assert result["paired"] is True and rows["slo_attainment"]["first"] == 1.0 and rows["ttft_p99"]["low"] is not None
    assert set(result["interference"]) == {
        "interference_ttft_mean",
        "interference_ttft_p99",
        "interference_tbt_mean",
        "interference_tbt_p99",
    }
    assert any("300" in note for note in result["notes"]) and any("40 of 40 good" in note for note in result["notes"])
    assert main(["compare", str(tmp_path / "off"), str(tmp_path / "both"), "--rounds", "10"]) == 0
    assert "harvest" in capsys.readouterr().out
    (tmp_path / "none").mkdir()
    assert main(["compare", str(tmp_path / "none"), str(tmp_path / "both")]) == 2


def test_a_sweep_over_rates(tmp_path, calm) -> None:
    with serving_in_thread(Script()) as url:
        assert sweep(url, tmp_path / "s", "30,60") == 0
    found = summary_of(tmp_path / "s")
    assert [point["rate"] for point in found["points"]] == [30.0, 60.0] and found["effective_throughput_90"] == 60.0
    assert (tmp_path / "s" / "rate-30" / "requests.jsonl.gz").is_file()
    page = ElementTree.fromstring((tmp_path / "s" / "report.html").read_text())
    assert len(list(page.iter(SVG))) == 3


def test_a_sweep_that_is_stopped_leaves_out_the_rate_that_never_began(tmp_path, capsys, calm, monkeypatch) -> None:
    real = cli.execute

    def stopped(plan, workers, show):
        records = real(plan, workers, show)
        if plan.online.arrived_at[-1] < 0.2:  # the second rate
            records.requests.clear()
            records.interrupted = True
        return records

    monkeypatch.setattr(cli, "execute", stopped)
    with serving_in_thread(Script()) as url:
        assert sweep(url, tmp_path, "30,300") == 130
    assert [point["rate"] for point in summary_of(tmp_path)["points"]] == [30.0]
    assert "INTERRUPTED" in capsys.readouterr().err


def test_an_unknown_name_hides_no_failed_assertion(tmp_path, capsys, calm) -> None:
    with serving_in_thread(Script()) as url:
        more = ["--only", "online", "--assert", "online.nonsense>1", "--assert", "online.requests>=999"]
        assert bench(url, tmp_path / "a", *more) == 2
    shown = capsys.readouterr()
    assert "ASSERTION FAILED online.requests>=999: the value is 20" in shown.err and "online.nonsense" in shown.err
    assert "answered (no SLO set)" in shown.out


def test_several_worker_processes_share_one_schedule(tmp_path, calm) -> None:
    with serving_in_thread(Script()) as url:
        assert bench(url, tmp_path / "a", "--workers", "2", "--only", "online") == 0
    found = folder.read_requests(tmp_path / "a")
    assert sorted(record.index for record in found) == list(range(20)) and all(record.ok for record in found)


def test_trace_command_converts(tmp_path, capsys) -> None:
    source = tmp_path / "azure.csv"
    source.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 00:00:00.5,10,20\n2023-11-16 00:00:02.5,30,40\n"
    )
    assert main(["trace", str(source), "--trace-ops", "stretch=2", "--output", str(tmp_path / "t.csv")]) == 0
    assert (tmp_path / "t.csv").read_text() == "arrived_at,input_tokens,output_tokens\n0.000000,10,20\n4.000000,30,40\n"
    assert "requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--goodput", "nonsense"],
        ["run", "--assert", "x ~ 1"],
        ["run", "--request-rate", "-1"],
        ["run", "--cv", "2", "--burstiness", "2"],
        ["run", "--extra-body", "[1]"],
        ["run", "--token-id-range", "5"],
        ["run", "--token-id-range", "9:5"],
        ["run", "--workload", "tiny", "--only", "offline", "--offline-lines", "0"],
        ["run", "--workload", "tiny", "--warmup", "9", "--cooldown", "9", "--duration", "5"],
        ["run", "--trace", "/no/such/file.csv"],
        ["run", "--completion-window", "soon"],
        ["run", "--base-url", "localhost:8000"],
        ["sweep", "--goodput", "ttft:5"],
        ["sweep", "--request-rates", "1,2"],
        ["sweep", "--request-rates", "1,x", "--goodput", "ttft:5"],
        ["compare", "/no/such/run", "/no/such/run"],
        ["trace", "/no/such/file.csv"],
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(arguments, capsys) -> None:
    if arguments[0] in ("run", "sweep"):
        arguments = [arguments[0], "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0", *arguments[1:]]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("tidemill bench: ") and message.count("\n") == 1


def test_no_server_is_exit_code_1(capsys) -> None:
    assert main(["run", "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]) == 1
    assert "not ready" in capsys.readouterr().err


def test_burstiness_is_the_shape_of_vllm() -> None:
    from loadgen.assemble import options

    args = flags.parser().parse_args(["run", "--burstiness", "0.25"])
    assert options(args).cv == 2.0 and options(args).process == "gamma"


def test_assertions() -> None:
    summary = {"online": {"slo_attainment": 0.98, "ttft_p99": None}, "total": {"harvest": 0.8}, "valid": True}
    assert checks.check(summary, "online.slo_attainment>=0.98") is None
    assert checks.check(summary, "slo_attainment < 0.99") is None and checks.check(summary, "harvest>0.5") is None
    assert "0.98" in (checks.check(summary, "online.slo_attainment>=0.99") or "")
    assert "no value" in (checks.check(summary, "online.ttft_p99<1") or "")
    assert checks.check(summary, "valid==true") is None
    for bad in ("nope>1", "online>1", "online.nope>1"):
        with pytest.raises(InputError):
            checks.check(summary, bad)


def test_secrets_never_reach_the_command_line() -> None:
    shown = folder.command_line(["run", "--api-key", "k1", "--header=A=k2", "--header", "B=k3", "--goodput", "ttft:5"])
    assert "k1" not in shown and "k2" not in shown and "k3" not in shown and shown.endswith("--goodput ttft:5")


@pytest.mark.parametrize("true_knee,start", [(7.3, 1.0), (0.02, 1.0), (900.0, 1.0), (5.0, 5.0)])
def test_the_knee_is_found_to_two_percent(true_knee, start) -> None:
    tried: list[float] = []

    def measure(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= true_knee else max(0.0, 1.0 - (rate / true_knee - 1.0))

    known: dict[float, float] = {}
    found = cli.knee(measure, 1.0, start, known)
    assert found is not None and found <= true_knee <= found * 1.02 * (1 + 1e-9)
    assert len(tried) == len(set(tried)) == len(known) <= 24
    again = cli.knee(measure, 0.5, start, known)
    assert again is not None and again <= true_knee * 1.5 <= again * 1.02 * (1 + 1e-9)


def test_a_knee_that_is_not_there() -> None:
    assert cli.knee(lambda rate: 0.0, 0.9, 1.0, {}) is None
    assert (cli.knee(lambda rate: 1.0, 0.9, 1.0, {}) or 0) > 1e5
    assert cli.effective({1.0: 1.0, 2.0: 0.5, 4.0: 1.0}, 0.9) == 1.0 and cli.effective({1.0: 0.1}, 0.9) is None


def arm(ttfts: list[float], seed: int = 0) -> compare.Arm:
    requests = {}
    for index, ttft in enumerate(ttfts):
        record = RequestRecord(index, "online", 0.0, 5, 2, outcome="ok", first_token_at=ttft)
        record.chunk_at, record.chunk_tokens = [ttft, ttft + 0.1], [1, 1]
        requests[seed, index] = record
    sections = {"online": {}, "offline": {}, "total": {}, "seeds": {"seed": seed}, "valid": True}
    return compare.Arm("arm", (sections,), requests, compare.Slo.parse(["ttft:1000"]))


def test_compare_decides_what_differs_and_leaves_the_rest() -> None:
    random = np.random.default_rng(4)
    base = random.exponential(0.5, 400)
    rows = {row.metric: row for row in compare.compare(arm(list(base)), arm(list(base * 1.1)), rounds=300)["rows"]}
    assert rows["ttft_mean"].decided and rows["ttft_mean"].difference == pytest.approx(0.1 * base.mean())
    assert not rows["tbt_mean"].decided and rows["tbt_p99"].difference == pytest.approx(0.0)
    assert rows["slo_attainment"].second < rows["slo_attainment"].first
    apart = compare.compare(arm(list(base)), arm(list(base), seed=1), rounds=50)
    assert apart["paired"] is False and any("not paired" in note for note in apart["notes"])


def test_compare_says_what_was_asked_of_each_arm() -> None:
    first, second = arm([0.1, 0.2]), arm([0.1, 0.2])
    for record in second.requests.values():
        record.input_asked = 500
    result = compare.compare(first, second, rounds=20)
    assert result["paired"] is False and any("the arms have different workloads" in note for note in result["notes"])
    second.summaries[0]["interrupted"] = True
    assert any("contains an interrupted run" in note for note in compare.compare(first, second, rounds=20)["notes"])
    same = compare.compare(first, arm([0.3, 0.2]), rounds=20)
    assert same["paired"] is True and not any("asked the same" in note for note in same["notes"])


def test_charts_survive_any_data() -> None:
    cases = [
        [Series("none", [], [])],
        [Series("one", [1.0], [2.0], points=True)],
        [Series("flat", [1, 2], [0, 0]), Series("nan <&>", [1, 2], [float("nan"), 3])],
        [Series("long", np.arange(5000), np.arange(5000) % 7)],
    ]
    for series in cases:
        for log in (False, True):
            text = svg.chart("A <title>", series, x="s", y="n", marks=[Mark(1.5, "SLO")], log_x=log)
            root = ElementTree.fromstring(text)
            assert "nan" not in text.replace("nan &lt;", "")
            assert root.tag in (SVG, "p")
    points = svg.chart("t", cases[3], x="s", y="n").split('points="')[1].split('"')[0].split()
    assert len(points) <= svg.MAX_POINTS
    assert svg.ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]


def test_a_report_of_a_run_in_which_nothing_happened() -> None:
    from loadgen.metrics import Slo, run_metrics
    from loadgen.records import Records
    from loadgen.report import timeline

    records = Records()
    summary = run_metrics(records, (0.0, 1.0), Slo()) | {
        "valid": True, "invalid": [], "honesty": {}, "server": {}, "device": "", "command": "",
        "seeds": {"seed": 0, "salt": 0}, "workload": {"name": "w", "notes": []},
    }  # fmt: skip
    ElementTree.fromstring(report.run_page(summary, [], timeline(records)))


def test_logarithmic_ticks_are_round_and_few() -> None:
    assert svg.log_ticks(10.0, 500.0) == pytest.approx([10, 20, 50, 100, 200, 500])
    assert svg.log_ticks(0.01, 1e6) == pytest.approx([10.0**n for n in range(-2, 7)])
    text = svg.chart("t", [Series("a", [0.02, 5.0, 400.0], [0, 0.5, 1])], x="ms", y="n", log_x=True)
    assert ">0.5<" in text and ">0.05<" not in text, "three decades at most: values near zero do not squeeze the rest"


def test_the_page_of_a_sweep_shows_intervals_and_limits(tmp_path) -> None:
    point = {"rate": 2.0, "slo_attainment": 0.95, "slo_attainment_interval": [0.9, 0.98], "ttft_p99": 0.2}
    point |= {"tbt_p99": 0.05, "throughput": 100.0, "requests": 100, "valid": True}
    second = point | {"rate": 4.0, "slo_attainment": None, "slo_attainment_interval": [0.0, 1.0], "ttft_p99": None}
    summary = {
        "valid": True, "invalid": [], "interrupted": True, "server": {}, "device": "", "command": "",
        "points": [second, point],
        "seeds": {"seed": 0, "salt": 0}, "workload": {"name": "w", "notes": []}, "slo": {"ttft": 0.3, "tbt_p99": 0.1},
        "effective_throughput_90": 2.0, "effective_throughput_99": None,
    }  # fmt: skip
    text = report.sweep_page(summary)
    ElementTree.fromstring(text)
    assert "SLO 300 ms" in text and "SLO 100 ms" in text and "0.900 to 0.980" in text and "Interrupted" in text
    assert "effective throughput at 90 %" in text and "nan" not in text.replace("nance", "")
