"""Builds one step: which requests run, how many tokens each, on which units (HyGen §4.1, Algorithm 1).

The ledger is spent in this order:

1. Running online decodes, mandatory unless memory is short.
2. Online prefills (see `engine.scheduling.prompts`), sized by the slack of the decodes beside them.
3. Drafts behind the online decodes, if no prompt waits (see `engine.scheduling.speculation`).
4. Offline work, as far as it still fits (see `engine.scheduling.offline_fill`), and drafts behind its decodes.

Only a shortage of *memory* (units or rows) preempts. A request that does not fit into a step is skipped and keeps its
cache.
"""

import math

from engine.api import RequestClass
from engine.request import Request, due
from engine.scheduling.draft import StepDraft
from engine.scheduling.in_flight import InFlight
from engine.scheduling.offline_fill import OfflineFill
from engine.scheduling.overdue import binds, overdue
from engine.scheduling.planner import OfflinePlan
from engine.scheduling.prompts import PromptFill
from engine.scheduling.tenants import let_in
from engine.scheduling.victims import online_order


class StepBuilder:
    """Build one ordinary step."""

    def __init__(self, draft: StepDraft) -> None:
        self._draft = draft
        self._state = draft.state
        self._prompts = PromptFill(draft)
        self._offline = OfflineFill(draft)
        self._tightest = math.inf
        self._decodes: list[Request] = []

    def build(self, plan: OfflinePlan | None) -> InFlight | None:
        """Return the step, or None if no request can run now. Without a plan the step is online-only."""
        self._state.cache.balance()
        admitted = let_in(self._draft)
        late = overdue(self._state, self._draft.pace, self._draft.now) if binds(self._state) else []
        select = self._state.online_policy.select
        starts = [] if late else None if select is None else select(self._state, self._draft.now)
        num_decodes = self._add_online_decodes()
        self._prompts.add(starts, late if admitted is None else [admitted])
        if starts is None:
            self._prompts.restore_compact()
        if self._state.speculation is not None and not (self._prompts.has_added or self._state.waiting_online):
            limit = min(self._tightest, self._state.objective.budget.latency_budget)
            self._state.speculation.add(self._draft, self._decodes, limit)
        if plan is not None:
            self._offline.add(plan, num_decodes, beside_prompt=self._prompts.has_added)
        return self._draft.finish(self._spare())

    def _spare(self) -> float:
        """Return `SchedulerOutput.spare`; 0 while a prompt in the step or in the queue waits for its first token."""
        state, ledger = self._state, self._draft.ledger
        if ledger.model is None or self._prompts.has_added or state.waiting_online:
            return 0.0
        objective = state.objective
        online = state.running[RequestClass.ONLINE]
        limit = min(self._tightest, objective.budget.latency_budget if online else objective.idle_limit)
        return max(0.0, limit - ledger.seconds)

    def _add_online_decodes(self) -> int:
        """Add the online decodes and the short runs of forced tokens that are due. Return their number.

        Also set the time limit for prompts from the earliest token deadline that the decodes can still meet.
        """
        draft, ledger, objective = self._draft, self._draft.ledger, self._state.objective
        decodes, prompts = due(online_order(self._state, draft.now))
        self._prompts.any_running = bool(prompts)
        decodes, contexts = draft.allocation.grow_decodes(decodes)
        timed = ledger.model is not None and (not math.isinf(objective.tbt) or bool(self._state.promised))
        slacks = [due_at - draft.now for due_at in self._state.token_deadlines(decodes, draft.now)] if timed else []
        draft.add_decodes(decodes, contexts)
        self._decodes = decodes
        ledger.charge_decodes(contexts)
        for request in prompts:
            if request.row < 0 or not request.is_answering or not ledger.open:
                continue
            if draft.advance(request, min(request.num_pending_tokens, ledger.tokens_left)) and timed:
                slacks += [due_at - draft.now for due_at in self._state.token_deadlines([request], draft.now)]
        if slacks:
            self._tightest = min(slacks)
            # A decode that would be late even in a decode-only step cannot be saved by starving the prompts.
            if math.isfinite(limit := ledger.tightest(slacks)):
                self._prompts.time_limit = min(limit, objective.tbt)
        return len(draft.chunks)
