"""One step's ledger: what is left of each limit, and what the step will take. Every chunk, decode included, is charged
to all of them (units are kept by the pool)."""

from dataclasses import dataclass, field

from engine.scheduling.output import CacheWork
from predictor.features import BatchFeatures
from predictor.model import LatencyPredictor


@dataclass(slots=True)
class StepLedger:
    """`seconds` is the predicted time of what has been charged so far (0 without a model)."""

    tokens_left: int
    sequences_left: int
    model: LatencyPredictor | None = None
    features: BatchFeatures = field(default_factory=BatchFeatures)
    seconds: float = 0.0

    @property
    def open(self) -> bool:
        """Whether one more chunk could be charged."""
        return self.tokens_left > 0 and self.sequences_left > 0

    def charge_decodes(self, count: int, context_sum: int) -> None:
        """Charge decodes in bulk; `context_sum` is the tokens they attend to, their own included."""
        self.tokens_left -= count
        self.sequences_left -= count
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        self.features.add_decodes(count, context_sum)
        if self.model is not None:
            self.seconds = self.model.predict(self.features)

    def charge(self, start: int, length: int) -> None:
        """Charge one chunk; the caller has checked that it fits."""
        self.tokens_left -= length
        self.sequences_left -= 1
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
        if self.model is not None:
            self.seconds += self.model.marginal(self.features, start, length)
        self.features.add_chunk(start, length)

    def charge_cache_work(self, work: CacheWork) -> None:
        """Charge what is run from hidden state, restored and moved; negative numbers take it back."""
        self.features.add_cache_work(*work)
        if self.model is not None:
            self.seconds += self.model.cache_work(*work)
