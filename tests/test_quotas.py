"""Limits of tenants: the key file's words, places in the engine, and real servers that refuse and reload."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from batch_tools import batch_server, client_of, eventually, jsonl, keys_of, line, submit, until, upload
from fake_engine import MODEL, Served
from fixtures import StartServer
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fuzz import fuzz, machine_test
from support.http import get
from support.lazy import openai
from support.tables import for_each

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway.http.errors import ApiError
from gateway.http.keys import (
    IDLE,
    TENANT_LIMIT,
    UNLIMITED,
    Admissions,
    AdmissionSlot,
    Division,
    Load,
    Quota,
    UploadPlaces,
    load_keys,
    parse_quota,
)
from gateway.telemetry.account import Account
from gateway.telemetry.tenant_metrics import MAX_TENANTS, OTHERS, TenantCollector

# ---- the file


def test_limits_behind_tenant_and_tier(tmp_path: Path) -> None:
    path = keys_of(
        tmp_path,
        "a acme requests=8 queued=64 bytes=50G  # the web shop",
        "a2 acme flex",
        "b bolt flex tokens=4K lines=200000",
        "c calm",
    )
    ring = load_keys([], path)
    assert ring.quota("acme") == Quota(requests=8, queued=64, bytes=50 * 2**30)
    assert ring.quota("bolt") == Quota(tokens=4096, lines=200_000)
    assert ring.quota("calm") == ring.quota("nobody") == UNLIMITED
    found = ring.find(b"a2")
    assert found is not None and found.service_tier == "flex"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["a acme requests=0"], "line 1: 'requests' must be a whole number above 0"),
        (["a acme requests=-1"], "'requests' must be"),
        (["a acme requests="], "'requests' must be"),
        (["a acme bytes=5GB"], "'bytes' must be"),
        (["a acme bytes=" + "9" * 30], "'bytes' must be"),
        (["a acme request=8"], "a limit must be one of requests=N, queued=N, tokens=N, lines=N, bytes=N"),
        (["a acme requests=8 requests=9"], "'requests' is given twice"),
        (["a acme queued=9"], "'queued' needs 'requests' or 'tokens'"),
        (["a acme requests=8 flex"], "then limits"),
        (["a acme requests=8", "b acme requests=9"], "line 2: the tenant has different limits"),
    ],
)
def test_a_wrong_limit_is_one_clear_line(tmp_path: Path, lines: list[str], says: str) -> None:
    path = keys_of(tmp_path, *lines)
    with pytest.raises(ConfigError) as caught:
        load_keys([], path)
    assert says in caught.value.message and "\n" not in caught.value.message


def test_what_may_be_a_key_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="a limit must be one of") as caught:
        parse_quota(["sk-secret=="])
    assert "secret" not in str(caught.value)


# ---- places in the engine


class AdmissionsMachine(RuleBasedStateMachine):
    """Two tenants come, leave and are given other quotas in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.quotas = {"a": UNLIMITED, "b": UNLIMITED}
        self.admissions = Admissions(lambda tenant: self.quotas[tenant])
        self.places: dict[str, list[AdmissionSlot]] = {"a": [], "b": []}

    @rule(
        tenant=st.sampled_from("ab"),
        requests=st.none() | st.integers(1, 4),
        tokens=st.none() | st.integers(1, 40),
        queued=st.none() | st.integers(1, 4),
    )
    def change(self, tenant: str, requests: int | None, tokens: int | None, queued: int | None) -> None:
        self.quotas[tenant] = Quota(requests=requests, tokens=tokens, queued=queued)
        self.admissions.recheck()

    @rule(tenant=st.sampled_from("ab"), requests=st.integers(1, 3), tokens=st.integers(1, 20))
    def enter(self, tenant: str, requests: int, tokens: int) -> None:
        before = [place.granted.is_set() for places in self.places.values() for place in places]
        try:
            place = self.admissions.enter(tenant, requests, tokens)
        except ApiError as error:
            assert error.status in (400, 429)
            assert before == [place.granted.is_set() for places in self.places.values() for place in places]
            return
        self.places[tenant].append(place)

    @precondition(lambda self: any(self.places.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from([name for name, places in self.places.items() if places]))
        place = self.places[tenant].pop(data.draw(st.integers(0, len(self.places[tenant]) - 1)))
        self.admissions.leave(place)

    @invariant()
    def those_who_wait_have_a_reason_and_keep_their_order(self) -> None:
        for tenant, places in self.places.items():
            inside = [place for place in places if place.granted.is_set()]
            waiting = [place for place in places if not place.granted.is_set()]
            assert self.admissions.num_waiting(tenant) == len(waiting)
            assert places == inside + waiting, "first come, first served"
            if not waiting:
                continue
            quota = self.quotas[tenant]
            requests = sum(place.num_requests for place in inside) + waiting[0].num_requests
            tokens = sum(place.num_tokens for place in inside) + waiting[0].num_tokens
            assert inside, "nobody waits for nothing"
            assert requests > (quota.requests or 10**9) or tokens > (quota.tokens or 10**9)

    @invariant()
    def nothing_is_kept_of_those_who_left(self) -> None:
        assert self.admissions._tenants.keys() == {tenant for tenant, places in self.places.items() if places}


TestAdmissionsMachine = machine_test(AdmissionsMachine, 60, 40)


@pytest.mark.slow
@fuzz(100)
@given(
    limit=st.integers(1, 30),
    wanted=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    ends=st.lists(st.floats(0.0, 1.0), max_size=20),
    dice=st.randoms(),
)
def test_servers_divide_a_limit(limit: int, wanted: list[int], ends: list[float], dice: Random) -> None:
    """Clients keep up a number of requests on each server. Some time after the first burst, all servers together run
    at most the limit and one request of each further server, and at least that much less, if so many are wanted."""
    servers = [Admissions(lambda _: Quota(requests=limit, queued=1000)) for _ in wanted]
    places = [[each.enter("a", 1, 1) for _ in range(number)] for each, number in zip(servers, wanted, strict=True)]
    more = len(servers) - 1
    for number, share in enumerate([1.0] * 40 + ends):
        own = [each.loads()["a"] for each in servers]
        for index, each in enumerate(servers):
            total = Load(*(sum(counts) - counts[index] for counts in zip(*own, strict=True)))
            each.divide({"a": Division(len(servers), total, own[index])} if more else {})
        for each, held in zip(servers, places, strict=True):
            for place in [place for place in held if place.granted.is_set() and dice.random() < share]:
                each.leave(place)
                held.remove(place)
                held.append(each.enter("a", 1, 1))
        if number >= 40:
            running = sum(each.num_running for each in servers)
            assert min(limit, sum(wanted)) - more <= running <= limit + more


async def test_upload_places_are_counted_by_tenant_and_in_all() -> None:
    places, leave, inside = UploadPlaces(2, 3), asyncio.Event(), []

    async def stall(tenant: str) -> None:
        async with places.place(tenant):
            inside.append(tenant)
            await leave.wait()

    tasks = [asyncio.create_task(stall(tenant)) for tenant in ("a", "a", "a", "b", "b")]
    await eventually(lambda: len(inside) == 3)
    assert sorted(inside) == ["a", "a", "b"]
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    leave.set()
    await asyncio.gather(*tasks[:2], *tasks[3:])
    assert not places._tenants


# ---- servers


@asynccontextmanager
async def clients(served: Served, *keys: str) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    made = [client_of(served, api_key=key) for key in keys]
    try:
        yield made
    finally:
        for client in made:
            await client.close()


def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    values: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **fields}
    return client.chat.completions.create(**values)


