"""A server that speaks the hub's endpoints for one repository: its listing, its files with ranges, its refusals."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlparse

from fixtures import http_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`refuse`: status and X-Error-Code of every answer. `cut_after`: bytes of a file after which the connection is
    closed, once a file. `broken`: files that are answered with 503. `ranges`: the requests for each file."""

    name: str
    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main", COMMIT)
    refuse: tuple[int, str] | None = None
    cut_after: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path = self.hub, unquote(urlparse(self.path).path)
        if hub.refuse is not None:
            return self.refuse(*hub.refuse)
        if path.startswith(f"/api/models/{hub.name}"):
            rest = path.removeprefix(f"/api/models/{hub.name}")
            revision = re.sub(r"^/(revision|tree)/", "", rest) or "main"
            if revision not in hub.revisions:
                return self.refuse(404, "RevisionNotFound")
            return self.send_json(self.tree() if rest.startswith("/tree/") else self.info())
        match = re.fullmatch(rf"/{hub.name}/resolve/[^/]+/(.+)", path)
        if match is None:
            return self.refuse(404, "RepoNotFound")
        if match[1] not in hub.files:
            return self.refuse(404, "EntryNotFound")
        if match[1] in hub.broken and body:
            return self.refuse(503, "Oops")
        return self.send_file(match[1], body)

    def info(self) -> dict[str, object]:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.hub.files.items()]
        return {"id": self.hub.name, "modelId": self.hub.name, "sha": COMMIT, "siblings": siblings}

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.hub.files.items()
        ]

    def send_file(self, name: str, body: bool) -> None:
        data = self.hub.files[name]
        wanted = self.headers.get("range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        if body:
            self.hub.ranges.append((name, wanted))
        self.send_response(206 if wanted and body else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if wanted and body:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        cut = self.hub.cut_after.pop(name, None)
        if cut is None:
            self.wfile.write(data[start:])
        else:
            self.wfile.write(data[start : start + cut])
            self.close_connection = True

    def send_json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """The hub on a port of its own; its address is in `url`."""
    with http_server(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub
