"""Mixins of `RowStore` for batches and their lines, and for the leases of servers that share the store.

Line results and batch counts change in one transaction. A lease is a row of `runs` with the server that feeds the run.
Run OWNER of a batch is the batch itself: the server with this lease validates the batch, builds the result files and
ends it. Leases save work. Correctness does not need them: the first result of a line counts, and changes by a former
owner are refused. Times of servers are the database's.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from gateway.http.errors import ApiError
from gateway.store.objects import (
    TERMINAL,
    BatchJob,
    BatchStatus,
    FileObject,
    IllegalTransition,
    InputError,
    LineQuota,
    LineRecord,
    LineRef,
    LineResult,
    NoSuchFile,
    Page,
    Usage,
    check_transition,
)
from gateway.store.rows import (
    UNFINISHED_STATES,
    find_file,
    insert_batch,
    insert_file,
    insert_notice,
    owned,
    read_batch_row,
    read_line_row,
    read_page,
    read_record_row,
)
from gateway.store.writer import OBJECTS, RowConnection, Rows, transaction

OWNER = -1
DEAD_SECONDS = 15
"""Seconds without a heartbeat after which other servers take the leases of a server."""
FORGET_SECONDS = 86_400
_FREE = "server NOT IN (SELECT id FROM servers WHERE seen_at > :since)"
_OF = "batch = (SELECT seq FROM batches WHERE id = :id)"
ELSEWHERE = "server != :server AND server IN (SELECT id FROM servers WHERE seen_at > :since)"


class Beat(NamedTuple):
    """The store at a heartbeat."""

    now: int
    """Time of the database in Unix seconds."""
    batches: Sequence[BatchJob]
    """Unfinished batches."""
    runs: Mapping[str, frozenset[int]]
    """Runs of this server by batch id. Other servers may have taken some, and the answer to a lease may be lost."""
    owned: frozenset[str]
    """Ids of the batches that another server owns."""
    free: frozenset[str]
    """Ids of the batches with a run that no server feeds."""
    held: Mapping[str, int]
    """Lines that other servers feed, by tenant."""
    rate: float
    """Work per second of the other servers."""


class ServerRows(Rows):
    """Times of servers."""

    def _now(self, connection: RowConnection) -> int:
        return int(connection.execute(f"SELECT {self._writer.clock} AS now").fetchone()["now"])

    def _since(self, connection: RowConnection, takes_over: bool) -> int:
        """Return the time from which on a heartbeat counts."""
        return self._now(connection) - DEAD_SECONDS if takes_over else 0


class LeaseRows(ServerRows):
    """Servers and their leases. `takes_over`: whether leases of servers without a heartbeat are free."""

    @transaction()
    def beat(self, connection: RowConnection, rate: float, takes_over: bool) -> Beat:
        """Record a heartbeat of this server with its rate in work per second."""
        now = self._now(connection)
        connection.execute("DELETE FROM servers WHERE seen_at < ?", (now - FORGET_SECONDS,))
        connection.execute(
            "INSERT INTO servers (id, seen_at, rate) VALUES (?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at, rate = excluded.rate",
            (self.server, now, rate),
        )
        values = {"server": self.server, "since": now - DEAD_SECONDS}
        batches = connection.execute(f"SELECT * FROM batches WHERE status IN {UNFINISHED_STATES} ORDER BY seq")
        jobs = {row["seq"]: read_batch_row(row) for row in batches.fetchall()}
        runs: dict[str, set[int]] = {}
        for row in connection.execute(f"SELECT batch, run FROM runs WHERE run > {OWNER} AND server = :server", values):
            if row["batch"] in jobs:
                runs.setdefault(jobs[row["batch"]].id, set()).add(row["run"])
        owned = connection.execute(f"SELECT batch FROM runs WHERE run = {OWNER} AND {ELSEWHERE}", values)
        free = connection.execute(
            f"SELECT DISTINCT batch FROM runs WHERE run > {OWNER} AND {_FREE}",
            {"since": self._since(connection, takes_over)},
        )
        held = connection.execute(
            "SELECT tenant, SUM(lines) AS held FROM runs JOIN batches ON batch = seq "
            f"WHERE run > {OWNER} AND {ELSEWHERE} GROUP BY tenant",
            values,
        )
        alive = "SELECT COALESCE(SUM(rate), 0.0) AS rate FROM servers WHERE seen_at > ?"
        alive_rate = connection.execute(alive, (values["since"],)).fetchone()["rate"]
        return Beat(
            now,
            list(jobs.values()),
            {batch_id: frozenset(own) for batch_id, own in runs.items()},
            frozenset(jobs[row["batch"]].id for row in owned if row["batch"] in jobs),
            frozenset(jobs[row["batch"]].id for row in free if row["batch"] in jobs),
            {row["tenant"]: int(row["held"]) for row in held},
            max(0.0, alive_rate - rate),
        )

    @transaction()
    def leave(self, connection: RowConnection, server: str) -> None:
        """Free the leases of a server that has ended."""
        connection.execute("DELETE FROM servers WHERE id = ?", (server,))

    @transaction("batch_id")
    def take_batch(self, connection: RowConnection, batch_id: str, takes_over: bool) -> bool:
        """Own an unfinished batch, if no other server does. Return whether this server owns it."""
        taken = connection.execute(
            f"INSERT INTO runs (batch, run, lines, server) SELECT seq, {OWNER}, 0, :server FROM batches "
            f"WHERE id = :id AND status IN {UNFINISHED_STATES} ON CONFLICT (batch, run) DO UPDATE "
            f"SET server = excluded.server WHERE runs.server = excluded.server OR runs.{_FREE}",
            {"server": self.server, "id": batch_id, "since": self._since(connection, takes_over)},
        )
        return taken.rowcount > 0

    @transaction("batch_id")
    def add_runs(self, connection: RowConnection, batch_id: str, size: int, blocks: Sequence[int]) -> None:
        """Make the runs of a batch available. A run without a pending line gets no row.

        Args:
            size: number of lines in a run.
            blocks: for each run in feeding order, its first rank divided by `size`.

        Raises IllegalTransition for a former owner.
        """
        check_owner(self, connection, batch_id)
        seq = _seq(connection, batch_id)
        query = "SELECT DISTINCT rank / ? AS block FROM lines WHERE batch = ? AND succeeded IS NULL"
        pending = {row["block"] for row in connection.execute(query, (size, seq))}
        connection.executemany(
            "INSERT INTO runs (batch, run, lines) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            ((seq, run, size) for run, block in enumerate(blocks) if block in pending),
        )

    @transaction()
    def take_runs(
        self, connection: RowConnection, batch_id: str, ended: Sequence[int], most: int, takes_over: bool
    ) -> list[int]:
        """Remove this server's runs that have ended, and lease up to `most` free ones: the first in feeding order."""
        row = connection.execute("SELECT seq FROM batches WHERE id = ?", (batch_id,)).fetchone()
        if row is None:
            return []
        seq = row["seq"]
        query = "DELETE FROM runs WHERE batch = ? AND run = ? AND server = ?"
        connection.executemany(query, [(seq, run, self.server) for run in ended])
        found = connection.execute(
            f"SELECT run FROM runs WHERE batch = :batch AND run > {OWNER} AND {_FREE} ORDER BY run LIMIT {most} "
            f"{self._writer.skip_locked}",
            {"batch": seq, "since": self._since(connection, takes_over)},
        )
        taken = [row["run"] for row in found.fetchall()]
        query = "UPDATE runs SET server = ? WHERE batch = ? AND run = ?"
        connection.executemany(query, [(self.server, seq, run) for run in taken])
        return taken

    @transaction()
    def release_runs(self, connection: RowConnection, batch_id: str) -> None:
        """Free this server's runs of a batch."""
        query = f"UPDATE runs SET server = '' WHERE run > {OWNER} AND server = :server AND {_OF}"
        connection.execute(query, {"server": self.server, "id": batch_id})

    @transaction()
    def has_other_feeders(self, connection: RowConnection, batch_id: str) -> bool:
        """Return whether another server has runs of the batch."""
        query = f"SELECT 1 FROM runs WHERE run > {OWNER} AND {ELSEWHERE} AND {_OF} LIMIT 1"
        values = {"server": self.server, "since": self._since(connection, True), "id": batch_id}
        return connection.execute(query, values).fetchone() is not None

    @transaction("batch_id")
    def reserve(self, connection: RowConnection, batch_id: str, num_bytes: int) -> int | None:
        """Return an offset in the journal of a batch at which only this server writes; None for an ended batch."""
        row = connection.execute(
            "UPDATE batches SET journal_bytes = journal_bytes + ? "
            f"WHERE id = ? AND status IN {UNFINISHED_STATES} RETURNING journal_bytes",
            (num_bytes, batch_id),
        ).fetchone()
        return None if row is None else int(row["journal_bytes"]) - num_bytes


