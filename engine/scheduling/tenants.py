"""Tenants in a step: in which order their prompts go, what a knapsack chooses of each, and who gets a row.

Tenants go by what they have had (`engine.scheduling.online_share`, virtual token counters), so that a thousand requests
of one are not in the way of another's. Rows and memory change hands only when a request ends, so `let_in` gives a row
to a tenant that has fewer than its share: the tenant that holds most rows preempts its youngest request, and keeps at
least as many rows as the other then has. Each request is let in and moved away once, so that rows do not go back and
forth.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from engine.api import RequestClass
from engine.request import Request
from engine.scheduling.draft import StepDraft
from engine.scheduling.fair_share import FairWalk
from engine.scheduling.laxity import PrefillPace, PromptOrder
from engine.scheduling.online_share import OnlineShare, by_tenant
from engine.scheduling.selection import Pressure, Select, Start
from engine.scheduling.state import SchedulerState
from engine.scheduling.victims import freed_units
from engine.scheduling.waiting import by_age
from predictor.limits import UNITS_PER_BLOCK

Order = Callable[[list[Request], PrefillPace | None], PromptOrder]
"""Orders requests of one tenant, given by age, at the pace of that tenant."""


def order_tenants(
    requests: Sequence[Request], share: OnlineShare, pace: PrefillPace | None, order: Order
) -> PromptOrder:
    """`requests` of several tenants, given by age: tenants go by what they have had, the requests of one by `order`.

    All are in `urgent`; the one in `behind` is the oldest of those that the urgent ones of their own tenant leave
    behind. No other needs a floor chunk: no tenant keeps another waiting for ever.
    """
    groups = by_tenant(requests)
    orders = {name: order(groups[name], own) for name, own in _paces(groups, pace).items()}
    heads = [ordered.behind[0] for ordered in orders.values() if ordered.urgent and ordered.behind]
    head = min(heads, key=by_age, default=None)
    queues = {name: chain(ordered.urgent, ordered.behind) for name, ordered in orders.items()}
    return PromptOrder(_merged(queues, share.walk(groups), share), () if head is None else (head,))


def _merged(queues: Mapping[str, Iterator[Request]], walk: FairWalk, share: OnlineShare) -> Iterator[Request]:
    """As far as anybody asks: of a thousand requests a step starts a few."""
    while walk:
        request = next(queues[walk.head], None)
        if request is None:
            walk.drop()
            continue
        walk.charge(share.price(request))
        yield request


def _paces(groups: Mapping[str, Sequence[Request]], pace: PrefillPace | None) -> dict[str, PrefillPace | None]:
    """What each tenant gets of the machine while it has requests: it is done when all others have had as much, or are
    done as well. Only how much work they have beside one another counts, so tokens will do."""
    if pace is None:
        return dict.fromkeys(groups)
    work = {name: sum(request.num_prompt_tokens for request in group) for name, group in groups.items()}
    return {name: pace.slower(sum(min(own, other) for other in work.values()) / own) for name, own in work.items()}


def select_by_tenant(state: SchedulerState, select: Select, pressure: Pressure) -> list[Start]:
    """What `select` chooses of the waiting requests; where several tenants have some, of each tenant's what has room
    beside those of the tenants before it."""
    if not state.online_share.is_contested:
        return select(state.waiting_online, pressure)
    groups = by_tenant(state.waiting_online)
    starts: list[Start] = []
    for tenant in state.online_share.by_standing(groups):
        found = select(groups[tenant], pressure)
        starts += found
        if not found:
            break  # smaller ones of the tenants behind it would take its room again and again
        pressure = pressure.less(found)
    return starts


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
    share = state.online_share
    if request not in share.let_in:
        for victim in _victims(draft, request, held):
            share.let_in.add(request)
            share.moved.add(victim)
            state.preempt(victim, "tenant", draft.now)
    return request if request in share.let_in else None


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
    younger, victims = [other for other in running[::-1] if other not in share.moved], []
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
