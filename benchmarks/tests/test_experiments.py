"""The experiments end to end on tiny windows, and their parts by hand (orderings: test_orderings)."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.experiments import hygen, larry, llmd, parts
from benchmarks.experiments.machine import (
    HygenLatency,
    Machine,
    MachineSpec,
    TrueLatency,
    build_machine,
    fit_hygen,
    mean_error,
)
from benchmarks.experiments.pool import Replays
from benchmarks.experiments.replay import ONLINE_ONLY, Scenario, Setting, make_core, recorded_steps, replay, run
from benchmarks.experiments.surface import Surface, Target
from benchmarks.experiments.table import Result
from engine.colocation.replay import step_range
from engine.scheduling.objective import UNLIMITED
from loadgen.simulation.gpu import sweep_device
from loadgen.simulation.run import Metrics
from predictor.budget import BudgetParams
from predictor.features import EVERYTHING
from predictor.samples import Sample

SLOW = MachineSpec("llama-2-7b", "a100-40gb", max_num_seqs=16)
"""Long steps: few of them in a window."""
CODE = MachineSpec("llama-3-8b", "a100-40gb", max_num_seqs=256, max_model_len=8192)
OFFLINE = ((0.0, 600, 50), (0.0, 300, 20))
NAMES = {"online-only", "sarathi++", "hygen-star", "hygen", "tidemill", "oracle"}
TINY = replace(
    hygen.CONFIG,
    machine=SLOW,
    window=6.0,
    warm_up=1.0,
    cool_down=1.0,
    tolerances=(0.2,),
    several=(0.5,),
    offline_lines=50,
)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return build_machine(SLOW)


def say(_text: str) -> None:
    pass


def number(result: Result, key: str) -> float:
    value = result.metrics[key]
    assert value is not None
    return float(value)


def test_hygen_on_a_tiny_window() -> None:
    results = hygen.run_seed(TINY, None, 0, 1, say)
    assert {r.policy for r in results} == NAMES
    assert {r.experiment for r in results} == {"hygen"} and {r.seed for r in results} == {0}
    by_policy = {r.policy: r for r in results if r.setting.get("metric", "tbt_mean") == "tbt_mean"}
    assert number(by_policy["online-only"], "offline_throughput") == 0.0
    assert number(by_policy["online-only"], "interference_tbt_mean") == 0.0
    assert number(by_policy["sarathi++"], "interference_tbt_mean") > 0.2
    tuned = [r for r in results if "metric" in r.setting]
    both = [r for r in tuned if "beside" in r.setting]
    assert len(tuned) == 4 * 4 + 2 and {r.policy for r in both} == {"hygen", "tidemill"}
    for result in tuned:
        kept = number(result, f"interference_{result.setting['metric']}") <= result.setting["tolerance"]
        for metric, tolerance in result.setting.get("beside", {}).items():
            kept = kept and number(result, f"interference_{metric}") <= tolerance
        assert result.metrics["kept"] == kept
    header, rows = hygen.summary(results)
    assert len(rows) == 2 + len(tuned) and all(len(row) == len(header) for row in rows)
    assert set(hygen.figures(results)) == {f"hygen-{metric}" for metric in hygen.METRICS}


def test_hygen_takes_at_most_sixty_replays_a_window(machine: Machine) -> None:
    found = hygen.families(machine, hygen.CONFIG)
    assert sum(family.runs for family in found) + 2 <= 60
    assert all(family.grid <= family.runs for family in found)
    assert {name for names in hygen.TUNED.values() for name in names} == {family.name for family in found}


def test_flat_budgets_are_dense_near_the_smallest_step(machine: Machine) -> None:
    low, high = step_range(machine.predictor, machine.config)
    flat = next(family for family in hygen.families(machine, hygen.CONFIG) if family.name == "flat")
    budgets = [flat.make(value).budget.latency_budget for value in (flat.low, flat.high)]
    assert low < budgets[0] < low + 0.0015 and budgets[1] == pytest.approx(high)


def test_hygen_windows_follow_each_other() -> None:
    config = replace(hygen.CONFIG, window=60.0)
    first = hygen.scenarios(config, None, 0)
    assert first["chosen"].online != first["reported"].online
    assert all(row[0] < 120.0 for row in first["reported"].online)
    assert hygen.scenarios(config, None, 1)["chosen"].online != first["chosen"].online


def test_ours_is_never_behind_the_flat_budget_on_the_window_it_was_chosen_on(machine: Machine) -> None:
    config = replace(hygen.CONFIG, machine=SLOW, tolerances=(0.1,), rate=4.0)
    rows = tuple((i * 0.2, 200, 60) for i in range(30))
    cases = {"chosen": Scenario(rows, OFFLINE, 1.0, 5.0, 6.0)}
    with Replays(machine, cases, 0, 1) as replays:
        surface = hygen.explore(machine, config, replays)
        truth = hygen.explore_oracle(machine, config, surface)
    for target in hygen.targets(config):
        flat_one = surface.points[surface.choose(target, 0.8, hygen.TUNED["hygen"])]
        weighted = surface.points[surface.choose(target, 0.8, hygen.TUNED["tidemill"])]
        assert weighted["offline_throughput"] >= flat_one["offline_throughput"]
    assert all(setting.oracle for setting in truth.points if setting != truth.online_only)


def setting_of(budget: float) -> Setting:
    return Setting(BudgetParams("hygen", budget))


def known(settings: Sequence[Setting]) -> list[Metrics]:
    """Throughput and both interferences rise with L, that of TTFT twice as fast."""
    found = []
    for setting in settings:
        budget = setting.budget.latency_budget
        found.append({"offline_throughput": 1000 * budget, "tbt_mean": 1 + budget, "ttft_p99": 1 + 2 * budget})
    return found


def surface_of(*budgets: float) -> Surface:
    surface = Surface(known, Setting(ONLINE_ONLY))
    surface.replay([surface.online_only])
    surface.add("flat", {budget: setting_of(budget) for budget in budgets})
    return surface


def test_several_targets_are_kept_by_one_choice() -> None:
    surface = surface_of(0.05, 0.1, 0.2, 0.4)
    tbt, ttft = Target("tbt_mean", 0.5), Target("ttft_p99", 0.25)
    assert surface.choose(tbt, 1.0, ("flat",)) == setting_of(0.4)
    assert surface.choose((tbt, ttft), 1.0, ("flat",)) == setting_of(0.1)
    assert surface.choose((tbt, ttft), 0.5, ("flat",)) == setting_of(0.05)
    assert surface.choose((tbt, Target("ttft_p99", 0.01)), 1.0, ("flat",)) == surface.online_only


def test_a_search_may_start_from_given_values(machine: Machine) -> None:
    surface = surface_of()
    flat = replace(hygen.flat_family(0.001, 0.5, 4, 5), metrics=("tbt_mean",))
    surface.explore(flat, [Target("tbt_mean", 0.1)], 1.0, 2, start=(0.05, 0.4))
    tried = sorted(setting.budget.latency_budget - 0.001 for setting in surface.members["flat"].values())
    assert len(tried) == 5 and tried[0] == pytest.approx(0.05) and tried[-1] == pytest.approx(0.4)
    best = surface.choose(Target("tbt_mean", 0.1), 1.0, ("flat",)).budget.latency_budget
    assert 0.08 < best <= 0.1


def test_a_budget_is_confirmed_on_other_bursts() -> None:
    target = Target("ttft_p99", 0.5)
    first = surface_of(0.05, 0.1, 0.195, 0.2)

    def stricter(limit: float) -> Surface:
        """Interference jumps above `limit`."""

        def evaluate(settings: Sequence[Setting]) -> list[Metrics]:
            found = known(settings)
            return [m | {"ttft_p99": 9.0} if m["offline_throughput"] > 1000 * limit else m for m in found]

        return Surface(evaluate, first.online_only)

    assert llmd.confirm(first, stricter(1.0), target, 0.8, ("flat",)) == setting_of(0.2)
    second = stricter(0.15)
    assert llmd.confirm(first, second, target, 0.8, ("flat",)) == setting_of(0.1)
    assert setting_of(0.195) not in second.points, "so near to one that failed, it would fail as well"
    assert llmd.confirm(first, stricter(0.0), target, 0.8, ("flat",)) == first.online_only


def test_every_burst_of_llmd_has_arrivals_of_its_own() -> None:
    config = replace(llmd.CONFIG, lines=3, phase=5.0)
    found = llmd.scenarios(config, 0)
    assert len(found) == 1 + 2 * llmd.DRAWS
    assert len({scenario.online for scenario in found.values()}) == len(found)
    assert math.isinf(found["reported"].end) and found["chosen-0"].end == config.phase + llmd.CUT


def crowd(count: int = 40) -> Scenario:
    """A prompt that fills the pool, then many short and two long ones at once."""
    rows = [(0.0, 4000, 400), *((0.1 + 0.02 * i, 300, 30) for i in range(count))]
    rows += [(0.15, 6000, 10), (0.2, 6000, 10)]
    return Scenario(tuple(sorted(rows)))


def test_the_age_guard_bounds_what_larry_lets_wait() -> None:
    machine = build_machine(replace(CODE, max_num_seqs=4))
    plain, guarded = (Setting(online_policy="larry:0.0001", ttft=ttft) for ttft in (math.inf, 0.5))
    waits = {}
    for name, setting in (("plain", plain), ("guarded", guarded)):
        records = run(machine, crowd(), setting, 0).online
        assert not any(record.rejected for record in records), "policies are compared on the same requests"
        long = [record for record in records if len(record.arrival.request.prompt_token_ids) == 6000]
        waits[name] = max(record.ttft or math.inf for record in long)
    assert waits["guarded"] < waits["plain"]


def test_a_latency_model_is_used_where_time_matters(machine: Machine) -> None:
    def model(scenario: Scenario, setting: Setting) -> object:
        return make_core(machine, scenario, setting).state.model

    assert model(Scenario(((0.0, 5, 5),)), Setting()) is None
    assert model(Scenario((), OFFLINE), Setting()) is machine.predictor
    assert model(Scenario((), OFFLINE), Setting(profile="hygen")) is machine.profiles["hygen"]
    assert isinstance(model(Scenario((), OFFLINE), Setting(oracle=True)), TrueLatency)
    with pytest.raises(KeyError):
        replay(machine, Scenario((), OFFLINE), Setting(UNLIMITED, profile="nobody"), 0)


def larry_row(policy: str, rate: float, p50: float, seed: int = 0, **described: float) -> Result:
    setting = {"workload": "larry-code", "factor": rate, "rate": rate, **described}
    keys = ("ttft_p50", "ttft_p95", "ttft_p99", "normalized_ttft_p50", "normalized_ttft_p95", "e2e_mean")
    return Result("larry", policy, setting, seed, dict.fromkeys(keys, p50))


def test_gains_and_capacity_by_hand() -> None:
    results = [larry_row("fcfs", 1.0, 0.5), larry_row("fcfs", 2.0, 2.0), larry_row("trail+", 2.0, 1.5)]
    results += [larry_row("larry", rate, value, alpha=1.0) for rate, value in ((1.0, 0.25), (2.0, 0.5))]
    group = [r for r in results if r.setting["rate"] == 2.0]
    assert larry.gains(group, [r for r in group if r.policy == "larry"], "ttft_p50") == [3.0]
    assert larry.gains(group, [r for r in group if r.policy == "fcfs"], "ttft_p50") == []
    assert larry.capacity(results, "fcfs", "larry-code", 1.0) == pytest.approx(1.5)
    assert larry.capacity(results, "larry alpha 1", "larry-code", 1.0) is None


def test_ratios_are_paired_by_seed() -> None:
    def row(policy: str, seed: int, value: float) -> Result:
        return Result("hygen", policy, {}, seed, {"offline_throughput": value})

    group = [row("hygen", 0, 100.0), row("hygen", 1, 200.0), row("tidemill", 0, 300.0), row("tidemill", 1, 200.0)]
    assert hygen.ratio(group, "tidemill", "hygen") == 2.0
    assert hygen.ratio(group, "hygen", "hygen") is None
    assert hygen.ratio([*group, row("hygen-star", 0, 0.0)], "hygen", "hygen-star") is None


def test_models_are_judged_on_steps_that_were_run(machine: Machine) -> None:
    scenario = Scenario(tuple((0.3 * i, 200, 40) for i in range(20)), OFFLINE, 0.0, 6.0, 6.0)
    setting = Setting(BudgetParams("hygen", 0.03))
    steps = recorded_steps(machine, scenario, setting, 0)
    assert len(steps) == run(machine, scenario, setting, 0).steps
    foreign = build_machine(replace(SLOW, device="h100")).predictor
    errors = [mean_error(model, steps) for model in (TrueLatency(machine.device), machine.predictor, foreign)]
    assert 0.012 < errors[0] < 0.02, "the noise: 2 %, so 1.6 % in the mean"
    assert errors[0] <= errors[1] < 0.04 < 0.2 < errors[2]


def test_the_papers_features_fit_their_own_law_and_miss_the_knee(machine: Machine) -> None:
    steps = [sample.features for sample in sweep_device(machine.device, machine.config, 0)]
    truth = HygenLatency((4e-3, 2e-6, 3e-8, 5e-6, 2e-5, 1e-14, 1e-9), EVERYTHING)
    found = fit_hygen([Sample(step, truth.predict(step)) for step in steps], EVERYTHING)
    assert mean_error(found, [Sample(step, truth.predict(step)) for step in steps]) < 1e-4
    assert machine.mape_hygen > 2 * machine.mape
    beside = steps[0].copy()
    beside.add_chunk(100, 50)
    assert found.marginal(steps[0], 100, 50) == pytest.approx(found.predict(beside) - found.predict(steps[0]))


def test_prefix_order_pays_where_lines_share_prefixes() -> None:
    config = replace(parts.CONFIG, base=TINY, window=10.0, lines=600)
    rows, shared = parts.prefix_lines(config, 0)
    assert len(rows) == len(shared) == 600 and len({group for group, _ in shared}) > 50
    assert all(tokens < row[1] for row, (_, tokens) in zip(rows, shared, strict=True))
    by_order = {
        r.setting["offline_policy"]: number(r, "offline_throughput") for r in parts.psm_rows(config, None, 0, 1)
    }
    assert by_order["psm"] > 1.5 * by_order["fcfs"] > 0


@pytest.mark.parametrize("workload,rate", larry.CONFIG.rates)
def test_every_seed_has_the_load_that_the_table_names(workload: str, rate: float) -> None:
    config = replace(larry.CONFIG, window=100.0)
    found = [larry.scenario(config, None, workload, rate, seed).online for seed in (0, 1, 2)]
    assert {len(rows) for rows in found} == {round(rate * (config.window + config.warm_up))}
    assert len(set(found)) == 3
    for rows in found:
        assert rows[0][0] >= 0.0 and 0.9 < rows[-1][0] / (config.window + config.warm_up) <= 1.0
