"""The step of last resort: whatever policies, budgets, lanes and back-offs have left out, one request runs.

The core builds it when no step is in flight and no other step holds anything. It cannot be empty while a request waits
or runs that is no suspect: with nothing in flight no unit is deferred and every running request is due. The requests in
its way lose their places one by one, until no other request holds a row or a unit. Then all kept pasts are given up as
well, and every unit is free or can be taken from the prefix index. What an accepted request holds at once is no more
than the pool (`max_model_len`, `most_blocks`), so its known length and its next token fit. The oldest request is
chosen, online before offline, so that it reaches its end if every step is one of these.
"""

from collections.abc import Iterator

from engine.api import RequestClass
from engine.request import Request, RequestStatus
from engine.scheduling.draft import Step, StepDraft

CAUSE = "stall"


class LastResort:
    """A step of one request's next token, or of a floor chunk of its prompt."""

    def __init__(self, draft: StepDraft) -> None:
        self._draft = draft
        self._state = draft.state

    def build(self, with_offline: bool) -> Step | None:
        """None: there is nothing to run. `with_offline`: offline requests may be chosen (there was a plan for them)."""
        request = self._next(with_offline)
        if request is None:
            return None
        victims = self._others(request)
        while not self._run(request):
            victim = next(victims, None)
            if victim is None:
                self._state.cache.parked.forget_all()
                self._run(request)
                break
            self._state.preempt(victim, CAUSE, self._draft.now)
        return self._draft.finish()

    def _next(self, with_offline: bool) -> Request | None:
        state = self._state
        for online in (state.running[RequestClass.ONLINE], state.waiting_online):
            if online:
                return online[0]
        if not with_offline:
            return None
        running = min(state.running[RequestClass.OFFLINE], key=lambda r: r.spec.lane, default=None)
        return running or next(state.waiting_offline.candidates(), None)

    def _others(self, request: Request) -> Iterator[Request]:
        """The others that run: offline before online, the last to arrive first, and those aside at the end."""
        running = self._state.running
        aside = [other for other in self._state.aside if other.status is RequestStatus.RUNNING]
        groups = (running[RequestClass.OFFLINE], running[RequestClass.ONLINE], aside)
        return iter([other for group in groups for other in reversed(group) if other is not request])

    def _run(self, request: Request) -> bool:
        """Whether the request is in the step with what is free now."""
        if request.status is not RequestStatus.RUNNING:
            return self._draft.admit(request, self._length)
        start = request.num_computed_tokens
        length = self._draft.allocation.grow_alone(request, self._length(start, request.num_pending_tokens))
        if length:
            self._draft.charge_and_add(request, length)
        return length > 0

    def _length(self, _start: int, wanted: int) -> int:
        return min(wanted, self._draft.ledger.tokens_left, self._state.config.min_prefill_chunk)
