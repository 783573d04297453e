"""Python child processes that end with their parent.

They run with `-P`, so that files in the working directory cannot shadow modules. Packages are located by path, so that
they are also found in a source tree.
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
_thread = threading.local()


def _mark_starter() -> None:
    _thread.is_starter = True


starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-starter", initializer=_mark_starter)
"""A permanent thread, because the kernel ends a child together with the thread that started it."""
ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import runpy, sys; root, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "root in sys.path or sys.path.insert(0, root); runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this project like `python -m`."""
    return [sys.executable, "-P", "-c", _START, str(ROOT), module, *arguments]


def start_process(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a child process that may call `die_with_parent`, from any thread.

    Raises OSError, or RuntimeError if the first call cannot create the starter thread.
    """
    in_starter = getattr(_thread, "is_starter", False)  # its first work may run before the executor lists the thread
    if not in_starter:
        starter.submit(os.getpid).result()  # create the thread while the system can still provide one
    if in_starter or threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **options)
    return starter.submit(lambda: subprocess.Popen(command, **options)).result()


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends, even if stopped or in C code.

    Linux only. The caller must check whether the parent ended before this call.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with(parent: int) -> None:
    """End this process when its parent process `parent` ends, for any reason."""
    die_with_parent()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="tidemill-parent", daemon=True).start()