async def test_requests_and_queue_of_a_tenant(start_server: StartServer, tmp_path: Path) -> None:
    path = keys_of(tmp_path, "a acme requests=2 queued=1", "b bolt")
    served = await start_server("hello world", hold_after=1, api_key_file=path)
    async with clients(served, "a", "b") as (a, b):
        streams = [asyncio.create_task(chat(a, stream=i == 0)) for i in range(2)]
        await served.engine.wait_for_event("add", 2)
        waiting = asyncio.create_task(chat(a))
        admissions = served.app.state.context.admissions
        await eventually(lambda: admissions.num_waiting("acme") == 1)
        with pytest.raises(openai.RateLimitError) as refusal:
            await chat(a)
        assert "'queued=1'" in refusal.value.message and refusal.value.response.headers["retry-after"] == "1"
        assert refusal.value.code == TENANT_LIMIT
        other = asyncio.create_task(chat(b))
        await served.engine.wait_for_event("add", 3)
        assert served.engine.requests[-1].tenant == "bolt", "the third of acme is not in the engine"
        waiting.cancel()
        await eventually(lambda: admissions.num_waiting("acme") == 0)
        waiting = asyncio.create_task(chat(a))
        await eventually(lambda: admissions.num_waiting("acme") == 1)
        served.engine.release()
        assert (await waiting).choices[0].message.content == "hello world"
        assert (await other).choices[0].message.content == "hello world"
        stream, whole = await asyncio.gather(*streams)
        assert whole.choices[0].message.content == "hello world"
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world"
        await eventually(lambda: not admissions._tenants)
    assert len(served.engine.requests) == 4


