"""/v1/batches with the official client, end to end around a scripted engine."""

import asyncio
import contextlib
import itertools
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import (
    batch_server,
    check_ended,
    client_of,
    create,
    eventually,
    jsonl,
    keys_of,
    leftovers,
    line,
    results_of,
    rows_of,
    submit,
    until,
    until_counted,
    upload,
)
from fake_engine import MODEL, Script, Served
from fixtures import refuse_blocking
from support.http import get, send
from support.lazy import openai
from support.tables import for_each

from engine.api import EngineRequest, Lane, RequestClass
from engine.errors import EngineStepError, EngineUnavailableError, QueueFullError
from engine.text.tokenizer import Tokenizer
from gateway.batch.routes import window_seconds
from gateway.batch.run import BatchLimits
from gateway.http.errors import ApiError

Ready = tuple[Served, "openai.AsyncOpenAI"]


@pytest.fixture
async def ready(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Ready]:
    async with batch_server(tokenizer, tmp_path / "state", "done") as pair:
        with refuse_blocking():
            yield pair


@pytest.fixture
async def limited(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Ready]:
    """A server that takes batches of 20 lines of 2048 bytes."""
    limits = BatchLimits(lines=20, line_bytes=2048, retry_seconds=0.01)
    async with batch_server(tokenizer, tmp_path, limits=limits) as pair:
        yield pair


def check_types(obj: Any) -> None:
    """Every field against the client's own types: strictly, unlike the client itself; nothing unknown."""
    assert not obj.model_extra, f"fields that the client does not know: {obj.model_extra}"
    type(obj).model_validate_json(obj.model_dump_json(), strict=True)


# ---- the whole way


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
async def test_from_upload_to_results(ready: Ready, tmp_path: Path, endpoint: str) -> None:
    served, client = ready
    lines = [line(i, endpoint) for i in range(10)]
    file = await upload(client, jsonl(lines))
    check_types(file)
    created = await create(client, file.id, endpoint=endpoint, metadata={"a": "b"})
    check_types(created)
    assert created.status == "validating" and created.metadata == {"a": "b"}
    assert "model" not in created.to_dict() and created.usage is not None and created.usage.total_tokens == 0
    assert created.expires_at == created.created_at + 86400
    batch = await until(client, created.id)
    check_types(batch)
    assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at and batch.model == MODEL
    assert batch.failed_at is batch.expired_at is batch.cancelling_at is batch.cancelled_at is None
    output, _ = await check_ended(client, batch, [item["custom_id"] for item in lines])
    check_types(await client.files.retrieve(batch.output_file_id))
    row = output["id-3"]
    assert set(row) == {"id", "custom_id", "response", "error"} and row["error"] is None
    assert set(row["response"]) == {"status_code", "request_id", "body"} and row["response"]["status_code"] == 200
    body = row["response"]["body"]
    assert body["service_tier"] == "flex" and body["usage"]["completion_tokens"] > 0
    choice = body["choices"][0]
    assert (choice["message"]["content"] if "chat" in endpoint else choice["text"]) == "done"
    usages = [row["response"]["body"]["usage"] for row in output.values()]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)
    assert batch.usage.input_tokens_details.cached_tokens > 0
    assert all(r.request_class is RequestClass.OFFLINE and r.final_only for r in served.engine.requests)
    assert {r.deadline for r in served.engine.requests} == {batch.expires_at}
    await eventually(lambda: not leftovers(tmp_path / "state")["journals"])  # removed after the end is known
    left = leftovers(tmp_path / "state")
    assert left == {"files": sorted([file.id, batch.output_file_id]), "journals": [], "tmp": []}


async def test_all_lines_failed_is_completed_without_output(ready: Ready) -> None:
    _, client = ready
    lines = [line(i, temperature=9) for i in range(3)]
    batch = await until(client, (await submit(client, jsonl(lines))).id)
    assert (batch.status, batch.output_file_id) == ("completed", None)
    _, errors = await check_ended(client, batch, ["id-0", "id-1", "id-2"])
    assert {row["response"]["status_code"] for row in errors.values()} == {400}
    check_types(batch)


