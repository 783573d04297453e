"""Mixin of `RowStore` for servers that share the store. A lease is a row of `runs` with the server that feeds the run.

Run OWNER of a batch is the batch itself: the server with this lease validates the batch, builds the result files and
ends it. Leases save work. Correctness does not need them: the first result of a line counts, and changes by a former
owner are refused. Times of servers are the database's.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.store.objects import BatchJob, IllegalTransition
from gateway.store.rows import UNFINISHED_STATES, read_batch_row
from gateway.store.writer import RowConnection, Rows, exclusive, transaction

OWNER = -1
DEAD_SECONDS = 15
"""Seconds without a heartbeat after which other servers take the leases of a server."""
FORGET_SECONDS = 86_400
_FREE = "server NOT IN (SELECT id FROM servers WHERE seen_at > :since)"
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
    num_servers: int


class ServerRows(Rows):
    """Times of servers."""

    def _now(self, connection: RowConnection) -> int:
        return int(connection.execute(f"SELECT {self._writer.clock} AS now").fetchone()["now"])

    def _since(self, connection: RowConnection, takes_over: bool) -> int:
        """Return the time from which on a heartbeat counts."""
        return self._now(connection) - DEAD_SECONDS if takes_over else 0


class LeaseRows(ServerRows):
    """Servers and their leases. `takes_over`: whether leases of servers without a heartbeat are free."""

    @transaction
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
        alive = "SELECT COUNT(*) AS num, COALESCE(SUM(rate), 0.0) AS rate FROM servers WHERE seen_at > ?"
        servers = connection.execute(alive, (values["since"],)).fetchone()
        return Beat(
            now,
            list(jobs.values()),
            {batch_id: frozenset(own) for batch_id, own in runs.items()},
            frozenset(jobs[row["batch"]].id for row in owned if row["batch"] in jobs),
            frozenset(jobs[row["batch"]].id for row in free if row["batch"] in jobs),
            {row["tenant"]: int(row["held"]) for row in held},
            max(0.0, servers["rate"] - rate),
            servers["num"],
        )

    @transaction
    def leave(self, connection: RowConnection, server: str) -> None:
        """Free the leases of a server that has ended."""
        connection.execute("DELETE FROM servers WHERE id = ?", (server,))

    @exclusive("batch_id")
    def take_batch(self, connection: RowConnection, batch_id: str, takes_over: bool) -> bool:
        """Own an unfinished batch, if no other server does. Return whether this server owns it."""
        taken = connection.execute(
            f"INSERT INTO runs (batch, run, lines, server) SELECT seq, {OWNER}, 0, :server FROM batches "
            f"WHERE id = :id AND status IN {UNFINISHED_STATES} ON CONFLICT (batch, run) DO UPDATE "
            f"SET server = excluded.server WHERE runs.server = excluded.server OR runs.{_FREE}",
            {"server": self.server, "id": batch_id, "since": self._since(connection, takes_over)},
        )
        return taken.rowcount > 0

    @exclusive("batch_id")
    def add_runs(self, connection: RowConnection, batch_id: str, size: int, blocks: Sequence[int]) -> None:
        """Make the runs of a batch available. A run without a pending line gets no row.

        Args:
            size: number of lines in a run.
            blocks: for each run in feeding order, its first rank divided by `size`.

        Raises IllegalTransition for a former owner.
        """
        check_owner(self, connection, batch_id)
        seq = connection.execute("SELECT seq FROM batches WHERE id = ?", (batch_id,)).fetchone()["seq"]
        query = "SELECT DISTINCT rank / ? AS block FROM lines WHERE batch = ? AND succeeded IS NULL"
        pending = {row["block"] for row in connection.execute(query, (size, seq))}
        connection.executemany(
            "INSERT INTO runs (batch, run, lines) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            ((seq, run, size) for run, block in enumerate(blocks) if block in pending),
        )

    @transaction
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

    @transaction
    def release_runs(self, connection: RowConnection, batch_id: str) -> None:
        """Free this server's runs of a batch."""
        query = (
            f"UPDATE runs SET server = '' WHERE run > {OWNER} AND server = ? "
            "AND batch = (SELECT seq FROM batches WHERE id = ?)"
        )
        connection.execute(query, (self.server, batch_id))

    @transaction
    def has_other_feeders(self, connection: RowConnection, batch_id: str) -> bool:
        """Return whether another server has runs of the batch."""
        query = (
            f"SELECT 1 FROM runs WHERE run > {OWNER} AND {ELSEWHERE} "
            "AND batch = (SELECT seq FROM batches WHERE id = :id) LIMIT 1"
        )
        values = {"server": self.server, "since": self._since(connection, True), "id": batch_id}
        return connection.execute(query, values).fetchone() is not None

    @exclusive("batch_id")
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
    query = f"SELECT server FROM runs WHERE run = {OWNER} AND batch = (SELECT seq FROM batches WHERE id = ?)"
    if rows.is_shared:
        row = connection.execute(query, (batch_id,)).fetchone()
        if row is None or row["server"] != rows.server:
            raise IllegalTransition("another server owns the batch")
