"""/v1/files with the official client, and with the uploads that it would never send."""

import asyncio
import gc
import os
import resource
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio import CapacityLimiter
from batch_tools import batch_server, create, eventually, jsonl, leftovers, line, submit, until, upload
from fake_engine import Served
from fixtures import refuse_blocking
from recording_disk import IO_ERROR, NO_SPACE, FaultyDisk
from support.http import send
from support.lazy import openai
from support.tables import for_each
from test_batches_api import check_types
from test_journal import sql

from engine.text.tokenizer import Tokenizer
from gateway.batch.files import MAX_OVERHEAD, MAX_PARTS, FileContent
from gateway.batch.run import BatchLimits
from gateway.store.disk import StorageError
from gateway.store.objects import FileObject

Ready = tuple[Served, "openai.AsyncOpenAI"]
SMALL = BatchLimits(file_bytes=100_000, retry_seconds=0.01, tick_seconds=0.02)
BOUNDARY = "xyz"


@pytest.fixture
async def ready(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Ready]:
    async with batch_server(tokenizer, tmp_path / "state", limits=SMALL) as pair:
        with refuse_blocking():
            yield pair


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + content + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", b"batch")
FILE = part("file", b"{}\n", "a.jsonl")


async def post(served: Served, body: Any, kind: str = f"multipart/form-data; boundary={BOUNDARY}") -> httpx.Response:
    return await send(served, "POST", "/v1/files", content=body, headers={"content-type": kind})


@for_each(
    ("parameters", "name"),
    [
        ("filename*=UTF-8''na%C3%AFve%20%E6%97%A5.jsonl", "naïve 日.jsonl"),
        ("filename=\"na_ve.jsonl\"; filename*=utf-8''na%C3%AFve.jsonl", "naïve.jsonl"),
        ("filename*=iso-8859-1''na%EFve.jsonl", "naïve.jsonl"),
        ("filename*=UTF-8''%FF.jsonl", "\ufffd.jsonl"),
        ('filename="naïve; name.jsonl"', "naïve; name.jsonl"),
    ],
)
async def test_file_names_of_each_form_survive(ready: Ready, parameters: str, name: str) -> None:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; {parameters}\r\n\r\n'
    stored = await post(ready[0], PURPOSE + head.encode() + b"{}\n\r\n" + END)
    assert (stored.status_code, stored.json().get("filename")) == (200, name)


# ---- the life of a file


async def test_a_file_from_upload_to_deletion(ready: Ready, tmp_path: Path) -> None:
    _, client = ready
    content = os.urandom(70_000) + b"\r\n--xy\r\n\n"
    file = await client.files.create(file=("naïve name.jsonl", content), purpose="batch")
    check_types(file)
    assert file.id.startswith("file-") and len(file.id) == 37 and file.object == "file" and file.status == "processed"
    assert (file.bytes, file.filename, file.purpose) == (len(content), "naïve name.jsonl", "batch")
    assert file.expires_at == file.created_at + 30 * 86400
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == content
    assert (tmp_path / "state" / "files" / file.id).stat().st_mode & 0o777 == 0o600
    deleted = await client.files.delete(file.id)
    check_types(deleted)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file.id)
    assert leftovers(tmp_path / "state") == {"files": [], "journals": [], "tmp": []}


async def test_a_content_that_is_gone_is_no_fault_of_the_disk(ready: Ready, tmp_path: Path) -> None:
    _, client = ready
    file = await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    (tmp_path / "state" / "files" / file.id).unlink()
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file.id)
    (tmp_path / "state" / "files").rename(tmp_path / "state" / "elsewhere")
    with pytest.raises(openai.APIStatusError, match="cannot store") as caught:
        await client.with_options(max_retries=0).files.content(file.id)
    assert caught.value.status_code == 507


