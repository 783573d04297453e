"""Runners of every backend under the real core: each request has the answer of a cache-free model alone."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from dense_model import attend_with, dense_attend
from devices import BACKENDS, device_of
from driver import Driver, make_request
from fakes.speculation import Oracle
from support.tables import mostly_slow
from tiny_models import llama_config

from engine.api import EngineRequest, FinishReason, RequestClass, RequestTimes, Resumption, SamplingParams
from engine.arrays import FloatArray, IntArray
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.errors import ConfigError
from engine.execution import memory, sampler
from engine.execution.cpu.device import TorchDevice
from engine.execution.pool import UnitPool
from engine.execution.rows import uniforms
from engine.execution.runner import Runner
from engine.limits import Limits, SchedulerConfig
from engine.models.decoder import Adapt, Attend, Decoder
from engine.models.spec import ModelSpec, spec_from_config
from engine.models.weights import DummyTensors, build_weights
from engine.scheduling.output import INVALID_TOKEN, Chunk, NewRequest, SchedulerOutput

pytestmark = pytest.mark.timeout(900)  # the native library may be built first
VOCAB = 97
POISON = 96
BLOCK = 4
CPU = torch.device("cpu")


class FragileDecoder(Decoder):
    """Raises in the middle of the steps numbered in `fail_calls`."""

    calls = 0
    fail_calls: frozenset[int] = frozenset()

    def run(
        self, hidden: torch.Tensor, attend: Attend, layers: range | None = None, adapt: Adapt | None = None
    ) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 in self.fail_calls:
            super().run(hidden, attend, range(2))
            raise RuntimeError("the device is gone")
        return super().run(hidden, attend, layers, adapt)


def make_decoder(seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> FragileDecoder:
    spec = spec_from_config(llama_config(**config))
    return FragileDecoder(spec, build_weights(spec, DummyTensors(seed, dtype, CPU)))


def poisoned_decoder() -> Decoder:
    """The same model, but the token POISON has an embedding of NaN."""
    decoder = make_decoder()
    decoder.weights.embedding[POISON] = math.nan
    return decoder


KINDS = [("torch", 0), ("torch", 1), ("native", 0), ("cuda", 0), ("cuda", 1)]
"""Backend and pipeline depth."""
USUAL = KINDS[1:3] + KINDS[4:]
"""The kinds of the default tests: what goes wrong at depth 0 alone, the slow tests find."""


def make_driver(
    decoder: Decoder, depth: int = 0, backend: str = "torch", *, num_blocks: int = 200, seqs: int = 12, tokens: int = 32
) -> Driver:
    """The host samples no step of the runner for CUDA for any request: it would wait for the device."""
    config = SchedulerConfig(
        num_units=2 * num_blocks, max_model_len=min(num_blocks * BLOCK, 200), block_size=BLOCK, max_num_seqs=seqs,
        max_num_batched_tokens=tokens, pipeline_depth=depth, min_prefill_chunk=8,
    )  # fmt: skip
    if backend == "torch":
        return Driver(Runner(TorchDevice(decoder, config.limits)), config)
    runner = Runner(device_of(backend, decoder.spec, decoder.weights, config.limits))
    if backend == "cuda":
        runner._sample = lambda *_: pytest.fail("the host sampled a step")  # type: ignore[method-assign]
    return Driver(runner, config)


def reference_logits(decoder: Decoder, token_ids: list[int]) -> torch.Tensor:
    ids, positions = torch.tensor(token_ids), torch.arange(len(token_ids))
    attend = attend_with(functools.partial(dense_attend, decoder.spec), decoder, positions)
    with torch.inference_mode():
        hidden = Decoder.run(decoder, decoder.embed(ids, positions), attend)
        return decoder.logits(hidden[-1:])[0].float()


def check_greedy(decoder: Decoder, request: EngineRequest, output: list[int]) -> None:
    """Every token is the reference's best, given the tokens before it; after a tie below 1e-4 anything goes."""
    known = list(request.prompt_token_ids)
    for token in output:
        logits = reference_logits(decoder, known)
        best = float(logits.max())
        if token != int(logits.argmax()):
            assert best - float(logits[token]) < 1e-4, f"token {len(known)} of {request.request_id}"
            return
        known.append(token)
    assert len(output) == request.sampling.max_tokens


@functools.cache
def solo(request: EngineRequest) -> list[int]:
    """The tokens of the request alone, by torch."""
    driver = make_driver(make_decoder())
    driver.add(request)
    driver.run()
    return driver.outputs[request.request_id]


