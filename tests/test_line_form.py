"""Batch lines from hidden state while weights stream: when, how many more run so, faults, on the real runner, too."""

import functools
import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from driver import Driver, make_request
from hypothesis import given, settings
from test_hybrid_cache import CONFIGS, CPU, RoughTensors
from test_hybrid_scheduling import BLOCK, VOCAB, check_solo, make
from test_offload import FakeTransport, offloading_config
from tiny_models import llama_config

from engine.api import EngineRequest, FinishReason, Pooling, RequestClass
from engine.build import _most_hidden, plan_launch, scheduler_config
from engine.cache.blocks import CacheAction, CacheKind
from engine.config import SchedulerConfig
from engine.execution import memory
from engine.execution.cpu.device import TorchDevice
from engine.execution.runner import Runner
from engine.models.decoder import Decoder
from engine.models.linear import make_plain
from engine.models.spec import spec_from_config
from engine.models.streaming import StreamedLayers, aligned
from engine.models.weights import build_weights, matrices
from predictor.model import LatencyModel

STREAM = LatencyModel(
    intercept=1.0, decodes=1e-3, prefill_tokens=1e-4, transferred=1e-6, restored=1e-5, restored_step=1.0, compact=1e-5
)
DEAR = replace(STREAM, compact=5e-3)  # a pool full of hidden state would make a step longer than two of K and V


def streaming(depth: int = 0, *, blocks: int = 40, model: LatencyModel | None = STREAM, **options: object) -> Driver:
    chosen = {"scratch": 2 * blocks, "stream_seconds": 0.9, "rows": 32, **options}
    return make(depth, blocks=blocks, model=model, **chosen)  # type: ignore[arg-type]


def lines(count: int, prompt: int = 16, output: int = 12, first: int = 0) -> list[EngineRequest]:
    offline = {"request_class": RequestClass.OFFLINE}
    return [make_request(f"line{n}", [n] * prompt, output, **offline) for n in range(first, first + count)]


def most_lines(driver: Driver) -> int:
    """Step to the end; the most lines that ran at once."""
    most = 0
    while driver.core.has_requests or driver.in_flight:
        driver.step()
        most = max(most, driver.core.stats().running[RequestClass.OFFLINE])
    return most


@pytest.fixture(params=[0, 1])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# ---- when


def test_nearly_twice_as_many_lines_share_each_stream(depth: int) -> None:
    """Of six or seven blocks each, beside the next block of all that run."""
    most, steps = {}, {}
    for scratch in (0, 80):
        driver = streaming(depth, scratch=scratch)
        requests = lines(24)
        driver.add(*requests)
        most[scratch] = most_lines(driver)
        steps[scratch] = len(driver.steps)
        check_solo(driver, *requests)
        assert driver.core.stats().units_owned == 0
    assert most[80] >= 1.6 * most[0], most
    assert steps[80] <= 0.75 * steps[0], steps


@pytest.mark.parametrize(
    "options",
    [{"model": DEAR}, {"stream_seconds": 0.0}, {"model": None}, {"blocks": 300}],
    ids=["it costs more than it brings", "nothing streams", "no model", "all lines fit"],
)
def test_lines_keep_to_k_and_v_where(options: dict[str, object]) -> None:
    driver = streaming(**options)  # type: ignore[arg-type]
    requests = lines(24)
    driver.add(*requests)
    while driver.core.has_requests:
        driver.step()
        assert not driver.core.stats().hidden_blocks
    check_solo(driver, *requests)


def test_the_last_lines_start_as_k_and_v_again() -> None:
    """Those that fit so: nothing is gained any more."""
    driver = streaming()
    driver.add(*lines(20))
    seen: dict[str, CacheKind] = {}
    while driver.core.has_requests:
        driver.step()
        for request in driver.core._state.running[RequestClass.OFFLINE]:
            seen.setdefault(request.request_id, request.cache_map.kind)
    kinds = list(seen.values())
    assert kinds[0] is CacheKind.HIDDEN and kinds[-1] is CacheKind.KV
    assert kinds == sorted(kinds, key=[CacheKind.HIDDEN, CacheKind.KV].index), "one change, no back and forth"


