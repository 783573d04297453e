"""The simulator: prompts as the load generator sends them, the prefix cache, and measured profiles as devices."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.api import RequestClass
from engine.config import EngineConfig
from engine.limits import SchedulerConfig
from engine.scheduling.objective import UNLIMITED, StepObjective
from loadgen import workloads
from loadgen.plan import FIRST_OFFLINE, Job, Plan, PromptMaker, TokenIds, Windows
from loadgen.plan import Target as Server
from loadgen.simulation.device import measured_device, named_device, read_profile
from loadgen.simulation.run import Metrics, requests
from loadgen.simulation.run import simulate as simulated_run
from loadgen.traces import Content, Trace
from predictor.features import BatchFeatures
from predictor.model import LatencyModel
from predictor.profile import Profile, ProfileKey
from tidemill import simulate


@pytest.mark.slow
def test_a_single_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "tiny", "--duration", "5", "--model", "qwen2.5-0.5b", "--out", str(tmp_path)]
    assert simulate.main([*arguments, "--online-policy", "larry:0.1", "--latency-budget", "20"]) == 0
    assert "offline_throughput" in capsys.readouterr().out
    rows = json.loads((tmp_path / "table.json").read_text())
    assert rows[0]["policy"] == "larry:0.1" and rows[0]["metrics"]["offline_throughput"] > 0
    assert simulate.main([*arguments, "--no-offline"]) == 0
    assert json.loads((tmp_path / "table.json").read_text())[0]["metrics"]["offline_throughput"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--online-policy", "nobody"],
        ["--model", "opt-13b", "--device", "rtx-4090"],
        ["--acceptance", "nothing.json"],
        ["--acceptance", "nothing.json", "--speculation", "on"],
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(arguments) == 2
    assert capsys.readouterr().err.startswith("tidemill simulate: ")


def options(**more: object) -> workloads.Options:
    return workloads.Options(**({"duration": 30.0, "rate": 1.0, "seed": 0} | more))  # type: ignore[arg-type]


def simulated(made: workloads.Workload, *, caching: bool = True, seed: int = 0, **windows: float) -> Metrics:
    """`made` on a small machine, to its end unless the windows say otherwise."""
    config = EngineConfig(max_num_seqs=32, enable_prefix_caching=caching, max_model_len=4096)
    device = named_device("qwen2.5-0.5b", "a100-40gb", config)
    return simulated_run(device, made, Windows(**windows), StepObjective(budget=UNLIMITED), seed)  # type: ignore[arg-type]


@pytest.mark.slow
def test_prefixes_of_a_batch_are_real_in_the_simulator() -> None:
    """4 groups of 100 lines share 768 of 896 tokens: all but the first line of a group find 48 blocks in the cache."""
    made = workloads.build("prefix-batch", options(offline_lines=400, duration=None))
    shared = simulated(made)
    plain = simulated(made, caching=False)
    assert 0.75 < shared["prefix_hits"] <= 768 / 896 and plain["prefix_hits"] == 0.0
    assert shared["end"] < 0.7 * plain["end"], "cached prefixes need not be computed"
    assert shared["offline_throughput"] * shared["end"] == pytest.approx(400 * (896 + 64))
    lone = made.jobs[0].lines
    alone = replace(made, jobs=(Job(replace(lone, content=tuple(Content() for _ in lone.content))),))
    assert simulated(alone)["end"] > 1.5 * shared["end"]


def test_a_conversation_finds_its_last_turn_in_the_cache() -> None:
    made = workloads.build("chat-multiturn", options(count=40, duration=None))
    assert made.online is not None and not made.jobs
    found, plain = simulated(made), simulated(made, caching=False)
    # By hand: of each later turn the whole previous prompt but its last, unfilled block.
    length = {}
    hits = total = 0
    for prompt, content in zip(made.online.input_tokens, made.online.content, strict=True):
        conversation = content.segments[0][0]
        hits += length.get(conversation, 0) // 16 * 16
        length[conversation] = int(prompt)
        total += int(prompt)
    assert hits > 0.3 * total
    assert found["prefix_hits"] == pytest.approx(hits / total, abs=0.02)
    assert found["ttft_mean"] < plain["ttft_mean"] and found["requests"] == 40


def test_prompts_of_the_simulator_are_those_of_the_load_generator() -> None:
    made = workloads.build("prefix-batch", options(offline_lines=3, duration=None))
    maker = PromptMaker(TokenIds(), "completions", 5, 0)
    lines = made.jobs[0].lines
    found = list(requests(lines, "f", maker, 4096, RequestClass.OFFLINE, FIRST_OFFLINE))
    plan = Plan(Server("http://x", model="m"), jobs=made.jobs, source=TokenIds(), seed=5, salt=0)
    sent = [plan.body(plan.maker(), lines, row, FIRST_OFFLINE + row)["prompt"] for row in range(3)]
    assert [list(arrival.request.prompt_token_ids) for arrival in found] == sent
    assert sent[0][:768] == sent[1][:768] and sent[0][768:] != sent[1][768:]


@pytest.mark.slow
def test_a_job_without_shared_prefixes_starts_over_and_one_with_them_ends() -> None:
    short = workloads.build("score-batch", options(offline_lines=5))
    assert simulated(short, horizon=3.0)["offline_throughput"] * 3.0 > 10 * 5 * 700
    shared = workloads.build("prefix-batch", options(offline_lines=5))
    found = simulated(shared, horizon=3.0)
    assert found["end"] < 3.0 and found["offline_throughput"] * found["end"] == pytest.approx(5 * 960)


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile without error: 10 ms a step and 0.1 ms a prompt token."""
    model = LatencyModel(intercept=0.010, prefill_tokens=0.0001, token_limit=512)
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    Profile(ProfileKey("m", "d", "bfloat16", "1"), "2026-01-01T00:00:00+00:00", model, 0.0, 100).save(path)
    return path


