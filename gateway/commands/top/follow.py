"""Reads a server for `tidemill top` as the page does: `/dashboard/history`, `/dashboard/events`, `/v1/batches`.

A server that is away is said in one line and asked again; a wrong key or address ends. Only the standard library, rich
for the drawing.
"""

import http.client
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from io import BytesIO, TextIOWrapper
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live

from gateway.commands.batch_client import BatchClient
from gateway.commands.chat import ChatError, ChatOptions, RefusedError
from gateway.commands.top.history import is_complete
from gateway.commands.top.view import Picture

SILENCE_SECONDS = 15.0
RETRY_SECONDS = 2.0
BATCHES_EVERY = 2
BATCHES_SHOWN = 20
HOPELESS = frozenset({400, 401, 404, 421})
"""Answers that will be the same the next time."""
NO_METRICS = 403


class TopClient(BatchClient):
    """Figures and batches of one server; a stream is silent for `SILENCE_SECONDS` at most. Raises ChatError."""

    answer_seconds = SILENCE_SECONDS

    def snapshots(self) -> Iterator[dict[str, Any]]:
        """A snapshot a second, until the server ends the stream."""
        with closing(self._connect()) as connection:
            response = self._request(connection, "GET", "/dashboard/events", None)
            try:
                for line in iter(response.readline, b""):
                    if line.startswith(b"data:"):
                        yield json.loads(line.removeprefix(b"data:"))
            except (OSError, ValueError, http.client.HTTPException):
                raise ChatError("the stream of figures broke off") from None


def run_top(options: ChatOptions, out: TextIO | None = None, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show a server until Ctrl-C, or once where the output is no terminal; returns the exit code.

    Raises ChatError where there is no server at the first print, or it refuses, and ConfigError for a wrong address.
    """
    out = out or sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # a name that the terminal cannot show must not end the picture
    follower = Follower(TopClient(options), Picture(options.url), sleep)
    if not out.isatty():
        follower.look()
        out.write(printed(follower.picture, shutil.get_terminal_size().columns, out.encoding or "ascii"))
        return 0
    console = Console(file=out, highlight=False, markup=False, emoji=False)
    with (
        suppress(KeyboardInterrupt),  # the way to leave; `Live` puts the terminal back
        Live(follower.picture, console=console, screen=True, auto_refresh=False) as live,
    ):
        follower.run(live.refresh)
    return 0


def printed(picture: Picture, width: int, encoding: str = "utf-8") -> str:
    """The picture as lines of at most `width` columns, without colours."""
    buffer = TextIOWrapper(BytesIO(), encoding=encoding, errors="replace")
    console = Console(
        file=buffer, width=width, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False
    )
    with console.capture() as capture:
        console.print(picture)
    text = "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
    return text.encode(encoding, "replace").decode(encoding)  # what it can show of names


class Follower:
    """Keeps a picture up to date."""

    def __init__(self, client: TopClient, picture: Picture, sleep: Callable[[float], None] = time.sleep) -> None:
        self.client = client
        self.picture = picture
        self._sleep = sleep

    def look(self) -> None:
        """What can be known at once. Raises ChatError."""
        self.picture.model = self.client.first_model()
        self.picture.version = str(self.client.call("GET", "/version").get("version", ""))
        self._batches()
        try:
            for snapshot in self.client.call("GET", "/dashboard/history").get("snapshots", ()):
                self._add(snapshot)
        except RefusedError as error:
            if error.status != NO_METRICS:
                raise
            self.picture.trouble = "this key sees its own batches, not the server's figures"

    def run(self, show: Callable[[], None]) -> None:
        """Follow for ever; a server that is away is asked again. Raises ChatError for what will not change."""
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
        """Until the stream ends; returns what to say then."""
        self.picture.trouble = ""
        self.look()
        if self.picture.trouble:  # no figures for this key: batches alone, by asking
            return self.picture.trouble
        show()
        for number, snapshot in enumerate(self.client.snapshots(), start=1):
            self._add(snapshot)
            if number % BATCHES_EVERY == 0:
                self._batches()
            show()
        return "the server ended the stream, connecting again"

    def _add(self, snapshot: Any) -> None:
        if not is_complete(snapshot):
            raise ChatError("the server gives no figures that this version can read")
        self.picture.history.add(snapshot)

    def _batches(self) -> None:
        try:
            self.picture.batches = self.client.call("GET", f"/v1/batches?limit={BATCHES_SHOWN}")["data"]
        except RefusedError as error:
            if error.status != 404:
                raise
            self.picture.batches = None  # this server keeps no files and batches
        except LookupError:
            raise ChatError("the server does not answer like an OpenAI server") from None