async def test_an_expiry_that_is_asked_for(ready: Ready) -> None:
    _, client = ready
    file = await upload(client, b"x", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    bad: list[dict[str, Any]] = [
        {"anchor": "created_at", "seconds": 3599},
        {"anchor": "created_at", "seconds": 2592001},
        {"anchor": "created_at", "seconds": "x"},
        {"anchor": "created_at"},
        {"anchor": "now", "seconds": 3600},
        {"seconds": 3600},
    ]
    for expiry in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            await upload(client, b"x", expires_after=expiry)
        assert caught.value.param in ("expires_after[anchor]", "expires_after[seconds]")


async def test_an_expired_file_goes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, limits=SMALL) as (served, client):
        file = await upload(client, b"x")
        state = served.app.state.batches
        await state.folder.store._writer.run(lambda c: c.execute("UPDATE files SET expires_at = 1").rowcount)
        assert (await client.files.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        await eventually(lambda: not leftovers(tmp_path)["files"])


async def test_auto_paging_also_while_files_are_deleted(ready: Ready) -> None:
    _, client = ready
    ids = [(await upload(client, b"x")).id for _ in range(7)]
    assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=3, order="asc")] == ids
    async for file in client.files.list(limit=2):
        await client.files.delete(file.id)
    page = await client.files.list()
    raw = (await client.files.with_raw_response.list()).http_response.json()
    assert page.data == [] and not page.has_more
    assert raw == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_lists_by_purpose_and_with_what_proxies_add(ready: Ready) -> None:
    served, client = ready
    batch = await until(client, (await submit(client, jsonl([line(1)]))).id)
    assert [f.id for f in (await client.files.list(purpose="batch")).data] == [batch.input_file_id]
    assert [f.id for f in (await client.files.list(purpose="batch_output")).data] == [batch.output_file_id]
    async with httpx.AsyncClient(timeout=60) as http:
        for path in ("/v1/files?custom_llm_provider=openai&purpose=", "/v1//files", "/v1/files?target_model_names=x"):
            answer = await http.get(served.url + path)
            assert answer.status_code == 200 and len(answer.json()["data"]) == 2
        for query in ("limit=0", "limit=10001", "order=up", "after=file-x", "limit=%00"):
            assert (await http.get(f"{served.url}/v1/files?{query}")).status_code == 400
        assert (await http.put(f"{served.url}/v1/files")).headers["allow"] == "GET, HEAD, POST"


@for_each("file_id", ["file-" + "0" * 32, "..%2F..%2Fetc%2Fpasswd", "file-%00", "x" * 4000, "file-" + "G" * 32])
async def test_ids_are_data_and_never_paths(ready: Ready, file_id: str) -> None:
    served, _ = ready
    async with httpx.AsyncClient(timeout=60) as http:
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = await http.request(method, f"{served.url}/v1/files/{file_id}{path}")
            assert answer.status_code == 404 and set(answer.json()["error"]) == {"message", "type", "param", "code"}


@for_each("name", ["../../../etc/passwd", "/etc/passwd", "a\\..\\b", "x" * 255, ".", "ünï"])
async def test_file_names_are_data_and_never_paths(ready: Ready, tmp_path: Path, name: str) -> None:
    _, client = ready
    file = await client.files.create(file=(name, b"x"), purpose="batch")
    assert leftovers(tmp_path / "state")["files"] == [file.id]
    assert (await client.files.retrieve(file.id)).filename == file.filename
    await client.files.delete(file.id)


# ---- uploads that are wrong

