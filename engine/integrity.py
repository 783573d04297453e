"""Assertions over everything the core holds, for tests after every move and for an engine that is idle (E1, E3)."""

from collections.abc import Mapping

from engine.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler


def check_integrity(requests: Mapping[str, Request], scheduler: Scheduler) -> None:
    """Assert that every unit is in one place, that ended requests hold nothing, and that the queues agree."""
    rows = list(scheduler.free_rows)
    queued = list(scheduler.all_requests())
    for request in queued:
        assert requests.get(request.request_id) is request, "a queued request is unknown"
        assert request.aside == (request in scheduler.aside), "a request is aside, or it is not"
        if request.status is RequestStatus.RUNNING:
            capacity = len(request.cache_map.blocks) * scheduler.config.block_size
            assert request.num_confirmed_tokens <= request.num_computed_tokens <= capacity
            assert request.num_computed_tokens <= request.num_expected_tokens
            rows.append(request.row)
        else:
            assert request.status in {RequestStatus.WAITING, RequestStatus.PREEMPTED}
            assert request.row < 0, "a waiting request holds a row"
    assert sorted(rows) == list(range(scheduler.config.max_num_seqs)), "a row is lost or owned twice"
    assert len(requests) == len(queued), "a request is in no queue"
    scheduler.cache.check_integrity(queued)
