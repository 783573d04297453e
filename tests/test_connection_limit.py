"""Connections are bounded: descriptors stay free, and a server whose places are taken still says that it lives."""

import asyncio
import contextlib
import json
import resource
import subprocess
import sys

import httpx
import pytest
from fake_engine import MODEL, Served
from fixtures import StartServer
from test_server_limits import Raw, post

from gateway.http.connection import RESERVE, STANDING, ConnectionLimit, ProtocolLimits, connections_within

STREAM = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
PLACES = 6


class Peer:
    def __init__(self) -> None:
        self.gave_way = False

    def give_way(self) -> None:
        self.gave_way = True


def test_the_connection_that_waited_longest_for_a_request_gives_way() -> None:
    limit, peers = ConnectionLimit(3), [Peer() for _ in range(5)]
    assert all(limit.enter(peer) for peer in peers[:3])
    limit.begin(peers[0])
    limit.begin(peers[1])
    limit.end(peers[1])  # waits again, for a shorter time than the third
    assert limit.enter(peers[3]) and limit.enter(peers[4])
    assert [peer.gave_way for peer in peers] == [False, True, True, False, False]
    for peer in peers:
        limit.leave(peer)
    assert limit.enter(peers[1]) and not limit._standing and len(limit._inside) == 1


def test_a_new_connection_has_no_place_where_each_has_a_request(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limit, peers = ConnectionLimit(3, lambda: now), [Peer() for _ in range(3)]
    for peer in peers:
        limit.enter(peer)
        limit.begin(peer)
    late = [Peer() for _ in range(STANDING + 1)]
    for peer in late[:-1]:
        assert not limit.enter(peer) and limit.may_stand
    assert not limit.enter(late[-1]) and not limit.may_stand
    limit.leave(late[0])
    assert limit.may_stand
    limit.end(late[1])  # whose /health was answered: it gets no place by that
    limit.end(peers[0])
    assert limit.enter(Peer()) and peers[0].gave_way
    assert len(caplog.records) == 1, "one line a minute"


def test_a_refused_connection_gives_way_to_a_new_one_that_may_be_a_health_check() -> None:
    limit, busy = ConnectionLimit(1), Peer()
    limit.enter(busy)
    limit.begin(busy)
    late = [Peer() for _ in range(STANDING + 2)]
    for peer in late[:STANDING]:
        limit.enter(peer)
    limit.refuse(late[3])
    limit.refuse(late[1])
    for peer in late[STANDING:]:
        assert not limit.enter(peer) and limit.may_stand
    assert [index for index, peer in enumerate(late) if peer.gave_way] == [1, 3]
    limit.enter(Peer())
    assert not limit.may_stand and not limit._refused


@pytest.mark.parametrize("descriptors", [64, 160, 256, 1024, 65536])
def test_descriptors_are_left_for_everything_else(descriptors: int) -> None:
    places = connections_within(descriptors)
    assert places is not None and descriptors // 3 <= places < descriptors
    assert places + STANDING + RESERVE <= descriptors or places == descriptors // 3
    assert connections_within(None) is None


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource; from gateway.http.connection import raise_descriptor_limit as r; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); print(r(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "300 (300, 300)\n"


async def test_a_server_of_ours_is_bounded_by_its_descriptors(start_server: StartServer) -> None:
    served = await start_server()
    limits = served.server.config.http.limits  # type: ignore[union-attr]
    assert limits.max_connections == connections_within(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


async def open_idle(served: Served, count: int) -> list[Raw]:
    return [await Raw.open(served) for _ in range(count)]


async def test_idle_connections_keep_nobody_out(start_server: StartServer) -> None:
    served = await start_server(limits=ProtocolLimits(max_connections=PLACES))
    idle = await open_idle(served, 3 * PLACES)
    for raw in idle[-2:]:
        raw.send(b"GET /health HTT")  # half a request is none
    async with httpx.AsyncClient(base_url=served.url) as client:
        for _ in range(3):
            assert (await client.get("/health")).status_code == 200
    for raw in idle[: 2 * PLACES]:
        assert await asyncio.wait_for(raw.rest(), 5.0) == b""
    for raw in idle:
        await raw.close()


async def test_where_each_connection_has_a_request_only_health_is_served(start_server: StartServer) -> None:
    served = await start_server("hello world " * 50, limits=ProtocolLimits(max_connections=PLACES), hold_after=2)
    streams = await open_idle(served, PLACES)
    for raw in streams:
        raw.send(post(STREAM))
        await raw.reader.readuntil(b"\r\n\r\n")
    late = await Raw.open(served)
    late.send(post(STREAM))
    status, headers, body = await late.answer()
    assert status == 503 and headers["retry-after"] == "1" and headers["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    assert await asyncio.wait_for(late.rest(), 5.0) == b""
    for path in (b"/health", b"/ready?a=1"):
        asking = await Raw.open(served)
        asking.send(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
        status, headers, _ = await asking.answer()
        assert status == 200 and headers["connection"] == "close"
        await asking.close()
    many = await open_idle(served, 3 * STANDING)
    for raw in many:
        raw.send(post(STREAM))
    assert {(await raw.answer())[0] for raw in many} == {503}
    async with httpx.AsyncClient(base_url=served.url) as client:
        assert (await client.get("/health")).status_code == 200, "while the refused clients linger"
    await streams[0].close()
    assert await _until_served(served), "a place is free again"
    for raw in [*streams, late, *many]:
        await raw.close()


async def test_beyond_those_that_may_stand_a_connection_is_refused_unasked(start_server: StartServer) -> None:
    limits = ProtocolLimits(max_connections=1, standing_seconds=0.3)
    served = await start_server("hello world " * 50, limits=limits, hold_after=2)
    stream, *silent = await open_idle(served, 1)
    stream.send(post(STREAM))
    await stream.reader.readuntil(b"\r\n\r\n")
    silent = await open_idle(served, STANDING)
    late = await Raw.open(served)
    status, _, _ = await late.answer()
    assert status == 503
    for raw in silent:  # those that stand and say nothing are closed soon
        assert await asyncio.wait_for(raw.rest(), 10.0) == b""
    for raw in [stream, late, *silent]:
        await raw.close()


async def _until_served(served: Served) -> bool:
    for _ in range(200):
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=served.url) as client:
                if (await client.get("/v1/models")).status_code == 200:
                    return True
        await asyncio.sleep(0.02)
    return False
