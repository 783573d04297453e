"""The progress line of a run: rewritten in place on a terminal, else a new line every few seconds."""

import sys
import time
from typing import TextIO

from loadgen.runner import Progress

PLAIN_EVERY = 5.0


class LiveLine:
    """Shows progress. `show` limits its own rate; `close` ends the line."""

    def __init__(self, horizon: float | None, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._horizon = horizon
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._quiet = quiet
        self._last = float("-inf")
        self._width = 0

    def show(self, progress: Progress) -> None:
        """Print the line if it is due."""
        if self._quiet:
            return
        if self._terminal:
            line = self.line(progress)
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif time.monotonic() - self._last >= PLAIN_EVERY:
            self._last = time.monotonic()
            self._stream.write(self.line(progress) + "\n")
        self._stream.flush()

    def line(self, progress: Progress) -> str:
        """Return the text of the line."""
        total = f"/{self._horizon:.0f}" if self._horizon else ""
        parts = [f"{max(0.0, progress.at):.0f}{total} s"]
        if progress.scheduled:
            parts.append(f"online {progress.finished}/{progress.sent} of {progress.scheduled}")
        if progress.offline_lines:
            parts.append(f"offline {progress.offline_finished}/{progress.offline_lines}")
        if progress.failed:
            parts.append(f"{progress.failed} failed")
        return " | ".join(parts)

    def close(self) -> None:
        """End the line on a terminal."""
        if self._terminal and not self._quiet and self._width:
            self._stream.write("\n")
            self._stream.flush()
