"""The benchmarks that measure several servers in turn, with scripted servers of OpenAI's API for the engines."""

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from benchmarks import apart, colocation, colocation_peers, live, serving
from benchmarks.figures import Figures
from benchmarks.peers import finders
from benchmarks.peers.engine import Engine, start_all
from benchmarks.weights import make_tokenizer
from loadgen import workers
from loadgen.plan import WordCosts

PEER = Path(__file__).with_name("scripted_peer.py")
WORDS = WordCosts(("time",), (1,), 1)
VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short answers, short looks at servers that rest, and runs that begin at once, without a collection of garbage."""
    monkeypatch.setattr(apart, "LEAD", 0.02)
    monkeypatch.setattr(workers, "gc", Mock())
    monkeypatch.setattr(serving, "OUTPUT", 8)
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.02)


def engine(name: str, **settings: Any) -> Engine:
    return Engine(name, "1.0", lambda _folder, port: [sys.executable, str(PEER), str(port)], **settings)


def start(stack: ExitStack, folder: Path, *engines: Engine) -> list[tuple[Engine, live.Served]]:
    return list(start_all(engines, folder / "model", stack))


def bodies(served: live.Served) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{served.url}/seen") as answer:
        return list(json.loads(answer.read()))


def test_a_turn_begins_when_the_others_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.001)
    spent = chain([0.0, 0.5, 0.5, 0.8, 0.8, 0.8], count(9))
    looked: list[float] = []

    class Spinning:
        def cpu_seconds(self) -> float:
            looked.append(next(spent))
            return looked[-1]

    live.wait_for_rest([cast(live.Served, Spinning())])
    assert looked == [0.0, 0.5, 0.5, 0.8, 0.8, 0.8], "until there is a look in which nothing was spent"
    live.wait_for_rest([cast(live.Served, Spinning())])
    assert len(looked) == 6 + 2 * live.MOST_LOOKS, "but not for ever"


def test_engines_take_turns_and_get_the_same_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        pairs = start(stack, tmp_path, engine("ours"), engine("other", strict=True))
        arms = [serving.Arm(*pair) for pair in pairs]
        serving.alternate(arms, 2, source=WORDS)
        ours, other = (bodies(served) for _, served in pairs)
    turns = [said.split(": ")[1].split()[0] for said in capsys.readouterr().out.splitlines()]
    assert turns == ["ours", "other", "other", "ours", "ours", "other"]
    assert [len(arm.rounds) for arm in arms] == [2, 2], "the first is not kept"
    assert all(min(found.columns()) > 0 for arm in arms for found in arm.rounds)
    assert len(arms[0].gaps) == 2 * 16 * 7
    assert sorted(str(body["prompt"]) for body in ours) == sorted(str(body["prompt"]) for body in other)
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in ours)
    assert not any("ignore_eos" in body or "min_tokens" in body for body in other)

    path = tmp_path / "found.json"
    limits = Figures(1.0, 2.0, 3.0, 4.0), {"linear_stack_seconds": {}, "read_bandwidth": 1, "matmul_rate": 1}
    serving.report(arms, limits, path, "x")
    shown, written = capsys.readouterr().out, json.loads(path.read_text())
    assert "tidemill / other" in shown and "tidemill / the limit" in shown
    assert written["engines"]["other"]["version"] == "1.0" and len(written["engines"]["ours"]["rounds"]) == 2
    assert written["limit"]["sixteen"] == 4.0


def test_a_round_with_an_answer_too_short_is_said_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.plan.ANCHOR", "short")
    with ExitStack() as stack:
        arms = [serving.Arm(*pair) for pair in start(stack, tmp_path, engine("ours"))]
        serving.alternate(arms, 1, source=WORDS)
    assert not arms[0].rounds and "asked for 8 tokens, got 7" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no round"):
        serving.report(arms, None, None, "x")


def test_a_missing_peer_is_one_line_and_one_that_does_not_start_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = str(tmp_path / "nowhere")
    for name in ("VLLM", "OPENVINO", "LLAMA"):
        monkeypatch.setenv(f"TIDEMILL_BENCH_{name}", nowhere)
    parser = argparse.ArgumentParser()
    finders.add_flags(parser)
    assert finders.found(parser.parse_args(["--transformers", ""])) == []
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["vllm", "openvino", "llama", "transformers"]
    assert all(f"not measured, {nowhere} is no " in line for line in said[:3]) and "(--transformers: " in said[3]

    one = argparse.ArgumentParser()
    finders.add_flags(one, ["vllm"])
    assert finders.found(one.parse_args([])) == [] and len(capsys.readouterr().out.splitlines()) == 1

    broken = Engine("broken", "1", lambda _folder, _port: [sys.executable, "-c", "print('no such thing'); exit(3)"])
    absent = Engine("absent", "1", lambda _folder, _port: [nowhere])
    with ExitStack() as stack:
        engines = (engine("ours"), broken, absent, engine("other"))
        assert [found.name for found, _ in start(stack, tmp_path, *engines)] == ["ours", "other"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("broken is left out: the server did not start; its last lines:")
    assert said[1] == "  no such thing" and said[2].startswith("absent is left out: ") and nowhere in said[2]
    with ExitStack() as stack, pytest.raises(SystemExit, match="did not start"):
        start(stack, tmp_path, broken)


def test_each_server_runs_alone_and_the_peer_gets_its_lower_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(colocation, "WARM_UP", 0.0)
    monkeypatch.setattr(colocation, "OUTSTANDING", 2)
    loads = ("steady", "long")
    args = argparse.Namespace(rate=8.0, seconds=1.0, seeds=2, ttft=100.0, tbt=100.0, learning=0.5, loads=loads)
    running: list[str] = []
    seen: list[dict[str, Any]] = []
    peer = engine("vLLM 64/8", offline={"priority": 10}, open=VLLM)
    broken = Engine("vLLM 4/4", "1", lambda _folder, _port: [sys.executable, "-c", "exit(3)"], offline={"priority": 1})
    arms = [arm for each in (peer, broken) for arm in colocation_peers.arms_of(each)]

    def start_one(engines: list[Engine], *rest: Any, required: bool) -> Iterator[tuple[Engine, live.Served]]:
        for found, served in start_all(engines, *rest, required=required):
            running.append(found.name)
            yield found, served
            seen.extend(bodies(served))

    monkeypatch.setattr(colocation_peers, "start_all", start_one)
    colocation_peers.compare(arms, tmp_path / "model", args, source=WORDS)
    assert running == ["vLLM 64/8"] * 2
    low, high = ([body for body in seen if ("priority" in body) == low] for low in (True, False))
    assert low and high and {body["max_tokens"] for body in high} == {colocation.ONLINE_OUTPUT}
    assert {(body["priority"], body["max_tokens"]) for body in low} == {(10, colocation.OFFLINE_OUTPUT)}
    for load in args.loads:
        found = arms[0].summary(load, args.ttft, args.tbt)
        assert found["kept"] == found["online"] and min(found["offline_lines"]) > 0 and len(found["kept"]) == 2
    colocation_peers.report(arms, args.loads, args.ttft, args.tbt)
    said = capsys.readouterr().out
    assert "vLLM 4/4 is left out" in said and "long: best point of the peers: vLLM 64/8, 100.0% kept" in said


def test_the_best_point_of_a_peer_has_the_most_output_of_those_that_keep_the_chats() -> None:
    def of(kept: int, output: float) -> dict[str, Any]:
        return {"online": [100], "kept": [kept], "offline_output_tokens": [output]}

    found = {"tidemill, flex": of(100, 200), "vLLM 2048/64": of(10, 250), "vLLM 128/16": of(96, 100)}
    best, ours = colocation_peers.verdict(found | {"vLLM 64/4": of(99, 40)}, "steady")
    assert "vLLM 128/16, 96.0% kept, 100 output" in best and "100.0% kept, 2.00 times" in ours
    assert list(colocation_peers.verdict({"vLLM 2048/64": of(10, 250)}, "sine")) == [
        "sine: no point of a peer keeps 95% of the chats"
    ]


def test_a_sweep_has_every_pair_of_tokens_and_rows_that_a_step_can_hold() -> None:
    args = colocation_peers.parse(["--sweep", "--vllm", "/v", "--tokens", "8,64", "--rows", "4,16"])
    points = colocation_peers.points_of(args)
    assert [point.name for point in points] == ["vLLM 8/4", "vLLM 64/4", "vLLM 64/16"]
    assert "--max-num-batched-tokens 64" in " ".join(points[2].command(Path("/m"), 1))
    ours = colocation_peers.arms_of(engine("tidemill"))
    assert [arm.tier for arm in ours] == ["flex", colocation.JOB]


def test_every_word_of_the_vocabulary_is_one_token_and_every_id_is_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    words = make_tokenizer(tmp_path / "tokenizer.json", 2_000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2_000 and set(words.costs) == {1} and words.overhead == 1
    assert len(tokenizer.encode("Text" + "".join(f" {word}" for word in words.words)).ids) == 1 + len(words.words)
    assert all(tokenizer.decode([number]).isascii() for number in range(300, 2_000))
