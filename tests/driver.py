"""Drives an EngineCore and a runner by hand: a virtual clock, the pipeline's depth, and integrity after every move.

Steps are launched as soon as they are scheduled, as the engine's loop does.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fakes.runner import FakeRunner
from integrity import check_core

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput, SamplingParams
from engine.cache.snapshots import snapshots_of
from engine.client import EngineStats, OutputStream
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import TidemillError
from engine.limits import SchedulerConfig
from engine.loop.planner import may_run_ahead
from engine.request import Request
from engine.scheduling.moving import Moves
from engine.scheduling.offline import whole
from engine.scheduling.output import Collect, ModelRunner, ModelRunnerOutput, SchedulerOutput
from engine.scheduling.report import report_stats
from loadgen.simulation.policies import find_policy


def make_request(
    request_id: str,
    prompt: list[int] | tuple[int, ...],
    max_tokens: int = 4,
    *,
    request_class: RequestClass = RequestClass.ONLINE,
    salt: bytes = b"",
    tenant: str = "",
    lane: Lane = Lane.BATCH,
    **sampling: object,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return EngineRequest(request_id, tuple(prompt), params, request_class, salt, tenant=tenant, lane=lane)


def small_config(num_blocks: int, **changes: Any) -> SchedulerConfig:
    """A pool of so many blocks of four tokens, for eight rows and 24 tokens in a step."""
    usual = {"max_model_len": 100, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24, "unit_bytes": 1}
    return SchedulerConfig(num_units=2 * num_blocks, **usual | changes)


def picture(core: EngineCore, now: float) -> str:
    """Queues and pool in full, for a failure."""
    scheduler = core.state
    cache, pool, objective = scheduler.cache, scheduler.cache.device, scheduler.objective
    lines = [
        f"now {now:.6f}, {len(scheduler.in_flight)} in flight, retry_at {core.retry_at}",
        f"share {scheduler.offline_share}",
        f"{scheduler.config}",
        f"{objective}",
        f"policy {scheduler.online_policy}",
        f"units: {pool.num_units} total, {pool.num_free_units} free, {pool.num_cached_units} cached "
        f"({pool.num_cached_online_units} online), {pool.num_owned_units} owned, {pool.num_deferred_units} deferred, "
        f"host {cache.host.num_free_units} of {cache.host.num_units} free, hidden blocks {cache.num_compact}; "
        f"free rows {scheduler.free_rows}",
    ]
    for title, requests in (
        ("running online", scheduler.running[RequestClass.ONLINE]),
        ("running offline", scheduler.running[RequestClass.OFFLINE]),
        ("waiting online", scheduler.waiting_online),
        ("waiting offline", list(scheduler.waiting_offline.candidates())),
        ("quarantined", scheduler.quarantined),
    ):
        lines.append(f"{title}:")
        lines += [f"  {_portrait(request, now)}" for request in requests]
    lines.append(f"a fresh plan: {whole(core.plan_offline(now))}")
    return "\n".join(lines)


def _portrait(request: Request, now: float) -> str:
    held = [f"{b.entry.tier.value[0]}{b.entry.kind.value[0]}{b.ref_count}" for b in request.cache_map.blocks]
    return (
        f"{request.request_id} #{request.arrival_order} {request.status.value} {request.spec.lane.name} "
        f"tenant '{request.spec.tenant}' row {request.row}: {len(request.token_ids)} tokens "
        f"({request.num_prompt_tokens} + {request.num_output_tokens} of {request.spec.sampling.max_tokens}), computed "
        f"{request.num_computed_tokens}, parked {request.cache_map.num_parked_tokens}, "
        f"placeholders {request.num_placeholders}, last step {request.last_step}, "
        f"preempted {request.num_preemptions} times, not before "
        f"{request.not_before - now:+.3f}, arrived {request.times.arrival - now:+.3f}, blocks [{' '.join(held)}]"
    )


class Driver:
    """`outputs` collects the tokens of every request, `finals` the terminal output of every ended one.

    `check_every`: steps from one look at the core's integrity to the next, for runs of thousands of steps."""

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig,
        *,
        check_every: int = 1,
        online_policy: str = "fcfs",
        **core_options: Any,
    ) -> None:
        snapshots = snapshots_of(config, core_options.get("model"))
        self.core = EngineCore(config, online_policy=find_policy(online_policy), snapshots=snapshots, **core_options)
        self.moves = Moves(self.core.state, self.core.recovery)
        self.check_every = check_every
        self.runner = runner
        self.now = 0.0
        self.in_flight: deque[SchedulerOutput] = deque()
        self.most_in_flight = 0
        self.poisoned: list[SchedulerOutput] = []
        self._launched: dict[int, Collect | Exception] = {}
        self.steps: list[SchedulerOutput] = []
        self.outputs: dict[str, list[int]] = {}
        self.finals: dict[str, RequestOutput] = {}

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.core.add_request(request, self.now)
            self.outputs[request.request_id] = []

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        output = self.core.abort(request_id, self.now, reason)
        if output is not None:
            self._take(output)
        check_core(self.core)

    def launch(self) -> bool:
        """Schedule one step if the pipeline has room.

        Liveness: every request that was accepted could run alone on this pool, so with none in flight one must run,
        now or at a time that the core names (`retry_at`).
        """
        waits = self.core.state.speculation is not None and not may_run_ahead(self.core.state)
        if waits or len(self.in_flight) > self.core.config.pipeline_depth:
            return False
        output = self.core.schedule(self.now, whole(self.core.plan_offline(self.now)))
        self._check_integrity()
        if output is None:
            live = self.in_flight or not self.core.has_requests or self._rest > 0.0
            assert live, "requests are left but nothing can run\n" + picture(self.core, self.now)
            return False
        self.in_flight.append(output)
        try:
            self._launched[output.step_id] = self.runner.launch(output)
        except (RuntimeError, TidemillError) as error:
            self._launched[output.step_id] = error
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self.steps.append(output)
        return True

    def result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Return the runner's result of a step in flight, once."""
        launched = self._launched.pop(output.step_id)
        if isinstance(launched, Exception):
            raise launched
        return launched()

    @property
    def _rest(self) -> float:
        """Seconds until the core wants to be asked again."""
        return 0.0 if self.core.retry_at is None else self.core.retry_at - self.now

    def complete(self) -> None:
        """Update the oldest step in flight. Steps that were built on one that failed are not asked for."""
        output = self.in_flight.popleft()
        self.now += 1.0 if output.predicted_latency is None else output.predicted_latency
        result = None
        try:
            if output in self.poisoned:
                raise RuntimeError("built on a step that failed")
            result = self.result(output)
        except (RuntimeError, TidemillError):
            if output not in self.poisoned:
                self.poisoned = list(self.in_flight)
        for request_output in self.core.update(output, result, self.now):
            self._take(request_output)
        self._check_integrity()

    def _check_integrity(self) -> None:
        if len(self.steps) % self.check_every == 0:
            check_core(self.core)

    def step(self) -> bool:
        """Fill the pipeline, then complete its oldest step; False when nothing could run."""
        while self.launch():
            pass
        if not self.in_flight and self._rest > 0.0:
            self.now += self._rest
            self.launch()
        if not self.in_flight:
            return False
        self.complete()
        return True

    def run(self, max_steps: int = 20_000) -> None:
        """Step until idle; everything must have ended and nothing may be left allocated."""
        for _ in range(max_steps):
            if not self.step():
                break
        assert not self.core.has_requests, "requests are left but nothing can run\n" + picture(self.core, self.now)
        stats = self.stats()
        assert stats.units_owned == 0
        assert stats.units_free + stats.units_cached == stats.units_total
        assert stats.host_units_used == stats.host_units_cached and stats.hidden_blocks == 0

    def run_all(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Add a prompt before each step, every fifth as offline work; return the outputs. The ids are the places."""
        for index, prompt in enumerate(prompts):
            request_class = RequestClass.OFFLINE if index % 5 == 4 else RequestClass.ONLINE
            self.add(make_request(str(index), prompt, max_tokens, request_class=request_class))
            self.step()
        self.run()
        return [self.outputs[str(index)] for index in range(len(prompts))]

    def stats(self) -> EngineStats:
        return report_stats(self.core.state)

    def _take(self, output: RequestOutput) -> None:
        assert output.request_id not in self.finals, "an output after the terminal one"
        self.outputs[output.request_id].extend(output.token_ids)
        if output.finish_reason is not None:
            self.finals[output.request_id] = output


def fake_driver(config: SchedulerConfig, vocab_size: int, faults: Any = MappingProxyType({}), **core: Any) -> Driver:
    """A driver of the checking fake runner with the cache that the settings say; `faults`: further options of it."""
    names = ("block_size", "scratch_blocks", "host_units", "window", "state_slots", "host_state_slots")
    cache = {name: getattr(config, name) for name in names}
    return Driver(FakeRunner(vocab_size=vocab_size, **cache, **faults), config, **core)


async def submit_one(engine: Engine, request: EngineRequest) -> OutputStream:
    (stream,) = await engine.submit([request])
    return stream


async def outputs_of(engine: Engine, request: EngineRequest) -> AsyncIterator[RequestOutput]:
    async for output in await submit_one(engine, request):
        yield output


async def until(condition: Callable[[], bool], pause: float = 0.001) -> None:
    """Wait for a state without an event."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(pause)


def is_error(output: RequestOutput, kind: type[TidemillError]) -> bool:
    return output.error is not None and isinstance(output.error.to_error(), kind)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