async def test_stop_strings_choices_and_logprobs_as_over_http(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, "one two three") as (served, client):
        lines = [line(0, stop=[" two"]), line(1, n=2), line(2, logprobs=1), line(3, echo=True)]
        lines = [{**item, "body": {**item["body"], "max_tokens": 20}} for item in lines]
        batch = await until(client, (await submit(client, jsonl(lines))).id)
        output, _ = await check_ended(client, batch, [f"id-{i}" for i in range(4)])
        bodies = [output[f"id-{i}"]["response"]["body"] for i in range(4)]
        for item, body in zip(lines, bodies, strict=True):
            direct = (await send(served, "POST", "/v1/completions", json=item["body"])).json()
            assert [c["text"] for c in direct["choices"]] == [c["text"] for c in body["choices"]]
            assert {**direct["choices"][0]} == body["choices"][0]
        assert bodies[0]["choices"][0]["text"] == "one"
        assert [c["text"] for c in bodies[1]["choices"]] == ["one two three"] * 2


TRANSLATED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


@pytest.mark.parametrize("endpoint", TRANSLATED)
async def test_lines_of_other_apis_are_answered_in_their_shapes(ready: Ready, endpoint: str) -> None:
    """An error of a line has the names of its API; a batch counts the usage of its lines."""
    _, client = ready
    body = TRANSLATED[endpoint]
    bodies = [body, body, {**body, "tool_choice": {"type": "any"} if "messages" in body else "required"}]
    lines = [{**line(i, endpoint), "body": {"model": MODEL, **body}} for i, body in enumerate(bodies)]
    batch = await until(client, (await submit(client, jsonl(lines), endpoint)).id, "completed")
    done, failed = await results_of(client, batch)
    answers = [done[f"id-{i}"]["response"]["body"] for i in (0, 1)]
    texts = [answer["content"] if "messages" in body else answer["output"][0]["content"] for answer in answers]
    assert [text[0]["text"] for text in texts] == ["done", "done"]
    usages = [answer["usage"] for answer in answers]
    assert batch.usage.output_tokens == sum(usage["output_tokens"] for usage in usages) > 0
    error = failed["id-2"]["response"]
    assert error["status_code"] == 400 and error["body"]["error"]["param"] == "tool_choice"


# ---- creation


@for_each(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/messages/count_tokens"}, "endpoint"),
        ({"endpoint": 1}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": ""}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {"k" * 65: "v"}}, None),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"no_such": 1}, "no_such"),
    ],
)
async def test_a_bad_creation_is_a_400_with_its_parameter(ready: Ready, fields: Any, param: str | None) -> None:
    served, client = ready
    file = await upload(client, jsonl([line(1)]))
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    answer = await send(served, "POST", "/v1/batches", json=body)
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"] == param
    assert (await client.batches.list()).data == []


async def test_the_results_of_a_batch_are_no_input(ready: Ready) -> None:
    _, client = ready
    first = await until(client, (await submit(client, jsonl([line(1)]))).id)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client, first.output_file_id)
    assert caught.value.param == "input_file_id"


@for_each("file_id", ["file-" + "0" * 32, "../../etc/passwd", "file-x", "", "x" * 5000, "%00"])
async def test_an_input_that_does_not_exist_is_a_404(ready: Ready, file_id: str) -> None:
    _, client = ready
    with pytest.raises(openai.NotFoundError) as caught:
        await create(client, file_id)
    assert caught.value.param == "input_file_id"  # type: ignore[attr-defined]


@for_each("batch_id", ["batch_" + "0" * 32, "..%2f..", "batch_x", "x" * 5000])
async def test_a_batch_that_does_not_exist_is_a_404(ready: Ready, batch_id: str) -> None:
    _, client = ready
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve(batch_id)
    with pytest.raises(openai.NotFoundError):
        await client.batches.cancel(batch_id)


@for_each(("text", "seconds"), [("24h", 86400), ("90m", 5400), ("7d", 604800), ("30d", 2592000), ("1s", 1)])
def test_completion_windows(text: str, seconds: int) -> None:
    assert window_seconds(text) == seconds


@for_each("text", ["0h", "-1h", "1.5h", "24 h", "24H", "", "h", "9" * 50 + "d", "٣h", "24h\n"])
def test_what_is_no_completion_window(text: str) -> None:
    with pytest.raises(ApiError):
        window_seconds(text)


