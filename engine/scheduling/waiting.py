"""Waiting online requests in arrival order, with their constant properties in columns.

Thousands may wait and a step takes milliseconds, so a step reads columns, which change only when the queue does.
Requests that have run before change while they wait (a last token may arrive, parked blocks may be dropped), so these
are read one by one.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, overload

import numpy as np

from engine.arrays import BoolArray, FloatArray, IntArray
from engine.cache.blocks import CacheKind
from engine.request import Request, RequestStatus

by_age = attrgetter("arrival_order")
_WIDTH = 64


class QueueColumns(NamedTuple):
    """One element per request.

    Attributes:
        arrivals: Arrival times in seconds.
        lengths: Prompt tokens.
        missing: Prompt tokens still to compute.
        began: The request has run before; then only `arrivals` is valid.
    """

    arrivals: FloatArray
    lengths: IntArray
    missing: IntArray
    began: BoolArray


def columns_of(requests: Sequence[Request]) -> QueueColumns:
    """Return the columns of a queue, or of requests in any order."""
    if isinstance(requests, WaitingQueue):
        return requests.columns
    rows = [_row(request) for request in requests]
    return _columns(np.array(rows, dtype=np.float64).reshape(len(rows), 4).T)


class WaitingQueue(Sequence[Request]):
    """Requests in arrival order. A preempted request returns to its position, ahead of later arrivals."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._table = np.empty((4, _WIDTH))
        self._columns: QueueColumns | None = None

    @property
    def columns(self) -> QueueColumns:
        """Return the columns, valid until the queue changes."""
        if self._columns is None:
            self._columns = _columns(self._table[:, : len(self._requests)])
        return self._columns

    def place(self, request: Request) -> int:
        """Return the number of older waiting requests."""
        return bisect_left(self._requests, request.arrival_order, key=by_age)

    def with_others(self, requests: Iterable[Request]) -> list[Request]:
        """Return all waiting requests and `requests`, by arrival."""
        merged = self._requests.copy()
        for request in requests:
            insort(merged, request, key=by_age)
        return merged

    def add(self, request: Request) -> None:
        index, size = self.place(request), len(self._requests)
        if size == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.empty_like(self._table)), axis=1)
        self._requests.insert(index, request)
        self._table[:, index + 1 : size + 1] = self._table[:, index:size]
        self._table[:, index] = _row(request)
        self._columns = None

    def remove(self, request: Request) -> None:
        index, size = self.place(request), len(self._requests)
        assert index < size and self._requests[index] is request, "request is not in the queue that its status says"
        del self._requests[index]
        self._table[:, index : size - 1] = self._table[:, index + 1 : size]
        self._columns = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._requests[index]


def _row(request: Request) -> tuple[float, int, int, bool]:
    began = request.status is not RequestStatus.WAITING or request.num_preemptions > 0
    length = request.num_prompt_tokens
    return request.times.arrival, length, length - request.num_expected_hits, began


def _columns(table: FloatArray) -> QueueColumns:
    arrivals, lengths, missing, began = table
    return QueueColumns(arrivals, lengths.astype(np.int64), missing.astype(np.int64), began > 0.0)


def insert_by_age(requests: list[Request], request: Request) -> None:
    """Insert a request into a list in arrival order."""
    insort(requests, request, key=by_age)


def remove_by_age(requests: list[Request], request: Request) -> None:
    """Remove a request from a list in arrival order."""
    index = bisect_left(requests, request.arrival_order, key=by_age)
    assert requests[index] is request, "request is not in the queue that its status says"
    del requests[index]


class Start(NamedTuple):
    """A selected request, the block kind that it stores, and whether it can still meet its SLO."""

    request: Request
    kind: CacheKind
    savable: bool
