"""A real server process around the scripted engine that can kill itself at a chosen operation of its disk.

    python batch_kill_server.py TOKENIZER_FOLDER STATE_DIR [KIND:NUMBER]

KIND is an operation of `Disk`, or `commit`. With NUMBER 2n the process is gone, as with `kill -9`, before the n-th of
them, with 2n - 1 after it. Knows nothing of the test that starts it.
"""

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, Script

from engine.api import EngineRequest
from engine.text.tokenizer import Tokenizer
from gateway.app import create_app
from gateway.batch.run import BatchLimits
from gateway.config import ServerConfig
from gateway.server import run
from gateway.store.disk import Disk
from gateway.store.folder import open_state


class DyingDisk(Disk):
    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self._kind, self._number = kind, number

    def count(self, kind: str, after: bool = False) -> None:
        if kind == self._kind and after is bool(self._number % 2):
            self._number -= 2
            if self._number <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, path: Path, data: Any, start: int) -> None:
        self.count("write")
        super().write(descriptor, path, data[: len(data) // 2], start)
        self.count("write", after=True)  # half of it is there
        super().write(descriptor, path, data, start)

    def sync(self, descriptor: int, path: Path) -> None:
        self.count("sync")
        super().sync(descriptor, path)
        self.count("sync", after=True)

    def rename(self, source: Path, target: Path) -> None:
        self.count("rename")
        super().rename(source, target)
        self.count("rename", after=True)

    def sync_folder(self, folder: Path) -> None:
        self.count("sync_folder")
        super().sync_folder(folder)
        self.count("sync_folder", after=True)

    def on_commit(self, _: sqlite3.Connection) -> None:
        self.count("commit")
        self.count("commit", after=True)


def main(tokenizer_folder: str, state_dir: str, death: str = "none:0") -> None:
    kind, _, number = death.partition(":")
    disk = DyingDisk(kind, int(number))
    tokenizer = Tokenizer.load(tokenizer_folder, probe=False)
    text = tokenizer.encode("ok")

    def script(_: EngineRequest) -> Script:
        return Script(text)

    engine = FakeEngine(script)
    config = ServerConfig(port=0, served_model_name=("fake-model",), shutdown_timeout=5.0)
    folder = open_state(Path(state_dir), disk)
    folder.store._writer.on_commit = disk.on_commit
    run(create_app(engine, tokenizer, config, folder, BatchLimits(window_lines=64)), config)


if __name__ == "__main__":
    main(*sys.argv[1:])
