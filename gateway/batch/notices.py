"""Report the end of each batch to the target of TIDEMILL_ON_BATCH_END: a command, or a URL that gets a signed event.
A batch that may miss its window is reported before, in the state `at_risk`: once for each start of the server, without
a second attempt.

A report is stored in the transaction that ends the batch, and removed after its last attempt, so that a crash loses
none; a crash during an attempt repeats it. The event has the form of OpenAI's webhooks (Standard Webhooks).
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import os
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import httpx
import orjson

from engine.errors import ConfigError
from gateway.http.errors import log_unexpected
from gateway.store.disk import StorageError
from gateway.store.objects import BatchJob, Notice
from gateway.store.row_store import RowStore

log = logging.getLogger("tidemill.gateway")

TARGET, SECRET = "TIDEMILL_ON_BATCH_END", "TIDEMILL_WEBHOOK_SECRET"
"""Environment variables: the command or URL, and the secret of a URL: `whsec_` and base64."""
SECRET_PREFIX, LEAST_SECRET_BYTES = "whsec_", 24
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Hosts that may be called without TLS."""
MAX_ATTEMPTS = 12
FIRST_PAUSE, PAUSE_FACTOR, MAX_PAUSE = 5, 4, 6 * 3600
"""Pauses between attempts in seconds: all attempts of a report take about 32 hours."""
AT_RISK = "at_risk"
OUTCOMES = ("delivered", "retried", "failed")
"""Outcomes of an attempt; after "failed" there is no further one."""
LONGEST_SLEEP = 60.0
"""Maximum seconds between two looks at the store, because the wall clock may jump."""
URL_SECONDS, COMMAND_SECONDS = 15.0, 600.0


@dataclass(frozen=True, slots=True)
class ReportTarget:
    """A `url` and its `secret`, or else the words of a `command`."""

    command: tuple[str, ...] = ()
    url: str = ""
    secret: bytes = b""


def read_target(environment: Mapping[str, str]) -> ReportTarget | None:
    """Return the target, or None without one. Raise ConfigError if it cannot be used."""
    text = environment.get(TARGET, "").strip()
    if text.lower().startswith(("https://", "http://")):
        return _read_url(text, environment.get(SECRET, "").strip())
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{TARGET} {text!r}: {error}; close the quotation") from None
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"{TARGET}: there is no program {words[0]}; give its path")
    return ReportTarget(words) if words else None


def _read_url(text: str, secret: str) -> ReportTarget:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{TARGET}: the URL is not valid: {error}") from None
    if not url.host or (url.scheme == "http" and url.host not in LOCAL_HOSTS):
        raise ConfigError(f"{TARGET} must be an https URL with a host, or a command")
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or len(key) < LEAST_SECRET_BYTES:
        make = f"make one: echo {SECRET_PREFIX}$(openssl rand -base64 32)"
        raise ConfigError(f"the URL of {TARGET} needs {SECRET}, {SECRET_PREFIX} and base64; {make}")
    return ReportTarget(url=text, secret=key)


