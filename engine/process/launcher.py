"""Where the processes of one engine come from, one after another, and the next of them held while one runs."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.child import python_module
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.machine import Place
from engine.process import frames
from engine.process.renewal import Source
from engine.process.supervisor import Child, Endpoint, remove, start_error

CHILD = "engine.process.child"
HOLD_SECONDS = 120.0
"""The longest that a process may take to be ready to load."""


class Launcher:
    """`command` starts a process, its descriptor behind it, which runs at `place`; `spawn` starts such that are no
    children. `pid_file` holds the number of the one that runs. `launch`: what the next one is told; `source`: what the
    one that runs was made of, None until that is known."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_level: str,
        place: Place,
        pid_file: Path | None,
        command: Sequence[str] | None,
        spawn: Callable[[frames.Launch], Endpoint] | None,
    ) -> None:
        self.launch = frames.Launch(config, log_level, place=place)
        self.source: Source | None = None
        self._config = config
        self._command = command or python_module(CHILD)
        self._spawn_elsewhere = spawn
        self._pid_file = pid_file
        self._folder: Path | None = None
        self._held: Child | None = None

    def plan(self, folder: str) -> None:
        """A model is loaded from this folder, or from none."""
        if folder:
            self._folder = Path(folder)
            self.source = Source.of(self._folder)

    def has_served(self) -> None:
        """What has served once is the same model on the same machine: no later start need be longer for a test."""
        self.launch = msgspec.structs.replace(self.launch, config=replace(self.launch.config, self_test=False))

    # Starting

    def spawn(self) -> Endpoint:
        """The next process: the one that is held, if there is one. Raises OSError."""
        if self._spawn_elsewhere is not None:
            return self._spawn_elsewhere(self.launch)
        held, self._held = self._held, None
        if held is None:
            return Child.spawn(self._command, self.launch, self._pid_file)
        held.begin(self._pid_file)
        return held

    async def start(self) -> Endpoint:
        """`spawn`, beside the event loop."""
        spawning = asyncio.ensure_future(asyncio.to_thread(self.spawn))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:  # it is started all the same, and nobody else knows of it
            await asyncio.to_thread(end_now, await spawning)
            raise

    # Holding the next one

    @property
    def may_renew(self) -> bool:
        """Whether it is known what runs, and no other process is held already."""
        return self._folder is not None and self._held is None

    @property
    def holds_spares(self) -> bool:
        """Whether the next process can be there while one runs: elsewhere there is room for one only."""
        return self._spawn_elsewhere is None

    async def look(self) -> Source:
        """What the next process would be made of. Raises ConfigError where it may not take over."""
        assert self._folder is not None, "nothing is known of what runs"
        source = await asyncio.to_thread(Source.of, self._folder)
        refusal = self.source.refusal(source) if self.source is not None else None
        if refusal is not None:
            raise ConfigError(refusal)
        return source

    async def hold(self) -> None:
        """Make a process ready to begin at once. Raises what keeps it from that."""
        self._held = await asyncio.to_thread(self._make_ready)

    def kill(self) -> None:
        """End what is held, at once; nothing runs."""
        if self._held is not None:
            self._held.kill()
        remove(self._pid_file)

    def discard(self) -> None:
        """`kill`, and wait for its end."""
        held, self._held = self._held, None
        if held is not None:
            end_now(held)
        remove(self._pid_file)

    async def drop(self) -> None:
        """What is held will not be used."""
        held, self._held = self._held, None
        if held is not None:
            await asyncio.to_thread(end_now, held)

    def _make_ready(self) -> Child:
        launch = msgspec.structs.replace(self.launch, config=self._config, held=True)
        child = Child.spawn(self._command, launch)
        child.sock.settimeout(HOLD_SECONDS)
        try:
            child.receive()
        except BaseException as error:
            end_now(child)
            raise (start_error(error) if isinstance(error, OSError) else error) from None
        child.sock.settimeout(None)
        return child


def end_now(child: Endpoint) -> None:
    child.kill()
    child.reap()
