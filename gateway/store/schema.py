"""Schema of the database in SQLite's SQL. `gateway.store.postgres` translates the column types."""

_TABLES = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    expires_at INTEGER,
    deleted_at INTEGER
) STRICT;
CREATE INDEX files_by_tenant ON files (tenant, seq);
CREATE INDEX files_by_expiry ON files (expires_at) WHERE deleted_at IS NULL AND expires_at IS NOT NULL;
CREATE INDEX files_deleted ON files (deleted_at) WHERE deleted_at IS NOT NULL;

CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    status TEXT NOT NULL,
    output_expires_after INTEGER,
    metadata TEXT,
    model TEXT,
    errors TEXT NOT NULL DEFAULT '[]',
    output_file_id TEXT,
    error_file_id TEXT,
    times TEXT NOT NULL DEFAULT '{}',
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    engine_us INTEGER NOT NULL DEFAULT 0,
    journal_bytes INTEGER NOT NULL DEFAULT 0,
    idempotency_key TEXT,
    idempotency_digest TEXT
) STRICT;
CREATE INDEX batches_by_tenant ON batches (tenant, seq);
CREATE INDEX batches_unfinished ON batches (input_file_id)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE UNIQUE INDEX batches_by_idempotency ON batches (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE TABLE lines (
    batch INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    number INTEGER NOT NULL,
    start INTEGER NOT NULL,
    length INTEGER NOT NULL,
    succeeded INTEGER,
    result_start INTEGER NOT NULL DEFAULT 0,
    result_length INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (batch, rank)
) STRICT, WITHOUT ROWID;

"""
_ANNOUNCED = "CREATE TABLE announced (id TEXT NOT NULL PRIMARY KEY, run TEXT NOT NULL) STRICT, WITHOUT ROWID"
_NOTICES = """
CREATE TABLE notices (
    batch TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL,
    status TEXT NOT NULL,
    ended_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX notices_by_time ON notices (due_at)
"""
_LEASES = """
CREATE TABLE servers (
    id TEXT NOT NULL PRIMARY KEY,
    seen_at INTEGER NOT NULL,
    rate REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE runs (
    batch INTEGER NOT NULL,
    run INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    server TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (batch, run)
) STRICT, WITHOUT ROWID
"""
SCHEMA = ";".join((_TABLES.rstrip().removesuffix(";"), _ANNOUNCED, _NOTICES, _LEASES))
SHARED = """
CREATE TABLE IF NOT EXISTS key_lines (
    id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    version TEXT NOT NULL,
    lines TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS loads (
    server TEXT NOT NULL,
    tenant TEXT NOT NULL,
    requests INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    queued INTEGER NOT NULL,
    PRIMARY KEY (server, tenant)
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS request_usage (
    tenant TEXT NOT NULL PRIMARY KEY,
    since INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    engine_us INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS reports (server TEXT NOT NULL PRIMARY KEY, number INTEGER NOT NULL) STRICT, WITHOUT ROWID
"""
"""Tables of tenants for servers that share a store. They are no part of VERSION."""

# Requests without a key belonged to the tenant ''. Idempotency keys must stay unique within the new tenant.
_DEFAULT_TENANT = """
UPDATE batches SET idempotency_key = NULL, idempotency_digest = NULL WHERE tenant = '' AND idempotency_key IN
    (SELECT idempotency_key FROM batches WHERE tenant = 'default');
UPDATE batches SET tenant = 'default' WHERE tenant = '';
UPDATE files SET tenant = 'default' WHERE tenant = ''
"""
# Versions 5 to 9 had uploads in parts. The next cleanup of expired files removes the parts.
_NO_UPLOADS = """
UPDATE files SET expires_at = 0 WHERE purpose = 'upload_part';
DROP INDEX IF EXISTS files_by_upload;
DROP TABLE IF EXISTS uploads
"""
_NOTICES_BY_CHANNEL = """
CREATE TABLE notices (
    batch TEXT NOT NULL,
    channel TEXT NOT NULL,
    tenant TEXT NOT NULL,
    status TEXT NOT NULL,
    url TEXT NOT NULL,
    ended_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at INTEGER NOT NULL,
    PRIMARY KEY (batch, channel)
) STRICT, WITHOUT ROWID;
CREATE INDEX notices_by_time ON notices (channel, due_at)
"""
# Reports to the URLs of tenants are dropped.
_ONE_TARGET = f"""
ALTER TABLE notices RENAME TO old_notices;
DROP INDEX notices_by_time;
{_NOTICES};
INSERT INTO notices (batch, tenant, status, ended_at, attempts, due_at)
    SELECT batch, tenant, status, ended_at, attempts, due_at FROM old_notices WHERE channel = 'command';
DROP TABLE old_notices
"""
OLDEST = 2
UPGRADES = {
    2: _DEFAULT_TENANT,
    3: _ANNOUNCED,
    4: "",
    5: _NOTICES_BY_CHANNEL,
    6: "",
    7: f"ALTER TABLE lines ADD COLUMN output_tokens INTEGER NOT NULL DEFAULT 0;{_LEASES}",
    8: "ALTER TABLE batches ADD COLUMN engine_us INTEGER NOT NULL DEFAULT 0",
    9: _NO_UPLOADS,
    10: _ONE_TARGET,
    11: "ALTER TABLE lines DROP COLUMN output_tokens",
}
"""Scripts from each version to the next."""
VERSION = 1 + max(UPGRADES)
"""Version of the schema. Databases from OLDEST on are upgraded, and newer ones refused."""


def upgrade(version: int) -> str:
    """Return the script from a version to VERSION."""
    return ";".join(UPGRADES[each] for each in range(version, VERSION) if UPGRADES[each])


def refusal(version: int) -> str:
    """Return the error for a database whose version is neither supported nor upgraded."""
    if version > VERSION:
        text = f"a newer version of tidemill (schema {version}, this version: {VERSION}); install that version"
    else:
        text = f"a version of tidemill that is too old (schema {version}, oldest: {OLDEST})"
    return f"--state-dir was written by {text}, or name another folder or database"
