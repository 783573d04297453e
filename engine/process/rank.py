"""A process with one rank of a tensor-parallel model: a child of the engine process, which is the first rank.

    python -P -m engine.process.rank DESCRIPTOR

The process ends when the other side of its socket is closed. Before it ends by an error it sends `RankFailed`.
"""

import contextlib
import faulthandler
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

from engine.errors import EngineUnavailableError, ErrorInfo, TidemillError
from engine.execution.ranks import messages
from engine.machine import interpreter
from engine.machine.child import die_with_parent
from engine.machine.link import Link, LinkLostError

log = logging.getLogger("tidemill.engine")


class Seat:
    """A rank's side of the start: it reports the stages for which the first rank waits."""

    def __init__(self, link: Link, join: messages.Join) -> None:
        self._link, self._join = link, join
        self.rank = join.rank

    def reached(self, stage: str) -> None:
        """Report that this rank has reached a stage."""
        self._link.send(messages.encode(messages.Reached(stage)))

    def join(self, device: Any) -> Any:
        """Join the group of ranks on `device` and return it."""
        group: Any = importlib.import_module("engine.execution.ranks.group")
        self.reached(group.PLANNED)
        size = self._join.config.tensor_parallel_size
        store = group.find_meeting(self._join.port)
        return group.RankGroup(store, self.rank, size, device, nccl=device.type == "cuda")


def main(arguments: list[str]) -> None:
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine decides when this process ends
    die_with_parent()
    faulthandler.enable()
    threading.Thread(target=_watch, args=(sock,), name="tidemill-engine", daemon=True).start()
    link = Link(sock)
    try:
        run(link)
    except LinkLostError:
        return
    except TidemillError as error:
        failure = ErrorInfo.of(error)
    except BaseException as error:
        log.critical("a rank cannot go on", exc_info=error)
        failure = ErrorInfo.of(EngineUnavailableError(f"{type(error).__name__}: {error}"))
    with contextlib.suppress(LinkLostError):
        link.send(messages.encode(messages.RankFailed(failure)))


def run(link: Link) -> None:
    """Load this rank's part of the model and run steps. Raise LinkLostError when the link is closed."""
    join = messages.decode_join(link.receive())
    logging.basicConfig(level=join.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    interpreter.settle()
    build: Any = importlib.import_module("engine.build")  # imports torch
    follower = build.build_follower(join.config, join.limits, Seat(link, join))
    interpreter.settle()
    while True:
        follower.run(messages.decode_step(link.receive()))
        interpreter.collect_due(at_rest=False)


def _watch(sock: socket.socket) -> None:
    """End this process when the engine ends, even during a step or while weights are loaded."""
    poll = select.poll()
    poll.register(sock, select.POLLHUP | select.POLLERR)
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
