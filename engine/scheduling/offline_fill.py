"""Offline work of a step: the plan, as far as online work leaves room."""

import math
from collections.abc import Callable

from engine.request import Request, RequestStatus
from engine.scheduling.draft import StepDraft
from engine.scheduling.ledger import num_masked
from engine.scheduling.objective import OfflineAllowance
from engine.scheduling.planner import OfflinePlan, offline_allowance


class OfflineFill:
    """Adds offline requests to a step, behind its online work."""

    def __init__(self, draft: StepDraft, lookup: Callable[[str], Request | None]) -> None:
        self._draft = draft
        self._state = draft.state
        self._lookup = lookup

    def add(self, plan: OfflinePlan, num_online_decodes: int, *, beside_prompt: bool) -> None:
        """Add the items of the plan that still fit beside the online work of this step."""
        state, ledger = self._state, self._draft.ledger
        allowance = offline_allowance(
            state, ledger, num_online_decodes, beside_prompt, self._draft.now, lambda: self._draft.pace
        )
        before, num_online = ledger.seconds, len(self._draft.requests)
        for planned in plan.chunks[self._add_decodes(plan, allowance) :]:
            if not ledger.open:
                break
            request = self._lookup(planned.request_id)
            if request is None or (request.status is RequestStatus.RUNNING) != planned.running:
                continue  # it has ended, was preempted for this step's online work, or is in the step already
            add = self._continue if planned.running else self._start
            if not add(request, allowance):
                break
        self._mark_beside_offline(num_online)
        if state.has_online and not math.isinf(allowance.limit):
            state.counters.leftover_seconds += max(0.0, allowance.limit - before)
            state.counters.leftover_used_seconds += ledger.seconds - before

    def _add_decodes(self, plan: OfflinePlan, allowance: OfflineAllowance) -> int:
        """The decodes before anything else in the plan, at once, if there is room for all of them: what `_continue`
        does one by one. Returns how many items of the plan are done with."""
        state, draft, ledger, step_id = self._state, self._draft, self._draft.ledger, self._draft.step_id
        if state.cache.num_compact or state.unwritten:
            return 0
        decodes, contexts, examined = self._leading_decodes(plan)
        if not decodes or len(decodes) > min(ledger.tokens_left, ledger.sequences_left):
            return 0
        seconds = ledger.seconds + ledger.mask_seconds(num_masked(decodes))
        if not allowance.fits_decodes(ledger.features, seconds, len(decodes), ledger.read(contexts)):
            return 0
        allocation, block_size, running = draft.allocation, state.config.block_size, RequestStatus.RUNNING
        granted: list[Request] = []
        for request in decodes:
            if request.status is not running:
                continue  # it gave way to an earlier decode of this loop
            has_room = request.num_computed_tokens < len(request.cache_map.blocks) * block_size
            if has_room or allocation.grow_decode(request):
                request.last_step = step_id  # none of the others may take its place any more
                granted.append(request)
        if granted:
            ledger.charge_more_decodes(len(granted), ledger.read([r.num_computed_tokens + 1 for r in granted]))
            draft.add_decodes(granted)
        return examined

    def _leading_decodes(self, plan: OfflinePlan) -> tuple[list[Request], list[int], int]:
        """What the plan begins with: running requests whose next token is due, their contexts, and how many items they
        and those between them are that have ended or run no more."""
        lookup, step_id, running = self._lookup, self._draft.step_id, RequestStatus.RUNNING
        decodes: list[Request] = []
        contexts: list[int] = []
        examined = 0
        for request_id, length, planned in plan.chunks:
            if length != 1 or not planned:
                break
            request = lookup(request_id)
            if request is not None and request.status is running and request.last_step != step_id:
                expected = len(request.token_ids) + request.num_placeholders
                pending = expected - request.num_computed_tokens
                if pending == 1 and expected < request.max_total_tokens:
                    contexts.append(expected)
                    decodes.append(request)
                elif pending > 1:
                    break
            examined += 1
        return decodes, contexts, examined

    def _mark_beside_offline(self, num_online: int) -> None:
        """Where offline requests joined the first `num_online` of the step, mark each online one that they delay."""
        if len(self._draft.requests) > num_online:
            for request in (*self._draft.requests[:num_online], *self._state.waiting_online):
                request.beside_offline = True

    def _continue(self, request: Request, allowance: OfflineAllowance) -> bool:
        """Whether the tail of the plan should still be tried."""
        if request.last_step == self._draft.step_id or not (request.decode_is_due or request.prefill_is_due):
            return True
        start = request.num_computed_tokens
        wanted = request.num_expected_tokens - start
        length = self._length(request, allowance, start, wanted)
        if length == 0:
            return False
        self._draft.advance(request, length)
        return True

    def _start(self, request: Request, allowance: OfflineAllowance) -> bool:
        if not self._draft.may_start(request):
            return True
        return self._draft.admit(request, lambda start, wanted: self._length(request, allowance, start, wanted))

    def _length(self, request: Request, allowance: OfflineAllowance, start: int, wanted: int) -> int:
        config, ledger, whole = self._state.config, self._draft.ledger, wanted
        wanted = min(wanted, ledger.tokens_left)
        # without time for its masks the rest of a prompt is of no use yet either
        seconds = ledger.seconds + ledger.mask_seconds(start + whole >= request.masked_from)
        seconds += ledger.compact_seconds(request.cache_map.num_compact * config.block_size)
        length = allowance.largest(ledger.features, seconds, start, wanted)
        if not self._draft.chunks and (self._draft.nothing_in_flight or not self._state.has_online):
            # Nothing else moves: the first request always does, whatever the budget says (E4). Beside online work that
            # cannot start, it gives back its room in the end.
            length = max(length, min(wanted, config.min_prefill_chunk))
        return length
