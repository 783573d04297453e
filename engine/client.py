"""The engine as its clients see it: the client protocol, facts about the model, statistics, and their sums.

`Figures` adds the statistics of the successive processes of one engine, `total` those of several engines.
"""

import enum
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput, TokenCosts
from engine.forms import EmbeddingSpec
from predictor.slo import Standing

COUNTER, GAUGE, MEAN, COMBINED = ({"adds": way} for way in ("always", "engines", "mean", "otherwise"))
"""How `Figures` and `total` add a field: over processes and engines; over engines only; as the mean of the engines; by
code of its own. A field of `EngineStats` without such a mark is a counter."""


class ClassStanding(NamedTuple):
    """How the promise of one service class was kept."""

    name: str
    promise: str  # objectives in the syntax of the SLO
    attainment: float  # share of good requests among the last judged ones; NaN: none


@dataclass(frozen=True, slots=True)
class ColocationStats:
    """SLO attainment and the offline budget. Times are in seconds."""

    slo: str
    attainment: float  # share of good requests among the last judged ones; NaN: none
    good_requests: int = field(metadata=COUNTER)
    bad_requests: int = field(metadata=COUNTER)
    objectives: tuple[Standing, ...]
    online_rate: float = field(metadata=GAUGE)  # recent online requests/s, including refused ones
    policy: str
    rule: str
    latency_budget: float = field(metadata=MEAN)
    interference_weight: float = field(metadata=MEAN)
    decode_value: float = field(metadata=MEAN)
    breaker: str
    breaker_cause: str | None
    breaker_openings: int = field(metadata=COUNTER)
    predictor_mape: float = field(metadata=MEAN)  # mean relative error over the last steps
    offline_tokens: int = field(metadata=COUNTER)
    budget_origin: str  # source of the budget
    # share of the budget that offline work may use beside online work, 0 to 1
    offline_share: float = field(metadata=MEAN)
    held: str  # reason, other than the breaker, why `offline_share` is 0; "" if there is none
    overrun: float = 0.0  # mean time of steps beside the prediction and its margin, as a share of the step limit
    model_refits: int = field(default=0, metadata=COUNTER)  # new fits of the latency model that replaced it
    model_refits_refused: int = field(default=0, metadata=COUNTER)  # new fits that were not better
    refit_errors: Mapping[str, float] = field(default_factory=dict)  # mean relative error `before` and `after`
    # searches and baselines, see `LEARNED` of the keeper
    learned: Mapping[str, float] = field(default_factory=dict, metadata=COUNTER)
    # random variation of an aggregate without offline work, as a share, by key of each tolerance; empty before a search
    baseline_noise: Mapping[str, float] = field(default_factory=dict)
    margins: Mapping[int, float] = field(default_factory=dict)  # safety margin of a step by its tokens
    share_limit: str = "none"  # what bounds `offline_share`: none, evidence, brake or breaker
    classes: tuple[ClassStanding, ...] = ()  # the class `default` first
    # requests by class that met their promise
    class_good: Mapping[str, int] = field(default_factory=dict, metadata=COUNTER)
    class_bad: Mapping[str, int] = field(default_factory=dict, metadata=COUNTER)
    class_refused: Mapping[str, int] = field(default_factory=dict, metadata=COUNTER)  # with 429


