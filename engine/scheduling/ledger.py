"""The limits that one step has left, and its predicted time.

Also the price of a token (`token_costs`), the unit in which service is shared and progress is forecast: seconds of a
full step, or 1 for each token without a latency model. On some machines the prices of prompt and output tokens differ
by a factor of ten.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.api import TokenCosts
from engine.config import SchedulerConfig
from engine.request import Request
from predictor.features import BatchFeatures, CacheWork
from predictor.model import LatencyPredictor
from predictor.reach import Reach


@dataclass(slots=True)
class StepLedger:
    """What is left of each limit of one step, and what the step will take. Every chunk, decode included, is charged to
    all of them (units are kept by the pool). `seconds`: the predicted time of what has been charged so far (0 without a
    model)."""

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
        """Whether one more chunk could be charged."""
        return self.tokens_left > 0 and self.sequences_left > 0

    def charge_decodes(self, contexts: Sequence[int]) -> None:
        """Charge decodes in bulk; `contexts`: tokens that lie before or at each, its own included."""
        count = len(contexts)
        self.tokens_left -= count
        self.sequences_left -= count
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        self.features.add_decodes(count, self.read(contexts))
        if self.model is not None:
            self.seconds = self.model.predict(self.features)

    def charge_more_decodes(self, count: int, context_sum: int) -> None:
        """The same beside what has been charged: as much as if each were charged by itself. `context_sum`: what is read
        of their contexts."""
        self.tokens_left -= count
        self.sequences_left -= count
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        if self.model is not None:
            self.seconds += self.model.marginal_decodes(self.features, count, context_sum)
        self.features.add_decodes(count, context_sum)

    def read(self, contexts: Sequence[int]) -> int:
        """What decodes with such contexts read, in tokens."""
        return self.features.reach.contexts(contexts)

    def charge(self, start: int, length: int) -> None:
        """Charge one chunk; the caller has checked that it fits."""
        self.tokens_left -= length
        self.sequences_left -= 1
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        if self.model is not None:
            self.seconds += self.model.marginal(self.features, start, length)
        self.features.add_chunk(start, length)

    def charge_cache_work(self, work: CacheWork) -> None:
        """Charge what is run from compact form, restored and moved; negative numbers take it back."""
        if self.model is not None:
            self.seconds += self.model.cache_work(*work, beside=self.features)
        self.features.add_cache_work(*work)

    def charge_moves(self, num_bytes: int) -> None:
        """Charge bytes moved between device and host; negative numbers take them back."""
        if num_bytes:
            self.charge_cache_work(CacheWork(transferred_bytes=num_bytes))

    def compact_seconds(self, tokens: int) -> float:
        """Return the seconds that projecting `tokens` tokens from compact form would add."""
        return self.model.cache_work(tokens, beside=self.features) if tokens and self.model is not None else 0.0

    def charge_adapter(self, number: int, tokens: int) -> None:
        """Charge the LoRA adapter of a chunk, each once in a step, and what it does with the tokens."""
        is_new = number not in self.adapters
        self.adapters.add(number)
        self.features.add_adapted(is_new, tokens)
        if self.model is not None:
            self.seconds += self.model.adapter_work(is_new, tokens)

    def mask_seconds(self, rows: int) -> float:
        """What so many masked samples would add."""
        return self.model.mask_work(self.features, rows) if rows and self.model is not None else 0.0

    def charge_masks(self, rows: int) -> None:
        """Charge the masks of so many samples."""
        self.seconds += self.mask_seconds(rows)
        self.features.add_masked(rows)


def num_masked(decodes: Sequence[Request]) -> int:
    """Of requests whose next token is due, how many a mask may limit."""
    return sum([request.num_computed_tokens + 1 >= request.masked_from for request in decodes])


DECODE_CONTEXT = 512
"""Context of the decodes that an output token is priced among, tokens."""


def token_costs(model: LatencyPredictor | None, config: SchedulerConfig) -> TokenCosts:
    """The costs on a machine whose step times `model` predicts, in the fullest steps that `config` allows."""
    return TokenCosts() if model is None else _costs(model.predict, model.reach, config)


def usual_costs(model: LatencyPredictor, config: SchedulerConfig) -> TokenCosts:
    """The same without the margin that guards objectives: a forecast wants what such steps usually take."""
    return _costs(getattr(model, "usual", model.predict), model.reach, config)


def _costs(seconds: Callable[[BatchFeatures], float], reach: Reach, config: SchedulerConfig) -> TokenCosts:
    prompt, decodes = BatchFeatures(reach), BatchFeatures(reach)
    length = max(2, min(config.max_num_batched_tokens, config.max_model_len))
    prompt.add_chunk(0, length)
    count = config.max_num_seqs
    decodes.add_decodes(count, count * reach.tokens(min(DECODE_CONTEXT, config.max_model_len) - 1, 1))
    return TokenCosts(seconds(prompt) / length, seconds(decodes) / count)
