"""Inject faults into a real engine process, for `python -m benchmarks chaos`. Off unless TIDEMILL_CHAOS names a folder.

While the folder holds a file `fail`, every step raises. If it holds a file `hang`, the next step removes it and hangs.
A step with a prompt that begins with `POISON` kills the process.
"""

import os
import signal
import time
from pathlib import Path

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
