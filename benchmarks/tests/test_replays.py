"""Replays of the simulated machine by hand, and surfaces with a known optimum."""

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from driver import make_request

from benchmarks import drawing, simulator_speed
from benchmarks.drawing import Mark, Series
from benchmarks.experiments import larry
from benchmarks.experiments import main as experiments
from benchmarks.experiments.machine import Machine, MachineSpec, build_machine
from benchmarks.experiments.pool import Replays
from benchmarks.experiments.replay import ONLINE_ONLY, Scenario, Setting, replay, run
from benchmarks.experiments.surface import Family, Surface, Target, interference
from benchmarks.experiments.table import Result, figure, render, write_table
from engine.api import RequestClass
from engine.core import EngineCore
from engine.scheduling.objective import UNLIMITED, StepObjective
from engine.scheduling.output import Collect, SchedulerOutput
from engine.virtual import Arrival, VirtualDriver
from loadgen.simulation.gpu import SimulatedDevice, SimulatedRunner
from loadgen.simulation.run import Metrics, measure
from predictor.budget import BudgetParams

SPEC = MachineSpec("qwen2.5-0.5b", "a100-40gb", max_num_seqs=16)


SLOW = MachineSpec("llama-2-7b", "a100-40gb", max_num_seqs=16)
"""Long steps: few of them in a window."""


OFFLINE = ((0.0, 600, 50), (0.0, 300, 20))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return build_machine(SPEC)


def online(count: int, spacing: float = 0.05) -> tuple[tuple[float, int, int], ...]:
    return tuple((i * spacing, 50 + 13 * i % 200, 5 + 7 * i % 40) for i in range(count))


def test_the_fitted_predictor_is_good_but_is_not_the_device(machine: Machine) -> None:
    assert 0.001 < machine.mape < 0.03  # 2 % of noise alone is a mean error of 1.6 %
    assert machine == build_machine(SPEC)
    assert machine.predictor != build_machine(SPEC, seed=1).predictor


def test_one_request_by_hand(machine: Machine) -> None:
    scenario = Scenario(((1.0, 100, 3),))
    found = run(machine, scenario, Setting(), 0)
    record = found.online[0]
    assert len(record.token_times) == 3 and found.steps == 3
    metrics = measure(found, scenario.warm_up, scenario.measure_end)
    assert metrics["ttft_mean"] == pytest.approx(record.token_times[0] - 1.0)
    assert metrics["normalized_ttft_p50"] == pytest.approx(metrics["ttft_mean"] / 100)
    assert metrics["tbt_p99"] == max(record.gaps) and metrics["tbt_mean"] == pytest.approx(sum(record.gaps) / 2)
    assert metrics["total_throughput"] == pytest.approx(103 / record.token_times[-1])
    assert metrics["offline_throughput"] == 0.0 and metrics["unfinished"] == 0.0


def test_replays_repeat_themselves_and_differ_by_seed(machine: Machine) -> None:
    scenario = Scenario(online(20), OFFLINE, 0.1, 0.9, 1.2)
    setting = Setting(BudgetParams("hygen", 0.01))
    assert replay(machine, scenario, setting, 3) == replay(machine, scenario, setting, 3)
    assert replay(machine, scenario, setting, 3) != replay(machine, scenario, setting, 4)


def test_only_the_window_is_measured(machine: Machine) -> None:
    whole = Scenario(online(40), (), 0.0, 10.0)
    part = replace(whole, warm_up=0.5, measure_end=1.0)
    found = run(machine, whole, Setting(), 0)
    chosen = [r for r in found.online if 0.5 <= r.arrival.at <= 1.0]
    metrics = measure(found, part.warm_up, part.measure_end)
    assert metrics["requests"] == len(chosen) == 11
    assert metrics["ttft_mean"] == pytest.approx(sum(r.ttft or 0.0 for r in chosen) / 11)
    tokens = sum(0.5 <= at <= 1.0 for r in found.online for at in r.token_times)
    prompts = sum(len(r.arrival.request.prompt_token_ids) for r in found.online if 0.5 <= r.token_times[0] <= 1.0)
    assert metrics["total_throughput"] == pytest.approx((tokens + prompts) / 0.5)


def test_a_starved_request_counts_with_what_it_waited(machine: Machine) -> None:
    scenario = Scenario(((0.0, 4000, 1), (0.001, 40, 1)), end=0.003)
    metrics = replay(machine, scenario, Setting(), 0)
    assert metrics["unfinished"] >= 1
    assert metrics["ttft_p99"] == pytest.approx(metrics["end"])


