"""First rank: starts the processes of the other ranks, sends them every step, and notices when one ends.

A failure between the start and the end of a step leaves the ranks in different states, which cannot be repaired here.
The engine ends, and a new engine starts all ranks again.
"""

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence

import torch

from engine.config import EngineConfig
from engine.errors import EngineUnavailableError
from engine.execution.layout import RankStep
from engine.execution.ranks.group import PLANNED, Meeting, RankGroup
from engine.execution.ranks.messages import FromRank, Join, RankFailed, decode_from_rank, encode
from engine.execution.rows import RowTable
from engine.limits import Limits
from engine.machine.link import Link, LinkLostError
from engine.machine.processes import python_module, start_process
from engine.scheduling.output import SchedulerOutput

log = logging.getLogger("tidemill.engine")

CHILD = "engine.process.rank"
END_SECONDS = 5.0
"""Maximum time for a rank to end after its link is closed."""
SAY_SECONDS = 1.0


class _Rank:
    """Another rank: its process, and this end of its link."""

    def __init__(self, number: int, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = start_process(
                [*python_module(CHILD), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self.number = number
        self.link = Link(ours)

    def receive(self) -> FromRank:
        """Return its next message. Raises EngineUnavailableError if it ended without one."""
        try:
            said: FromRank = decode_from_rank(self.link.receive())
        except LinkLostError:
            raise EngineUnavailableError(f"{self} ended ({self._how()})") from None
        return said

    def _how(self) -> str:
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it does not answer"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def __str__(self) -> str:
        return f"rank {self.number}"

    def end(self) -> None:
        """End the process, by force if necessary."""
        self.link.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RankLostError(RuntimeError):
    """A rank has ended, and steps of the others cannot complete."""


class Leader:
    """All ranks but the first, which is the runner's device; a StartingRank until all are created.

    `devices`: the CUDA device visible to each rank; empty on a CPU. Raises OSError if a process cannot be started.
    """

    rank = 0

    def __init__(self, config: EngineConfig, limits: Limits, devices: Sequence[str] = ()) -> None:
        self._size = config.tensor_parallel_size
        self._meeting = Meeting()
        self._others: list[_Rank] = []
        self._listening: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._in_step, self._closed = False, False
        self._why, self._gone = "", threading.Event()
        self._tell: Callable[[str], None] = lambda _why: None
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        try:
            for number in range(1, self._size):
                own = {"CUDA_VISIBLE_DEVICES": devices[number]} if devices else {}
                other = _Rank(number, os.environ | own)
                self._others.append(other)
                other.link.send(encode(Join(config, limits, number, self._meeting.port, level)))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [other.process.pid for other in self._others]

    def reached(self, stage: str) -> None:
        """See StartingRank."""
        for other in self._others:
            said = other.receive()
            if isinstance(said, RankFailed):
                raise said.error.to_error()
            assert said.stage == stage, f"rank {other.number} is at {said.stage}, not at {stage}"

    def join(self, device: torch.device) -> RankGroup:
        """See StartingRank."""
        self.reached(PLANNED)
        return RankGroup(self._meeting.store, self.rank, self._size, device, nccl=device.type == "cuda")

    def listen(self) -> None:
        """Start to watch the ranks after all are created; from now on they only report failures."""
        for other in self._others:
            thread = threading.Thread(target=self._listen, args=(other,), name=f"tidemill-{other}", daemon=True)
            thread.start()
            self._listening.append(thread)

    def _listen(self, other: _Rank) -> None:
        try:
            said = other.receive()
            why = (
                f"{other}: {said.error.message}"
                if isinstance(said, RankFailed)
                else f"{other} sent {said} unexpectedly"
            )
        except EngineUnavailableError as error:
            why = error.message
        with self._lock:
            if self._closed or self._why:
                return
            self._why, tell = why, self._tell
        self._gone.set()
        log.error("%s", why)
        tell(why)

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call `lost` with the reason, from another thread, when a rank has ended."""
        with self._lock:
            self._tell, why = lost, self._why
        if why:
            lost(why)

    def begin(self, output: SchedulerOutput, rows: RowTable) -> None:
        """Make the ranks run a step; `rows` already include it. Raises RankLostError."""
        message = encode(RankStep.of(output, rows))
        self._in_step = True
        for other in self._others:
            try:
                other.link.send(message)
            except LinkLostError:
                raise RankLostError(f"{other} has ended") from None

    def end(self) -> None:
        """Mark that the first rank has launched its part of the step."""
        self._in_step = False

    def lost(self) -> str | None:
        """Return, after a failed step, why the ranks cannot continue together; None if they can."""
        if not self._in_step and not self._why:
            return None
        self._gone.wait(SAY_SECONDS)  # a failed collective call may precede the message that a rank has ended
        return self._why or "a step failed on the first rank only, so the ranks are out of step"

    def close(self) -> None:
        """End the ranks. May be called repeatedly and from any thread."""
        with self._lock:
            self._closed = True
        for other in self._others:
            other.end()
        for thread in self._listening:
            thread.join()
