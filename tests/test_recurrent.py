"""Models with recurrent layers beside attention: what transformers itself generates, whatever becomes of a request."""

import functools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
from driver import Driver, make_request, small_config
from support.tables import mostly_slow
from tiny_transformers import Case

from engine.api import FinishReason, RequestClass
from engine.build import build_runner, host_bytes, plan_launch, scheduler_config
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution import masks, pool
from engine.execution.cpu.transformers_device import TransformersDevice
from engine.execution.masks import FOREVER
from engine.execution.pool import StateTable
from engine.execution.rows import Layout
from engine.execution.runner import Runner
from engine.execution.self_test import test_modules
from engine.forms import Grammar
from engine.limits import SchedulerConfig
from engine.models.transformers_calls import RecurrentState
from engine.models.transformers_model import TransformersModel
from engine.models.transformers_shape import load_shape

test_modules.__test__ = False  # type: ignore[attr-defined]

BLOCK, OUTPUT = 4, 12
LENGTHS = (1, 33, 8, 40, 17, 47)
EXACT = ("lfm2", "qwen3_next", "granitemoehybrid", "jamba")
"""Short convolutions, gated delta nets, Mamba 2, and Mamba 1, which takes a chunk that goes on token by token."""
GOES_ON = EXACT[:3]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name), LENGTHS, OUTPUT, shared=0))


def make_driver(
    model: TransformersModel, depth: int = 0, num_blocks: int = 25, rows: int = 8, slots: int = 0, host: int = 0
) -> Driver:
    """`slots` of snapshots, and as many blocks as slots on the host."""
    config = small_config(
        num_blocks, max_model_len=96, max_num_seqs=rows, unit_bytes=0, pipeline_depth=depth, state_slots=slots,
        enable_prefix_caching=slots > 0, snapshot_tokens=2 * BLOCK, host_units=2 * host, host_state_slots=host,
    )  # fmt: skip
    device = TransformersDevice(
        model, config.limits, host_units=config.host_units, state_slots=slots, host_state_slots=host
    )
    assert (device.state_slots, device.host_state_slots) == (slots, host)
    return Driver(Runner(device), config)


def resumed(driver: Driver) -> int:
    """How many times a request started from a snapshot."""
    return sum(new.state >= 0 for step in driver.steps for new in step.new_requests)


RUNS = [*((name, 0, 0) for name in EXACT), *((name, 0, 12) for name in GOES_ON), ("lfm2", 1, 0), ("lfm2", 1, 12)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "depth", "slots"), RUNS)
def test_tokens_equal_generate(case_of: Any, name: str, depth: int, slots: int) -> None:
    """Chunks beside decodes, more requests than rows, and preemptions: the pool is too small for all."""
    case = case_of(name)
    driver = make_driver(case.model, depth, num_blocks=18, rows=4, slots=slots)
    for index, prompt in enumerate(case.prompts):
        request_class = RequestClass.ONLINE if index % 2 else RequestClass.OFFLINE
        driver.add(make_request(str(index), prompt, OUTPUT, request_class=request_class))
        driver.step()
    driver.run()
    assert sum(driver.stats().preemptions.values()) > 0
    assert any({1} < {chunk.length for chunk in step.chunks} for step in driver.steps)
    assert bool(resumed(driver)) == bool(slots)  # preempted requests
    assert [driver.outputs[str(index)] for index in range(len(case.prompts))] == case.answers


SLOTS = [*((name, 0, 40, 0) for name in GOES_ON), ("qwen3_next", 1, 5, 0), *((name, 1, 5, 60) for name in GOES_ON)]


@pytest.mark.parametrize(("name", "depth", "slots", "host"), mostly_slow(SLOTS, [SLOTS[0], SLOTS[3], SLOTS[6]]))
def test_what_goes_on_from_a_snapshot_equals_generate(
    case_of: Any, name: str, depth: int, slots: int, host: int
) -> None:
    """Next turns, prompts with one beginning side by side, one aborted amidst them; few enough slots that some are
    lost, or go to the host."""
    case = case_of(name)
    num_blocks, turns = 30 if host else 70, {}
    driver = make_driver(case.model, depth, num_blocks, rows=4, slots=slots, host=host)
    first, beginning = case.prompts[1], case.prompts[3][:29]
    driver.add(make_request("turn 1", first, OUTPUT), make_request("gone", [*beginning, 5], OUTPUT))
    for _ in range(4):
        driver.step()
    driver.abort("gone", FinishReason.ABORT)
    driver.run()
    if host:  # others take the slots
        driver.add(*[make_request(f"other {i}", case.prompts[i], OUTPUT) for i in (0, 2, 4)])
        driver.run()
    turns["turn 2"] = [*first, *driver.outputs["turn 1"], 40, 41, 42]
    turns |= {f"shares {i}": [*beginning, *case.prompts[5][i : i + 9]] for i in range(4)}
    for index, (name, prompt) in enumerate(turns.items()):
        driver.add(make_request(name, prompt, OUTPUT, request_class=list(RequestClass)[index % 2]))
        driver.step()
    driver.run()
    assert driver.outputs["turn 1"] == case.answers[1]
    for name, prompt in turns.items():
        assert driver.outputs[name] == case.generated(prompt), name
    assert resumed(driver) >= (1 if slots == 5 else 3)
    assert (slots <= max(new.state for step in driver.steps for new in step.new_requests)) == (host > 0)
    assert host or slots == 5 or driver.finals["turn 2"].num_cached_tokens == (len(first) + OUTPUT - 1) // BLOCK * BLOCK