def test_offline_work_by_budget_by_rate_and_mixed(machine: Machine) -> None:
    scenario = Scenario(online(60), OFFLINE, 0.2, 2.8, 3.0)
    settings = {
        "alone": Setting(ONLINE_ONLY),
        "tight": Setting(BudgetParams("hygen", 0.003)),
        "unlimited": Setting(UNLIMITED),
        "none": Setting(UNLIMITED, offline_rate=0.0),
        "slow": Setting(UNLIMITED, offline_rate=2.0),
        "fast": Setting(UNLIMITED, offline_rate=8.0),
    }
    found = {name: replay(machine, scenario, setting, 0) for name, setting in settings.items()}
    assert found["alone"]["offline_throughput"] == found["none"]["offline_throughput"] == 0.0
    assert found["none"]["ttft_mean"] == found["alone"]["ttft_mean"]
    assert 0 < found["tight"]["offline_throughput"] < found["unlimited"]["offline_throughput"]
    assert 0 < found["slow"]["offline_throughput"] < found["fast"]["offline_throughput"]
    assert found["alone"]["tbt_mean"] < found["tight"]["tbt_mean"] < found["unlimited"]["tbt_mean"]
    jobs = Scenario(online(20), OFFLINE * 100, finite=True)
    mixed, beside = (replay(machine, jobs, setting, 0) for setting in (Setting(mixed=0.0), Setting(UNLIMITED)))
    assert mixed["requests"] == beside["requests"] == 20
    assert mixed["ttft_mean"] > 5 * beside["ttft_mean"]  # jobs of the same class, there first, go first
    assert mixed["offline_throughput"] > 0
    windows = replay(machine, replace(jobs, windows=(0.0, math.inf)), Setting(UNLIMITED), 0)
    assert windows["lines_kept"] == 0.5, "the second job alone has time"


def curve(settings: Sequence[Setting], calls: list[Setting]) -> list[Metrics]:
    """Interference rises with L; throughput has its top at L = 0.05 and falls behind it."""
    found = []
    for setting in settings:
        assert setting not in calls, "replayed twice"
        calls.append(setting)
        budget = setting.budget.latency_budget
        found.append(
            {
                "offline_throughput": 1000 * min(budget, 0.1 - budget) if budget else 0.0,
                "tbt_mean": 1.0 + 4 * budget,
                "ttft_mean": 1.0 + budget,
            }
        )
    return found


def flat(value: float) -> Setting:
    return Setting(BudgetParams("hygen", value))


def test_one_surface_serves_every_target() -> None:
    calls: list[Setting] = []
    surface = Surface(lambda settings: curve(settings, calls), Setting(ONLINE_ONLY))
    surface.replay([surface.online_only])
    targets = [Target("tbt_mean", 0.05), Target("tbt_mean", 0.2), Target("ttft_mean", 0.05)]
    surface.explore(Family("flat", flat, 0.001, 0.09, 6, 30, ("tbt_mean", "ttft_mean")), targets, 0.8)
    spent = len(calls)
    assert spent <= 31
    for target, best in zip(targets, (0.01, 0.04, 0.04), strict=True):  # margin 0.8: 4 %, 16 %, 4 %
        chosen = surface.choose(target, 0.8, ("flat",))
        assert best / 1.03 < chosen.budget.latency_budget <= best
    loose = surface.choose(Target("tbt_mean", 9.0), 0.8, ("flat",))
    assert loose.budget.latency_budget == pytest.approx(0.05, rel=0.4)  # the top, not the largest L
    assert surface.choose(Target("tbt_mean", 0.001), 0.8, ("flat",)) == surface.online_only
    assert surface.choose(targets[0], 0.8, ()) == surface.online_only
    assert len(calls) == spent


def test_a_family_keeps_within_its_runs_and_its_metrics() -> None:
    calls: list[Setting] = []
    surface = Surface(lambda settings: curve(settings, calls), Setting(ONLINE_ONLY))
    surface.replay([surface.online_only])
    surface.explore(Family("flat", flat, 0.001, 0.09, 4, 7, ("tbt_mean",)), [Target("tbt_mean", 0.1)], 0.8, batch=3)
    assert len(calls) == 8
    surface.explore(Family("other", flat, 0.002, 0.08, 3, 9, ("tbt_p99",)), [Target("tbt_mean", 0.1)], 0.8)
    assert len(calls) == 11  # the grid alone: nobody asked for its metric
    assert interference({"x": 1.5}, {"x": 1.0}, "x") == pytest.approx(0.5)


def test_worker_processes_give_what_one_process_gives(machine: Machine) -> None:
    cases = {"a": Scenario(online(10)), "b": Scenario(online(20))}
    settings = [Setting(online_policy=policy) for policy in ("fcfs", "random")]
    with Replays(machine, cases, 0, 1) as alone, Replays(machine, cases, 0, 2) as pooled:
        assert alone.on("b", settings) == pooled.on("b", settings)
        assert pooled.count == 2