def crowd(rng: np.random.Generator, count: int, **sampling: object) -> list[EngineRequest]:
    """Requests of many lengths; half share prefixes of several blocks."""
    prefixes = [rng.integers(0, POISON, 14).tolist() for _ in range(2)]
    requests = []
    for index in range(count):
        prompt = rng.integers(0, POISON, rng.integers(1, 40)).tolist()
        if index % 2:
            prompt = prefixes[index % 4 // 2] + prompt[:12]
        request_class = RequestClass.OFFLINE if index % 3 == 2 else RequestClass.ONLINE
        max_tokens = int(rng.integers(6, 20))
        requests.append(
            make_request(f"r{index}", prompt, max_tokens, request_class=request_class, seed=index, **sampling)
        )
    return requests


def run_in_waves(driver: Driver, requests: Iterable[EngineRequest]) -> None:
    for index, request in enumerate(requests):
        driver.add(request)
        for _ in range(index % 3 // 2):
            driver.step()
    driver.run()


@pytest.mark.parametrize(("backend", "depth"), mostly_slow(KINDS, USUAL))
def test_greedy_outputs_equal_the_model_without_a_cache(backend: str, depth: int) -> None:
    """A pool that is always full: preemptions, prefix hits, mixed steps, reused units and rows."""
    decoder = make_decoder()
    requests = crowd(np.random.default_rng(11), 16)
    driver = make_driver(decoder, depth, backend, num_blocks=20, tokens=24)
    run_in_waves(driver, requests)
    stats = driver.stats()
    assert sum(stats.preemptions.values()) > 0
    assert stats.prefix_hit_tokens > 0
    assert driver.most_in_flight == 1 + depth
    for request in requests:
        check_greedy(decoder, request, driver.outputs[request.request_id])


SAMPLED = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        "temperature": 0.9,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": ((3, 2.0),),
    },
    "greedy-penalised": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
}


@pytest.mark.parametrize(("sampling", "backend", "depth"), mostly_slow(
    [(sampling, *kind) for sampling in SAMPLED for kind in KINDS if kind != ("cuda", 0)],
    [("penalised", *kind) for kind in USUAL] + [("filtered", *kind) for kind in USUAL],
))  # fmt: skip
def test_streams_do_not_depend_on_neighbours_or_preemption(sampling: str, backend: str, depth: int) -> None:
    """Every backend gives torch's tokens; by native kernels one request may part where a draw falls on a border."""
    requests = crowd(np.random.default_rng(14), 14, **SAMPLED[sampling])
    driver = make_driver(make_decoder(), depth, backend, num_blocks=20, tokens=24)
    run_in_waves(driver, requests)
    assert sum(driver.stats().preemptions.values()) > 0
    parted = [each.request_id for each in requests if driver.outputs[each.request_id] != solo(each)]
    assert len(parted) <= (backend == "native"), parted


@pytest.mark.parametrize(("sampling", "backend", "depth"), mostly_slow(
    [
        (sampling, *kind)
        for sampling in ({}, {"temperature": 1.0, "logprobs": 2}, SAMPLED["filtered"], SAMPLED["penalised"])
        for kind in KINDS
        if kind[0] != "cuda" or "repetition_penalty" not in sampling
    ],
    [
        ({}, "cuda", 1),
        (SAMPLED["filtered"], "cuda", 1),
        (SAMPLED["penalised"], "torch", 1),
        (SAMPLED["penalised"], "native", 0),
    ],
))  # fmt: skip
def test_drafts_do_not_change_answers(sampling: dict[str, object], backend: str, depth: int) -> None:
    """By native kernels one request may part where a draw falls on a border."""
    requests = crowd(np.random.default_rng(15), 10, **sampling)
    driver = make_driver(make_decoder(), depth, backend, num_blocks=120, seqs=40, tokens=64)
    driver.core.state.speculation = oracle = Oracle(solo, seed=depth, penalties=backend != "cuda")
    run_in_waves(driver, requests)
    stats = driver.stats()
    assert stats.accepted_tokens == sum(oracle.judged) > stats.drafted_tokens / 3 > 10
    parted = [each.request_id for each in requests if driver.outputs[each.request_id] != solo(each)]
    assert len(parted) <= (backend == "native"), parted


@pytest.mark.parametrize("presence_penalty", [0.0, 1.5])
def test_a_stream_is_a_function_of_seed_and_output_position(presence_penalty: float) -> None:
    """Token i is the inverse CDF at the i-th uniform number of the seed, penalties over the outputs alone."""
    decoder = make_decoder()
    prompt = [1, 2, 3, 4, 5, 6, 7]
    output = solo(make_request("a", prompt, 15, temperature=1.3, seed=77, presence_penalty=presence_penalty))
    for index, token in enumerate(output):
        logits = reference_logits(decoder, prompt + output[:index]).double()
        logits[sorted(set(output[:index]))] -= presence_penalty
        cdf = (logits / 1.3).softmax(-1).cumsum(-1)
        u = uniforms(np.array([77]), np.array([index]))[0]
        assert (float(cdf[token - 1]) if token else 0.0) - 1e-4 < u < float(cdf[token]) + 1e-4


