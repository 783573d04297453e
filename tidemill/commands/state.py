"""`tidemill migrate ADDRESS`: copy files and batches from a state folder to PostgreSQL, and to an object store.
`tidemill keys FILE ADDRESS`: put the keys of a file into PostgreSQL.
`tidemill fleet restart`: restart the engines of a server. `tidemill replay FILE`: print a flight recording."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from engine import flight
from engine.errors import ConfigError
from gateway.http.keys import KeyRing, parse_lines, read_lines
from gateway.store.disk import Bucket, Disk, StorageError, cause_of
from gateway.store.folder import (
    DATABASE,
    MOVED,
    PART_NAME,
    Opening,
    Place,
    find_postgres,
    find_state,
    holder,
    state_path,
)
from gateway.store.row_store import put_keys
from gateway.store.writer import RowConnection

TABLES = ("files", "batches", "lines", "notices", "announced")
NUMBERED = ("files", "batches")
"""Tables with a column `seq` that the database counts."""
GROUP_ROWS = 2000
PART_BYTES = 8 * 1024 * 1024


def migrate_state(state_dir: str | None, address: str) -> str:
    """Migrate and return a message. Raise ConfigError if the folder or the address cannot be used."""
    source, target = find_state(state_dir), find_state(address)
    if source.database is not None or target.database is None:
        raise ConfigError("tidemill migrate copies the folder of --state-dir to ADDRESS (postgresql://HOST/NAME?...)")
    with _faults("the migration stopped"):
        return migrate(source, target)


@contextmanager
def _faults(what: str) -> Iterator[None]:
    """Convert errors of the databases and the disk into ConfigError, which begins with `what`."""
    try:
        yield
    except (StorageError, sqlite3.Error, find_postgres().psycopg.Error) as error:
        raise ConfigError(f"{what} ({cause_of(error)}); repeat the command") from error


def put_key_file(file: str, address: str) -> str:
    """Replace the keys of the servers that share a store, and return a message. Raises ConfigError."""
    place, lines = find_state(address), [line.strip() for line in read_lines(file)]
    ring = KeyRing(*parse_lines(f"FILE {file}", lines))
    if place.database is None or place.objects is None:
        raise ConfigError("tidemill keys needs an ADDRESS that servers share: postgresql://...?objects=s3://...")
    with (
        _faults("the change of the keys stopped"),
        closing(find_postgres().open_database(place.database, place.objects)) as rows,
    ):
        put_keys(rows, "\n".join(filter(None, lines)))
    return f"{ring} are in the database; servers without --api-key-file use them from their next heartbeat on"


def migrate(source: Place, target: Place) -> str:
    """Copy contents, then all rows in one transaction. The folder's database stays; if the new server uses the folder
    too, its name becomes MOVED. Raises ConfigError and StorageError, without a change to the rows."""
    if not (source.folder / DATABASE).exists():
        raise ConfigError(f"--state-dir {source.folder} has no {DATABASE}")
    is_same = source.folder.resolve() == target.folder.resolve()
    disk = Disk()
    here, there = Opening(source, disk), Opening(target, disk)
    rows: Any = here.open()
    try:
        remote: Any = find_postgres().open_database(target.database) if is_same else there.open()
        try:
            _check_empty(remote)
            bodies = [row["id"] for row in rows.execute("SELECT id FROM files WHERE deleted_at IS NULL ORDER BY seq")]
            with disk.storing():
                if target.objects is not None:
                    _send(source.folder, bodies, Bucket(target.objects, disk))
                elif not is_same:
                    _copy(source.folder, bodies, target.folder, disk)
            counts = _copy_rows(rows, remote, source.folder)
            if is_same:
                with disk.storing():
                    rows.execute("PRAGMA journal_mode = DELETE")  # the log is in the file
                    disk.rename(source.folder / DATABASE, source.folder / MOVED)
                    disk.sync_folder(source.folder)
        finally:
            remote.close()
            there.close()
    finally:
        rows.close()
        here.close()
    return f"{counts['files']} files and {counts['batches']} batches are in the database; start the server with ADDRESS"


def _check_empty(remote: RowConnection) -> None:
    for table in NUMBERED:
        if remote.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None:
            raise ConfigError("the database of ADDRESS already has files or batches; use an empty one")


def _sources(folder: Path, bodies: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield sub-folder and path of each body and journal that is there."""
    for path in (*(folder / "files" / name for name in bodies), *sorted((folder / "journals").iterdir())):
        if path.is_file():
            yield path.parent.name, path


