"""/v1/uploads: files in parts, with OpenAI's client."""

import hashlib
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_tools import batch_server, check_ended, create, jsonl, keys_of, leftovers, line, until
from recording_disk import NO_SPACE, FaultyDisk

from engine.text.tokenizer import Tokenizer
from gateway.batch import parts
from gateway.batch.limits import BatchLimits

CONTENT = jsonl(line(i) for i in range(40))


async def begin(client: openai.AsyncOpenAI, size: int = len(CONTENT)) -> Any:
    return await client.uploads.create(bytes=size, filename="in.jsonl", mime_type="application/jsonl", purpose="batch")


async def add(client: openai.AsyncOpenAI, upload: Any, data: bytes) -> str:
    return (await client.uploads.parts.create(upload.id, data=data)).id


async def test_a_file_in_parts_becomes_the_input_of_a_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path) as (_, client):
        upload = await client.uploads.upload_file_chunked(
            file=CONTENT,
            filename="in.jsonl",
            bytes=len(CONTENT),
            mime_type="application/jsonl",
            purpose="batch",
            part_size=1000,
            md5=hashlib.md5(CONTENT).hexdigest(),
        )
        assert upload.status == "completed" and upload.file is not None and upload.file.bytes == len(CONTENT)
        assert (await client.files.content(upload.file.id)).content == CONTENT
        assert [file.id for file in (await client.files.list()).data] == [upload.file.id], "parts are not listed"
        assert leftovers(tmp_path)["files"] == [upload.file.id] and not leftovers(tmp_path)["tmp"]
        batch = await until(client, (await create(client, upload.file.id)).id)
        await check_ended(client, batch, {f"id-{i}" for i in range(40)})


async def test_order_md5_and_ends(tokenizer: Tokenizer, tmp_path: Path) -> None:
    draw = random.Random(1)
    pieces = [draw.randbytes(size) for size in (10, 100_000, 1)]
    content = b"".join(pieces)
    md5 = hashlib.md5(content).hexdigest()
    async with batch_server(tokenizer, tmp_path) as (_, client):
        upload = await begin(client, len(content))
        ids = {piece: await add(client, upload, piece) for piece in (pieces[1], pieces[2], pieces[0])}
        order = [ids[piece] for piece in pieces]
        unknown = [*order[:2], "part_" + "0" * 32]
        for wrong, param in [
            (order[:2], "part_ids"),
            ([*order, order[0]], "part_ids"),
            (unknown, "part_ids"),
            (order[::-1], "md5"),
        ]:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.uploads.complete(upload.id, part_ids=wrong, md5=md5)
            assert refused.value.param == param
        for _ in range(2):  # a repeated request gets the same answer
            done = await client.uploads.complete(upload.id, part_ids=order, md5=md5.upper())
            assert done.file is not None and (await client.files.content(done.file.id)).content == content
        cancelled = await begin(client, 10)
        await add(client, cancelled, b"0123456789")
        assert (await client.uploads.cancel(cancelled.id)).status == "cancelled"
        for ended in (upload, cancelled):
            with pytest.raises(openai.BadRequestError, match="create a new one"):
                await add(client, ended, b"x")
        assert leftovers(tmp_path)["files"] == [done.file.id]


async def test_limits_and_tenants(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_PART_BYTES", 1000)
    keys = keys_of(tmp_path, "a one bytes=5000", "b two")
    limits = BatchLimits(file_bytes=10_000)
    async with batch_server(tokenizer, tmp_path / "state", limits=limits, api_key_file=keys) as (served, _):
        one, two = (openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) for key in "ab")
        upload, other = await begin(one, 6000), await begin(two, 6000)
        for _ in range(5):
            await add(one, upload, b"x" * 1000)
        for work, status, text in [
            (begin(one, 10_001), 413, "larger than 10000"),
            (add(one, upload, b"x"), 413, "bytes=5000"),
            (add(two, upload, b"x"), 404, "does not exist"),
            (add(two, other, b"x" * 1001), 413, "larger than 1000"),
            (one.uploads.cancel("upload_1"), 404, "does not exist"),
        ]:
            with pytest.raises(openai.APIStatusError, match=text) as refused:
                await work
            assert refused.value.status_code == status
        monkeypatch.setattr(parts, "UPLOAD_SECONDS", 0)
        expired = await begin(two)
        assert expired.status == "expired"
        with pytest.raises(openai.BadRequestError, match="expired"):
            await add(two, expired, b"x")
        await one.close()
        await two.close()


async def test_acknowledged_parts_survive_a_full_disk_and_a_crash(tokenizer: Tokenizer, tmp_path: Path) -> None:
    disk = FaultyDisk({})
    async with batch_server(tokenizer, tmp_path, disk=disk) as (served, client):
        upload = await begin(client)
        ids = [await add(client, upload, CONTENT[:2000])]
        disk.faults = {disk.count + 1: NO_SPACE}  # the part's temporary file is created, and takes no data
        with pytest.raises(openai.APIStatusError) as refused:
            await add(client, upload, CONTENT[2000:])
        assert refused.value.status_code == 507
        ids.append(await add(client, upload, CONTENT[2000:3000]))
        cut = b'--b\r\ncontent-disposition: form-data; name="data"; filename="x"\r\n\r\nabc'
        headers = {"content-type": "multipart/form-data; boundary=b"}
        async with httpx.AsyncClient() as raw:
            answer = await raw.post(f"{served.url}/v1/uploads/{upload.id}/parts", content=cut, headers=headers)
        assert answer.status_code == 400, "a part that ends early is not stored"
        (tmp_path / "tmp" / ("0" * 32)).write_bytes(b"what a killed server leaves of a part")
        (tmp_path / "files" / ("file-" + "1" * 32)).write_bytes(b"")
        await served.app.state.batches.folder.store.announce_files(["file-" + "1" * 32])
    async with batch_server(tokenizer, tmp_path) as (_, client):
        assert len(leftovers(tmp_path)["files"]) == 2 and not leftovers(tmp_path)["tmp"]
        ids.append(await add(client, upload, CONTENT[3000:]))
        done = await client.uploads.complete(upload.id, part_ids=ids)
        assert done.file is not None and (await client.files.content(done.file.id)).content == CONTENT
