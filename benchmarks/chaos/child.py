"""An engine process with faults: the folder that TIDEMILL_CHAOS names requests them.

While the folder holds a file `fail`, every step raises. If it holds a file `hang`, the next step removes it and hangs.
A step with a prompt that begins with `POISON` kills the process. Run as `engine.process.child` is.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.process import child
from engine.scheduling.output import Collect, ModelRunner, SchedulerOutput

VARIABLE = "TIDEMILL_CHAOS"
POISON = (11, 13, 11, 13, 17, 11, 13, 11)


class SabotagedRunner:
    """A runner that injects faults before it calls the real one."""

    def __init__(self, runner: ModelRunner, folder: Path) -> None:
        self._runner = runner
        self._fail, self._hang = folder / "fail", folder / "hang"
        self._poisoned: set[int] = set()

    def launch(self, output: SchedulerOutput) -> Collect:
        """See ModelRunner.launch."""
        self._poisoned -= set(output.released_rows)
        self._poisoned |= {new.row for new in output.new_requests if new.token_ids[: len(POISON)] == POISON}
        if any(chunk.row in self._poisoned for chunk in output.chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._hang.exists():
            self._hang.unlink()
            time.sleep(3600.0)
        if self._fail.exists():
            raise RuntimeError("told to fail")
        return self._runner.launch(output)


def build(config: EngineConfig, planned: child.Plan) -> Engine:
    engine = child.build(config, planned)
    engine.runner = SabotagedRunner(engine.runner, Path(os.environ[VARIABLE]))
    return engine


if __name__ == "__main__":
    child.run(socket.socket(fileno=int(sys.argv[1])), build, child.prepare)
