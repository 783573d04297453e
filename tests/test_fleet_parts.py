"""Parts of the fleet: loads, prefixes, harvests, places and sums, each by itself."""

import math
import os
import threading
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver import fake_driver, small_config
from fake_engine import colocation_stats

from engine.api import EngineRequest, RequestClass, SamplingParams, TokenCosts
from engine.client import (
    ClassStanding,
    ColocationStats,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineView,
    Figures,
    LoadReport,
    info_of_all,
    total,
)
from engine.colocation.keeper import LEARNED
from engine.errors import ConfigError
from engine.fleet.client import FleetClient
from engine.fleet.routing import (
    MAX_BLOCKS,
    Harvest,
    Member,
    PrefixMemory,
    RoutedPrompt,
    hits_of,
    online_load,
    prefix_chain,
    sal_load,
    shares,
    windows,
)
from engine.machine.facts import HOST_ENGINES, Resources, share_out
from engine.process.life import SentRequests
from engine.scheduling.report import report_load
from gateway.telemetry.engine_metrics import EngineCollector
from predictor.slo import Standing


def asked(name: str, prompt: int, offline: bool = False, **sampling: Any) -> EngineRequest:
    kind = RequestClass.OFFLINE if offline else RequestClass.ONLINE
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
    return EngineRequest(name, tuple(range(prompt)), params, request_class=kind, cache_salt=name.encode())


# Reports of an engine


def test_an_engine_reports_what_waits_what_runs_and_what_chats_could_get() -> None:
    """Blocks of four tokens, of two units each; steps of eight tokens for two requests at most."""
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "min_prefill_chunk": 8}
    driver = fake_driver(small_config(20, max_model_len=64, **limits), 405)
    for request in (asked("line", 3, offline=True, max_tokens=30), asked("long", 20), asked("later", 9)):
        driver.add(request)
    report = report_load(driver.core.state, driver.now)
    assert (report.queued_tokens, report.queued_requests, report.running) == (29, 2, 0)
    assert report.queued_units == 2 * 5 + 2 * 3
    assert (report.available_units, report.num_units) == (40, 40)
    assert (report.tokens_per_unit, report.tokens_per_step) == (2.0, 8)
    assert report.step_seconds == 0.0, "there is no latency model"
    assert report.offline_waits and report.offline_tokens == 0
    driver.step()
    report = report_load(driver.core.state, driver.now)
    computed = 29 - report.queued_tokens
    assert 0 < computed <= 8
    before = report
    driver.run()
    report = report_load(driver.core.state, driver.now)
    assert (report.queued_tokens, report.queued_units, report.queued_requests, report.running) == (0, 0, 0, 0)
    assert report.offline_tokens > 0 and not report.offline_waits and report.time >= before.time
    assert 0 < report.mean_output <= 4 and report.mean_input > 0


def test_what_lines_hold_is_there_for_chats() -> None:
    driver = fake_driver(small_config(20, max_model_len=64, max_num_seqs=4), 405)
    driver.add(asked("line", 30, offline=True, max_tokens=30))
    while not driver.stats().units_owned:
        driver.step()
    assert report_load(driver.core.state, driver.now).available_units == 40
    driver.run()


def test_load_is_what_was_said_and_what_was_given_since() -> None:
    given = SentRequests()
    assert given.report is None and not list(given.unreported)
    given.unreported.extend([asked("a", 10), asked("b", 20)])
    given.unreported.extend([asked("c", 30)])
    given.hear(LoadReport(queued_tokens=10, received=1))
    assert [request.request_id for request in given.unreported] == ["b", "c"]
    given.hear(None)
    load = online_load(given.report, given.unreported)
    assert (load.queued_tokens, load.queued_requests) == (60, 2)
    assert load.queued_units == math.ceil(20 / 8) + math.ceil(30 / 8)
    given.hear(LoadReport(queued_tokens=55, received=3))
    load = online_load(given.report, given.unreported)
    assert load.queued_tokens == 55
    assert sal_load(0, load._replace(tokens_per_step=100, step_seconds=1.0), RoutedPrompt(45)) == 1.0
    lines = online_load(LoadReport(), [asked("line", 100, offline=True)])
    assert lines.queued_tokens == 0, "chats go before lines"