def test_a_measured_profile_is_a_device(profile_path: Path) -> None:
    config = SchedulerConfig(num_units=4000, max_model_len=1024)
    made = workloads.Workload("w", Trace(np.array([1.0]), np.array([100]), np.array([5]), span=1.0))
    for host in (0.0, 0.003):
        device = measured_device(read_profile(profile_path), config, host)
        found = simulated_run(device, made, Windows(), StepObjective(), 0)
        assert found["ttft_mean"] == pytest.approx(0.020 + host)
        assert found["tbt_mean"] == pytest.approx(0.010 + host, rel=0.02)


def test_a_measured_device_plans_with_a_margin_by_the_error_of_its_profile(profile_path: Path, tmp_path: Path) -> None:
    document = json.loads(profile_path.read_bytes())
    features, plans = BatchFeatures(), []
    features.add_chunk(0, 100)
    for error in (0.01, 0.1):
        path = tmp_path / f"{error}.json"
        path.write_text(json.dumps(document | {"held_out_mape": error}))
        device = measured_device(read_profile(path), SchedulerConfig(num_units=4000, max_model_len=1024))
        plans.append(device.start(0)[0].predict(features) / 0.020)
    assert 1.01 < plans[0] < 1.06 and 1.2 < plans[1] < 1.31, "three times the error, at least 5 %"


def test_a_profile_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.json").write_text("{}")
    assert simulate.main(["--workload", "tiny", "--profile", str(tmp_path / "p.json")]) == 2
    assert "is no latency profile" in capsys.readouterr().err


def test_drafts_shorten_a_run_by_the_acceptance_that_a_server_recorded(
    profile_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the decodes have a draft of four tokens, three right ones first."""
    trace = {"looks": 100, "sources": [["context", 8, 50, [[4, 3, 50]]]]}
    profile_path.with_suffix(".load.json").write_text(json.dumps({"drafts": {"chats": trace, "jobs": trace}}))
    load = ["--workload", "tiny", "--duration", "20", "--no-offline"]
    arguments = [*load, "--profile", str(profile_path), "--host-ms", "1"]
    found = {}
    for wanted in ("off", "on"):
        assert simulate.main([*arguments, "--speculation", wanted]) == 0
        printed = capsys.readouterr().out
        assert ("1.50 accepted drafted tokens in chats" in printed) is (wanted == "on")
        found[wanted] = dict(line.rsplit(None, 1) for line in printed.splitlines() if len(line.split()) == 2)
    assert float(found["on"]["tokens_per_decode"]) == pytest.approx(2.5, rel=0.15)
    assert float(found["on"]["e2e_mean"]) < 0.6 * float(found["off"]["e2e_mean"])
