"""The virtual-clock driver: arrivals → EngineCore → a runner that reports its step times. No asyncio, no torch.

It runs the same core, planner and policies as the live engine, as fast as Python allows. The budget search and the
simulator use it. Deterministic for equal arrivals and an equally seeded runner.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from engine.api import EngineRequest, RequestClass, RequestOutput
from engine.core import EngineCore
from engine.errors import RetryableError
from engine.scheduling.offline import OfflinePlan, whole
from engine.scheduling.output import Collect, ModelRunner, ModelRunnerOutput, SchedulerOutput
from predictor.features import BatchFeatures, LatencyPredictor
from predictor.online import StepNoise

PLACEHOLDER_TOKEN = 0


class PredictedRunner:
    """Runner whose steps take the time predicted by a latency model.

    Tokens are placeholders; `max_tokens` sets the lengths. Each step draws one factor of its regime from `noise`.
    `observe` is called with every step.
    """

    def __init__(
        self,
        model: LatencyPredictor,
        noise: StepNoise = (),
        observe: Callable[[BatchFeatures, float], None] | None = None,
        seed: int = 0,
    ) -> None:
        self._model = model
        self._noise = noise
        self._observe = observe
        self._generator = random.Random(seed)

    def launch(self, output: SchedulerOutput) -> Collect:
        features = output.features
        num_sampled = sum(chunk.sample for chunk in output.chunks)
        latency = self._model.predict(features)
        if self._noise:
            regime = min(features.num_tokens.bit_length(), len(self._noise) - 1)
            latency *= self._generator.choice(self._noise[regime])
        if self._observe is not None:
            self._observe(features, latency)
        result = ModelRunnerOutput(output.step_id, [PLACEHOLDER_TOKEN] * num_sampled, None, latency)
        return lambda: result


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and its arrival time, seconds on the virtual clock."""

    at: float
    request: EngineRequest


@dataclass(slots=True)
class VirtualRecord:
    """The history of one online request.

    Attributes:
        token_times: Seconds on the virtual clock.
        ended: Time of its terminal output.
        retry_after: Retry time in seconds that a rejected request was told.
    """

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    ended: float | None = None
    rejected: bool = False
    retry_after: float = 0.0

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.arrival.at if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        times = self.token_times
        return [later - earlier for earlier, later in pairwise(times)]


@dataclass(slots=True)
class VirtualRun:
    """The result of a run. The offline counts include only events inside the window.

    Attributes:
        online: Online requests by arrival.
        offline_tokens: Prompt tokens of offline requests, counted at their first output token, plus output tokens.
        offline_output_tokens: Output tokens of offline requests.
        offline_ended: Offline requests that ended.
        end: Time at which the run ended.
    """

    online: list[VirtualRecord] = field(default_factory=list)
    offline_tokens: int = 0
    offline_output_tokens: int = 0
    offline_ended: int = 0
    steps: int = 0
    end: float = 0.0


class VirtualDriver:
    """Replays ascending arrivals; keeps `backlog` offline requests from `offline` queued.

    Offline requests among the arrivals (offline work at a rate) leave no record. Offline tokens count inside `window`
    (seconds; default: the whole run). `now`: seconds on the virtual clock.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        arrivals: Iterable[Arrival],
        offline: Iterator[EngineRequest] | None = None,
        *,
        backlog: int = 64,
        window: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        self._core = core
        self._runner = runner
        self._arrivals = deque(arrivals)
        self._offline = offline
        self._backlog = backlog
        self._window = window
        self._num_offline = 0
        self._records: dict[str, VirtualRecord] = {}
        self._prompts: dict[str, int] = {}
        self.now = 0.0
        self.run_data = VirtualRun()

    def run(self, seconds: float, drain: float = 0.0) -> VirtualRun:
        """Run until the virtual clock passes `seconds` or no work is left.

        Then run for at most `drain` seconds more, until every online request that has arrived has ended. Offline work
        continues meanwhile.
        """
        run = self.run_data
        plan: OfflinePlan | None = None
        self._arrive()
        while self.now < seconds or (self._records and self.now < seconds + drain):
            self._refill()
            output = self._core.schedule(self.now, plan)
            if output is None and self._core.has_offline:
                output = self._core.schedule(self.now, whole(self._core.plan_offline(self.now)))
            if output is None:
                arrival = self._arrivals[0].at if self._arrivals else math.inf
                later = min(arrival, self._core.retry_at or math.inf)
                if math.isinf(later):
                    break
                self.now = max(self.now, later)
                self._arrive()
                plan = None
                continue
            plan = whole(self._core.plan_offline(self.now)) if self._core.has_offline else None
            self._execute(output)
            run.steps += 1
        run.end = self.now
        return run

    def _execute(self, output: SchedulerOutput) -> None:
        result = self._runner.launch(output)()
        self.now += result.latency
        self._arrive()
        for request_output in self._core.update(output, result, self.now):
            self._take(request_output)

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0].at <= self.now:
            arrival = self._arrivals.popleft()
            if arrival.request.request_class is RequestClass.OFFLINE:
                self._add_offline(arrival.request, arrival.at)
                continue
            record = VirtualRecord(arrival)
            self.run_data.online.append(record)
            try:
                self._core.add_request(arrival.request, arrival.at)
            except RetryableError as error:
                record.rejected, record.retry_after = True, error.retry_after
            else:
                self._records[arrival.request.request_id] = record

    def _refill(self) -> None:
        while self._offline is not None and self._num_offline < self._backlog:
            request = next(self._offline, None)
            if request is None:
                self._offline = None
                return
            assert request.request_class is RequestClass.OFFLINE
            self._add_offline(request, self.now)

    def _add_offline(self, request: EngineRequest, at: float) -> None:
        self._core.add_request(request, at)
        self._prompts[request.request_id] = len(request.prompt_token_ids)
        self._num_offline += 1

    def _take(self, output: RequestOutput) -> None:
        record = self._records.get(output.request_id)
        if record is not None:
            record.token_times.extend([self.now] * len(output.token_ids))
            if output.finish_reason is not None:
                record.ended = self.now
                del self._records[output.request_id]
            return
        if self._window[0] <= self.now <= self._window[1]:
            self.run_data.offline_tokens += len(output.token_ids)
            self.run_data.offline_output_tokens += len(output.token_ids)
            self.run_data.offline_ended += output.finish_reason is not None
            if 0 < output.num_output_tokens == len(output.token_ids):
                self.run_data.offline_tokens += self._prompts[output.request_id]
        if output.finish_reason is not None:
            del self._prompts[output.request_id]
            self._num_offline -= 1
