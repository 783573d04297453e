"""The processes of this project: child processes that end with their parent, and the settings of the interpreter.

Child processes run with `-P`, so that files in the working directory cannot shadow modules. Packages are located by
path, so that they are also found in a source tree.

Nearly all objects are freed by reference counting. A collection of the older generations finds a few thousand objects
in minutes, and delays a token by 5 to 25 ms wherever it happens to start (seen on an H100's host). Therefore only young
objects are collected while requests run (about a millisecond), and all objects when the engine is idle.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.machine.output import drop_failed_lines

SOON, YOUNG = 700, 2_000
"""Numbers of new objects (created minus freed) after which `collect_due`, or the interpreter at any point, collects the
young generation."""
NEVER = 1 << 30
AT_REST, AT_MOST = 20, 1_000
"""Numbers of young collections after which all objects are collected: while idle, and in any case. The second bounds
the memory of leaked cycles to some hundred MB."""
SWITCH_SECONDS = 0.0002
"""Thread switch interval (Python's default is 5 ms). Planning a step would delay the launch of the previous one, which
needs the interpreter after each driver call; parsing a request body would delay the event loop."""
LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_LISTENING = "0A"  # state in /proc/net/tcp
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


def serve_socket(sock: socket.socket, lost: Callable[[], None]) -> None:
    """Set up a child process that only the other side of `sock` ends: it ignores the signals that ask for an end, and
    failures of its standard streams.

    `lost` is called in a thread when the other side has closed the socket, even while this process computes. This also
    covers kernels without `die_with_parent`, and a parent that ended before that call.
    """
    die_with_parent()
    sock.set_inheritable(False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    drop_failed_lines()
    faulthandler.enable()  # includes SIGABRT, with which the gateway requests the stacks of a silent process

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, select.POLLHUP | select.POLLERR)
        poll.poll()
        lost()

    threading.Thread(target=watch, name="tidemill-socket", daemon=True).start()


def settle() -> None:
    """Configure a process of this project, after its imports.

    Existing objects are excluded from collections: modules and a model are some 300,000 objects, which take 150 ms to
    collect. Later objects of older generations are collected by `collect_due` only.
    """
    atexit.register(gc.unfreeze)  # else nanobind, which Triton uses, reports every frozen function as a leak
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, NEVER, NEVER)
    sys.setswitchinterval(SWITCH_SECONDS)


def collect_due(*, at_rest: bool) -> None:
    """Collect young objects, or all objects since `settle`, if due. `at_rest`: no request is waiting."""
    young, collections, _ = gc.get_count()
    if collections >= (AT_REST if at_rest else AT_MOST):
        gc.collect()
    elif young >= SOON:
        gc.collect(0)


def listener_on(port: int) -> str:
    """Return "NAME (pid N)" of a process that listens on a TCP port, or "" if this user cannot see it."""
    inodes = set[str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = (line.split() for line in Path(table).read_text(encoding="ascii").splitlines()[1:])
            inodes |= {row[9] for row in rows if row[3] == _LISTENING and row[1].endswith(f":{port:04X}")}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in wanted:
                process = link.parents[1]
                return (
                    f"{(process / 'comm').read_text(encoding='utf-8', errors='replace').strip()} (pid {process.name})"
                )
    return ""