# Prefixes


def test_a_prompt_is_expected_where_its_blocks_were_sent() -> None:
    memory = PrefixMemory()
    prompt = list(range(33))
    chain = prefix_chain(prompt, b"", 8)
    assert len(chain) == 4 and prefix_chain(prompt[:32], b"", 8) == chain[:3], "the last token always runs"
    assert prefix_chain(prompt, b"other tenant", 8) != chain and prefix_chain(prompt, b"", 0) == []
    assert len(prefix_chain(list(range(8 * MAX_BLOCKS + 100)), b"", 8)) == MAX_BLOCKS
    memory.add(chain[:2], 100)
    assert memory.num_hits(chain) == 2
    other = prefix_chain([*prompt[:8], *range(100, 130)], b"", 8)
    assert memory.num_hits(other) == 1


def test_where_requests_share_nothing_no_prefix_is_expected() -> None:
    for together in (True, False):
        info = EngineInfo(512, 405, frozenset(), "fake", "none", "none", 0, 64, 8, shares_prefixes=together)
        member = Member(0, SimpleNamespace(info=info))  # type: ignore[arg-type]
        chain = prefix_chain(list(range(33)), b"", member.block_size)
        member.give([], chain)
        assert hits_of([member], chain) == {0: 32 if together else 0}


def test_what_the_cache_has_no_room_for_is_forgotten_from_the_end_of_the_oldest_prompt() -> None:
    memory = PrefixMemory()
    old, new = prefix_chain(list(range(33)), b"old", 8), prefix_chain(list(range(25)), b"new", 8)
    memory.add(old, 5)
    memory.add(new, 5)
    assert memory.num_hits(new) == 3 and memory.num_hits(old) == 2
    memory.add(old, 5)
    assert memory.num_hits(old) == 4 and memory.num_hits(new) == 1


# Lines


def test_a_harvest_is_measured_while_lines_wait() -> None:
    harvest = Harvest()
    for second, tokens, waits in ((0, 0, True), (0.5, 80, True), (1, 100, True), (2, 300, True), (3, 300, False)):
        harvest.hear(LoadReport(offline_tokens=tokens, time=10.0 + second, offline_waits=waits))
    assert harvest.rate == pytest.approx(100 + 0.3 * 100), "the last second does not count: no line waited at its end"
    harvest.hear(LoadReport(offline_tokens=5, time=14.0, offline_waits=True))
    harvest.hear(LoadReport(offline_tokens=135, time=15.0, offline_waits=True))
    assert harvest.rate == pytest.approx(130.0), "a new process counts from zero"
    harvest.hear(None)


def test_lines_are_shared_out_by_harvest() -> None:
    assert shares({0: 0.0, 1: 0.0}) == {0: 0.5, 1: 0.5}
    assert shares({0: 300.0, 2: 100.0}) == {0: 0.75, 2: 0.25}
    assert shares({0: 300.0, 1: 0.0, 2: 100.0}) == {0: 0.5, 1: pytest.approx(1 / 3), 2: pytest.approx(1 / 6)}
    starved = shares({0: 1000.0, 1: 0.001})
    assert starved[1] == pytest.approx(0.125 / 1.125, rel=1e-3), "a quarter of the mean, so that it can show more"
    assert windows({0: 0.75, 1: 0.25}, 40) == {0: 30, 1: 10} and windows({0: 1.0, 1: 0.0}, 4)[1] == 1


# Figures


def stats_of(**changes: Any) -> EngineStats:
    return replace(EngineStats(), **changes)


def view(number: int, stats: EngineStats) -> EngineView:
    return EngineView(number, EngineState.READY, None, 0, 0, 0.0, stats)


def colocation_of(**changes: Any) -> ColocationStats:
    """Every number is zero."""
    zeros = {f.name: 0 for f in fields(ColocationStats) if f.type in ("int", "float", int, float)}
    empty = {"objectives": (), "held": "", "breaker": "closed", "breaker_cause": None, "budget_origin": ""}
    return colocation_stats(**zeros | empty | changes)


