"""Child processes: start and end, standard streams, framed messages, and long computations in a child.

Child processes end with their parent. They run with `-P`, so that files in the working directory cannot shadow modules.
Packages are located by path, so that they are also found in a source tree. A full disk, an ended reader or a closed
terminal loses lines of the standard streams, but does not end a server.

Each message between processes is preceded by its length in 8 bytes. `Link` is a blocking connection that carries whole
messages, such as pasts and activations, between threads of two processes; `framed` and `read_frame` are the same for
asyncio.

Nearly all objects are freed by reference counting. A collection of the older generations finds a few thousand objects
in minutes, and delays a token by 5 to 25 ms wherever it happens to start (seen on an H100's host). Therefore only young
objects are collected while requests run (about a millisecond), and all objects when the engine is idle.

`run_child` runs a function at low priority, so that it takes no time from steps. `python -m engine.machine.child
PRIORITY PARENT` reads the pickled function with its arguments and notes from standard input. It writes frames to
standard output, each a pickled (is result, value). It exits with its parent process PARENT.

Even at idle priority a child slows down steps that use all cores. A stopped child does not, so a child beside such
steps is stopped for most of the time in which chats run (`Duty`).

A child first runs at idle priority. If it gets at most LEAST_SHARE of a core in IDLE_SECONDS, not counting the time in
which it is stopped, the machine has no idle core. Then another child continues from the notes of the first at a low
regular priority, and is never stopped, until it is done. Only CPU time bounds a child: the kernel ends it after
CPU_SECONDS. The wait for a killed child is bounded, because exiting takes CPU time, too.
"""

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, TypeVar, cast

from engine.machine.activity import read_activity


class TextOutput:
    """Text stream that records failed writes in `error`.

    With `drops` it discards the text and tries again with the next; otherwise it raises the error.
    """

    def __init__(self, stream: TextIO, *, drops: bool) -> None:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may contain bytes that are not UTF-8
        self._stream = stream
        self._drops = drops
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        with self._guard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guard():
            self._stream.flush()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            if not self._drops:
                raise

    def finish(self) -> None:
        """Write the buffered text, or discard it: the interpreter's exit must not fail on it. Raise as `flush` does."""
        try:
            self.flush()
        finally:
            if self.error is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_streams() -> None:
    """Open /dev/null for each closed standard descriptor, whose number a database would get, and with it log lines."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def drop_failed_lines() -> None:
    """Replace the standard streams of this process by streams that discard text that cannot be written."""
    sys.stdout, sys.stderr = (cast(TextIO, TextOutput(stream, drops=True)) for stream in (sys.stdout, sys.stderr))


@contextmanager
def dropping_stdout() -> Iterator[None]:
    """Discard output that cannot be written: the block's work is more than its output."""
    output = TextOutput(sys.stdout, drops=True)
    try:
        with redirect_stdout(cast(TextIO, output)):
            yield
    finally:
        output.finish()


def say(line: str) -> None:
    """Print a status line."""
    with suppress(OSError):
        print(f"tidemill: {line}", flush=True)


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


HEADER = struct.Struct("<Q")
"""Length of the message that follows, in bytes."""


def framed(data: bytes) -> bytes:
    """Return a message with its header."""
    return HEADER.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next message. Raise asyncio.IncompleteReadError at the end of the stream, OSError if it is lost."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(length)


class LinkLostError(Exception):
    """The other side has closed the link, or this side has."""


class Link:
    """One end of a link. One thread may send while another receives; `close` wakes both, and the other side."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock

    def send(self, data: "bytes | bytearray | memoryview") -> None:
        """Send a message. Raises LinkLostError."""
        view = memoryview(data).cast("B")
        try:
            self._sock.sendall(HEADER.pack(len(view)))
            self._sock.sendall(view)
        except OSError as error:
            raise LinkLostError(str(error)) from None

    def receive(self) -> bytearray:
        """Return the next message. Raises LinkLostError."""
        (length,) = HEADER.unpack(self._read(HEADER.size))
        return self._read(length)

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            try:
                count = self._sock.recv_into(view[done:])
            except OSError as error:
                raise LinkLostError(str(error)) from None
            if not count:
                raise LinkLostError("the other side has closed the link")
            done += count
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


T = TypeVar("T")
IDLE_SECONDS, LEAST_SHARE = 60.0, 0.1
BUSY_SHARE, BURST, DUTY_SECONDS = 0.03, 2.0, 0.05
"""Share of the time in which a child runs beside chats, the least seconds at once, and the interval of decisions.

