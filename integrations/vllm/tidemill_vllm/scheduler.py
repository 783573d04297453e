"""A scheduler of vLLM that plans every step by predicted time.

The class calls vLLM's own `schedule()` and never copies it. Before each call it chooses the order of `running`, the
offline requests that are left out for one step, and the number of tokens. After the call everything is restored.
Offline requests are preempted before it, if online work needs their blocks or rows.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.request import Request, RequestStatus

from predictor.features import BatchFeatures
from predictor.profile import ProfileKey
from tidemill_vllm.learning import Learner, Script, chunk_limit
from tidemill_vllm.options import Options, missing, refusal
from tidemill_vllm.plan import EASY_SHARE, IDLE_SHARE, Decode, Limits, Load, Planner, Prompt, StepPlan
from tidemill_vllm.promises import Promises
from tidemill_vllm.status import StatusFile

log = logging.getLogger("vllm.tidemill")

ONLINE_LOOKAHEAD, OFFLINE_LOOKAHEAD = 32, 8
"""Waiting requests that a plan looks at. vLLM's heap yields each in logarithmic time."""
STATUS_SECONDS = 1.0
REPORT_SECONDS = 60.0
PROBE = "tidemill-probe-"
_BAG = ("max_num_running_reqs", "max_num_active_reqs")

clock: Callable[[], float] = time.monotonic
wall: Callable[[], float] = time.time


class _Step(NamedTuple):
    features: BatchFeatures
    launched: float
    seconds: float  # expected
    is_probe: bool
    is_online: bool


if TYPE_CHECKING:
    _Base = Any  # the scheduler below it, which vLLM does not type
else:
    _Base = object