async def test_an_idempotency_key_makes_one_batch(ready: Ready) -> None:
    _, client = ready
    file = await upload(client, jsonl([line(1)]))

    async def keyed(key: str, **fields: Any) -> Any:
        return await create(client, file.id, extra_headers={"Idempotency-Key": key}, **fields)

    first = await keyed("a")
    assert (await keyed("a")).id == first.id and (await keyed("b")).id != first.id
    with pytest.raises(openai.BadRequestError, match="idempotency"):
        await keyed("a", completion_window="12h")
    assert len((await client.batches.list()).data) == 2


# ---- bad input files


@for_each(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \r\n", "empty_file", None),
        (jsonl([line(1)]) + b"{not json}\n", "invalid_json_line", 2),
        (jsonl([line(1)]).decode().encode("utf-16"), "invalid_json_line", 1),
        (b"[1]\n", "invalid_json_line", 1),
        (b"[" * 2000 + b"\n", "invalid_json_line", 1),
        (b'{"custom_id": "\\ud800"}\n', "invalid_json_line", 1),
        (b'{"custom_id": NaN}\n', "invalid_json_line", 1),
        (jsonl([line(1)])[:-30], "invalid_json_line", 1),
        (jsonl([line(1), line(2), line(1)]), "duplicate_custom_id", 3),
        (jsonl([line(1, "/v1/chat/completions")]), "url_mismatch", 1),
        (jsonl([{**line(1), "custom_id": 1}]), "invalid_request", 1),
        (jsonl([{**line(1), "custom_id": ""}]), "invalid_request", 1),
        (jsonl([{**line(1), "custom_id": "x" * 513}]), "invalid_request", 1),
        (jsonl([{**line(1), "method": "GET"}]), "invalid_request", 1),
        (jsonl([{**line(1), "body": None}]), "invalid_request", 1),
        (b"\x1f\x8b" + jsonl([line(1)]), "invalid_json_line", 1),
        (json.dumps([line(i) for i in range(9)], indent=2).encode(), "invalid_json_line", 1),
        (jsonl([line(i) for i in range(21)]), "too_many_tasks", 21),
        (jsonl([line(1), {"note": 1, **line(2, user="x" * 9000)}]), "invalid_request", 2),
        (b'{"custom_id": "a", "body": {"user": "\\ud800"}, "method": "POST\\ud800"}\n', "invalid_json_line", 1),
    ],
)
async def test_bad_input_fails_the_batch_and_names_the_line(
    limited: Ready, content: bytes, code: str, number: int | None
) -> None:
    served, client = limited
    batch = await until(client, (await submit(client, content)).id)
    check_types(batch)
    assert batch.status == "failed" and batch.failed_at and batch.errors.object == "list"
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (0, 0, 0)
    assert batch.output_file_id is batch.error_file_id is None and not served.engine.requests
    cancelled = await client.batches.cancel(batch.id)
    assert cancelled.status == "failed" and cancelled.cancelling_at is None


BAD_BODIES: list[tuple[Any, int, str]] = [
    ({"temperature": 3.0}, 400, "temperature"),
    ({"max_tokens": 100_000}, 400, "context"),
    ({"user": "x" * 3000}, 413, "larger than 2048 bytes"),
    ({"user": "x" * 30_000}, 413, "larger than 2048 bytes"),
    ({"user": "cut \ud83d"}, 400, "not valid JSON"),
    ({"user": "\udc00 \\ud83d \U0001f600"}, 400, "not valid JSON"),
    ({"stream": True}, 400, "'stream' must be left out"),
    ({"model": "gpt-4o-mini"}, 404, "does not exist"),
    ({"nonsense": 1}, 400, "Unknown parameter: 'nonsense'"),
    ({"response_format": {"schema": {"enum": ["#0.12345678901234567890123#"]}}}, 400, "cannot be enforced"),
    ("text", 400, "must be a JSON object"),
    ([1], 400, "must be a JSON object"),
]


