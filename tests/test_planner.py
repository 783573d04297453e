"""The capacity planner: `tidemill simulate --slo` against machines whose steps are known by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.client import EngineStats
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.virtual import Arrival, VirtualRecord, VirtualRun
from gateway.config import ServerConfig
from loadgen import InputError, traces, workloads
from loadgen.plan import Job
from loadgen.simulation.device import SHARED_CORES, named_device, profiled_device, read_profile, shape_of
from loadgen.simulation.planner import Answer, Question, answer, measured, parts
from loadgen.simulation.run import Ran
from loadgen.traces import Trace
from predictor.budget import BudgetParams
from predictor.model import LatencyModel
from predictor.profile import CacheCosts, Profile, ProfileKey
from predictor.slo import SLO
from tidemill import cli, plan_report, simulate
from tidemill.flags import flags_of, resolve_configs

STEP, PER_TOKEN = 0.030, 0.0003
SECONDS = 24.0
DEMO = Path(__file__).resolve().parents[1] / "engine" / "models" / "demo" / "weights"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine without error: 30 ms a step and 0.3 ms a token of it."""
    model = LatencyModel(intercept=STEP, prefill_tokens=PER_TOKEN, decodes=PER_TOKEN, token_limit=512)
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    Profile(ProfileKey("m", "d", "bfloat16", "1"), "2026-01-01T00:00:00+00:00", model, 0.0, 100).save(path)
    return path


def traffic(rate: float = 2.0, seconds: float = SECONDS, prompt: int = 400, output: int = 10) -> workloads.Workload:
    """Requests of one size at even times, beside a job of lines of one size."""
    times = np.arange(0.0, seconds, 1.0 / rate)
    online = workloads.fixed(len(times), prompt, output).at(times)
    return workloads.Workload(
        "even", replace(online, span=seconds), (Job(workloads.fixed(50, 400, 20)),), horizon=seconds
    )


def ask(profile: Path, slo: str, made: workloads.Workload | None = None, **more: object) -> Answer:
    config = EngineConfig(online_policy="fcfs", max_num_seqs=32, num_gpu_blocks_override=2000, max_model_len=2048)
    device = profiled_device(profile, replace(config, enable_prefix_caching=False))
    made = made or traffic()
    settings: dict[str, object] = {"evaluations": 11} | more
    question = Question(device, made, config, SLO.parse(slo), made.horizon or SECONDS, **settings)  # type: ignore[arg-type]
    return answer(question)


@pytest.mark.parametrize("slo", ["tbt_mean=45ms", "ttft_p99=600ms,tbt_p99=90ms", "ttft_mean=20%"])
def test_every_form_of_an_slo_gets_a_budget_that_keeps_it(profile: Path, slo: str) -> None:
    found = ask(profile, slo)
    assert found.kept and found.search is not None and found.search.confirmed
    assert found.alone is not None and found.alone.offline_tokens == 0
    assert found.beside.offline_tokens > 0 and found.budget.latency_budget > 0
    assert found.offline_only is not None and found.beside.offline_tokens < found.offline_only.offline_tokens
    for verdict in found.verdicts:
        assert verdict.kept
        if verdict.objective.tolerance is not None:
            assert verdict.bound == pytest.approx(verdict.alone * (1 + verdict.objective.tolerance))
            assert verdict.beside <= verdict.bound
        elif verdict.objective.percentile is None:
            assert verdict.beside <= verdict.bound == verdict.objective.limit
        else:
            assert verdict.share is not None and verdict.share >= 0.99


def test_an_slo_out_of_reach_is_said_and_so_is_why(profile: Path) -> None:
    found = ask(profile, "tbt_p99=15ms")  # a step alone takes 30 ms
    assert not found.kept and found.alone is not None and found.alone.attainment() == 0.0
    assert "not even without offline work" in plan_report.show(found, "MODEL", ())
    assert "MISSED" in plan_report.show(found, "MODEL", ())


