"""An engine in a process of its own with a real, tiny decoder and a real disk tier, whose writes go as a script says.

    python -P tests/disk_child.py FOLDER FAULT DESCRIPTOR

The disk's file is in FOLDER/disk. FAULT is for the first process alone: `slow` (each write takes a while), `never` (the
first one does not end), `full` (the disk refuses each) or `kill-N` (SIGKILL in the middle of write N); or for all of
them: `steps` (they are slow).
"""

import errno
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import test_disk_tier  # noqa: E402

from engine.api import EngineInfo  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.execution import disk  # noqa: E402
from engine.process import child, frames  # noqa: E402
from engine.scheduling.output import Collect, SchedulerOutput  # noqa: E402

SLOW_SECONDS = 0.05
STEP_SECONDS = 0.05
DISK_UNITS = 120
CONTEXT = 64


class FaultyDisk(disk.DiskTier):
    fault = ""
    num_writes = 0

    def _put(self, slot: int, label: disk.Label, data: bytes) -> None:
        FaultyDisk.num_writes += 1
        if self.fault == "slow":
            time.sleep(SLOW_SECONDS)
        elif self.fault == "never":
            time.sleep(3600.0)
        elif self.fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        elif self.fault == f"kill-{self.num_writes}":
            whole = label.pack(memoryview(data)) + data
            os.pwrite(self._file, whole[: len(whole) // 2], self._at(slot))
            os.kill(os.getpid(), signal.SIGKILL)
        super()._put(slot, label, data)


def prepare(launch: frames.Launch) -> frames.Planned:
    return frames.Planned(launch.config.model, ())


def main(folder: Path, fault: str, descriptor: int) -> None:
    first = not (folder / "disk").exists()
    FaultyDisk.fault = fault if first else ""

    def build(config: EngineConfig, planned: child.Plan) -> Engine:
        planned(frames.Planned(config.model, ()))
        setattr(test_disk_tier, "DiskTier", FaultyDisk)  # noqa: B010
        driver = test_disk_tier.real(folder / "disk" if config.disk_space else None, blocks=60, disk_units=DISK_UNITS)
        if fault == "steps":
            launch = driver.runner.launch

            def slowly(output: SchedulerOutput) -> Collect:
                time.sleep(STEP_SECONDS)
                return launch(output)

            driver.runner.launch = slowly  # type: ignore[method-assign]
        info = EngineInfo(CONTEXT, 97, frozenset(), "tiny", "float32", "cpu", 0, cache_tokens=240, block_size=4)
        info = replace(info, keeps_chats=True)
        return Engine(driver.core, driver.runner, info)

    child.run(socket.socket(fileno=descriptor), build, prepare, lambda *_: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
