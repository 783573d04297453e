"""Several servers on one store: leases against a model, races, and batches of servers that share an object store."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import (
    batch_server,
    check_ended,
    client_of,
    eventually,
    jsonl,
    keys_of,
    line,
    open_remote,
    submit,
    until,
)
from fake_engine import MODEL, Served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from obstore.store import MemoryStore
from postgres_server import PostgresServer
from support.lazy import openai
from test_store import NOW, a_batch, a_file

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway.batch.run import BatchLimits, Runs
from gateway.batch.tenants import TenantExchange
from gateway.http.keys import Admissions, KeyStore, Load
from gateway.store.batch_rows import DEAD_SECONDS
from gateway.store.disk import StorageError
from gateway.store.folder import Place, open_state
from gateway.store.objects import BatchStatus, IllegalTransition, LineRef, LineResult, Usage
from gateway.store.row_store import RowStore, put_keys
from gateway.store.schema import SHARED
from gateway.store.sqlite import SqliteWriter, open_database
from tidemill.cli import main

S = BatchStatus
LINES, SIZE = 20, 8
BLOCKS = (1, 0, 2)
"""First rank of each run in feeding order, in units of SIZE."""
servers = st.integers(0, 2)


class LeaseMachine(RuleBasedStateMachine):
    """Three servers and one batch. The model has the owner, the holder of each run and the first result of each line;
    a server without a heartbeat still tries to change the batch."""

    stores: list[RowStore]
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.owner = [True] * 3, -1
        self.status, self.total = S.VALIDATING, 0
        self.runs: dict[int, int] = {}
        self.lines: dict[int, int] = {}
        self.run(self.stores[0]._writer.run(lambda c: [c.execute(f"DELETE FROM {t}") for t in ("runs", "servers")]))
        self.batch = self.run(a_batch(self.stores[0])).id
        for server in range(3):
            self.beat(server)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def free(self, takes_over: bool) -> list[int]:
        return sorted(run for run, holder in self.runs.items() if holder < 0 or (takes_over and not self.alive[holder]))

    @property
    def is_running(self) -> bool:
        return self.status in (S.VALIDATING, S.IN_PROGRESS, S.FINALIZING, S.CANCELLING)

    def change(self, server: int, work: Any, *statuses: BatchStatus) -> Any:
        """Run a change that only the owner may make, in one of `statuses`; return None if it is refused."""
        if server == self.owner and self.status in statuses:
            return self.run(work)
        with pytest.raises(IllegalTransition):
            self.run(work)
        return None

    @rule(server=servers)
    def beat(self, server: int) -> None:
        found = self.run(self.stores[server].beat(float(server), True))
        self.alive[server] = True
        if self.is_running:
            assert found.runs.get(self.batch, set()) == {run for run, holder in self.runs.items() if holder == server}
            held = [run for run, holder in self.runs.items() if holder not in (-1, server) and self.alive[holder]]
            assert sum(found.held.values()) == SIZE * len(held)
            assert bool(found.free) is bool(self.free(True))
            assert bool(found.owned) is (self.owner not in (-1, server) and self.alive[self.owner])

    @rule(server=servers)
    def fall_silent(self, server: int) -> None:
        query = f"UPDATE servers SET seen_at = seen_at - {10 * DEAD_SECONDS} WHERE id = ?"
        self.run(self.stores[server]._writer.run(lambda c: c.execute(query, (self.stores[server].server,))))
        self.alive[server] = False

    @rule(server=servers, takes_over=st.booleans())
    def own(self, server: int, takes_over: bool) -> None:
        is_free = self.owner in (-1, server) or (takes_over and not self.alive[self.owner])
        assert self.run(self.stores[server].take_batch(self.batch, takes_over)) is (is_free and self.is_running)
        if is_free and self.is_running:
            self.owner = server

    @rule(server=servers)
    def validate(self, server: int) -> None:
        store, refs = self.stores[server], [LineRef(rank, rank + 1, rank, 1) for rank in range(LINES)]
        if not self.total and self.status in (S.VALIDATING, S.CANCELLING):
            self.change(server, store.add_lines(self.batch, refs, first=True), self.status)
            if self.change(server, store.start_batch(self.batch, LINES, None, NOW), self.status) is not None:
                self.total = LINES
                self.status = S.IN_PROGRESS if self.status is S.VALIDATING else self.status
                self.change(server, store.add_runs(self.batch, SIZE, BLOCKS), self.status)
                self.runs = dict.fromkeys(range(3), -1)

    @rule(server=servers, most=st.integers(1, 3), takes_over=st.booleans(), data=st.data())
    def take(self, server: int, most: int, takes_over: bool, data: st.DataObject) -> None:
        own = sorted(run for run, holder in self.runs.items() if holder == server)
        ended = data.draw(st.sets(st.sampled_from(own))) if own else set()
        taken = self.run(self.stores[server].take_runs(self.batch, sorted(ended), most, takes_over))
        for run in ended:
            del self.runs[run]
        assert taken == self.free(takes_over)[:most]
        self.runs |= dict.fromkeys(taken, server)

    @rule(server=servers)
    def release(self, server: int) -> None:
        self.run(self.stores[server].release_runs(self.batch))
        self.runs = {run: -1 if holder == server else holder for run, holder in self.runs.items()}

    @rule(server=servers, ranks=st.sets(st.integers(0, LINES - 1), max_size=6), start=st.integers(0, 999))
    def result(self, server: int, ranks: set[int], start: int) -> None:
        results = [LineResult(rank, True, start, 7, Usage(1, 0, rank)) for rank in sorted(ranks)]
        found = self.run(self.stores[server].add_results(self.batch, results))
        if self.is_running and self.total:
            self.lines = dict.fromkeys(ranks, start) | self.lines
            assert (found.completed, found.usage.output_tokens) == (len(self.lines), sum(self.lines))

    @rule(server=servers)
    def cancel(self, server: int) -> None:
        found = self.run(self.stores[server].cancel_batch(None, self.batch, NOW))
        if self.status in (S.VALIDATING, S.IN_PROGRESS):
            self.status = S.CANCELLING
        assert found.status is self.status

    @rule(server=servers)
    def finalize(self, server: int) -> None:
        if self.status is S.IN_PROGRESS and len(self.lines) == LINES:
            self.run(self.stores[server].move_batch(self.batch, S.FINALIZING, NOW))
            self.status = S.FINALIZING
        else:
            with pytest.raises(IllegalTransition):
                self.run(self.stores[server].move_batch(self.batch, S.FINALIZING, NOW))

    @rule(server=servers, ranks=st.sets(st.integers(0, LINES - 1)))
    def run_again(self, server: int, ranks: set[int]) -> None:
        if self.status is S.VALIDATING:
            return
        again = self.stores[server].run_again(self.batch, sorted(ranks), Usage())
        if self.change(server, again, S.IN_PROGRESS, S.FINALIZING) is not None:
            self.status = S.IN_PROGRESS
            self.lines = {rank: start for rank, start in self.lines.items() if rank not in ranks}
            usage = Usage(output_tokens=sum(self.lines))
            self.change(server, self.stores[server].run_again(self.batch, [], usage), self.status)
            self.change(server, self.stores[server].add_runs(self.batch, SIZE, BLOCKS), self.status)
            pending = {BLOCKS.index(rank // SIZE) for rank in range(LINES) if rank not in self.lines}
            self.runs = dict.fromkeys(pending, -1) | self.runs

    @rule(server=servers)
    def end(self, server: int) -> None:
        end = {S.FINALIZING: S.COMPLETED, S.CANCELLING: S.CANCELLED}.get(self.status, S.EXPIRED)
        work = self.stores[server].finish_batch(self.batch, end, NOW, a_file(), None)
        if self.status is S.FINALIZING and len(self.lines) < LINES:
            raise AssertionError("a batch with pending lines is finalizing")
        if self.change(server, work, S.VALIDATING, S.IN_PROGRESS, S.FINALIZING, S.CANCELLING) is not None:
            self.status, self.runs = end, {}

    @invariant()
    def agrees(self) -> None:
        for store in self.stores:
            found = self.run(store.load_batch(self.batch))
            assert (found.status, found.completed) == (self.status, len(self.lines))
        if self.is_running:
            records = self.run(self.stores[0].line_records(self.batch, -1, 99))
            assert {each.ref.rank: each.start for each in records if each.succeeded} == self.lines


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.slow])])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[RowStore]]:
    if request.param == "sqlite":
        path = tmp_path / "s.db"
        connection = open_database(path)
        connection.executescript(SHARED)
        writer = SqliteWriter(path, connection, lambda: open_database(path))
        stores = [RowStore(writer, is_shared=True) for _ in range(3)]
    else:
        stores = [open_remote(request.getfixturevalue("postgres").address, "s3://b/p") for _ in range(3)]
    yield stores
    for store in stores:
        store.close_now()


@pytest.mark.slow
def test_leases_are_those_of_the_model(three: list[RowStore]) -> None:
    loop = asyncio.new_event_loop()
    machine = type("Machine", (LeaseMachine,), {"stores": three, "loop": loop})
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    )
    loop.close()


loads = st.dictionaries(st.sampled_from("ab"), st.builds(Load, *[st.integers(0, 9)] * 3), max_size=2)
reports = st.tuples(servers, loads, st.integers(0, 3), st.booleans(), st.sampled_from(["", "k1", "k2"]))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(reports, max_size=12))
def test_servers_exchange_usage_loads_and_keys(three: list[RowStore], steps: list[Any]) -> None:
    """Each report counts once although its answer may be lost; each server sees the last loads of all others."""
    loop, tables = asyncio.new_event_loop(), ("servers", "loads", "reports", "request_usage", "key_lines")
    run = loop.run_until_complete
    run(three[0]._writer.run(lambda c: [c.execute(f"DELETE FROM {table}") for table in tables]))
    numbers, known, versions = [0] * 3, [{}, {}, {}], [""] * 3
    used: Counter[str] = Counter()
    stored = ""
    for server in range(3):
        run(three[server].beat(0.0, False))
    for server, load, tokens, is_lost, keys in steps:
        numbers[server] += 1
        if keys:
            stored = keys
            run(three[0]._writer.run(lambda c, keys=keys: put_keys(c, keys)))
        usage = {"a": Usage(tokens, 0, 1), "b": Usage(0, 0, tokens)}
        for _ in range(1 + is_lost):
            news = run(three[server].exchange(numbers[server], usage, load, versions[server]))
        used["a"], used["b"], known[server] = used["a"] + tokens + 1, used["b"] + tokens, load
        if news.keys is not None:
            versions[server], lines = news.keys
            assert lines == stored
        others = [known[each] for each in range(3) if each != server]
        expected = {
            name: (len(found), Load(*map(sum, zip(*found, strict=True))))
            for name in "ab"
            if (found := [each[name] for each in others if name in each])
        }
        assert news.loads == expected
        assert run(three[server].exchange(numbers[server], {}, load, versions[server])).keys is None
        _, counted = run(three[2].request_usage(None))
        assert {name: sum(each) for name, each in counted.items()} == dict(used)
    run(three[0].leave(three[0].server))
    assert "a" not in known[0] or run(three[1].exchange(99, {}, {}, "")).loads.get("a", (0,))[0] == ("a" in known[2])
    loop.close()


async def test_servers_race_for_every_line(three: list[RowStore]) -> None:
    """Three servers answer lines of two batches at once, many lines twice: each line and its usage counts once."""
    runs, dice = Runs(300), random.Random(1)
    blocks = [runs.ranks(index).start // runs.size for index in range(runs.count)]
    batches = [(await a_batch(three[0], tenant)).id for tenant in "ab"]
    for store in three:
        await store.beat(1.0, False)
    for batch in batches:
        assert sorted(await asyncio.gather(*(s.take_batch(batch, False) for s in three))) == [False, False, True]
        (owner,) = [store for store in three if await store.take_batch(batch, False)]
        await owner.add_lines(batch, [LineRef(rank, rank + 1, rank, 1) for rank in range(300)], first=True)
        await owner.start_batch(batch, 300, None, NOW)
        await owner.add_runs(batch, runs.size, blocks)
    taken: Counter[tuple[str, int]] = Counter()
    places: set[int] = set()

    async def serve(store: RowStore, batch: str) -> None:
        while found := await store.take_runs(batch, [], 3, True):
            taken.update((batch, run) for run in found)
            ranks = [rank for run in found for rank in runs.ranks(run)] + dice.sample(range(300), 20)
            place = await store.reserve(batch, 10)
            assert place is not None
            places.add(place)
            await store.add_results(batch, [LineResult(r, True, place, 1, Usage(1, 0, r)) for r in set(ranks)])

    await asyncio.gather(*(serve(store, batch) for store in three for batch in batches))
    assert set(taken.values()) == {1} and len(taken) == 2 * runs.count, "each run has one holder"
    for batch in batches:
        ended = await three[1].load_batch(batch)
        assert (ended.completed, ended.usage) == (300, Usage(300, 0, sum(range(300))))


FAST_BEATS = BatchLimits(retry_seconds=0.01, tick_seconds=0.05, beat_seconds=0.03)


@pytest.mark.slow
@pytest.mark.postgres
async def test_three_servers_share_batches(
    postgres: PostgresServer, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file uploaded to one server, a batch created on the next: all servers run its lines and answer for it."""
    store = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: store)
    places = [Place(tmp_path / name, postgres.address, "s3://bucket/p") for name in "abc"]
    async with AsyncExitStack() as stack:
        options: Any = {"limits": FAST_BEATS, "hold_after": 0}
        started = [await stack.enter_async_context(batch_server(tokenizer, place, **options)) for place in places]
        engines, clients = [each[0].engine for each in started], [each[1] for each in started]
        rows, lost = started[2][0].app.state.batches.folder.store, []
        take = rows.take_runs

        async def lose_once(*values: Any) -> Any:
            if not (taken := await take(*values)) or lost:
                return taken
            lost.append(taken)
            raise StorageError(is_away=True)

        rows.take_runs = lose_once
        batch = await submit(clients[0], jsonl(line(i) for i in range(400)))
        await eventually(lambda: all(engine._streams for engine in engines))
        for engine in engines:
            engine.release()
        ended = [await until(client, batch.id) for client in clients]
        for client in clients:
            assert {each.status for each in ended} == {"completed"}
            await check_ended(client, ended[0], [f"id-{i}" for i in range(400)])
        assert lost and sum(engine._counts["add"] for engine in engines) == 400, "no line runs twice"
        for engine in engines:
            engine._released = asyncio.Event()
        held = await submit(clients[1], jsonl(line(i) for i in range(300)))
        await eventually(lambda: all(engine._streams for engine in engines))
        await clients[2].batches.cancel(held.id)
        cancelled = await until(clients[0], held.id, "cancelled")
        _, errors = await check_ended(clients[1], cancelled, [f"id-{i}" for i in range(300)])
        assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
        assert not any(engine._streams for engine in engines), "all servers gave up their lines"
        await clients[1].files.delete(ended[0].output_file_id)
        copies = [place.folder / "files" / ended[0].output_file_id for place in places]
        await eventually(lambda: not any(copy.exists() for copy in copies))
        with pytest.raises(ConfigError, match="are at objects=s3://bucket/p, not at s3://bucket/q"):
            await asyncio.to_thread(open_state, Place(tmp_path / "d", postgres.address, "s3://bucket/q"))
        with pytest.raises(ConfigError, match="in use by another server"):
            monkeypatch.setattr("gateway.store.postgres.LOCK_SECONDS", 0.1)
            await asyncio.to_thread(open_state, Place(tmp_path / "d", postgres.address))


