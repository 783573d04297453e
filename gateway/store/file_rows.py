"""Mixin of `RowStore` for files. The row of a deleted file stays for a day as a tombstone, because clients that
delete while they page use its id as a cursor."""

from collections.abc import Sequence

from gateway.store.objects import FileInUse, FileObject, Page, StorageQuota, UnknownCursor
from gateway.store.rows import Row, insert_file, read_file_row
from gateway.store.writer import OBJECTS, RowConnection, Rows, exclusive, transaction

TOMBSTONE_SECONDS = 24 * 3600
UNFINISHED_STATES = "('validating', 'in_progress', 'finalizing', 'cancelling')"
_IN_USE = f"EXISTS (SELECT 1 FROM batches b WHERE b.input_file_id = files.id AND b.status IN {UNFINISHED_STATES})"
_STORED = "deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)"


def owned(tenant: str | None) -> str:
    """Return the SQL condition that a row belongs to `:tenant`; None means all tenants."""
    return "TRUE" if tenant is None else "tenant = :tenant"


class FileRows(Rows):
    """Rows of files. Expired files and files of other tenants count as missing; `tenant` None means all tenants."""

    @exclusive(OBJECTS)
    def add_file(self, connection: RowConnection, file: FileObject, max_bytes: int | None = None) -> None:
        """Add a file. `max_bytes`: quota for all files of the tenant. Raises StorageQuota."""
        known = connection.execute("SELECT 1 FROM files WHERE id = ?", (file.id,)).fetchone()
        if max_bytes is not None and known is None:
            used = _stored_bytes(connection, file.tenant, file.created_at)
            if used + file.bytes > max_bytes:
                raise StorageQuota(used)
        insert_file(connection, file)

    @transaction
    def stored_bytes(self, connection: RowConnection, tenant: str, now: int) -> int:
        """Return the total size of a tenant's files in bytes."""
        return _stored_bytes(connection, tenant, now)

    @transaction
    def get_file(self, connection: RowConnection, tenant: str | None, file_id: str, now: int) -> FileObject | None:
        return find_file(connection, tenant, file_id, now)

    @transaction
    def list_files(
        self, connection: RowConnection, tenant: str | None, page: Page, purpose: str | None, now: int
    ) -> tuple[list[FileObject], bool]:
        """Return a page, and whether more files follow. Raises UnknownCursor."""
        where = f"{owned(tenant)} AND {_STORED}"
        values: dict[str, str | int | None] = {"tenant": tenant, "now": now, "purpose": purpose}
        if purpose is not None:
            where += " AND purpose = :purpose"
        rows, more = read_page(connection, "files", where, values, page)
        return [read_file_row(row) for row in rows], more

    @exclusive(OBJECTS)
    def delete_file(self, connection: RowConnection, tenant: str | None, file_id: str, now: int) -> bool:
        """Delete a file; return False if it does not exist. Raises FileInUse for the input of an unfinished batch."""
        if find_file(connection, tenant, file_id, now) is None:
            return False
        values = {"id": file_id, "now": now}
        changed = connection.execute(f"UPDATE files SET deleted_at = :now WHERE id = :id AND NOT {_IN_USE}", values)
        if not changed.rowcount:
            raise FileInUse
        return True

    @transaction
    def newest_time(self, connection: RowConnection) -> int | None:
        """Return the newest time at which a file or batch was created; None without one."""
        query = "SELECT MAX(created_at) AS newest FROM files UNION ALL SELECT MAX(created_at) FROM batches"
        return max((row["newest"] for row in connection.execute(query) if row["newest"] is not None), default=None)

    @exclusive(OBJECTS)
    def expire_files(self, connection: RowConnection, now: int, limit: int) -> list[str]:
        """Mark expired files as deleted, except inputs in use, and return their ids for removal of the bodies."""
        rows = connection.execute(
            "UPDATE files SET deleted_at = ? WHERE seq IN (SELECT seq FROM files "
            f"WHERE deleted_at IS NULL AND expires_at <= ? AND NOT {_IN_USE} LIMIT ?) RETURNING id",
            (now, now, limit),
        )
        return [row["id"] for row in rows]

    @transaction
    def old_tombstones(self, connection: RowConnection, now: int, limit: int) -> list[str]:
        """Return the ids of files that were deleted more than TOMBSTONE_SECONDS ago."""
        query = "SELECT id FROM files WHERE deleted_at < ? LIMIT ?"
        values = (now - TOMBSTONE_SECONDS, limit)
        return [row["id"] for row in connection.execute(query, values)]

    @transaction
    def purge_files(self, connection: RowConnection, file_ids: Sequence[str]) -> None:
        """Remove the rows of deleted files whose bodies have been removed."""
        query = "DELETE FROM files WHERE id = ? AND deleted_at IS NOT NULL"
        connection.executemany(query, ((file_id,) for file_id in file_ids))

    @transaction
    def known_files(self, connection: RowConnection, file_ids: Sequence[str]) -> set[str]:
        """Return the ids that belong to a file of any tenant that has not been deleted."""
        query = "SELECT 1 FROM files WHERE id = ? AND deleted_at IS NULL"
        return {file_id for file_id in file_ids if connection.execute(query, (file_id,)).fetchone()}


def _stored_bytes(connection: RowConnection, tenant: str, now: int) -> int:
    query = f"SELECT COALESCE(SUM(bytes), 0) AS used FROM files WHERE tenant = :tenant AND {_STORED}"
    return int(connection.execute(query, {"tenant": tenant, "now": now}).fetchone()["used"])


def find_file(connection: RowConnection, tenant: str | None, file_id: str, now: int) -> FileObject | None:
    values = {"tenant": tenant, "id": file_id, "now": now}
    query = f"SELECT * FROM files WHERE id = :id AND {owned(tenant)} AND {_STORED}"
    row = connection.execute(query, values).fetchone()
    return None if row is None else read_file_row(row)


def read_page(
    connection: RowConnection, table: str, where: str, values: dict[str, str | int | None], page: Page
) -> tuple[list[Row], bool]:
    """Return the rows of a page, and whether more follow. `table` and `where` must not contain client input; `values`
    contains the tenant, see `owned`."""
    if page.after is not None:
        owner = values["tenant"]
        assert not isinstance(owner, int)
        query = f"SELECT seq FROM {table} WHERE id = :id AND {owned(owner)}"
        cursor = connection.execute(query, {"id": page.after, "tenant": owner}).fetchone()
        if cursor is None:
            raise UnknownCursor
        values = {**values, "after": cursor["seq"]}
        where += f" AND seq {'>' if page.ascending else '<'} :after"
    order = "ASC" if page.ascending else "DESC"
    query = f"SELECT * FROM {table} WHERE {where} ORDER BY seq {order} LIMIT {page.limit + 1}"
    rows = connection.execute(query, values).fetchall()
    return rows[: page.limit], len(rows) > page.limit
