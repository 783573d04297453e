"""Process that proves grammars, each in a fork with limits of time, memory and stack.

    python -P -m engine.structured.prover DESCRIPTOR

The process loads the tokenizer once and forks for every job, so that a grammar that reaches a limit ends only its own
fork. The process ends when the other side closes the socket.

Prove in a process with limits that a grammar can be compiled, followed and dropped safely.
"""

import ctypes
import math
import os
import random
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NoReturn, TypeVar

import msgspec
import numpy as np

from engine.forms import Grammar
from engine.machine.child import Link, LinkLostError, die_with_parent
from engine.panics import as_error
from engine.structured.compiler import UNSATISFIABLE, CompiledGrammar, GrammarCompiler, GrammarError, Matcher, source_of

Result = TypeVar("Result")

WALK_TOKENS = 64
WALK_SECONDS = 0.2
"""CPU time limit of the trial answer; masks of a large vocabulary take milliseconds each."""
SMALL_STACK = 2**20
"""Stack size of the thread that follows and drops a grammar; these threads have 8 MiB in the engine."""
MIN_COST = 2**20


class ProofLimits(msgspec.Struct, frozen=True):
    """Limits of one compilation.

    Attributes:
        seconds: CPU time.
        memory: Bytes of memory.
        stack: Bytes of stack; the engine uses ENGINE_STACKS times as much.
        hold_seconds: Maximum time of a call that holds the interpreter lock.
    """

    seconds: float = 3.0
    memory: int = 256 * 2**20
    stack: int = 16 * 2**20
    hold_seconds: float = 0.05


ENGINE_STACKS = 4


class ProofJob(msgspec.Struct, tag=True, frozen=True):
    """A grammar to prove."""

    number: int
    grammar: Grammar
    limits: ProofLimits


class CancelProof(msgspec.Struct, tag=True, frozen=True):
    """The verdict on a job is no longer needed."""

    number: int


class Proof(msgspec.Struct, tag=True, frozen=True):
    """The grammar compiles from `source` and takes `cost` bytes."""

    number: int
    source: str
    cost: int


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """The grammar cannot be enforced."""

    number: int
    reason: str


class OutOfTime(msgspec.Struct, tag=True, frozen=True):
    """The CPU time limit was reached."""

    number: int


class ProofFault(msgspec.Struct, tag=True, frozen=True):
    """The system failed; nothing is known about the grammar."""

    number: int
    reason: str


Verdict = Proof | Refusal | OutOfTime | ProofFault


def prove(compiler: GrammarCompiler, job: ProofJob) -> Proof | Refusal:
    """Compile and follow a grammar; a limit may kill the process."""
    try:
        source = source_of(job.grammar)
        before = _allocated_bytes()
        held = [in_thread(job.limits.stack, lambda: compiler.build(source))]
        ends = sorted(compiler.eos_token_ids)
        in_thread(SMALL_STACK, lambda: _walk(held[0], compiler.mask_words, ends, job.limits.hold_seconds))
        cost = max(MIN_COST, _allocated_bytes() - before)
        in_thread(SMALL_STACK, lambda: _timed(job.limits.hold_seconds, held.clear))
    except GrammarError as error:
        return Refusal(job.number, str(error))
    except MemoryError:
        return Refusal(job.number, "it takes too much memory to compile")
    except BaseException as raised:
        as_error(raised)
        return Refusal(job.number, f"the compiler fails on it ({type(raised).__name__})")
    return Proof(job.number, source, cost)


def in_thread(stack: int, work: Callable[[], Result]) -> Result:
    """Run `work` in a thread with a stack of that size, and re-raise its error."""
    thread, outcome = start_thread(stack, work)
    thread.join()
    return outcome.result()


def start_thread(stack: int, work: Callable[[], Result]) -> tuple[threading.Thread, Future[Result]]:
    """Start a thread with a stack of that size. Raises RuntimeError if the system cannot create it."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="tidemill-grammar", daemon=True)
    usual = threading.stack_size(stack)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread, outcome


def _walk(grammar: CompiledGrammar, mask_words: int, ends: list[int], hold_seconds: float) -> None:
    """Follow an answer of random tokens. Raises GrammarError at a limit of the library, and for slow calls."""
    matcher = _timed(hold_seconds, grammar.matcher)
    mask = np.zeros(mask_words, dtype=np.int32)
    draw, until = random.Random(0), time.thread_time() + WALK_SECONDS
    for _ in range(WALK_TOKENS):
        matcher.write_mask(mask)
        _check(matcher)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, ends)]
        if not allowed.size:
            return
        token = int(allowed[draw.randrange(len(allowed))])
        _timed(hold_seconds, partial(matcher.advance, [token]))
        _timed(hold_seconds, matcher.forced)
        _check(matcher)
        if time.thread_time() > until:
            return


def _check(matcher: Matcher) -> None:
    if matcher.failed == UNSATISFIABLE:
        raise GrammarError("an answer may reach a place from which no text completes it")
    if matcher.failed is not None:
        raise GrammarError(f"it becomes too complex while an answer grows ({matcher.failed})")


def _timed(seconds: float, call: Callable[[], Result]) -> Result:
    began = time.thread_time()
    result = call()
    if time.thread_time() - began > seconds:
        raise GrammarError("it is too large to be followed without delaying other requests")
    return result


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _NAMES]


def _allocated_bytes() -> int:
    """Return the bytes in use by the allocator; 0 if unknown."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    ask.restype = _MallocInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