async def test_without_keys_there_is_one_tenant_without_limits(start_server: StartServer) -> None:
    served = await start_server("hello", hold_after=0)
    async with clients(served, "none") as (client,):
        tasks = [asyncio.create_task(chat(client)) for _ in range(100)]
        await served.engine.wait_for_event("add", 100)
        served.engine.release()
        await asyncio.gather(*tasks)


async def test_tokens_of_a_tenant(start_server: StartServer, tmp_path: Path) -> None:
    path = keys_of(tmp_path, "a acme tokens=200")
    served = await start_server("hello", hold_after=0, api_key_file=path)
    async with clients(served, "a") as (client,):
        with pytest.raises(openai.BadRequestError, match="'tokens=200'"):
            await chat(client, max_tokens=300)
        first = asyncio.create_task(chat(client, max_tokens=150))
        await served.engine.wait_for_event("add")
        with pytest.raises(openai.RateLimitError, match="'tokens=200'"):
            await chat(client, max_tokens=50)
        served.engine.release()
        await first
        assert (await chat(client, max_tokens=150)).choices


async def test_stored_bytes_of_a_tenant(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = keys_of(tmp_path, "a acme bytes=100K", "b bolt")
    async with (
        batch_server(tokenizer, tmp_path / "state", api_key_file=path) as (served, _),
        clients(served, "a", "b") as (a, b),
    ):
        first = await upload(a, b"x" * 60_000)
        for size in (43_000, 200_000):  # found while it comes, and by its announced length
            with pytest.raises(openai.APIStatusError) as refusal:
                await upload(a, b"x" * size)
            assert refusal.value.status_code == 413 and "'bytes=102400'" in refusal.value.message
            assert "60000 bytes are stored" in refusal.value.message
        both = await asyncio.gather(upload(a, b"x" * 30_000), upload(a, b"x" * 30_000), return_exceptions=True)
        assert sorted(type(found).__name__ for found in both) == ["APIStatusError", "FileObject"], "exact at once, too"
        await upload(b, b"x" * 200_000)
        await a.files.delete(first.id)
        await upload(a, b"x" * 60_000)
    assert len(list((tmp_path / "state" / "files").iterdir())) == 3


async def test_stalled_uploads_of_one_tenant_do_not_hold_up_another(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = keys_of(tmp_path, "a acme", "b bolt")
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer a\r\ncontent-length: 5000\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    )
    async with (
        batch_server(tokenizer, tmp_path / "state", api_key_file=path) as (served, _),
        clients(served, "b") as (other,),
    ):
        writers = []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head.encode())
            writers.append(writer)
        uploads = served.app.state.batches.uploads
        await eventually(lambda: "acme" in uploads._tenants and len(uploads._tenants["acme"][1]) == 20)
        assert (await upload(other, jsonl([line(1)]))).bytes > 0
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        await eventually(lambda: not uploads._tenants)


