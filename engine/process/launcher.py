"""Where the processes of one engine come from, one after another, and the next of them held while one runs."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

import engine
from engine.adapters import parse_adapters
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.machine.child import python_module, starter
from engine.machine.facts import Place, available_memory
from engine.process import frames
from engine.process.causes import start_error
from engine.process.supervisor import Child, ProcessEndpoint, remove

log = logging.getLogger("tidemill.engine")

CHILD = "engine.process.child"
HOLD_SECONDS = 120.0
"""The longest that a process may take to be ready to load."""
SPARE_ROOM = 1 << 31
"""Bytes that must be free on this machine for a spare process, which takes a tenth of that."""

TEXT = (".json", ".jinja", ".model", ".txt")
INDEX = ".index.json"
"""Says which file holds which weight, and belongs to them."""

EndpointT = TypeVar("EndpointT", bound=ProcessEndpoint)


@dataclass(frozen=True, slots=True)
class Source:
    """The files that an engine process was made of. The gateway has read the model's configuration and tokenizer, so
    these must be the same in the next process; weights and the engine's own code may differ.

    `files`: size and time of what weights, adapters and code are in; `texts`: digests of what the gateway has read,
    too."""

    files: dict[str, tuple[int, int]]
    texts: dict[str, str]

    @classmethod
    def of(cls, folder: Path, adapters: Iterable[Path] = ()) -> "Source":
        """What is there now, in the folder of the model and in those of its adapters. Raises OSError."""
        code = Path(engine.__file__).parent
        found = [path for path in folder.iterdir() if path.is_file()]
        texts = [path for path in found if path.suffix in TEXT and not path.name.endswith(INDEX)]
        beside = [path for each in adapters for path in each.iterdir() if path.is_file()]
        files = [path for path in found if path not in texts] + beside + list(code.rglob("*.py"))
        return cls({str(path): _stamp(path) for path in files}, {path.name: _digest(path) for path in texts})

    def refusal(self, later: "Source") -> str | None:
        """Why what is there later may not take over; None if it may."""
        names = sorted(self.texts.keys() | later.texts.keys())
        other = [name for name in names if self.texts.get(name) != later.texts.get(name)]
        return f"{', '.join(other)} differ from what the server has read: it must be started again" if other else None


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
        spawn: Callable[[frames.Launch], ProcessEndpoint] | None,
    ) -> None:
        self.launch = frames.Launch(config, log_level, place=place)
        self.source: Source | None = None
        self._config = config
        self._command = command or python_module(CHILD)
        self._spawn_elsewhere = spawn
        self._pid_file = pid_file
        self._folder: Path | None = None
        self._adapters = [each.folder for each in parse_adapters(config.lora)]
        self._held: Child | None = None
        self._is_spare = False
        self._holding = asyncio.Lock()

    def plan(self, planned: frames.Planned) -> None:
        """A model is loaded from its folder, or from none."""
        self.launch = msgspec.structs.replace(self.launch, waiting=planned.waiting)
        if planned.folder:
            self._folder = Path(planned.folder)
            self.source = Source.of(self._folder, self._adapters)

    def has_served(self) -> None:
        """What has served once is the same model on the same machine: no later start need be longer for a test."""
        self.launch = msgspec.structs.replace(self.launch, config=replace(self.launch.config, self_test=False))

    # Starting

    def spawn(self) -> ProcessEndpoint:
        """The next process: the one that is held, if it is ready: where it was disturbed it is slower than a new one.
        Raises OSError."""
        if self._spawn_elsewhere is not None:
            return self._spawn_elsewhere(self.launch)
        held, self._held = self._held, None
        if held is not None and self._is_spare and not held.has_spoken:
            end_now(held)
        elif held is not None:
            try:
                held.begin(self._pid_file)
            except OSError as error:
                log.warning("the engine process that was held is gone (%s)", error)
            else:
                return held
        return Child.spawn(self._command, self.launch, self._pid_file)

    async def start(self) -> ProcessEndpoint:
        """`spawn`, beside the event loop."""
        return await _beside(self.spawn)

    # Holding the next one

    @property
    def may_renew(self) -> bool:
        """Whether it is known what runs, and nothing is being renewed already."""
        return self._folder is not None and (self._held is None or self._is_spare)

    @property
    def holds_spares(self) -> bool:
        """Whether the next process can be there while one runs: elsewhere there is room for one only."""
        return self._spawn_elsewhere is None

    async def look(self) -> Source:
        """What the next process would be made of. Raises ConfigError where it may not take over."""
        assert self._folder is not None, "nothing is known of what runs"
        source = await asyncio.to_thread(Source.of, self._folder, self._adapters)
        refusal = self.source.refusal(source) if self.source is not None else None
        if refusal is not None:
            raise ConfigError(refusal)
        return source

    async def hold(self) -> None:
        """Make a process ready to begin at once, of what is there now. Raises what keeps it from that."""
        await self.drop()
        async with self._holding:
            launch = msgspec.structs.replace(self.launch, config=self._config, held=True)
            child = await _beside(lambda: Child.spawn(self._command, launch))
            self._held, self._is_spare = await asyncio.to_thread(_wait_until_ready, child), False

    async def keep_spare(self) -> None:
        """Have a process that imports what it needs and waits for the one that runs to die, if there is room for it."""
        async with self._holding:
            if self._held is not None or not self.holds_spares or available_memory() < SPARE_ROOM:
                return
            launch = msgspec.structs.replace(self.launch, held=True, spare=True)
            try:
                self._held = await _beside(lambda: Child.spawn(self._command, launch))
            except (OSError, RuntimeError) as error:
                log.warning("no spare engine process: %s", error)
            self._is_spare = True

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


def _wait_until_ready(child: Child) -> Child:
    child.sock.settimeout(HOLD_SECONDS)
    try:
        child.receive()
    except BaseException as error:
        end_now(child)
        raise (start_error(error) if isinstance(error, OSError) else error) from None
    child.sock.settimeout(None)
    return child


async def _beside(spawn: Callable[[], EndpointT]) -> EndpointT:
    """A process started beside the event loop; a cancellation ends it."""
    spawning = asyncio.get_running_loop().run_in_executor(starter, spawn)
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:  # it is started all the same, and nobody else knows of it
        await asyncio.to_thread(end_now, await spawning)
        raise


def end_now(child: ProcessEndpoint) -> None:
    child.kill()
    child.reap()