def check_owner(rows: Rows, connection: RowConnection, batch_id: str) -> None:
    """Raise IllegalTransition if another server has taken over the batch."""
    query = f"SELECT server FROM runs WHERE run = {OWNER} AND {_OF}"
    if rows.is_shared:
        row = connection.execute(query, {"id": batch_id}).fetchone()
        if row is None or row["server"] != rows.server:
            raise IllegalTransition("another server owns the batch")


MAX_ASKED = 1000
"""Maximum number of lines in one query."""


class BatchRows(Rows):
    """Rows of batches and their lines. A `tenant` of None means all tenants."""

    @transaction(OBJECTS)
    def create_batch(
        self,
        connection: RowConnection,
        batch: BatchJob,
        idempotency: tuple[str, str] | None = None,
        max_lines: int | None = None,
    ) -> BatchJob:
        """Add a batch and return it, or return the batch that was created with the same idempotency key.

        Args:
            idempotency: key and digest of the body.
            max_lines: maximum lines in the tenant's unfinished batches; a batch before validation counts as one line.

        Raises ApiError, or LineQuota.
        """
        if idempotency is not None:
            query = "SELECT * FROM batches WHERE tenant = ? AND idempotency_key = ?"
            row = connection.execute(query, (batch.tenant, idempotency[0])).fetchone()
            if row is not None and row["idempotency_digest"] != idempotency[1]:
                message = "This idempotency key was already used with a different body; use a new key."
                raise ApiError(400, message, code="idempotency_key_reused")
            if row is not None:
                return read_batch_row(row)
        if (known := _find(connection, batch.id, batch.tenant)) is not None:
            return known
        file = find_file(connection, batch.tenant, batch.input_file_id, batch.created_at)
        if file is None:
            raise NoSuchFile("input_file_id")
        if file.purpose != "batch":
            message = "The input file must have been uploaded with the purpose 'batch'."
            raise ApiError(400, message, param="input_file_id", code="invalid_value")
        if max_lines is not None:
            _check_lines(connection, batch, 1, max_lines)
        insert_batch(connection, batch, idempotency)
        return batch

    @transaction()
    def get_batch(self, connection: RowConnection, tenant: str | None, batch_id: str) -> BatchJob | None:
        return _find(connection, batch_id, tenant)

    @transaction()
    def load_batch(self, connection: RowConnection, batch_id: str) -> BatchJob:
        """Return an existing batch of any tenant."""
        return _load(connection, batch_id)

    @transaction()
    def list_batches(
        self, connection: RowConnection, tenant: str | None, page: Page, endpoint: str | None = None
    ) -> tuple[list[BatchJob], bool]:
        """Return a page of the batches (of `endpoint`, if given), and whether more follow. Raises UnknownCursor."""
        where = owned(tenant) + ("" if endpoint is None else " AND endpoint = :endpoint")
        values: dict[str, str | int | None] = {"tenant": tenant, "endpoint": endpoint}
        rows, more = read_page(connection, "batches", where, values, page)
        return [read_batch_row(row) for row in rows], more

    @transaction()
    def unfinished_batches(self, connection: RowConnection) -> list[BatchJob]:
        query = f"SELECT * FROM batches WHERE status IN {UNFINISHED_STATES} ORDER BY seq"
        return [read_batch_row(row) for row in connection.execute(query)]

    @transaction("batch_id")
    def move_batch(
        self, connection: RowConnection, batch_id: str, status: BatchStatus, now: int, errors: Sequence[InputError] = ()
    ) -> BatchJob:
        """Change the state; for `failed`, also remove the lines and reset the counts. Raises IllegalTransition."""
        if status in TERMINAL:
            check_owner(self, connection, batch_id)
        _move(connection, batch_id, status, now)
        if status is BatchStatus.FAILED:
            connection.execute("DELETE FROM lines WHERE batch = ?", (_seq(connection, batch_id),))
            connection.execute("UPDATE batches SET total = 0, completed = 0, failed = 0 WHERE id = ?", (batch_id,))
        if errors:
            text = json.dumps([list(error) for error in errors])
            connection.execute("UPDATE batches SET errors = ? WHERE id = ?", (text, batch_id))
        return _load(connection, batch_id)

    @transaction("batch_id")
    def note_error(self, connection: RowConnection, batch_id: str, error: InputError) -> None:
        """Add an error to a running batch, unless it already has one."""
        query = "UPDATE batches SET errors = ? WHERE id = ? AND errors = '[]'"
        connection.execute(query, (json.dumps([list(error)]), batch_id))

    @transaction("batch_id")
    def cancel_batch(self, connection: RowConnection, tenant: str | None, batch_id: str, now: int) -> BatchJob | None:
        """Move a batch to `cancelling` if its state allows, and return it; None if it does not exist."""
        if _find(connection, batch_id, tenant) is None:
            return None
        with suppress(IllegalTransition):  # already ended or cancelled: return the batch unchanged
            _move(connection, batch_id, BatchStatus.CANCELLING, now)
        return _load(connection, batch_id)

    @transaction("batch_id")
    def delete_batch(self, connection: RowConnection, batch_id: str) -> None:
        """Remove the row of a batch that has ended."""
        connection.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    @transaction("batch_id")
    def add_lines(self, connection: RowConnection, batch_id: str, lines: Sequence[LineRef], *, first: bool) -> None:
        """Add lines of a batch under validation; `first`: remove the lines of an interrupted attempt. Raises
        IllegalTransition for a former owner."""
        check_owner(self, connection, batch_id)
        batch = _seq(connection, batch_id)
        if first:
            connection.execute("DELETE FROM lines WHERE batch = ?", (batch,))
        connection.executemany(
            "INSERT INTO lines (batch, rank, number, start, length) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            ((batch, *line) for line in lines),
        )

    @transaction("batch_id", OBJECTS)
    def start_batch(
        self,
        connection: RowConnection,
        batch_id: str,
        total: int,
        model: str | None,
        now: int,
        max_lines: int | None = None,
    ) -> BatchJob:
        """Move a validated batch to `in_progress`, unless it is being cancelled, and store `total` and `model`.
        `max_lines`: see `create_batch`. Raises LineQuota, and IllegalTransition for a former owner."""
        check_owner(self, connection, batch_id)
        batch = _load(connection, batch_id)
        if batch.status is not BatchStatus.CANCELLING:
            if max_lines is not None:
                _check_lines(connection, batch, total, max_lines)
            _move(connection, batch_id, BatchStatus.IN_PROGRESS, now)
        connection.execute("UPDATE batches SET total = ?, model = ? WHERE id = ?", (total, model, batch_id))
        return _load(connection, batch_id)

    @transaction()
    def lines_at(self, connection: RowConnection, batch_id: str, ranks: Sequence[int]) -> list[LineRef]:
        """Return the lines of the given ranks that have no result, in the order of `ranks`."""
        found = _pending(connection, _seq(connection, batch_id), ranks)
        return [found[rank] for rank in ranks if rank in found]

    @transaction()
    def count_lines(self, connection: RowConnection, batch_id: str) -> tuple[int, int, int]:
        """Return the number of indexed lines of a batch: all, succeeded, failed."""
        return _count(connection, _seq(connection, batch_id))

    @transaction("batch_id")
    def add_results(self, connection: RowConnection, batch_id: str, results: Sequence[LineResult]) -> BatchJob:
        """Record results whose rows are durable in the journal. Lines that have a result keep it, and its usage."""
        batch, counts, usage = _seq(connection, batch_id), [0, 0], Usage()
        pending = _pending(connection, batch, [result.rank for result in results])
        new = [result for result in results if pending.pop(result.rank, None) is not None]
        if not new:  # an earlier commit in doubt had succeeded, or another server was first
            return _load(connection, batch_id)
        connection.executemany(
            "UPDATE lines SET succeeded = ?, result_start = ?, result_length = ? WHERE batch = ? AND rank = ?",
            ((int(r.succeeded), r.start, r.length, batch, r.rank) for r in new),
        )
        for result in new:
            counts[result.succeeded] += 1
            usage = usage.plus(result.usage)
        more = ", ".join(f"{name} = {name} + ?" for name in ("completed", "failed", *Usage._fields))
        values = (counts[True], counts[False], *usage, batch)
        connection.execute(f"UPDATE batches SET {more} WHERE seq = ?", values)
        return _load(connection, batch_id)

    @transaction("batch_id")
    def run_again(self, connection: RowConnection, batch_id: str, ranks: Sequence[int], usage: Usage) -> BatchJob:
        """Remove the results of the given lines, recount, and move the batch back to `in_progress`. `usage`: token
        usage of the remaining results. Raises IllegalTransition."""
        check_owner(self, connection, batch_id)
        batch = _load(connection, batch_id)
        if batch.status is not BatchStatus.IN_PROGRESS:
            check_transition(batch.status, BatchStatus.IN_PROGRESS)
        seq = _seq(connection, batch_id)
        connection.executemany(
            "UPDATE lines SET succeeded = NULL, result_start = 0, result_length = 0 WHERE batch = ? AND rank = ?",
            ((seq, rank) for rank in ranks),
        )
        _, good, bad = _count(connection, seq)
        times = {name: moment for name, moment in batch.times.items() if name != "finalizing_at"}
        connection.execute(
            "UPDATE batches SET status = ?, times = ?, completed = ?, failed = ? WHERE seq = ?",
            (BatchStatus.IN_PROGRESS.value, json.dumps(times), good, bad, seq),
        )
        _set_usage(connection, seq, usage)
        return _load(connection, batch_id)

    @transaction()
    def line_records(self, connection: RowConnection, batch_id: str, after_rank: int, limit: int) -> list[LineRecord]:
        """Return lines with their results, ordered by rank."""
        query = "SELECT * FROM lines WHERE batch = ? AND rank > ? ORDER BY rank LIMIT ?"
        rows = connection.execute(query, (_seq(connection, batch_id), after_rank, limit))
        return [read_record_row(row) for row in rows]

    @transaction("batch_id")
    def finish_batch(
        self,
        connection: RowConnection,
        batch_id: str,
        status: BatchStatus,
        now: int,
        output: FileObject | None,
        errors: FileObject | None,
        counts: tuple[int, int] | None = None,
        usage: Usage | None = None,
    ) -> BatchJob:
        """End a batch, add the rows of its result files and remove its lines. Idempotent for the same files.

        Args:
            counts: lines that succeeded and lines that failed (None: as counted so far).
            usage: token usage of the rows (None: as counted so far).

        Raises IllegalTransition.
        """
        ids = tuple(None if file is None else file.id for file in (output, errors))
        known = _load(connection, batch_id)
        if known.status is status and (known.output_file_id, known.error_file_id) == ids:
            return known
        check_owner(self, connection, batch_id)
        _move(connection, batch_id, status, now)
        counted = (known.completed, known.failed) if counts is None else counts
        for file in (output, errors):
            if file is not None:
                insert_file(connection, file)
        connection.execute(
            "UPDATE batches SET output_file_id = ?, error_file_id = ?, completed = ?, failed = ? WHERE id = ?",
            (*ids, *counted, batch_id),
        )
        seq = _seq(connection, batch_id)
        if usage is not None:
            _set_usage(connection, seq, usage)
        connection.execute("DELETE FROM lines WHERE batch = ?", (seq,))
        return _load(connection, batch_id)


