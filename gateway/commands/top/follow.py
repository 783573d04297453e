"""Data source of `tidemill top`: `/dashboard/history`, `/dashboard/events` and `/v1/batches`, like the dashboard page.

If the server cannot be reached, a line says so and the client reconnects. A wrong key or address ends the command.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live

from gateway.commands.batch_client import NOT_OPENAI, BatchClient
from gateway.commands.chat import ChatError, ChatOptions, RefusedError
from gateway.commands.top.history import is_complete
from gateway.commands.top.view import Picture

SILENCE_SECONDS = 15.0
RETRY_SECONDS = 2.0
BATCHES_EVERY = 2
BATCHES_SHOWN = 20
HOPELESS = frozenset({400, 401, 404, 421})
"""Statuses that a retry cannot change."""
NO_METRICS = 403


class TopClient(BatchClient):
    """Client of the dashboard and batch endpoints. Reads time out after SILENCE_SECONDS. Methods raise ChatError."""

    answer_seconds = SILENCE_SECONDS

    def snapshots(self) -> Iterator[dict[str, Any]]:
        """Yield a snapshot per second until the server ends the stream."""
        broken = "the connection to /dashboard/events broke"
        with self._open("GET", "/dashboard/events", broken) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    try:
                        yield json.loads(line.removeprefix("data:"))
                    except ValueError:
                        raise ChatError(broken) from None


def run_top(options: ChatOptions, out: TextIO | None = None, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show a server's figures until Ctrl-C, or once if the output is not a terminal; return the exit code.

    Raise ChatError if the server refuses the request, or cannot be reached for a single report. Raise ConfigError for
    an invalid URL.
    """
    out = out or sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # a name outside the terminal's encoding must not fail
    follower = StatsFollower(TopClient(options), Picture(options.url), sleep)
    if not out.isatty():
        follower.look()
        out.write(printed(follower.picture, shutil.get_terminal_size().columns, out.encoding or "ascii"))
        return 0
    console = Console(file=out, highlight=False, markup=False, emoji=False)
    with (
        suppress(KeyboardInterrupt),  # the way to leave; `Live` restores the terminal
        Live(follower.picture, console=console, screen=True, auto_refresh=False) as live,
    ):
        follower.run(live.refresh)
    return 0


def printed(picture: Picture, width: int, encoding: str = "utf-8") -> str:
    """Render the picture without colours, as lines of at most `width` columns."""
    buffer = TextIOWrapper(BytesIO(), encoding=encoding, errors="replace")
    console = Console(
        file=buffer, width=width, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False
    )
    with console.capture() as capture:
        console.print(picture)
    text = "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
    return text.encode(encoding, "replace").decode(encoding)


class StatsFollower:
    """Update a picture from a server."""

    def __init__(self, client: TopClient, picture: Picture, sleep: Callable[[float], None] = time.sleep) -> None:
        self.client = client
        self.picture = picture
        self._sleep = sleep

    def look(self) -> None:
        """Load model, version, batches and history. Raise ChatError on failure."""
        self.picture.model = self.client.first_model()
        self.picture.version = str(self.client.call("GET", "/version").get("version", ""))
        self._batches()
        try:
            for snapshot in self.client.call("GET", "/dashboard/history").get("snapshots", ()):
                self._add(snapshot)
        except RefusedError as error:
            if error.status != NO_METRICS:
                raise
            self.picture.trouble = "this API key may see its own batches only; use an operator's key for the figures"

    def run(self, show: Callable[[], None]) -> None:
        """Follow the server forever, reconnecting after errors. Raise ChatError for statuses in HOPELESS."""
        while True:
            try:
                self.picture.trouble = self._follow(show)
            except RefusedError as error:
                if error.status in HOPELESS:
                    raise
                self.picture.trouble = f"{error.message}; trying again"
            except ChatError as error:
                self.picture.trouble = f"{error.message}; trying again"
            show()
            self._sleep(RETRY_SECONDS)

    def _follow(self, show: Callable[[], None]) -> str:
        """Follow one stream of snapshots to its end; return the message to show then."""
        self.picture.trouble = ""
        self.look()
        if self.picture.trouble:  # no figures for this key: show batches, updated at every retry
            return self.picture.trouble
        show()
        for number, snapshot in enumerate(self.client.snapshots(), start=1):
            self._add(snapshot)
            if number % BATCHES_EVERY == 0:
                self._batches()
            show()
        return "the server ended the stream; reconnecting"

    def _add(self, snapshot: Any) -> None:
        if not is_complete(snapshot):
            raise ChatError("this version cannot read the server's figures; use the server's version of tidemill")
        self.picture.history.add(snapshot)

    def _batches(self) -> None:
        try:
            self.picture.batches = self.client.call("GET", "/v1/batches", limit=BATCHES_SHOWN)["data"]
        except RefusedError as error:
            if error.status != 404:
                raise
            self.picture.batches = None  # this server has no batch API
        except LookupError:
            raise ChatError(NOT_OPENAI) from None