@pytest.mark.parametrize("order", [("custom_id", "method", "url", "body"), ("body", "custom_id", "method", "url")])
async def test_a_bad_body_is_a_row_of_the_error_file(tokenizer: Tokenizer, tmp_path: Path, order: Any) -> None:
    """Also a body that is too long or too deep to be parsed, in front of its envelope or behind it."""
    lines = [line(i) | {"body": {**line(i)["body"], **bad} if isinstance(bad, dict) else bad}
             for i, (bad, *_) in enumerate(BAD_BODIES)]  # fmt: skip
    lines += [{**line(20), "extra": 1}, line(21), line(22, model=f"{MODEL}:flex"), line(23, model="alias")]
    texts = [json.dumps({name: {**each}.pop(name) for name in (*order, *each.keys() - {*order})}) for each in lines]
    texts = [text.replace('"#', "").replace('#"', "") for text in texts]
    deep, many = "[" * 1200 + "]" * 1200, "[" + "[]," * 40_000 + "[]]"
    for number, text in ((24, deep), (25, many)):
        fields = {**line(number), "body": "@"}
        texts.append(json.dumps({name: fields[name] for name in order}).replace('"@"', f'{{"user": {text}}}'))
    limits = BatchLimits(line_bytes=2048, retry_seconds=0.01)
    async with batch_server(tokenizer, tmp_path / "a", limits=limits) as (_, client):
        batch = await until(client, (await submit(client, "\n".join(texts[:-2]).encode())).id)
        rows = await rows_of(client, batch.error_file_id)
        assert batch.status == "completed" and batch.request_counts.completed == 3
        found = {row["custom_id"]: row["response"] for row in rows}
        for number, (bad, status, words) in enumerate(BAD_BODIES):
            response = found.pop(f"id-{number}")
            assert response["status_code"] == status and words in response["body"]["error"]["message"], (bad, response)
        assert "beside 'body': 'extra'" in found.pop("id-20")["body"]["error"]["message"] and not found
    async with batch_server(tokenizer, tmp_path / "b") as (_, client):
        batch = await until(client, (await submit(client, "\n".join([texts[-5], *texts[-2:]]).encode())).id)
        rows = await rows_of(client, batch.error_file_id)
        assert batch.request_counts.completed == 1
        assert {row["custom_id"]: row["response"]["body"]["error"]["code"] for row in rows} == {
            "id-24": "invalid_json", "id-25": "too_many_values",
        }  # fmt: skip


async def test_unknown_models_are_refused_once_each_and_the_known_ones_named(ready: Ready) -> None:
    _, client = ready
    models = ["gpt-4o-mini", "gpt-4o-mini", "alias:nonsense"]
    batch = await until(client, (await submit(client, jsonl([line(i, model=m) for i, m in enumerate(models)]))).id)
    assert batch.status == "failed"
    assert [(e.code, e.line, e.param) for e in batch.errors.data] == [
        ("model_not_found", 1, "body.model"), ("model_not_found", 3, "body.model"),
    ]  # fmt: skip
    message = batch.errors.data[0].message
    assert "no model 'gpt-4o-mini'" in message and f"It has: {MODEL}, alias." in message
    flex = await until(client, (await submit(client, jsonl([line(1, model=f"{MODEL}:flex")]))).id)
    assert flex.status == "completed" and not flex.request_counts.failed


async def test_forms_of_files_that_are_accepted(ready: Ready) -> None:
    _, client = ready
    good = jsonl([line(1), line(2)])
    for content in (good.rstrip(), good.replace(b"\n", b"\r\n"), b"\n" + good.replace(b"\n", b"\n\n"), good + b" \n",
                    b"\xef\xbb\xbf" + good):  # fmt: skip
        batch = await until(client, (await submit(client, content)).id)
        assert batch.status == "completed"
        await check_ended(client, batch, ["id-1", "id-2"])


async def test_errors_are_many_but_bounded(ready: Ready) -> None:
    _, client = ready
    batch = await until(client, (await submit(client, b"x\n" * 5000)).id)
    assert len(batch.errors.data) == 100 and [e.line for e in batch.errors.data] == list(range(1, 101))


# ---- lists