def _pending(connection: RowConnection, seq: int, ranks: Sequence[int]) -> dict[int, LineRef]:
    """Return the lines of the given ranks that have no result."""
    found: dict[int, LineRef] = {}
    for start in range(0, len(ranks), MAX_ASKED):
        some = ranks[start : start + MAX_ASKED]
        marks = ", ".join("?" * len(some))
        query = f"SELECT * FROM lines WHERE batch = ? AND succeeded IS NULL AND rank IN ({marks})"
        found.update((row["rank"], read_line_row(row)) for row in connection.execute(query, (seq, *some)))
    return found


def _check_lines(connection: RowConnection, batch: BatchJob, lines: int, max_lines: int) -> None:
    """Raise LineQuota if `lines` lines do not fit beside the tenant's other unfinished batches."""
    query = (
        "SELECT COALESCE(SUM(CASE WHEN total - completed - failed > 1 THEN total - completed - failed ELSE 1 END), 0) "
        f"AS used FROM batches WHERE tenant = ? AND id != ? AND status IN {UNFINISHED_STATES}"
    )
    used = int(connection.execute(query, (batch.tenant, batch.id)).fetchone()["used"])
    if used + lines > max_lines:
        raise LineQuota(used)


def _count(connection: RowConnection, seq: int) -> tuple[int, int, int]:
    query = (
        "SELECT COUNT(*) AS lines, COALESCE(SUM(succeeded), 0) AS good, COUNT(succeeded) AS ended FROM lines "
        "WHERE batch = ?"
    )
    row = connection.execute(query, (seq,)).fetchone()
    return row["lines"], row["good"], row["ended"] - row["good"]


