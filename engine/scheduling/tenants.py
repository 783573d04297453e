"""Fair sharing of a step between tenants: the order of prompts, and the transfer of rows.

Tenants are served by the service that they have received (`engine.scheduling.fair_share`, virtual token counters), so
a thousand requests of one tenant do not delay another's. Rows and memory are freed only when a request ends, so
`let_in` transfers a row to a tenant with less than its share. The tenant with the most rows preempts its newest
request, and keeps at least as many rows as the other tenant then has. Each request is let in and preempted this way at
most once, so that rows do not go back and forth.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from engine.api import RequestClass
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.draft import StepDraft
from engine.scheduling.fair_share import FairWalk, OnlineShare, by_tenant
from engine.scheduling.laxity import PrefillPace, PromptOrder
from engine.scheduling.victims import freed_units
from engine.scheduling.waiting import by_age

Order = Callable[[list[Request], PrefillPace | None], PromptOrder]
"""Order the requests of one tenant, given by arrival, at the pace of that tenant."""


def order_tenants(
    requests: Sequence[Request], share: OnlineShare, pace: PrefillPace | None, order: Order
) -> PromptOrder:
    """Order `requests` of several tenants, given by arrival: tenants by received service, within a tenant by `order`.

    All requests are in `urgent`. `behind` holds the oldest request that the urgent ones of its own tenant leave behind;
    only this one needs a floor chunk, because no tenant starves another.
    """
    groups = by_tenant(requests)
    orders = {name: order(groups[name], own) for name, own in _paces(groups, pace).items()}
    heads = [ordered.behind[0] for ordered in orders.values() if ordered.urgent and ordered.behind]
    head = min(heads, key=by_age, default=None)
    queues = {name: chain(ordered.urgent, ordered.behind) for name, ordered in orders.items()}
    return PromptOrder(_merged(queues, share.walk(groups), share), () if head is None else (head,))


def _merged(queues: Mapping[str, Iterator[Request]], walk: FairWalk, share: OnlineShare) -> Iterator[Request]:
    """Merge the queues lazily, because a step starts only a few of many requests."""
    while walk:
        request = next(queues[walk.head], None)
        if request is None:
            walk.drop()
            continue
        walk.charge(share.price(request))
        yield request


def _paces(groups: Mapping[str, Sequence[Request]], pace: PrefillPace | None) -> dict[str, PrefillPace | None]:
    """Return each tenant's prefill pace while it has requests.

    A tenant is done when every other tenant has received as much service or is done too. Only the ratio of work
    matters, so it is measured in prompt tokens.
    """
    if pace is None:
        return dict.fromkeys(groups)
    work = {name: sum(request.num_prompt_tokens for request in group) for name, group in groups.items()}
    return {name: pace.slower(sum(min(own, other) for other in work.values()) / own) for name, own in work.items()}


def let_in(draft: StepDraft) -> Request | None:
    """Return the request that must start first because a row and memory are freed for it, or None.

    Called before the step contains any request. Preempts requests of the tenant with the most rows if necessary.
    """
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
    """Return the newest requests of the tenants with the most rows until `request` fits.

    Empty if it fits without them or not even with them. A tenant loses no row to one that would then have more rows or
    has received more service.
    """
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
