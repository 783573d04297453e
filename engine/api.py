"""The values that gateway and engine exchange about requests: sampling, requests, outputs.

All values are immutable, are not shared with the core, and consist of types that msgspec encodes. The engine may run in
this process or in another. The module does not import torch.
"""

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from typing import NamedTuple, TypeVar

from engine.errors import ErrorInfo, InvalidRequestError
from engine.forms import Grammar, Pooling, ThinkingBudget
from predictor.budget import Promise

T = TypeVar("T")
MAX_LOGPROBS = 20
NEVER = 2**62
"""A position beyond every token."""
MAX_LOGIT_BIAS = 300


def quick_rows(kind: type[T], *columns: Iterable[object]) -> Iterator[T]:
    """Yield NamedTuples of `kind` from columns of its fields, for values that a step creates by the hundred.

    The calls skip the metaclass. One column must be finite.
    """
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
