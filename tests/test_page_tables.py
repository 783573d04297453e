"""Tables on the server: equal to those of `tidemill batch run`, bounded against hostile files, kept over restarts."""

import asyncio
import gzip
import json
import resource
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest
from batch_tools import FAST, batch_server, client_of, keys_of, leftovers, until
from fake_engine import MODEL, Script, Served
from test_batch_run import ANSWER, ROWS, SCHEMA, silent, write

import tidemill.run as runs
from engine.text.tokenizer import Tokenizer
from tidemill import Batch, page_tables

RECIPE = {"prompt": "Rate {id}: {text}", "schema": SCHEMA, "max_tokens": 60, "model": MODEL}


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read tables in a thread without limits, except in tests of the child process, which takes a second to start."""
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.01)
    if "apart" not in request.node.name:
        monkeypatch.setattr(page_tables, "run_apart", asyncio.to_thread)
        unlimited = SimpleNamespace(**vars(resource) | {"setrlimit": lambda *_: None})
        monkeypatch.setattr(page_tables, "resource", unlimited)
        monkeypatch.setattr(page_tables, "LOW_PRIORITY", 0)


@pytest.fixture
async def served(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Served]:
    async with batch_server(tokenizer, tmp_path / "state", ANSWER) as (served, _):
        yield served


async def call(served: Served, method: str, path: str, key: str = "none", **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60, headers={"authorization": f"Bearer {key}"}) as http:
        return await http.request(method, served.url + path, **options)


async def upload(served: Served, name: str, content: bytes, key: str = "none") -> str:
    fields = {"files": {"file": (name, content)}, "data": {"purpose": "batch"}}
    return str((await call(served, "POST", "/v1/files", key, **fields)).json()["id"])


async def preview(served: Served, file: str, key: str = "none", **recipe: Any) -> httpx.Response:
    return await call(served, "POST", "/v1/tables/preview", key, json={"input_file_id": file, **RECIPE, **recipe})


async def create(served: Served, file: str, key: str = "none", **recipe: Any) -> httpx.Response:
    return await call(served, "POST", "/v1/tables", key, json={"input_file_id": file, **RECIPE, **recipe})


async def ended(served: Served, created: httpx.Response, key: str = "none") -> Any:
    assert created.status_code == 200, created.text
    async with client_of(served, api_key=key) as client:
        return await until(client, created.json()["id"])


async def table_of(served: Served, batch: str, key: str = "none") -> httpx.Response:
    return await call(served, "GET", f"/v1/batches/{batch}/table", key)


async def stored(served: Served) -> set[str]:
    return {file["filename"] for file in (await call(served, "GET", "/v1/files")).json()["data"]}


@pytest.mark.parametrize("name", ["in.csv", "in.tsv", "in.jsonl", "in.json", "in.csv.gz", "in.parquet", "apart.CSV"])
async def test_the_table_is_that_of_batch_run(served: Served, tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    if name.endswith(("gz", "CSV")):
        content = write(tmp_path / "plain.csv", ROWS).read_bytes()
        source.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    elif name == "in.json":
        source.write_text(json.dumps(ROWS))
    else:
        write(source, ROWS)
    file = await upload(served, name, source.read_bytes())
    shown = (await preview(served, file)).json()["table"]
    assert shown["columns"] == ["id", "text"] and shown["added_columns"] == ["label", "score", "status", "error"]
    assert (shown["rows"], shown["requests"], shown["warnings"]) == (3, 3, [])
    assert [each["body"]["messages"][0]["content"] for each in shown["first"]] == [
        f"Rate {row['id']}: {row['text']}" for row in ROWS
    ]
    assert shown["prompt_chars"] == sum(each["chars"] for each in shown["first"])
    answer = await call(served, "POST", "/v1/chat/completions", json=shown["first"][0]["body"])
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    assert await stored(served) == {name}, "a preview stores nothing"
    batch = await ended(served, await create(served, file))
    assert await stored(served) >= {name, f"{name}.jsonl", f"{name}.recipe.json"}
    table = await table_of(served, batch.id)
    options = {**RECIPE, "follow": silent, "url": served.url}
    expected = tmp_path / f"out{''.join(source.suffixes)}"
    await Batch(source, expected, **options).run_async()
    assert table.status_code == 200 and table.content == expected.read_bytes()
    assert not leftovers(tmp_path / "state")["tmp"]


async def test_rows_without_a_request_or_an_answer_say_why(served: Served, tmp_path: Path) -> None:
    rows = [*ROWS, {"id": 4}]
    source = write(tmp_path / "in.jsonl", rows)
    file = await upload(served, "in.jsonl", source.read_bytes())
    shown = (await preview(served, file, prompt="{text}")).json()["table"]
    assert (shown["rows"], shown["requests"]) == (4, 3)
    batch = await ended(served, await create(served, file, prompt="{text}", max_tokens=2))
    table = [json.loads(line) for line in (await table_of(served, batch.id)).content.splitlines()]
    result = await Batch(
        source, tmp_path / "out.jsonl", follow=silent, url=served.url, **RECIPE | {"prompt": "{text}", "max_tokens": 2}
    ).run_async()
    assert table == list(result)
    assert [row["status"] for row in table] == ["failed"] * 4 and "cut off" in table[0]["error"]
    assert "names the column 'text'" in table[3]["error"]


async def test_a_preview_expects_the_end_that_the_creation_does(served: Served) -> None:
    pace = served.app.state.batches.jobs.forecast.pace
    pace.seconds, pace._work = 10.0, 1000.0
    file = await upload(served, "in.csv", b"id,text\n" + b"1,some text\n" * 5000)
    expected = (await preview(served, file)).json()["metadata"]
    created = (await create(served, file)).json()["metadata"]
    assert expected["tidemill.remaining_tokens"] == created["tidemill.remaining_tokens"]
    assert "tidemill.eta" in expected and "tidemill.eta" in created


BAD = {
    "sheet.xlsx": (b"PK", {}, "save the sheet as CSV"),
    "empty.csv": (b"text,id\n", {}, "empty.csv: the table has no rows"),
    "ragged.csv": (b"id,text\n1,a\n2,b,c\n", {}, "ragged.csv: line 3 has 3 cells"),
    "latin.csv": ("id,text\n1,ü\n".encode("latin-1"), {}, "latin.csv: the file is not UTF-8"),
    "damaged.parquet": (b"PAR1" + b"\0" * 40, {}, "damaged.parquet: "),
    "damaged.csv.gz": (b"id,text\n1,a\n", {}, "Not a gzipped file"),
    "array.json": (b"[1]", {}, "array.json: value 1 is not a JSON object"),
    "taken.csv": (b"id,text,status\n1,a,b\n", {}, "already has a column 'status'"),
    "columns.csv": (b"id,text\n1,a\n", {"prompt": "{no such}"}, "the prompt names the column 'no such'"),
    "braces.csv": (b"id,text\n1,a\n", {"prompt": "{"}, "braces"),
    "schema.csv": (b"id,text\n1,a\n", {"schema": {"type": "object"}}, "must be an object with properties"),
    "rows.csv": (b"id,text\n" + b"1,a\n" * 5, {}, "more than 4 rows"),
}


async def test_a_table_that_cannot_be_used_stores_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path / "state", ANSWER, limits=replace(FAST, lines=4)) as (served, _):
        for name, (content, recipe, reason) in BAD.items():
            file = await upload(served, name, content)
            for ask in (preview, create):
                refused = await ask(served, file, **recipe)
                error = refused.json()["error"]
                assert refused.status_code == 400 and error["code"] == "invalid_table", (name, refused.text)
                assert reason in error["message"] and str(tmp_path) not in error["message"], (name, error["message"])
        assert await stored(served) == BAD.keys() and not leftovers(tmp_path / "state")["tmp"]
        file = await upload(served, "good.csv", "id,text,status\n1,ü,b\n".encode("latin-1"))
        batch = await ended(served, await create(served, file, encoding="latin-1", prefix="llm_"))
        table = (await table_of(served, batch.id)).content.decode().splitlines()
        assert table == ["id,text,status,llm_label,llm_score,llm_status,llm_error", "1,ü,b,good,3,ok,"]


async def test_a_full_disk_and_a_deleted_file(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = await upload(served, "in.csv", b"id,text\n1,a\n")

    def full(*_: Any) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(page_tables, "batch_line", full)
        assert (await create(served, file)).status_code == 507
    batch = await ended(served, await create(served, file))
    with monkeypatch.context() as patch:
        patch.setattr(page_tables, "write_table", full)
        assert (await table_of(served, batch.id)).status_code == 507
    assert (await table_of(served, batch.id)).status_code == 200
    await call(served, "DELETE", f"/v1/files/{file}")
    gone = await table_of(served, batch.id)
    assert gone.status_code == 404 and "deleted or has expired" in gone.json()["error"]["message"]
    assert not leftovers(tmp_path / "state")["tmp"]


async def test_a_schema_that_is_nested_too_deeply_is_refused(served: Served) -> None:
    file, schema = await upload(served, "in.csv", b"id,text\n1,a\n"), dict[str, Any]()
    for levels in range(301):
        if levels in (100, 300):
            for ask in (preview, create):
                answer = await ask(served, file, schema=schema)
                assert answer.status_code == (200 if levels == 100 else 400), answer.text
        schema = {"type": "object", "properties": {"a": schema}}
    assert answer.json()["error"]["message"] == "'schema' is nested too deeply."


async def test_any_column_without_braces_can_be_named(served: Served) -> None:
    file = await upload(served, "in.csv", b"a:b,c!,d.e[0]\n1,2,3\n")
    shown = (await preview(served, file, prompt="{{{a:b}}} {c!} {d.e[0]}")).json()["table"]
    assert shown["first"][0]["body"]["messages"][0]["content"] == "{1} 2 3"


async def test_a_table_is_left_when_its_client_goes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    file, begun = await upload(served, "in.csv", b"id,text\n1,a\n"), asyncio.Event()

    async def endless(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(page_tables, "run_apart", endless)
        asked = asyncio.create_task(preview(served, file))
        await begun.wait()
        asked.cancel()
        await asyncio.wait([asked])
        assert (await call(served, "GET", "/health")).status_code == 200
    assert (await preview(served, file)).status_code == 200, "its place is free"


def holding(tokenizer: Tokenizer) -> Callable[..., Script]:
    return lambda _: Script(tokenizer.encode(ANSWER), hold_after=0)


async def test_a_table_outlives_a_restart_and_a_cancel(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path / "state", holding(tokenizer)) as (served, _):
        file = await upload(served, "in.csv", b"id,text\n1,a\n2,b\n")
        created, stopped = [(await create(served, file)).json()["id"] for _ in range(2)]
        early = await table_of(served, created)
        assert early.status_code == 404 and early.json()["error"]["code"] == "results_not_ready"
        await call(served, "POST", f"/v1/batches/{stopped}/cancel")
        async with client_of(served) as client:
            assert (await until(client, stopped)).status == "cancelled"
    left = tmp_path / "state" / "tmp" / "left"
    left.mkdir()
    (left / "lines").write_bytes(b"of a server that was killed")
    async with batch_server(tokenizer, tmp_path / "state", ANSWER) as (served, client):
        assert not left.exists()
        await until(client, created)
        lines = (await table_of(served, created)).text.splitlines()
        assert lines == ["id,text,label,score,status,error", "1,a,good,3,ok,", "2,b,good,3,ok,"]
        assert (await table_of(served, stopped)).text.count("the batch was cancelled") == 2
        batch = await ended(served, await create(served, file, model="no-such-model"))
        refused = await table_of(served, batch.id)
        assert refused.status_code == 404 and "no model 'no-such-model'" in refused.json()["error"]["message"]


async def test_tenants_and_their_quotas(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "acme acme lines=2 bytes=2000", "other other", "boss ops operator")
    async with batch_server(tokenizer, tmp_path / "state", ANSWER, api_key_file=keys) as (served, _):
        file = await upload(served, "in.csv", b"id,text\n1,a\n2,b\n", "acme")
        for key in ("other", "boss"):
            for ask in (preview, create):
                missing = await ask(served, file, key)
                assert missing.status_code == 404 and missing.json()["error"]["code"] == "file_not_found"
        batch = await ended(served, await create(served, file, "acme"), "acme")
        assert (await table_of(served, batch.id, "other")).status_code == 404
        assert (await table_of(served, batch.id, "boss")).content == (await table_of(served, batch.id, "acme")).content
        full = await create(served, file, "acme", prompt="{text}" + "x" * 1000)
        assert full.status_code == 413 and full.json()["error"]["code"] == "tenant_limit_exceeded", full.text
        assert (await call(served, "POST", "/v1/tables", "wrong", json={})).status_code == 401
        async with client_of(served, api_key="acme") as client:
            assert "in.csv" in {each.filename for each in (await client.files.list()).data}


@pytest.mark.slow
async def test_hostile_tables_are_bounded_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A file of 150 kB with 15 GB of text, one with more requests than the quota, and one that takes too long."""
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5000, pyarrow.int32()), ["y" * 3_000_000])
    bomb = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), bomb)
    keys = keys_of(tmp_path, "acme acme bytes=1000000")
    limits = replace(FAST)  # changed below
    async with batch_server(tokenizer, tmp_path / "state", ANSWER, limits=limits, api_key_file=keys) as (served, _):
        file = await upload(served, "bomb.parquet", bomb.getvalue().to_pybytes(), "acme")
        asked = asyncio.create_task(preview(served, file, "acme", prompt="{text}"))
        answers = 0
        while not asked.done():
            answers += (await call(served, "GET", "/health")).status_code == 200
        assert answers > 10 and (await asked).status_code == 400 and "too much memory" in (await asked).text
        packed = await upload(served, "packed.csv.gz", gzip.compress(b"text\n" + b"a\n" * 20_000), "acme")
        refused = await create(served, packed, "acme", prompt="{text}")
        assert refused.status_code == 400 and "bytes; split it" in refused.json()["error"]["message"], refused.text
        small = await upload(served, "in.csv", b"id,text\n1,a\n", "acme")
        batch = await ended(served, await create(served, small, "acme"), "acme")
        assert "1,a,good,3,ok," in (await table_of(served, batch.id, "acme")).text
        object.__setattr__(limits, "check_seconds", 0.001)
        assert "takes more than" in (await preview(served, small, "acme")).text
        assert not leftovers(tmp_path / "state")["tmp"]
