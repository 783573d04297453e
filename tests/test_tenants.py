"""Tenants of files and batches: keys that change between starts, operators, and objects that no key reaches."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from batch_tools import batch_server, client_of, eventually, jsonl, keys_of, line, results_of, submit, until
from fake_engine import MODEL, Script, Served
from support.lazy import openai

from engine.api import EngineRequest, TokenCosts
from engine.client import EngineStats, EngineView
from engine.text.tokenizer import Tokenizer
from gateway.batch.routes import bill_of
from gateway.store.objects import Usage
from gateway.telemetry.account import EngineTime
from gateway.web import routes as web
from tidemill import cli

MISSING_FILE, MISSING_BATCH = "file-" + "0" * 32, "batch_" + "0" * 32
UNREACHABLE = "no key belongs to tenant"


def holding(tokenizer: Tokenizer) -> Callable[[EngineRequest], Script]:
    """A script that never ends the answers to `line("held")`."""
    eos = tokenizer.eos_token_id
    assert eos is not None
    done = [*tokenizer.encode("done"), eos]

    def script(request: EngineRequest) -> Script:
        is_held = "held" in tokenizer.decode(request.prompt_token_ids)
        return Script(done, hold_after=0 if is_held else None)

    return script


@asynccontextmanager
async def started(
    tokenizer: Tokenizer, root: Path, keys: str | tuple[str, ...], *clients: str, **more: Any
) -> AsyncIterator[tuple[Served, dict[str, openai.AsyncOpenAI]]]:
    """A server with a key file (a path) or --api-key values, and a client for each key of `clients`."""
    config = {"api_key_file": keys} if isinstance(keys, str) else {"api_key": keys}
    async with (
        batch_server(tokenizer, root / "state", holding(tokenizer), **config | more) as (served, _),
        AsyncExitStack() as stack,
    ):
        yield served, {key: await stack.enter_async_context(client_of(served, api_key=key)) for key in clients}


async def get(client: openai.AsyncOpenAI, path: str, **options: Any) -> httpx.Response:
    """A response of any status to GET."""
    return await call(client, "GET", path, **options)


async def call(client: openai.AsyncOpenAI, method: str, path: str, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {client.api_key}"}
    url = str(client.base_url).removesuffix("/v1/") + path
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.request(method, url, headers=headers, **options)


async def finished_and_running(client: openai.AsyncOpenAI) -> tuple[str, str]:
    """Ids of a batch that has ended and of one that never does."""
    finished = await until(client, (await submit(client, jsonl([line(1)]))).id)
    running = await until(client, (await submit(client, jsonl([line("held")]))).id, "in_progress")
    return finished.id, running.id


async def names(client: openai.AsyncOpenAI, kind: str = "batches", tenant: str | None = None) -> set[str]:
    query = {} if tenant is None else {"tenant": tenant}
    answer = await get(client, f"/v1/{kind}", params=query)
    assert answer.status_code == 200
    return {each["id"] for each in answer.json()["data"]}


# ---- keys that change between starts


async def test_batches_stay_in_reach_whatever_key_the_next_start_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with_file = ("file", (keys_of(tmp_path, "file default", "shop shop"), "file"))
    starts: list[tuple[str, Any]] = [
        ("none", ((), "any")),
        ("one", (("one",), "one")),
        ("others", (("two", "three"), "three")),
        with_file,
        ("none again", ((), "any")),
    ]
    finished: list[str] = []
    running: list[str] = []
    for name, (keys, key) in starts:
        async with started(tokenizer, tmp_path, keys, key, "shop") as (served, clients):
            client = clients[key]
            listed = {batch.id: batch.status for batch in (await client.batches.list(limit=100)).data}
            assert listed.keys() == {*finished, *running}, name
            for batch_id in finished:
                batch = await client.batches.retrieve(batch_id)
                assert batch.status in ("completed", "cancelled"), name
                if batch.status == "completed":
                    assert (await results_of(client, batch))[0].keys() == {"id-1"}, name
            while running:  # the work of the last start goes on, and can be stopped
                batch_id = running.pop()
                await until(client, batch_id, "in_progress")
                assert (await client.batches.cancel(batch_id)).status == "cancelling", name
                assert (await until(client, batch_id)).status == "cancelled"
                finished.append(batch_id)
            ended, held = await finished_and_running(client)
            finished.append(ended)
            running.append(held)
            if isinstance(keys, str):
                assert await names(clients["shop"]) == set() and await names(clients["shop"], "files") == set()
            assert not served.app.state.batches.jobs.paused


async def test_a_tenant_without_a_key_is_named_until_it_has_one(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(tokenizer, tmp_path, (), "any") as (_, clients):
        await finished_and_running(clients["any"])

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records if UNREACHABLE in record.getMessage()]
        caplog.clear()
        return found

    assert said() == []
    file = keys_of(tmp_path, "shop shop", "spare other metrics")
    async with started(tokenizer, tmp_path, file, "shop") as (served, _):
        context = served.app.state.context
        gauge = context.metrics.registry.get_sample_value
        assert said() == [
            "no key belongs to tenant default, which has 1 unfinished batches and 3 files; "
            "add a key of this tenant, or one with the role 'operator', to --api-key-file"
        ]
        keys_of(tmp_path, "shop shop", "spare other operator")
        await context.reload_keys()
        assert "an operator's key reaches them" in said()[0] and gauge("tidemill_unreachable_tenants") == 1
        keys_of(tmp_path, "shop shop", "spare default")
        await context.reload_keys()
        assert said() == [] and gauge("tidemill_unreachable_tenants") == 0


# ---- access of tenants

OWN, OPERATOR, FIGURES, NONE = "own tenant", "operator", "figures", "no tenant"
ROUTES = {
    ("GET", "/v1/files"): OPERATOR,
    ("GET", "/v1/files/{file_id}"): OPERATOR,
    ("GET", "/v1/files/{file_id}/content"): OPERATOR,
    ("DELETE", "/v1/files/{file_id}"): OPERATOR,
    ("GET", "/v1/batches"): OPERATOR,
    ("GET", "/v1/batches/{batch_id}"): OPERATOR,
    ("GET", "/v1/batches/{batch_id}/events"): OPERATOR,
    ("GET", "/v1/batches/{batch_id}/table"): OPERATOR,
    ("GET", "/v1/usage"): OPERATOR,
    ("POST", "/v1/batches/{batch_id}/cancel"): OPERATOR,
    ("GET", "/v1/messages/batches"): OPERATOR,
    ("GET", "/v1/messages/batches/{message_batch_id}"): OPERATOR,
    ("GET", "/v1/messages/batches/{message_batch_id}/results"): OPERATOR,
    ("POST", "/v1/messages/batches/{message_batch_id}/cancel"): OPERATOR,
    ("DELETE", "/v1/messages/batches/{message_batch_id}"): OPERATOR,
    ("POST", "/v1/messages/batches"): OWN,
    ("POST", "/v1/files"): OWN,
    ("POST", "/v1/batches"): OWN,
    ("POST", "/v1/tables"): OWN,
    ("POST", "/v1/tables/preview"): OWN,
    ("POST", "/v1/chat/completions"): OWN,
    ("POST", "/v1/completions"): OWN,
    ("POST", "/v1/embeddings"): OWN,
    ("POST", "/v1/responses"): OWN,
    ("POST", "/v1/messages"): OWN,
    ("POST", "/v1/messages/count_tokens"): OWN,
    ("POST", "/v1/responses/input_tokens"): OWN,
    ("POST", "/tokenize"): OWN,
    ("POST", "/detokenize"): OWN,
    ("GET", "/metrics"): FIGURES,
    ("GET", "/dashboard/history"): FIGURES,
    ("GET", "/dashboard/timeline"): FIGURES,
    ("GET", "/dashboard/events"): FIGURES,
    ("GET", "/health"): NONE,
    ("GET", "/ready"): NONE,
    ("GET", "/version"): NONE,
    ("GET", "/v1/models"): NONE,
    ("GET", "/v1/models/{model}"): NONE,
    ("GET", "/"): NONE,
    ("GET", "/web/{name}"): NONE,
}
"""Every route: a new one must say which tenants it reaches."""
WEB = {(method, route.path) for route in web.router.routes for method in route.methods}  # type: ignore[attr-defined]
"""Those of the page, which are in no document."""

Clients = dict[str, "openai.AsyncOpenAI"]
KEYS = ("acme acme", "other other", "figures third metrics", "named operator", "boss ops operator", "joined default")


@pytest.fixture
async def served(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[tuple[Served, Clients]]:
    clients = [text.split()[0] for text in KEYS]
    async with started(tokenizer, tmp_path, keys_of(tmp_path, *KEYS), *clients) as started_server:
        yield started_server


def test_every_route_is_in_the_table(served: tuple[Served, Clients]) -> None:
    paths = served[0].app.openapi()["paths"].items()
    found = {(method.upper(), path) for path, methods in paths for method in methods}
    assert found | WEB == ROUTES.keys()


async def test_an_operator_reaches_the_objects_of_all_tenants(served: tuple[Served, Clients]) -> None:
    _, clients = served
    acme, boss = clients["acme"], clients["boss"]
    finished, running = await finished_and_running(acme)
    own, _ = await finished_and_running(boss)
    batch = await acme.batches.retrieve(finished)
    assert batch.output_file_id is not None
    tried = set()

    async def ask(client: openai.AsyncOpenAI, method: str, route: str, name: str, status: int = 200) -> Any:
        tried.add((method, route))
        answer = await call(client, method, route.format(file_id=name, batch_id=name, message_batch_id=name))
        assert answer.status_code == status, (method, route, answer.text)
        return answer

    assert running not in await names(boss) and own in await names(boss), "an operator has a tenant, too"
    for kind in ("files", "batches"):
        everything = (await ask(boss, "GET", f"/v1/{kind}", "")).json()["data"]
        assert {each.get("tenant") for each in everything} == {None}
        shown = (await get(boss, f"/v1/{kind}", params={"tenant": "*"})).json()["data"]
        assert {each["tenant"] for each in shown} == {"acme", "ops"}
        theirs = await names(boss, kind, "acme")
        assert theirs == await names(acme, kind) == {each["id"] for each in shown if each["tenant"] == "acme"}
        page = await get(boss, f"/v1/{kind}", params={"tenant": "*", "limit": 1, "after": shown[0]["id"]})
        assert page.json()["data"] == [shown[1]] and page.json()["has_more"]
        assert await names(boss, kind, "nothing") == set()
    assert (await ask(boss, "GET", "/v1/batches/{batch_id}", running)).json()["tenant"] == "acme"
    assert (await ask(boss, "GET", "/v1/files/{file_id}", batch.input_file_id)).json()["tenant"] == "acme"
    content = await ask(boss, "GET", "/v1/files/{file_id}/content", batch.output_file_id)
    assert content.text == (await acme.files.content(batch.output_file_id)).text
    held = (await acme.batches.retrieve(running)).input_file_id
    await ask(boss, "DELETE", "/v1/files/{file_id}", held, 400)
    await ask(boss, "POST", "/v1/batches/{batch_id}/cancel", running)
    assert (await until(acme, running)).status == "cancelled"
    await ask(boss, "GET", "/v1/batches/{batch_id}/events", running)
    await ask(boss, "GET", "/v1/batches/{batch_id}/table", running, 404)  # not made from a table
    await ask(boss, "GET", "/v1/usage", "")
    await ask(boss, "DELETE", "/v1/files/{file_id}", batch.output_file_id)
    await ask(acme, "GET", "/v1/files/{file_id}", batch.output_file_id, 404)
    await reach_message_batches(ask, acme, boss)
    assert tried == {route for route, kind in ROUTES.items() if kind is OPERATOR}


async def reach_message_batches(ask: Any, acme: openai.AsyncOpenAI, boss: openai.AsyncOpenAI) -> None:
    asked = [{"role": "user", "content": "hi"}]
    request = {"custom_id": "a", "params": {"model": MODEL, "max_tokens": 4, "messages": asked}}
    created = (await call(acme, "POST", "/v1/messages/batches", json={"requests": [request]})).json()
    assert created["id"] not in {
        each["id"] for each in (await ask(boss, "GET", "/v1/messages/batches", "")).json()["data"]
    }
    assert [each["id"] for each in (await get(boss, "/v1/messages/batches?tenant=acme")).json()["data"]] == [
        created["id"]
    ]
    await until(acme, created["id"].removeprefix("msg"))
    route = "/v1/messages/batches/{message_batch_id}"
    assert (await ask(boss, "GET", route, created["id"])).json()["processing_status"] == "ended"
    assert json.loads((await ask(boss, "GET", f"{route}/results", created["id"])).text)["custom_id"] == "a"
    await ask(boss, "POST", f"{route}/cancel", created["id"])
    await ask(boss, "DELETE", route, created["id"])
    await ask(acme, "GET", route, created["id"], 404)


async def test_an_operator_creates_for_its_own_tenant_only(served: tuple[Served, Clients]) -> None:
    _, clients = served
    finished, _ = await finished_and_running(clients["acme"])
    batch = await clients["acme"].batches.retrieve(finished)
    body: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.NotFoundError):
        await clients["boss"].batches.create(input_file_id=batch.input_file_id, **body)
    created = await submit(clients["boss"], jsonl([line(2)]), extra_query={"tenant": "acme"})
    assert created.id in await names(clients["boss"]) and created.id not in await names(clients["acme"])


@pytest.mark.parametrize("key", ["other", "figures", "named", "joined"])
async def test_other_keys_see_no_difference_between_a_missing_object_and_anothers(
    served: tuple[Served, Clients], key: str
) -> None:
    server, clients = served
    finished, running = await finished_and_running(clients["acme"])
    file = (await clients["acme"].batches.retrieve(finished)).input_file_id
    other = clients[key]
    statements: list[str] = []
    server.app.state.batches.folder.store._writer._connection.set_trace_callback(statements.append)

    async def answer(work: Awaitable[httpx.Response], name: str) -> tuple[int, str, list[str]]:
        statements.clear()
        found = await work
        asked = [re.sub(r"\d{9,}", "NOW", text.replace(name, "ID")) for text in statements if name in text]
        return found.status_code, re.sub("req-[0-9a-f]{32}", "REQUEST", found.text), asked

    asked = {(method, route) for (method, route), kind in ROUTES.items() if kind is OPERATOR and "{" in route}
    assert len(asked) == 11
    for method, route in asked:
        real, missing = (finished, MISSING_BATCH) if "batch_id" in route else (file, MISSING_FILE)
        found = [
            await answer(call(other, method, route.format(batch_id=name, file_id=name, message_batch_id=name)), name)
            for name in (real, missing)
        ]
        assert found[0] == found[1] and found[0][0] == 404 and found[0][2], (method, route)
    assert (await call(other, "POST", f"/v1/batches/{running}/cancel")).status_code == 404
    for kind, cursor in (("batches", running), ("files", file)):
        assert await names(other, kind) == set()
        assert (await get(other, f"/v1/{kind}", params={"after": cursor})).status_code == 400
        refused = [await get(other, f"/v1/{kind}", params={"tenant": name}) for name in ("acme", "nothing", "*")]
        assert {each.status_code for each in refused} == {403} and len({each.text for each in refused}) == 1
    assert (await clients["acme"].batches.retrieve(running)).status == "in_progress"


async def test_a_tenant_may_name_itself_in_a_list(served: tuple[Served, Clients]) -> None:
    _, clients = served
    finished, running = await finished_and_running(clients["other"])
    assert await names(clients["other"], tenant="other") == {finished, running} == await names(clients["other"])


async def test_the_command_line_lists_and_cancels_for_an_operator(
    served: tuple[Served, Clients], capsys: pytest.CaptureFixture[str]
) -> None:
    server, clients = served
    finished, running = await finished_and_running(clients["acme"])

    async def run(key: str, *arguments: str) -> tuple[int, str, str]:
        argv = ["batch", arguments[0], "--url", server.url, "--api-key", key, *arguments[1:]]
        code = await asyncio.to_thread(cli.main, argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    for tenant in ("acme", "*"):
        code, out, _ = await run("boss", "list", "--tenant", tenant)
        _header, *rows = out.splitlines()
        assert code == 0 and [row.split()[0] for row in rows] == [running, finished]
        assert {row.split()[-1] for row in rows} == {"acme"}
    assert (await run("boss", "list"))[:2] == (0, "")
    assert (await run("boss", "cancel", running))[:2] == (0, "cancelling\n")
    code, out, err = await run("other", "list", "--tenant", "acme")
    assert code == 1 and not out and "operator" in err


# ---- usage


async def test_usage_by_tenant_and_batch_with_prices(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "a alpha", "b beta operator")
    async with started(tokenizer, tmp_path, keys, "a", "b") as (_, clients):
        a, b = clients["a"], clients["b"]
        chat = await a.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        batch = await until(a, (await submit(a, jsonl([line(1), line(2)]))).id)
        assert chat.usage is not None and batch.usage is not None
        own = (await get(a, "/v1/usage", params={"price_in": 2, "price_out": 4})).json()
        (row,) = own["tenants"]
        (listed,) = own["batches"]
        assert row["tenant"] == "alpha" and row["batches"] == {k: listed[k] for k in row["batches"]}
        assert (listed["id"], listed["status"], "tenant" in listed) == (batch.id, "completed", False)
        for part, usage in ((row["requests"], chat.usage), (row["batches"], batch.usage)):
            tokens = usage.model_dump()
            prompt = tokens.get("prompt_tokens", tokens.get("input_tokens"))
            output = tokens.get("completion_tokens", tokens.get("output_tokens"))
            assert (part["input_tokens"], part["output_tokens"]) == (prompt, output)
            assert part["value"] == pytest.approx((2 * prompt + 4 * output) / 1e6)
        every = (await get(b, "/v1/usage", params={"tenant": "*"})).json()
        assert [each["tenant"] for each in every["tenants"] + every["batches"]] == ["alpha", "alpha"]
        (row,) = (await get(b, "/v1/usage")).json()["tenants"]
        assert row["tenant"] == "beta" and not row["requests"]["input_tokens"] and row["requests"]["value"] is None
        for params, status in (({"tenant": "beta"}, 403), ({"price_in": "x"}, 400), ({"price_out": -1}, 400)):
            assert (await get(a, "/v1/usage", params=params)).status_code == status


async def test_usage_counts_the_requests_and_lines_of_a_tenant(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The figures that the page shows by team."""
    keys = keys_of(tmp_path, "a alpha requests=1 queued=1", "b beta operator", "c gamma metrics")
    async with started(tokenizer, tmp_path, keys, "a", "b", "c") as (served, clients):
        a, admissions = clients["a"], served.app.state.context.admissions

        async def figures(key: str, **query: str) -> list[dict[str, Any]]:
            return list((await get(clients[key], "/v1/usage", params=query)).json()["tenants"])

        def chat() -> Any:
            return a.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "held"}])

        await finished_and_running(a)
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(chat())
            await eventually(lambda: admissions.num_waiting("alpha") == 1)
            with pytest.raises(openai.RateLimitError):
                await chat()
            (row,) = await figures("a")
            assert await figures("b", tenant="*") == [row], "a tenant without any of it has no row"
            assert (row["tenant"], row["running_requests"], row["waiting_requests"]) == ("alpha", 1, 1)
            assert (row["refused_requests"], row["unfinished_lines"]) == (1, 1)
            (other,) = await figures("c")
            assert other["tenant"] == "gamma" and not any(value for value in other.values() if type(value) is int)
            served.engine.release()
        (row,) = await figures("a")
        assert (row["running_requests"], row["waiting_requests"], row["refused_requests"]) == (0, 0, 1)


