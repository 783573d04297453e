"""Client of the prover process, which is started on demand and restarted after it has ended."""

import asyncio
import itertools
import logging
import os
import socket
from contextlib import suppress

import msgspec

from engine.forms import Grammar
from engine.machine.link import framed, read_frame
from engine.machine.processes import python_module
from engine.structured.compiler import GrammarCompiler
from engine.structured.proof import CancelProof, OutOfTime, Proof, ProofFault, ProofJob, ProofLimits, Refusal, Verdict
from engine.structured.prover import ProverSetup

log = logging.getLogger("tidemill.engine")

WALL_SECONDS = 180.0
"""Maximum wait for a verdict regardless of its CPU time limit; beyond it the machine is overloaded."""
ONE_THREAD = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_DECODE = msgspec.msgpack.Decoder(Proof | Refusal | OutOfTime | ProofFault).decode


class Prover:
    """Proves grammars for one tokenizer in another process."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id if the process runs, else None."""
        return None if self._process is None or self._writer is None else self._process.pid

    async def prove(self, grammar: Grammar, limits: ProofLimits) -> Verdict:
        """Return the verdict on a grammar; a ProofFault if the process cannot be started or fails."""
        number = next(self._numbers)
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        try:
            async with self._starting:
                if self._writer is None:
                    await self._start()
            self._waiting[number] = verdict
            self._send(ProofJob(number, grammar, limits))
            async with asyncio.timeout(WALL_SECONDS):
                return await verdict
        except TimeoutError:
            self._end()
            return ProofFault(number, "the machine is overloaded")
        except OSError as error:
            return ProofFault(number, error.strerror or str(error))
        except asyncio.CancelledError:
            self._send(CancelProof(number))
            raise
        finally:
            self._waiting.pop(number, None)

    async def _start(self) -> None:
        """Start the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *python_module("engine.structured.prover", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **ONE_THREAD},
                )
                reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
        compiler = self._compiler
        self._send(ProverSetup(str(compiler.folder), compiler.vocab_size, sorted(compiler.eos_token_ids), os.getpid()))
        self._reading = asyncio.create_task(self._read(reader, self._writer), name="tidemill-prover")

    def _send(self, message: msgspec.Struct) -> None:
        if self._writer is not None:
            self._writer.write(framed(msgspec.msgpack.encode(message)))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Dispatch verdicts until the process ends."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                verdict = _DECODE(await read_frame(reader))
                waiting = self._waiting.get(verdict.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(verdict)
        if self._writer is writer:
            log.error("the grammar compiler process ended; the next grammar restarts it")
            self._end()

    async def stop(self) -> None:
        """End the process and wait for its end."""
        process, reading = self._process, self._reading
        self._end()
        if reading is not None:
            await asyncio.wait([reading])
        if process is not None:
            await process.wait()

    def _end(self) -> None:
        """Kill the process; pending verdicts become faults."""
        writer, process = self._writer, self._process
        self._writer = None
        if writer is not None:
            writer.close()
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        for number, waiting in list(self._waiting.items()):
            if not waiting.done():
                waiting.set_result(ProofFault(number, "the grammar compiler process ended"))
