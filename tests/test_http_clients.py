"""HTTP as clients really speak it: offers of HTTP/2, HTTP/1.0, HEAD, trailing slashes, marks before the body."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from fake_engine import MODEL, Served
from fixtures import StartServer
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz
from support.tables import for_each
from test_server_limits import CHAT, Raw, post
from uvicorn.server import ServerState

from engine.errors import ConfigError
from gateway.config import ServerConfig
from gateway.http.connection import GuardedProtocol

# --- offers of another protocol (RFC 9110 section 7.8)

OFFERS = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk",
    "tls": b"Connection: upgrade\r\nUpgrade: TLS/1.2",
    "websocket": b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13",
}


def chunked(body: bytes, *headers: bytes) -> bytes:
    half = len(body) // 2
    head = post(b"", b"transfer-encoding: chunked", *headers).replace(b"content-length: 0\r\n", b"")
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:], b""))


def packets(data: bytes, cut: str) -> list[bytes]:
    end = data.index(b"\r\n\r\n") + 4
    if cut == "whole":
        return [data]
    if cut == "head, body":
        return [data[:end], data[end:]]
    return [data[start : start + 7] for start in range(0, len(data), 7)]


@pytest.fixture
async def served(start_server: StartServer) -> Served:
    return await start_server("hello")


@for_each("cut", ["whole", "head, body", "pieces"])
@for_each("framing", [post, chunked])
@for_each("offer", OFFERS)
async def test_an_offer_of_another_protocol_keeps_the_body(served: Served, offer: str, framing: Any, cut: str) -> None:
    """The same answer as without the offer, on a connection that serves the requests behind it as well."""
    raw = await Raw.open(served)
    for headers in ([OFFERS[offer]], [], [OFFERS[offer]]):
        for packet in packets(framing(CHAT, *headers), cut):
            raw.send(packet)
            await raw.writer.drain()
        status, _, body = await raw.answer()
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"].startswith("hello")
    await raw.close()
    assert len({request.prompt_token_ids for request in served.engine.requests}) == 1


async def test_an_offer_with_a_broken_body_is_400(start_server: StartServer) -> None:
    served = await start_server("hello")
    for body in (post(b"{", OFFERS["h2c"]), chunked(CHAT, OFFERS["h2c"]).replace(b"\r\n0\r\n", b"\r\nx\r\n")):
        raw = await Raw.open(served)
        raw.send(body)
        assert (await raw.answer())[0] == 400
        await raw.close()


async def bodies_of(packets: list[bytes]) -> list[bytes]:
    """Return the bodies that an application reads from a connection."""
    heard: list[bytes] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        body, goes_on = b"", True
        while goes_on:
            message = await receive()
            body, goes_on = body + message["body"], message["more_body"]
        heard.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    transport = Mock(asyncio.Transport)
    transport.configure_mock(**{"get_extra_info.return_value": None, "get_write_buffer_size.return_value": 0})
    transport.is_closing.return_value = False
    protocol = GuardedProtocol(uvicorn.Config(app, ws="none", log_config=None), ServerState(), {})
    protocol.connection_made(transport)
    for packet in packets:
        protocol.data_received(packet)
    while protocol.tasks:
        await asyncio.gather(*protocol.tasks)
    protocol.connection_lost(None)
    return heard


requests = st.lists(
    st.tuples(st.sampled_from(["none", "length", "chunked"]), st.binary(max_size=30), st.booleans()), max_size=6
)


@fuzz(100)
@given(requests, st.lists(st.integers(1, 40), min_size=1))
def test_any_requests_in_any_packets_keep_their_bodies(asked: list[tuple[str, bytes, bool]], sizes: list[int]) -> None:
    def written() -> bytes:
        data = b""
        for framing, body, has_offer in asked:
            data += b"POST /x HTTP/1.1\r\nHost: a\r\n"
            if has_offer:
                data += b"Upgrade: h2c\r\nConnection: Upgrade\r\n"
            if framing == "length":
                data += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            elif framing == "chunked":
                chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
                data += b"Transfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % chunk
            else:
                data += b"\r\n"
        return data

    data, cut, number = written(), list[bytes](), 0
    while data:
        size = sizes[number % len(sizes)]
        cut.append(data[:size])
        data, number = data[size:], number + 1
    assert asyncio.run(bodies_of(cut)) == [body if framing != "none" else b"" for framing, body, _ in asked]


# --- HTTP/1.0, which has no chunks (RFC 9112 section 6.1)


async def old_request(served: Served, body: dict[str, Any]) -> tuple[bytes, bytes]:
    raw = await Raw.open(served)
    raw.send(post(json.dumps(body).encode()).replace(b" HTTP/1.1", b" HTTP/1.0"))
    head, _, rest = (await raw.rest()).partition(b"\r\n\r\n")
    await raw.close()
    return head.lower(), rest


async def test_a_stream_to_an_http_1_0_client_ends_with_the_connection(start_server: StartServer) -> None:
    served = await start_server("hello world")
    body = json.loads(CHAT)
    head, rest = await old_request(served, body | {"stream": True})
    assert b" 200 " in head and b"transfer-encoding" not in head and b"connection: close" in head
    events = rest.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""] and len(events) > 3
    assert all(json.loads(event.removeprefix(b"data: ")) for event in events[:-2])
    head, rest = await old_request(served, body)
    assert b"content-length: %d" % len(rest) in head and json.loads(rest)["model"] == MODEL


# --- HEAD, trailing slashes, byte order marks


async def paths_of(client: httpx.AsyncClient) -> list[str]:
    paths = (await client.get("/openapi.json")).json()["paths"]
    shown = [path for path, methods in paths.items() if "get" in methods and "{" not in path]
    return [*shown, f"/v1/models/{MODEL}", "/", "/web/app.js", "/dashboard/history"]


async def test_head_is_get_without_the_body(start_server: StartServer) -> None:
    served = await start_server()
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        for path in await paths_of(client):
            whole, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b""), path
            assert head.headers["content-type"] == whole.headers["content-type"]
            if path != "/metrics":  # the counters grow
                assert head.headers["content-length"] == whole.headers["content-length"]
        assert (await client.head("/v1/chat/completions")).status_code == 405
        assert (await client.head("/v1/nothing")).status_code == (await client.head("/v1/models/no")).status_code == 404


async def test_head_of_an_endless_stream_ends_it(start_server: StartServer) -> None:
    served = await start_server()
    raw = await Raw.open(served)
    for _ in range(2):
        raw.send(
            b"HEAD /dashboard/events HTTP/1.1\r\nhost: localhost\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        )
        head = await raw.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head and b"text/event-stream" in head
        assert (await raw.answer())[2] == b'{"status":"ok"}'
    await raw.close()


async def test_a_trailing_slash_is_the_same_path(start_server: StartServer) -> None:
    served = await start_server(api_key=("sk-a",))
    headers = {"authorization": "Bearer sk-a", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        assert (await client.get("/health/")).status_code == (await client.get("/ready//")).status_code == 200
        assert (await client.get("/v1/models/")).status_code == 401
        listed = await client.get("/v1/models/", headers=headers)
        answer = await client.post("/v1/chat/completions/", content=CHAT, headers=headers)
    assert listed.json()["object"] == "list" and answer.json()["object"] == "chat.completion"


@for_each("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_byte_order_mark_before_a_body_is_ignored(served: Served, path: str) -> None:
    served.engine.requests.clear()
    body = json.loads(CHAT) | {"max_tokens": 4}
    if path == "/v1/responses":
        body = {"model": MODEL, "input": "hi"}
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        for content in (json.dumps(body).encode(), b"\xef\xbb\xbf" + json.dumps(body).encode()):
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text
    assert len({request.prompt_token_ids for request in served.engine.requests}) == 1


# --- pages of other origins

ALLOWED = ("http://localhost:3000", "tauri://localhost", "vscode-webview://*", "null")
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-os"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_pages_of_allowed_origins_are_served(start_server: StartServer, site: str) -> None:
    """Preflights without a key; answers and errors that the page can read, streams included."""
    served = await start_server(allowed_origin=ALLOWED, api_key=("sk-a",))
    body = json.loads(CHAT)
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        for origin in ("http://localhost:3000", "tauri://localhost", "vscode-webview://1a2b3c", "null"):
            page = {"origin": origin, "sec-fetch-site": site, "sec-fetch-mode": "cors"}
            asked = await client.options("/v1/chat/completions", headers=page | PREFLIGHT)
            assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == origin
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert "authorization" in asked.headers["access-control-allow-headers"]
            for key, fields, status in (
                ("sk-a", {}, 200),
                ("sk-a", {"stream": True}, 200),
                ("x", {}, 401),
                ("sk-a", {"n": 0}, 400),
            ):
                headers = page | {"authorization": f"Bearer {key}"}
                answer = await client.post("/v1/chat/completions", json=body | fields, headers=headers)
                assert answer.status_code == status and answer.headers["access-control-allow-origin"] == origin
                assert (
                    answer.headers["access-control-expose-headers"] == "*"
                    and "access-control-allow-credentials" not in answer.headers
                )
    assert len(served.engine.requests) == 8


async def test_other_origins_stay_refused(start_server: StartServer) -> None:
    others = ("http://localhost:3001", "https://localhost:3000", "http://localhost:3000.evil.example", "", "x")
    others += ("vscode-webview://a/b", "http://evil.example/vscode-webview://a", "app://obsidian.md")
    for config in ({"allowed_origin": ALLOWED}, {}):
        served = await start_server(**config)
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            for origin in others if config else (*others, *ALLOWED):
                for method, headers in (("OPTIONS", PREFLIGHT), ("POST", {}), ("GET", {})):
                    path = "/v1/models" if method == "GET" else "/v1/chat/completions"
                    answer = await client.request(method, path, headers=headers | {"origin": origin})
                    assert answer.status_code == 403, (config, origin)
                    assert "access-control-allow-origin" not in answer.headers
            two = [("origin", "http://localhost:3000"), ("origin", "http://evil.example")]
            assert (await client.get("/v1/models", headers=two)).status_code == 403
            assert (await client.get("/v1/models", headers={"sec-fetch-site": "cross-site"})).status_code == 403
        assert not served.engine.requests


async def test_any_origin_may_be_allowed_but_not_any_host(start_server: StartServer) -> None:
    served = await start_server(allowed_origin=("*",))
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        page = {"origin": "https://any.example", "sec-fetch-site": "cross-site"}
        assert (await client.get("/v1/models", headers=page)).headers["access-control-allow-origin"] == page["origin"]
        assert (await client.get("/v1/models", headers=page | {"host": "evil.example"})).status_code == 400


@pytest.mark.parametrize(
    "origin", ["", "localhost:3000", "http://", "http://localhost/", "http://a b", "http://a,http://b/"]
)
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origin"):
        ServerConfig(allowed_origin=(origin,))