def test_engine_seconds_and_value_of_tokens() -> None:
    """Cached prompt tokens take no time, but they are paid."""
    bill = bill_of(True, (1.0, 3.0), Usage(1000, 400, 50, engine_us=1_100_000))
    assert (bill["engine_seconds"], bill["value"]) == (1.1, pytest.approx(0.00115))
    unknown = bill_of(False, None, Usage(1, 0, 1))
    assert unknown["engine_seconds"] is None and unknown["value"] is None


@pytest.mark.parametrize("engines", [0, 3])
def test_requests_are_charged_once_and_no_more_than_the_engines_had(engines: int) -> None:
    now, costs = [100.0], [TokenCosts(0.001, 0.01)]
    views = (cast(EngineView, None),) * engines
    time = EngineTime(lambda: EngineStats(token_costs=costs[0], engines=views), lambda: now[0])
    assert time.charge(600, 50) == 0, "no time has passed"
    total = 0
    for step in range(1, 200):
        now[0] += 0.5
        costs[0] = TokenCosts(0.001, 0.01 * step)
        total += time.charge(600, 50)
        assert total <= 0.5e6 * step * max(1, engines)
    now[0] += 1000.0
    costs[0] = TokenCosts(0.001, 0.01)
    assert time.charge(600, 50) == pytest.approx(1.1e6 * max(1, engines), abs=2)
