"""Preparation of a run: wait for the server, query its model, count tokens per word, warm up. Measures nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import orjson

from loadgen.calibrate import word_costs
from loadgen.client import Client, Target, describe_server, error_message, wait_ready
from loadgen.errors import ServerError
from loadgen.plan import Plan
from loadgen.prompts import Source, TokenIds, output_fields
from loadgen.records import RequestRecord
from loadgen.traces import Content
from loadgen.workers import loop_factory

PromptMode = Literal["auto", "ids", "text"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """The server as found by the probes. `target` includes the model."""

    target: Target
    source: Source
    server: dict[str, Any]


def prepare(
    target: Target,
    mode: PromptMode,
    ids: TokenIds,
    ready_within: float,
    *,
    calibrate: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Session:
    """Wait for the server and probe it for the plan. Raises ServerError if it cannot be measured.

    `calibrate` is False if all prompts are given as text; then no probe is sent.
    """

    async def work(client: Client) -> Session:
        await wait_ready(client, ready_within, say)
        about = await describe_server(client)
        chosen = replace(target, model=target.model or about["model"])
        if not chosen.model:
            raise ServerError("the server lists no model: use --model")
        client.target = chosen
        source: Source = ids
        if calibrate and (mode == "text" or (mode == "auto" and chosen.chat)):
            source = await word_costs(probe(client))
        return Session(
            chosen, source, {"base_url": chosen.base_url, "endpoint": chosen.endpoint, **about, "model": chosen.model}
        )

    return _with_client(target, work)


def probe(client: Client) -> Callable[[str], Awaitable[int]]:
    """A function that asks the server for one token and returns how many tokens the text was."""

    async def ask(text: str) -> int:
        prompt: dict[str, Any] = {"prompt": text}
        if client.target.chat:
            prompt = {"messages": [{"role": "user", "content": text}]}
        body = orjson.dumps({"model": client.target.model, "max_tokens": 1, "temperature": 0.0, **prompt})
        headers = {"Content-Type": "application/json"}
        status, data = await client.raw("POST", client.target.endpoint, data=body, headers=headers)
        if status != 200:
            raise ServerError(f"the calibration request was refused: {status} {error_message(data)}")
        try:
            return int(orjson.loads(data)["usage"]["prompt_tokens"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ServerError("the server reports no usage.prompt_tokens: text prompts cannot be calibrated") from None

    return ask


def warm_up(plan: Plan, count: int, listed: Sequence[str] = ()) -> None:
    """Sends `count` small requests of the plan's kind, one after another; raises ServerError when one fails.

    `listed`: the models the server lists, named when it does not know the plan's.
    """

    async def work(client: Client) -> None:
        maker = plan.maker()
        for number in range(count):
            # Their own numbers: a warm-up must not put a measured prompt into the prefix cache.
            prompt = maker.fields((1 << 30) + number, 32, Content())
            length = output_fields(4, ignore_eos=plan.ignore_eos)  # as in the run, to detect refused parameters early
            body = {"model": client.target.model, **prompt, **length, "temperature": 0.0, **plan.extra_body}
            record = RequestRecord(number, "online", 0.0, 32, 4)
            await client.send(orjson.dumps(body | plan.stream_fields()), record)
            if record.outcome not in ("ok", "empty"):
                hint = _hint(record, client.target.model, listed)
                raise ServerError(f"a warm-up request ended as {record.outcome}: {record.status} {record.error}{hint}")

    if count:
        _with_client(plan.target, work)


def _hint(record: RequestRecord, model: str, listed: Sequence[str]) -> str:
    if "ignore_eos" in record.error:
        return " (--no-ignore-eos leaves min_tokens and ignore_eos out)"
    if record.status in (400, 404) and listed and model not in listed:
        return f" (--model {model}; the server lists {', '.join(map(str, listed))})"
    return ""


def _with_client(target: Target, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        async with Client(target, time.monotonic) as client:
            return await work(client)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main())