def test_every_figure_of_all_engines() -> None:
    online, offline = RequestClass.ONLINE, RequestClass.OFFLINE
    one = stats_of(running={online: 1, offline: 2}, steps=5, units_total=10, restarts={"killed": 1}, step_seconds=0.5)
    two = stats_of(running={online: 3}, steps=7, units_total=20, restarts={"killed": 1, "hung": 2}, step_seconds=0.25)
    both = total([view(0, one), view(1, two)])
    assert both.running == {online: 4, offline: 2} and both.steps == 12 and both.units_total == 30
    assert both.restarts == {"killed": 2, "hung": 2} and both.step_seconds == 0.75
    assert [each.engine for each in both.engines] == [0, 1] and both.colocation is None and both.token_costs is None
    priced = [stats_of(token_costs=TokenCosts(0.3, 2.0)), stats_of(token_costs=TokenCosts(0.6, 2.0)), EngineStats()]
    assert total([view(i, s) for i, s in enumerate(priced)]).token_costs == pytest.approx((0.2, 1.0))


def test_every_counter_of_the_metrics_continues_in_the_next_process() -> None:
    def all_set(count: int) -> EngineStats:
        """Return statistics in which every number is `count`."""
        names = ("late", "swap_out", "swap_in", "restore")
        numbers = {f.name: count for f in fields(EngineStats) if f.type in ("int", "float", int, float)}
        counts: dict[str, Any] = {name: dict.fromkeys(names, count) for name in ("cache_units", "preemptions")}
        counts["plans"] = dict.fromkeys(("made", "continued", "late"), count)
        counts["knapsack"] = dict.fromkeys(("kv", "compact", "passed_over"), count)
        counts["lanes_started"] = dict.fromkeys(("flex", "at_risk", "batch"), count)
        both = {f.name: count for f in fields(ColocationStats) if f.type in ("int", "float", int, float)}
        both["learned"] = dict.fromkeys(LEARNED, count)
        both |= {name: {"default": count} for name in ("class_good", "class_bad", "class_refused")}
        numbers["prefix_hit_tokens"] = 2 * count  # the host tier holds half
        return stats_of(**numbers, **counts, colocation=colocation_of(**both))

    def counters() -> dict[tuple[str, str], float]:
        families = [each for each in EngineCollector(lambda: figures.total(0)).collect() if each.type == "counter"]
        return {(s.name, str(s.labels)): s.value for family in families for s in family.samples}

    figures = Figures()
    figures.last = all_set(5)
    before = counters()
    of_supervisor = ("tidemill_engine_restarts_total", "tidemill_resumed_requests_total")
    counted = {key for key, value in before.items() if value}
    assert {name for name, _ in counted} == {name for name, _ in before} - set(of_supervisor)
    figures.process_ended()
    assert counters() == before
    figures.process_ended()
    figures.last = replace(all_set(0), running={RequestClass.ONLINE: 1})
    assert counters() == before and figures.total(0).running
    figures.last = all_set(3)
    assert counters() == {key: value * 8 / 5 for key, value in before.items()}
    gauges = figures.total(0).colocation
    assert gauges is not None and (gauges.latency_budget, gauges.good_requests) == (3, 8)


def test_the_slo_is_kept_as_the_worst_engine_keeps_it() -> None:
    near, far = Standing("ttft_p99=1s", 0.5, 1.0, 1.0), Standing("ttft_p99=1s", 2.0, 1.0, 0.9)
    unknown = Standing("ttft_p99=1s", math.nan, 1.0, math.nan)
    engines = [
        colocation_of(objectives=(near,), attainment=1.0, good_requests=90, latency_budget=0.1, overrun=0.1),
        colocation_of(objectives=(far,), attainment=0.8, good_requests=8, bad_requests=2, breaker="open", held="why"),
        colocation_of(objectives=(unknown,), attainment=math.nan, latency_budget=0.2, breaker="half_open"),
    ]
    engines[1] = replace(engines[1], breaker_cause="ttft", latency_budget=math.nan)
    engines = [
        replace(each, classes=(ClassStanding("agent", "", share),), class_bad={"agent": 3})
        for each, share in zip(engines, (1.0, 0.5, 0.5), strict=True)
    ]
    found = total([view(i, stats_of(colocation=c)) for i, c in enumerate(engines)]).colocation
    assert found is not None
    assert found.objectives == (far,) and (found.breaker, found.breaker_cause, found.held) == ("open", "ttft", "why")
    assert found.attainment == pytest.approx(0.98) and (found.good_requests, found.bad_requests) == (98, 2)
    assert found.class_bad == {"agent": 9} and found.classes[0].attainment == pytest.approx(2 / 3)
    assert found.latency_budget == pytest.approx(0.15) and found.overrun == 0.1


