"""Process that proves grammars, each in a fork with limits of time, memory and stack.

    python -P -m engine.structured.prover DESCRIPTOR

The process loads the tokenizer once and forks for every job, so that a grammar that reaches a limit ends only its own
fork. The process ends when the other side closes the socket.
"""

import math
import os
import resource
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from engine.machine.link import Link, LinkLostError
from engine.machine.processes import die_with_parent
from engine.structured.compiler import GrammarCompiler
from engine.structured.proof import (
    CancelProof,
    OutOfTime,
    Proof,
    ProofFault,
    ProofJob,
    ProofLimits,
    Refusal,
    Verdict,
    prove,
)

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
