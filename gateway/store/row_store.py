"""Rows of files and batches in one database. `gateway.store.writer` runs the statements in groups.

Every method is one transaction, which is durable when it returns. All methods raise StorageError if the disk fails.
Then nothing has changed, but with `in_doubt` the change may still appear after a crash until `settle` or another
change succeeds. Additions are idempotent; repeating a change of a batch's state raises IllegalTransition.

`StoreClock` is the time of files and batches. Servers that share a database use its clock. A server alone uses the
system's, which may jump: an hour of grace precedes every deletion by a clock that differs by more than a day from the
newest time in the database, or from the time that has passed since.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any, NamedTuple

from gateway.http.keys import Load
from gateway.store.batch_rows import ELSEWHERE, BatchRows, LeaseRows, ServerRows
from gateway.store.objects import TERMINAL, UNFINISHED, Holdings, Notice, Usage
from gateway.store.rows import UNFINISHED_STATES, FileRows, owned, read_batch_row, repair_batch
from gateway.store.writer import OBJECTS, RowConnection, Rows, Writer, transaction

_ENDED = "run != ? AND run NOT IN (SELECT id FROM servers)"


class RecoveryRows(Rows):
    """Recovery at start: known bodies and journals, and damaged rows. Bodies announced by this start of the server, or
    by one that has not ended, may still be in the making."""

    @transaction()
    def announce_files(self, connection: RowConnection, file_ids: Sequence[str]) -> None:
        """Record ids before their bodies appear, so that recovery can remove bodies that never got a row."""
        if self.is_shared:  # the server has not ended, even before its first heartbeat
            query = (
                f"INSERT INTO servers (id, seen_at, rate) VALUES (?, {self._writer.clock}, 0.0) ON CONFLICT DO NOTHING"
            )
            connection.execute(query, (self.server,))
        query = "INSERT INTO announced (id, run) VALUES (?, ?) ON CONFLICT DO NOTHING"
        connection.executemany(query, ((file_id, self.server) for file_id in file_ids))

    @transaction()
    def announced_files(self, connection: RowConnection) -> list[str]:
        """Return the ids that ended servers announced and that have no row."""
        query = f"SELECT id FROM announced WHERE {_ENDED} AND id NOT IN (SELECT id FROM files)"
        return [row["id"] for row in connection.execute(query, (self.server,))]

    @transaction()
    def forget_announced(self, connection: RowConnection, file_ids: Sequence[str] | None = None) -> None:
        """Remove the announcements of the given ids, or of all ended servers for None."""
        if file_ids is None:
            connection.execute(f"DELETE FROM announced WHERE {_ENDED}", (self.server,))
        else:
            connection.executemany("DELETE FROM announced WHERE id = ?", ((file_id,) for file_id in file_ids))

    @transaction()
    def explain_files(self, connection: RowConnection, names: Sequence[str]) -> Mapping[str, bool]:
        """Return whether each body must stay (True) or can be removed (False), leaving out unknown ones."""
        known: dict[str, bool] = {}
        for name in names:
            row = connection.execute("SELECT deleted_at FROM files WHERE id = ?", (name,)).fetchone()
            announced = connection.execute("SELECT run FROM announced WHERE id = ?", (name,)).fetchone()
            if row is not None:
                known[name] = row["deleted_at"] is None
            elif announced is not None:
                known[name] = announced["run"] == self.server
        return known

    @transaction()
    def explain_journals(self, connection: RowConnection, names: Sequence[str]) -> Mapping[str, bool]:
        """Return the same for journals: those of unfinished batches must stay. Damaged rows are ignored."""
        known: dict[str, bool] = {}
        for name in names:
            row = connection.execute("SELECT * FROM batches WHERE id = ?", (name,)).fetchone()
            if row is not None and not (batch := read_batch_row(row)).is_damaged:
                known[name] = batch.status in UNFINISHED
                assert known[name] or batch.status in TERMINAL
        return known

    @transaction()
    def bodies(self, connection: RowConnection, after: int, limit: int) -> list[tuple[int, str, int]]:
        """Return sequence number, id and size of stored files with numbers above `after`, in order."""
        query = "SELECT seq, id, bytes FROM files WHERE seq > ? AND deleted_at IS NULL ORDER BY seq LIMIT ?"
        return [(row["seq"], row["id"], row["bytes"]) for row in connection.execute(query, (after, limit))]

    @transaction()
    def damaged_batches(self, connection: RowConnection) -> dict[int, dict[str, Any]]:
        """Return the unchanged damaged rows of batches by sequence number."""
        rows = connection.execute("SELECT * FROM batches")
        return {row["seq"]: dict(row) for row in rows if read_batch_row(row).is_damaged}

    @transaction(OBJECTS)
    def fail_damaged(self, connection: RowConnection, seqs: Sequence[int], now: int) -> None:
        """Replace damaged rows by rows of failed batches with the reason, and remove their lines."""
        for seq in seqs:
            row = connection.execute("SELECT * FROM batches WHERE seq = ?", (seq,)).fetchone()
            values = repair_batch(row, now)
            columns = ", ".join(f"{name} = :{name}" for name in values)
            connection.execute(f"UPDATE batches SET {columns} WHERE seq = :seq", {**values, "seq": seq})
            connection.execute("DELETE FROM lines WHERE batch = ?", (seq,))


_REQUEST_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "engine_us")
_HOLDINGS = f"""
SELECT tenant, SUM(batches) AS batches, SUM(files) AS files FROM (
    SELECT tenant, COUNT(*) AS batches, 0 AS files FROM batches
    WHERE status IN {UNFINISHED_STATES} GROUP BY tenant
    UNION ALL
    SELECT tenant, 0, COUNT(*) FROM files
    WHERE deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now) GROUP BY tenant
) AS held GROUP BY tenant ORDER BY tenant
"""


def put_keys(connection: RowConnection, lines: str) -> None:
    """Replace the keys, the lines of a key file, in the store."""
    connection.execute(
        "INSERT INTO key_lines (id, version, lines) VALUES (1, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET version = excluded.version, lines = excluded.lines",
        (hashlib.sha256(lines.encode()).hexdigest(), lines),
    )


class TenantNews(NamedTuple):
    """Facts about tenants from other servers."""

    loads: Mapping[str, tuple[int, Load]]
    """Number of other servers with a load of a tenant, and their total load."""
    keys: tuple[str, str] | None
    """Version and lines of the keys, if the version is another one than the caller's."""


