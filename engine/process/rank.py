"""A process with one rank of a tensor-parallel model: a child of the engine process, which is the first rank.

    python -P -m engine.process.rank DESCRIPTOR

The process ends when the other side of its socket is closed. Before it ends by an error it sends `RankFailed`.
"""

import contextlib
import importlib
import logging
import os
import socket
import sys
from typing import Any

from engine.errors import EngineUnavailableError, ErrorInfo, TidemillError
from engine.execution.ranks import messages
from engine.machine.link import Link, LinkLostError
from engine.machine.processes import collect_due, serve_socket, settle

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
    serve_socket(sock, lambda: os._exit(1))
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
    settle()
    build: Any = importlib.import_module("engine.build")  # imports torch
    follower = build.build_follower(join.config, join.limits, Seat(link, join))
    settle()
    while True:
        follower.run(messages.decode_step(link.receive()))
        collect_due(at_rest=False)


if __name__ == "__main__":
    main(sys.argv[1:])
