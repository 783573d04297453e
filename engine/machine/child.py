"""Python processes of our own, which end with the process that started them.

With `-P`, so that no file in the working directory is taken for a module, whatever it is called; our packages are named
by their place, so that they are found from a source tree, too.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-starter")
"""One thread that lives as long as this process: the kernel ends a child with the thread that started it."""
ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import runpy, sys; root, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "root in sys.path or sys.path.insert(0, root); runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules, as `python -m` would."""
    return [sys.executable, "-P", "-c", _START, str(ROOT), module, *arguments]


def start_process(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a child process that may call `die_with_parent`, from any thread. Raises OSError, or RuntimeError if the
    first call cannot have a thread."""
    thread = threading.current_thread()
    in_starter = thread in starter._threads
    if not in_starter:
        starter.submit(os.getpid).result()  # the thread is there before the machine has none left to give
    if in_starter or thread is threading.main_thread():
        return subprocess.Popen(command, **options)
    return starter.submit(lambda: subprocess.Popen(command, **options)).result()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even while it is stopped or in C code.

    Linux only. A parent that ended before this call is for the caller to notice.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with(parent: int) -> None:
    """Have this process end with `parent`, the one that started it, however that one ended."""
    die_with_parent()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="tidemill-parent", daemon=True).start()
