"""vLLM's real scheduler on a virtual clock, without a model: the time of a step is computed."""

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tidemill_vllm import scheduler as plugin
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: base, per token, per context token, per query-key pair; noise is lognormal."""

    base: float = 0.016
    token: float = 0.0011
    context: float = 2e-7
    pair: float = 4e-8
    noise: float = 0.06
    slow: float = 1.0
    """The machine is this many times as slow in the second half of every 20 seconds."""


@dataclass(frozen=True)
class Traffic:
    """Chats beside a fixed number of offline clients."""

    rate: float = 1.0
    prompt: int = 128
    output: int = 48
    clients: int = 24
    offline_prompt: int = 256
    offline_output: int = 64
    seconds: float = 120.0
    is_wave: bool = False


@dataclass(frozen=True)
class Promise:
    """Limits of the chats, in seconds."""

    ttft: float = 1.0
    tbt: float = 0.15

    def __str__(self) -> str:
        return f"ttft_p99={self.ttft * 1e3:g}ms,tbt_p99={self.tbt * 1e3:g}ms"


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def model_folder(root: Path) -> Path:
    """Write the configuration of a small Llama; no weights are needed."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1000,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    return root


def make_scheduler(
    folder: Path, clock: Clock, *, is_plugin: bool = True, is_async: bool = False, tokens: int = 2048, rows: int = 64,
    blocks: int = 8192, promise: Promise | None = None, options: dict[str, Any] | None = None, policy: str = "priority",
) -> Any:  # fmt: skip
    """Build a scheduler as the engine does."""
    plugin.clock = plugin.wall = clock
    scheduling = SchedulerConfig(
        max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=2048, is_encoder_decoder=False,
        enable_chunked_prefill=True, async_scheduling=is_async, policy=policy,
    )  # fmt: skip
    model = ModelConfig(model=str(folder), dtype="bfloat16", max_model_len=2048, skip_tokenizer_init=True)
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, enable_prefix_caching=False)
    stated = {"slo": str(promise or Promise()), "sweep_seconds": 0, "fit_dir": ""} if options is None else options
    config = VllmConfig(
        scheduler_config=scheduling, model_config=model, cache_config=cache, device_config=DeviceConfig("cpu"),
        additional_config={"tidemill": stated},
    )  # fmt: skip
    config.scheduler_config.async_scheduling = is_async  # the CPU platform switches it off
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
    cache.num_gpu_blocks = blocks
    make: Callable[..., Any] = plugin.make if is_plugin else AsyncScheduler if is_async else Scheduler
    return make(
        vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK, log_stats=True,
    )  # fmt: skip


