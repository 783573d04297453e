"""The remaining limits of one step and its predicted time; also the price of a token (`token_costs`).

The price is the unit of fair sharing and of progress forecasts: seconds in a full step, or 1 per token without a
latency model. On some machines the prices of prompt and output tokens differ by a factor of ten.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.api import TokenCosts
from engine.limits import SchedulerConfig
from engine.request import Request
from predictor.features import BatchFeatures, CacheWork, LatencyPredictor, Reach


@dataclass(slots=True)
class StepLedger:
    """Remaining tokens and sequences of one step, and its predicted time. Every chunk is charged, decodes included.

    Units are counted by the pool instead. `seconds`: predicted time of the charged work, 0 without a model.
    """

    tokens_left: int
    sequences_left: int
    model: LatencyPredictor | None = None
    features: BatchFeatures = field(init=False)
    seconds: float = 0.0
    adapters: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.features = BatchFeatures() if self.model is None else BatchFeatures(self.model.reach)

    @property
    def open(self) -> bool:
        """Return whether one more chunk could be charged."""
        return self.tokens_left > 0 and self.sequences_left > 0

    def charge_decodes(self, contexts: Sequence[int]) -> None:
        """Charge the first decodes of a step in bulk. `contexts`: tokens up to and including each decoded one."""
        count = len(contexts)
        self.tokens_left -= count
        self.sequences_left -= count
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        self.features.add_decodes(count, self.read(contexts))
        if self.model is not None:
            self.seconds = self.model.predict(self.features)

    def tightest(self, limits: Sequence[float]) -> float:
        """Return the tightest limit on the step's end, in seconds, that the charged work can still meet; or infinity.

        A limit between the usual and the predicted time can be met if no work is added: the result is the predicted
        time then. A limit below the usual time is lost.
        """
        if (tightest := min(limits, default=math.inf)) >= self.seconds:
            return tightest
        usual = 0.0 if self.model is None else self.model.usual(self.features)
        return max(self.seconds, min([limit for limit in limits if limit >= usual], default=math.inf))

    def charge_more_decodes(self, count: int, context_sum: int) -> None:
        """Charge more decodes in bulk, as if one by one. `context_sum`: sum of the context tokens that they read."""
        self.tokens_left -= count
        self.sequences_left -= count
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        if self.model is not None:
            self.seconds += self.model.marginal_decodes(self.features, count, context_sum)
        self.features.add_decodes(count, context_sum)

    def read(self, contexts: Sequence[int]) -> int:
        """Return the number of tokens that decodes with these contexts read."""
        return self.features.reach.contexts(contexts)

    def charge(self, start: int, length: int) -> None:
        """Charge one chunk, which must fit."""
        self.tokens_left -= length
        self.sequences_left -= 1
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        if self.model is not None:
            self.seconds += self.model.marginal(self.features, start, length)
        self.features.add_chunk(start, length)

    def charge_cache_work(self, work: CacheWork) -> None:
        """Charge cache work: compact, restored and transferred data. Negative numbers cancel a charge."""
        if self.model is not None:
            self.seconds += self.model.cache_work(*work, beside=self.features)
        self.features.add_cache_work(*work)

    def charge_moves(self, num_bytes: int) -> None:
        """Charge bytes copied between device and host. A negative number cancels a charge."""
        if num_bytes:
            self.charge_cache_work(CacheWork(transferred_bytes=num_bytes))

    def compact_seconds(self, tokens: int) -> float:
        """Return the seconds that projecting `tokens` tokens from compact form would add."""
        return self.model.cache_work(tokens, beside=self.features) if tokens and self.model is not None else 0.0

    def charge_adapter(self, number: int, tokens: int) -> None:
        """Charge a chunk's LoRA adapter: once per step for its weights, and per token for its work."""
        is_new = number not in self.adapters
        self.adapters.add(number)
        self.features.add_adapted(is_new, tokens)
        if self.model is not None:
            self.seconds += self.model.adapter_work(is_new, tokens)

    def mask_seconds(self, rows: int) -> float:
        """Return the seconds that masks for `rows` more samples would add."""
        return self.model.mask_work(self.features, rows) if rows and self.model is not None else 0.0

    def charge_masks(self, rows: int) -> None:
        """Charge the masks of `rows` samples."""
        self.seconds += self.mask_seconds(rows)
        self.features.add_masked(rows)


def num_masked(decodes: Sequence[Request]) -> int:
    """Return the number of decodes whose sampling a mask may restrict."""
    return sum([request.num_computed_tokens + 1 >= request.masked_from for request in decodes])


DECODE_CONTEXT = 512
"""Context length, in tokens, of the decodes from which the price of an output token is computed."""


def token_costs(model: LatencyPredictor | None, config: SchedulerConfig) -> TokenCosts:
    """Return the token costs in the fullest steps that `config` allows; 1 per token without a model."""
    return TokenCosts() if model is None else _costs(model.predict, model.reach, config)


def usual_costs(model: LatencyPredictor, config: SchedulerConfig) -> TokenCosts:
    """Return the token costs without the latency margin, for forecasts."""
    return _costs(model.usual, model.reach, config)


def _costs(seconds: Callable[[BatchFeatures], float], reach: Reach, config: SchedulerConfig) -> TokenCosts:
    prompt, decodes = BatchFeatures(reach), BatchFeatures(reach)
    length = max(2, min(config.max_num_batched_tokens, config.max_model_len))
    prompt.add_chunk(0, length)
    count = config.max_num_seqs
    decodes.add_decodes(count, count * reach.tokens(min(DECODE_CONTEXT, config.max_model_len) - 1, 1))
    return TokenCosts(seconds(prompt) / length, seconds(decodes) / count)
