"""Requests that go on in another engine with their computed past, and a cache that changes its size under them."""

from dataclasses import replace

from integrity import check_core

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.scheduling.moving import Moves
from engine.scheduling.output import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.report import report_stats

CONFIG = SchedulerConfig(num_units=40, max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)


def request(name: str, prompt: int = 10, output: int = 6, kind: RequestClass = RequestClass.ONLINE) -> EngineRequest:
    return EngineRequest(name, tuple(range(1, prompt + 1)), SamplingParams(max_tokens=output), kind)


def moves(core: EngineCore) -> Moves:
    return Moves(core.state, core.recovery)


def step(core: EngineCore, now: float = 0.0) -> SchedulerOutput:
    output = core.schedule(now)
    assert output is not None
    core.update(output, ModelRunnerOutput(output.step_id, [7] * sum(c.sample for c in output.chunks), None, 0.1), now)
    check_core(core)
    return output


def test_a_request_goes_on_in_another_engine_without_computing_anything_again() -> None:
    first, second = EngineCore(CONFIG), EngineCore(CONFIG)
    first.add_request(request("a"), 1.0)
    for _ in range(3):
        step(first, 2.0)
    moved = moves(first).detach("a")
    check_core(first)
    assert not first.has_requests and report_stats(first.state).units_owned == 0
    assert moved.num_tokens == 12 and moved.spec.resumed.times.arrival == 1.0
    assert moved.spec.resumed is not None and moved.spec.resumed.token_ids == (7, 7, 7)

    assert moves(second).attach(moved)
    check_core(second)
    assert report_stats(second.state).units_owned == 6, "its units are its own before the past has come"
    assert second.schedule(3.0) is None, "until then it stands still"
    moves(second).arrived("a")
    output = step(second, 4.0)
    assert [(c.start, c.length, c.sample) for c in output.chunks] == [(12, 1, True)]
    (new,) = output.new_requests
    assert new.token_ids == (*range(1, 11), 7, 7, 7) and len(new.entries) == 4
    assert not output.appended, "the block of this step is written with the others"
    assert not step(second, 5.0).new_requests
    found = moves(second).open_requests()
    assert [(r.request_id, r.times.arrival, r.row >= 0) for r in found] == [("a", 1.0, True)]
    step(second, 6.0)
    assert not second.has_requests, "six tokens in all"
    assert report_stats(second.state).units_owned == 0


def test_others_run_while_a_past_is_on_its_way_and_cannot_take_its_units() -> None:
    first, second = EngineCore(CONFIG), EngineCore(CONFIG)
    first.add_request(request("a", prompt=16), 0.0)
    step(first)
    moved = moves(first).detach("a")
    assert moves(second).attach(moved)
    for name in "bcd":
        second.add_request(request(name, prompt=16, output=40), 1.0)
    for _ in range(30):
        step(second, 1.0)
    assert sum(second.state.counters.preemptions.values()) > 0, "memory is short"
    assert len(moves(second).units_of("a")) == 8
    moves(second).arrived("a")
    assert any(new.request_id == "a" for new in step(second, 2.0).new_requests)


def test_without_room_or_past_a_request_waits_to_be_computed() -> None:
    first, second = EngineCore(CONFIG), EngineCore(CONFIG)
    for name in ("a", "b"):
        first.add_request(request(name, prompt=16), 0.0)
    step(first)
    waiting, running = moves(first).detach("b"), moves(first).detach("a")
    assert waiting.num_tokens == 0 and running.num_tokens == 16
    second.state.pool.shrink(34)
    assert not moves(second).attach(running) and not moves(second).attach(waiting)
    check_core(second)
    second.state.pool.grow(34)
    output = step(second)
    assert [(c.start, c.length) for c in output.chunks] == [(0, 16)]
    third = EngineCore(CONFIG)
    third.add_request(request("o", kind=RequestClass.OFFLINE), 0.0)
    assert not moves(second).attach(moves(third).detach("o")), "offline work is computed again"
    check_core(second)


def test_what_stands_still_keeps_its_units_while_the_cache_grows_and_others_come_in_order_of_arrival() -> None:
    """As the leader of a pipeline has it: its own requests stay where they lie."""
    core, other = EngineCore(CONFIG), EngineCore(CONFIG)
    core.add_request(request("a"), 1.0)
    core.add_request(request("late"), 3.0)
    other.add_request(request("b"), 2.0)
    for each in (core, core, other):
        step(each, 3.0)
    core.add_request(request("new"), 4.0)
    units = moves(core).units_of("a")
    assert moves(core).stall("a", 40) == (11, units)
    assert moves(core).stall("late", max(moves(core).units_of("late"))) is None, "it has a unit that will not be there"
    assert moves(core).stall("new", 40) is None, "it has no past"
    check_core(core)
    moves(core).resize_cache(60)
    moves(core).put_last("a")
    assert moves(core).attach(moves(other).detach("b"))
    moves(core).put_last("late")
    moves(core).put_last("new")
    check_core(core)
    assert moves(core).units_of("a") == units and set(units).isdisjoint(moves(core).units_of("b"))
    for name in "ab":
        moves(core).arrived(name)
    output = step(core, 5.0)
    assert [new.request_id for new in output.new_requests] == ["a", "b", "late", "new"], "by arrival"
    assert [(c.start, c.length) for c in output.chunks][:2] == [(11, 1), (10, 1)], "no token is computed again"
    while core.has_requests:
        step(core, 6.0)
    assert report_stats(core.state).units_owned == 0 and report_stats(core.state).units_total == 60
    check_core(core)


def test_a_request_longer_than_the_cache_starts_over_where_windows_let_it() -> None:
    core = EngineCore(replace(CONFIG, max_model_len=200, window=8))
    core.add_request(request("a", prompt=120, output=4), 0.0)
    step(core)
    moves(core).start_over("a")
    for _ in range(20):
        if core.has_requests:
            step(core)
    assert not core.has_requests and report_stats(core.state).units_owned == 0
