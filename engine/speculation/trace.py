"""Recorded outcomes of drafts, and drafts drawn from them: speculation on a virtual clock, which has no texts.

A server records them for the replays of its budget search (`engine.colocation.replay`); the simulator reads the record.

A trace counts drafts by source, and their outcomes by length, because longer drafts are accepted more often. It has no
prices: a simulated scheduler decides by its own latency model which drafts to verify.
"""

import json
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine.speculation.drafts import (
    MAX_DRAFT,
    NOTHING,
    PRIORS,
    Acceptance,
    Drafts,
    DraftSource,
    Proposal,
)  # fmt: skip

MAX_LOOKS = 1 << 15
"""Look-ups after which all counts are halved, so that recent outcomes count most."""
RIGHT, WRONG = 0, 1
"""Tokens of drawn drafts. Every simulated step samples RIGHT."""
_ORIGINS = "context", "job", "tenant"


class Outcome(NamedTuple):
    """A draft of `length` tokens; the first `accepted` tokens were right."""

    length: int
    accepted: int


@dataclass(slots=True)
class DraftTrace:
    """Drafts of similar requests.

    Attributes:
        looks: Decodes for which a draft was looked up.
        found: Number of drafts that were found, by source.
        outcomes: Number of verified drafts by source and outcome.
    """

    looks: float = 0.0
    found: dict[DraftSource, float] = field(default_factory=dict)
    outcomes: dict[DraftSource, dict[Outcome, float]] = field(default_factory=dict)

    def look(self, proposal: Proposal) -> None:
        """Record a look-up, which found a draft unless `proposal` is empty."""
        self.looks += 1.0
        if proposal.tokens:
            self.found[proposal.source] = self.found.get(proposal.source, 0.0) + 1.0
        if self.looks >= MAX_LOOKS:
            self.looks /= 2
            self.found = _halved(self.found)
            self.outcomes = {source: _halved(counts) for source, counts in self.outcomes.items()}

    def judged(self, proposal: Proposal, accepted: int) -> None:
        """Record the outcome of a verified draft."""
        counts, outcome = self.outcomes.setdefault(proposal.source, {}), Outcome(len(proposal.tokens), accepted)
        counts[outcome] = counts.get(outcome, 0.0) + 1.0

    @property
    def per_decode(self) -> float:
        """Return the mean number of accepted tokens of a decode if every draft that is found is verified."""
        accepted = 0.0
        for source, found in self.found.items():
            counts = self.outcomes.get(source, {})
            if total := sum(counts.values()):
                accepted += found * sum(outcome.accepted * count for outcome, count in counts.items()) / total
        return accepted / self.looks if self.looks else 0.0

    def to_document(self) -> dict[str, Any]:
        """Return the trace as JSON values."""
        sources = [
            [*source, found, [[*outcome, count] for outcome, count in self.outcomes.get(source, {}).items()]]
            for source, found in self.found.items()
        ]
        return {"looks": self.looks, "sources": sources}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "DraftTrace":
        """Read a trace. Raise ValueError, KeyError or TypeError if it is damaged."""
        trace = cls(float(document["looks"]))
        for origin, match, found, outcomes in document["sources"]:
            if origin not in _ORIGINS or match not in PRIORS:
                raise ValueError(f"unknown source of drafts {origin!r:.20} {match!r:.20}")
            source = DraftSource(origin, match)
            trace.found[source] = float(found)
            trace.outcomes[source] = {Outcome(length, accepted): float(count) for length, accepted, count in outcomes}
            if any(not 0 <= accepted <= length <= MAX_DRAFT for length, accepted in trace.outcomes[source]):
                raise ValueError("impossible outcomes of drafts")
        if not trace.looks >= sum(trace.found.values()) * (1 - 1e-9):
            raise ValueError("more drafts than look-ups")
        return trace


Key = TypeVar("Key")


def _halved(counts: Mapping[Key, float]) -> dict[Key, float]:
    return {key: count / 2 for key, count in counts.items()}


def _summed(counts: Mapping[Key, float]) -> Iterable[tuple[Key, float]]:
    return zip(counts, accumulate(counts.values()), strict=True)


@dataclass(frozen=True, slots=True)
class DraftTraces:
    """Traces of the lines of batch jobs and of all other requests."""

    chats: DraftTrace = field(default_factory=DraftTrace)
    jobs: DraftTrace = field(default_factory=DraftTrace)

    def of(self, job: str) -> DraftTrace:
        """Return the trace of a request of `job`; "" if it belongs to none."""
        return self.jobs if job else self.chats

    def to_document(self) -> dict[str, Any]:
        """Return both as JSON values."""
        return {"chats": self.chats.to_document(), "jobs": self.jobs.to_document()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "DraftTraces":
        """Read both. Raise ValueError, KeyError or TypeError if they are damaged."""
        return cls(DraftTrace.from_document(document["chats"]), DraftTrace.from_document(document["jobs"]))


def read_traces(path: Path) -> DraftTraces:
    """Read the traces that a server stored beside its latency profile. Raise OSError or ValueError without any."""
    document = json.loads(path.read_bytes())
    try:
        return DraftTraces.from_document(document["drafts"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it holds no outcomes of drafts ({error})") from None


class TracedDrafts(Drafts):
    """Draw drafts and their outcomes from traces. Acceptance is learned from these outcomes, as by a server.

    Deterministic for a seed.
    """

    def __init__(self, traces: DraftTraces, seed: int = 0) -> None:
        super().__init__()
        self._traces = traces
        self._random = random.Random(seed)
        self._jobs: dict[str, str] = {}
        self._learned = {job: Acceptance() for job in ("", "job")}

    def start(self, request_id: str, _tokens: Sequence[int], job: str, _tenant: str, _prefix_key: Hashable) -> None:
        self._jobs[request_id] = "job" if job else ""

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Do nothing, because a drawn draft does not depend on the tokens."""

    def propose(self, request_id: str, most: int) -> Proposal:
        """Return a draft with the frequency of the trace; its right tokens are RIGHT, the others WRONG."""
        trace = self._traces.of(self._jobs[request_id])
        place = self._random.random() * trace.looks
        source = next((source for source, up_to in _summed(trace.found) if place < up_to), None)
        outcomes = None if source is None else trace.outcomes.get(source)
        if source is None or not outcomes or most <= 0:
            return NOTHING
        ((length, accepted),) = self._random.choices(tuple(outcomes), tuple(outcomes.values()))
        return Proposal(((RIGHT,) * accepted + (WRONG,) * (length - accepted))[:most], source)

    def survival(self, request_id: str, source: DraftSource) -> tuple[float, ...]:
        return self._learned[self._jobs[request_id]][source].survival

    def judged(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        self._learned[self._jobs[request_id]][proposal.source].learn(len(proposal.tokens), accepted)

    def finish(self, request_id: str, _completed: bool) -> None:
        self._jobs.pop(request_id, None)
