"""Parked pasts: which blocks leave the device, in which mix, and that no request waits for ever."""

from collections.abc import Sequence

import pytest
from driver import make_request, small_config
from integrity import check_cache
from test_core_fuzz import BLOCK
from test_hybrid_scheduling import check_solo, make

from engine.api import RequestClass, RequestTimes
from engine.cache.blocks import CacheAction, CacheKind, Tier
from engine.cache.cache import Cache
from engine.cache.placement import host_split, next_is_act
from engine.request import Request, RequestStatus
from engine.scheduling.objective import StepObjective
from predictor.model import LatencyModel

DEAR_TOKENS = LatencyModel(intercept=0.01, prefill_tokens=1.0, transferred=1e-3, restored=1e-5)


class Shelf:
    """Requests with a past of their own in a pool of 40 units, parked one after the other."""

    def __init__(self, host: int, model: LatencyModel | None, scratch: int = 20) -> None:
        self.config = small_config(20, host_units=host, scratch_blocks=scratch, max_num_batched_tokens=64)
        self.cache = Cache(self.config, model)
        self.pool, self.host, self.parked = self.cache.device, self.cache.host, self.cache.parked
        self.requests: list[Request] = []

    def park(self, kinds: Sequence[CacheKind], tokens: int, *, offline: bool = False, last_step: int = -1) -> Request:
        request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
        spec = make_request(str(len(self.requests)), range(tokens + 1), request_class=request_class)
        request = Request(spec, RequestTimes(0.0), len(self.requests))
        for kind in kinds:
            block = self.pool.allocate(kind, online=not offline)
            assert block is not None
            request.cache_map.blocks.append(block)
        request.num_computed_tokens, request.last_step = tokens, last_step
        assert not self.parked.park(request)
        self.requests.append(request)
        return request

    def check(self) -> None:
        check_cache(self.cache, self.requests)


def where(request: Request) -> str:
    """d, h: a block on the device and on the host; capitals hold hidden state."""
    letters = {Tier.DEVICE: "d", Tier.HOST: "h"}
    found = (
        (letters[b.entry.tier].upper() if b.entry.kind is CacheKind.HIDDEN else letters[b.entry.tier])
        for b in request.cache_map.blocks
    )
    return "".join(found)


KV, HIDDEN = CacheKind.KV, CacheKind.HIDDEN


def test_only_what_is_needed_leaves_from_the_tail() -> None:
    shelf = Shelf(40, None)
    request = shelf.park([KV] * 5, 18)
    assert shelf.parked.num_units(online=True) == 10
    shelf.parked.reclaim(3, 0, online=True)
    assert where(request) == "dddhh" and shelf.pool.num_free_units == 34
    assert request.cache_map.num_parked_tokens == 18 and request.cache_map.parked_in_step == 0
    shelf.check()


def test_a_long_prompt_moves_what_its_first_chunk_needs() -> None:
    """Of 32 units 8, half free; all that it needs, and the reserve for others, could be moved."""
    shelf = Shelf(40, None)
    parked = shelf.park([KV] * 18, 70)
    request = Request(make_request("long", range(200, 260)), RequestTimes(0.0), 9)
    claim = shelf.cache.claim(request)
    assert claim.units == 32 and not shelf.cache.make_way(request, claim, 16, 9, 0, online=True)
    assert where(parked) == 18 * "d"
    assert shelf.cache.make_way(request, claim, 16, 8, 0, online=True)
    assert where(parked) == 16 * "d" + "hh" and shelf.pool.num_available_units == 8
    shelf.check()


def test_one_past_mixes_tiers_and_kinds() -> None:
    shelf = Shelf(5, DEAR_TOKENS)
    request = shelf.park([HIDDEN, HIDDEN, KV, KV, KV], 20)
    shelf.parked.reclaim(4, 0, online=True)
    assert where(request) == "DDdhh"
    shelf.parked.reclaim(1, 1, online=True)
    assert where(request) == "DHdhh"
    shelf.check()
    shelf.cache.take(request, shelf.cache.claim(request), 2)
    request.move_to(RequestStatus.RUNNING)
    assert [block.entry.kind for block in request.cache_map.blocks] == [HIDDEN, HIDDEN, KV, KV, KV]
    moved = [operation.action for operation in shelf.cache.tiers.take_operations()]
    assert moved == [CacheAction.SWAP_OUT] * 3 + [CacheAction.SWAP_IN] * 3
    shelf.cache.tiers.complete_step(2)
    shelf.check()
    assert shelf.host.num_free_units == 5


def test_a_full_host_cuts_pasts_that_it_ties_down() -> None:
    """Two units of host for ten of the device: the copied tail is given up so that what lies before it can go."""
    shelf = Shelf(2, None)
    request = shelf.park([KV] * 5, 20)
    shelf.parked.reclaim(2, 0, online=True)
    assert where(request) == "ddddh"
    shelf.parked.reclaim(8, 1, online=True)
    assert where(request) == "" and request.cache_map.num_parked_tokens == 0 and not shelf.cache.tiers.operations
    assert shelf.pool.num_free_units == 40 and shelf.host.num_free_units == 2
    shelf.check()


def test_offline_pasts_lose_first_and_the_youngest_of_them() -> None:
    shelf = Shelf(40, None)
    online, old, young = shelf.park([KV] * 3, 12), shelf.park([KV] * 2, 8, offline=True), shelf.park([KV], 4)
    young.spec, old.spec = old.spec, young.spec  # (two of a class, the younger parked last)
    online.spec = old.spec
    shelf.check()
    assert shelf.parked.num_units(online=False) == 2
    shelf.parked.reclaim(4, 0, online=True)
    assert (where(online), where(old), where(young)) == ("ddd", "dh", "h")
    shelf.parked.reclaim(4, 0, online=False)
    assert (where(online), where(old)) == ("ddd", "dh"), "an offline request never takes online memory"