def test_tables_and_figures_are_written_whole(tmp_path: Path) -> None:
    results = [Result("e", "p", {"params": {"lam": math.inf}}, 7, {"ttft_p99": 0.5, "kept": True})]
    drawn = figure("<title>", [Series("a & b", [1, 2], [3, 4])], "x", "y")
    write_table(results, tmp_path / "new", {"one": drawn})
    rows = json.loads((tmp_path / "new" / "table.json").read_text())
    assert rows[0]["policy"] == "p" and rows[0]["seed"] == 7 and rows[0]["metrics"] == {"ttft_p99": 0.5, "kept": True}
    assert set(rows[0]) == {"experiment", "policy", "setting", "seed", "metrics"}
    assert ElementTree.parse(tmp_path / "new" / "one.svg").getroot().tag.endswith("svg")
    assert render(["name", "value"], [["a", 1.0], ["b", None], ["c", False]]).splitlines()[1:] == [
        "a         1",
        "b     -",
        "c     NO",
    ]


def test_an_experiment_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = MachineSpec("qwen2.5-0.5b", "a100-40gb", max_num_seqs=32)
    tiny = replace(larry.CONFIG, machine=spec, warm_up=1.0, factors=(1.0,), rates=(("code", 2.0),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(experiments.EXPERIMENTS, "larry", experiments.EXPERIMENTS["larry"]._replace(config=tiny))
        arguments = ["larry", "--seeds", "2", "--window", "5", "--workers", "1", "--out", str(tmp_path)]
        assert experiments.main(arguments) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    assert {row["seed"] for row in rows} == {0, 1} and len(rows) == 2 * len(larry.arms(1))
    assert (tmp_path / "larry-code-p50.svg").exists()
    assert "trail+" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["hygen", "--traces", "no/such/folder"],
        ["llmd-491", "--window", "5"],
        ["larry", "--window", "0"],
        ["larry", "--seeds", "0"],
    ],
)
def test_an_experiment_that_cannot_run_says_why(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments.main(arguments) == 2
    assert capsys.readouterr().err.startswith("experiments: ")


def test_speed_counts_requests() -> None:
    rate, steps = simulator_speed.measure_speed(requests=65)
    assert rate > 0
    assert 2 * 200 <= steps < 2 * 200 + 30  # the last one runs alone, after the first 64


class WatchingRunner(SimulatedRunner):
    """Remembers how many prompts each step cut short."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(device)
        self.cuts: list[int] = []

    def launch(self, output: SchedulerOutput) -> Collect:
        self.cuts.append(sum(not chunk.sample for chunk in output.chunks))
        return super().launch(output)


def test_a_budget_is_not_crumbled_over_many_prompts() -> None:
    """Chunks of a few tokens each for every prompt that runs would fill the cache with unfinished prompts."""
    machine = build_machine(replace(SLOW, max_num_seqs=32))
    budget = BudgetParams("tidemill", 0.06, 1.0, 4.0, "tbt_mean")
    core = EngineCore(
        machine.config, offline_policy="fcfs", model=machine.predictor, objective=StepObjective(budget=budget)
    )
    arrivals = [Arrival(0.1 * i, make_request(f"n{i}", (1,) * 100, 100)) for i in range(40)]
    offline = (make_request(f"f{i}", (1,) * 1500, 60, request_class=RequestClass.OFFLINE) for i in range(1000))
    runner = WatchingRunner(machine.device)
    driver = VirtualDriver(core, runner, arrivals, offline)
    assert driver.run(8.0).offline_tokens > 0
    assert 1 <= max(runner.cuts) <= 2  # one of each class


def test_charts_survive_any_data() -> None:
    cases = [
        [Series("none", [], [])],
        [Series("one", [1.0], [2.0], points=True)],
        [Series("flat", [1, 2], [0, 0]), Series("nan <&>", [1, 2], [float("nan"), 3])],
        [Series("long", np.arange(5000), np.arange(5000) % 7)],
    ]
    for series in cases:
        for log in (False, True):
            text = drawing.chart("A <title>", series, x="s", y="n", marks=[Mark(1.5, "SLO")], log_x=log)
            root = ElementTree.fromstring(text)
            assert "nan" not in text.replace("nan &lt;", "")
            assert root.tag in ("{http://www.w3.org/2000/svg}svg", "p")
    points = drawing.chart("t", cases[3], x="s", y="n").split('points="')[1].split('"')[0].split()
    assert len(points) <= drawing.MAX_POINTS
    assert drawing.ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]


def test_logarithmic_ticks_are_round_and_few() -> None:
    assert drawing.log_ticks(10.0, 500.0) == pytest.approx([10, 20, 50, 100, 200, 500])
    assert drawing.log_ticks(0.01, 1e6) == pytest.approx([10.0**n for n in range(-2, 7)])
    text = drawing.chart("t", [Series("a", [0.02, 5.0, 400.0], [0, 0.5, 1])], x="ms", y="n", log_x=True)
    assert ">0.5<" in text and ">0.05<" not in text, "three decades at most: values near zero do not squeeze the rest"