async def test_batch_lines_of_a_tenant(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = keys_of(tmp_path, "a acme lines=5", "b bolt")
    async with (
        batch_server(tokenizer, tmp_path / "state", hold_after=0, api_key_file=path) as (served, _),
        clients(served, "a", "b") as (a, b),
    ):
        large = await until(a, (await submit(a, jsonl(line(i) for i in range(6)))).id)
        assert large.status == "failed" and large.errors.data[0].code == TENANT_LIMIT
        assert "6 lines" in large.errors.data[0].message and "'lines=5'" in large.errors.data[0].message
        first = await until(a, (await submit(a, jsonl(line(i) for i in range(4)))).id, "in_progress")
        second = await until(a, (await submit(a, jsonl(line(i) for i in range(2)))).id)
        assert second.status == "failed", "four of five are used"
        third = await until(a, (await submit(a, jsonl([line(1)]))).id, "in_progress")
        with pytest.raises(openai.RateLimitError, match="'lines=5'") as refusal:
            await submit(a, jsonl([line(1)]))
        assert refusal.value.response.headers["retry-after"] == "60"
        other = await submit(b, jsonl(line(i) for i in range(9)))
        served.engine.release()
        for client, batch in ((a, first), (a, third), (b, other)):
            assert (await until(client, batch.id)).status == "completed"
        assert (await until(a, (await submit(a, jsonl(line(i) for i in range(5)))).id)).status == "completed"


@for_each(
    ("model", "tier", "key", "stated"),
    [
        ("fake-model:flex", None, "a", "flex"),
        ("fake-model:flex", "auto", "a", "flex"),
        ("fake-model:flex", "default", "a", "default"),
        ("alias:default", None, "b", "default"),
        ("alias", None, "b", "flex"),
        ("alias", "auto", "b", "flex"),
        ("alias", "default", "b", "default"),
    ],
)
async def test_a_models_name_can_have_a_tier(
    start_server: StartServer, tmp_path: Path, model: str, tier: Any, key: str, stated: str
) -> None:
    path = keys_of(tmp_path, "a acme", "b bolt flex")
    served = await start_server("hello", api_key_file=path)
    async with clients(served, key) as (client,):
        answer = await chat(client, model=model, **({"service_tier": tier} if tier else {}))
        assert (answer.service_tier, answer.model) == (stated, model)
        assert (await client.models.retrieve(model)).id == model
        for wrong in ("fake-model:gold", "other:flex", "fake-model:"):
            with pytest.raises(openai.NotFoundError):
                await chat(client, model=wrong)


# ---- SIGHUP


async def hang_up() -> None:
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL, "the signal would end this process"
    os.kill(os.getpid(), signal.SIGHUP)


async def test_sighup_reloads_keys_and_nothing_that_runs_is_dropped(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tidemill.gateway")
    path = keys_of(tmp_path, "old acme requests=1 queued=1")
    served = await start_server("hello world", hold_after=1, api_key_file=path, owns_process=True)
    ring = served.app.state.context.keys
    async with clients(served, "old", "new") as (old, new):
        stream = await chat(old, stream=True)
        waiting = asyncio.create_task(chat(old))
        await eventually(lambda: served.app.state.context.admissions.num_waiting("acme") == 1)
        before = ring.ring
        keys_of(tmp_path, "new acme requests=2 class=gold")
        await hang_up()
        await eventually(lambda: ring.ring is not before)
        await served.engine.wait_for_event("add", 2)  # the one that waited has come in: the new limit is 2
        with pytest.raises(openai.AuthenticationError):
            await chat(old)
        with pytest.raises(openai.RateLimitError, match="'requests=2'"):
            await chat(new)
        served.engine.release()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world"
        assert (await waiting).choices[0].message.content == "hello world"
        assert (await chat(new)).choices
        held = ring.ring
        (tmp_path / "keys").write_text("broken")
        await hang_up()
        await eventually(lambda: "the keys are unchanged" in caplog.text)
        assert ring.ring is held and (await chat(new)).choices
    assert (
        "1 keys of 1 tenants" in caplog.text
        and "unknown service class 'gold'" in caplog.text
        and "line 1: expected" in caplog.text
    )


async def test_sighup_without_a_key_file_does_nothing(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tidemill.gateway")
    served = await start_server("hello", owns_process=True)
    await hang_up()
    await eventually(lambda: "no --api-key-file to reload" in caplog.text)
    assert (await get(served, "/health")).status_code == 200


async def test_a_closed_terminal_ends_the_server(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start_server("hello", owns_process=True)
    served.server._has_terminal = True
    monkeypatch.setattr("gateway.server.has_terminal", lambda: False)
    await hang_up()
    await eventually(lambda: served.server.should_exit)


# ---- metrics


def test_loads_of_all_servers_are_added() -> None:
    admissions = Admissions(lambda tenant: UNLIMITED)
    admissions.enter("here", 2, 30)
    elsewhere = {"here": Load(1, 5, 3), "there": Load(4, 9, 0)}
    admissions.divide({name: Division(2, load, IDLE) for name, load in elsewhere.items()})
    assert admissions.loads_everywhere() == {"here": Load(3, 35, 3), "there": Load(4, 9, 0)}
    assert admissions.loads() == {"here": Load(2, 30, 0)}


def test_tenants_are_counted_and_beyond_a_bound_together() -> None:
    admissions = Admissions(lambda tenant: Quota(requests=1) if tenant == "t0" else UNLIMITED)
    by_tenant = TenantCollector(admissions.refused, admissions.loads)

    def ended(tenant: str, kind: RequestClass) -> Any:
        request = EngineRequest("r", (1, 2, 3), SamplingParams(4), request_class=kind, tenant=tenant)
        account = Account(request, "id", 0)
        account.num_tokens = 5
        return account

    for number in range(MAX_TENANTS + 7):
        by_tenant.observe_end(ended(f"t{number}", RequestClass.ONLINE))
    by_tenant.observe_end(ended("t0", RequestClass.OFFLINE))
    place = admissions.enter("t0", 1, 10)
    with pytest.raises(ApiError):
        admissions.check("t0")
    samples = {
        (sample.name.removeprefix("tidemill_tenant_"), *sample.labels.values()): sample.value
        for family in by_tenant.collect()
        for sample in family.samples
    }
    assert (
        samples["tokens_total", "t0", "online", "prompt"] == 3
        and samples["tokens_total", "t0", "offline", "output"] == 5
    )
    assert samples["requests_total", OTHERS, "online"] == 7
    assert len({labels[1] for labels in samples}) == MAX_TENANTS + 1
    assert samples["refused_requests_total", "t0"] == 1 and samples["present_requests", "t0", "running"] == 1
    admissions.leave(place)