def test_the_budget_is_chosen_on_the_first_half_and_reported_on_the_second(profile: Path) -> None:
    made = traffic(rate=1.0)
    assert made.online is not None
    late = np.where(made.online.arrived_at >= SECONDS / 2, 300, 100)
    question = Question(
        profiled_device(profile, EngineConfig()),
        replace(made, online=replace(made.online, input_tokens=late)),
        EngineConfig(),
        SLO.parse("5%"),
        SECONDS,
    )
    first, second = parts(question)
    assert first.online is not None and second.online is not None
    assert set(first.online.input_tokens) == {100} and set(second.online.input_tokens) == {300}
    assert first.horizon == second.horizon == SECONDS / 2 and second.online.arrived_at[0] == 0.0
    given = replace(question, budget=BudgetParams("hygen", 0.02))
    whole, same = parts(given)
    assert whole is same and whole.online is not None and len(whole.online) == 24


def test_a_given_budget_is_taken_without_a_search(profile: Path) -> None:
    found = ask(profile, "tbt_p99=120ms", budget=BudgetParams("hygen", 0.060))
    assert found.search is None and found.budget.latency_budget == 0.060
    assert found.beside.requests > 40, "the whole traffic is reported"
    assert "(given)" in plan_report.show(found, "MODEL", ())


def test_one_class_alone_is_a_question_too(profile: Path) -> None:
    made = traffic()
    online = ask(profile, "tbt_p99=120ms", replace(made, jobs=()))
    assert online.offline_only is None and online.search is None and online.kept
    offline = ask(profile, "tbt_p99=120ms", replace(made, online=None))
    assert offline.alone is None and offline.beside.offline_tokens > 0 and not offline.verdicts
    for found in (online, offline):
        assert "tidemill serve" in plan_report.show(found, "MODEL", ())
        json.dumps(plan_report.document(found, "MODEL", ()), allow_nan=False)


def record(
    at: float, tokens: tuple[float, ...], *, ended: float | None = None, rejected: bool = False
) -> VirtualRecord:
    request = EngineRequest(f"n{at}", (1, 2), SamplingParams(max_tokens=2), RequestClass.ONLINE)
    made = VirtualRecord(Arrival(at, request), list(tokens), ended)
    made.rejected, made.retry_after = rejected, 0.5
    return made


def test_refused_and_unfinished_requests_are_no_good_ones() -> None:
    records = [
        record(0.5, (0.6, 0.7), ended=0.7),  # before the window
        record(1.0, (1.1, 1.2), ended=1.2),
        record(2.0, (2.9, 3.0), ended=3.0),  # late
        record(3.0, (), rejected=True),
        record(4.0, (4.1,)),  # not ended
        record(5.0, ()),  # no token at all
        record(9.0, (9.1, 9.2), ended=9.2),  # behind the window
    ]
    run = VirtualRun(records, offline_tokens=1000, offline_output_tokens=100, offline_ended=7, end=10.0)
    arm = measured(Ran(run, (1.0, 6.0), EngineStats()), SLO.parse("ttft_p99=500ms,tbt_p99=200ms,ttft_mean=2s"))
    assert (arm.requests, arm.refused, arm.unfinished, arm.judged) == (5, 1, 2, {"default": (1, 5)})
    assert arm.shares == {"ttft_p99": 0.2, "tbt_p99": 0.4}
    assert arm.seconds == 5.0 and arm.metrics["offline_throughput"] == 200.0
    assert arm.values["ttft_p99"] == pytest.approx(5.0), "it has waited until the end"
    assert arm.values["ttft_mean"] == pytest.approx((0.1 + 0.9 + 1.0 + 0.1 + 5.0) / 5), (
        "a refused one: 0.5 s, and 0.5 s more"
    )


def test_every_request_of_a_window_is_served_to_its_end(profile: Path) -> None:
    """Arrivals up to the very end of the window, without a miss."""
    made = traffic(rate=2.0)
    assert made.online is not None
    shifted = traces.build(made.online.arrived_at + 0.49, made.online.input_tokens, made.online.output_tokens)
    found = ask(profile, "ttft_p99=1s,tbt_p99=300ms", replace(made, online=replace(shifted, span=SECONDS)))
    assert found.alone is not None and found.alone.unfinished == 0 and found.alone.attainment() == 1.0


