"""Prove in a process with limits that a grammar can be compiled, followed and dropped safely."""

import ctypes
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from engine.forms import Grammar
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
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = start_thread(stack, run)
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    result: Result = outcome["result"]
    return result


def start_thread(stack: int, work: Callable[[], None]) -> threading.Thread:
    """Start a thread with a stack of that size. Raises RuntimeError if the system cannot create it."""
    thread = threading.Thread(target=work, name="tidemill-grammar", daemon=True)
    usual = threading.stack_size(stack)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread


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
