"""Admission: whether a request can run, whether an arrival is queued or refused (429), and which tenant starts.

The expected wait of an arrival is the work ahead of it in prompt order (see `engine.scheduling.urgency`). Where several
tenants have requests, fair sharing decides which of their prompts are ahead. The work ahead consists of prompt tokens,
and of rows and memory that become free as running requests end. The latency model supplies the times; without a model
the expected wait is zero.

Tenants are served by the service that they have received (`engine.scheduling.fair_share`, virtual token counters), so a
thousand requests of one tenant do not delay another's. Rows and memory are freed only when a request ends, so `let_in`
transfers a row to a tenant with less than its share. The tenant with the most rows preempts its newest request, and
keeps at least as many rows as the other tenant then has. Each request is let in and preempted this way at most once, so
that rows do not go back and forth.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, takewhile

from engine.api import EngineRequest, Lane, RequestClass, RequestTimes
from engine.errors import ContextLengthError, InvalidRequestError, QueueFullError
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.fair_share import FairWalk, OnlineShare, by_tenant
from engine.scheduling.plan import StepPlan
from engine.scheduling.state import SchedulerState
from engine.scheduling.urgency import (
    PrefillPace,
    PromptOrder,
    QueueWork,
    answer_tokens,
    binds,
    freed_units,
    longest_queue_time,
    memory_wait,
    order_prompts,
    prefill_pace,
    prompt_seconds,
    slack,
    uses_laxity,
)
from engine.scheduling.waiting import WaitingQueue, by_age

Order = Callable[[list[Request], PrefillPace | None], PromptOrder]
"""Order the requests of one tenant, given by arrival, at the pace of that tenant."""


def order_online(
    prompts: list[Request],
    waiting: Sequence[Request],
    share: OnlineShare,
    pace: PrefillPace | None,
    by_urgency: Order | None,
) -> PromptOrder:
    """Order the prompts in progress and the waiting requests, both given by arrival.

    `by_urgency`: order of one tenant; None: the prompts in progress precede the others, which keep their order.
    """
    if by_urgency is not None:
        if isinstance(waiting, WaitingQueue):
            both = waiting.with_others(prompts)
        else:
            both = sorted([*prompts, *waiting], key=by_age)
        return order_tenants(both, share, pace, by_urgency) if share.is_contested else by_urgency(both, pace)
    if not share.is_contested:
        return PromptOrder((), [*prompts, *waiting])
    merged = order_tenants(waiting, share, None, lambda group, _: PromptOrder((), group)).urgent
    return PromptOrder(chain(prompts, merged), ())


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


def let_in(step: StepPlan) -> Request | None:
    """Return the request that must start first because a row and memory are freed for it, or None.

    Called before the step contains any request. Preempts requests of the tenant with the most rows if necessary.
    """
    state = step.state
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
    if not first or not step.may_start(request := first[state.online_share.by_standing(first)[0]]):
        return None
    share = state.online_share
    if request not in share.let_in:
        for victim in _victims(step, request, held):
            share.let_in.add(request)
            share.moved.add(victim)
            state.preempt(victim, "tenant", step.now)
    return request if request in share.let_in else None


def _victims(step: StepPlan, request: Request, held: Counter[str]) -> list[Request]:
    """Return the newest requests of the tenants with the most rows until `request` fits.

    Empty if it fits without them or not even with them. A tenant loses no row to one that would then have more rows or
    has received more service.
    """
    state = step.state
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


FORGETTING = 0.05
FLEX_RETRY_SECONDS = 5.0
DEFAULT_RETRY_SECONDS = 1.0
SURE = 2.0
"""Expected length of an answer with a deadline, in mean lengths of recent answers."""


def new_request(state: SchedulerState, spec: EngineRequest, times: RequestTimes) -> Request:
    """Return the request of `spec`, behind all others by arrival."""
    request = Request(spec, times, next(state.arrivals))
    request.most_blocks = state.config.most_blocks
    request.is_long = spec.is_long(state.config.short_context)
    return request


def check_length(spec: EngineRequest, max_model_len: int) -> None:
    """Validate the length of a request.

    Raises:
        InvalidRequestError: The prompt is empty.
        ContextLengthError: Prompt and output together exceed `max_model_len`.
    """
    prompt = len(spec.prompt_token_ids)
    output = spec.sampling.max_tokens if spec.pooling is None else 0
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", param="prompt")
    if prompt + output > max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens; the prompt has {prompt} and {output} more were asked for."
        )


def accept(state: SchedulerState, spec: EngineRequest, now: float) -> Request:
    """Return the request to queue. A request that another engine had accepted is not refused for lack of room.

    Flex requests are limited to `max_num_waiting`, unless their tenant has less than its equal share. Batch lines are
    not limited here: a batch bounds its own lines.

    Raises:
        InvalidRequestError, ContextLengthError: The request can never run, or its id is taken.
        QueueFullError: The queue is full or the expected wait is too long.
    """
    if spec.request_id in state.requests:
        raise InvalidRequestError(f"A request '{spec.request_id}' is already running.", param="request_id")
    arrival = now if spec.arrived is None else spec.arrived
    request = new_request(state, spec, RequestTimes(arrival) if spec.resumed is None else spec.resumed.times)
    request.expected_output = math.ceil(SURE * answer_tokens(state))
    check_length(spec, state.config.max_model_len)
    if spec.resumed is not None:
        return request
    if request.request_class is RequestClass.ONLINE:
        request.num_expected_hits = len(state.cache.find_prefix(request)) * state.config.block_size
        try:
            check_room(state, request, now)
        except QueueFullError:
            state.counters.refused_requests += 1
            raise
    elif spec.lane is Lane.FLEX:
        limit = state.config.max_num_waiting
        if state.waiting_offline.is_full(spec.lane, spec.tenant, limit):
            raise QueueFullError(f"{limit} flex requests are waiting already.", retry_after=FLEX_RETRY_SECONDS)
    return request


def note_end(state: SchedulerState, request: Request) -> None:
    """Update the mean lengths of online prompts and answers."""
    if request.request_class is not RequestClass.ONLINE or request.spec.probe:
        return
    state.num_prompts += 1
    state.mean_prompt += max(FORGETTING, 1.0 / state.num_prompts) * (request.num_prompt_tokens - state.mean_prompt)
    if request.spec.pooling is None:
        state.num_answers += 1
        weight = max(FORGETTING, 1.0 / state.num_answers)
        state.mean_output += weight * (request.num_output_tokens - state.mean_output)


def check_room(state: SchedulerState, request: Request, now: float) -> None:
    """Refuse an online request if the queue is full or the expected wait exceeds `max_queue_time` or its deadline.

    The expected wait is the work ahead of the request, without its own prompt, so an idle server refuses no request.

    Raises:
        QueueFullError: With the time after which the request would fit.
    """
    waiting = len(state.waiting_online)
    if waiting >= state.config.max_num_waiting and not _has_part(state, request.spec.tenant):
        raise QueueFullError(f"{waiting} requests are waiting already.", retry_after=next_start(state))
    limit = longest_queue_time(state, request)
    if math.isinf(limit) or longest_wait(state, request) <= limit:
        return
    wait = expected_wait(state, request, now)
    if wait > limit:
        raise QueueFullError(
            f"It could start in about {wait:.2g} s, and the longest time to wait is {limit:.4g} s.",
            retry_after=wait - limit,
        )


def _has_part(state: SchedulerState, tenant: str) -> bool:
    """Return whether a tenant has less than its equal share of a full queue."""
    waiting = Counter(request.spec.tenant for request in state.waiting_online)
    others = len(waiting.keys() - {tenant})
    return others > 0 and waiting[tenant] < state.config.max_num_waiting // (others + 1)


def next_start(state: SchedulerState) -> float:
    """Return the seconds until the first waiting request starts.

    The prompts in progress must be done. If a row or memory is missing, a running answer must also end.
    """
    pace, running = prefill_pace(state), state.running[RequestClass.ONLINE]
    if pace is None or not state.waiting_online:
        return DEFAULT_RETRY_SECONDS
    prompts = prompt_seconds(state, pace)
    needed = UNITS_PER_BLOCK * state.waiting_online[0].num_blocks(state.config.block_size)
    has_room = state.free_rows and needed <= state.pool.num_available_units
    if has_room or not running:
        return prompts + pace.step
    return max(prompts, answer_tokens(state) * pace.step / len(running)) + pace.step


def expected_wait(state: SchedulerState, request: Request, now: float) -> float:
    """Return the seconds until a request that arrives now could start, at the likely speed of the machine.

    A request that overtakes others waits behind all of them if one would otherwise exceed the maximum wait.
    """
    pace = _pace_of_crowd(state, likely=True)
    if pace is None:
        return 0.0
    last = _wait_behind_all(state, request, pace)
    if binds(state):
        own = memory_wait(state, pace, request.num_blocks(state.config.block_size), 1)
        if slack(state, QueueWork.of(state, pace), pace, now).min() < pace.seconds_for(request) + own:
            return last
    ahead = _ahead(state, request, pace, now)
    waiting = [other for other in ahead if other.row < 0]
    blocks = sum(other.num_blocks(state.config.block_size) for other in (*waiting, request))
    return _wait(state, pace, sum([pace.seconds_for(other) for other in ahead]), blocks, len(waiting) + 1)


def longest_wait(state: SchedulerState, request: Request) -> float:
    """Return an upper bound of `expected_wait` without computing the prompt order."""
    pace = _pace_of_crowd(state)
    return 0.0 if pace is None else _wait_behind_all(state, request, pace)


def _wait_behind_all(state: SchedulerState, request: Request, pace: PrefillPace) -> float:
    work = QueueWork.of(state, pace)
    blocks = int(work.blocks.sum()) + request.num_blocks(state.config.block_size)
    return _wait(state, pace, float(work.seconds.sum()) + prompt_seconds(state, pace), blocks, len(work.since) + 1)


def _wait(state: SchedulerState, pace: PrefillPace, seconds: float, blocks: int, requests: int) -> float:
    """Return the seconds until the last of `requests`, which need `blocks`, starts behind `seconds` of prompts."""
    prompts = pace.step + seconds if seconds else 0.0
    return prompts + float(memory_wait(state, pace, blocks, requests))


def _pace_of_crowd(state: SchedulerState, *, likely: bool = False) -> PrefillPace | None:
    """Return the prefill pace, or None if no online request is present or there is no latency model."""
    return prefill_pace(state, likely=likely) if state.running[RequestClass.ONLINE] or state.waiting_online else None


def _ahead(state: SchedulerState, request: Request, pace: PrefillPace, now: float) -> list[Request]:
    """Return the prompts, running or waiting, that precede a request that arrives now."""
    share = state.online_share.with_arrival(request.spec.tenant)
    promised = bool(state.promised) or request.spec.promise is not None

    def by_urgency(requests: list[Request], pace: PrefillPace | None) -> PromptOrder:
        return order_prompts(requests, state.objective, pace, now, promised=promised)

    waiting = [*state.waiting_online, request]
    order = order_online(state.running_prompts(), waiting, share, pace, by_urgency if uses_laxity(state) else None)
    return list(takewhile(lambda other: other is not request, chain(order.urgent, order.behind)))
