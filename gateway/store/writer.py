"""Group commit: one thread with one connection to the database commits all waiting work together.

Reads use the same connection in order, so they see all acknowledged writes.
"""

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from engine.errors import ConfigError
from engine.panics import as_error
from gateway.store.disk import StorageError, StorageHealth

ResultT = TypeVar("ResultT")
RowsT = TypeVar("RowsT", bound="Rows")
Arguments = ParamSpec("Arguments")

MAX_GROUP = 256  # committing this many rows takes about five times as long as one row


class Cursor(Protocol):
    """Outcome of a statement. Rows have values by column name."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class RowConnection(Protocol):
    """Statements of a transaction. Row modules use only SQL that SQLite and PostgreSQL share, with parameters `?` or
    `:name`."""

    def execute(self, query: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> Cursor: ...

    def executemany(self, query: str, values: Iterable[Sequence[Any]], /) -> object: ...


Work = Callable[[Any], ResultT]
"""A function of the connection, which is a RowConnection."""
Item = tuple[Work[Any], Future[Any], Collection[str]]
"""Work, its result, and the names of its locks."""
OBJECTS = "objects"
"""Name of the lock for changes that depend on several files or batches, such as quotas."""


class Writer(ABC):
    """Run functions of the connection in a thread. Each is atomic, and durable when its future is done.

    Args:
        connection: an open database, or None to call `open_again` at each group of work until it succeeds.
        open_again: opens the database; also called after a loss of the connection.
        health: receives errors and successful commits.
    """

    errors: ClassVar[type[Exception]]
    """Base class of the database's exceptions."""
    is_remote: ClassVar[bool] = False
    clock: ClassVar[str]
    """SQL expression of the database's time in Unix seconds."""
    skip_locked: ClassVar[str] = ""
    """SQL clause of a SELECT that locks its rows and leaves out rows with a lock."""
    settling: ClassVar[str]
    """SQL statement after which earlier commits in doubt are settled."""

    def __init__(self, connection: Any, open_again: Callable[[], Any], health: StorageHealth | None = None) -> None:
        self._opened = connection
        self._open_again = open_again
        self.on_commit: Work[None] = lambda _: None
        """Called in the thread after every commit that may have written."""
        self._health = health or StorageHealth()
        self._closed = False
        self._num_commits = 0
        self._is_in_doubt = False
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tidemill-store", daemon=True)
        self._thread.start()

    async def run(self, work: Work[ResultT], locks: Collection[str] = ()) -> ResultT:
        """Run `work` in the thread, while no other server runs work with one of `locks`. Raises its exceptions, or
        StorageError if the commit fails."""
        if self._closed:
            raise StorageError
        future: Future[ResultT] = Future()
        self._queue.put((work, future, locks))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for queued work, and close the connection. Blocking. Idempotent."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    async def settle(self) -> None:
        """Settle earlier commits in doubt: changes that are invisible now cannot reappear. Raises StorageError."""
        await self.run(lambda connection: connection.execute(self.settling).fetchone())

    def is_in_place(self) -> bool:
        """Return whether the open database can still be reached by its name. Callable from any thread."""
        return True

    # Called in the thread

    @property
    def _connection(self) -> Any:
        """The open connection, a RowConnection."""
        assert self._opened is not None
        return self._opened

    def _open(self) -> None:
        """Open the database if it is not open. Raises StorageError, ConfigError or OSError."""
        if self._opened is None:
            self._opened = self._open_again()

    @abstractmethod
    def _begin(self, locks: Collection[str]) -> None:
        """Begin a transaction with these locks."""

    @abstractmethod
    def _has_changed(self) -> bool:
        """Return, before the commit, whether the transaction has written."""

    @abstractmethod
    def _roll_back(self) -> None: ...

    @abstractmethod
    def _fault(self, error: Exception, committing: bool) -> StorageError | None:
        """Return the error that clients get, or None if `error` is not a fault of the storage."""

    def _one_by_one(self, error: Exception) -> AbstractContextManager[None]:  # noqa: ARG002
        """Surround the repetition of a group whose transaction failed."""
        return nullcontext()

    def _was_committed(self) -> bool:
        """Return whether a commit that raised an error has happened. Called before `_roll_back`."""
        return False

    def _is_repeatable(self, error: Exception) -> bool:  # noqa: ARG002
        """Return whether to repeat a failed transaction. Called after `_roll_back`."""
        return False

    def _run(self) -> None:
        closing = False
        while not closing:
            group = [self._queue.get()]
            while len(group) < MAX_GROUP and not self._queue.empty():
                group.append(self._queue.get())
            closing = None in group
            works = [item for item in group if item is not None and item[1].set_running_or_notify_cancel()]
            if works and self._is_open(works):
                self._commit(works)
        if self._opened is not None:
            self._opened.close()

    def _is_open(self, group: list[Item]) -> bool:
        """Open the database if necessary. If that fails, fail the group and return False."""
        try:
            self._open()
        except (StorageError, ConfigError, OSError) as error:
            self._health.failed("database", error)
            for _, future, _ in group:
                failure = StorageError(is_away=self.is_remote)
                failure.__cause__ = error.__cause__ or error
                future.set_exception(failure)
            return False
        return True

    def _commit(self, group: list[Item]) -> None:
        outcomes: list[tuple[Future[Any], Any, Exception | None]] = []
        has_changed, committing = False, False
        try:
            self._begin({name for _, _, locks in group for name in locks})
            for work, future, _ in group:
                outcomes.append((future, *self._attempt(work)))
            has_changed = self._has_changed()
            committing = True
            self._connection.execute("COMMIT")
        except (self.errors, StorageError) as error:
            if not (committing and self._was_committed()):
                self._give_up(group, error, committing)
                return
        self._num_commits += 1
        if has_changed:
            self._health.worked("database")
            self.on_commit(self._connection)
        for future, result, failure in outcomes:
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    def _attempt(self, work: Work[Any]) -> tuple[Any, Exception | None]:
        """Run one function in a savepoint; return its result or its exception. Raises faults of the storage."""
        connection = self._connection
        connection.execute("SAVEPOINT work")
        try:
            result = work(connection)
        except BaseException as raised:  # roll back this function alone, and pass the exception to its caller
            error = as_error(raised)
            if self._fault(error, committing=False) is not None:
                raise
            connection.execute("ROLLBACK TO work")
            connection.execute("RELEASE work")
            return None, error
        connection.execute("RELEASE work")
        return result, None

    def _give_up(self, group: list[Item], error: Exception, committing: bool) -> None:
        """Roll back. Retry the functions of a group one by one, so that reads succeed although a write fails. A single
        function fails, unless it is repeatable, and so does a group whose commit is in doubt: its functions may have
        happened, and later errors would deny that."""
        self._roll_back()
        if self._is_repeatable(error) or (len(group) > 1 and not self._is_in_doubt):
            with self._one_by_one(error):
                for item in group:
                    if self._is_open([item]):
                        self._commit([item])
            return
        failure = self._fault(error, committing)
        if failure is not None:
            failure.__cause__ = error
        elif isinstance(error, StorageError):
            failure = error
        if failure is not None:
            self._health.failed("database", failure)
        for _, future, _ in group:
            future.set_exception(failure or error)


