"""`tidemill chat` against a scripted HTTP server."""

import builtins
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from engine.errors import ConfigError
from tidemill.client import ChatError, ChatOptions, ServerClient
from tidemill.commands.chat import run_chat


class Server(ThreadingHTTPServer):
    """Answers a chat request with `answer`: text pieces, or bytes sent as they are. `pause` holds the stream open."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: list[str | bytes] = ["one", " two"]
        self.pause: threading.Event | None = None
        self.status = 200
        self.client_gone = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client hangs up as soon as it has its answer
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(json.dumps({"object": "list", "data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers["Authorization"])
        if self.server.status != 200:
            self._reply(json.dumps({"error": {"message": "no such model"}}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in self.server.answer:
            self._chunk(piece if isinstance(piece, bytes) else event(piece))
        if self.server.pause is not None:
            self.server.pause = None
            assert self.rfile.read(1) == b"", "the client closes the connection"
            self.server.client_gone.set()
            self.close_connection = True
            return
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _reply(self, body: bytes) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def converse(monkeypatch: pytest.MonkeyPatch, options: ChatOptions, *lines: str) -> int:
    waiting = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    return run_chat(options)


def contents(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"]]


def test_a_conversation_keeps_its_history(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ChatOptions(server.url, api_key="k", system="be brief", max_tokens=9, temperature=0.5)
    assert converse(monkeypatch, options, "hello", "", "again", "/reset", "new", "/exit", "never sent") == 0
    assert capsys.readouterr().out.count("one two\n") == 3
    first, second, third = server.requests
    assert first == {
        "model": "first", "stream": True, "max_tokens": 9, "temperature": 0.5,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    }  # fmt: skip
    assert contents(second) == ["be brief", "hello", "one two", "again"]
    assert contents(third) == ["be brief", "new"]
    assert server.keys == ["Bearer k"] * 3


def test_only_what_was_asked_for_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, ChatOptions(server.url + "/v1/", model="second"), "hi") == 0
    assert server.requests[0].keys() == {"model", "messages", "stream"} and server.requests[0]["model"] == "second"
    assert server.keys == [None]


def test_usage_chunks_and_comments_are_no_text(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\n\n'
    server.answer = [b": ping\n\n", role, "é🙂", b'data: {"choices": [], "usage": {}}\n\n']
    converse(monkeypatch, ChatOptions(server.url), "hi")
    assert capsys.readouterr().out.startswith("é🙂\n")


@pytest.mark.parametrize(
    "answer",
    [
        ["part", b'data: {"error": {"message": "boom"}}\n\n'],
        [b"data: not json\n\n"],
        [b"data: [1]\n\n"],
        [b'data: {"choices": [{}]}\n\n'],
    ],
)
def test_an_answer_that_fails_leaves_the_conversation_as_it_was(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: list[str | bytes]
) -> None:
    server.answer = answer
    converse(monkeypatch, ChatOptions(server.url), "lost", "kept")
    assert contents(server.requests[1]) == ["kept"]
    assert capsys.readouterr().err.count("tidemill: ") == 2


def test_what_the_server_refuses_is_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 404
    converse(monkeypatch, ChatOptions(server.url, model="x"), "hi")
    assert capsys.readouterr().err == "tidemill: no such model\n"
    with pytest.raises(ChatError, match="status 404"):
        ServerClient(ChatOptions(server.url)).first_model()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:notaport"])
def test_a_wrong_url_is_a_wrong_flag(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        ServerClient(ChatOptions(url))


def test_ctrl_c_stops_the_answer_and_not_the_conversation(server: Server) -> None:
    """A real process and a real signal; the server sees the connection close."""
    server.pause = threading.Event()
    command = [sys.executable, "-m", "gateway", "chat", "--url", server.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"tell me\n")
        process.stdin.flush()
        assert process.stdout.read(7) == b"one two"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b" (stopped)\n"
        assert server.client_gone.wait(60)
        out, _ = process.communicate(b"go on\n/exit\n", timeout=60)
    assert process.returncode == 0 and out == b"one two\n"
    assert contents(server.requests[1]) == ["tell me", "one two", "go on"]