def _send(folder: Path, bodies: list[str], bucket: Bucket) -> None:
    for kind, path in _sources(folder, bodies):
        if kind == "files":
            bucket.put(f"files/{path.name}", path)
            continue
        with path.open("rb") as file:
            while part := file.read(PART_BYTES):
                start = file.tell() - len(part)
                bucket.put(f"journals/{path.name}/{PART_NAME.format(start)}", part)


def _copy(folder: Path, bodies: list[str], target: Path, disk: Disk) -> None:
    for kind, path in _sources(folder, bodies):
        copy = disk.create(target / "tmp" / token_hex(16))
        try:
            with path.open("rb") as file:
                while part := file.read(PART_BYTES):
                    copy.write(part)
            disk.publish((copy, target / kind / path.name))
        except BaseException:
            copy.discard()
            raise


def _copy_rows(rows: RowConnection, remote: RowConnection, folder: Path) -> dict[str, int]:
    """Copy all tables in one transaction, and return the number of rows of each. Batches get the sizes of their
    journals, which servers that share a store continue."""
    counts = dict.fromkeys(TABLES, 0)
    remote.execute("BEGIN")
    for table in TABLES:
        cursor: Any = rows.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        query = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        while group := cursor.fetchmany(GROUP_ROWS):
            remote.executemany(query, [tuple(row) for row in group])
            counts[table] += len(group)
    for table in NUMBERED:
        last = f"SELECT setval(pg_get_serial_sequence('{table}', 'seq'), MAX(seq)) FROM {table}"
        remote.execute(last)
    for path in (folder / "journals").iterdir():
        remote.execute("UPDATE batches SET journal_bytes = ? WHERE id = ?", (path.stat().st_size, path.name))
    remote.execute("COMMIT")
    return counts


RESTART = signal.SIGUSR1


def restart(state_dir: str | None) -> str:
    """Signal the server that holds the state folder and return a message. Raise ConfigError if there is no server."""
    root = state_path(state_dir)
    pid = holder(root)
    if pid is None:
        raise ConfigError(f"no server of this version uses --state-dir {root}; set the --state-dir of the server")
    try:
        os.kill(pid, RESTART)
    except OSError as error:
        raise ConfigError(
            f"cannot signal process {pid}: {error.strerror}; run the command as the server's user"
        ) from None
    return f"process {pid} restarts its engines, one after another; its log and /ready show the progress"


def replay(path: Path) -> int:
    """Print a recording and return the exit code. Raise ConfigError if the file is not a recording."""
    for line in table(flight.load(path)):
        print(line)
    return 0


def table(recording: flight.Recording) -> Iterator[str]:
    """Yield a line per step, with its time before the end, and a line per request in the unfinished steps."""
    facts, entries = recording.facts, recording.entries
    yield f"{facts.cause}: {facts.model}, {facts.dtype} on {facts.device}; {len(entries)} entries"
    titles = f"{'step':>8} {'before the end':>14} {'requests':>8} {'adapted':>7} {'new':>4} {'tokens':>6}"
    yield f"{titles} {'predicted':>10} {'took':>10}"
    ends = {entry.step_id: entry for entry in entries if isinstance(entry, flight.Completed | flight.FailedStep)}
    for entry in entries:
        if isinstance(entry, flight.Launched):
            yield _row(entry, ends.get(entry.step_id), facts.clock)
        elif isinstance(entry, flight.Idle):
            yield f"{'idle':>8} {entry.at - facts.clock:12.3f} s"
    for request_id, tokens in flight.in_flight(entries).items():
        yield f"in the last steps: {request_id}, up to token {tokens}"


def _row(entry: flight.Launched, end: flight.Completed | flight.FailedStep | None, clock: float) -> str:
    tokens = sum(chunk.length for chunk in entry.chunks)
    predicted = "" if entry.predicted is None else f"{1e3 * entry.predicted:.1f} ms"
    match end:
        case flight.Completed():
            took = f"{1e3 * end.latency:.1f} ms"
        case flight.FailedStep():
            took = end.error
        case _:
            took = "no end"
    counts = f"{len(entry.chunks):8} {entry.adapted:7} {len(entry.started):4} {tokens:6}"
    return f"{entry.step_id:8} {entry.at - clock:12.3f} s {counts} {predicted:>10} {took:>10}"