def test_the_facts_of_all_engines() -> None:
    info = EngineInfo(512, 400, frozenset({1}), "a", "b", "c", 5, cache_tokens=100, block_size=16)
    both = info_of_all([info, replace(info, max_model_len=256, cache_tokens=40)])
    assert both == replace(info, max_model_len=256, cache_tokens=140)


# Places

CPUINFO = "\n\n".join(
    f"processor: {number}\nphysical id: {number % 8 // 4}\ncore id: {number % 4}" for number in range(16)
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two sockets of four cores with two threads each, no quota, no GPU."""
    monkeypatch.setattr("engine.machine.facts._allowed", lambda: set(range(16)))
    monkeypatch.setattr("engine.machine.facts._quota", lambda: None)
    monkeypatch.setattr("engine.machine.facts._DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_cores_are_split_and_their_threads_stay_together(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_out(2, cpuinfo=CPUINFO) == [
        Resources((0, 1, 2, 3, 8, 9, 10, 11), engines=2),
        Resources((4, 5, 6, 7, 12, 13, 14, 15), engines=2),
    ]
    thirds = [place.processors for place in share_out(3, cpuinfo=CPUINFO)]
    assert [len(part) for part in thirds] == [6, 6, 4] and sorted(sum(thirds, ())) == list(range(16))
    assert share_out(9, cpuinfo=CPUINFO) == [Resources(engines=9)] * 9, "more engines than cores"
    monkeypatch.setattr("engine.machine.facts._allowed", lambda: {1, 9, 2})
    assert share_out(2, cpuinfo=CPUINFO) == [Resources((1, 9), engines=2), Resources((2,), engines=2)]
    assert share_out(2, cpuinfo="") == [Resources((1, 2), engines=2), Resources((9,), engines=2)], (
        "nothing is known of the cores"
    )
    monkeypatch.setattr("engine.machine.facts._quota", lambda: 1)
    assert share_out(2, cpuinfo=CPUINFO) == [Resources(engines=2)] * 2, "a quota is not of certain cores"


def test_each_engine_gets_a_device(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (machine / name).touch()
    assert share_out(2, cpuinfo=CPUINFO) == [Resources(device=name, engines=2) for name in "01"]
    assert share_out(2, "cpu", CPUINFO)[0].processors
    with pytest.raises(ConfigError, match="--engines 3 needs as many CUDA devices; 2 can be seen"):
        share_out(3, cpuinfo=CPUINFO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5f,-1")
    assert share_out(2, "cuda", CPUINFO) == [Resources(device=name, engines=2) for name in ("3", "GPU-5f")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="0 can be seen"):
        share_out(2, "cuda", CPUINFO)
    assert share_out(2, "auto", CPUINFO)[0].processors


def test_a_process_moves_into_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: moved.append((pid, processors)), raising=False)
    environment: dict[str, str] = {}
    Resources().move_in(environment)
    assert not moved and environment == {HOST_ENGINES: "1"}
    Resources((1, 2), "7", engines=3).move_in(environment)
    assert moved == [(0, (1, 2))] and environment == {"CUDA_VISIBLE_DEVICES": "7", HOST_ENGINES: "3"}


def test_a_start_that_ends_waits_for_no_process_that_still_loads() -> None:
    """One fails to load; another would need an hour more, but for its end."""
    hour, ended = threading.Event(), []

    class Loading:
        def __init__(self, number: int) -> None:
            self.number = number

        def load(self, _planned: Any) -> None:
            if self.number == 2:
                raise ConfigError("too small")
            if self.number == 1:
                assert hour.wait(60)

        def discard(self) -> None:
            ended.append(self.number)
            hour.set()

    made: Any = lambda number, _changed: Loading(number)  # noqa: E731
    fleet = FleetClient(made, 3)
    with pytest.raises(ConfigError, match="too small"):
        fleet.load(lambda _planned: None)
    assert set(ended) == {0, 1, 2}
