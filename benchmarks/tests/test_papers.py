"""Formulas of the papers by hand: HybridServe's split, KunServe's drop, SAL's baselines, HyGen's searches."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from benchmarks.experiments.apt import effective_rate
from benchmarks.experiments.apt_point import Load, attained
from benchmarks.experiments.kunserve import violations
from benchmarks.experiments.machine import true_seconds
from benchmarks.experiments.mini_batches import HostBlocks, even_mini_batches, imbalance, mini_batches
from benchmarks.experiments.offload import algorithm_1, split_context
from benchmarks.experiments.pipelines import Stage, run_layers
from benchmarks.experiments.replay import ONLINE_ONLY, Setting
from benchmarks.experiments.surface import Family, Surface, Target
from benchmarks.experiments.table import Result, average, gains, ratios
from benchmarks.simulated_fleet.fleet import ROUTERS, Chance
from benchmarks.simulated_fleet.overload import LayerTransfer, exchanges
from benchmarks.simulated_fleet.pipeline import CHUNK_SECONDS, Link
from benchmarks.simulated_fleet.plans import pipeline_units, plan_drop, split_layers
from engine.api import EngineRequest, SamplingParams
from engine.cache.placement import HostSplit, OffloadCosts, ideal_act, next_is_act, split_host
from engine.client import LoadReport
from engine.fleet.overload import Group
from engine.fleet.routing import RoutedPrompt
from engine.scheduling.output import Chunk, SchedulerOutput
from engine.virtual import Arrival, VirtualRecord, VirtualRun
from loadgen.simulation.gpu import SimulatedDevice, SimulatedRunner
from loadgen.simulation.run import Metrics
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures

# --- HybridServe


def test_the_split_of_the_host_by_hand() -> None:
    # P = 10 + 0.5 · 40 = 30; device: 2 + 0.1 · (40 + 4) + 0.4 · 4 = 8; slope: 0.4 + 0.1 · 0.5 = 0.45.
    costs = OffloadCosts(10.0, 0.5, 0.4, 2.0, 0.1, 0.5)
    assert ideal_act(costs, 40, 4) == pytest.approx(22 / 0.45)
    assert split_host(costs, 40, 4) == HostSplit(15, 49)
    slow_link, slow_device = OffloadCosts(100.0, 1.0, 0.1, 0.0, 0.01, 0.5), OffloadCosts(1.0, 0.1, 1.0, 5.0, 0.1, 0.5)
    assert split_host(slow_link, 10, 0) == HostSplit(0, 20) and split_host(slow_device, 10, 3) == HostSplit(10, 0)
    assert next_is_act(2, 5, HostSplit(kv=1, act=3)) and not next_is_act(1, 5, HostSplit(kv=1, act=3))


def test_the_closed_form_has_the_best_throughput() -> None:
    generator = random.Random(4)
    for _ in range(50):
        load_weights, load_kv, regenerate = (generator.uniform(*span) for span in ((0, 40), (0.05, 1), (0.05, 1)))
        costs = OffloadCosts(load_weights, load_kv, regenerate, generator.uniform(0, 2), generator.uniform(0, 0.2), 0.5)
        room = generator.randrange(60, 400)

        def throughput(act: float, costs: OffloadCosts = costs, room: int = room) -> float:
            kv = room - costs.ratio * act
            return (kv + act) / max(costs.link_seconds(kv, act), costs.device_seconds(kv, act, 0))

        best = max(throughput(room / costs.ratio * i / 2000) for i in range(2001))
        assert throughput(ideal_act(costs, room, 0)) >= best * (1 - 1e-9)


def test_algorithm_1_and_the_split_of_a_context_by_hand() -> None:
    costs = OffloadCosts(0.01, 2e-5, 3e-5, 1e-3, 3e-7, 0.5)
    # Budget 0.01 s: 333.3 ACT blocks; 833.3 KV blocks of room are left for a = 833.3 / (0.5 + 1.5) = 416.7 more.
    assert algorithm_1(costs, 1000, 0) == HostSplit(625, 750)
    # 1,000 ACT blocks on the device take 0.02 s more than the weights: 1,000 KV blocks, and nothing is left.
    assert algorithm_1(costs, 1000, 1000) == HostSplit(1000, 0)
    split = split_context(costs, 5000, 0)
    assert abs(split.kv + split.act - 5000) <= 2
    assert costs.link_seconds(*split) == pytest.approx(costs.device_seconds(*split, 0), abs=2e-4)


def test_pipelines_by_hand() -> None:
    # The link is slower: loads end at 2, 4, 6 and the last compute a second later.
    assert run_layers([Stage(2.0, 1.0)] * 3, 1, 0.0).seconds == 7.0
    # The device is slower: computes end at 4, 7, 10; the third load had to wait for the first buffer until 4.
    assert run_layers([Stage(1.0, 3.0)] * 3, 1, 0.0).seconds == 10.0
    # A long load waits for its buffer: computes 1-11, 11-12; the third load goes from 11 to 16.
    assert run_layers([Stage(1.0, 10.0), Stage(0.0, 1.0), Stage(5.0, 1.0)], 1, 0.0).seconds == 17.0
    # Two layers; the second's weights are there at 5, the next step's first at 10.
    assert run_layers([Stage(0.0, 1.0)], 2, 5.0) == (10.0, 10.0, 2.0)


def test_mini_batches_by_hand() -> None:
    costs = OffloadCosts(1.0, 0.5, 0.25, 0.0, 0.0, 0.5)
    assert imbalance(costs, 2, 4) == 1.0 and imbalance(costs, 1, 4) == 2.0 and imbalance(costs, 0, 4) == math.inf
    kv, more_kv, act = HostBlocks(10, 0), HostBlocks(8, 0), HostBlocks(0, 12)
    assert mini_batches([kv, more_kv, act], costs, max_kv=40, max_act=40) == [(0, 2), (1,)], "an empty side comes first"
    balanced, tipped, other = HostBlocks(8, 16), HostBlocks(6, 0), HostBlocks(2, 4)
    assert mini_batches([balanced, tipped, other], costs, max_kv=99, max_act=99) == [(0, 2), (1,)]
    alike = [HostBlocks(8, 4)] * 10
    assert [len(batch) for batch in mini_batches(alike, costs, max_kv=64, max_act=64)] == [8, 2]
    assert [len(batch) for batch in even_mini_batches(alike, costs, max_kv=64, max_act=64)] == [6, 4]
    with pytest.raises(ValueError, match="does not fit a buffer"):
        mini_batches([HostBlocks(1, 9)], costs, max_kv=8, max_act=8)


# --- KunServe


def full(engines: int, first: int, queued: int) -> Group:
    return Group(tuple(range(first, first + engines)), 100 * engines, 97 * engines, queued)


def test_the_two_smallest_groups_merge_until_it_is_enough() -> None:
    groups = [full(1, 0, 53), full(1, 1, 3), full(2, 2, 46), full(1, 4, 13)]
    # Missing: 50 + 0 + 46 - 6 + 10 = 100. Of the small groups those with most missing merge, then the two smallest.
    assert plan_drop(groups, copy_units=60) == ([(1, 0, 3)], True)
    assert plan_drop([full(1, 0, 500)], copy_units=60) == ([], False)
    assert plan_drop([Group((0,), 100, 90, 50), Group((1,), 100, 99, 1)], 60)[0] == [], "there is still room"


def test_layers_are_split_by_speed_and_a_copy_becomes_cache() -> None:
    assert split_layers(48, (1.0, 1.0)) == (range(24), range(24, 48))
    assert split_layers(48, (1.0, 1.0), last_extra=2.0) == (range(25), range(25, 48)), "the head has a cost"
    assert split_layers(48, (2.0, 1.0)) == (range(32), range(32, 48))
    # Half of 48 layers of 10 bytes is free on either side: (100 + 240) / (24 · 0.5) units.
    assert pipeline_units((range(24), range(24, 48)), (100.0, 100.0), 10.0, 0.5) == 28


def test_only_layers_that_change_hands_move() -> None:
    alone, pair = [(0, range(48))], [(0, range(24)), (1, range(24, 48))]
    assert exchanges(alone, pair) == [LayerTransfer(0, 1, 24)] and exchanges(pair, alone) == [LayerTransfer(1, 0, 24)]
    assert exchanges(pair, pair) == []


def test_activations_go_between_the_chunks_of_a_transfer_or_behind_it() -> None:
    for coordinated, there, end in ((True, CHUNK_SECONDS + 1e-3, 1.001), (False, 1.001, 1.0)):
        link = Link(1e9, coordinated=coordinated)
        transfer = link.transfer(0.0, 1e9)
        assert link.activations(0.005, 1e6) == pytest.approx(there, abs=1e-4)
        assert transfer.ends_at == pytest.approx(end, abs=1e-4)


def test_a_violated_slo_is_either_latency_against_the_best_rival() -> None:
    rivals = [[(1.0, 0.1), (2.0, 0.2), (9.0, 0.3)], [(4.0, 0.1), (5.0, 0.1), (6.0, 0.1)]]
    ours = [(10.0, 0.5), (10.1, 0.1), (1.0, 0.51), (21.0, 0.1)]
    assert violations([ours], rivals) == [{"violations_5": 0.75, "violations_10": 0.25}]


# --- SAL and LARRY


def test_baseline_routers() -> None:
    loads = {0: LoadReport(running=5), 1: LoadReport(queued_requests=2, running=2), 2: LoadReport(queued_requests=9)}
    chance = Chance(random.Random(3))
    assert [ROUTERS["round-robin"](loads, RoutedPrompt(1), chance) for _ in range(4)] == [0, 1, 2, 0]
    counts = Counter(ROUTERS["p2c"](loads, RoutedPrompt(1), chance) for _ in range(3000))
    assert counts[2] == 0 and 1800 < counts[1] < 2200, "two of the three pairs hold engine 1"


def test_gains_and_capacity_by_hand() -> None:
    def row(policy: str, rate: float, p50: float, **described: float) -> Result:
        setting = {"workload": "larry-code", "factor": rate, "rate": rate, **described}
        return Result("larry", policy, setting, 0, {"ttft_p50": p50})

    results = [row("fcfs", 1.0, 0.5), row("fcfs", 2.0, 2.0), row("trail+", 2.0, 1.5)]
    results += [row("larry", rate, value, alpha=1.0) for rate, value in ((1.0, 0.25), (2.0, 0.5))]
    group = [r for r in results if r.setting["rate"] == 2.0]
    assert gains(group, [r for r in group if r.policy == "larry"], "ttft_p50") == [3.0]
    assert ratios(group, "ttft_p50", "fcfs", "larry") == [4.0] and average([]) is None


# --- Apt-Serve


def test_attainment_and_the_rate_that_has_it() -> None:
    def record(at: float, times: list[float], *, ended: bool = True) -> VirtualRecord:
        request = EngineRequest("n", (1,), SamplingParams(max_tokens=9))
        return VirtualRecord(Arrival(at, request), times, times[-1] if ended and times else None)

    good, late, uneven = record(0.0, [0.5, 0.6]), record(0.0, [2.0, 2.1]), record(0.0, [0.5, 3.0])
    found = attained(
        VirtualRun(online=[good, late, uneven, record(3.0, [], ended=False)], end=9.0), Load("w", 1, 1, ())
    )
    assert found["slo_attainment"] == 0.25 and found["ttft_p99"] == 6.0, "a request without a token waits until the end"
    curve = [(1.0, 1.0), (2.0, 0.8), (4.0, 0.4)]
    assert effective_rate(curve, 0.9) == pytest.approx(1.5) and effective_rate(curve, 0.6) == pytest.approx(3.0)


# --- HyGen


def flat(value: float) -> Setting:
    return Setting(BudgetParams("hygen", value))


def known(settings: Sequence[Setting]) -> list[Metrics]:
    """Return metrics that rise with L, those of TTFT twice as fast."""
    budgets = [setting.budget.latency_budget for setting in settings]
    return [{"offline_throughput": 1000 * L, "tbt_mean": 1 + L, "ttft_p99": 1 + 2 * L} for L in budgets]


def surface_of(*budgets: float) -> Surface:
    surface = Surface(known, Setting(ONLINE_ONLY))
    surface.replay([surface.online_only])
    surface.add("flat", flat, budgets)
    return surface


def test_one_choice_keeps_several_targets() -> None:
    surface = surface_of(0.05, 0.1, 0.2, 0.4)
    tbt, ttft = Target("tbt_mean", 0.5), Target("ttft_p99", 0.25)
    assert surface.choose(tbt, 1.0, ("flat",)) == flat(0.4)
    assert surface.choose((tbt, ttft), 1.0, ("flat",)) == flat(0.1)
    assert surface.choose((tbt, Target("ttft_p99", 0.01)), 1.0, ("flat",)) == surface.online_only


def test_a_choice_is_confirmed_in_further_windows() -> None:
    def worse(settings: Sequence[Setting]) -> list[Metrics]:
        return [each | {"ttft_p99": 1 + 3 * (each["ttft_p99"] - 1)} for each in known(settings)]

    surface, target = surface_of(0.05, 0.1, 0.2, 0.4), Target("ttft_p99", 0.5)
    same, other = (Surface(evaluate, surface.online_only) for evaluate in (known, worse))
    assert surface.choose(target, 0.8, ("flat",), [same]) == flat(0.2)
    assert surface.choose(target, 0.8, ("flat",), [same, other]) == flat(0.05)
    assert surface.choose(Target("ttft_p99", 0.2), 0.8, ("flat",), [other]) == surface.online_only


def test_a_search_halves_around_the_best_budget() -> None:
    surface = surface_of()
    surface.explore(Family("flat", flat, 0.001, 0.5, 4, 9, ("tbt_mean",)), [Target("tbt_mean", 0.1)], 1.0)
    assert len(surface.members["flat"]) == 9
    assert 0.08 < surface.choose(Target("tbt_mean", 0.1), 1.0, ("flat",)).budget.latency_budget <= 0.1


def test_the_oracle_knows_step_times_exactly() -> None:
    simulated = SimulatedDevice.named("llama-3-8b", "a100-40gb")
    chunks = [Chunk(row, 99 + row, 1, True) for row in range(5)] + [Chunk(9, 640, 100, True)]
    features = BatchFeatures()
    for chunk in chunks:
        features.add_chunk(chunk.start, chunk.length)
    latency = SimulatedRunner(simulated, noise=0.0).launch(SchedulerOutput(0, tuple(chunks)))().latency
    assert true_seconds(simulated, features) == pytest.approx(latency, rel=1e-9)
