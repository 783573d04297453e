"""The engine as the gateway sees it, in this process or in another: values that go in and come out, and the client that
takes them.

Values only: frozen, and of types that msgspec encodes and decodes. Nothing here is shared with the core, no output
changes after it was made, times are stamped where they happen. Torch-free; knows nothing of blocks, steps and HTTP.
"""

import enum
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from engine.errors import ErrorInfo, InvalidRequestError
from engine.grammar import Grammar
from engine.pooling import EmbeddingSpec, Pooling
from engine.text.thoughts import ThinkingBudget
from predictor.slo import Standing

P = ParamSpec("P")
T = TypeVar("T")
MAX_LOGPROBS = 20
NEVER = 2**62
"""The position of no token."""
MAX_LOGIT_BIAS = 300


def quick_constructor(kind: Callable[P, T]) -> Callable[P, T]:
    """Return the constructor of a NamedTuple as one plain function, for values of which a step has hundreds.

    256 outputs by keyword take 0.15 ms instead of 0.33 ms, and 256 chunks 0.07 ms instead of 0.10 ms (Xeon, Python
    3.11): the call skips the metaclass and needs no dict of keywords.
    """
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    defaults: dict[str, object] = kind._field_defaults  # type: ignore[attr-defined]
    parameters = ", ".join(f"{name}=defaults[{name!r}]" if name in defaults else name for name in names)
    scope = {"new": tuple.__new__, "kind": kind, "defaults": defaults}
    made: Callable[P, T] = eval(f"lambda {parameters}: new(kind, ({', '.join(names)},))", scope)
    return made


class RequestClass(enum.Enum):
    """The two service classes: chat users, and jobs that take what is left."""

    ONLINE = "online"
    OFFLINE = "offline"

    __hash__ = object.__hash__  # enum's own is written in Python; a step looks dozens up


