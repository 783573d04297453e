"""Several engines on one virtual clock: what the router sees, and the experiments on it in small."""

from dataclasses import replace

import pytest
from integrity import check_core

from benchmarks.experiments import kunserve, sal
from benchmarks.experiments.machine import MachineSpec, build_machine
from benchmarks.experiments.table import Result
from benchmarks.simulated_fleet.fleet import FleetDriver, OneByOne, Server
from benchmarks.simulated_fleet.merged import MergedDriver
from benchmarks.simulated_fleet.overload import LayerTransfer, Means, OverloadedFleet, by_tokens, exchanges
from benchmarks.simulated_fleet.pipeline import CHUNK_SECONDS, Bubbles, Link, PipelineRunner
from benchmarks.simulated_fleet.routers import ROUTERS, Chance
from engine.api import RequestClass
from engine.core import EngineCore
from engine.fleet.routing import Loads, RoutedPrompt
from engine.limits import SchedulerConfig
from engine.scheduling.output import Chunk, SchedulerOutput
from engine.scheduling.report import report_stats
from engine.virtual import Arrival, PredictedRunner, VirtualRun
from loadgen.simulation.run import request_of
from predictor.model import LatencyModel

STEP = LatencyModel(intercept=0.01, knots=(0,), hinges=(1e-4,), token_limit=64)
CONFIG = SchedulerConfig(
    num_units=400, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False
)


def server(number: int, config: SchedulerConfig = CONFIG) -> Server:
    return Server(number, EngineCore(config), OneByOne(PredictedRunner(STEP)))


def arrivals(*rows: tuple[float, int, int]) -> list[Arrival]:
    return [Arrival(row[0], request_of(f"n{i}", row, RequestClass.ONLINE, 512)) for i, row in enumerate(rows)]


def test_engines_run_side_by_side_on_one_clock() -> None:
    rows = [(0.0, 64, 1)] * 4
    alone = FleetDriver([server(0)], ROUTERS["round-robin"], arrivals(*rows)).run()
    beside = FleetDriver([server(i) for i in range(4)], ROUTERS["round-robin"], arrivals(*rows)).run()
    step = 0.01 + 64e-4
    assert [r.token_times for r in alone.online] == [pytest.approx([step * n]) for n in (1, 2, 3, 4)]
    assert [r.token_times for r in beside.online] == [pytest.approx([step])] * 4
    assert beside.steps == 4


def test_between_reports_a_router_sees_what_it_routed_and_nothing_else() -> None:
    seen: list[Loads] = []

    def watch(loads: Loads, _prompt: RoutedPrompt, _chance: Chance) -> int:
        seen.append(dict(loads))
        return 0

    driver = FleetDriver([server(0), server(1)], watch, arrivals((0.0, 60, 40), (0.05, 30, 40), (0.12, 8, 1)))
    run = driver.run()
    first, second, third = ([load[0] for load in seen][i] for i in range(3))
    assert (first.queued_tokens, first.queued_requests, first.running) == (0, 0, 0)
    assert (second.queued_tokens, second.queued_units, second.queued_requests) == (60, 8, 1)
    assert second.available_units == 400, "no prompt is assumed to be done"
    assert (third.queued_tokens, third.queued_requests, third.running) == (0, 0, 2), "a report came at 0.1 s"
    assert third.available_units < 400 and third.num_units == 400
    assert all(record.ended is not None for record in run.online)
    assert driver.num_open == 0


def test_a_fleet_run_is_the_same_each_time() -> None:
    config = replace(sal.CONFIG, window=3.0, warm_up=0.0)
    task = sal.Task(config, sal.Fleet("2", ("a100-40gb",) * 2), ((0.0, 900, 9), (0.1, 3000, 5)) * 3, "larry", "p2c", 1)
    assert sal.run_task(task) == sal.run_task(task)


def test_with_one_queue_for_all_no_prompt_waits_behind_another_while_an_engine_is_idle() -> None:
    """Two engines, a long prompt on one of them; four of one step each: bound on arrival, by turns, two of them wait
    behind the long one; merged, all of them run on the other. Nothing runs twice or is lost."""
    rows = [(0.0, 500, 1), *((0.001 * n, 64, 1) for n in range(1, 5))]
    bound = FleetDriver([server(0), server(1)], ROUTERS["round-robin"], arrivals(*rows)).run()
    merged = MergedDriver([server(0), server(1)], arrivals(*rows))
    ran = merged.run()
    step = 0.01 + 64e-4
    assert [record.ttft for record in ran.online[1:]] == [
        pytest.approx(0.001 + step * n - 0.001 * n) for n in range(1, 5)
    ]
    assert max(r.ttft or 0.0 for r in bound.online[1:]) > 8 * step
    assert [len(record.token_times) for record in ran.online] == [1] * 5 and merged.num_open == 0
    assert set(merged.placed) == set()
    for one in merged.servers.values():
        check_core(one.core)
        assert not one.core.has_requests