@given(
    blocks=st.integers(10, 60),
    count=st.integers(1, 40),
    prompt=st.integers(1, 60),
    output=st.integers(1, 30),
    cost=st.floats(1e-7, 1e-1),
)
@settings(max_examples=60, deadline=None)
def test_hidden_state_is_chosen_where_a_full_pool_of_it_gives_more_tokens_a_second(
    blocks: int, count: int, prompt: int, output: int, cost: float
) -> None:
    """The rule by hand, for the first line of a batch of alike ones."""
    model = replace(STREAM, compact=cost)
    driver = streaming(blocks=blocks, model=model)
    output = min(output, 4 * BLOCK * blocks - prompt)
    driver.add(*lines(count, prompt, output))
    (first,) = [r for r in driver.core._state.waiting_offline if r.request_id == "line0"]
    driver.step()
    if not driver.steps:
        return
    tokens = prompt + output // 2 if output % 2 == 0 else (2 * prompt + output) // 2
    line = tokens // BLOCK + 1
    few, many = (min(count, 32, 2 * blocks // (line * units)) for units in (2, 1))
    seconds = 1.0 + 1e-3 * few, 1.0 + 1e-3 * many + cost * many * tokens
    fits = min(count, 32) * line * 2 <= 2 * blocks
    expected = CacheKind.HIDDEN if not fits and many / seconds[1] > few / seconds[0] else CacheKind.KV
    assert first.cache_map.kind is expected


def test_embeddings_keep_nothing_of_the_kind() -> None:
    driver = streaming(blocks=12)
    requests = [replace(each, pooling=Pooling.LAST) for each in lines(12)]
    driver.add(*requests)
    while driver.core.has_requests:
        driver.step()
        assert not driver.core.stats().hidden_blocks


# ---- what they share, and who comes between


def test_a_prefix_that_lines_share_takes_scratch_once(depth: int) -> None:
    """Thirty lines behind ten shared blocks would want more scratch than there is, were each counted."""
    driver = streaming(depth, blocks=30)
    prefix = [7] * (10 * BLOCK)
    offline = {"request_class": RequestClass.OFFLINE}
    requests = [make_request(f"line{n}", [*prefix, n, n + 1], 6, **offline) for n in range(30)]
    driver.add(requests[0])
    driver.add(*lines(8, first=100))  # memory is short from the start
    driver.step()
    driver.add(*requests[1:])
    most = most_lines(driver)
    check_solo(driver, *requests)
    computed = sum(step.num_tokens for step in driver.steps)
    assert most > 12
    assert computed < 3 * len(prefix) + 8 * 28 + 30 * 8 + 200, "the prefix is not computed by every line"


def test_a_chat_takes_the_room_of_lines_in_hidden_state(depth: int) -> None:
    driver = streaming(depth, policy="goodput")
    requests = lines(30)
    driver.add(*requests)
    for _ in range(4):
        driver.step()
    assert driver.core.stats().hidden_blocks
    chats = [make_request(f"chat{n}", [40 + n] * 60, 8) for n in range(2)]
    driver.add(*chats)
    for _ in range(6):
        driver.step()
    assert driver.core.stats().running[RequestClass.ONLINE] == 2
    driver.run()
    check_solo(driver, *requests, *chats)


def test_random_loads_get_every_token_right() -> None:
    """Chats between lines, pools that are too small, a host tier, shared prefixes, failures and aborts."""
    seen: set[str] = set()
    for seed in range(60):
        rng = random.Random(seed)
        driver = streaming(
            seed % 2,
            blocks=rng.choice([12, 20]),
            host=rng.choice([0, 16, 80]),
            policy=rng.choice(["fcfs", "goodput", "apt"]),
            model=rng.choice([STREAM, replace(STREAM, transferred=1e-2)]),
            rows=rng.choice([4, 12]),
            fail=frozenset(rng.sample(range(60), rng.choice([0, 0, 3]))),
        )
        shared, requests = [rng.randrange(VOCAB) for _ in range(12)], []
        for number in range(14):
            own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14))]
            offline = rng.random() < 0.75
            requests.append(
                make_request(
                    str(number),
                    shared + own if rng.random() < 0.4 else own,
                    rng.randrange(1, 12),
                    request_class=RequestClass.OFFLINE if offline else RequestClass.ONLINE,
                )
            )
            driver.add(requests[-1])
            for _ in range(rng.randrange(3)):
                driver.step()
                if driver.core.stats().hidden_blocks:
                    seen.add("hidden")
        gone = rng.choice([None, *requests])
        if gone is not None and gone.request_id not in driver.finals:
            driver.abort(gone.request_id)
        driver.run()
        check_solo(driver, *(each for each in requests if each is not gone))
        stats = driver.core.stats()
        assert (stats.units_owned, stats.hidden_blocks) == (0, 0)
        seen |= {operation.action.value for step in driver.steps for operation in step.operations}
    assert seen >= {"hidden", "swap_out", "swap_in"}