def test_the_serve_command_makes_the_configuration_that_was_asked_about(profile: Path) -> None:
    asked = EngineConfig(
        slo="tbt_mean=50ms",
        max_num_seqs=32,
        swap_space=2.5,
        max_num_batched_tokens=4096,
        overload="hidden",
        online_policy="apt",
    )
    found = replace(ask(profile, "tbt_mean=50ms", replace(traffic(), jobs=())))
    found = replace(found, question=replace(found.question, config=asked))
    words = plan_report.serve_command(found, "MODEL").split()
    assert words[:2] == ["tidemill", "serve"]
    config, _ = resolve_configs(cli._parser().parse_args(words[1:]), [EngineConfig, ServerConfig], {})
    assert replace(config, model="") == asked


def parsed(*words: str) -> simulate.Asked:
    return simulate.ask(simulate.parser().parse_args(["--workload", "tiny", *words]))


def test_the_serving_flags_are_those_of_serve() -> None:
    options = {option for action in simulate.parser()._actions for option in action.option_strings}
    for flag in flags_of(EngineConfig):
        if flag.field not in simulate.NOT_SERVING:
            assert f"--{flag.key}" in options
    usual, other = parsed(), parsed("--max-num-seqs", "7", "--slo", "5%", "--offline-policy", "fcfs")
    assert usual.config == EngineConfig() and usual.slo is None
    assert other.config.max_num_seqs == other.device.config.max_num_seqs == 7
    assert other.slo == SLO.parse("5%")


def test_cache_flags_reach_the_simulated_machine() -> None:
    plain = parsed("--model", "llama-2-7b").device.config
    assert plain.host_units == plain.scratch_blocks == 0
    made = parsed("--model", "llama-2-7b", "--swap-space", "4", "--overload", "hidden", "--online-policy", "apt").device
    config = made.config
    assert config.host_units * config.unit_bytes == pytest.approx(4 * 2**30, rel=1e-3)
    assert config.scratch_blocks > 0 and config.rho > 0 and config.num_units < plain.num_units
    assert made.model.transferred > 0 and config.rho == pytest.approx(
        made.model.compact + made.model.compact_step / config.compact_tokens
    )
    assert parsed("--num-gpu-blocks-override", "400").device.config.num_units == 800
    assert parsed("--num-blocks", "400").device.config.num_units == 800
    less = parsed("--model", "llama-2-7b", "--gpu-memory-utilization", "0.6").device.config
    assert less.num_units < plain.num_units


def test_a_server_s_file_of_settings_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"model: {DEMO}\ndevice: cuda\nport: 9000\nslo: tbt_mean=50ms\nmax-num-seqs: 8\n")
    asked = parsed("--config", str(path), "--max-num-seqs", "9")
    assert asked.slo == SLO.parse("tbt_mean=50ms") and asked.config.max_num_seqs == 9
    assert asked.device.model_name == "weights" and asked.named == str(DEMO)


def test_a_checkpoint_s_folder_gives_its_sizes() -> None:
    shape, config = shape_of(str(DEMO)), json.loads((DEMO / "config.json").read_text())
    assert (shape.num_layers, shape.hidden_size) == (config["num_hidden_layers"], config["hidden_size"])
    assert shape.vocab_size == config["vocab_size"]


