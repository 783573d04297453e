"""How often drafts are accepted: rates by source and position, learned from outcomes, recent ones first."""

from typing import NamedTuple

MAX_DRAFT = 16
"""Maximum number of tokens in a draft."""
MEMORY = 64
"""Number of recent outcomes that a rate remembers; older ones fade exponentially."""
TRUST = 4.0
"""Outcomes that a prior counts for."""
DRIFT = 1.0 / 1024
"""Share of the way back to the prior for each draft that is not tried: a source that failed gets another chance."""
PRIORS = {8: 0.8, 4: 0.65, 2: 0.5}
"""Acceptance of a token before any outcome, by the length of the match. It lets a new job try."""


class DraftSource(NamedTuple):
    """Where a draft comes from: "context", "job" or "tenant", and the length of the match that precedes it."""

    origin: str
    match: int


class _Rates:
    """P(position i is accepted if the positions before it are), i from 0 on."""

    __slots__ = ("_outcomes", "_prior", "_rates", "_sums", "_survival")

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._rates = [prior]
        self._outcomes = [0]
        self._survival: tuple[float, ...] = ()
        self._sums: tuple[float, ...] = ()

    def learn(self, proposed: int, accepted: int) -> None:
        rates, outcomes = self._rates, self._outcomes
        for position in range(min(accepted + 1, proposed)):
            if position == len(rates):
                rates.append(rates[-1])
                outcomes.append(0)
            count = outcomes[position]
            if count < MEMORY:
                outcomes[position] = count = count + 1
            rates[position] += ((position < accepted) - rates[position]) / (TRUST + count)
        self._survival = ()

    def relax(self) -> None:
        if self._rates[0] < self._prior:
            self._rates[0] += (self._prior - self._rates[0]) * DRIFT
            self._survival = ()

    @property
    def survival(self) -> tuple[float, ...]:
        if not self._survival:
            self._compute()
        return self._survival

    def expected(self, length: int) -> float:
        """Return the expected number of accepted tokens of a draft."""
        if not self._survival:
            self._compute()
        return self._sums[length]

    def _compute(self) -> None:
        survival, sums, product, total = [], [0.0], 1.0, 0.0
        rates = self._rates
        for position in range(MAX_DRAFT):
            product *= rates[position] if position < len(rates) else rates[-1]
            total += product
            survival.append(product)
            sums.append(total)
        self._survival, self._sums = tuple(survival), tuple(sums)


class Acceptance:
    """Acceptance of the drafts of one job or tenant."""

    def __init__(self) -> None:
        self._rates: dict[DraftSource, _Rates] = {}

    def _of(self, source: DraftSource) -> _Rates:
        rates = self._rates.get(source)
        if rates is None:
            rates = self._rates[source] = _Rates(PRIORS[source.match])
        return rates

    def survival(self, source: DraftSource) -> tuple[float, ...]:
        """Return P(the draft is accepted up to and including position i) for MAX_DRAFT positions; never increasing."""
        return self._of(source).survival

    def expected(self, source: DraftSource, length: int) -> float:
        """Return the expected number of accepted tokens of a draft of `length` tokens."""
        return self._of(source).expected(length)

    def learn(self, source: DraftSource, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` tokens were accepted."""
        self._of(source).learn(proposed, accepted)

    def relax(self, source: DraftSource) -> None:
        """Record that a draft was not tried, because the source seemed too bad."""
        self._of(source).relax()
