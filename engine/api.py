"""The interface between gateway and engine: requests, outputs, statistics, and the client protocol.

All values are immutable, are not shared with the core, and consist of types that msgspec encodes. The engine may run in
this process or in another. The module does not import torch.
"""

import enum
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from engine.errors import ErrorInfo, InvalidRequestError
from engine.forms import EmbeddingSpec, Grammar, Pooling, ThinkingBudget
from predictor.budget import Promise, Standing

P = ParamSpec("P")
T = TypeVar("T")
MAX_LOGPROBS = 20
NEVER = 2**62
"""A position beyond every token."""
MAX_LOGIT_BIAS = 300


def quick_constructor(kind: Callable[P, T]) -> Callable[P, T]:
    """Return a fast constructor of a NamedTuple, for values that a step creates by the hundred.

    256 outputs by keyword take 0.15 ms instead of 0.33 ms (Xeon, Python 3.11): the call skips the metaclass
    and needs no dict of keywords.
    """
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    defaults: dict[str, object] = kind._field_defaults  # type: ignore[attr-defined]
    parameters = ", ".join(f"{name}=defaults[{name!r}]" if name in defaults else name for name in names)
    scope = {"new": tuple.__new__, "kind": kind, "defaults": defaults}
    made: Callable[P, T] = eval(f"lambda {parameters}: new(kind, ({', '.join(names)},))", scope)
    return made


def quick_rows(kind: type[T], *columns: Iterable[object]) -> Iterator[T]:
    """Yield NamedTuples of `kind` from columns of its fields, fast as above. One column must be finite."""
    return map(tuple.__new__, repeat(kind), zip(*columns, strict=False))  # type: ignore[arg-type]


class RequestClass(enum.Enum):
    """Service class: interactive requests, or batch and flex work in the remaining capacity."""

    ONLINE = "online"
    OFFLINE = "offline"

    __hash__ = object.__hash__  # faster than Enum's, which is written in Python; a step calls it dozens of times


class Lane(enum.IntEnum):
    """Order of offline work, first to last."""

    FLEX = 0  # a client waits for the answer
    AT_RISK = 1  # the batch may miss its completion window
    BATCH = 2