def _set_usage(connection: RowConnection, seq: int, usage: Usage) -> None:
    columns = ", ".join(f"{name} = ?" for name in Usage._fields)
    connection.execute(f"UPDATE batches SET {columns} WHERE seq = ?", (*usage, seq))


def _find(connection: RowConnection, batch_id: str, tenant: str | None) -> BatchJob | None:
    query = f"SELECT * FROM batches WHERE id = :id AND {owned(tenant)}"
    row = connection.execute(query, {"id": batch_id, "tenant": tenant}).fetchone()
    return None if row is None else read_batch_row(row)


def _load(connection: RowConnection, batch_id: str) -> BatchJob:
    return read_batch_row(connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone())


def _seq(connection: RowConnection, batch_id: str) -> int:
    """Return the integer key of a batch in the table of lines."""
    return int(connection.execute("SELECT seq FROM batches WHERE id = ?", (batch_id,)).fetchone()["seq"])


def _move(connection: RowConnection, batch_id: str, status: BatchStatus, now: int) -> None:
    batch = _load(connection, batch_id)
    check_transition(batch.status, status)
    if status is BatchStatus.FINALIZING and batch.remaining:  # the owner runs lines again
        raise IllegalTransition(f"{batch.remaining} lines have no result")
    times = {**batch.times, f"{status.value}_at": now}
    connection.execute(
        "UPDATE batches SET status = ?, times = ? WHERE id = ?", (status.value, json.dumps(times), batch_id)
    )
    if status in TERMINAL:
        connection.execute(f"DELETE FROM runs WHERE {_OF}", {"id": batch_id})
        insert_notice(connection, batch, status, now)
