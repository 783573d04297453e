"""Adds drafted tokens to a step where they are worth their time.

A drafted token takes the time of one more decode and saves a decode later if it is right. A step of N decodes that
takes T seconds gives N / T tokens/s. A drafted token that adds m seconds and is right with probability p raises this
rate if p / m > N / T. The latency model gives the usual m and T; `engine.speculation` learns p. So drafts run where a
step costs nearly as much with them as without: with few rows. Drafts never preempt, and never use time that a deadline
needs, by the prediction with its margin.

Requests with penalties get drafts only where the host samples: the histories on a device count every sample once.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.request import Request
from engine.scheduling.objective import StepLedger
from engine.scheduling.plan import StepPlan
from engine.speculation.drafts import MAX_DRAFT, Drafts, Proposal
from engine.speculation.trace import DraftTraces
from predictor.features import BatchFeatures

MAX_ROWS = 64
"""Maximum number of decodes in a step with drafts: a proposal takes about 10 µs of the host's time."""
SYSTEM_TOKENS = 32
"""First tokens of a prompt that tell system prompts apart."""
NEVER_DRAFTED = -1

_DecodeTime = Callable[[BatchFeatures, int, int], float]
"""`usual_decodes` or `marginal_decodes` of the latency model."""


class _Candidate(NamedTuple):
    expected: float
    request: Request
    proposal: Proposal


class Speculation:
    """Propose, price and judge drafts for the running requests of one engine.

    Args:
        penalties: Whether requests with penalties may have drafts.
        drafts: Source of the drafts; default: the texts of the requests.
    """

    def __init__(self, *, penalties: bool = False, drafts: Drafts | None = None) -> None:
        self.traces = DraftTraces()
        self._penalties = penalties
        self._drafts = drafts or Drafts()
        self._fed: dict[str, int] = {}
        self._proposed: dict[str, Proposal] = {}

    def add(self, step: StepPlan, decodes: Sequence[Request], limit: float) -> None:
        """Add drafts behind `decodes`, which are in the step, while the step is predicted to end within `limit` s."""
        ledger = step.ledger
        if ledger.model is None or not 0 < len(decodes) <= MAX_ROWS or ledger.seconds >= limit:
            return
        rate = sum(bool(chunk.sample) for chunk in step.chunks) / ledger.model.usual(ledger.features)
        usual, sure = ledger.model.usual_decodes, ledger.model.marginal_decodes
        least = rate * _seconds(usual, ledger, decodes[0], 1)
        for expected, request, proposal in sorted(self._candidates(decodes, least), key=lambda each: -each.expected):
            count = min(len(proposal.tokens), ledger.tokens_left, ledger.sequences_left)
            if expected <= rate * _seconds(usual, ledger, request, count):
                continue
            while count and ledger.seconds + _seconds(sure, ledger, request, count) > limit:
                count -= 1
            if count and (count := step.add_guesses(request, proposal.tokens[:count])):
                self._proposed[request.request_id] = proposal.first(count)

    def is_promising(self, decodes: Sequence[Request]) -> bool:
        """Return whether the next step should wait for the tokens in flight because drafts may follow them."""
        if len(decodes) > MAX_ROWS:
            return False
        return any(self._feed(request) and self._propose(request, 2).tokens for request in decodes)

    def judge(self, request: Request, accepted: int) -> None:
        """Learn how many tokens of the request's draft in flight were right."""
        proposal = self._proposed.pop(request.request_id, None)
        if proposal is not None and request.request_id in self._fed:
            self._drafts.judged(request.request_id, proposal, accepted)
            self.traces.of(request.spec.job).judged(proposal, accepted)

    def end(self, request: Request, *, completed: bool) -> None:
        """Forget a request that ended. The answer of a completed one feeds later drafts."""
        self._proposed.pop(request.request_id, None)
        if self._fed.pop(request.request_id, NEVER_DRAFTED) != NEVER_DRAFTED:
            self._drafts.finish(request.request_id, completed)

    def catch_up(self) -> bool:
        """Index a part of the new tokens; call it while a step runs. Return whether more are left."""
        return self._drafts.catch_up()

    def _candidates(self, decodes: Sequence[Request], least: float) -> list[_Candidate]:
        """Return the drafts of which each token is right with a probability above `least`."""
        found: list[_Candidate] = []
        if least >= 1.0:
            return found
        for request in decodes:
            is_known = request.num_computed_tokens == len(request.token_ids) and not request.num_guessed
            if not is_known or request.cache_map.num_compact or not self._feed(request):
                continue
            proposal = self._propose(request, MAX_DRAFT)
            self.traces.of(request.spec.job).look(proposal)
            if not proposal.tokens:
                continue
            survival = self._drafts.survival(request.request_id, proposal.source)[: len(proposal.tokens)]
            count = sum(share > least for share in survival)
            if count:
                found.append(_Candidate(math.fsum(survival[:count]), request, proposal.first(count)))
        return found

    def _propose(self, request: Request, most: int) -> Proposal:
        room = request.max_total_tokens - len(request.token_ids) - 1
        return self._drafts.propose(request.request_id, min(most, room))

    def _feed(self, request: Request) -> bool:
        """Pass on the tokens of the request that are new. Return whether it may have drafts."""
        request_id, length = request.request_id, len(request.token_ids)
        fed = self._fed.get(request_id)
        if fed is None:
            fed = length if self._is_eligible(request) else NEVER_DRAFTED
            self._fed[request_id] = fed
            if fed != NEVER_DRAFTED:
                spec = request.spec
                system = (request.prefix_root, spec.prompt_token_ids[:SYSTEM_TOKENS])
                self._drafts.start(request_id, tuple(request.token_ids), spec.job, spec.tenant, system)
        elif 0 <= fed < length:
            self._drafts.extend(request_id, request.token_ids[fed:])
            self._fed[request_id] = length
        return fed != NEVER_DRAFTED

    def _is_eligible(self, request: Request) -> bool:
        spec = request.spec
        may_sample = self._penalties or not spec.sampling.has_penalties
        return may_sample and spec.pooling is None and not spec.probe


def _seconds(time: _DecodeTime, ledger: StepLedger, request: Request, count: int) -> float:
    """Return the time that `count` drafted tokens add to a step, by `time`."""
    contexts = range(request.num_computed_tokens + 1, request.num_computed_tokens + count + 1)
    masks = ledger.mask_seconds(count) if request.num_computed_tokens + 1 >= request.masked_from else 0.0
    return time(ledger.features, count, ledger.read(contexts)) + masks
