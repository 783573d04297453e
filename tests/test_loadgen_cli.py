"""`tidemill bench` from end to end against a scripted server: folders, reports, exit codes."""

import csv
import gzip
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from loadgen_server import Script, serving_in_thread

from loadgen import flags, report, runner
from loadgen.cli import main

KEYS = [
    *(f"{name}_{key}" for name in ("ttft", "tbt") for key in ("mean", "p50", "p99")),
    "normalized_ttft_p50",
    "slo_attainment",
]
QUICK = ["--num-warmups", "1", "--quiet", "--request-rate", "40", "--poll-interval", "0.05", "--salt", "7"]


def bench(url: str, path: Path, *more: str) -> int:
    """A quick `tiny` run into `path`."""
    return main(["run", "--base-url", url, "--workload", "tiny", *QUICK, "--output", str(path), *more])


def summary_of(path: Path) -> dict:
    return json.loads((path / "summary.json").read_text())


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs begin at once, without a collection of garbage."""
    monkeypatch.setattr(runner, "LEAD", 0.02)
    monkeypatch.setattr(runner, "gc", Mock())


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may be busy: what it does to a schedule is not under test here."""
    monkeypatch.setattr("loadgen.metrics.MAX_LAG", 60.0)
    monkeypatch.setattr("loadgen.metrics.MAX_LAG_SHARE", 1e9)
    monkeypatch.setattr("loadgen.metrics.MAX_RATE_ERROR", 1e9)
    monkeypatch.setattr("loadgen.metrics.MAX_CPU", 1e9)


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
        assert bench(url, tmp_path / "a", "--only", "online", "--goodput", "ttft:60000") == 0
    found = summary_of(tmp_path / "a")["online"]
    assert found["outcomes"] == {"ok": 18, "http_error": 1, "cut": 1} and found["slo_attainment"] == 0.9


def test_a_run_in_which_nothing_succeeds_fails_and_says_why(tmp_path, capsys, calm) -> None:
    with serving_in_thread(Script(answer=lambda number, body: "ok" if number < 1 else "429")) as url:
        assert bench(url, tmp_path / "a", "--only", "online") == 1
    shown = capsys.readouterr()
    assert "no online request succeeded" in shown.err and "the queue is full" in shown.out
    assert summary_of(tmp_path / "a")["online"]["errors"] == {"the queue is full": 20}


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
    monkeypatch.setattr("loadgen.metrics.MAX_LAG", -1.0)
    with serving_in_thread(Script()) as url:
        assert bench(url, tmp_path / "a", "--only", "online") == 2
        assert summary_of(tmp_path / "a")["valid"] is False and "INVALID" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--goodput", "nonsense"],
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
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(arguments, capsys) -> None:
    arguments = [arguments[0], "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0", *arguments[1:]]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("tidemill bench: ") and message.count("\n") == 1


def test_no_server_is_exit_code_1(capsys) -> None:
    assert main(["run", "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]) == 1
    assert "not ready" in capsys.readouterr().err


def test_burstiness_is_the_shape_of_vllm() -> None:
    args = flags.parser().parse_args(["run", "--burstiness", "0.25"])
    assert flags.options(args).cv == 2.0 and flags.options(args).process == "gamma"


def test_secrets_never_reach_the_command_line() -> None:
    shown = report.command_line(["run", "--api-key", "k1", "--header=A=k2", "--header", "B=k3", "--goodput", "ttft:5"])
    assert "k1" not in shown and "k2" not in shown and "k3" not in shown and shown.endswith("--goodput ttft:5")