def test_a_measured_machine_has_what_it_was_measured_with(profile: Path, tmp_path: Path) -> None:
    document = json.loads(profile.read_bytes())
    costs = CacheCosts(run_hidden=1e-6, restore=1e-6, swap_out=2e-5, swap_in=4e-5)
    model = Profile.load(profile, ProfileKey(**document["key"])).with_cache_costs(costs, 3000)
    model.save(tmp_path / "full.json")
    config = EngineConfig(swap_space=1.0, overload="hidden", online_policy="goodput", num_gpu_blocks_override=100)
    made = profiled_device(tmp_path / "full.json", config)
    assert made.config.unit_bytes == 3000 and made.config.host_units == 2**30 // 3000
    assert made.config.scratch_blocks == 50 and made.config.rho == 1e-6
    assert made.config.max_model_len == 1600 and any("1600 tokens" in note for note in made.notes)
    on_cpu = replace(model, key=replace(model.key, device="AMD EPYC, 2 threads"))
    on_cpu.save(tmp_path / "cpu.json")
    noted = [SHARED_CORES in profiled_device(tmp_path / name, config).notes for name in ("full.json", "cpu.json")]
    assert noted == [model.key.is_cpu, True]
    for lacking in (EngineConfig(swap_space=1.0), EngineConfig(overload="hidden")):
        with pytest.raises(ConfigError, match="was measured without it"):
            profiled_device(profile, lacking)