GOOD = PURPOSE + FILE + END
BAD_BODIES = {
    "no end": (PURPOSE + FILE, "invalid_multipart"),
    "cut in the file": (PURPOSE + FILE[:-4], "invalid_multipart"),
    "empty": (b"", "invalid_multipart"),
    "another boundary": (GOOD.replace(b"xyz", b"abc"), "invalid_multipart"),
    "no boundary at all": (b"{}", "invalid_multipart"),
    "no disposition": (f"--{BOUNDARY}\r\n\r\nx\r\n".encode() + END, "invalid_multipart"),
    "no name": (f"--{BOUNDARY}\r\nContent-Disposition: form-data\r\n\r\nx\r\n".encode() + END, "invalid_multipart"),
    "a long text before": (b"x" * 9000, "invalid_multipart"),
    "many headers": (PURPOSE + FILE.replace(b"\r\n", b"\r\n" + b"x-a: b\r\n" * 40, 1) + END, "invalid_multipart"),
    "long header": (PURPOSE + part("x" * 9000, b"") + END, "invalid_multipart"),
    "two files": (PURPOSE + FILE + FILE + END, "invalid_value"),
    "two purposes": (PURPOSE + PURPOSE + FILE + END, "invalid_value"),
    "no file": (PURPOSE + END, "missing_required_parameter"),
    "no purpose": (FILE + END, "missing_required_parameter"),
    "a file without a name": (PURPOSE + part("file", b"x") + END, "invalid_value"),
    "another purpose": (part("purpose", b"assistants") + FILE + END, "invalid_value"),
    "bytes as purpose": (part("purpose", b"\xff") + FILE + END, "invalid_value"),
    "a long field": (part("purpose", b"x" * 2000) + FILE + END, "invalid_value"),
    "an unknown field": (part("model", b"x") + GOOD, "unknown_parameter"),
    "a long file name": (PURPOSE + part("file", b"x", "n" * 256) + END, "invalid_value"),
    "many parts": (part("purpose", b"") * (MAX_PARTS + 1) + END, "invalid_value"),
}


@for_each("case", BAD_BODIES)
async def test_a_wrong_body_is_a_400_and_leaves_nothing(ready: Ready, tmp_path: Path, case: str) -> None:
    body, code = BAD_BODIES[case]
    answer = await post(ready[0], body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert leftovers(tmp_path / "state") == {"files": [], "journals": [], "tmp": []}


@for_each(
    ("kind", "status"),
    [
        ("application/json", 415), ("", 415), ("multipart/mixed; boundary=xyz", 415), ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400), ("multipart/form-data; boundary=" + "x" * 500, 400),
    ],
)  # fmt: skip
async def test_a_wrong_content_type(ready: Ready, kind: str, status: int) -> None:
    assert (await post(ready[0], GOOD, kind)).status_code == status