class FinishReason(enum.Enum):
    """Reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _require(condition: bool, param: str, rule: str) -> None:
    if not condition:
        raise InvalidRequestError(f"'{param}' must be {rule}.", param=param)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. Raise InvalidRequestError, naming the parameter, if a value is out of range."""

    max_tokens: int
    min_tokens: int = 0  # a grammar may end the answer earlier if it allows no other token
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    seed: int = 0  # the random number of output position i depends on (seed, i) only; the gateway mixes in the prompt
    logprobs: int | None = None  # alternatives to report beside the chosen token; 0: the chosen one only; None: off
    stop_token_ids: frozenset[int] = frozenset()  # includes the end-of-sequence ids unless `ignore_eos` is set
    grammar: Grammar | None = None  # required form of the answer, after the thought
    thinking: ThinkingBudget | None = None  # with a grammar, the answer may think only at its beginning

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", "at least 1")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        _require(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2")
        _require(self.top_k >= 0, "top_k", "0 (off) or positive")
        _require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        # the sampler divides by it in float32, where a much smaller value may become zero
        _require(0.01 <= self.repetition_penalty <= 10.0, "repetition_penalty", "between 0.01 and 10")
        _require(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        _require(all(-100.0 <= b <= 100.0 for _, b in self.logit_bias), "logit_bias", "between -100 and 100 each")
        _require(-(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        _require(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "top_logprobs", "between 0 and 20")

    @property
    def masked_from(self) -> int:
        """Return the first answer position at which a mask may restrict the tokens."""
        if self.grammar is not None:
            return 0
        return NEVER if self.thinking is None else self.thinking.tokens  # the budget lasts until then

    @property
    def has_penalties(self) -> bool:
        """Return whether the logit of a token depends on its earlier occurrences."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class SamplingDefaults(NamedTuple):
    """Sampling parameters that a model's checkpoint recommends; None: the usual default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


class RequestTimes(NamedTuple):
    """Times of a request, seconds on the engine's monotonic clock; None until the event has happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


class Resumption(NamedTuple):
    """Progress of a request on an earlier engine, from which another engine continues."""

    token_ids: tuple[int, ...]  # output tokens so far
    times: RequestTimes
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    apart_until: int = 0
    """The request may have crashed that engine: it runs alone until this many of its tokens are computed."""
    num_withheld: int = 0
    """Number of last tokens in `token_ids` that were not yet sent to the reader."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for `EngineClient.submit`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    request_class: RequestClass = RequestClass.ONLINE
    cache_salt: bytes = b""  # requests share prefix blocks only under equal salts
    deadline: float = math.inf  # wall-clock time by which an offline request should end, seconds
    final_only: bool = False  # emit the terminal output only
    tenant: str = ""  # service is shared fairly among tenants
    job: str = ""  # service of a tenant is shared fairly among its jobs
    lane: Lane = Lane.BATCH
    resumed: Resumption | None = None  # continue as after a preemption; never refused for lack of room
    arrived: float | None = None  # arrival on the engine's clock if the request waited for an engine; None: now
    pooling: Pooling | None = None  # return an embedding or scores of the prompt; of `sampling` only `logprobs` counts
    adapter: int = 0  # number of a LoRA adapter, from 1 in the order of `EngineInfo.adapters`; 0: none
    probe: bool = False  # a test request of the engine itself; excluded from statistics except `probe_tokens`
    promise: Promise | None = None  # latency promised to this online request; None: that of the default class

    def is_long(self, short_context: int) -> bool:
        """Return whether the long factors of longrope apply: prompt and output exceed `short_context` (0: never)."""
        output = self.sampling.max_tokens if self.pooling is None else 0
        return 0 < short_context < len(self.prompt_token_ids) + output

    def prefix_root(self, *, is_long: bool) -> bytes:
        """Return the root of the block hashes. It includes all that K and V depend on: the adapter, and `is_long`."""
        if not (self.adapter or is_long):
            return self.cache_salt
        kind = b"long rope" if is_long else b"lora"
        return blake2b(self.adapter.to_bytes(8, "little") + self.cache_salt, digest_size=16, person=kind).digest()


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities at one output position."""

    logprob: float  # of the chosen token
    top: tuple[tuple[int, float], ...]  # (token id, logprob) of the most likely tokens, best first


class RequestOutput(NamedTuple):
    """Output of a request after a step. Every accepted request ends in exactly one output with a `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens since the last output, including a stop token. Most steps of an offline request with `final_only` emit
    no output, so its outputs carry many tokens; all other outputs carry one."""
    logprobs: tuple[TokenLogprobs, ...] | None
    times: RequestTimes
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended the request
    error: ErrorInfo | None = None  # set iff `finish_reason` is ERROR
    num_preemptions: int = 0
    request_class: RequestClass = RequestClass.ONLINE
    beside_offline: bool = False  # offline work ran in a step of the request or while it waited
    embedding: bytes | None = None  # little-endian float32, for a request with `pooling`
    probe: bool = False


class TokenCosts(NamedTuple):
    """Seconds per computed prompt token and per output token; 1 each without a latency model."""

    prefill: float = 1.0
    decode: float = 1.0

    def of(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the cost of a number of computed prompt tokens and output tokens."""
        return self.prefill * prompt_tokens + self.decode * output_tokens


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
    good_requests: int
    bad_requests: int
    objectives: tuple[Standing, ...]
    online_rate: float  # recent online requests/s, including refused ones
    policy: str
    rule: str
    latency_budget: float
    interference_weight: float
    decode_value: float
    breaker: str
    breaker_cause: str | None
    breaker_openings: int
    predictor_mape: float  # mean relative error over the last steps
    offline_tokens: int
    budget_origin: str  # source of the budget
    offline_share: float  # share of the budget that offline work may use beside online work, 0 to 1
    held: str  # reason, other than the breaker, why `offline_share` is 0; "" if there is none
    overrun: float = 0.0  # mean time of steps beside the prediction and its margin, as a share of the step limit
    model_refits: int = 0  # new fits of the latency model that replaced it
    model_refits_refused: int = 0  # new fits that were not better
    refit_errors: Mapping[str, float] = field(default_factory=dict)  # mean relative error `before` and `after`
    learned: Mapping[str, float] = field(default_factory=dict)  # searches and baselines, see `LEARNED` of the keeper
    margins: Mapping[int, float] = field(default_factory=dict)  # safety margin of a step by its tokens
    share_limit: str = "none"  # what bounds `offline_share`: none, evidence, brake or breaker
    classes: tuple[ClassStanding, ...] = ()  # the class `default` first
    class_good: Mapping[str, int] = field(default_factory=dict)  # requests by class that met their promise
    class_bad: Mapping[str, int] = field(default_factory=dict)
    class_refused: Mapping[str, int] = field(default_factory=dict)  # with 429


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

    running: dict[RequestClass, int] = field(default_factory=dict)
    waiting: dict[RequestClass, int] = field(default_factory=dict)
    running_adapters: dict[int, int] = field(default_factory=dict)  # online requests by number of the LoRA adapter
    waiting_adapters: dict[int, int] = field(default_factory=dict)
    units_total: int = 0
    units_free: int = 0
    units_cached: int = 0  # hold prefixes that no request uses now
    units_owned: int = 0
    host_units_total: int = 0  # of the host tier
    host_units_used: int = 0
    host_units_cached: int = 0  # hold prefixes that no request uses now
    hidden_blocks: int = 0  # blocks that are run from hidden state
    state_slots_total: int = 0  # snapshots of recurrent layers, on the device and the host
    state_slots_used: int = 0
    cache_units: dict[str, int] = field(default_factory=dict)  # moved or restored units, by operation
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0  # part of `prefix_hit_tokens` from the host tier
    preemptions: dict[str, int] = field(default_factory=dict)  # by cause
    plans: dict[str, int] = field(default_factory=dict)  # of offline work: made, continued, late
    knapsack: dict[str, int] = field(default_factory=dict)  # decisions: waiting requests by form, or passed over
    lanes_waiting: dict[str, int] = field(default_factory=dict)  # offline requests by lane
    job_tokens: dict[str, int] = field(default_factory=dict)  # output so far of unfinished requests, by job
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
    colocation: ColocationStats | None = None
    token_costs: TokenCosts | None = None  # None without a latency model
    restarts: dict[str, int] = field(default_factory=dict)  # of the engine process, by cause
    resumed_requests: int = 0  # requests that continued in another engine process
    engines: tuple[EngineView, ...] = ()  # empty with one engine
    pipelines: PipelineStats | None = None  # None if engines cannot drop layers

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
