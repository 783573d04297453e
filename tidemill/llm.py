"""Offline inference in this process: the server's engine, scheduler and API without a socket."""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import orjson

from engine.config import EngineConfig
from engine.errors import ConfigError, TidemillError
from engine.process.client import EngineProcess
from engine.process.launcher import ProcessOptions
from engine.text.tokenizer import Tokenizer
from gateway.app import create_app
from gateway.config import ServerConfig
from tidemill.recipe import CHAT, Recipe, failure
from tidemill.tables import Row

MODEL = "model"
MAX_REQUESTS = 512
"""Maximum number of requests that wait in the engine; the others wait here."""
Message = Mapping[str, Any]
_JSON = {"content-type": "application/json"}


class AnswerError(TidemillError):
    """A request was refused or failed; the message gives the reason."""


class LLM:
    """A model in this process, for offline work.

    model: folder or Hugging Face id; empty: the packaged demo model. settings: as of `tidemill serve`, e.g.
    `max_model_len=4096`. The engine runs in a process of its own and starts at once. Requests run in the offline queue
    of the same scheduler as the server's. Close it, or use it as a context manager. A forked process needs an LLM of
    its own. Raises ConfigError.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(settings.keys() - known):
            raise ConfigError(f"{unknown[0]} is not a setting of the engine; docs/reference/config.md lists them")
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tidemill-llm", daemon=True)
        self._thread.start()
        try:
            self._http = self._call(self._start(EngineConfig(model=model, **settings)))
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. Further calls do nothing."""
        if self._process == os.getpid() and self._thread.is_alive():
            self._call(self._stack.aclose())
            self._end_loop()

    def generate(self, prompts: Sequence[str], **body: Any) -> list[str | AnswerError]:
        """Return the continuation of each prompt, or an AnswerError in its place.

        `body`: fields of /v1/completions, e.g. `max_tokens=100`. Raises AnswerError if no prompt has an answer.
        """
        bodies = [{"prompt": prompt, **body} for prompt in prompts]
        return _answers(self._ask("/v1/completions", bodies), lambda choice: choice["text"])

    def chat(self, conversations: Sequence[str | Sequence[Message]], **body: Any) -> list[str | AnswerError]:
        """Return the answer to each conversation, or an AnswerError in its place. A conversation is a list of messages
        or the text of a user's message.

        `body`: fields of /v1/chat/completions. Raises AnswerError if no conversation has an answer.
        """
        bodies = [{"messages": _messages(each), **body} for each in conversations]
        return _answers(self._ask(CHAT, bodies), lambda choice: choice["message"]["content"] or "")

    def map(
        self,
        rows: Iterable[Row],
        prompt: str,
        *,
        system: str | None = None,
        schema: Any = None,
        max_tokens: int | None = None,
        prefix: str = "",
        **body: Any,
    ) -> list[Row]:
        """Return the rows with the columns of the answers, as `Batch` writes them; failed rows have an `error`.

        prefix: put before the names of the added columns. Raises ConfigError if a row has one of these columns.
        """
        schema = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
        recipe = Recipe(prompt, system, schema, None, max_tokens, body, prefix=prefix)
        kept = list(rows)
        recipe.check_columns({name for row in kept for name in row})
        lines = self._ask(CHAT, [recipe.request(row).body for row in kept])
        return [{**row, **recipe.result(line)} for row, line in zip(kept, lines, strict=True)]

    def _ask(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a line for each body as in a batch's output file. Raises ConfigError."""
        self._check_usable()
        for body in bodies:
            for name, usual in (("n", 1), ("best_of", 1), ("stream", False)):
                if body.get(name) not in (None, usual):
                    raise ConfigError(f"{name}={body[name]!r}: LLM returns one whole answer each; remove {name}")
        lines: list[dict[str, Any]] = self._call(self._ask_all(path, bodies))
        return lines

    async def _ask_all(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        places = asyncio.Semaphore(MAX_REQUESTS)

        async def ask(body: Mapping[str, Any]) -> dict[str, Any]:
            try:
                content = orjson.dumps({"model": MODEL, "service_tier": "flex", **body}, option=orjson.OPT_NON_STR_KEYS)
            except orjson.JSONEncodeError as error:
                return {"error": {"message": f"The request is not JSON: {error}", "code": "invalid_json"}}
            async with places:
                response = await self._http.post(path, content=content, headers=_JSON)
            return {"response": {"status_code": response.status_code, "body": response.json()}}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(body)) for body in bodies]
        return [task.result() for task in tasks]

    def _check_usable(self) -> None:
        """Raise ConfigError after `close` and in a forked process, which lacks the thread of the event loop."""
        if self._process != os.getpid():
            raise ConfigError("this LLM belongs to the process that made it; make an LLM in each process")
        if self._loop.is_closed():
            raise ConfigError("this LLM is closed; make another one")

    async def _start(self, config: EngineConfig) -> httpx.AsyncClient:
        engine = EngineProcess(config, ProcessOptions())
        self._stack.callback(engine.discard)
        tokenizers: list[Tokenizer] = []
        await asyncio.to_thread(engine.load, lambda plan: tokenizers.append(Tokenizer.load(Path(plan.folder), None)))
        app = create_app(engine, tokenizers[0], ServerConfig(served_model_name=(MODEL,), shutdown_timeout=0.0))
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None)
        return await self._stack.enter_async_context(client)

    def _call(self, work: Any) -> Any:
        """Run a coroutine in the loop's thread and return its result; an interruption cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _messages(conversation: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": conversation}] if isinstance(conversation, str) else list(conversation)


def _answers(lines: Sequence[Mapping[str, Any]], read: Callable[[Any], str]) -> list[str | AnswerError]:
    """Return the first choice of each line, or its error. Raises AnswerError if all lines failed."""
    answers: list[str | AnswerError] = []
    for line in lines:
        problem = failure(line)
        answers.append(read(line["response"]["body"]["choices"][0]) if problem is None else AnswerError(problem))
    first = answers[0] if answers else ""
    if isinstance(first, AnswerError) and all(isinstance(each, AnswerError) for each in answers):
        raise first
    return answers