Few long bursts meet fewer chats than many short ones.
"""
CPU_SECONDS = 300
DEATH_SECONDS = 1.0
NICENESS = {"idle": 19, "low": 10}


class ChildError(Exception):
    """The child could not be started, failed or used too much CPU time; one line with the reason."""


class Turn(NamedTuple):
    """One attempt.

    `priority`: `idle`, `low` or `usual` (see `step_aside`). The next attempt continues if this one gets at most `share`
    of a core in `seconds`.
    """

    priority: str
    seconds: float = math.inf
    share: float = LEAST_SHARE


class Duty:
    """Decides when a child runs: always without chats; beside chats for BUSY_SHARE of the time, BURST at once."""

    def __init__(self) -> None:
        self.runs = True
        self._credit = 0.0

    def decide(self, busy: bool, passed: float) -> bool:
        """Return whether the child runs from now on. `busy`: chats run; `passed`: seconds since the last decision."""
        if busy:
            used = passed if self.runs else 0.0
            self._credit = min(self._credit + BUSY_SHARE * passed - used, BURST)
        self.runs = not busy or self._credit >= (DUTY_SECONDS if self.runs else BURST)
        return self.runs


TURNS = (Turn("idle", IDLE_SECONDS), Turn("low"))


async def run_child(
    function: Callable[..., T],
    *arguments: Any,
    turns: Sequence[Turn] = TURNS,
    keeps_notes: bool = False,
    busy: Callable[[], bool] = lambda: False,
    **options: Any,
) -> T:
    """Return `function(*arguments, **options)` from the first attempt that completes.

    Raises ChildError. Cancelling kills the child.

    Args:
        function: Function of a module.
        keeps_notes: The function has an argument `notes`, a list. Values that an attempt appends to it are in the list
            of the next attempt.
        busy: Returns whether chats run, which the child must not slow down.
    """
    notes: list[Any] | None = [] if keeps_notes else None
    for turn in turns:
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                return await _run((partial(function, **options), arguments, notes), turn, busy, limit)
    raise ChildError(f"no core had time for it within {sum(turn.seconds for turn in turns):.0f} s")


async def _run(
    job: tuple[Callable[..., T], Sequence[Any], list[Any] | None],
    turn: Turn,
    busy: Callable[[], bool],
    limit: asyncio.Timeout,
) -> T:
    try:
        process = await asyncio.create_subprocess_exec(
            *python_module("engine.machine.child", turn.priority, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ChildError(error.strerror or str(error)) from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    watch = asyncio.create_task(_watch(process, turn, busy, limit))
    try:
        process.stdin.write(pickle.dumps(job))
        process.stdin.close()
        with suppress(asyncio.IncompleteReadError):
            while True:
                is_result, value = pickle.loads(await read_frame(process.stdout))
                if is_result:
                    return value  # type: ignore[no-any-return]
                assert job[2] is not None
                job[2].append(value)
        raise ChildError(_reason(await process.wait(), (await errors).decode(errors="replace")))
    finally:
        watch.cancel()
        errors.cancel()
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), DEATH_SECONDS)


async def _watch(
    process: asyncio.subprocess.Process, turn: Turn, busy: Callable[[], bool], limit: asyncio.Timeout
) -> None:
    """Stop and continue the process by its duty. End the attempt if the process gets too little of a core."""
    clock, duty = asyncio.get_running_loop().time, Duty()
    allowed = spent = passed = 0.0
    looked = clock()
    while process.returncode is None:
        ran = duty.runs
        if duty.decide(turn.priority == "idle" and busy(), passed) is not ran:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT if duty.runs else signal.SIGSTOP)
        began = clock()
        await asyncio.sleep(DUTY_SECONDS)
        passed = clock() - began
        allowed += passed if duty.runs else 0.0
        if clock() - looked >= turn.seconds and allowed >= min(turn.seconds, BURST):
            activity = read_activity([process.pid])
            before, spent = spent, 0.0 if activity is None else sum(each.cpu for each in activity.threads.values())
            if spent - before <= turn.share * allowed:
                limit.reschedule(clock())
                return
            looked, allowed = clock(), 0.0


def _reason(code: int, errors: str) -> str:
    if code == -signal.SIGXCPU:
        return f"it used {CPU_SECONDS} s of CPU time"
    return (errors.strip().splitlines()[-1:] or ["no message"])[0][:200]


class _Notes(list[Any]):
    """Notes that are sent to the parent process as they are made."""

    def append(self, value: Any) -> None:
        super().append(value)
        _send(sys.stdout.buffer, (False, value))


def _send(stream: BinaryIO, frame: tuple[bool, Any]) -> None:
    stream.write(framed(pickle.dumps(frame)))
    stream.flush()


def step_aside(priority: str) -> None:
    """Lower the priority of this process.

    `idle`: run only on idle cores. `low`: a small regular share; a step waits for each of its threads, so that niceness
    alone takes time from steps. Any other value: keep the priority.
    """
    if priority in NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS[priority])
    if priority == "idle" and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    priority, parent = sys.argv[1:]
    end_with(int(parent))
    step_aside(priority)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    function, arguments, notes = pickle.load(sys.stdin.buffer)
    more = {} if notes is None else {"notes": _Notes(notes)}
    _send(sys.stdout.buffer, (True, function(*arguments, **more)))


if __name__ == "__main__":
    main()