def test_shared_and_spared_blocks_stay() -> None:
    shelf = Shelf(40, None)
    request = shelf.park([KV] * 5, 20)
    shared, spared = request.cache_map.blocks[1], request.cache_map.blocks[4]
    shelf.pool.acquire(shared, online=True)
    assert shelf.parked.num_units(online=True) == 8
    shelf.parked.reclaim(6, 0, online=True, spared={spared})
    assert where(request) == "hdhhd"
    shelf.pool.release(shared, -1)
    shelf.check()


def test_blocks_that_only_waiting_requests_share_can_be_had() -> None:
    """Neither of two could give up the prefix that both hold; an older request must not wait for it for ever."""
    shelf = Shelf(40, None)
    first = shelf.park([KV] * 2, 8)
    second = shelf.park([KV], 4)
    shared = first.cache_map.blocks[0]
    shelf.pool.publish(shared, b"prefix")
    shelf.pool.acquire(shared, online=True)
    second.cache_map.blocks[0:0] = [shared]
    second.cache_map.num_parked_tokens += BLOCK
    assert shelf.parked.num_units(online=True) == 6
    shelf.parked.reclaim(4, 0, online=True)
    assert (where(first), where(second)) == ("dh", "dh")
    shelf.parked.reclaim(2, 0, online=True)
    assert shelf.pool.num_available_units == 40 and shelf.parked.num_units(online=True) == 0
    shelf.check()


def test_copies_of_a_forgotten_past_are_called_off() -> None:
    """Before the step is launched the host units are free at once; afterwards when the step has ended."""
    for launched in (False, True):
        shelf = Shelf(40, None)
        request = shelf.park([KV] * 5, 20)
        shelf.parked.reclaim(4, 0, online=True)
        if launched:
            assert len(shelf.cache.tiers.take_operations()) == 2
        shelf.parked.forget(request)
        assert not shelf.cache.tiers.operations
        assert shelf.host.num_free_units == (36 if launched else 40)
        shelf.cache.tiers.complete_step(0)
        assert shelf.host.num_free_units == 40 and shelf.pool.num_free_units == 40
        shelf.check()


# --- the host's split between K and V and hidden state ---------------------------------------------------------------

SLOW_LINK = LatencyModel(intercept=1e-3, prefill_tokens=1.0, transferred=1e-2, restored=1e-5)
FAST_LINK = LatencyModel(intercept=1.0, prefill_tokens=1.0, transferred=1e-9, restored=1e-2)


def test_the_split_follows_the_measured_costs() -> None:
    config = Shelf(40, None).config
    slow, fast = host_split(SLOW_LINK, config, 0), host_split(FAST_LINK, config, 0)
    assert slow is not None and fast is not None
    assert slow.act > slow.kv == 0, "the link is the bottleneck: a copy of half the size"
    assert fast.act == 0 < fast.kv, "the device is"
    assert host_split(None, config, 0) is None
    assert host_split(SLOW_LINK, Shelf(0, None).config, 0) is None
    assert host_split(SLOW_LINK, Shelf(40, None, scratch=0).config, 0) is None, "no hidden state, nothing to choose"


def test_the_kind_behind_its_share_goes_to_the_host_first() -> None:
    """Nine blocks of each: equal costs a unit, so the split decides, whatever lies behind in the past."""
    for model, expected in ((SLOW_LINK, "dddddHHHHH"), (FAST_LINK, "dddhhDDDDD")):
        shelf = Shelf(40, model)
        request = shelf.park([KV] * 5 + [HIDDEN] * 5, 38)
        shelf.parked.balance(0)
        shelf.parked.reclaim(5 if model is SLOW_LINK else 4, 0, online=True)
        assert where(request) == expected
        shelf.check()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("transferred", [1e-9, 3e-4, 1e-2])
def test_answers_grow_by_the_deficit_rule(depth: int, transferred: float) -> None:
    """Prompts start from hidden state as the knapsack says; every block of their answers is of the kind behind."""
    model = LatencyModel(
        intercept=0.01, decodes=1e-4, prefill_tokens=1e-3, transferred=transferred, restored=2e-4, decode_context=1e-5
    )
    driver = make(depth, blocks=12, scratch=40, host=60, policy="apt", model=model)
    driver.core.set_objective(StepObjective(ttft=5.0, tbt=5.0))
    requests = [make_request(str(i), [i] * 14, 10 + 3 * i) for i in range(8)]
    driver.add(*requests)
    scheduler = driver.core.state
    grown: set[CacheKind] = set()
    before: dict[Request, list[CacheKind]] = {}
    while driver.step():
        admitted = {new.request_id for step in driver.steps[-2:] for new in step.new_requests}
        for request in scheduler.running[RequestClass.ONLINE]:
            kinds = [block.entry.kind for block in request.cache_map.blocks]
            known = before.get(request, [])
            if kinds[:-1] == known and request.cache_map.kind is HIDDEN and request.request_id not in admitted:
                split = host_split(model, driver.core.config, 0)
                assert split is not None
                grown.add(kinds[-1])
                if split.act == 0 or split.kv == 0:
                    assert next_is_act(known.count(KV), known.count(HIDDEN), split) is (kinds[-1] is HIDDEN)
            before[request] = kinds
    check_solo(driver, *requests)
    assert grown
