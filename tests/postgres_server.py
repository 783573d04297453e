"""A PostgreSQL server for tests, made by the programs of this machine."""

import importlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")) or [Path(shutil.which("pg_ctl") or "")]


class PostgresServer:
    """Listens on a socket in a folder of its own. A server of root runs as the user `postgres`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tidemill-pg-"))
        if os.getuid() == 0:
            shutil.chown(self._folder, "postgres")
        self._run("initdb", "--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8")
        self.start()

    @property
    def address(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._folder}"

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self._folder} -c fsync=off"
        self._run("pg_ctl", "start", "--wait", "--silent", f"--log={self._folder}/log", f"--options={options}")

    def kill(self) -> None:
        """End all its processes without a checkpoint."""
        self._run("pg_ctl", "stop", "--mode=immediate", "--silent")

    def clear(self) -> None:
        """Remove all rows."""
        with importlib.import_module("psycopg").connect(self.address, autocommit=True) as connection:
            connection.execute("DROP SCHEMA IF EXISTS tidemill CASCADE")

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def _run(self, name: str, *options: str) -> None:
        words = [str(PROGRAMS[-1].with_name(name)), f"--pgdata={self._folder}/data", *options]
        if os.getuid() == 0:
            words = ["runuser", "--user", "postgres", "--", *words]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd="/")


def start_postgres() -> PostgresServer:
    """Start a server, or skip the test."""
    if not PROGRAMS[-1].name:
        pytest.skip("needs PostgreSQL's programs (Debian: postgresql)")
    pytest.importorskip("psycopg", reason="needs psycopg (pip install 'psycopg[binary]')")
    return PostgresServer()