def test_sal_gives_a_slower_engine_less() -> None:
    config = replace(sal.CONFIG, warm_up=0.0)
    rows = tuple((i * 0.02, 1500, 4) for i in range(60))
    fleet = sal.Fleet("1+1", ("a100-40gb", "a40"))
    found = {name: sal.run_task(sal.Task(config, fleet, rows, "larry", name, 0)) for name in ("sal", "round-robin")}
    assert found["sal"]["ttft_p99"] < 0.8 * found["round-robin"]["ttft_p99"]


def test_the_experiment_in_small_and_its_table() -> None:
    fleets = (sal.Fleet("2", ("a100-40gb",) * 2, ("larry",), ("code",)), sal.Fleet("1", ("a100-40gb",), ("goodput",)))
    config = replace(sal.CONFIG, fleets=fleets, window=4.0, warm_up=1.0, routers=("sal", "round-robin"))
    results = sal.run_seed(config, None, 0, 1, lambda _text: None)
    assert len(results) == 2 * (1 + 2) and {r.policy for r in results} == {"sal", "round-robin"}
    header, rows = sal.summary(results)
    assert len(rows) == len(results) and all(len(row) == len(header) for row in rows)
    assert set(sal.figures(results)) == {"sal-larry-p99", "sal-goodput-p99"}


def test_the_loads_have_a_row_each_and_the_merged_queue_is_no_rival() -> None:
    fleets = (sal.Fleet("2", ("a100-40gb",) * 2, ("larry",), ("code",)),)
    config = replace(
        sal.LOADS_SHORT, fleets=fleets, window=4.0, warm_up=1.0, routers=("sal", "round-robin", sal.MERGED)
    )
    results = sal.run_seed(config, None, 0, 1, lambda _text: None)
    header, rows = sal.summary(results)
    assert len(rows) == len(results) == 2 * 3
    named = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["rate"] for row in named] == [0.7] * 3 + [1.0] * 3
    assert all((row["p99 / rr"] is not None) == (row["router"] != "round-robin") for row in named)
    first = {r.policy: r for r in results[:3]}
    assert named[0]["p95 gain"] == pytest.approx(
        first["round-robin"].metrics["ttft_p95"] / first["sal"].metrics["ttft_p95"]
    )


def result(router: str, seed: int, ttft: float) -> Result:
    setting = {"workload": "code", "rate": 1.5, "fleet": "4", "online_policy": "larry"}
    return Result("sal", router, setting, seed, dict.fromkeys(sal.COLUMNS, ttft))


def test_gains_are_of_each_seed_against_its_best_rival() -> None:
    results = [result("sal", 0, 1.0), result("p2c", 0, 2.0), result("round-robin", 0, 4.0)]
    results += [result("sal", 1, 1.0), result("p2c", 1, 6.0), result("round-robin", 1, 4.0)]
    assert sal.gain(results, "ttft_p99") == pytest.approx((2.0 + 4.0) / 2)
    assert sal.ratio(results, "ttft_p99", "round-robin") == pytest.approx(0.25)
    assert sal.gain(results[1:2], "ttft_p99") is None


MEMORY_BOUND = MachineSpec("qwen2.5-14b", "a100-80gb", max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096)
BURST = tuple((0.05 * i, 900, 60) for i in range(24)) + tuple((30.0 + i, 200, 20) for i in range(12))


def overloaded(means: Means) -> tuple[OverloadedFleet, VirtualRun]:
    """Two engines with room for ten of the burst's requests each."""
    machine = build_machine(MEMORY_BOUND)
    machine = replace(machine, config=replace(machine.config, num_units=1200))
    fleet = OverloadedFleet(machine, 2, means, link=25e9, min_tokens=256, seed=0)
    made = [Arrival(row[0], request_of(f"n{i}", row, RequestClass.ONLINE, 4096)) for i, row in enumerate(BURST)]
    driver = FleetDriver(fleet.servers, ROUTERS["sal"], made, on_report=fleet.watch)
    fleet.bind(driver)
    return fleet, driver.run()


def test_a_drop_serves_the_burst_and_the_layers_come_back() -> None:
    fleet, ran = overloaded(Means("kunserve", drop=True))
    assert fleet.tally.drops == 1 and fleet.tally.restores == 1 and fleet.tally.too_little == 0
    assert len(fleet.parties) == 2 and all(len(party.placement) == 1 for party in fleet.parties.values())
    assert fleet.tally.moved > 0 and fleet.preemptions == 0
    for party in fleet.parties.values():
        check_core(party.server.core)
        assert report_stats(party.server.core.state).units_total == 1200 and not party.server.core.has_requests
    assert [len(record.token_times) for record in ran.online] == [row[2] for row in BURST], "no token twice, none lost"
    assert all(record.token_times == sorted(record.token_times) for record in ran.online)
    _, plain = overloaded(Means("recompute"))
    last = [max(record.ttft or 0.0 for record in one.online) for one in (ran, plain)]
    assert last[0] < last[1]


