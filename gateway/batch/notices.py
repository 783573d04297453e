"""Report the end of each batch: run the command of TIDEMILL_ON_BATCH_END, and call the batch's webhook.

A report is stored in the transaction that ends the batch and removed after its last attempt, so that a crash loses
none. A crash during an attempt repeats it.
"""

import asyncio
import logging
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from engine.errors import ConfigError
from engine.panics import as_error
from gateway.batch.webhooks import SECRETS, Failure
from gateway.http.errors import log_unexpected
from gateway.store.disk import StorageError
from gateway.store.objects import Channel, Notice
from gateway.store.row_store import RowStore

log = logging.getLogger("tidemill.gateway")

COMMAND = "TIDEMILL_ON_BATCH_END"
"""Environment variable: the command to run when a batch has ended."""
MAX_ATTEMPTS = 12
FIRST_PAUSE, PAUSE_FACTOR, MAX_PAUSE = 5, 4, 6 * 3600
"""Pauses between attempts in seconds: all attempts of a report take about 32 hours."""
MAX_RUNNING = {Channel.COMMAND: 1, Channel.WEBHOOK: 8}
"""Maximum number of attempts at the same time."""
OUTCOMES = ("delivered", "retried", "failed")
"""Outcomes of an attempt; after "failed" there is no further one."""
LONGEST_SLEEP = 60.0
"""Maximum seconds between two looks at the store, because the wall clock may jump."""
COMMAND_SECONDS = 600.0
MAX_OUTPUT = 16 * 1024
"""Maximum bytes of a command's output in the log: its end."""


def read_command(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of the command, or () without one. Raise ConfigError if it cannot be run."""
    text = environment.get(COMMAND, "")
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{COMMAND} {text!r}: {error}; close the quotation") from None
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"{COMMAND}: there is no program {words[0]}; give its path")
    return words


def pause_after(attempts: int) -> int:
    """Return the seconds until the next attempt after `attempts` failed ones."""
    return min(MAX_PAUSE, FIRST_PAUSE * int(PAUSE_FACTOR ** (attempts - 1)))


class Sender(Protocol):
    """One channel."""

    async def send(self, notice: Notice) -> Failure | None: ...

    async def close(self) -> None: ...


class Notifier:
    """Send due reports; see `BackgroundWork`. Reports of a channel without a sender are dropped."""

    def __init__(
        self, store: RowStore, senders: Mapping[Channel, Sender], clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._senders = senders
        self._clock = clock
        self._wake = asyncio.Event()
        self._running: dict[tuple[str, Channel], asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.attempts: Counter[tuple[Channel, str]] = Counter()
        """Attempts by channel and outcome, one of OUTCOMES."""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-notices")

    async def stop(self) -> None:
        """End all attempts; the next start repeats them. Idempotent."""
        tasks = [*self._running.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sender in self._senders.values():
            await sender.close()

    def wake(self) -> None:
        """Look for reports now: a batch has ended."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            seconds = LONGEST_SLEEP
            try:
                await self._start_due()
                if (next_due := await self._store.next_notice(int(self._clock()))) is not None:
                    seconds = min(seconds, max(0.0, next_due - self._clock()))
            except StorageError:
                pass  # look again later
            except BaseException as raised:
                log_unexpected(as_error(raised))
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    async def _start_due(self) -> None:
        for channel, most in MAX_RUNNING.items():
            for notice in await self._store.due_notices(channel, int(self._clock()), 2 * most):
                num_running = sum(running is channel for _, running in self._running)
                key = (notice.batch, channel)
                if key not in self._running and num_running < most:
                    self._running[key] = asyncio.create_task(self._attempt(notice), name=f"tidemill-{channel}")

    async def _attempt(self, notice: Notice) -> None:
        until = int(self._clock() + COMMAND_SECONDS) + FIRST_PAUSE
        try:
            if self._store.is_shared and not await self._store.claim_notice(notice, until):
                return
            await self._settle(notice, await self._send(notice))
        except StorageError:
            await asyncio.sleep(FIRST_PAUSE)  # the attempt is repeated
        except BaseException as raised:
            log_unexpected(as_error(raised))
            await asyncio.sleep(FIRST_PAUSE)
        finally:
            del self._running[(notice.batch, notice.channel)]
            self.wake()

    async def _send(self, notice: Notice) -> Failure | None:
        sender = self._senders.get(notice.channel)
        if sender is not None:
            return await sender.send(notice)
        return None if notice.channel is Channel.COMMAND else Failure(f"{SECRETS} is not set", is_final=True)

    async def _settle(self, notice: Notice, failure: Failure | None) -> None:
        """Remove a report that was sent or that failed for the last time; otherwise plan the next attempt."""
        attempts = notice.attempts + 1
        if failure is None:
            self.attempts[notice.channel, "delivered"] += notice.channel in self._senders
            await self._store.forget_notice(notice)
            return
        is_last = failure.is_final or attempts >= MAX_ATTEMPTS
        self.attempts[notice.channel, "failed" if is_last else "retried"] += 1
        text = f"batch {notice.batch}: attempt {attempts} of the {notice.channel} failed: {failure.reason}"
        if is_last:
            await self._store.forget_notice(notice)
            log.error("%s; there is no further attempt", text)
            return
        seconds = pause_after(attempts)
        await self._store.postpone_notice(notice, int(self._clock()) + seconds)
        log.warning("%s; the next attempt is in %d s", text, seconds)


class CommandRunner:
    """Run the command of TIDEMILL_ON_BATCH_END without a shell.

    Its last arguments are the batch's id and state, which are in TIDEMILL_BATCH_ID and TIDEMILL_BATCH_STATUS as well.
    TIDEMILL_BATCH_TENANT has the tenant.
    """

    def __init__(self, words: Sequence[str], seconds: float = COMMAND_SECONDS) -> None:
        self._words = tuple(words)
        self._seconds = seconds

    async def close(self) -> None:
        """See `Sender`."""

    async def send(self, notice: Notice) -> Failure | None:
        """Run the command once and write its output to the log."""
        environment = {name: value for name, value in os.environ.items() if name not in ("TIDEMILL_API_KEY", SECRETS)}
        environment["TIDEMILL_BATCH_ID"] = notice.batch
        environment["TIDEMILL_BATCH_STATUS"] = notice.status
        environment["TIDEMILL_BATCH_TENANT"] = notice.tenant
        with tempfile.TemporaryFile() as output:  # not a pipe, which a process left behind would keep open
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*self._words, notice.batch, notice.status),
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return Failure(f"{self._words[0]}: {error.strerror}", is_final=True)
            failure = await self._wait(process)
            output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT))
            if text := output.read().decode("utf-8", "replace").strip():
                log.info("batch %s: the command printed: %s", notice.batch, text)
        return failure

    async def _wait(self, process: asyncio.subprocess.Process) -> Failure | None:
        """Wait for the end; kill the process and its children after the time limit and when the server stops."""
        try:
            async with asyncio.timeout(self._seconds):
                code = await process.wait()
        except TimeoutError:
            return Failure(f"the command ran longer than {self._seconds:g} s", is_final=True)
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return None if code == 0 else Failure(f"exit code {code}", is_final=True)