NICENESS, SLOW_NICENESS = 5, 10
"""Niceness of forks: steps of the engine take priority, especially over jobs of more than a second."""
OOM_SCORE = "1000"
PIPE_BYTES = 2**16
SPARE_BYTES = 64 * 2**20
"""Additional address space for stacks and the allocator's reserve."""


class ProverSetup(msgspec.Struct, frozen=True):
    """First message: the tokenizer, and the process id of the sender."""

    folder: str
    vocab_size: int
    eos_token_ids: list[int]
    parent: int


@dataclass(slots=True)
class _Running:
    job: ProofJob
    pid: int
    said: bytearray = field(default_factory=bytearray)


class ProofServer:
    """Runs jobs received over a link."""

    def __init__(self, sock: socket.socket, compiler: GrammarCompiler) -> None:
        self._sock, self._link, self._compiler = sock, Link(sock), compiler
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._decode = msgspec.msgpack.Decoder(ProofJob | CancelProof).decode

    def serve(self) -> None:
        """Serve until the link is lost. Raises LinkLostError."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._take(self._decode(self._link.receive()))
                else:
                    self._read(key.fd, key.data)

    def _take(self, message: ProofJob | CancelProof) -> None:
        if isinstance(message, ProofJob):
            try:
                self._begin(message)
            except OSError as error:
                self._answer(ProofFault(message.number, error.strerror or str(error)))
            return
        for key in self._selector.get_map().values():
            if key.data is not None and key.data.job.number == message.number:
                os.kill(key.data.pid, signal.SIGKILL)

    def _begin(self, job: ProofJob) -> None:
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if not pid:
            self._sock.close()
            _run(self._compiler, job, writing)
        os.close(writing)
        self._selector.register(reading, selectors.EVENT_READ, _Running(job, pid))

    def _read(self, descriptor: int, running: _Running) -> None:
        data = os.read(descriptor, PIPE_BYTES)
        if data:
            running.said += data
            return
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(running.pid, 0)
        self._answer(_verdict(running.job, status, bytes(running.said)))

    def _answer(self, verdict: Verdict) -> None:
        self._link.send(msgspec.msgpack.encode(verdict))


def _verdict(job: ProofJob, status: int, said: bytes) -> Verdict:
    """Derive the verdict from the exit status and output of the fork."""
    if status == 0:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(said, type=Proof | Refusal | ProofFault)
    code = os.waitstatus_to_exitcode(status)
    if -code in (signal.SIGPROF, signal.SIGXCPU):
        return OutOfTime(job.number)
    if -code in (signal.SIGSEGV, signal.SIGBUS):
        return Refusal(job.number, "it is nested too deeply")
    if -code == signal.SIGABRT:
        return Refusal(job.number, "it takes too much memory to compile")
    return ProofFault(job.number, f"the process that compiled it ended with {code}")


def _run(compiler: GrammarCompiler, job: ProofJob, writing: int) -> NoReturn:
    """Run the job in the fork and exit."""
    try:
        _limit(job.limits)
        data = memoryview(msgspec.msgpack.encode(prove(compiler, job)))
        while data:
            data = data[os.write(writing, data) :]
        os._exit(0)
    except BaseException:
        os._exit(1)


def _limit(limits: ProofLimits) -> None:
    die_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    os.nice(NICENESS if limits.seconds <= 1.0 else SLOW_NICENESS)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # a panic of the library would print input of the client
    seconds = math.ceil(limits.seconds) + 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    size = _address_space()
    if size:
        most = size + limits.stack + limits.memory + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _address_space() -> int:
    """Return the bytes of mapped address space; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> None:
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine ends this process by closing the socket
    link = Link(sock)
    with suppress(LinkLostError):
        setup = msgspec.msgpack.decode(link.receive(), type=ProverSetup)
        die_with_parent()
        if os.getppid() != setup.parent:
            return
        compiler = GrammarCompiler(Path(setup.folder), setup.vocab_size, frozenset(setup.eos_token_ids))
        compiler.load()
        ProofServer(sock, compiler).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