def test_min_tokens_hold_back_the_stop_token() -> None:
    free = solo(make_request("free", [9, 8, 7], 8))
    stops = frozenset(free[:2])
    stopped = solo(make_request("a", [9, 8, 7], 8, stop_token_ids=stops))
    assert stopped == free[:1]
    held = solo(make_request("b", [9, 8, 7], 8, stop_token_ids=stops, min_tokens=5))
    assert len(held) >= 5
    assert not stops & set(held[:4])


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_come_for_those_who_asked(backend: str) -> None:
    decoder = make_decoder()
    driver = make_driver(decoder, 0, backend)
    requests = [make_request("with", [1, 2, 3, 4, 5], 4, logprobs=3), make_request("without", [1, 2, 3], 4)]
    driver.add(*requests)
    logprobs = []
    while driver.launch():
        output = driver.in_flight[0]
        result = driver.result(output)
        logprobs.append(result.logprobs)
        driver.in_flight.popleft()
        for each in driver.core.update(output, result, 0.0):
            driver._take(each)
    known = [1, 2, 3, 4, 5]
    for step, token in zip(logprobs, driver.outputs["with"], strict=True):
        assert step is not None
        (mine,) = [entry for entry in step if entry is not None]
        expected = reference_logits(decoder, known).log_softmax(-1)
        assert mine.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert [value for _, value in mine.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
        known.append(token)


@pytest.mark.parametrize(("backend", "depth"), mostly_slow(KINDS, USUAL))
def test_nan_ends_that_request_only(backend: str, depth: int) -> None:
    requests = crowd(np.random.default_rng(15), 8, logit_bias=((POISON, -100.0),))
    driver = make_driver(poisoned_decoder(), depth, backend, num_blocks=20, tokens=24)
    for index, request in enumerate(requests):
        driver.add(request, make_request(f"nan{index}", [*range(index), POISON, 3], 6))
        driver.step()
    driver.run()
    for index, request in enumerate(requests):
        assert driver.finals[f"nan{index}"].finish_reason is FinishReason.ERROR
        assert driver.outputs[f"nan{index}"] == []
        assert driver.outputs[request.request_id] == solo(request)


def break_steps(device: Any, calls: set[int]) -> None:
    """Let these steps of a device for CUDA fail when their changes of rows have been sent."""
    forward, counter = device._graphs._forward, itertools.count()

    def fragile(*args: Any, **options: Any) -> None:
        if next(counter) in calls:
            raise RuntimeError("the device is gone")
        forward(*args, **options)

    device._graphs._forward = fragile


@pytest.mark.parametrize(("backend", "depth"), [("torch", 0), ("torch", 1), ("cuda", 1)])
def test_a_step_that_fails_halfway_is_made_good(backend: str, depth: int) -> None:
    """Its rows, and those of the step launched behind it, are written again."""
    decoder = make_decoder()
    requests = [
        dataclasses.replace(request, request_class=RequestClass.OFFLINE)
        for request in crowd(np.random.default_rng(16), 8)
    ]
    driver = make_driver(decoder, depth, backend, num_blocks=30)
    if backend == "cuda":
        break_steps(driver.runner.device, {2, 11})  # type: ignore[attr-defined]
    decoder.fail_calls = frozenset({2, 11})
    run_in_waves(driver, requests)
    assert driver.stats().failed_steps == 2
    decoder.fail_calls = frozenset()
    for request in requests:
        check_greedy(decoder, request, driver.outputs[request.request_id])


# --- the contract of one step ------------------------------------------------------------------------------------


def kv(*units: int) -> tuple[CacheEntry, ...]:
    pairs = zip(units[::2], units[1::2], strict=True)
    return tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, pair) for pair in pairs)


def bare_runner(decoder: Decoder) -> Runner[TorchDevice]:
    return Runner(TorchDevice(decoder, Limits(4, 16, 32, num_units=16, block_size=BLOCK)))


GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def test_steps_without_samples_or_chunks() -> None:
    runner = bare_runner(make_decoder())
    new = NewRequest(0, "a", (1, 2, 3), 3, GREEDY, kv(0, 1))
    output = runner.launch(SchedulerOutput(0, (Chunk(0, 0, 2, False),), (new,)))()
    assert (output.step_id, output.token_ids, output.logprobs) == (0, [], None)
    output = runner.launch(SchedulerOutput(1, (), (), (), (0,)))()
    assert (output.step_id, output.token_ids, output.logprobs) == (1, [], None)