class TenantRows(ServerRows):
    """Mixin of `RowStore` to count the objects of tenants, and to exchange keys, loads and usage between servers."""

    @transaction()
    def exchange(
        self,
        connection: RowConnection,
        number: int,
        usage: Mapping[str, Usage],
        loads: Mapping[str, Load],
        version: str,
    ) -> TenantNews:
        """Add usage of requests, unless the report of this `number` has been added before; replace this server's loads;
        return news. `version`: known version of the keys."""
        query = (
            "INSERT INTO reports (server, number) VALUES (?, ?) ON CONFLICT (server) DO UPDATE "
            "SET number = excluded.number WHERE reports.number < excluded.number"
        )
        if usage and connection.execute(query, (self.server, number)).rowcount > 0:
            self._add_usage(connection, usage)
        gone = "server != ? AND server NOT IN (SELECT id FROM servers)"
        for table in ("loads", "reports"):
            connection.execute(f"DELETE FROM {table} WHERE {gone}", (self.server,))
        connection.execute("DELETE FROM loads WHERE server = ?", (self.server,))
        connection.executemany(
            "INSERT INTO loads (server, tenant, requests, tokens, queued) VALUES (?, ?, ?, ?, ?)",
            [(self.server, name, *load) for name, load in loads.items()],
        )
        found = connection.execute(
            "SELECT tenant, COUNT(*) AS servers, SUM(requests) AS requests, SUM(tokens) AS tokens, "
            f"SUM(queued) AS queued FROM loads WHERE {ELSEWHERE} GROUP BY tenant",
            {"server": self.server, "since": self._since(connection, True)},
        )
        others = {row["tenant"]: (row["servers"], Load(*(row[name] for name in Load._fields))) for row in found}
        row = connection.execute("SELECT version, lines FROM key_lines WHERE version != ?", (version,)).fetchone()
        return TenantNews(others, None if row is None else (row["version"], row["lines"]))

    def _add_usage(self, connection: RowConnection, usage: Mapping[str, Usage]) -> None:
        now = self._now(connection)
        connection.executemany(
            f"INSERT INTO request_usage (tenant, since, {', '.join(_REQUEST_TOKENS)}) "
            "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (tenant) DO UPDATE SET "
            + ", ".join(f"{name} = request_usage.{name} + excluded.{name}" for name in _REQUEST_TOKENS),
            [(name, now, *(getattr(used, each) for each in _REQUEST_TOKENS)) for name, used in sorted(usage.items())],
        )

    @transaction()
    def request_usage(self, connection: RowConnection, tenant: str | None) -> tuple[int | None, dict[str, Usage]]:
        """Return since when the usage of requests is counted, and the usage by tenant."""
        rows = connection.execute(f"SELECT * FROM request_usage WHERE {owned(tenant)}", {"tenant": tenant})
        used = {row["tenant"]: Usage(**{name: row[name] for name in _REQUEST_TOKENS}) for row in rows}
        row = connection.execute("SELECT MIN(since) AS since FROM request_usage").fetchone()
        return row["since"], used

    @transaction()
    def holdings(self, connection: RowConnection, now: int) -> list[Holdings]:
        """Return the number of unfinished batches and stored files per tenant, ordered by name."""
        return [Holdings(**row) for row in connection.execute(_HOLDINGS, {"now": now})]

    @transaction()
    def usage(self, connection: RowConnection, tenant: str | None) -> dict[str, tuple[Usage, int]]:
        """Return the token usage of all batches, and the lines of unfinished batches without a result, by tenant."""
        sums = ", ".join(f"SUM({name}) AS {name}" for name in Usage._fields)
        left = f"SUM(CASE WHEN status IN {UNFINISHED_STATES} THEN total - completed - failed ELSE 0 END) AS unfinished"
        query = f"SELECT tenant, {sums}, {left} FROM batches WHERE {owned(tenant)} GROUP BY tenant"
        rows = connection.execute(query, {"tenant": tenant})
        return {row["tenant"]: (Usage(*(row[name] for name in Usage._fields)), int(row["unfinished"])) for row in rows}