async def test_auto_paging_over_batches(ready: Ready) -> None:
    _, client = ready
    ids = [(await submit(client, jsonl([line(1)]))).id for _ in range(5)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == ids[::-1]
    page = await client.batches.list(limit=2)
    assert page.has_more and page.data[0].id == ids[4]
    raw = (await client.batches.with_raw_response.list(limit=2)).http_response.json()
    assert raw["object"] == "list" and (raw["first_id"], raw["last_id"]) == (ids[4], ids[3])
    for query in ("limit=0", "limit=101", "limit=x", "limit=-1", "after=batch_x", "after=" + "0" * 500):
        answer = await get(ready[0], f"/v1/batches?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == query.partition("=")[0]


# ---- cancelling, expiry


def held_from(tokenizer: Tokenizer, number: int) -> Callable[[EngineRequest], Script]:
    """Lines from this number on do not end."""

    def script(request: EngineRequest) -> Script:
        is_held = int(tokenizer.decode(request.prompt_token_ids).split()[-1]) >= number
        return Script([5, 6, 7, 8], hold_after=0 if is_held else None)

    return script


async def test_cancelling_half_way_keeps_what_is_finished(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, held_from(tokenizer, 6)) as (served, client):
        batch = await submit(client, jsonl([line(i) for i in range(10)]))
        await until_counted(client, batch.id, 6)
        first = await client.batches.cancel(batch.id)
        assert first.status in ("cancelling", "cancelled") and first.cancelling_at
        ended = await until(client, batch.id)
        assert ended.status == "cancelled" and ended.cancelled_at
        output, errors = await check_ended(client, ended, [f"id-{i}" for i in range(10)])
        assert set(output) == {f"id-{i}" for i in range(6)}
        assert all(row["response"] is None and row["error"]["code"] == "batch_cancelled" for row in errors.values())
        assert await client.batches.cancel(batch.id) == ended, "idempotent, and never an error"
        assert served.engine.num_open == 0


async def test_results_expire_as_asked(ready: Ready) -> None:
    _, client = ready
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    batch = await submit(client, jsonl([line(1)]), output_expires_after=expiry)
    ended = await until(client, batch.id)
    file = await client.files.retrieve(ended.output_file_id)
    assert file.expires_at == file.created_at + 3600 and file.purpose == "batch_output"
    plain = await until(client, (await submit(client, jsonl([line(1)]))).id)
    assert (await client.files.retrieve(plain.output_file_id)).expires_at is None


async def test_the_input_of_a_running_batch_cannot_be_deleted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, "x", hold_after=0) as (served, client):
        batch = await submit(client, jsonl([line(1)]))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.delete(batch.input_file_id)
        assert caught.value.code == "file_in_use"
        served.engine.release()
        await until(client, batch.id)
        assert (await client.files.delete(batch.input_file_id)).deleted


# ---- the engine's troubles


async def test_lines_wait_for_an_engine_that_is_not_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path) as (served, client):
        served.engine.add_errors += [QueueFullError("full", retry_after=0.02) for _ in range(3)]
        served.engine.add_errors += [EngineUnavailableError("down", retry_after=0.02) for _ in range(3)]
        batch = await until(client, (await submit(client, jsonl([line(i) for i in range(8)]))).id)
        output, _ = await check_ended(client, batch, [f"id-{i}" for i in range(8)])
        assert len(output) == 8 and not served.engine.add_errors
        assert {request.request_class for request in served.engine.requests} == {RequestClass.OFFLINE}


@pytest.mark.parametrize("lost", [True, False])
async def test_lines_that_an_engine_lost_run_again_and_a_failed_step_is_an_error_row(
    tokenizer: Tokenizer, tmp_path: Path, lost: bool
) -> None:
    seen: set[tuple[int, ...]] = set()
    gone, failed = EngineUnavailableError("The engine stopped.", retry_after=0.01), EngineStepError("The step failed.")

    def script(request: EngineRequest) -> Script:
        prompt = request.prompt_token_ids
        fails = prompt not in seen if lost else tokenizer.decode(prompt).endswith("0")
        seen.add(prompt)
        return Script([5], fail_after=0 if fails else None, error=gone if lost else failed)

    async with batch_server(tokenizer, tmp_path, script) as (_, client):
        batch = await until(client, (await submit(client, jsonl([line(i) for i in range(3)]))).id)
        _, errors = await check_ended(client, batch, ["id-0", "id-1", "id-2"])
        rows = {name: (row["response"]["status_code"], row["response"]["body"]["error"]["code"])
                for name, row in errors.items()}  # fmt: skip
        assert rows == ({} if lost else {"id-0": (500, "engine_error")})


async def test_online_requests_go_on_beside_a_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def script(request: EngineRequest) -> Script:
        offline = request.request_class is RequestClass.OFFLINE
        return Script([5, 6], hold_after=0 if offline else None)

    async with batch_server(tokenizer, tmp_path, script) as (served, client):
        batch = await submit(client, jsonl([line(i) for i in range(20)]))
        await served.engine.wait_for_event("add", 5)
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=2)
        assert answer.service_tier == "default"  # type: ignore[attr-defined]
        text = (await get(served, "/metrics")).text
        assert 'tidemill_batch_jobs{state="in_progress"} 1.0' in text and "tidemill_storage_fault 0.0" in text
        served.engine.release()
        await until(client, batch.id)