class LoadReport(NamedTuple):
    """Online load of an engine, for routing. "Queued" requests wait or have prompt tokens left to compute."""

    queued_tokens: int = 0  # prompt tokens left to compute
    queued_units: int = 0  # cache units needed for them beyond the held ones
    queued_requests: int = 0
    running: int = 0  # requests past their prompt
    available_units: int = 0  # units that online work could get
    growth_units: int = 0  # expected peak of additional units, if outputs are as long as recent ones
    num_units: int = 0
    tokens_per_unit: float = 8.0
    tokens_per_step: int = 512
    step_seconds: float = 0.0  # predicted time of a full step; 0 without a latency model
    mean_input: float = 0.0  # tokens of recent online requests
    mean_output: float = 0.0
    offline_tokens: int = 0  # computed for offline requests by this process
    offline_waits: bool = False  # offline requests wait
    time: float = 0.0  # of the report, on the engine's monotonic clock, seconds
    received: int = 0  # requests that this process has received

    @property
    def num_requests(self) -> int:
        """Number of open online requests."""
        return self.queued_requests + self.running


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine of a fleet."""

    engine: int
    state: "EngineState"
    trouble: str | None
    routed: int  # requests routed to it, including those of its earlier processes
    moved: int  # requests moved to other engines because it was gone
    harvest: float  # offline tokens/s
    stats: "EngineStats"
    partner: int | None = None  # the engine with which it forms a pipeline


class PipelineStats(NamedTuple):
    """Pipelines of engines that have dropped layers."""

    pairs: tuple[tuple[int, int], ...]  # (leader, follower); the leader schedules
    drops: int  # pipelines formed
    restores: int  # pipelines dissolved
    failures: int
    too_little: bool  # memory is short and no further engine can drop layers


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot of counters and gauges for /metrics, /ready and the log. Counters never decrease.

    Units are cache units of the pool; a KV block takes two. With several engines, every field but `engines` is a total.
    """

    running: dict[RequestClass, int] = field(default_factory=dict, metadata=GAUGE)
    waiting: dict[RequestClass, int] = field(default_factory=dict, metadata=GAUGE)
    # online requests by number of the LoRA adapter
    running_adapters: dict[int, int] = field(default_factory=dict, metadata=GAUGE)
    waiting_adapters: dict[int, int] = field(default_factory=dict, metadata=GAUGE)
    units_total: int = field(default=0, metadata=GAUGE)
    units_free: int = field(default=0, metadata=GAUGE)
    units_cached: int = field(default=0, metadata=GAUGE)  # hold prefixes that no request uses now
    units_owned: int = field(default=0, metadata=GAUGE)
    host_units_total: int = field(default=0, metadata=GAUGE)  # of the host tier
    host_units_used: int = field(default=0, metadata=GAUGE)
    host_units_cached: int = field(default=0, metadata=GAUGE)  # hold prefixes that no request uses now
    hidden_blocks: int = field(default=0, metadata=GAUGE)  # blocks that are run from hidden state
    # snapshots of recurrent layers, on the device and the host
    state_slots_total: int = field(default=0, metadata=GAUGE)
    state_slots_used: int = field(default=0, metadata=GAUGE)
    cache_units: dict[str, int] = field(default_factory=dict)  # moved or restored units, by operation
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0  # part of `prefix_hit_tokens` from the host tier
    preemptions: dict[str, int] = field(default_factory=dict)  # by cause
    plans: dict[str, int] = field(default_factory=dict)  # of offline work: made, continued, late
    knapsack: dict[str, int] = field(default_factory=dict)  # decisions: waiting requests by form, or passed over
    lanes_waiting: dict[str, int] = field(default_factory=dict, metadata=GAUGE)  # offline requests by lane
    # output so far of unfinished requests, by job
    job_tokens: dict[str, int] = field(default_factory=dict, metadata=GAUGE)
    lanes_started: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    refused_requests: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0  # of both classes
    decode_tokens: int = 0  # of both classes
    forced_tokens: int = 0  # answer tokens set by grammars and thinking budgets, without sampling
    drafted_tokens: int = 0  # guessed tokens that were verified (speculation)
    accepted_tokens: int = 0  # of those, the right ones
    offline_prefill_tokens: int = 0
    offline_decode_tokens: int = 0
    probe_tokens: int = 0  # of probes; in no other counter
    predicted_seconds: float = 0.0
    leftover_seconds: float = 0.0  # predicted step time left to offline work
    leftover_used_seconds: float = 0.0  # part of it that offline work got
    colocation: ColocationStats | None = field(default=None, metadata=COMBINED)
    token_costs: TokenCosts | None = field(default=None, metadata=COMBINED)  # None without a latency model
    restarts: dict[str, int] = field(default_factory=dict, metadata=GAUGE)  # of the engine process, by cause
    resumed_requests: int = field(default=0, metadata=GAUGE)  # requests that continued in another engine process
    engines: tuple[EngineView, ...] = field(default=(), metadata=COMBINED)  # empty with one engine
    pipelines: PipelineStats | None = field(default=None, metadata=COMBINED)  # None if engines cannot drop layers

    @property
    def offline_tokens(self) -> int:
        """Return computed prompt and output tokens of offline requests."""
        return self.offline_prefill_tokens + self.offline_decode_tokens


class DroppableLayers(NamedTuple):
    """Memory that an engine gains by dropping layers."""

    num_layers: int
    layer_bytes: int  # weights of a layer
    unit_layer_bytes: int  # part of a layer in a cache unit
    num_units: int  # cache units with all layers loaded