class NoticeRows(Rows):
    """Mixin of `RowStore` for reports of batch ends, which the end of a batch adds."""

    @transaction()
    def next_notice(self, connection: RowConnection) -> Notice | None:
        """Return the report that is due first."""
        row = connection.execute("SELECT * FROM notices ORDER BY due_at LIMIT 1").fetchone()
        return None if row is None else Notice(**dict(row))

    @transaction()
    def postpone_notice(self, connection: RowConnection, notice: Notice, due_at: int) -> None:
        """Count a failed attempt."""
        query = "UPDATE notices SET attempts = attempts + 1, due_at = ? WHERE batch = ?"
        connection.execute(query, (due_at, notice.batch))

    @transaction()
    def claim_notice(self, connection: RowConnection, notice: Notice, until: int) -> bool:
        """Postpone a due report so that no other server sends it; return False if another server has done so."""
        query = "UPDATE notices SET due_at = ? WHERE batch = ? AND due_at = ?"
        return connection.execute(query, (until, notice.batch, notice.due_at)).rowcount > 0

    @transaction()
    def forget_notice(self, connection: RowConnection, notice: Notice) -> None:
        connection.execute("DELETE FROM notices WHERE batch = ?", (notice.batch,))


class RowStore(FileRows, BatchRows, LeaseRows, TenantRows, NoticeRows, RecoveryRows):
    """`writer`: the open database; the store closes it. `is_shared`: other servers use the database too."""

    def __init__(self, writer: Writer, *, is_shared: bool = False) -> None:
        self._writer = writer
        self.is_shared = is_shared
        self.server = token_hex(8)

    def is_in_place(self) -> bool:
        """Return whether the database file is still at its path. Checks the disk; callable from any thread."""
        return self._writer.is_in_place()

    async def settle(self) -> None:
        """Settle earlier commits in doubt: changes that are invisible now cannot reappear. Raises StorageError."""
        await self._writer.settle()

    def close_now(self) -> None:
        """Wait for queued work, and close. Blocking."""
        self._writer.close()


log = logging.getLogger("tidemill.gateway")

JUMP_SECONDS = 86_400
"""Smaller differences are followed at once."""
GRACE_SECONDS = 3600


class StoreClock:
    """Args:

    wall: the system's clock in Unix seconds.
    elapsed: a clock in seconds that no one sets.
    """

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._database: float | None = None  # its time at `elapsed` 0
        self._trusted: float | None = None  # a time that was right at `elapsed` 0
        self._doubted_since: float | None = None

    def now(self) -> int:
        """Return the time for new objects and records."""
        return int(self._wall() if self._database is None else self._database + self._elapsed())

    def follow(self, database_now: float) -> None:
        """Use the clock of the database, which shows `database_now`, from now on."""
        self._database = database_now - self._elapsed()

    def begin(self, newest: int | None) -> None:
        """Compare the clock with the newest time in the database; None: it is empty."""
        self._trusted = (self.now() if newest is None else newest) - self._elapsed()
        self.expiry_now()

    def expiry_now(self) -> int:
        """Return the time that decides which files and batches have expired; 0, at which none has, before `begin`."""
        if self._trusted is None:
            return 0
        now, elapsed = self.now(), self._elapsed()
        expected = self._trusted + elapsed
        if abs(now - expected) > JUMP_SECONDS:
            if self._doubted_since is None:
                self._doubted_since = elapsed
                text = "the clock shows %s, not about %s: nothing expires by it for an hour; correct it if it is wrong"
                log.error(text, _text(now), _text(expected))
            if elapsed - self._doubted_since < GRACE_SECONDS:
                return int(min(now, expected))
            log.warning("the clock has shown the time around %s for an hour and is used from now on", _text(now))
        self._trusted, self._doubted_since = now - elapsed, None
        return now


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
