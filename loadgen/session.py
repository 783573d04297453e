"""Preparation of a run: wait for the server, read its model and version, calibrate words, send warm-up requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import orjson

from loadgen import ServerError
from loadgen.client import Client, describe_server, error_message, wait_ready
from loadgen.plan import ANCHOR, WORDS, Plan, Source, Target, TokenIds, WordCosts, output_fields
from loadgen.records import RequestRecord
from loadgen.runner import loop_factory
from loadgen.traces import Content

REPEATS = 8
"""Number of repetitions of the word in the first probe."""
PromptMode = Literal["auto", "ids", "text"]
Probe = Callable[[str], Awaitable[int]]
"""Send a text and return `usage.prompt_tokens`."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """A prepared server."""

    target: Target  # with the model filled in
    source: Source
    server: dict[str, Any]  # `server` section of a summary


def prepare(
    target: Target,
    mode: PromptMode,
    ids: TokenIds,
    ready_within: float,
    *,
    calibrate: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Session:
    """Wait for the server and collect the data for a plan. Raise ServerError if the server cannot be measured.

    `calibrate` sends probes for text prompts; it is not needed if the trace has the text of every prompt.
    """

    async def work(client: Client) -> Session:
        await wait_ready(client, ready_within, say)
        about = await describe_server(client)
        chosen = replace(target, model=target.model or about["model"])
        if not chosen.model:
            raise ServerError("the server lists no model; set --model")
        client.target = chosen
        source: Source = ids
        if calibrate and (mode == "text" or (mode == "auto" and chosen.chat)):
            source = await word_costs(probe(client))
        return Session(
            chosen, source, {"base_url": chosen.base_url, "endpoint": chosen.endpoint, **about, "model": chosen.model}
        )

    return _with_client(target, work)


def probe(client: Client) -> Probe:
    """Return a function that sends a text and returns its prompt tokens as counted by the server."""

    async def ask(text: str) -> int:
        prompt: dict[str, Any] = {"prompt": text}
        if client.target.chat:
            prompt = {"messages": [{"role": "user", "content": text}]}
        body = orjson.dumps({"model": client.target.model, "max_tokens": 1, "temperature": 0.0, **prompt})
        headers = {"Content-Type": "application/json"}
        status, data = await client.raw("POST", client.target.endpoint, data=body, headers=headers)
        if status != 200:
            raise ServerError(f"the server refused a calibration request: {status} {error_message(data)}")
        try:
            return int(orjson.loads(data)["usage"]["prompt_tokens"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ServerError("the server reports no usage.prompt_tokens; use --prompt-mode ids") from None

    return ask


async def word_costs(probe: Probe) -> WordCosts:
    """Measure the tokens of each word. Raise ServerError if a constant cost per word does not explain the counts.

    A text with a word n times has overhead + n · cost tokens. One probe with all words shows whether each costs one
    token; otherwise groups are bisected.
    """
    first = WORDS[0]
    overhead, long = await probe(_text([])), await probe(_text([first] * REPEATS))
    cost, rest = divmod(long - overhead, REPEATS)
    if rest or cost < 1:
        raise ServerError(
            f"prompt tokens do not grow linearly with words ({overhead}, then {long}); use --prompt-mode ids"
        )
    costs = {first: cost}
    await _measure(probe, [word for word in WORDS if word != first], overhead, costs)
    return WordCosts(tuple(costs), tuple(costs.values()), overhead)


async def _measure(probe: Probe, words: list[str], overhead: int, costs: dict[str, int]) -> None:
    """Bisect groups until each is a single word or has words of cost 1 only, the minimum. Fill `costs`."""
    groups = [words] if words else []
    while groups:
        group = groups.pop()
        total = await probe(_text(group)) - overhead
        if total == len(group) or len(group) == 1:
            costs.update(dict.fromkeys(group, 1) if total == len(group) else {group[0]: max(1, total)})
        else:
            half = len(group) // 2
            groups += [group[half:], group[:half]]


def _text(words: Sequence[str]) -> str:
    return ANCHOR + "".join(f" {word}" for word in words)


def warm_up(plan: Plan, count: int, listed: Sequence[str] = ()) -> None:
    """Send `count` small requests of the plan's kind, one after another. Raise ServerError if one fails.

    `listed` has the models of the server, for the error message if the plan's model is unknown.
    """

    async def work(client: Client) -> None:
        maker = plan.maker()
        for number in range(count):
            # Warm-up requests have indices of their own, so that no measured prompt is in the prefix cache.
            prompt = maker.fields((1 << 30) + number, 32, Content())
            length = output_fields(4, ignore_eos=plan.ignore_eos)  # as in the run, to detect refused fields
            body = {"model": client.target.model, **prompt, **length, "temperature": 0.0, **plan.extra_body}
            record = RequestRecord(number, "online", 0.0, 32, 4)
            await client.send(orjson.dumps(body | plan.stream_fields()), record)
            if record.outcome not in ("ok", "empty"):
                hint = _hint(record, client.target.model, listed)
                raise ServerError(f"a warm-up request failed ({record.outcome}): {record.status} {record.error}{hint}")

    if count:
        _with_client(plan.target, work)


def _hint(record: RequestRecord, model: str, listed: Sequence[str]) -> str:
    if "ignore_eos" in record.error:
        return "; --no-ignore-eos omits min_tokens and ignore_eos"
    if record.status in (400, 404) and listed and model not in listed:
        return f"; the server has no model {model}, set --model to one of {', '.join(map(str, listed))}"
    return ""


def _with_client(target: Target, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        async with Client(target, time.monotonic) as client:
            return await work(client)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main())
