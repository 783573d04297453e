"""The grammars of requests, made ready before the core sees them: compiling belongs neither into the event loop nor
into a step. Those of offline work have a thread of their own, so that a batch of many schemas holds up no chat."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.api import EngineRequest, RequestClass
from engine.errors import InvalidRequestError
from engine.grammar import Grammar

if TYPE_CHECKING:  # an engine without grammars needs none of what compiles them
    from engine.structured.compiler import GrammarCompiler

COMPILE_SECONDS = 10.0


class Grammars:
    """`compiler` None: no request may have a grammar."""

    def __init__(self, compiler: "GrammarCompiler | None", seconds: float = COMPILE_SECONDS) -> None:
        self._compiler = compiler
        self._seconds = seconds
        self._threads = {
            request_class: ThreadPoolExecutor(1, thread_name_prefix=f"tidemill-grammars-{request_class.value}")
            for request_class in RequestClass
        }

    async def prepare(self, requests: Sequence[EngineRequest]) -> None:
        """Compile what is not ready. Raises InvalidRequestError for what cannot be enforced, or takes too long."""
        wanted = {r.sampling.grammar: r.request_class for r in requests if r.sampling.grammar is not None}
        for grammar, request_class in wanted.items():
            await self._prepare(grammar, request_class)

    async def _prepare(self, grammar: Grammar, request_class: RequestClass) -> None:
        if self._compiler is None:
            message = f"'{grammar.param}' is not supported by this server."
            raise InvalidRequestError(message, param=grammar.param, code="unsupported_parameter")
        if self._compiler.find(grammar) is not None:
            return
        work = asyncio.get_running_loop().run_in_executor(self._threads[request_class], self._compiler.compile, grammar)
        try:
            await asyncio.wait_for(work, self._seconds)
        except TimeoutError:
            message = f"'{grammar.param}' cannot be enforced: it takes longer than {self._seconds:.0f} s to compile."
            raise InvalidRequestError(message, param=grammar.param, code="invalid_value") from None

    def stop(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
