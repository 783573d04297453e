"""Requests: what a caller asks for, what the core keeps about it, and what comes back.

Token ids only; text lives in `engine.text`, HTTP in the gateway. The core owns every `Request`; nobody else mutates it.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.blocks import CacheMap
from engine.errors import InvalidRequestError, TidemillError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300


class RequestClass(enum.Enum):
    """The two service classes: chat users, and jobs that take what is left."""

    ONLINE = "online"
    OFFLINE = "offline"


class Lane(enum.IntEnum):
    """Which offline work goes first: somebody waits for it, its batch may miss its completion window, or neither."""

    FLEX = 0
    AT_RISK = 1
    BATCH = 2


class RequestStatus(enum.Enum):
    """Where a request stands; `TRANSITIONS` is the whole table of legal changes."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


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
    alternatives to report beside the chosen token (0: the chosen one only), None: none at all.
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


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a caller hands to `EngineClient.generate`.

    `cache_salt` separates prefix caches of tenants (blocks are shared only under equal salts). `deadline` is a
    wall-clock time in seconds by which an offline request should end. `final_only` asks for one terminal output.
    `tenant` is who asked, `job` what the request is a part of (names of the caller's choice, "" if there is but one):
    service is shared fairly among tenants, and among the jobs of one. `lane` orders offline work.
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


class TokenLogprobs(NamedTuple):
    """Natural logarithms: of the chosen token, and of the most likely ones as (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the engine's monotonic clock; None until it happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """What a caller sees after a step. Every accepted request ends in exactly one output with `finish_reason` set.

    `token_ids` are the new tokens since the last output (all of them for `final_only`), a stop token included;
    `stop_token_id` names it when one ended the request. `error` is set iff `finish_reason` is ERROR.
    `beside_offline`: offline work ran in one of its steps, or while it waited.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    times: RequestTimes
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: TidemillError | None = None
    num_preemptions: int = 0
    request_class: RequestClass = RequestClass.ONLINE
    beside_offline: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the core.

    `num_computed_tokens` is the one progress counter: it advances when a chunk is *scheduled*; `num_confirmed_tokens`
    follows in `update`, and a failed step rewinds to it. `num_placeholders` counts sampled tokens still in flight.
    `not_before`: until then it does not start beside online work, which would only evict
    it again (seconds). `aside`: it is kept out of ordinary steps (see `engine.scheduling.recovery`).
    `num_expected_hits`: tokens of its prompt that were in the prefix cache when it came.
    """

    spec: EngineRequest
    times: RequestTimes
    arrival_order: int
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_placeholders: int = 0
    cache_map: CacheMap = field(default_factory=CacheMap)
    row: int = -1
    epoch: int = 0
    last_step: int = -1
    num_cached_tokens: int = 0
    num_expected_hits: int = 0
    num_preemptions: int = 0
    not_before: float = -math.inf
    aside: bool = False
    beside_offline: bool = False
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.spec.sampling.max_tokens

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def request_class(self) -> RequestClass:
        return self.spec.request_class

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Known tokens plus those in flight."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def decode_is_due(self) -> bool:
        """Whether, running, its next token can be computed now; tokens in flight count as known."""
        expected = self.num_expected_tokens
        return expected - self.num_computed_tokens == 1 and expected < self.max_total_tokens

    @property
    def prefill_is_due(self) -> bool:
        """Whether, running, more than one of its known tokens is still to be computed."""
        return self.num_placeholders == 0 and len(self.token_ids) - self.num_computed_tokens > 1

    def move_to(self, status: RequestStatus) -> None:
        assert status in TRANSITIONS[self.status], f"illegal transition {self.status} -> {status}"
        self.status = status
