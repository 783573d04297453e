"""Adds offline work to a step, as planned, as far as online work leaves room."""

import math
from itertools import takewhile

from engine.request import Request, RequestStatus
from engine.scheduling.draft import StepDraft
from engine.scheduling.ledger import num_masked
from engine.scheduling.objective import OfflineAllowance
from engine.scheduling.planner import OfflinePlan, leading_decodes, offline_allowance


class OfflineFill:
    """Add offline requests to a step behind its online work."""

    def __init__(self, draft: StepDraft) -> None:
        self._draft = draft
        self._state = draft.state
        self._lookup = draft.state.requests.get

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
                continue  # the request has ended, was preempted by this step's online work, or has already started
            add = self._continue if planned.running else self._start
            if not add(request, allowance):
                break
        if state.speculation is not None:
            started = zip(self._draft.chunks[num_online:], self._draft.requests[num_online:], strict=True)
            decodes = [request for chunk, request in started if chunk.length == 1 and chunk.sample]
            state.speculation.add(self._draft, decodes, allowance.limit)
        self._mark_beside_offline(num_online)
        if state.has_online and not math.isinf(allowance.limit):
            state.counters.leftover_seconds += max(0.0, allowance.limit - before)
            state.counters.leftover_used_seconds += ledger.seconds - before

    def _add_decodes(self, plan: OfflinePlan, allowance: OfflineAllowance) -> int:
        """Add the leading decodes of the plan in bulk if all fit. Return the number of plan items handled.

        Same as `_continue` per decode, but faster.
        """
        state, draft, ledger = self._state, self._draft, self._draft.ledger
        if state.cache.num_compact or state.unwritten:
            return 0
        decodes, examined = self._leading_decodes(plan)
        if not decodes or len(decodes) > min(ledger.tokens_left, ledger.sequences_left):
            return 0
        seconds = ledger.seconds + ledger.mask_seconds(num_masked(decodes))
        contexts = ledger.read([request.num_computed_tokens + 1 for request in decodes])
        if not allowance.fits_decodes(ledger.features, seconds, len(decodes), contexts):
            return 0
        granted, lengths = draft.allocation.grow_decodes(decodes)
        if granted:
            ledger.charge_more_decodes(len(granted), ledger.read(lengths))
            draft.add_decodes(granted, lengths)
        return examined

    def _leading_decodes(self, plan: OfflinePlan) -> tuple[list[Request], int]:
        """Return the decodes at the start of the plan and the number of plan items that they cover.

        Requests that have ended, stopped running or are already in the step are skipped.
        """
        items = takewhile(lambda item: item.running and item.length == 1, plan.chunks)
        found = [self._lookup(item.request_id) for item in items]
        running = [r for r in found if r and r.status is RequestStatus.RUNNING and r.last_step != self._draft.step_id]
        decodes, count = leading_decodes(running)
        return decodes, len(found) if count == len(running) else found.index(running[count])

    def _mark_beside_offline(self, num_online: int) -> None:
        """If offline requests joined the step, mark each online request that they delay.

        `num_online`: number of online requests at the start of the step's list.
        """
        if len(self._draft.requests) > num_online:
            for request in (*self._draft.requests[:num_online], *self._state.waiting_online):
                request.beside_offline = True

    def _continue(self, request: Request, allowance: OfflineAllowance) -> bool:
        """Add a running request. Return whether the rest of the plan should be tried."""
        wanted = request.num_pending_tokens
        if request.last_step == self._draft.step_id or not wanted:
            return True
        length = self._length(request, allowance, request.num_computed_tokens, wanted)
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
        # the end of a prompt is useless without time for the masks that sampling its first token needs
        seconds = ledger.seconds + ledger.mask_seconds(start + whole >= request.masked_from)
        seconds += ledger.compact_seconds(request.cache_map.num_compact * config.block_size)
        length = allowance.largest(ledger.features, seconds, start, wanted)
        if not self._draft.chunks and (not self._state.in_flight or not self._state.has_online):
            # No other request progresses: the first one always does, even beyond the budget (E4). If online work
            # cannot start, this request ends at last and frees its memory.
            length = max(length, min(wanted, config.min_prefill_chunk))
        return length