class Rows:
    """Base of the parts of `RowStore`. `is_shared`: several servers use the store; `server`: id of this start."""

    _writer: Writer
    server: str
    is_shared = False


def transaction(
    *locks: str,
) -> Callable[
    [Callable[Concatenate[RowsT, RowConnection, Arguments], ResultT]],
    Callable[Concatenate[RowsT, Arguments], Coroutine[Any, Any, ResultT]],
]:
    """Make a method with a connection a coroutine without: the writer's thread runs the method as one transaction.

    No other server runs a transaction with the same locks at the same time. `locks`: OBJECTS, or names of parameters,
    whose values are locked."""

    def decorate(
        work: Callable[Concatenate[RowsT, RowConnection, Arguments], ResultT],
    ) -> Callable[Concatenate[RowsT, Arguments], Coroutine[Any, Any, ResultT]]:
        places = {name: place - 2 for place, name in enumerate(signature(work).parameters) if name in locks}

        @wraps(work)
        async def run(rows: RowsT, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT:
            names = [str(args[place]) if place < len(args) else str(kwargs[name]) for name, place in places.items()]
            names += [OBJECTS] if OBJECTS in locks else []
            return await rows._writer.run(lambda connection: work(rows, connection, *args, **kwargs), names)

        return run

    return decorate
