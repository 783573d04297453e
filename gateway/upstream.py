"""Batches in front of another server of OpenAI's API, such as vLLM with `tidemill-vllm`: it runs their lines.

The lines are sent as they are, with a priority behind that server's chats, and as many at once as it runs and some that
wait there. Files, batches, lanes and forecasts are those of any other server.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api import EngineRequest, FinishReason, Lane, RequestClass
from engine.client import EngineInfo, EngineState, EngineStats, OutputStream
from engine.errors import ConfigError, EngineUnavailableError
from gateway.batch.failures import BUSY_STATUS
from gateway.batch.line import LineAnswer, LineOrigin
from gateway.endpoints import ENDPOINTS
from gateway.http.errors import MESSAGES_PATH, ApiError
from gateway.store.objects import Usage

log = logging.getLogger("tidemill.gateway")

LOOK_SECONDS = 2.0
CONNECT_SECONDS = 10.0
RETRY_SECONDS = 5.0
"""Pause of a line whose server cannot be reached."""
UNKNOWN_RUNNING = 32
"""Maximum number of lines that a server without `/tidemill/slo` is taken to run at once."""
PRIORITIES: Mapping[Lane, int] = {Lane.FLEX: 10, Lane.AT_RISK: 20, Lane.BATCH: 30}
"""vLLM's priorities; chats have 0, and lower values go first."""
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
)
"""A host that vanishes ends its connections after a minute and a half; a line may run for hours."""


