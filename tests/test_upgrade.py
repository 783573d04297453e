"""State folders of earlier versions open with their files, batches and results."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from batch_tools import batch_server, check_ended, open_folder, until

from engine.text.tokenizer import Tokenizer
from gateway.store.objects import Page
from gateway.store.schema import OLDEST, UPGRADES, VERSION

KNOWN = json.loads(Path(__file__).with_name("state_schema_2.json").read_text())


def write_state(root: Path, version: int = OLDEST) -> None:
    """Write a folder that a server of this schema has left."""
    for name in ("files", "journals", "tmp"):
        (root / name).mkdir(mode=0o700, parents=True)
    for name, content in KNOWN["files"].items():
        (root / name).write_text(content)
    with closing(sqlite3.connect(root / "tidemill.db")) as database:
        database.executescript(KNOWN["sql"])
        for step in range(OLDEST, version):
            database.executescript(UPGRADES[step])
        database.execute(f"PRAGMA user_version = {version}")
        database.commit()


def columns_of(path: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'")]
        query = "SELECT name, type, [notnull], dflt_value, pk FROM pragma_table_info(?)"
        return {"version": version} | {name: set(database.execute(query, (name,))) for name in names}


@pytest.mark.parametrize("version", range(OLDEST, VERSION))
async def test_every_earlier_schema_becomes_the_present_one(tmp_path: Path, version: int) -> None:
    await (await open_folder(tmp_path / "new")).close()
    write_state(tmp_path / "old", version)
    await (await open_folder(tmp_path / "old")).close()
    assert columns_of(tmp_path / "old" / "tidemill.db") == columns_of(tmp_path / "new" / "tidemill.db")


async def test_an_upgraded_folder_has_its_files_batches_and_results(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_state(tmp_path)
    async with batch_server(tokenizer, tmp_path, "new") as (served, client):
        half, done = [batch async for batch in client.batches.list()]
        output, errors = await check_ended(client, done, [f"id-{i}" for i in range(5)])
        assert {row["response"]["body"]["choices"][0]["text"] for row in output.values()} == {"so\ufffd"}
        assert errors["id-2"]["response"]["status_code"] == 400
        ended = await until(client, half.id)
        await check_ended(client, ended, [f"id-{i}" for i in range(8)])
        assert ended.status == "completed" and ended.request_counts.completed == 8
        names = [file.filename async for file in client.files.list()]
        assert names.count("in.jsonl") == 3
        assert len(served.engine.requests) == 8, "no line of the batch that had ended runs again"


async def test_parts_of_unfinished_uploads_are_removed(tmp_path: Path) -> None:
    """Schemas 5 to 9 stored the parts of an upload as files."""
    write_state(tmp_path, 9)
    part = "file-" + "a" * 32
    (tmp_path / "files" / part).write_text("part")
    with closing(sqlite3.connect(tmp_path / "tidemill.db")) as database:
        row = (part, "default", 4, 1, "upload_1", "upload_part", 2_000_000_000)
        columns = "id, tenant, bytes, created_at, filename, purpose, expires_at"
        database.execute(f"INSERT INTO files ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        database.commit()
    folder = await open_folder(tmp_path)
    files, _ = await folder.store.list_files(None, Page(1000), None, 1_900_000_000)
    assert files and part not in {file.id for file in files}
    assert part in await folder.store.expire_files(1_900_000_000, 1000)
    await folder.close()