def test_a_chunk_beyond_its_block_table_is_refused() -> None:
    runner = bare_runner(make_decoder())
    new = NewRequest(0, "a", (1, 2, 3, 4, 5), 5, GREEDY, kv(0, 1))
    with pytest.raises(AssertionError, match="block table"):
        runner.launch(SchedulerOutput(0, (Chunk(0, 0, 5, True),), (new,)))()


def test_an_invalid_token_leaves_a_row_that_a_step_in_flight_can_read() -> None:
    runner = bare_runner(poisoned_decoder())
    new = NewRequest(1, "a", (1, POISON), 2, GREEDY, kv(4, 5))
    assert runner.launch(SchedulerOutput(0, (Chunk(1, 0, 2, True),), (new,)))().token_ids == [INVALID_TOKEN]
    assert runner.launch(SchedulerOutput(1, (Chunk(1, 2, 1, True),)))().token_ids == [INVALID_TOKEN]


# --- memory ------------------------------------------------------------------------------------------------------


def test_units_that_fit() -> None:
    spec: ModelSpec = spec_from_config(llama_config())
    size = memory.unit_bytes(spec, 16, torch.bfloat16)
    assert size * 2 == spec.kv_bytes_per_token(2) * 16
    assert memory.num_units(11 * size, size) == 10
    assert memory.num_units(12 * size, size) == 10
    for nothing in (-5, 0, 2 * size):
        with pytest.raises(ConfigError, match="no memory is left"):
            memory.num_units(nothing, size)


def test_what_hidden_state_and_the_host_tier_take() -> None:
    """The pool's own tensor, scratch included, has the accounted size, to the byte."""
    spec: ModelSpec = spec_from_config(llama_config(num_key_value_heads=4))
    size = memory.unit_bytes(spec, 16, torch.float32)
    hidden = memory.hidden_cache_bytes(spec, 16, torch.float32, 6, CPU)
    assert hidden == 6 * 2 * size // spec.num_layers == memory.scratch_bytes(spec, 16, torch.float32, 6)
    units = memory.num_units(21 * size, size, hidden)
    pool = UnitPool.of(
        spec, Limits(1, 16, 16, units, 16), torch.empty(0), scratch_blocks=6,
        host_units=5,
    )  # fmt: skip
    assert pool.slices.nbytes == (units + 1) * size + hidden
    assert 19 * size < pool.slices.nbytes <= 21 * size
    assert pool.host_units.nbytes == 5 * size
    assert memory.hidden_cache_bytes(spec, 16, torch.bfloat16, 0, CPU) == 0
    in_half = memory.hidden_cache_bytes(spec, 16, torch.bfloat16, 6, CPU)
    assert in_half - memory.scratch_bytes(spec, 16, torch.bfloat16, 6) == 3 * 2 * 64 * 64 * 2
    cuda = memory.hidden_cache_bytes(spec, 16, torch.bfloat16, 6, torch.device("cuda"))
    assert cuda == memory.scratch_bytes(spec, 16, torch.bfloat16, 6), "no packed copies there"


def test_the_cpu_cache_is_a_capped_share() -> None:
    assert memory.cpu_cache_bytes(1000) == 250
    assert memory.cpu_cache_bytes(2**50) == memory.CPU_LIMIT
    assert 0 < memory.cpu_cache_bytes() <= memory.CPU_LIMIT


@pytest.mark.parametrize("cut", [0, 1, 7, 11])
def test_answers_that_go_on_in_another_engine_draw_the_same_numbers(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice of a seeded request by itself: the number of a token depends on its seed and its place alone."""
    decoder, drawn = make_decoder(), set[tuple[int, int]]()
    real = sampler.uniforms

    def spy(seeds: IntArray, positions: IntArray) -> FloatArray:
        drawn.update(zip(seeds.tolist(), positions.tolist(), strict=True))
        return real(seeds, positions)

    monkeypatch.setattr(sampler, "uniforms", spy)
    choices = [make_request(f"n{n}", range(5, 14), 12, temperature=0.8, seed=18 + n) for n in range(3)]
    whole = make_driver(decoder)
    whole.add(*choices)
    whole.run()
    drawn.clear()
    driver = make_driver(decoder)
    given = {each.request_id: whole.outputs[each.request_id][:cut] for each in choices}
    for each in choices:
        driver.add(dataclasses.replace(each, resumed=Resumption(tuple(given[each.request_id]), RequestTimes(0.0))))
    driver.run()
    assert drawn == {(18 + n, position) for n in range(3) for position in range(cut, 12)}
    for name in given:
        assert given[name] + driver.outputs[name] == whole.outputs[name]