class Upstream:
    """The other server as an engine client whose requests are batch lines.

    url: its address, with or without `/v1`. key: its API key, if it needs one. `await_server` comes first.
    """

    MAX_LINES = 2048
    """Maximum number of lines that are sent at once."""

    def __init__(self, url: str, key: str | None = None) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client: httpx.AsyncClient | None = None
        self._looking: asyncio.Task[None] | None = None
        self._num_sent = 0
        self.models: tuple[str, ...] = ()
        self.info = EngineInfo(0, 0, frozenset(), "", "", self.url, 0)
        self.figures = EngineStats()
        """Requests that it runs, as of the last look."""
        self.trouble: str | None = None
        self._is_of_line = False
        """`trouble` lasts until a line succeeds: the server's other answers do not show it."""
        self.on_look: Callable[[], None] = lambda: None
        """Called after each look at the server."""

    def await_server(self, say: Callable[[str], None]) -> None:
        """Wait until the server lists its models. Raises ConfigError if it cannot be used."""
        said = False
        try:
            urlsplit(self.url).port  # noqa: B018 (raises)
        except ValueError as error:
            raise ConfigError(f"{self.url} is no address of a server: {error}") from None
        while True:
            try:
                response = httpx.get(f"{self.url}/v1/models", headers=self._headers, timeout=CONNECT_SECONDS)
                if response.status_code < 500:
                    break
                problem = f"it answers with status {response.status_code}"
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            if not said:
                say(f"waiting for {self.url}: {problem}")
                said = True
            time.sleep(LOOK_SECONDS)
        if response.status_code in (401, 403):
            raise ConfigError(f"{self.url} refuses the API key; set VLLM_API_KEY to the key of that server")
        try:
            found = [dict(each) for each in response.json()["data"]]
            self.models = tuple(str(each["id"]) for each in found)
        except (ValueError, LookupError, TypeError):
            found = []
        if not self.models:
            raise ConfigError(f"{self.url}/v1/models lists no model; give the address of a server of OpenAI's API")
        if found[0].get("owned_by") == "tidemill":
            raise ConfigError(f"{self.url} is a tidemill server, which runs batches itself; send them there")
        length = found[0].get("max_model_len")
        length = length if isinstance(length, int) else 0
        self.info = EngineInfo(length, 0, frozenset(), self.models[0], "", self.url, 0)

    def refusals(self) -> APIRouter:
        """Return routes that name the other server to requests that are not batches."""

        async def refuse(_: Request) -> Response:
            raise ApiError(404, f"This server runs batches only; send the request to {self.url}.", code="batches_only")

        router = APIRouter()
        for path in ENDPOINTS:
            router.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)
        return router

    # Lines

    async def run_line(self, endpoint: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
        """Return the server's answer to a line. Raises if the line has to run again: see `gateway.batch.failures`."""
        assert self._client is not None, "the server was not started"
        priority = PRIORITIES[origin.lane]
        sent = {**body, "model": body.get("model") or self.models[0]}
        if endpoint != MESSAGES_PATH:
            sent["priority"] = priority
        headers = {"Content-Type": "application/json", "X-Vllm-Priority": str(priority)}
        self._num_sent += 1
        try:
            response = await self._client.post(endpoint, content=orjson.dumps(sent), headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise self._unavailable(f"cannot be reached: {error or type(error).__name__}") from None
        finally:
            self._num_sent -= 1
        return self._answer(response)

    def _answer(self, response: httpx.Response) -> LineAnswer:
        status = response.status_code
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            answer = None
        message = _message(answer, status)
        if status in (401, 403):
            raise self._unavailable("refuses the API key; set VLLM_API_KEY to the key of that server", is_of_line=True)
        if status == 400 and "priority scheduling" in message.lower():
            raise self._unavailable("has no priorities; start it with --scheduling-policy priority", is_of_line=True)
        if status in BUSY_STATUS or status >= 500:
            raise ApiError(status, message, headers={"retry-after": response.headers.get("retry-after", "")})
        if not isinstance(answer, dict):
            raise ApiError(502, "The server's answer is no JSON object.")
        if status == 200:
            self._found(None)
        return LineAnswer(status, answer, _usage(answer.get("usage")))

    def _unavailable(self, problem: str, *, is_of_line: bool = False) -> EngineUnavailableError:
        self._found(f"{self.url} {problem}", is_of_line=is_of_line)
        return EngineUnavailableError(f"{self.url} {problem}", retry_after=RETRY_SECONDS)

    # The server

    async def _look(self) -> None:
        assert self._client is not None
        while True:
            try:
                response = await self._client.get("/v1/models", timeout=CONNECT_SECONDS)
                problem = None if response.status_code == 200 else f"answers with status {response.status_code}"
                told = await self._client.get("/tidemill/slo", timeout=CONNECT_SECONDS)
            except httpx.HTTPError as error:
                self._found(f"{self.url} cannot be reached: {error or type(error).__name__}")
            else:
                if problem is not None or not self._is_of_line:
                    self._found(None if problem is None else f"{self.url} {problem}")
                self.figures = _figures(told, self._num_sent)
            self.on_look()
            await asyncio.sleep(LOOK_SECONDS)

    def _found(self, trouble: str | None, *, is_of_line: bool = False) -> None:
        self._is_of_line = is_of_line
        if trouble != self.trouble:
            log.warning("%s", trouble or f"{self.url} answers again")
            self.trouble = trouble

    # EngineClient

    @property
    def state(self) -> EngineState:
        return EngineState.READY if self.trouble is None else EngineState.DEGRADED

    async def start(self) -> None:
        transport = httpx.AsyncHTTPTransport(
            socket_options=_KEEPALIVE, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
        )
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.AsyncClient(
            base_url=self.url, headers=self._headers, timeout=timeout, transport=transport, trust_env=False
        )
        self._looking = asyncio.create_task(self._look(), name="tidemill-upstream")

    async def stop(self, drain_seconds: float = 0.0) -> None:  # noqa: ARG002 (lines run again at the next start)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        if self._client is not None:
            await self._client.aclose()

    async def submit(self, requests: Sequence[EngineRequest]) -> Sequence[OutputStream]:  # noqa: ARG002
        raise EngineUnavailableError("This server runs batches only.")

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Do nothing: a cancelled line closes its connection."""

    def set_lane(self, job: str, lane: Lane) -> None:
        """Do nothing: the next lines of the job get the lane's priority."""

    async def stats(self) -> EngineStats:
        return self.figures

    async def wait_dead(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def renew(self, *, anyway: bool = False) -> str:  # noqa: ARG002
        return f"the engine is that of {self.url}, which is restarted there"

    def kill(self) -> None:
        """Do nothing: no process is ours."""


def _message(answer: Any, status: int) -> str:
    """Return the message of an error in OpenAI's form, in vLLM's older one, or a default."""
    if isinstance(answer, dict):
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else answer.get("message")
        if isinstance(message, str):
            return message
    return f"The server answered with status {status}."


def _usage(used: Any) -> Usage:
    """Return the token counts in the form of any endpoint; 0 for those that are not stated."""
    if not isinstance(used, dict):
        return Usage()

    def count(holder: Any, *names: str) -> int:
        values = [holder.get(name) for name in names] if isinstance(holder, dict) else []
        return next((value for value in values if isinstance(value, int) and value >= 0), 0)

    prompt = count(used, "prompt_tokens", "input_tokens")
    details = used.get("prompt_tokens_details") or used.get("input_tokens_details")
    cached = count(details, "cached_tokens") or count(used, "cache_read_input_tokens")
    outputs = used.get("completion_tokens_details") or used.get("output_tokens_details")
    output, thoughts = count(used, "completion_tokens", "output_tokens"), count(outputs, "reasoning_tokens")
    return Usage(prompt, min(cached, prompt), output, min(thoughts, output))


def _figures(told: httpx.Response, num_sent: int) -> EngineStats:
    """Return the requests that the server runs by `/tidemill/slo`, or by the number of lines that were sent."""
    running = waiting = None
    try:
        status = told.json() if told.status_code == 200 else {}
        running, waiting = int(status["offline_running"]), int(status["offline_waiting"])
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    offline = RequestClass.OFFLINE
    if running is None or waiting is None:
        return EngineStats(running={offline: min(num_sent, UNKNOWN_RUNNING)})
    return EngineStats(running={offline: running}, waiting={offline: waiting})
