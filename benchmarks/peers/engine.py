"""An engine to be measured as a value: its name, its command, and whether it serves HTTP.

Most stand behind their own server with OpenAI's completions; one without a server is a worker, spoken to by lines.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from benchmarks import live
from benchmarks.peers.in_process import working

LAST_LINES = 12
"""Lines shown of an engine that did not start."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine. `command` makes its command line from a folder with the checkpoint and a port (a worker needs none).
    `prepare` is a command that writes the checkpoint in the engine's own form, beside that folder."""

    name: str
    version: str
    command: Callable[[Path, int], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], list[str]] | None = None
    http: bool = True
    """A server; else a worker (`in_process`)."""
    ready: str = "/health"
    strict: bool = False
    """It refuses the fields that force a length; the checkpoint has no end anyway."""
    offline: dict[str, Any] | None = None
    """Fields of a request of the lower class; None for an engine without classes."""
    open: tuple[str, ...] = live.OPEN
    """Its metrics of requests that run or wait."""

    def settings(self) -> dict[str, Any]:
        """How a plan of the load generator differs for this engine."""
        return {"ignore_eos": not self.strict, **({"offline_body": self.offline} if self.offline else {})}

    def start(
        self, folder: Path, environment: Mapping[str, str], out: IO[bytes]
    ) -> AbstractContextManager[live.Served]:
        """Run until the end of the block with its output in `out`. Raises SystemExit where it does not start."""
        if self.prepare is not None:
            made = subprocess.run(
                self.prepare(folder), env=environment, cwd=folder.parent, stdout=out, stderr=out, check=False
            )
            if made.returncode:
                raise SystemExit("its form of the checkpoint could not be written")
        command = partial(self.command, folder)
        if self.http:
            return live.serving(command, environment, self.ready, folder=folder.parent, out=out)
        return working(command(0), environment, folder.parent, out)


def start_all(
    engines: Sequence[Engine], folder: Path, stack: ExitStack, *, required: bool = True
) -> Iterator[tuple[Engine, live.Served]]:
    """Start the engines one after the other; all run until the stack is closed.

    An engine that does not start is reported and left out; if `required`, the first one raises instead. The output of
    an engine goes to a file beside the checkpoint's folder.
    """
    for engine in engines:
        log = folder.parent / f"{engine.name.split()[0]}.log"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **engine.environment}
        out = stack.enter_context(log.open("wb"))
        try:
            yield engine, stack.enter_context(engine.start(folder, environment, out))
        except (SystemExit, OSError) as error:
            said = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            print(f"{engine.name} is left out: {error}; its last lines:", *said, sep="\n  ", flush=True)
            if required and engine is engines[0]:
                raise