# ---- tenants


async def test_lines_of_tenants_have_prefix_caches_and_jobs_of_their_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "key-a a", "key-b b")
    async with batch_server(tokenizer, tmp_path / "state", api_key_file=keys) as (served, _):
        ids = []
        for key in ("key-a", "key-b"):
            async with client_of(served, api_key=key) as client:
                ids.append((await until(client, (await submit(client, jsonl([line(1)]))).id)).id)
        first, second = served.engine.requests
    assert first.cache_salt != second.cache_salt and first.tenant != second.tenant
    assert [first.job, second.job] == ids and first.lane is second.lane is Lane.BATCH


# ---- stop and go on


async def test_an_orderly_stop_and_a_start_go_on_where_it_was(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, held_from(tokenizer, 7)) as (_, client):
        batch = await submit(client, jsonl([line(i) for i in range(20)]))
        await until_counted(client, batch.id, 7)
    async with batch_server(tokenizer, tmp_path, "done") as (served, client):
        ended = await until(client, batch.id)
        output, _ = await check_ended(client, ended, [f"id-{i}" for i in range(20)])
        assert len(output) == 20 and len(served.engine.requests) == 13, "only unfinished lines run again"


async def test_the_deadline_is_wall_clock_and_outlives_the_process(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, "x", hold_after=0) as (_, client):
        batch = await submit(client, jsonl([line(1)]))
    with contextlib.closing(sqlite3.connect(tmp_path / "tidemill.db", isolation_level=None)) as database:
        database.execute("UPDATE batches SET expires_at = unixepoch()")
    async with batch_server(tokenizer, tmp_path, "x", hold_after=0) as (_, client):
        assert (await until(client, batch.id)).status == "expired"


async def test_without_a_state_folder_there_are_no_such_routes(start_server: Any) -> None:
    served = await start_server("x")
    assert (await get(served, "/v1/batches")).status_code == 404


LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
"""Everything at which `str.splitlines` cuts."""


async def test_result_files_survive_splitlines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Answers and names with line ends of Unicode, in the output and in the error file, read as README reads them."""
    texts = [f"{number}{end}x" for number, end in enumerate(LINE_ENDS)]
    lines = [{**line(0), "custom_id": text} for text in texts]
    lines += [{**line(0, temperature=9), "custom_id": f"bad {text}"} for text in texts]
    async with batch_server(tokenizer, tmp_path / "state", "so\u2028und\u2029so\x85") as (_, client):
        batch = await until(client, (await submit(client, jsonl(lines))).id)
        output, errors = await results_of(client, batch)
    assert set(output) == set(texts) and set(errors) == {f"bad {text}" for text in texts}
    assert {row["response"]["body"]["choices"][0]["text"] for row in output.values()} != {""}


# ---- changes


async def changes_of(served: Served, batch_id: str) -> list[dict[str, Any]]:
    """The batch objects of the stream of a batch, which must end by itself."""
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("GET", f"{served.url}/v1/batches/{batch_id}/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(text.removeprefix("data: ")) async for text in answer.aiter_lines() if text]


async def test_a_stream_has_each_change_and_ends_with_the_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path / "state", "done", hold_after=0) as (served, client):
        batch = await until(client, (await submit(client, jsonl([line(1)]))).id, "in_progress")
        stream = asyncio.create_task(changes_of(served, batch.id))
        await asyncio.sleep(0)
        await client.batches.cancel(batch.id)
        found = await stream
        assert found[-1]["status"] == "cancelled" and {each["id"] for each in found} == {batch.id}
        assert all(before != after for before, after in itertools.pairwise(found))
        assert await changes_of(served, batch.id) == found[-1:], "of a batch that has ended: its final state"


async def test_a_stream_ends_when_the_server_stops(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path / "state", "done", hold_after=0) as (served, client):
        batch = await until(client, (await submit(client, jsonl([line(1)]))).id, "in_progress")
        stream = asyncio.create_task(changes_of(served, batch.id))
        await served.engine.wait_for_event("add")
        await served.app.state.context.lifecycle.stop()
        assert (await stream)[-1]["status"] == "in_progress"