@pytest.mark.slow
@pytest.mark.postgres
async def test_lines_of_a_silent_server_run_elsewhere(
    postgres: PostgresServer, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that owns a batch falls silent with lines in its engine; when it comes back, its results are late."""
    for module in ("store.batch_rows", "batch.cluster"):
        monkeypatch.setattr(f"gateway.{module}.DEAD_SECONDS", 4)
    store = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: store)
    places = [Place(tmp_path / name, postgres.address, "s3://bucket/p") for name in "ab"]
    async with batch_server(tokenizer, places[0], limits=FAST_BEATS, hold_after=0) as (silent, client):
        batch = await submit(client, jsonl(line(i) for i in range(30)))
        await eventually(lambda: bool(silent.engine._streams))
        rows = silent.app.state.batches.folder.store
        beat, away = rows.beat, asyncio.Event()

        async def silence(*_: Any) -> Any:
            await away.wait()
            return await beat(0.0, False)

        rows.beat = silence
        async with batch_server(tokenizer, places[1], limits=FAST_BEATS) as (other, reader):
            ended = await until(reader, batch.id)
            assert other.engine._counts["add"] == 30
            away.set()
            silent.engine.release()
            await until(client, batch.id)
            await check_ended(client, ended, [f"id-{i}" for i in range(30)])
            chat = await client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
            assert chat.choices[0].text


async def send(server: Served, key: str) -> Any:
    async with client_of(server, api_key=key) as client:
        return await client.completions.create(model=MODEL, prompt="hi", max_tokens=4)


@pytest.mark.slow
@pytest.mark.postgres
async def test_servers_share_keys_limits_and_usage(
    postgres: PostgresServer, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tidemill keys` reaches all servers; they divide a limit, add usage, and go on while the database is away."""
    objects = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: objects)
    monkeypatch.setattr("tidemill.commands.state.find_state", lambda _: Place(tmp_path, postgres.address, "s3://b/p"))
    places = [Place(tmp_path / name, postgres.address, "s3://b/p") for name in "ab"]
    options: Any = {"limits": FAST_BEATS, "hold_after": 0, "host": "0.0.0.0", "state_dir": "postgresql://"}

    def seen(server: Served) -> int:
        divided = server.app.state.context.admissions._divided
        return divided["acme"].elsewhere.requests if "acme" in divided else 0

    async def usage(server: Served) -> Any:
        async with httpx.AsyncClient(headers={"authorization": "Bearer old"}, trust_env=False) as http:
            (row,) = (await http.get(f"{server.url}/v1/usage")).json()["tenants"]
        return row

    def put(*lines: str) -> None:
        assert main(["keys", keys_of(tmp_path, *lines), "postgresql://"]) == 0

    folder, keys = await asyncio.to_thread(open_state, places[0]), KeyStore()
    with pytest.raises(ConfigError, match="has no keys or is away"):
        await TenantExchange(folder, keys, Admissions(keys.quota), "0.0.0.0", 1.0, asyncio.Event().wait).start()
    await folder.close()
    await asyncio.to_thread(put, "old acme requests=4 # sk-secret")
    async with AsyncExitStack() as stack:
        one, two = [(await stack.enter_async_context(batch_server(tokenizer, each, **options)))[0] for each in places]
        busy = [asyncio.create_task(send(one, "old")) for _ in range(4)]
        await one.engine.wait_for_event("add", 4)
        await eventually(lambda: seen(two) == 4)
        busy += [asyncio.create_task(send(two, "old")) for _ in range(2)]  # its part of four
        await two.engine.wait_for_event("add", 2)
        with pytest.raises(openai.RateLimitError, match=r"'requests=4' .*: 6 requests are in flight"):
            await send(two, "old")
        await eventually(lambda: seen(one) == 2)
        with pytest.raises(openai.RateLimitError, match="'requests=4'"):
            await send(one, "old")
        for server in (one, two):
            assert (await usage(server))["running_requests"] == 6
        for server in (one, two):
            server.engine.release()
        used = [(await each).usage for each in busy]
        await eventually(lambda: not one.app.state.context.admissions._divided)
        for server in (one, two):
            row = await usage(server)
            assert row["requests"]["output_tokens"] == sum(each.completion_tokens for each in used) > 0
        await asyncio.to_thread(put, "new acme")
        for server in (one, two):
            await eventually(lambda server=server: server.app.state.context.keys.ring.find(b"old") is None)
            assert (await send(server, "new")).choices
            with pytest.raises(openai.AuthenticationError):
                await send(server, "old")
        await asyncio.to_thread(postgres.kill)
        assert await asyncio.to_thread(main, ["keys", str(tmp_path / "keys"), "postgresql://"]) == 2
        assert (await send(one, "new")).choices and (await send(two, "new")).choices
    async with batch_server(tokenizer, places[0], **options) as (served, _):
        assert "secret" not in (places[0].folder / "keys").read_text()
        served.engine.release()
        assert (await send(served, "new")).choices, "the keys are those of the folder"
        await asyncio.to_thread(postgres.start)
        tenants = served.app.state.batches.tenants
        await eventually(lambda: bool(tenants._version) and not tenants.usage)
