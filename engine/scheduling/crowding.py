"""A row for a tenant that has fewer than its share: one that holds more gives up its youngest request.

Rows and memory go to tenants by what they have had (`engine.scheduling.online_share`), but they only change hands when
a request ends: beside a hundred long answers of one tenant, another's chats would wait for the first of them to end.
A tenant that gives up a row has as many left as the other then has, or more; each request is let in like this once and
moved away once, so that places do not change hands again and again.
"""

from collections import Counter

from engine.api import RequestClass
from engine.request import Request
from engine.scheduling.draft import StepDraft
from engine.scheduling.victims import freed_units
from predictor.limits import UNITS_PER_BLOCK


def let_in(draft: StepDraft) -> Request | None:
    """The request that must start before any other because a row and memory were made free for it; before anything is
    in the step. None: no tenant is kept out, or nothing can be done about it."""
    state = draft.state
    if not state.waiting_online or not state.online_share.is_contested:
        return None
    held = Counter(request.spec.tenant for request in state.running[RequestClass.ONLINE])
    most = max(held.values(), default=0)
    short = {tenant for tenant in state.online_share.waiting(held) if held[tenant] + 2 <= most or not held[tenant]}
    if not short:
        return None
    first: dict[str, Request] = {}
    for request in state.waiting_online:
        if request.spec.tenant in short and not request.spec.probe:
            first.setdefault(request.spec.tenant, request)
            if len(first) == len(short):
                break
    if not first or not draft.may_start(request := first[state.online_share.by_standing(first)[0]]):
        return None
    if not request.was_let_in:
        for victim in _victims(draft, request, held):
            request.was_let_in = True
            victim.was_moved = True
            state.preempt(victim, "tenant", draft.now, draft.step_id)
    return request if request.was_let_in else None


def _victims(draft: StepDraft, request: Request, held: Counter[str]) -> list[Request]:
    """The youngest of the tenant that holds most rows, until there is room. No tenant gives up any to one that would
    then have more rows, or that has had more. Empty: offline work can give way, or even all of these are too few."""
    state = draft.state
    offline = state.running[RequestClass.OFFLINE]
    rows = len(state.free_rows) + len(offline)
    units = state.pool.num_available_units + state.pool.num_deferred_units
    units += state.cache.parked.num_units(online=True, but=request) + sum(map(freed_units, offline))
    units -= state.prompt_reserve(state.running_prompts())
    wanted = UNITS_PER_BLOCK * request.num_blocks(state.config.block_size)
    running, share = state.running[RequestClass.ONLINE], state.online_share
    own = share.received(request.spec.tenant, ())
    fewest = held[request.spec.tenant] + 2
    held = Counter({tenant: count for tenant, count in held.items() if share.received(tenant, running) >= own})
    younger, victims = [other for other in running[::-1] if not other.was_moved], []
    while rows <= 0 or units < wanted:
        tenant, count = max(held.items(), key=lambda item: item[1], default=("", 0))
        if count < fewest:
            return []
        victim = next((other for other in younger if other.spec.tenant == tenant), None)
        if victim is None:
            del held[tenant]
            continue
        younger.remove(victim)
        victims.append(victim)
        held[tenant] -= 1
        rows, units = rows + 1, units + freed_units(victim)
    return victims