class Colocated(_Base):
    """Mixin above a scheduler of vLLM."""

    max_num_scheduled_tokens: int

    def __init__(self, options: Options, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._promises = Promises(options.slo)
        config: Any = self.vllm_config
        steps = getattr(config, "max_concurrent_batches", 2 if config.scheduler_config.async_scheduling else 1)
        block = self.block_size if getattr(self, "need_mamba_block_aligned_split", False) else 1
        self._limits = Limits(self.max_num_scheduled_tokens, self._promises.ttft, self._promises.tbt, steps, block)
        key = _key(config)
        path = None if options.fit_dir is None else options.fit_dir / key.filename()
        self._learner = Learner(self.max_num_scheduled_tokens, _graph_sizes(config), path, key)
        self._planner = Planner(self._learner.model, self._limits)
        self._steps: deque[_Step] = deque()
        self._updated, self._had_work, self._busy_until = 0.0, False, 0.0
        self._offset = wall() - clock()
        sweeps = options.sweep_seconds > 0.0 and not self._learner.is_fitted
        self._sweep = _Sweep(self, options.sweep_seconds) if sweeps else None
        self._status = StatusFile(str(getattr(config, "instance_id", "")))
        self._counts = _Counts()
        self._said = self._told = clock()
        log.info("tidemill: promise %s; offline work has a priority above 0", options.slo)

    # ---- one step

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = clock()
        if not self._had_work:
            self._updated = now
        self._learner.adopt()
        if self._sweep is not None:
            if (tokens := self._sweep.next(now)) is not None:
                return self._call(tokens, [], lambda: super(Colocated, self).schedule(*args, **kwargs), now)
            self._sweep = None
            self._learner.end_sweep()
        began = max(now, self._busy_until)  # with steps in flight this one starts behind them
        plan, left_out = self._plan(began)
        output = self._call(plan.tokens, left_out, lambda: super(Colocated, self).schedule(*args, **kwargs), began)
        self._counts.planned += clock() - now
        return output

    def _call(self, tokens: int, left_out: list[Any], schedule: Callable[[], Any], began: float) -> Any:
        """Call vLLM's `schedule` with these limits, and restore them."""
        kept = {name: getattr(self, name) for name in _BAG if hasattr(self, name)}
        most = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(tokens, most)
        for name, value in kept.items():
            setattr(self, name, value - len(left_out))
        try:
            output = schedule()
        finally:
            self.running.extend(left_out)
            self.max_num_scheduled_tokens = most
            for name, value in kept.items():
                setattr(self, name, value)
        if output.total_num_scheduled_tokens:
            self._note(output, began)
        return output

    def _plan(self, now: float) -> tuple[StepPlan, list[Any]]:
        """Order `running`, remove the offline requests that must not run now, and return the plan and those."""
        online, offline = _split(self.running)
        waiting = self._waiting(ONLINE_LOOKAHEAD) if self._heads_online() else []
        decoding, prompting, ended = self._by_kind(online)
        offline.sort(key=_by_age)
        starting = self._make_room(online, waiting, offline)
        more, partial, also_ended = self._by_kind(offline)
        fresh = [] if waiting else self._startable()
        load = Load(
            now,
            [self._decode(request, now) for request in decoding],
            [self._prompt(request) for request in (*prompting, *starting)],
            [Decode(request.num_computed_tokens, self._wants(request)) for request in more],
            [Prompt(request.num_computed_tokens, self._wants(request)) for request in (*partial, *fresh)],
            len(partial),
            bool(waiting),
        )
        plan = self._planner.plan(load, self._promises.share(now), self._cap(load))
        runs = more[: plan.num_decodes], partial[: plan.num_prompts]
        left_out = [*more[plan.num_decodes :], *partial[plan.num_prompts :]]
        self.running[:] = [*decoding, *runs[0], *prompting, *runs[1], *ended, *also_ended]
        self._counts.left_out += len(left_out)
        return plan, left_out

    def _cap(self, load: Load) -> int:
        most: int = self.max_num_scheduled_tokens
        if not (load.offline_decodes or load.offline_prompts):
            return most
        online = sum(decode.wants for decode in load.decodes) + sum(prompt.length for prompt in load.prompts)
        return min(most, max(self._learner.cap(most), online))

    def _by_kind(self, requests: Iterable[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return decodes, prompts, and requests whose last token is in flight."""
        decodes: list[Any] = []
        prompts: list[Any] = []
        ended: list[Any] = []
        most = 1 + self.num_spec_tokens
        for request in requests:
            wants = self._wants(request)
            (prompts if wants > most else decodes if wants > 0 else ended).append(request)
        return decodes, prompts, ended

    @staticmethod
    def _wants(request: Any) -> int:
        placeholders = request.num_output_placeholders
        if (
            placeholders
            and request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0
        wants: int = request.num_tokens_with_spec + placeholders - request.num_computed_tokens
        return wants

    def _decode(self, request: Any, began: float) -> Decode:
        """Return an online decode of a step that begins at `began`; a token in flight is emitted about then."""
        own = request.request_id
        due, gap = self._promises.first_due(own), self._promises.gap(own)
        if request.num_output_placeholders:
            due = max(due, began + gap)
        return Decode(request.num_computed_tokens, self._wants(request), due, gap)

    def _prompt(self, request: Any) -> Prompt:
        return Prompt(request.num_computed_tokens, self._wants(request), self._promises.first_due(request.request_id))

    # ---- queues and memory

    def _heads_online(self) -> bool:
        return bool(self.waiting) and self.waiting.peek_request().priority <= 0

    def _waiting(self, count: int) -> list[Any]:
        """Return the first waiting online requests."""
        found = []
        for request in islice(self.waiting, count):
            if request.priority > 0:
                break
            found.append(request)
        return found

    def _startable(self) -> list[Any]:
        """Return the first waiting offline requests that memory and rows admit, a block left for each running one."""
        rows = min(OFFLINE_LOOKAHEAD, self.max_num_running_reqs - len(self.running))
        if rows < 1 or not self.waiting:
            return []
        free, found = self._num_free_blocks() - len(self.running), []
        for request in islice(self.waiting, rows):
            free -= self._num_blocks(request, self._wants(request)) + 1
            if free < 0:
                break
            found.append(request)
        return found

    def _num_free_blocks(self) -> int:
        number: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return number

    def _num_blocks(self, request: Any, tokens: int) -> int:
        """Return the new blocks of all cache groups for the next tokens. A cached prefix is not foreseen."""
        size: int = self.block_size
        done: int = request.num_computed_tokens
        return (-(-(done + tokens) // size) - -(-done // size)) * self._num_groups

    @property
    def _num_groups(self) -> int:
        return max(1, len(self.kv_cache_config.kv_cache_groups))

    def _make_room(self, online: Sequence[Any], waiting: Sequence[Any], offline: list[Any]) -> list[Any]:
        """Preempt offline requests, youngest first, until online work has blocks and rows.

        Return the waiting requests that start.
        """
        need = sum(self._num_blocks(request, max(0, self._wants(request))) for request in online)
        starting: list[Any] = []
        for request in waiting:
            blocks = self._num_blocks(request, self._wants(request)) + 1
            if not self._give_up(need + blocks, len(starting) + 1, offline):
                break
            need += blocks
            starting.append(request)
        if not waiting:
            self._give_up(need, 0, offline)
        return starting

    def _give_up(self, blocks: int, rows: int, offline: list[Any]) -> bool:
        """Preempt offline requests until `blocks` are free and `rows` more requests may run.

        Return whether both hold.
        """
        while self._num_free_blocks() < blocks or len(self.running) + rows > self.max_num_running_reqs:
            victim = next((request for request in reversed(offline) if self._may_free(request)), None)
            if victim is None:
                return False
            offline.remove(victim)
            self.running.remove(victim)
            self._preempt_request(victim, clock())
            self._counts.preempted += 1
        return True

    def _may_free(self, request: Any) -> bool:
        check = getattr(self, "_request_blocks_can_be_freed", None)  # vLLM 0.30 and newer
        return check is None or check(request)

    # ---- learning and judging

    def _note(self, output: Any, began: float) -> None:
        features, online, offline, is_probe = BatchFeatures(), [], 0, False
        most = 1 + self.num_spec_tokens
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens - tokens
            if tokens <= most:
                features.add_decodes(tokens, tokens * (start + 1) + tokens * (tokens - 1) // 2)
            else:
                features.add_chunk(start, tokens)
            if request.priority > 0:
                offline += tokens
            else:
                online.append(request_id)
                is_probe = is_probe or request_id.startswith(PROBE)
        if offline:
            late = self._waiting(ONLINE_LOOKAHEAD) if self._heads_online() else ()
            self._promises.mark_beside([*online, *(request.request_id for request in late)])
        self._counts.offline_tokens += offline
        self._counts.tokens += features.num_tokens
        seconds = self._learner.model.expected(features)
        self._steps.append(_Step(features, clock(), seconds, is_probe, bool(online)))
        self._busy_until = began + seconds

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now = clock()
        produced = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens and self._steps:
            self._observe(self._steps.popleft(), now)
        for outputs in produced.values():
            for each in outputs.outputs:
                self._promises.emitted(
                    each.request_id, len(each.new_token_ids), now, is_last=each.finish_reason is not None
                )
        self._updated, self._had_work = now, bool(self.running or self.waiting or self._steps)
        self._busy_until = now + sum(step.seconds for step in self._steps)
        if now - self._said > STATUS_SECONDS:
            self._tell(now)
        return produced

    def _observe(self, step: _Step, now: float) -> None:
        measured = now - self._updated
        if step.is_probe or self._sweep is not None:
            if self._sweep is not None:
                self._learner.measured(step.features, measured)
            return
        host = 0.0 if self._steps else max(0.0, step.launched - self._updated)
        easy = EASY_SHARE * min(self._limits.tbt, IDLE_SHARE * self._limits.ttft)
        over = self._learner.observe(step.features, measured, host, easy)
        self._counts.steps += 1
        if step.is_online:
            self._promises.record_step(now, over)
            self._counts.over += over > 0.0

    def add_request(self, request: Any) -> None:
        own = request.request_id
        if request.priority <= 0 and own not in self.requests and not own.startswith(PROBE):
            params = request.sampling_params
            self._promises.add(own, request.arrival_time - self._offset, None if params is None else params.extra_args)
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)
        if request_ids is None:
            self._promises.forget_all()
        else:
            for own in [request_ids] if isinstance(request_ids, str) else request_ids:
                self._promises.forget(own)
        return ended

    def has_requests(self) -> bool:
        return self._sweep is not None or super().has_requests()

    def shutdown(self) -> None:
        self._learner.close()
        self._status.remove()
        super().shutdown()

    def _tell(self, now: float) -> None:
        counts, learner = self._counts, self._learner
        span, self._said = now - self._said, now
        status = {
            "slo": str(self._promises.slo),
            "classes": self._promises.status(now),
            "attainment": self._promises.attainment(now),
            "share": self._promises.share(now),
            "model_error": learner.model.mape,
            "is_fitted": learner.is_fitted,
            "offline_tokens_per_second": counts.offline_tokens / span,
            "tokens_per_second": counts.tokens / span,
            "running": len(self.running),
            "offline_running": sum(request.priority > 0 for request in self.running),
            "offline_waiting": len(self.waiting) if not self._heads_online() else 0,
            "most_rows": self.max_num_running_reqs,
            "left_out": counts.left_out,
            "preempted": counts.preempted,
            "planning_ms": 1e3 * counts.planned / max(1, counts.steps),
        }
        self._status.write(status)
        if now - self._told > REPORT_SECONDS:
            self._told = now
            log.info("tidemill: %s", ", ".join(f"{name} {value}" for name, value in status.items()))
        self._counts = _Counts()


class _Counts:
    """Sums since the last status."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.offline_tokens = self.left_out = self.preempted = self.over = 0
        self.planned = 0.0


class _Sweep:
    """Probe requests that show the step times before the first request arrives. A real request ends the sweep."""

    def __init__(self, scheduler: Any, seconds: float) -> None:
        config = scheduler.vllm_config
        self._scheduler, self._seconds, self._until = scheduler, seconds, 0.0
        self._most = scheduler.max_num_scheduled_tokens
        self._vocabulary = config.model_config.get_vocab_size()
        script = Script.of(scheduler.max_num_running_reqs, self._most, config.model_config.max_model_len)
        self._groups = deque(script)
        self._random = random.Random(0)
        self._number = 0
        self._hasher: Any = None

    def next(self, now: float) -> int | None:
        """Return the token limit of the next probe step, or None at the end of the sweep."""
        scheduler = self._scheduler
        self._until = self._until or now + self._seconds
        probes = [own for own in scheduler.requests if own.startswith(PROBE)]
        if len(probes) < len(scheduler.requests) or now > self._until or not (probes or self._groups):
            if probes:
                scheduler.finish_requests(probes, RequestStatus.FINISHED_ABORTED)
            return None
        if not probes:
            self._add(*self._groups.popleft())
        return chunk_limit(self._most, self._random)

    def _add(self, count: int, length: int, output: int) -> None:
        scheduler = self._scheduler
        room = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() // max(1, scheduler._num_groups)
        count = max(1, min(count, room * scheduler.block_size // (length + output + scheduler.block_size)))
        for _ in range(count):
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            prompt = [self._random.randrange(self._vocabulary) for _ in range(length)]
            self._number += 1
            own = f"{PROBE}{self._number}"
            scheduler.add_request(Request(own, prompt, params, None, block_hasher=self._block_hasher()))

    def _block_hasher(self) -> Any:
        """Return the function with which vLLM hashes blocks, or None without prefix caching."""
        cache = self._scheduler.vllm_config.cache_config
        if self._hasher is None and cache.enable_prefix_caching:
            from vllm.utils.hashing import get_hash_fn_by_name
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

            function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
            init_none_hash(function)
            size = getattr(self._scheduler, "hash_block_size", None) or self._scheduler.block_size
            self._hasher = get_request_block_hasher(size, function)
        return self._hasher


def _split(running: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    online: list[Any] = []
    offline: list[Any] = []
    for request in running:
        (offline if request.priority > 0 else online).append(request)
    return online, offline


def _by_age(request: Any) -> tuple[int, float]:
    return request.priority, request.arrival_time


def _graph_sizes(config: Any) -> tuple[int, ...]:
    """Return the token counts to which CUDA graphs pad decodes; empty without graphs."""
    compilation = config.compilation_config
    mode = str(getattr(compilation, "cudagraph_mode", "NONE"))
    if mode.endswith("NONE") or config.model_config.enforce_eager:
        return ()
    return tuple(sorted(set(getattr(compilation, "cudagraph_capture_sizes", None) or ())))


def _key(config: Any) -> ProfileKey:
    """Return the identity of a fit: whatever changes the time of a step."""
    model, parallel = config.model_config, config.parallel_config
    device = _device_name()
    layout = f"tp{parallel.tensor_parallel_size}"
    kind = f"{model.dtype} {model.quantization or ''}".strip()
    return ProfileKey(str(model.model), f"{device} {layout}", kind, f"vllm {vllm.__version__}")


def _device_name() -> str:
    import os

    from vllm.platforms import current_platform

    try:
        name = str(current_platform.get_device_name())
    except Exception:  # not every platform has names
        name = str(current_platform.device_type)
    return f"{name}, {os.cpu_count()} threads" if current_platform.is_cpu() else name


class _Async(Colocated, AsyncScheduler):
    pass


class _Sync(Colocated, SyncScheduler):
    pass


def make(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a colocating scheduler, or vLLM's own with one line in the log if this engine is not supported."""
    options = Options.of(vllm_config)
    is_async = vllm_config.scheduler_config.async_scheduling
    own: type[Any] = AsyncScheduler if is_async else SyncScheduler
    reason = refusal(vllm_config, vllm.__version__)
    if reason is None:
        try:
            found = (_Async if is_async else _Sync)(options, vllm_config, *args, **kwargs)
        except AttributeError as error:
            reason = f"this release of vLLM lacks {error.name}"
        else:
            if (name := missing(found)) is None:
                return found
            reason = f"this release of vLLM lacks {name}"
    log.warning("tidemill: vLLM's own scheduler runs: %s", reason)
    return own(vllm_config, *args, **kwargs)
