"""Keys, sizes, deadlines and the end of the server: raw sockets, as clients that mean harm have no manners."""

import asyncio
import contextlib
import gc
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizer_folders
from batch_tools import batch_server
from driver import until
from fake_engine import MODEL, Served
from fixtures import StartServer
from support.http import send

from engine.api import FinishReason
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway.http.connection import ProtocolLimits
from gateway.server import ForcedExit, bind, notify

KEY = "sk-örtlich"
CHAT = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()


class Raw:
    """A connection of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, served: Served, receive_buffer: int | None = None) -> "Raw":
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", served.port))
        return cls(*await asyncio.open_connection(sock=connection, limit=2**24))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(status.split()[1]), headers, body

    async def rest(self) -> bytes:
        """Bytes until the server closes."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def post(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: localhost", b"content-type: application/json"]
    return b"\r\n".join([*lines, b"content-length: %d" % size, *headers, b"", b""]) + body


async def exchange(served: Served, data: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    raw = await Raw.open(served)
    raw.send(data)
    status, headers, body = await raw.answer()
    await raw.close()
    error = json.loads(body)["error"] if status >= 400 else {}
    assert not error or set(error) == {"message", "type", "param", "code"}
    return status, headers, error


# --- keys

WRONG_KEYS = {
    "none": b"",
    "wrong": b"authorization: Bearer sk-other",
    "prefix": b"authorization: Bearer " + KEY.encode()[:-1],
    "no scheme": b"authorization: " + KEY.encode(),
    "basic": b"authorization: Basic " + KEY.encode(),
    "empty": b"authorization: Bearer ",
    "two": b"authorization: Bearer x\r\nauthorization: Bearer " + KEY.encode(),
    "not utf-8": b"authorization: Bearer \xff\xfe\x80",
    "emoji": "authorization: Bearer 🙂".encode(),
    "a megabyte": b"authorization: Bearer " + b"x" * 2**20,
}


async def test_a_wrong_key_is_401_before_the_body_is_read(start_server: StartServer) -> None:
    """The body never comes: an answer at all shows that the server does not wait for it."""
    served = await start_server(api_key=("sk-first", KEY))
    for name, key in WRONG_KEYS.items():
        status, headers, error = await exchange(served, post(b"", *filter(None, [key]), length=1000))
        assert (status, error["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "bearer"), name
        assert "sk-" not in json.dumps(error), name
        assert error["message"].startswith("The API key is not valid" if key else "An API key is required"), name


async def test_a_base_url_without_the_version_names_the_path(start_server: StartServer) -> None:
    served = await start_server()
    async with httpx.AsyncClient(timeout=60, base_url=served.url) as client:
        for path in ("/chat/completions", "/models"):
            error = (await client.post(path, json={})).json()["error"]
            assert error["message"] == f"The resource does not exist; did you mean /v1{path}?", path
        for path in ("/nothing", "/v1/nothing", "/v1/v1/models"):
            assert (await client.post(path, json={})).json()["error"]["message"] == "The resource does not exist."
        for path, offer in (
            ("/v1/moderations", "/v1/chat/completions"),
            ("/v1/images/generations", "text only"),
            ("/v1/audio/speech", "text only"),
            ("/v1/fine_tuning/jobs", "--lora"),
            ("/v1/assistants", "POST /v1/responses"),
            ("/v1/vector_stores/vs_1/files", "/v1/embeddings"),
            ("/v1/responses/resp_1/cancel", "stores no responses"),
        ):
            answer = await client.post(path, json={})
            assert answer.status_code == 404 and offer in answer.json()["error"]["message"], path
        for path in ("/v1/responses/resp_1", "/v1/chat/completions/chatcmpl-1"):
            assert "The server stores no" in (await client.get(path)).json()["error"]["message"], path


async def test_an_unknown_model_is_answered_with_those_that_are_served(start_server: StartServer) -> None:
    served = await start_server(served_model_name=("one", "two"))
    answer = await send(served, "POST", "/v1/completions", json={"model": "gpt-4o", "prompt": "x"})
    assert answer.status_code == 404 and answer.json()["error"]["message"].endswith("which serves one, two.")


async def test_every_route_needs_a_key_but_health_and_ready(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with (
        batch_server(tokenizer, tmp_path, api_key=(KEY,)) as (served, _),
        httpx.AsyncClient(timeout=60, base_url=served.url) as client,
    ):
        paths = served.app.openapi()["paths"]
        assert {"/v1/chat/completions", "/metrics", "/v1/batches/{batch_id}/cancel"} <= paths.keys()
        routes = [(path, method) for path, methods in paths.items() for method in methods]
        for path, method in [("/openapi.json", "get"), *routes]:
            path = re.sub(r"{(\w+)}", r"\1", path)
            refused = await client.request(method.upper(), path)
            allowed = await client.request(method.upper(), path, headers={b"authorization": f"Bearer {KEY}".encode()})
            assert (refused.status_code == 401) == (path not in {"/health", "/ready"}), path
            assert allowed.status_code != 401, path
        for path in ("/nothing", "//metrics", "/health/../metrics", "/HEALTH", "/web/../metrics", "/web/x"):
            assert (await client.get(served.url + path)).status_code == 401, path
        for path in ("//health", "/health/"):
            assert (await client.get(served.url + path)).status_code == 200, path


async def test_a_trailer_is_no_header(start_server: StartServer) -> None:
    """In one packet, so that the trailer arrives before the headers are read."""
    served = await start_server(api_key=("sk-a",))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(CHAT), CHAT)
    for name in (b"Authorization: Bearer sk-a", b"Host: localhost"):
        status, _, error = await exchange(served, head + body + name + b"\r\n\r\n")
        assert (status, error["code"]) == (401, "invalid_api_key")
    key = b"authorization: Bearer sk-a\r\n"
    for trailer in (b"", b"Authorization: Bearer sk-other\r\n", b"Host: evil.example\r\nx: y\r\n"):
        assert (await exchange(served, head + key + body + trailer + b"\r\n"))[0] == 200, trailer
    assert (await exchange(served, head + key + body + b"x: y\r\n" * 500 + b"\r\n"))[0] in {200, 431}


# --- hosts and origins


async def ask(served: Served, *headers: str, version: str = "1.1") -> tuple[int, str]:
    raw = await Raw.open(served)
    raw.send("\r\n".join([f"GET /v1/models HTTP/{version}", *headers, "", ""]).encode())
    status, _, body = await raw.answer()
    await raw.close()
    return status, json.loads(body)["error"]["code"] if status >= 400 else ""


GOOD_HOSTS = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.9.9.9:80", "[::1]:8000"]
BAD_HOSTS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
    "[2001:db8::1]",
    "", "x y", "localhost:x", "localhost:8000:1", "user@localhost", "[::1", "http://localhost", "\xe9",
]  # fmt: skip


async def test_only_its_own_names_reach_a_server_on_loopback(start_server: StartServer) -> None:
    served = await start_server()
    for host in GOOD_HOSTS:
        assert await ask(served, f"Host: {host}") == (200, ""), host
    for host in BAD_HOSTS:
        assert await ask(served, f"Host: {host}") == (400, "invalid_host"), host
    assert await ask(served) == await ask(served, "Host: localhost", "Host: localhost") == (400, "invalid_host")
    assert await ask(served, version="1.0") == (200, "")
    status, _, error = await exchange(served, post(CHAT).replace(b"localhost", b"evil.example"))
    assert (status, error["code"]) == (400, "invalid_host") and "--allowed-host" in error["message"]
    assert not served.engine.requests


async def test_further_names_are_allowed_one_by_one(start_server: StartServer) -> None:
    served = await start_server(allowed_host=("Chat.example.com", "10.0.0.1"))
    for host in ("chat.example.com", "chat.example.com:443", "10.0.0.1", "localhost"):
        assert (await ask(served, f"Host: {host}"))[0] == 200, host
    assert (await ask(served, "Host: example.com"))[0] == (await ask(served, "Host: 10.0.0.2"))[0] == 400
    served = await start_server(allowed_host=("*",))
    assert (await ask(served, "Host: anything.example"))[0] == 200
    with pytest.raises(ConfigError, match="--allowed-host"):
        await start_server(allowed_host=("https://chat.example.com",))


async def test_beyond_loopback_a_key_is_what_counts(start_server: StartServer) -> None:
    """Other machines know this one by names that cannot be guessed, probes by an address; keys are required there."""
    served = await start_server(host="0.0.0.0", api_key=("sk-a",))
    for host in ("tidemill.default.svc:8000", "10.1.2.3:8000", "localhost"):
        assert await ask(served, f"Host: {host}", "Authorization: Bearer sk-a") == (200, "")
        assert await ask(served, f"Host: {host}") == (401, "invalid_api_key")
    served = await start_server(host="0.0.0.0", api_key=("sk-a",), allowed_host=("tidemill",))
    for host, status in (("tidemill:8000", 200), ("10.1.2.3:8000", 200), ("evil.example", 400)):
        assert (await ask(served, f"Host: {host}", "Authorization: Bearer sk-a"))[0] == status, host


async def test_pages_of_other_origins_are_refused(start_server: StartServer) -> None:
    served = await start_server(allowed_host=("chat.example.com",))
    here = f"localhost:{served.port}"
    for origin, status in (
        (f"http://{here}", 200),
        ("https://chat.example.com", 200),
        ("http://evil.example", 403),
        ("http://localhost:3000", 403),
        ("http://127.0.0.1", 403),
        ("null", 403),
        ("", 403),
    ):
        assert (await ask(served, f"Host: {here}", f"Origin: {origin}"))[0] == status, origin
    assert (await ask(served, "Host: localhost", "Origin: http://localhost:80"))[0] == 200
    for site, status in (("same-origin", 200), ("none", 200), ("same-site", 200), ("cross-site", 403)):
        assert (await ask(served, "Host: localhost", f"Sec-Fetch-Site: {site}"))[0] == status, site
    link = ("Host: localhost", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    assert (await ask(served, *link, "Sec-Fetch-Dest: document"))[0] == 200
    assert (await ask(served, *link, "Sec-Fetch-Dest: iframe"))[0] == 403
    status, _, error = await exchange(served, post(CHAT, b"origin: http://evil.example"))
    assert (status, error["code"]) == (403, "forbidden_origin") and not served.engine.requests


# --- sizes


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


async def test_a_body_that_is_announced_or_grows_too_large_is_413(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.app.MAX_BODY_BYTES", 2000)
    served = await start_server()
    for data in (post(b"", length=2001), CHUNKED + (b"320\r\n" + b" " * 800 + b"\r\n") * 3):
        status, _, error = await exchange(served, data)
        assert (status, error["code"]) == (413, "request_too_large")
    assert (await exchange(served, post(b"", length=10**30)))[0] in {400, 413}
    for data in (post(CHAT), CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)):
        assert (await exchange(served, data))[0] == 200


async def test_too_long_a_url_is_414(start_server: StartServer) -> None:
    """Whether it comes in one piece or in many; its query would be taken apart on the event loop."""
    served = await start_server()
    head = b"GET /v1/batches?" + b"a&" * 40_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for size in (len(head), 8000):
        raw = await Raw.open(served)
        for at in range(0, len(head), size):
            raw.send(head[at : at + size])
            await asyncio.sleep(0)
        status, _, body = await raw.answer()
        assert (status, json.loads(body)["error"]["code"]) == (414, "url_too_long")
        await raw.close()
    assert (await exchange(served, head.replace(b"a&" * 40_000, b"a&" * 20_000)))[0] != 414


@pytest.mark.parametrize(("begin", "endless"), [(b"1;", b"x" * 16384), (b"", b"0" * 16384), (b'1;a="', b'\\"' * 8192)])
async def test_a_body_of_framing_is_cut(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, begin: bytes, endless: bytes
) -> None:
    """An extension of a chunk, and zeros before its size, without an end."""
    monkeypatch.setattr("gateway.app.MAX_BODY_BYTES", 10_000)
    served = await start_server()
    raw = await Raw.open(served)
    raw.send(CHUNKED)
    await raw.writer.drain()
    await asyncio.sleep(0.05)  # the headers are a piece of their own
    raw.send(begin)
    for _ in range(12):  # 192 KiB
        raw.send(endless)
    status, _, body = await asyncio.wait_for(raw.answer(), 20)
    assert status == 400 and "framing" in json.loads(body)["error"]["message"]
    await raw.close()


async def test_a_refused_client_that_goes_on_is_cut(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.connection._MAX_DROPPED", 200_000)
    served = await start_server(limits=ProtocolLimits(linger_seconds=600.0))
    raw = await Raw.open(served)
    raw.send(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
    assert (await raw.answer())[0] == 400
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            raw.send(b"x" * 65536)
            await raw.writer.drain()
            await asyncio.sleep(0.01)
    await raw.close()


async def test_small_chunks_and_pipelined_bodies_are_no_framing(start_server: StartServer) -> None:
    """Five bytes for each character; and a long body in one piece with the headers of the next request."""
    served = await start_server()
    raw = await Raw.open(served)
    raw.send(CHUNKED)
    await asyncio.sleep(0.05)
    for at in range(0, len(CHAT), 16):
        raw.send(b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in CHAT[at : at + 16]))
        await asyncio.sleep(0.001)
    raw.send(b"0\r\n\r\n")
    assert (await raw.answer())[0] == 200
    long = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "user": "x" * 400_000}).encode()
    raw.send(post(long) + post(CHAT)[: -len(CHAT)])
    await asyncio.sleep(0.05)
    raw.send(CHAT)
    assert [(await raw.answer())[0] for _ in range(2)] == [200, 200]
    await raw.close()


async def test_bodies_held_at_once_are_bounded(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.app.MAX_HELD_BODIES", 1)
    monkeypatch.setattr("gateway.app.MAX_BODY_BYTES", 2000)
    served = await start_server(hold_after=0)
    first = await Raw.open(served)
    first.send(post(CHAT + b" " * 1500))
    await served.engine.wait_for_event("add")
    status, headers, error = await exchange(served, post(CHAT + b" " * 1500))
    assert (status, headers["retry-after"], error["type"]) == (503, "1", "server_error")
    served.engine.release()
    assert (await first.answer())[0] == 200
    assert (await exchange(served, post(CHAT + b" " * 1500)))[0] == 200
    await first.close()


SMALL = ProtocolLimits(max_header_bytes=1000, max_headers=20, linger_seconds=0.05)


# --- deadlines

HASTY = ProtocolLimits(header_seconds=0.1, body_seconds=0.1, min_body_rate=1_000_000, linger_seconds=0.05)
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
TOO_MUCH = {
    "one header": HEALTH + b"x: " + b"y" * 2000 + b"\r\n\r\n",
    "many headers": HEALTH + b"x: y\r\n" * 30 + b"\r\n",
    "address": b"GET /" + b"y" * 2000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "endless": HEALTH + b"x: " + b"y" * 100_000,
}
TOO_LATE = {"half a line": b"GE", "half a header": HEALTH[:27], "half a body": post(CHAT[:20], length=len(CHAT))}


@pytest.mark.parametrize(
    ("limits", "requests", "status", "code"),
    [(SMALL, TOO_MUCH, 431, "headers_too_large"), (HASTY, TOO_LATE, 408, "request_timeout")],
    ids=["large", "late"],
)
async def test_too_large_headers_and_half_requests_are_refused_and_cut(
    start_server: StartServer, limits: ProtocolLimits, requests: dict[str, bytes], status: int, code: str
) -> None:
    served = await start_server(limits=limits)
    for name, request in requests.items():
        raw = await Raw.open(served)
        raw.send(request)
        found, headers, body = await raw.answer()
        assert (found, json.loads(body)["error"]["code"]) == (status, code), name
        assert headers["connection"] == "close" and await raw.rest() == b"" and not served.engine.requests, name
        await raw.close()


async def test_a_connection_that_says_nothing_is_closed(start_server: StartServer) -> None:
    served = await start_server(limits=ProtocolLimits(silent_seconds=0.1))
    raw = await Raw.open(served)
    assert await raw.rest() == b""
    await raw.close()


async def test_who_connects_may_be_silent_for_longer_than_headers_may_take(start_server: StartServer) -> None:
    """A client that waits for its processor has connected already, and its request would meet a closed connection."""
    served = await start_server(limits=HASTY)
    raw = await Raw.open(served)
    await asyncio.sleep(3 * HASTY.header_seconds)
    raw.send(HEALTH + b"\r\n")
    assert (await raw.answer())[0] == 200
    await raw.close()


async def test_deadlines_end_with_the_request(start_server: StartServer) -> None:
    """An answer may take as long as it takes, and the connection serves the next request."""
    served = await start_server(limits=HASTY, hold_after=0)
    raw = await Raw.open(served)
    raw.send(post(CHAT))
    await served.engine.wait_for_event("add")
    await asyncio.sleep(3 * HASTY.body_seconds)
    served.engine.release()
    assert (await raw.answer())[0] == 200
    raw.send(post(CHAT))
    assert (await raw.answer())[0] == 200
    await raw.close()


async def test_a_reader_that_stalls_is_aborted(start_server: StartServer) -> None:
    """The kernel's buffers are small: the rest of the answer is never computed."""
    limits = ProtocolLimits(write_stall_seconds=0.1)
    served = await start_server("brown fox", limits=limits, max_model_len=10**6)
    fields = json.loads(CHAT) | {"stream": True, "ignore_eos": True, "max_tokens": 900_000}
    raw = await Raw.open(served, receive_buffer=4096)
    raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
    raw.send(post(json.dumps(fields).encode()))
    await served.engine.wait_for_event("abort")
    assert served.engine.aborts[0][1] is FinishReason.ABORT
    raw.writer.transport.abort()


async def test_a_slow_reader_is_not_a_stalled_one(start_server: StartServer) -> None:
    limits = ProtocolLimits(write_stall_seconds=0.2)
    served = await start_server("brown fox", limits=limits, max_model_len=10**6)
    fields = json.loads(CHAT) | {"stream": True, "ignore_eos": True, "max_tokens": 20_000}
    raw = await Raw.open(served)
    raw.send(post(json.dumps(fields).encode()))
    text = b""
    while not text.endswith(b"0\r\n\r\n"):
        text += await raw.reader.read(2**17)
        await asyncio.sleep(0.01)
    assert text.count(b"data: {") == 20_000 and b"[DONE]" in text
    await raw.close()


async def test_pipelined_requests_all_end_when_the_client_leaves(start_server: StartServer) -> None:
    served = await start_server(hold_after=0)
    raw = await Raw.open(served)
    raw.send(post(CHAT) + post(CHAT))
    await served.engine.wait_for_event("add")
    await raw.close()
    await served.engine.wait_for_event("abort")
    assert served.engine.num_open == 0 and len(served.engine.requests) == 1


async def test_pipelined_requests_are_answered_in_order(start_server: StartServer) -> None:
    served = await start_server()
    raw = await Raw.open(served)
    raw.send(post(CHAT) + HEALTH + b"\r\n" + post(b"{"))
    assert [(await raw.answer())[0] for _ in range(3)] == [200, 200, 400]
    await raw.close()


# --- the end


@pytest.mark.cpu_limit(8)  # a collection over all objects of the tests before
async def test_what_the_start_left_is_kept_from_the_garbage_collector(start_server: StartServer) -> None:
    """A full collection over all modules would stop every step; only a server with a process of its own may do that."""
    gc.unfreeze()  # a test before this one may have had a server that owned its process
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    await start_server()
    assert gc.get_freeze_count() == 0
    try:
        await start_server(owns_process=True)
        frozen = gc.get_freeze_count()
        assert frozen > 10_000 and len(gc.get_objects()) < frozen
        assert sys.getswitchinterval() < 0.001, "a thread that computes does not keep the event loop waiting"
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


async def test_draining_refuses_new_work_and_lets_the_old_end(start_server: StartServer) -> None:
    served = await start_server("hello world", hold_after=1, shutdown_timeout=60.0)
    running = asyncio.ensure_future(exchange(served, post(CHAT)))
    await served.engine.wait_for_event("token")
    served.server.handle_exit(signal.SIGTERM, None)
    status, headers, error = await exchange(served, b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (status, error["code"]) == (503, "service_unavailable") and int(headers["retry-after"]) > 0
    assert (await exchange(served, post(CHAT)))[0] == 503
    assert (await exchange(served, HEALTH + b"\r\n"))[0] == 200
    assert not running.done() and not served.server.should_exit
    served.engine.release()
    assert (await running)[0] == 200
    await served.engine.wait(lambda: served.engine.num_open == 0)


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_systemd_is_told_when_it_serves_and_when_it_ends(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"@{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0", 1))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        served = await start_server(shutdown_timeout=60.0)
        assert manager.recv(64) == b"READY=1"
        served.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: served.server.should_exit)
        assert manager.recv(64) == b"STOPPING=1"
    notify("READY=1")  # a manager that is gone is no error


async def test_it_drains_also_where_no_thread_is_to_be_had(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator stops a system that has run out of threads or memory."""

    def no_more(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    served = await start_server(owns_process=True, shutdown_timeout=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        served.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: served.server.should_exit)
    gc.unfreeze()


def test_the_last_resort_ends_a_process_at_the_first_of_its_times() -> None:
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    resort = ForcedExit(codes.put)
    resort.within(3600.0, 1)
    resort.within(0.0, 70)
    resort.within(3600.0, 2)
    assert codes.get(timeout=60.0) == 70
    spared = ForcedExit(codes.put)
    spared.within(3600.0, 1)
    spared.cancel()
    spared.within(0.0, 1)
    for thread in threading.enumerate():
        if thread.name == "tidemill-last-resort":
            thread.join(60.0)
    assert codes.empty()


async def test_what_does_not_end_in_time_is_ended(start_server: StartServer) -> None:
    served = await start_server("hello world", hold_after=1, shutdown_timeout=0.05)
    stream = json.dumps(json.loads(CHAT) | {"stream": True}).encode()
    raw = await Raw.open(served)
    raw.send(post(stream))
    await served.engine.wait_for_event("token")
    served.server.handle_exit(signal.SIGTERM, None)
    text = await raw.rest()
    assert b'"error":{' in text and b"[DONE]" not in text
    await raw.close()


def test_a_host_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind("no such host", 1)


SERVE = """
import sys
sys.path.insert(0, {tests!r})
import gateway.server
from fake_engine import FakeEngine, say
from engine.text.tokenizer import Tokenizer
from gateway.app import create_app
from gateway.config import ServerConfig
from gateway.server import run
tokenizer = Tokenizer.load({folder!r}, probe=False)
engine = FakeEngine(say(tokenizer, "hello", hold_after=1))
gateway.server.LAST_SECONDS = 0.5
config = ServerConfig(port=0, served_model_name=("fake-model",), shutdown_timeout=60.0)
run(create_app(engine, tokenizer, config), config)
"""


TESTS = Path(__file__).parent


async def started(*arguments: str) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
    """Start Python; return the process and its output stream; output and errors are one stream."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    assert process.stdout is not None
    return process, process.stdout


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
async def test_signals_to_a_real_process(tmp_path: Path, signals: int) -> None:
    """Idle: the first SIGTERM ends it with 0. With a request that does not end, the second one ends it at once."""
    folder = tokenizer_folders.byte_level(tmp_path / "tokenizer")
    process, written = await started("-c", SERVE.format(tests=str(TESTS), folder=str(folder)))
    port = await _logged(written, b"listening on http://127.0.0.1:")
    if signals == 2:
        _, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(post(CHAT))
        health, health_writer = await asyncio.open_connection("127.0.0.1", int(port))
        await _until_running(health, health_writer)
        process.send_signal(signal.SIGTERM)
        await _logged(written, b"draining")
        assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    rest = await written.read()
    assert await process.wait() == (0 if signals == 1 else 128 + signal.SIGTERM), rest.decode()
    if signals == 2:
        writer.close()
        health_writer.close()


@pytest.mark.slow
async def test_a_signal_ends_a_server_that_still_starts(tmp_path: Path) -> None:
    """With 0, as one that has drained, and by a handler: the kernel keeps signals without one from the first process of
    a container, which then was killed at the end of its grace."""
    flags = ["--port", "0", "--device", "cpu", "--profile-seconds", "60", "--state-dir", str(tmp_path / "state")]
    process, written = await started("-m", "gateway", "serve", *flags)
    await _logged(written, b"measuring step times")
    process.send_signal(signal.SIGTERM)
    rest = await written.read()
    assert await process.wait() == 0 and b"Traceback" not in rest, rest.decode()


SWALLOWS = """
import os, signal, sys
from engine.text.tokenizer import Tokenizer
load = Tokenizer.load
def swallows(*given):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    except BaseException:
        print("swallowed", file=sys.stderr)
    return load(*given)
Tokenizer.load = swallows
from tidemill.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
async def test_a_signal_ends_a_start_in_which_it_was_swallowed(tmp_path: Path) -> None:
    """As libraries do that are imported with a bare `except`, and what C calls back."""
    flags = ["--port", "0", "--device", "cpu", "--profile-seconds", "0", "--state-dir", str(tmp_path / "state")]
    process, written = await started("-c", SWALLOWS, "serve", *flags)
    text = (await written.read()).decode()
    assert await process.wait() == 0 and "swallowed\n" in text, text
    assert "Serving" not in text and "/v1" not in text and "Traceback" not in text, text


LAST_ACTS = {
    "dead": ("engine.die()", 70),  # the engine can never step again
    "hangs": ("engine.stop = lambda _seconds=0.0: asyncio.Event().wait()", 1),  # SIGTERM, and something never ends
}


@pytest.mark.slow
@pytest.mark.parametrize("fate", LAST_ACTS)
async def test_a_server_does_not_live_on_with_an_engine_that_is_lost(tmp_path: Path, fate: str) -> None:
    act, code = LAST_ACTS[fate]
    folder = tokenizer_folders.byte_level(tmp_path / "tokenizer")
    lines = SERVE.format(tests=str(TESTS), folder=str(folder)).strip().replace("60.0", "0.1").splitlines()
    lines[-1] = "sys.exit(run(create_app(engine, tokenizer, config), config))"
    script = "\n".join(["import asyncio", *lines[:-1], act, lines[-1]])
    process, written = await started("-c", script)
    await _logged(written, b"listening on http://127.0.0.1:")
    if fate == "hangs":
        process.send_signal(signal.SIGTERM)
    rest = await written.read()
    assert await process.wait() == code, rest.decode()


async def _logged(stream: asyncio.StreamReader, text: bytes) -> bytes:
    """The rest of the first line that holds `text`."""
    seen = b""
    while line := await stream.readline():
        seen += line
        if text in line:
            return line.partition(text)[2].strip()
    raise AssertionError(seen.decode())


async def _until_running(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask until the request has come through: only queued requests can delay the end."""
    raw = Raw(reader, writer)
    while True:
        raw.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        _, _, body = await raw.answer()
        if b'tidemill_requests_running{class="online"} 1' in body:
            return
