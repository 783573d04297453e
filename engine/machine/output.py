"""Standard output and error that cannot end a server: a full disk, an ended reader or a closed terminal loses lines."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast


class TextOutput:
    """Text stream that records failed writes in `error`.

    With `drops` it discards the text and tries again with the next; otherwise it raises the error.
    """

    def __init__(self, stream: TextIO, *, drops: bool) -> None:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may contain bytes that are not UTF-8
        self._stream = stream
        self._drops = drops
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        with self._guard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guard():
            self._stream.flush()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            if not self._drops:
                raise

    def finish(self) -> None:
        """Write the buffered text, or discard it: the interpreter's exit must not fail on it. Raise as `flush` does."""
        try:
            self.flush()
        finally:
            if self.error is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_streams() -> None:
    """Open /dev/null for each closed standard descriptor, whose number a database would get, and with it log lines."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def drop_failed_lines() -> None:
    """Replace the standard streams of this process by streams that discard text that cannot be written."""
    sys.stdout, sys.stderr = (cast(TextIO, TextOutput(stream, drops=True)) for stream in (sys.stdout, sys.stderr))


@contextmanager
def dropping_stdout() -> Iterator[None]:
    """Discard output that cannot be written: the block's work is more than its output."""
    output = TextOutput(sys.stdout, drops=True)
    try:
        with redirect_stdout(cast(TextIO, output)):
            yield
    finally:
        output.finish()


def say(line: str) -> None:
    """Print a status line."""
    with suppress(OSError):
        print(f"tidemill: {line}", flush=True)