# ---- the launch and the real runner


def test_where_weights_stream_every_unit_may_hold_hidden_state(tmp_path) -> None:
    config = offloading_config(tmp_path, hidden_cache=True, online_policy="goodput")
    plan = plan_launch(config)
    assert plan.scratch_blocks == plan.limits.num_units
    assert scheduler_config(config, plan).scratch_blocks == plan.limits.num_units
    resident = plan_launch(replace(config, offload_weights="off"))
    assert resident.scratch_blocks == resident.limits.num_units // 4
    assert _most_hidden(plan, 10) == 20 and _most_hidden(resident, 10) == 5
    own, dtype = plan.own, getattr(torch, plan.dtype)
    taken = plan.limits.num_units * memory.unit_bytes(own, plan.limits.block_size, dtype)
    taken += memory.scratch_bytes(own, plan.limits.block_size, dtype, plan.scratch_blocks)
    if config.num_gpu_blocks_override is None:
        assert taken <= plan.cache_bytes


@functools.cache
def resident(name: str) -> Decoder:
    spec = spec_from_config(llama_config(**CONFIGS[name], num_hidden_layers=5))
    return Decoder(spec, build_weights(spec, RoughTensors(0, torch.float32, CPU), make_plain))


def streamed(name: str) -> Decoder:
    weights = resident(name).weights
    size = max(sum(aligned(each.data().nbytes) for each in matrices(layer)) for layer in weights.layers)
    gather = functools.partial(StreamedLayers, streamed=(0, 2, 3), transport=FakeTransport(size))
    spec = resident(name).spec
    return Decoder(spec, build_weights(spec, RoughTensors(0, torch.float32, CPU), make_plain, gather))


def live(decoder: Decoder, *, hidden: bool, host: int = 0, blocks: int = 24) -> Driver:
    sizes = {"num_units": 2 * blocks, "block_size": BLOCK, "max_num_seqs": 16, "max_model_len": 4 * blocks}
    scratch = 2 * blocks if hidden else 0
    config = SchedulerConfig(
        **sizes, max_num_batched_tokens=64, host_units=host, unit_bytes=1, scratch_blocks=scratch, stream_seconds=0.9
    )
    runner = Runner(TorchDevice(decoder, config.limits, scratch_blocks=scratch, host_units=host))
    return Driver(runner, config, model=STREAM)


def real_lines(count: int = 10) -> list[EngineRequest]:
    offline = {"request_class": RequestClass.OFFLINE}
    prompts = [[3 + (7 * n + at * at) % 90 for at in range(5 + n)] for n in range(count)]
    return [make_request(f"line{n}", prompt, 12, **offline) for n, prompt in enumerate(prompts)]