class Engine:
    """The loop of vLLM's engine around a scheduler."""

    def __init__(self, scheduler: Any, clock: Clock, machine: Machine | None = None, *, depth: int = 1) -> None:
        self.scheduler, self.clock, self.machine = scheduler, clock, machine or Machine()
        self._random, self._depth, self._free_at = random.Random(1), depth, clock.now
        self._queue: list[tuple[float, Any, dict[str, list[int]]]] = []
        self.emitted: dict[str, list[float]] = {}
        self.ended: dict[str, float] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any request is left."""
        return bool(self.scheduler.has_unfinished_requests() or self._queue)

    def add(self, request_id: str, prompt: int, output: int, priority: int) -> None:
        """Add a request of random tokens."""
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        tokens = [self._random.randrange(1000) for _ in range(prompt)]
        self.emitted[request_id] = []
        self.scheduler.add_request(
            Request(request_id, tokens, params, None, arrival_time=self.clock.now, priority=priority)
        )

    def _seconds(self, output: Any, starts: dict[str, int]) -> float:
        machine = self.machine
        seconds = machine.base
        for own, tokens in output.num_scheduled_tokens.items():
            seconds += (
                machine.token * tokens + machine.context * (starts[own] + tokens) + machine.pair * tokens * starts[own]
            )
        slow = machine.slow if self.clock.now % 20 > 10 else 1.0
        return seconds * self._random.lognormvariate(0.0, machine.noise) * slow

    def turn(self) -> bool:
        """Run one turn of the loop; return whether anything happened."""
        scheduler = self.scheduler
        if len(self._queue) < self._depth and scheduler.has_requests():
            output = scheduler.schedule()
            tokens = output.num_scheduled_tokens
            starts = {own: scheduler.requests[own].num_computed_tokens - count for own, count in tokens.items()}
            sampled = {own: [] if scheduler.requests[own].is_prefill_chunk else [7] for own in tokens}
            if output.total_num_scheduled_tokens:
                self._free_at = max(self._free_at, self.clock.now) + self._seconds(output, starts)
                self._queue.append((self._free_at, output, sampled))
                if len(self._queue) < self._depth:
                    return True
            elif not self._queue:
                scheduler.update_from_output(output, ModelRunnerOutput([], {}))
                return False
        if not self._queue:
            return False
        self._finish(*self._queue.pop(0))
        return True

    def _finish(self, at: float, output: Any, sampled: dict[str, list[int]]) -> None:
        self.clock.now = max(self.clock.now, at)
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(ids, {own: i for i, own in enumerate(ids)}, [sampled[own] for own in ids])
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                times = self.emitted.setdefault(each.request_id, [])
                times += [self.clock.now] * len(each.new_token_ids)
                if each.finish_reason is not None:
                    self.ended[each.request_id] = self.clock.now

    def wait(self) -> None:
        """Run a turn, or let a millisecond pass."""
        if not self.turn():
            self.clock.now += 0.001


@dataclass(frozen=True)
class Result:
    """Figures of a run: share of chats kept, TTFT and P99 gap of each chat in seconds, offline tokens/s."""

    chats: int
    kept: float
    ttft_p50: float
    gap_p99: float
    offline: float


def run(engine: Engine, traffic: Traffic, promise: Promise, seed: int, lead: float = 10.0) -> Result:
    """Serve the traffic and return the figures of the chats that ended."""
    rng, clock = random.Random(seed), engine.clock
    begin = clock.now + lead
    end, arrivals, at = begin + traffic.seconds, [], begin
    while (at := at + rng.expovariate(traffic.rate * (2 if traffic.is_wave else 1))) < end:
        if not traffic.is_wave or rng.random() < (1 + math.sin((at - begin) / 5)) / 2:
            arrivals.append(at)
    numbers, ended, offline = itertools.count(), [], set()

    def submit() -> None:
        own = f"offline-{next(numbers)}"
        offline.add(own)
        engine.add(own, traffic.offline_prompt, traffic.offline_output, 10)

    for _ in range(traffic.clients):
        submit()
    arrived: dict[str, float] = {}
    coming = list(reversed(arrivals))
    while clock.now < end:
        while coming and coming[-1] <= clock.now:
            own = f"chat-{len(arrived)}"
            arrived[own] = coming.pop()
            engine.add(own, traffic.prompt, traffic.output, 0)
        engine.wait()
        for own in list(engine.ended):
            when = engine.ended.pop(own)
            if own in offline:
                ended.append(when)
                submit()
    return _figures(engine, traffic, promise, arrived, sum(when >= begin for when in ended))


def _figures(engine: Engine, traffic: Traffic, promise: Promise, arrived: dict[str, float], jobs: int) -> Result:
    kept, ttfts, gaps = [], [], []
    for own, at in arrived.items():
        times = engine.emitted[own]
        if len(times) < traffic.output:
            continue
        own_gaps = sorted(b - a for a, b in itertools.pairwise(times))
        gap = own_gaps[math.ceil(0.99 * len(own_gaps)) - 1]
        ttfts.append(times[0] - at)
        gaps.append(gap)
        kept.append(ttfts[-1] <= promise.ttft and gap <= promise.tbt)
    offline = jobs * (traffic.offline_prompt + traffic.offline_output) / traffic.seconds
    middle, high = sorted(ttfts)[len(ttfts) // 2], sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1]
    return Result(len(kept), sum(kept) / len(kept), middle, high, offline)