def test_other_means_serve_everything_too() -> None:
    for means in (Means("migrate", migrate=True), Means("pipeline", pipeline=2, lookahead=False)):
        fleet, ran = overloaded(means)
        assert [len(record.token_times) for record in ran.online] == [row[2] for row in BURST]
        assert fleet.tally.drops == 0 and (fleet.tally.bubbles.span > 0) == (means.pipeline == 2)
    fleet, _ = overloaded(Means("no restore", drop=True, restore=False))
    assert fleet.tally.restores == 0 and [len(party.placement) for party in fleet.parties.values()] == [2]


def test_running_requests_migrate_from_a_full_server_to_one_with_room() -> None:
    machine = build_machine(MEMORY_BOUND)
    machine = replace(machine, config=replace(machine.config, num_units=1200))
    waits = []
    for migrate in (False, True):
        fleet = OverloadedFleet(machine, 2, Means("", migrate=migrate), link=25e9, min_tokens=256, seed=0)
        made = [Arrival(row[0], request_of(f"n{i}", row, RequestClass.ONLINE, 4096)) for i, row in enumerate(BURST)]
        driver = FleetDriver(fleet.servers, lambda _loads, _prompt, _chance: 0, made, on_report=fleet.watch)
        fleet.bind(driver)
        ran = driver.run()
        assert (fleet.tally.moved > 0) == migrate
        assert [len(record.token_times) for record in ran.online] == [row[2] for row in BURST]
        waits.append(max(record.ttft or 0.0 for record in ran.online))
    assert waits[1] < waits[0]


def test_activations_go_between_the_chunks_of_a_transfer_or_behind_all_of_them() -> None:
    for coordinated in (True, False):
        link = Link(1e9, coordinated=coordinated)
        transfer = link.transfer(0.0, 1e9)
        there = link.activations(0.005, 1e6)
        if coordinated:
            assert there == pytest.approx(CHUNK_SECONDS + 1e-3, abs=1e-4)
            assert transfer.ends_at == pytest.approx(1.001, abs=1e-4), "it gives way"
        else:
            assert there == pytest.approx(1.001, abs=1e-4) and transfer.ends_at == pytest.approx(1.0, abs=1e-4)
        assert link.activations(2.0, 1e6) == pytest.approx(2.001, abs=1e-4)


def test_micro_batches_fill_a_pipeline_of_two() -> None:
    """Two equal micro-batches on two stages, step after step: after the first, no stage stands still."""
    device = build_machine(MEMORY_BOUND).device
    kept, bubbles = (range(24), range(24, 48)), Bubbles()
    runner = PipelineRunner(device, kept, [Link(25e9)] * 2, lambda pieces: by_tokens(pieces, 2), bubbles, 0)
    now = 0.0
    for step in range(12):
        output = SchedulerOutput(step, tuple(Chunk(row, 500 + step, 1, True) for row in range(64)))
        flight = runner.launch(output, now)
        assert now < flight.free_at < flight.ends_at and len(flight.token_times) == 64
        now = flight.free_at
    assert bubbles.share < 0.12
    whole = PipelineRunner(device, kept, [Link(25e9)] * 2, lambda pieces: [list(pieces)], Bubbles(), 0)
    alone = whole.launch(SchedulerOutput(0, (Chunk(0, 0, 512, True),)), 0.0)
    assert alone.ends_at == pytest.approx(device.step_seconds(512, 1, 1, 512, 512 * 513 // 2), rel=0.1)


def test_a_violated_slo_is_either_latency_against_the_best_rival() -> None:
    rivals = [[(1.0, 0.1), (2.0, 0.2), (9.0, 0.3)], [(4.0, 0.1), (5.0, 0.1), (6.0, 0.1)]]
    ours = [(10.0, 0.5), (10.1, 0.1), (1.0, 0.51), (21.0, 0.1)]
    assert kunserve.violations([ours], rivals) == [{"violations_5": 0.75, "violations_10": 0.25}]


def test_only_layers_that_change_hands_move() -> None:
    alone = [(0, range(48))]
    pair = [(0, range(24)), (1, range(24, 48))]
    four = [(0, range(12)), (1, range(12, 24)), (2, range(24, 36)), (3, range(36, 48))]
    assert exchanges(alone, pair) == [LayerTransfer(0, 1, 24)]
    assert exchanges([(1, range(48))], pair) == [LayerTransfer(1, 0, 24)]
    assert exchanges(pair, four) == [LayerTransfer(0, 1, 12), LayerTransfer(1, 2, 12), LayerTransfer(1, 3, 12)]
    assert exchanges(pair, alone) == [LayerTransfer(1, 0, 24)]
    assert exchanges(four, four) == []