class Lane(enum.IntEnum):
    """Which offline work goes first: somebody waits for it, its batch may miss its completion window, or neither."""

    FLEX = 0
    AT_RISK = 1
    BATCH = 2


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _require(condition: bool, param: str, rule: str) -> None:
    if not condition:
        raise InvalidRequestError(f"'{param}' must be {rule}.", param=param, code="invalid_value")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated here, once, at the edge.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` is always set (the edge draws one): the random
    number of output position i is a pure function of (seed, i), so neighbours and preemptions cannot change it.
    `stop_token_ids` already holds the end-of-sequence ids unless the caller ignores them. `logprobs` is the number of
    alternatives to report beside the chosen token (0: the chosen one only), None: none at all. `grammar`: what the
    answer must look like; it may end, whatever `min_tokens` says, when nothing else is left to it. `thinking`: how long
    it may think; with a grammar, which holds behind the thought, it may think at its beginning only.
    Raises InvalidRequestError, naming the parameter, when a value is out of range.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", "at least 1")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        _require(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2")
        _require(self.top_k >= 0, "top_k", "0 (off) or positive")
        _require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        # the sampler divides by it in float32, where what is much smaller may be zero
        _require(0.01 <= self.repetition_penalty <= 10.0, "repetition_penalty", "between 0.01 and 10")
        _require(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        _require(all(-100.0 <= b <= 100.0 for _, b in self.logit_bias), "logit_bias", "between -100 and 100 each")
        _require(-(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        _require(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "top_logprobs", "between 0 and 20")

    @property
    def masked_from(self) -> int:
        """The position of the answer from which on a mask may say which tokens can be chosen."""
        if self.grammar is not None:
            return 0
        return NEVER if self.thinking is None else self.thinking.tokens  # no answer has more thoughts than tokens


class RequestTimes(NamedTuple):
    """Seconds on the engine's monotonic clock, as of the output that carries them; None until it happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


class Resumption(NamedTuple):
    """What a request had been given by an engine that is gone: its tokens, and what its last output said.

    `apart_until`: it may have been what ended that engine, so nothing runs beside it before so many of its tokens have
    been computed. `num_withheld`: of its tokens, the last ones, that its reader was not told.
    """

    token_ids: tuple[int, ...]
    times: RequestTimes
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    apart_until: int = 0
    num_withheld: int = 0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a caller hands to `EngineClient.submit`.

    `cache_salt` separates prefix caches of tenants (blocks are shared only under equal salts). `deadline` is a
    wall-clock time in seconds by which an offline request should end. `final_only` asks for one terminal output.
    `tenant` is who asked, `job` what the request is a part of (names of the caller's choice, "" if there is but one):
    service is shared fairly among tenants, and among the jobs of one. `lane` orders offline work. `resumed`: it goes on
    where another engine left it, as if it had been preempted; it has been accepted and is not refused for room.
    `arrived`: when it came, on the engine's clock, if it waited for an engine since.
    `pooling`: it is one vector, of its prompt; nothing is sampled, and of `sampling` nothing counts.
    `adapter`: the number of a LoRA adapter, from 1 in the order of `EngineInfo.adapters`; 0: the model as it is.
    `probe`: the engine asks it of itself, and it is in no figure of anybody's work.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    request_class: RequestClass = RequestClass.ONLINE
    cache_salt: bytes = b""
    deadline: float = math.inf
    final_only: bool = False
    tenant: str = ""
    job: str = ""
    lane: Lane = Lane.BATCH
    resumed: Resumption | None = None
    arrived: float | None = None
    pooling: Pooling | None = None
    adapter: int = 0
    probe: bool = False

    @property
    def prefix_root(self) -> bytes:
        """What the hashes of its blocks begin with: K and V depend on the adapter as they do on the tokens."""
        if not self.adapter:
            return self.cache_salt
        return blake2b(self.adapter.to_bytes(8, "little") + self.cache_salt, digest_size=16, person=b"lora").digest()


class TokenLogprobs(NamedTuple):
    """Natural logarithms: of the chosen token, and of the most likely ones as (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class RequestOutput(NamedTuple):
    """What a caller sees after a step. Every accepted request ends in exactly one output with `finish_reason` set.

    `token_ids` are the new tokens since the last output, a stop token included: one, or many of an offline request with
    `final_only`, of which nothing is told for most steps (its stream gives all of them at once);
    `stop_token_id` names it when one ended the request. `error` is set iff `finish_reason` is ERROR.
    `beside_offline`: offline work ran in one of its steps, or while it waited. `embedding`: the vector of a request
    with `pooling`, as float32 numbers, little end first.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    times: RequestTimes
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: ErrorInfo | None = None
    num_preemptions: int = 0
    request_class: RequestClass = RequestClass.ONLINE
    beside_offline: bool = False
    embedding: bytes | None = None
    probe: bool = False


class TokenCosts(NamedTuple):
    """Seconds per computed prompt token and per output token (1 each: no latency model is known)."""

    prefill: float = 1.0
    decode: float = 1.0

    def of(self, prompt_tokens: float, output_tokens: float) -> float:
        """What so many computed prompt tokens and output tokens cost."""
        return self.prefill * prompt_tokens + self.decode * output_tokens


@dataclass(frozen=True, slots=True)
class ColocationStats:
    """How the SLO is kept. `attainment` and `objectives` are of the last requests judged (NaN: none); times in seconds.

    `online_rate`: online requests a second of late, refused ones included.
    `offline_share`: what of its budget offline work may use beside online work, 0 to 1. `held`: why it is 0 whatever
    the breaker says, "" when it is not. `budget_origin`: where the budget comes from.
    `predictor_mape`: mean relative error of the last steps, whatever it matters; `overrun`: by how much steps beside
    online work took longer than predicted with the margin, as a share of what a step may take. `model_refits`: new fits
    of the latency model that took its place; `model_refits_refused`: those that were no better.
    """

    slo: str
    attainment: float
    good_requests: int
    bad_requests: int
    objectives: tuple[Standing, ...]
    online_rate: float
    policy: str
    rule: str
    latency_budget: float
    interference_weight: float
    decode_value: float
    breaker: str
    breaker_cause: str | None
    breaker_openings: int
    predictor_mape: float
    offline_tokens: int
    budget_origin: str
    offline_share: float
    held: str
    overrun: float = 0.0
    model_refits: int = 0
    model_refits_refused: int = 0


class LoadReport(NamedTuple):
    """How much of an engine is taken, by online work, as of `time` (its monotonic clock, seconds).

    `queued_*`: prompts that wait or are not yet computed to their end: the tokens that are missing, the units that they
    need beyond those they hold. `running`: requests past their prompt. `available_units`: what online work could get.
    `growth_units`: how many more all of these will hold at the worst moment to come, if they end after as much output
    as others did of late, and give back what they hold.
    `step_seconds`: a full step by the latency model (0: none). `offline_tokens`: computed for offline requests so far,
    by this process; `offline_waits`: some have not begun. `received`: how many requests this process had been given.
    """

    queued_tokens: int = 0
    queued_units: int = 0
    queued_requests: int = 0
    running: int = 0
    available_units: int = 0
    growth_units: int = 0
    num_units: int = 0
    tokens_per_unit: float = 8.0
    tokens_per_step: int = 512
    step_seconds: float = 0.0
    mean_input: float = 0.0
    mean_output: float = 0.0
    offline_tokens: int = 0
    offline_waits: bool = False
    time: float = 0.0
    received: int = 0


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine of several. `routed`: requests that it was given, those of its processes before included; `moved`:
    that were taken from it because it was gone; `harvest`: offline tokens that it computes a second; `partner`: the
    engine with which it is one pipeline."""

    engine: int
    state: "EngineState"
    trouble: str | None
    routed: int
    moved: int
    harvest: float
    stats: "EngineStats"
    partner: int | None = None


class PipelineStats(NamedTuple):
    """Engines that compute as one (`pairs`: by number, who schedules first), how often some began to and ended it, how
    often that failed, and whether memory is short where no further engine can give up layers."""

    pairs: tuple[tuple[int, int], ...]
    drops: int
    restores: int
    failures: int
    too_little: bool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for /metrics, /ready and the log; counters grow for ever, gauges are of now.

    Counts per class are keyed by RequestClass; units are pool units (a KV block takes two).

    `host_units_*`: of the host tier; `cached` are those of prefixes that nobody uses now; `prefix_host_hit_tokens`: the
    part of the hits that came from there; `hidden_blocks`: run from hidden state; `state_slots_*`: of checkpoints of
    recurrent layers, on the device and the host; `cache_units`: units that were swapped out, swapped in and restored,
    by the name of the operation. `prefill_tokens` and `decode_tokens` are of both classes; `forced_tokens`: of answers,
    given without sampling by grammars and budgets; `offline_computed_tokens` is the part of the former two that was
    offline work; `probe_tokens`: computed beside all of these, for probes of the engine's own. `token_costs`: None
    without a latency model. `restarts`: of an engine in a process of its own, by cause; `resumed_requests`: that went
    on in the next one. `engines`: where there are several, each of them; all else is of all together. `pipelines`:
    where engines may drop layers.
    """

    running: dict[RequestClass, int] = field(default_factory=dict)
    waiting: dict[RequestClass, int] = field(default_factory=dict)
    units_total: int = 0
    units_free: int = 0
    units_cached: int = 0
    units_owned: int = 0
    host_units_total: int = 0
    host_units_used: int = 0
    host_units_cached: int = 0
    hidden_blocks: int = 0
    state_slots_total: int = 0
    state_slots_used: int = 0
    cache_units: dict[str, int] = field(default_factory=dict)
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    refused_requests: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0
    offline_computed_tokens: int = 0
    probe_tokens: int = 0
    predicted_seconds: float = 0.0
    leftover_seconds: float = 0.0
    leftover_used_seconds: float = 0.0
    colocation: ColocationStats | None = None
    token_costs: TokenCosts | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    resumed_requests: int = 0
    engines: tuple[EngineView, ...] = ()
    pipelines: PipelineStats | None = None

    @property
    def online_tokens(self) -> tuple[float, float]:
        """Prompt and output tokens computed of online requests; what was offline work is divided as both were."""
        computed = self.prefill_tokens + self.decode_tokens
        share = 1.0 - self.offline_computed_tokens / computed if computed else 0.0
        return share * self.prefill_tokens, share * self.decode_tokens


class DroppableLayers(NamedTuple):
    """What an engine wins by giving up layers: bytes of the weights of one, and of its part of a cache unit; with all
    layers there are `num_units`."""

    num_layers: int
    layer_bytes: int
    unit_layer_bytes: int
    num_units: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of the loaded model. `vocab_size` is the logits' width: any token id below it may be sent.
    `cache_tokens`: what the device cache holds of KV, in blocks of `block_size` tokens (0: not known).
    `shares_prefixes`: between requests.
    `embedding`: how a text becomes a vector; None: it does not. `max_num_seqs`: the most requests in a step.
    `adapters`: names of the LoRA adapters beside it, in the order of their numbers.
    `droppable`: None where no layer can be given up."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    cache_tokens: int = 0
    block_size: int = 0
    embedding: EmbeddingSpec | None = None
    max_num_seqs: int = 64
    adapters: tuple[str, ...] = ()
    droppable: DroppableLayers | None = None
    shares_prefixes: bool = True

    @property
    def batch_lines(self) -> int:
        """Lines of batches that an engine should hold, so that there is always one to go on with."""
        return 4 * self.max_num_seqs


class EngineState(enum.Enum):
    """Whether an engine takes requests. DEGRADED: it lives, but is not well (`EngineClient.trouble` says why). DEAD: no
    step runs any more, and it cannot help itself."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    DEAD = "dead"


class OutputStream(Protocol):
    """The outputs of one request, ending after the terminal one. `aclose` before that aborts the request, at once
    and also when nothing has been read yet; it is idempotent."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...


class EngineClient(Protocol):
    """Every accepted request ends in exactly one terminal `RequestOutput`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def trouble(self) -> str | None:
        """Why a started engine that lives is not ready, in words for an operator; None without any such reason."""
        ...

    async def start(self) -> None:
        """Start stepping and run one warm-up step; returns when ready."""
        ...

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new work, let running requests end for at most `drain_seconds`, abort the rest, stop."""
        ...

    async def check_room(self, request_class: RequestClass, prompt_tokens: int, tenant: str) -> None:
        """Look at the queue before any work is done for a request: raises what `submit` would raise now whatever a
        tenant asks for, QueueFullError or EngineUnavailableError. `prompt_tokens`: about how many, for the load's
        record."""
        ...

    async def submit(self, requests: Sequence[EngineRequest]) -> Sequence[OutputStream]:
        """Queue requests, all or none; their streams in the same order.

        Raises InvalidRequestError, QueueFullError or EngineUnavailableError, in which case nothing was queued; so it is
        when the call is cancelled.
        """
        ...

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now; its stream yields the terminal output with `reason`. Unknown ids are ignored."""
        ...

    def set_lane(self, job: str, lane: Lane) -> None:
        """The offline requests of a job that were queued go with this lane from now on. An unknown job is ignored."""
        ...

    async def stats(self) -> EngineStats: ...

    async def wait_dead(self) -> str:
        """Until no step will ever run again, so that only another start of the server helps; returns why."""
        ...

    async def renew(self, *, anyway: bool = False) -> str:
        """Where weights or engine have been replaced on disk, or `anyway`, go on with what is there; returns what was
        done, once it is.

        Raises ConfigError or EngineUnavailableError where what is there cannot take over: nothing has changed then.
        """
        ...

    def kill(self) -> None:
        """Take down at once what runs outside this process: the server ends and cannot wait."""
        ...
