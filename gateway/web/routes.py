"""The dashboard page at `/`, its files under `/web/`, and its data at `/dashboard/history` and `/dashboard/events`.

The static files need no API key; the data endpoints are protected like /metrics. The content security policy allows
resources of this server only.
"""

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.health import check_sees_all
from gateway.http.errors import ApiError
from gateway.http.sse import EventStream
from gateway.web.recorder import Recorder

router = APIRouter(include_in_schema=False)

HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A static file with its headers."""

    content: bytes
    media_type: str
    etag: str


def load_files() -> dict[str, StaticFile]:
    """Return the static files by name."""
    files = {}
    for item in resources.files("gateway.web").joinpath("static").iterdir():
        media_type = _TYPES.get(item.name.rpartition(".")[2])
        if media_type is not None:
            content = item.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[item.name] = StaticFile(content, media_type, etag)
    return files


FILES = load_files()
OPEN_PATHS = frozenset({"/", *(f"/web/{name}" for name in FILES)})


@router.get("/")
async def page(request: Request) -> Response:
    return _send(request, "index.html")


@router.get("/web/{name}")
async def page_file(request: Request, name: str) -> Response:
    return _send(request, name)


@router.get("/dashboard/history")
async def history(request: Request) -> Response:
    check_sees_all(request)
    known = await _recorder(request).history()
    return Response(known, media_type="application/json", headers={"cache-control": "no-store"})


@router.get("/dashboard/events")
async def live(request: Request) -> Response:
    check_sees_all(request)
    return EventStream(_recorder(request).follow(), lambda: None)


def _recorder(request: Request) -> Recorder:
    return cast(Recorder, request.app.state.recorder)


def _send(request: Request, name: str) -> Response:
    file = FILES.get(name)
    if file is None:
        raise ApiError(404)
    headers = HEADERS | {"etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