def test_larger_steps_are_suggested_where_the_slo_does_not_bind(profile: Path) -> None:
    found = ask(profile, "ttft_p99=60s,tbt_p99=10s")
    shown = plan_report.show(found, "MODEL", ())
    assert found.kept and "larger ones may give more (--max-num-batched-tokens 2048" in shown
    tight = plan_report.show(ask(profile, "tbt_p99=60ms"), "MODEL", ())
    assert "larger ones may give more" not in tight and "requests are few to judge this SLO by, 1000 would do" in tight


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = simulate.main(["--duration", "20", "--evaluations", "10", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_command_answers(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Own traffic and own lines from files, read by a person and by a program."""
    rows = ["arrived_at,input_tokens,output_tokens", *(f"{0.5 * i},{80 + i},10" for i in range(40))]
    (tmp_path / "mine.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "lines.csv").write_text("input_tokens,output_tokens\n" + "300,20\n" * 30)
    words = ["--slo", "ttft_p99=500ms,tbt_p99=120ms", "--profile", str(profile), "--trace", str(tmp_path / "mine.csv")]
    words += ["--offline-trace", str(tmp_path / "lines.csv"), "--max-num-seqs", "16"]
    code, text, progress = run(capsys, *words)
    assert code == 0 and "offline tokens/hour" in text and "job 1 of 30 lines takes" in text
    assert "tidemill serve MODEL --slo ttft_p99=500ms,tbt_p99=120ms --max-num-seqs 16" in text
    assert "offline tokens/s" in progress
    code, text, _ = run(capsys, *words, "--json", "--out", str(tmp_path / "out"))
    found = json.loads(text)
    assert code == 0 and found == json.loads((tmp_path / "out" / "plan.json").read_bytes())
    assert found["kept"] and found["offline_tokens_per_hour"] > 0 and found["online_only"]["refused"] == 0
    assert [objective["objective"] for objective in found["objectives"]] == ["ttft_p99=500ms", "tbt_p99=120ms"]
    assert found["jobs"][0]["lines"] == 30 and found["jobs"][0]["kept"]
    assert found["budget"]["latency_budget"] > 0 and found["traffic"]["name"] == "trace"


@pytest.mark.slow
def test_requests_take_the_service_classes_in_turn(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--profile", str(profile), "--workload", "random", "--request-rate", "2", "--random-input-len", "60"]
    words += ["--random-output-len", "10", "--slo", "ttft_p99=500ms", "--slo"]
    code, text, _ = run(capsys, *words, "premium:ttft_p99=300ms,tbt_p99=100ms")
    assert code == 0 and "keeps the SLO" in text and "good premium" in text
    assert "--slo 'ttft_p99=500ms;premium:ttft_p99=300ms,tbt_p99=100ms'" in text
    code, text, _ = run(capsys, *words, "premium:ttft_p99=1ms", "--json")
    found = json.loads(text)
    assert not found["kept"] and found["online_only"]["premium:slo_attainment"] == 0.0
    assert found["online_only"]["slo_attainment"] == 1.0 and 0 < 2 * found["online_only"]["good"] < 40


def test_what_the_leftover_is_worth(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.csv").write_text("input_tokens,output_tokens\n" + "300,20\n" * 30)
    words = ["--slo", "tbt_p99=200ms", "--slo", "tbt_p99=60ms", "--profile", str(profile), "--workload", "random"]
    words += ["--offline-trace", str(tmp_path / "lines.csv"), "--request-rate", "1", "--duration", "20"]
    words += ["--random-input-len", "60", "--random-output-len", "10"]
    words += ["--evaluations", "10", "--price-in", "1", "--price-out", "10", "--gpu-hour", "2"]
    assert cli.main(["worth", *words, "--json", "--out", str(tmp_path / "worth.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "worth.json").read_bytes()) and len(found["rows"]) == 2
    wide, narrow = found["rows"]
    assert wide["slo"] == "tbt_p99=200ms" and wide["lines"] > narrow["lines"] > 0
    assert wide["value"] == pytest.approx((wide["prompt_tokens"] + 10 * wide["output_tokens"]) / 1e6)
    assert wide["prompt_tokens"] / wide["output_tokens"] > 5
    for wrong, said in (
        (["--price-in", "1"], "belong together"),
        (["--gpu-hour", "1"], "needs --price-in"),
        (["--price-in", "-1", "--price-out", "1"], "must not be negative"),
        (["--slo", "soon"], "SLO 'soon'"),
        (["--no-offline", *words], "without offline lines"),
    ):
        assert cli.main(["worth", *wrong]) == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slo", "soon"], "SLO 'soon'"),
        (["--slo", "5%", "--device", "abacus"], "unknown device 'abacus'"),
        (["--slo", "5%", "--model", "gpt-9"], "unknown model 'gpt-9'"),
        (["--slo", "5%", "--workload", "random"], "no arrival times"),
        (["--slo", "5%", "--evaluations", "3"], "--evaluations"),
        (["--slo", "5%", "--overload", "hidden", "--model", "llama-3-8b"], "more than half the room"),
        (["--slo", "5%", "--overload", "hidden", "--online-policy", "fcfs"], "needs a policy that selects requests"),
        (["--slo", "5%", "--max-model-len", "100000", "--num-blocks", "100"], "does not fit"),
        (["--slo", "5%", "--max-num-seqs", "none"], "must be a whole number"),
        (["--slo", "5%", "--trace", "no/such/file.csv"], "cannot read"),
        (["--slo", "5%", "--host-ms", "-1"], "--host-ms"),
        (["--json"], "--json needs --slo"),
    ],
)
def test_what_cannot_be_answered_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2 and said in err and not out and len(err.splitlines()) == 1


def test_a_half_without_requests_is_refused(profile: Path) -> None:
    times = np.array([1.0, 2.0])
    made = replace(traffic(), online=Trace(times, np.array([10, 10]), np.array([2, 2]), span=SECONDS))
    with pytest.raises(InputError, match="has no online request"):
        ask(profile, "tbt_p99=120ms", made)


@pytest.mark.parametrize(
    ("device", "given", "steps"),
    [("rtx-4090", {}, (256, 2048)), ("h100", {"max_num_seqs": 32}, (32, 2048))],
)
def test_a_machine_by_name_takes_the_steps_of_a_real_start(
    device: str, given: dict[str, int], steps: tuple[int, int]
) -> None:
    config = EngineConfig(**given)
    made = named_device("qwen2.5-0.5b", device, config)
    assert (made.config.max_num_seqs, made.config.max_num_batched_tokens) == steps
    few = replace(traffic(seconds=1.0), jobs=())
    question = Question(made, few, config, SLO.parse("5%"), 1.0, budget=BudgetParams("hygen", 0.0))
    shown = plan_report.show(answer(question), "MODEL", ())
    assert "--max-num-seqs {} --max-num-batched-tokens {}".format(*steps) in shown


def test_a_profile_of_wide_steps_is_simulated_with_wide_steps(profile: Path, tmp_path: Path) -> None:
    measured = read_profile(profile)
    wide = tmp_path / "wide.json"
    replace(measured, model=replace(measured.model, token_limit=2048)).save(wide)
    found = [profiled_device(path, EngineConfig()).config.max_num_batched_tokens for path in (profile, wide)]
    assert found == [512, 2048]