def test_layers_that_cannot_go_on_have_no_snapshots(case_of: Any) -> None:
    limits = SchedulerConfig(num_units=8, max_model_len=16, block_size=BLOCK).limits
    assert TransformersDevice(case_of("jamba").model, limits, state_slots=9).state_slots == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_failed_half_way_is_not_counted_twice(case_of: Any, depth: int, monkeypatch: Any) -> None:
    """The first layers have moved their states on when a later one fails; with a step ahead, that one has, too."""
    case = case_of("lfm2")
    driver = make_driver(case.model, depth, num_blocks=40)
    last = case.model.module.model.layers[3].feed_forward
    calls = iter(range(1, 10_000))
    whole = last.forward

    def failing(x: torch.Tensor) -> Any:
        if next(calls) in (4, 9, 13):
            raise RuntimeError("the device failed")
        return whole(x)

    monkeypatch.setattr(last, "forward", failing)
    driver.add(*[make_request(str(i), case.prompts[i], OUTPUT) for i in range(1, 5)])
    driver.run()
    assert driver.stats().failed_steps >= 3
    assert [driver.outputs[str(index)] for index in range(1, 5)] == case.answers[1:5]


class SlowMatcher:
    """Allows everything, when it is waited for and not before."""

    failed = None

    def __init__(self, waited: threading.Event) -> None:
        self._waited = waited

    def advance(self, _said: list[int]) -> None: ...

    def forced(self) -> list[int]:
        return []

    def write_mask(self, bits: Any) -> None:
        assert self._waited.wait(60.0)
        self._waited.clear()
        bits[:] = -1