class Notifier:
    """Send due reports one after the other; see `BackgroundWork`. Without a target, reports are dropped.

    A URL is called again after a failure, at most MAX_ATTEMPTS times; a command runs once."""

    def __init__(self, store: RowStore, target: ReportTarget | None, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._target = target
        self._clock = clock
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._warned: set[str] = set()
        self._warnings: set[asyncio.Task[None]] = set()
        self.attempts: Counter[str] = Counter()
        """Attempts by outcome, one of OUTCOMES."""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-notices")

    async def stop(self) -> None:
        """End the attempt in progress, which the next start repeats. Idempotent."""
        if self._task is not None:
            tasks = [self._task, *self._warnings]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Look for reports now: a batch has ended."""
        self._wake.set()

    def warn(self, batch: BatchJob) -> None:
        """Report a batch that has become at risk, unless it was reported already."""
        if self._target is not None and batch.id not in self._warned:
            self._warned.add(batch.id)
            now = int(self._clock())
            task = asyncio.create_task(self._warn(self._target, Notice(batch.id, batch.tenant, AT_RISK, now, 0, now)))
            self._warnings.add(task)
            task.add_done_callback(self._warnings.discard)

    async def _warn(self, target: ReportTarget, notice: Notice) -> None:
        failure = await (post_event(target, notice) if target.url else run_command(target, notice))
        self.attempts["delivered" if failure is None else "failed"] += 1
        if failure is not None:
            log.warning("batch %s: the report that it is at risk failed: %s", notice.batch, failure)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            seconds = float(FIRST_PAUSE)
            try:
                seconds = await self._send_due()
            except StorageError:
                pass  # look again later
            except BaseException as raised:
                log_unexpected(raised)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    async def _send_due(self) -> float:
        """Send all reports that are due, and return the seconds until the next one."""
        while (notice := await self._store.next_notice()) is not None:
            if (seconds := notice.due_at - self._clock()) > 0.0:
                return min(seconds, LONGEST_SLEEP)
            until = int(self._clock() + COMMAND_SECONDS) + FIRST_PAUSE
            if not self._store.is_shared or await self._store.claim_notice(notice, until):
                await self._attempt(notice)
        return LONGEST_SLEEP

    async def _attempt(self, notice: Notice) -> None:
        """Send a report; remove it after a success and after the last failure, else plan the next attempt."""
        target, attempts = self._target, notice.attempts + 1
        if target is None:
            await self._store.forget_notice(notice)
            return
        failure = await (post_event(target, notice) if target.url else run_command(target, notice))
        is_last = not target.url or attempts >= MAX_ATTEMPTS
        outcome = "delivered" if failure is None else "failed" if is_last else "retried"
        self.attempts[outcome] += 1
        if failure is not None:
            log.warning("batch %s: attempt %d to report its end failed: %s", notice.batch, attempts, failure)
        if outcome == "retried":
            seconds = min(MAX_PAUSE, FIRST_PAUSE * PAUSE_FACTOR ** (attempts - 1))
            await self._store.postpone_notice(notice, int(self._clock()) + seconds)
        else:
            await self._store.forget_notice(notice)


async def post_event(target: ReportTarget, notice: Notice) -> str | None:
    """Send OpenAI's event `batch.STATUS`; return why that failed, or None after a response with a 2xx status.

    The event's id is the same in every attempt, so that receivers can drop repetitions.
    """
    event_id, now = notice.batch.replace("batch_", "evt_", 1), int(time.time())
    if notice.status == AT_RISK:
        event_id += "_risk"
    kind, data = f"batch.{notice.status}", {"id": notice.batch}
    event = {"id": event_id, "object": "event", "created_at": notice.ended_at, "type": kind, "data": data}
    body = orjson.dumps(event)
    digest = hmac.digest(target.secret, b"%b.%d.%b" % (event_id.encode(), now, body), hashlib.sha256)
    headers = {
        "content-type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
    try:
        async with (
            asyncio.timeout(URL_SECONDS),
            httpx.AsyncClient(timeout=URL_SECONDS) as client,
            client.stream("POST", target.url, content=body, headers=headers) as response,
        ):
            return None if response.is_success else f"status {response.status_code}"
    except TimeoutError:
        return f"no response within {URL_SECONDS:g} s"
    except (httpx.HTTPError, OSError) as error:
        return f"{type(error).__name__}: {error}"


async def run_command(target: ReportTarget, notice: Notice, seconds: float = COMMAND_SECONDS) -> str | None:
    """Run the command without a shell, with its output on standard error; return why it failed, or None.

    Its last arguments are the batch's id and state, which are in TIDEMILL_BATCH_ID and TIDEMILL_BATCH_STATUS as well.
    TIDEMILL_BATCH_TENANT has the tenant. After the time limit, and when the server stops, the command and its children
    are killed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("TIDEMILL_API_KEY", SECRET)}
    environment["TIDEMILL_BATCH_ID"] = notice.batch
    environment["TIDEMILL_BATCH_STATUS"] = notice.status
    environment["TIDEMILL_BATCH_TENANT"] = notice.tenant
    words = (*target.command, notice.batch, notice.status)
    no_input, errors = asyncio.subprocess.DEVNULL, sys.stderr.fileno()
    try:
        process = await asyncio.create_subprocess_exec(
            *words, env=environment, stdin=no_input, stdout=errors, stderr=errors, start_new_session=True
        )
    except OSError as error:
        return f"{target.command[0]}: {error.strerror}"
    try:
        async with asyncio.timeout(seconds):
            code = await process.wait()
    except TimeoutError:
        return f"the command ran longer than {seconds:g} s"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return None if code == 0 else f"exit code {code}"
