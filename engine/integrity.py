"""Assertions over everything the core holds, for tests after every move and for an engine that is idle (E1, E3)."""

from collections.abc import Mapping

from engine.cache.cache_map import CacheBlock, CacheKind
from engine.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler


def check_integrity(requests: Mapping[str, Request], scheduler: Scheduler) -> None:
    """Assert that every unit is in one place, that ended requests hold nothing, and that the queues agree."""
    held: list[CacheBlock] = []
    rows = list(scheduler.free_rows)
    num_queued = num_hidden = 0
    for request in scheduler.all_requests():
        assert requests.get(request.request_id) is request, "a queued request is unknown"
        num_queued += 1
        assert request.aside == (request in scheduler.aside), "a request is aside, or it is not"
        if request.status is RequestStatus.RUNNING:
            _check_running(request, scheduler)
            held.extend(request.cache_map.blocks)
            rows.append(request.row)
            num_hidden += request.cache_map.num_hidden
        else:
            _check_waiting(request, scheduler)
            held.extend(request.parked_blocks)
    assert sorted(rows) == list(range(scheduler.config.max_num_seqs)), "a row is lost or owned twice"
    assert len(requests) == num_queued, "a request is in no queue"
    assert num_hidden == scheduler.num_hidden_blocks <= scheduler.config.scratch_blocks, "scratch is overdrawn"
    scheduler.pool.check_integrity(held)


def _check_running(request: Request, scheduler: Scheduler) -> None:
    blocks = request.cache_map.blocks
    capacity = len(blocks) * scheduler.config.block_size
    assert request.num_confirmed_tokens <= request.num_computed_tokens <= capacity
    assert request.num_computed_tokens <= request.num_expected_tokens
    assert not request.parked_blocks, "a running request has parked blocks"
    hidden = sum(block.entry.kind is CacheKind.HIDDEN for block in blocks)
    assert request.cache_map.num_hidden == hidden, "hidden blocks are miscounted"


def _check_waiting(request: Request, scheduler: Scheduler) -> None:
    assert request.status in {RequestStatus.WAITING, RequestStatus.PREEMPTED}
    assert not request.cache_map.blocks and request.row < 0, "a waiting request holds something"
    assert bool(request.parked_blocks) == bool(request.num_parked_tokens)
    scheduler.parked.check_integrity(request)
    assert request.num_parked_tokens <= len(request.parked_blocks) * scheduler.config.block_size