async def test_a_good_body_by_hand(ready: Ready) -> None:
    many = FILE.replace(b"\r\n", b"\r\n" + b"x-a: b\r\n" * 10, 1)
    for body in (
        GOOD, FILE + PURPOSE + END, GOOD + b"epilogue", PURPOSE + part("file", b"", "empty") + END,
        b"A message of parts.\r\n" + GOOD, b"\r\n" + GOOD, PURPOSE + many + END,
    ):  # fmt: skip
        answer = await post(ready[0], body)
        assert answer.status_code == 200, answer.text
    packed = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "content-encoding": "gzip"}
    answer = await send(ready[0], "POST", "/v1/files", content=GOOD, headers=packed)
    assert answer.status_code == 415 and "Content-Encoding" in answer.text


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body without an announced length."""
    for start in range(0, len(body), 30_000):
        yield body[start : start + 30_000]


async def test_too_large_by_length_or_as_it_comes(ready: Ready, tmp_path: Path) -> None:
    served, client = ready
    assert (await upload(client, b"x" * SMALL.file_bytes)).bytes == SMALL.file_bytes
    for more, announced in ((200_000, True), (1, False)):
        body = PURPOSE + part("file", b"x" * (SMALL.file_bytes + more), "a") + END
        answer = await post(served, body if announced else in_pieces(body))
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    epilogue = b"x" * (SMALL.file_bytes + MAX_OVERHEAD + 4096)
    assert (await post(served, in_pieces(GOOD + epilogue))).status_code == 413
    assert len(leftovers(tmp_path / "state")["files"]) == 1 and not leftovers(tmp_path / "state")["tmp"]


async def test_a_client_that_leaves_half_way_leaves_nothing(ready: Ready, tmp_path: Path) -> None:
    served, _ = ready
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary={BOUNDARY}\r\n"
    writer.write(f"{head}content-length: 90000\r\n\r\n".encode() + PURPOSE + FILE[:-5] + b"x" * 40_000)
    await eventually(lambda: bool(leftovers(tmp_path / "state")["tmp"]))
    writer.close()
    await eventually(lambda: not leftovers(tmp_path / "state")["tmp"])
    assert not leftovers(tmp_path / "state")["files"]


# ---- faults


@pytest.mark.parametrize("code", [NO_SPACE, IO_ERROR])
async def test_a_disk_that_fails_anywhere_is_a_507_that_leaves_nothing(
    tokenizer: Tokenizer, tmp_path: Path, code: int
) -> None:
    disk, limits = FaultyDisk({}), BatchLimits(tick_seconds=3600.0)  # no tick writes to the disk
    async with batch_server(tokenizer, tmp_path, disk=disk, limits=limits) as (_, client):
        for number in range(5):
            disk.faults = {disk.count + number: code}
            with pytest.raises(openai.InternalServerError) as caught:
                await upload(client, b"x" * 5000)
            assert caught.value.status_code == 507 and caught.value.code == "insufficient_storage"
            assert leftovers(tmp_path) == {"files": [], "journals": [], "tmp": []}
        assert (await upload(client, b"x")).bytes == 1
        assert sql(tmp_path, "SELECT * FROM announced") == []


async def test_a_row_that_cannot_be_stored_takes_the_file_with_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path) as (served, client):
        store = served.app.state.batches.folder.store
        real = store.add_file

        async def full(*_: Any) -> None:
            raise StorageError

        store.add_file = full
        with pytest.raises(openai.InternalServerError):
            await upload(client, b"x")
        assert leftovers(tmp_path)["files"] == []
        store.add_file = real
        assert (await upload(client, b"x")).id


# ---- size


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
async def test_a_large_upload_and_its_validation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """50,000 lines, 200 MB, from a file: the client's own memory is in the figures, too."""
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for number in range(50_000):
            file.write(jsonl([line(number, user="x" * 4000, max_tokens=1)]))
    async with batch_server(tokenizer, tmp_path / "state", "x", hold_after=0, limits=BatchLimits()) as (served, client):
        body = PURPOSE + part("file", b"", "in.jsonl")[:-2]

        async def pieces() -> AsyncIterator[bytes]:
            yield body
            with path.open("rb") as file:
                while data := file.read(256 * 1024):
                    yield data
            yield b"\r\n" + END

        before, peak = resident_bytes(), 0
        answer = await post(served, pieces())
        after_upload = resident_bytes()
        assert answer.status_code == 200 and answer.json()["bytes"] == path.stat().st_size
        batch = await create(client, answer.json()["id"])
        while (await client.batches.retrieve(batch.id)).status == "validating":
            peak = max(peak, resident_bytes())
            await asyncio.sleep(0.01)
        assert after_upload - before < 64e6 and peak - before < 64e6
        await client.batches.cancel(batch.id)
        await until(client, batch.id)


@pytest.mark.parametrize("purpose", ["batch", "batch_output"])
async def test_an_abandoned_download_keeps_no_memory(tmp_path: Path, purpose: str) -> None:
    """Without the garbage collector: a server under load collects rarely, and a piece has a megabyte."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    file = FileObject("file-1", "t", 3_000_000, 1, "name", purpose, None)
    content = FileContent(file, os.open(path, os.O_RDONLY), CapacityLimiter(1))
    await content.begin()
    content.close()
    left = weakref.ref(content)
    gc.disable()
    try:
        del content
        assert left() is None
    finally:
        gc.enable()
