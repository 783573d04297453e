"""Compile the grammars of requests before the core sees them.

A grammar is first compiled by the prover, in a process with limits, and only then in this process. A first attempt with
a short time limit prevents slow grammars from delaying others; slow grammars have a separate queue. Tenants take turns,
and chats precede offline work. Limits apply to compilation only, not to the wait for a slot.

Client of the prover process, which is started on demand and restarted after it has ended.
"""

import asyncio
import itertools
import logging
import os
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from engine.api import EngineRequest, Lane, RequestClass
from engine.errors import QueueFullError
from engine.forms import Grammar
from engine.machine.child import framed, python_module, read_frame
from engine.structured.compiler import CompiledGrammar, GrammarCompiler, GrammarError, Refusals, refusal
from engine.structured.prover import (
    ENGINE_STACKS,
    CancelProof,
    OutOfTime,
    Proof,
    ProofFault,
    ProofJob,
    ProofLimits,
    ProverSetup,
    Refusal,
    Verdict,
    start_thread,
)

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


ORDER = (RequestClass.ONLINE, RequestClass.OFFLINE)


class Slots:
    """`size` slots. Online work precedes offline work; within a class, tenants take turns."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: dict[RequestClass, OrderedDict[str, deque[asyncio.Future[None]]]] = {
            request_class: OrderedDict() for request_class in ORDER
        }

    @asynccontextmanager
    async def place(self, tenant: str, request_class: RequestClass, patience: float | None) -> AsyncIterator[None]:
        """Hold a slot during the block. Raises TimeoutError if none is free within `patience` seconds."""
        await self._take(tenant, request_class, patience)
        try:
            yield
        finally:
            self._free += 1
            self._hand_out()

    async def _take(self, tenant: str, request_class: RequestClass, patience: float | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request_class].setdefault(tenant, deque()).append(turn)
        self._hand_out()
        try:
            async with asyncio.timeout(patience):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the slot was assigned at the same time
                self._free += 1
            else:
                turn.cancel()
            self._hand_out()
            raise

    def _hand_out(self) -> None:
        while self._free and (turn := self._next()) is not None:
            self._free -= 1
            turn.set_result(None)

    def _next(self) -> "asyncio.Future[None] | None":
        for request_class in ORDER:
            tenants = self._waiting[request_class]
            while tenants:
                tenant, turns = tenants.popitem(last=False)
                while turns and turns[0].done():  # cancelled
                    turns.popleft()
                if not turns:
                    continue
                turn = turns.popleft()
                if turns:
                    tenants[tenant] = turns
                return turn
        return None


QUICK_SECONDS = 0.25
QUICK_PLACES = 2
WAIT_SECONDS = 30.0
RETRY_AFTER = 5.0
ATTEMPTS = 2
"""Number of attempts; another grammar may have caused a fault of the prover."""
NICENESS = 5
MAX_SLOW = 1024


class Grammars:
    """Grammars of an engine.

    `limits` bound one compilation, `quick_seconds` its first attempt, `wait_seconds` the wait of a chat for a slot.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        prover: Prover,
        limits: ProofLimits | None = None,
        quick_seconds: float = QUICK_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._compiler = compiler
        self._prover = prover
        self._limits = limits or ProofLimits()
        self._quick_limits = msgspec.structs.replace(self._limits, seconds=min(quick_seconds, self._limits.seconds))
        self._wait_seconds = wait_seconds
        self._quick, self._slow = Slots(QUICK_PLACES), Slots(1)
        self._known_slow: OrderedDict[bytes, None] = OrderedDict()
        self._refusals = Refusals()
        self._held: dict[str, CompiledGrammar] = {}

    async def prepare(self, requests: Sequence[EngineRequest]) -> None:
        """Compile grammars that are not cached.

        Raises InvalidRequestError if a grammar cannot be enforced, and QueueFullError if time, memory or processes are
        short.
        """
        for grammar, request in {r.sampling.grammar: r for r in requests if r.sampling.grammar is not None}.items():
            chat = request.request_class is RequestClass.ONLINE or request.lane is Lane.FLEX
            patience = self._wait_seconds if chat and request.resumed is None else None
            await self._prepare(grammar, request, patience)

    def hold(self, request: EngineRequest) -> None:
        """Keep the grammar of a request until `release`. Raises QueueFullError if it was evicted since `prepare`."""
        grammar = request.sampling.grammar
        if grammar is None:
            return
        compiled = self._compiler.find(grammar)
        if compiled is None:
            raise QueueFullError("The memory for grammars is full.", retry_after=RETRY_AFTER)
        self._held[request.request_id] = compiled

    def release(self, request_id: str) -> None:
        """Release the grammar of a request that has ended."""
        self._held.pop(request_id, None)

    async def stop(self) -> None:
        """End the prover."""
        await self._prover.stop()

    async def _prepare(self, grammar: Grammar, request: EngineRequest, patience: float | None) -> None:
        if self._is_ready(grammar):
            return
        self._compiler.check_tokenizer(grammar)
        ways = [(self._slow, self._limits)]
        if grammar.key() not in self._known_slow:
            ways.insert(0, (self._quick, self._quick_limits))
        for slots, limits in ways:
            try:
                async with slots.place(request.tenant, request.request_class, patience):
                    # another request may have compiled it in the meantime
                    if self._is_ready(grammar) or await self._compile(grammar, limits):
                        return
            except TimeoutError:
                message = "Too many grammars are waiting for compilation."
                raise QueueFullError(message, retry_after=RETRY_AFTER) from None
        reason = f"it takes longer than {self._limits.seconds:g} s to compile"
        self._refusals.add(grammar, reason)
        raise refusal(grammar, reason)

    def _is_ready(self, grammar: Grammar) -> bool:
        """Return whether the grammar is compiled. Raises InvalidRequestError if it was refused before."""
        if (reason := self._refusals.find(grammar)) is not None:
            raise refusal(grammar, reason)
        return self._compiler.find(grammar) is not None

    async def _compile(self, grammar: Grammar, limits: ProofLimits) -> bool:
        """Compile within `limits` and return True; return False if their time was too short."""
        match await self._prove(grammar, limits):
            case Refusal(reason=reason):
                self._refusals.add(grammar, reason)
                raise refusal(grammar, reason)
            case ProofFault(reason=reason):
                log.error("compiling a grammar failed: %s", reason)
                raise QueueFullError("The server is short of resources.", retry_after=RETRY_AFTER)
            case Proof(source=source, cost=cost):
                self._compiler.cache.make_room(cost)
                await self._build(grammar, source, cost, limits)
                return True
            case OutOfTime():
                self._known_slow[grammar.key()] = None
                while len(self._known_slow) > MAX_SLOW:
                    self._known_slow.popitem(last=False)
        return False

    async def _prove(self, grammar: Grammar, limits: ProofLimits) -> Verdict:
        for _ in range(ATTEMPTS):
            verdict = await self._prover.prove(grammar, limits)
            if not isinstance(verdict, ProofFault):
                break
        return verdict

    async def _build(self, grammar: Grammar, source: str, cost: int, limits: ProofLimits) -> None:
        """Compile a proven grammar in this process, in a thread with a large stack; not cancellable."""

        def build() -> CompiledGrammar:
            with suppress(OSError):  # give steps priority; Linux supports niceness per thread
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            return self._compiler.build(source, cost)

        try:
            _, built = start_thread(limits.stack * ENGINE_STACKS, build)
        except RuntimeError as error:
            log.error("compiling a grammar failed: %s", error)
            raise QueueFullError("The server is short of resources.", retry_after=RETRY_AFTER) from None
        try:
            compiled = await _to_end(asyncio.wrap_future(built))
        except GrammarError as error:
            self._refusals.add(grammar, str(error))
            raise refusal(grammar, str(error)) from error
        self._compiler.cache.keep(grammar, compiled)


async def _to_end(work: "asyncio.Future[CompiledGrammar]") -> CompiledGrammar:
    """Wait for the end of a thread even if cancelled, because its slot must not be reused before."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        work.exception()
        raise