class SamplingDefaults(NamedTuple):
    """Sampling parameters that a model's checkpoint recommends; None: the usual default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the loaded model and its cache."""

    max_model_len: int
    vocab_size: int  # width of the logits; requests may send any token id below it
    eos_token_ids: frozenset[int]
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    cache_tokens: int = 0  # capacity of the device cache for KV; 0: unknown
    block_size: int = 0  # tokens
    embedding: EmbeddingSpec | None = None  # None: no embeddings
    max_num_seqs: int = 64  # maximum number of requests in a step
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters, in the order of their numbers
    droppable: DroppableLayers | None = None  # None if layers cannot be dropped
    shares_prefixes: bool = True  # between requests
    short_context: int = 0  # longest prompt plus output with longrope's short factors; 0: the model has one set
    scores_prompts: bool = True  # `Pooling.SCORES` is supported
    fallbacks: tuple[str, ...] = ()  # kernels that failed their check at start, one line each
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # for fields that a request does not set
    slo: str = ""  # objectives of online requests by class, in the syntax of --slo

    @property
    def batch_lines(self) -> int:
        """Return the number of batch lines that an engine should hold, so that it never runs out of offline work."""
        return 4 * self.max_num_seqs


class EngineState(enum.Enum):
    """State of an engine."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"  # alive but failing; see `EngineClient.trouble`
    DRAINING = "draining"
    DEAD = "dead"  # permanently stopped


class OutputStream(Protocol):
    """Asynchronous iterator over the outputs of a request, up to the terminal one.

    An earlier `aclose` aborts the request at once, even if nothing has been read. `aclose` is idempotent.
    """

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...

    def send_directly(self, send: Callable[[RequestOutput], bool]) -> None:
        """Pass each output of an online stream, but the last, to `send` while the reader waits for it. An output for
        which `send` returns False goes to the reader."""


class EngineClient(Protocol):
    """Client of an engine or a fleet. Every accepted request ends in exactly one terminal `RequestOutput`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def trouble(self) -> str | None:
        """Return the reason, for an operator, why a started engine is not ready, or None."""
        ...

    async def start(self) -> None:
        """Start the engine loop and run a warm-up step; return when the engine is ready."""
        ...

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait at most `drain_seconds` for running ones, abort the rest, and stop."""
        ...

    async def submit(self, requests: Sequence[EngineRequest]) -> Sequence[OutputStream]:
        """Queue requests, all or none, and return their streams in the same order.

        Raise InvalidRequestError, QueueFullError or EngineUnavailableError. After an error or a cancellation of the
        call, no request is queued.
        """
        ...

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request at once; its stream yields a terminal output with `reason`. Unknown ids are ignored."""
        ...

    def set_lane(self, job: str, lane: Lane) -> None:
        """Move the queued offline requests of a job to a lane. Unknown jobs are ignored."""
        ...

    async def stats(self) -> EngineStats: ...

    async def wait_dead(self) -> str:
        """Wait until the engine is permanently dead, so that only a restart of the server helps; return the reason."""
        ...

    async def renew(self, *, anyway: bool = False) -> str:
        """Restart the engine if its weights or code have changed on disk, or if `anyway`; return a description.

        Raise ConfigError or EngineUnavailableError, without any change, if the new version cannot take over.
        """
        ...

    def kill(self) -> None:
        """Kill the engine's other processes at once; for a server that exits without waiting."""
        ...


def _marked(kind: type[Any], mark: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.metadata == mark)


GAUGES = _marked(EngineStats, GAUGE)
COUNTERS = tuple(each.name for each in fields(EngineStats) if not each.metadata)
COLOCATION_COUNTERS = _marked(ColocationStats, COUNTER)
_BREAKER = ("closed", "half_open", "open")


class Figures:
    """The statistics of all processes of one engine as if they were one, so that counters do not fall at a restart.

    `last`: the last answer of the current process; `restarts`: restarts by cause.
    """

    def __init__(self) -> None:
        self.last = EngineStats()
        self.restarts: Counter[str] = Counter()
        self._before = EngineStats()

    def process_ended(self) -> None:
        """Add the counters of the ended process to the total; those of the next process begin at zero."""
        self._before = _continued(self._before, self.last)
        colocation = self.last.colocation
        zeros: dict[str, Any] = {name: type(getattr(colocation, name))() for name in COLOCATION_COUNTERS if colocation}
        self.last = replace(
            self.last,
            **{name: getattr(EngineStats(), name) for name in COUNTERS},
            colocation=colocation and replace(colocation, **zeros),
        )

    def total(self, resumed: int) -> EngineStats:
        """Return the sum over all processes. `resumed`: number of requests that another process continued."""
        stats = _continued(self._before, self.last)
        return replace(stats, restarts=dict(self.restarts), resumed_requests=resumed)