class SlowGrammar:
    mask_words = -(-97 // 32)

    def __init__(self) -> None:
        self.waited = threading.Event()

    def find(self, _grammar: Grammar) -> "SlowGrammar":
        return self

    compile = find

    def matcher(self) -> SlowMatcher:
        return SlowMatcher(self.waited)


def test_no_token_is_run_twice_for_a_grammar_that_is_slow(case_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state would have it twice."""
    case, grammar, wait = case_of("lfm2"), SlowGrammar(), masks.wait

    def waits(work: Any, timeout: float, **options: Any) -> Any:
        late = None if timeout >= FOREVER else wait(work, timeout=0.0)  # while the mask cannot be there yet
        grammar.waited.set()
        return late or wait(work, timeout=timeout, **options)

    monkeypatch.setattr(masks, "wait", waits)
    driver = make_driver(case.model, num_blocks=40)
    runner: Any = driver.runner
    runner.enforce(grammar, patience=FOREVER)
    driver.add(make_request("masked", case.prompts[3], OUTPUT, grammar=Grammar("regex", ".*")))
    driver.add(make_request("free", case.prompts[1], OUTPUT))
    driver.run()
    assert [driver.outputs["masked"], driver.outputs["free"]] == [case.answers[3], case.answers[1]]


def test_a_state_that_is_dropped_is_noticed(case_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("lfm2")
    assert test_modules(case.model) == ""
    with monkeypatch.context() as patch:
        patch.setattr(pool, "RecurrentState", lambda *_parts: RecurrentState())
        assert "of their spread" in test_modules(case.model)
    mixed = StateTable.of_step

    def swapped(self: StateTable, layout: Layout, device: torch.device, _moves: Any) -> Any:
        """Each row's state in the next one's place."""
        chunks = layout.chunks.copy()
        chunks[:, 0] = (chunks[:, 0] + layout.starts.clip(max=1)) % 2
        return mixed(self, replace(layout, chunks=chunks), device)

    monkeypatch.setattr(StateTable, "of_step", swapped)
    assert "of their spread" in test_modules(case.model)


REFUSED = {
    "mamba": "takes no position_ids",
    "bamba": "has no attention layer",
    "minimax": "its recurrent layers take position_embeddings, which cannot be split by request",
    "recurrent_gemma": "layers whose state is not found|its other state is not supported",  # by its version
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attn_layer_indices": []} if name == "bamba" else {}
    tiny_transformers.tiny_config(name, **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=REFUSED[name]):
        load_shape(tmp_path)


def test_what_a_launch_says_and_leaves_out(case_of: Any) -> None:
    case = case_of("qwen3_next")
    config = EngineConfig(model=str(case.folder), device="cpu", num_gpu_blocks_override=40, profile_seconds=0.0)
    runner, plan = build_runner(config, plan_launch(config))
    assert any("each prefix in the cache" in note for note in plan.notes)
    scheduler = scheduler_config(config, plan)
    assert scheduler.enable_prefix_caching and scheduler.state_slots == plan.state_slots
    assert plan.state_slots == 2 * plan.limits.max_num_seqs + 40 * 16 // 512
    assert plan.host_units == 0
    assert runner.masks is not None and runner.masks._patience == FOREVER
    # planned without weights, never less than the used bytes
    rows = plan.limits.max_num_seqs + plan.state_slots
    tables = [table for layer in runner.device._states._layers.values() for table in layer.values()]
    assert sum(table.nbytes for table in tables) == rows * plan.spec.state_bytes
    alone = plan_launch(replace(config, enable_prefix_caching=False))
    assert alone.state_slots == 0 and not scheduler_config(config, alone).enable_prefix_caching
    with pytest.raises(
        ConfigError, match=r"--swap-space is not supported here: .* has recurrent layers; remove --no-enable-prefix"
    ):
        plan_launch(replace(config, swap_space=1.0, enable_prefix_caching=False))


def test_the_host_tier_has_room_for_states(case_of: Any) -> None:
    case = case_of("qwen3_next")
    config = EngineConfig(
        model=str(case.folder), device="cpu", num_gpu_blocks_override=40, profile_seconds=0.0, swap_space=0.1
    )
    runner, plan = build_runner(config, plan_launch(config))
    scheduler, pool = scheduler_config(config, plan), runner.device.pool
    assert scheduler.host_units == plan.host_units == len(pool.host_units) > 0
    assert scheduler.host_state_slots == plan.host_state_slots == plan.host_units // (2 * 2048 // 16)
    table = next(iter(runner.device._states._host.values()))
    assert {len(each) for each in table.values()} == {plan.host_state_slots}
    assert host_bytes(plan) <= 0.1 * 2**30
    mamba = EngineConfig(model=str(case_of("jamba").folder), device="cpu", profile_seconds=0.0, swap_space=0.1)
    _, plan = build_runner(mamba, plan_launch(mamba))
    scheduler = scheduler_config(mamba, plan)
    assert (scheduler.state_slots, scheduler.host_units, scheduler.enable_prefix_caching) == (0, 0, False)


def test_states_take_half_of_the_memory_at_most(case_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(case_of("qwen3_next").folder), device="cpu")
    usual = plan_launch(config)
    room = 20 * usual.spec.state_bytes
    monkeypatch.setattr("engine.execution.memory.cpu_cache_bytes", lambda _available: room)
    plan = plan_launch(config)
    assert plan.limits.max_num_seqs == 10 < usual.limits.max_num_seqs
    assert any("at most 10 requests run at once" in note for note in plan.notes)
    with pytest.raises(ConfigError, match="--max-num-seqs 12 does not fit: memory holds the states of 10"):
        plan_launch(replace(config, max_num_seqs=12))
    assert plan_launch(replace(config, max_num_seqs=8)).limits.max_num_seqs == 8


def test_snapshots_take_a_part_of_what_rows_leave(case_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(case_of("qwen3_next").folder), device="cpu", max_num_seqs=8)
    each, rows = plan_launch(config).spec.state_bytes, 8
    for left, slots in ((40, 10), (15, 0)):
        room = (rows + left) * each
        monkeypatch.setattr("engine.execution.memory.cpu_cache_bytes", lambda _available, room=room: room)
        plan = plan_launch(config)
        assert (plan.limits.max_num_seqs, plan.state_slots) == (rows, slots)
        assert scheduler_config(config, plan).enable_prefix_caching == (slots > 0)
        unit = scheduler_config(config, plan).unit_bytes
        assert (rows + slots) * each + (plan.limits.num_units + 1) * unit <= room