@functools.cache
def alone(name: str) -> dict[str, list[int]]:
    """Each line by itself, from K and V, all weights in memory."""
    found: dict[str, list[int]] = {}
    for request in real_lines():
        driver = live(resident(name), hidden=False)
        driver.add(request)
        driver.run()
        found |= driver.outputs
    return found


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("name", ["opt", "llama2", "qwen3"])
def test_lines_from_hidden_state_give_the_tokens_of_k_and_v(name: str, host: int) -> None:
    """By weights in the streams' buffers; with a host tier answers grow by its division between both."""
    most, steps = {}, {}
    for hidden in (False, True):
        driver = live(streamed(name), hidden=hidden, host=host)
        driver.add(*real_lines())
        seen = 0
        most[hidden] = 0
        while driver.core.has_requests:
            driver.step()
            stats = driver.core.stats()
            seen, most[hidden] = max(seen, stats.hidden_blocks), max(most[hidden], stats.running[RequestClass.OFFLINE])
        assert driver.outputs == alone(name)
        assert bool(seen) is hidden
        steps[hidden] = len(driver.steps)
    assert most[True] > most[False] and steps[True] < steps[False]


@pytest.mark.parametrize("name", ["opt", "llama2"])
def test_nan_in_the_hidden_state_of_a_line_costs_a_step(name: str) -> None:
    driver = live(streamed(name), hidden=True)
    driver.add(*real_lines())
    while driver.core.stats().hidden_blocks < 4:
        driver.step()
    (line, *_) = [r for r in driver.core._state.running[RequestClass.OFFLINE] if r.cache_map.num_compact]
    runner = driver.runner
    assert isinstance(runner, Runner)
    runner.device.pool.units[line.cache_map.blocks[0].entry.units[0]] = float("nan")
    driver.run()
    assert driver.core.stats().failed_steps == 1
    assert driver.outputs == alone(name)
    assert {final.finish_reason for final in driver.finals.values()} == {FinishReason.LENGTH}


def test_a_read_that_fails_under_hidden_state_is_one_failed_step() -> None:
    """The stream breaks off in the middle of a step that projects by it."""
    decoder = streamed("llama2")
    transport = decoder.weights.layers._transport
    driver = live(decoder, hidden=True)
    driver.add(*real_lines())
    while driver.core.stats().hidden_blocks < 4:
        driver.step()
    transport.broken.add(1)
    driver.step()
    transport.broken.clear()
    driver.run()
    assert driver.core.stats().failed_steps >= 1
    assert driver.outputs == alone("llama2")


def test_an_abort_gives_hidden_state_back_at_every_moment() -> None:
    for moment in range(1, 14):
        driver = live(streamed("opt"), hidden=True, host=30)
        driver.add(*real_lines())
        for _ in range(moment):
            driver.step()
        for name in ("line0", "line3", "line9"):
            if name not in driver.finals:
                driver.abort(name)
        driver.run()
        stats = driver.core.stats()
        assert (stats.units_owned, stats.hidden_blocks) == (0, 0)
        for name, tokens in driver.outputs.items():
            assert tokens == alone("opt")[name][: len(tokens)]


def test_a_copy_of_hidden_state_that_fails_costs_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, batches = TorchDevice.swap_out, []

    def swap_out(device: TorchDevice, pairs) -> None:
        batches.append(pairs)
        if len(batches) == 1:
            whole(device, pairs[: len(pairs) // 2])
            raise RuntimeError("no memory for the copy")
        whole(device, pairs)

    monkeypatch.setattr(TorchDevice, "swap_out", swap_out)
    driver = live(streamed("opt"), hidden=True, host=60, blocks=16)
    driver.add(*real_lines())
    for _ in range(5):
        driver.step()
    chat = make_request("chat", list(range(3, 43)), 3)
    driver.add(chat)
    driver.run()
    moved = [op for step in driver.steps for op in step.operations if op.action is CacheAction.SWAP_OUT]
    assert batches and any(op.source.kind is CacheKind.HIDDEN for op in moved)
    driver.outputs.pop("chat")
    assert driver.outputs == alone("opt")