def _continued(before: EngineStats, last: EngineStats) -> EngineStats:
    """Return the statistics of a process with the counters of the processes before it added."""
    counters = {name: _added([getattr(before, name), getattr(last, name)]) for name in COUNTERS}
    colocation = last.colocation or before.colocation
    if before.colocation is not None and last.colocation is not None:
        both = (before.colocation, last.colocation)
        sums = {name: _added(list(map(attrgetter(name), both))) for name in COLOCATION_COUNTERS}
        colocation = replace(last.colocation, **sums)
    return replace(last, **counters, colocation=colocation)


def total(views: Sequence[EngineView]) -> EngineStats:
    """Return the total of all engines, with each engine in `engines`. Objectives are those of the worst engine."""
    stats = [view.stats for view in views]
    added = {name: _added([getattr(each, name) for each in stats]) for name in (*COUNTERS, *GAUGES)}
    colocation = [each.colocation for each in stats if each.colocation is not None]
    costs = [each.token_costs for each in stats if each.token_costs is not None]
    return EngineStats(
        **added,
        colocation=_together(colocation) if colocation else None,
        token_costs=_side_by_side(costs) if costs else None,
        engines=tuple(views),
    )


def info_of_all(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the info of the fleet: the shortest context limit and the sum of the caches."""
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        cache_tokens=sum(info.cache_tokens for info in infos),
    )


def _added(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        counts: Counter[Any] = Counter()
        for value in values:
            counts.update(value)
        return dict(counts)
    return sum(values)


def _side_by_side(costs: Sequence[TokenCosts]) -> TokenCosts:
    """Return the seconds per token of all engines computing in parallel."""
    return TokenCosts(*(1.0 / sum(1.0 / value for value in values) for values in zip(*costs, strict=True)))


def _together(stats: Sequence[ColocationStats]) -> ColocationStats:
    """Combine co-location statistics.

    Counts and rates are added, settings are averaged, and attainment is weighted by requests. Each objective has the
    standing of the engine that is furthest from meeting it.
    """
    weights = [each.good_requests + each.bad_requests for each in stats]
    worst = max(stats, key=lambda each: _BREAKER.index(each.breaker) if each.breaker in _BREAKER else -1)
    summed = (*COLOCATION_COUNTERS, *_marked(ColocationStats, GAUGE))
    figures: dict[str, Any] = {name: _added(list(map(attrgetter(name), stats))) for name in summed}
    figures |= {name: _mean(map(attrgetter(name), stats)) for name in _marked(ColocationStats, MEAN)}
    return replace(
        stats[0],
        **figures,
        attainment=_mean([each.attainment for each in stats], weights),
        objectives=tuple(_objectives(stats)),
        classes=tuple(_class_together(stats, index) for index in range(len(stats[0].classes))),
        breaker=worst.breaker,
        breaker_cause=worst.breaker_cause,
        held=next((each.held for each in stats if each.held), ""),
        overrun=max(each.overrun for each in stats),
    )


def _class_together(stats: Sequence[ColocationStats], index: int) -> ClassStanding:
    name = stats[0].classes[index].name
    weights = [each.class_good.get(name, 0) + each.class_bad.get(name, 0) for each in stats]
    shares = [each.classes[index].attainment for each in stats]
    return stats[0].classes[index]._replace(attainment=_mean(shares, weights))


def _objectives(stats: Sequence[ColocationStats]) -> Iterable[Standing]:
    names = dict.fromkeys(standing.objective for each in stats for standing in each.objectives)
    for name in names:
        standings = [standing for each in stats for standing in each.objectives if standing.objective == name]
        yield max(standings, key=_distance)


def _distance(standing: Standing) -> float:
    """Return an objective's value relative to its bound; -1 if unknown."""
    share = standing.value / standing.bound if standing.bound else 0.0
    return share if math.isfinite(share) else -1.0


def _mean(values: Iterable[float], weights: Iterable[float] = repeat(1.0)) -> float:
    """Return the weighted mean without NaN values; NaN if there are no others."""
    pairs = [(value, weight or 1) for value, weight in zip(values, weights, strict=False) if not math.isnan(value)]
    heaviest = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / heaviest if pairs else math.nan
