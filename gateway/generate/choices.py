"""Generation of one HTTP request: convert engine outputs to text deltas until every choice has ended.

All generating endpoints read a `Generation`. It also detects stop strings and ends their requests in the engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from engine.api import FinishReason, RequestOutput, TokenLogprobs
from engine.client import EngineClient, OutputStream
from engine.errors import EngineStepError, EngineUnavailableError, TidemillError
from engine.panics import as_error
from engine.text.detokenizer import OutputTextStream
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_parser import OutputDelta, ParsedText, Parsing
from gateway.generate.params import GenerationPlan
from gateway.generate.validation import told_in
from gateway.http.errors import to_api_error
from gateway.http.sse import EventWriter
from gateway.telemetry.account import CLIENT_LEFT, Account
from gateway.telemetry.metrics import ClassMetrics, GatewayMetrics

MAX_QUEUED = 128
"""Maximum choices of one request in the engine's queue: requests with thousands of texts must not fill the queue."""
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Used(NamedTuple):
    """Token counts of a choice."""

    tokens: int = 0
    """Output tokens."""
    cached: int = 0
    """Cached prompt tokens."""
    thoughts: int = 0
    """Reasoning tokens."""


class ChoiceState:
    """State of one choice: detokenizer, parser, held-back tokens and counts."""

    def __init__(self, index: int, plan: GenerationPlan, tokenizer: Tokenizer, metrics: ClassMetrics) -> None:
        request = plan.requests[index]
        self.request_id = request.request_id
        self.account = Account(request, plan.response_id, index)
        self.finished = False
        self._index, self._is_first = index, index % plan.n == 0
        self._has_stops = bool(plan.stop)
        self._keeps_tokens = plan.return_token_ids or plan.num_logprobs is not None
        self._shows_each_token = plan.stream_options.in_every_chunk
        self._held: list[tuple[int, TokenLogprobs | None]] = []
        self._metrics = metrics
        parsing = plan.parsing or Parsing()
        self._parser = None if plan.parsing is None else parsing.parser()
        self._thoughts = parsing.tracker()
        self._several_calls = parsing.parallel
        self._called = False
        self._counted = 0  # tokens whose text has not been emitted
        self._text = OutputTextStream(
            tokenizer,
            request.prompt_token_ids if plan.continues else (),
            stop=plan.stop,
            min_tokens=plan.min_tokens,
            include_stop=plan.include_stop,
            skip_special_tokens=plan.skip_special_tokens and not parsing.shows_special_tokens,
        )

    def advance(self, output: RequestOutput) -> OutputDelta | None:
        """Process an output; return None if there is nothing to emit yet. Raises the error of a failed request."""
        self._observe(output)
        reason = output.finish_reason
        if reason is not None and reason not in FINISH_REASONS:
            error = _failure(output)
            self.end(reason, to_api_error(error).status)
            raise error
        ids = output.token_ids
        if output.stop_token_id is not None:
            ids = ids[:-1]
        text, counted, stop, num_read = self._read(ids, final=reason is not None)
        if self._thoughts is not None:
            self._thoughts.advance(ids[:num_read])
        stop_token = output.stop_token_id is not None and stop is None
        self.account.num_tokens += num_read + stop_token
        if stop is not None:
            reason = FinishReason.STOP
        if reason is not None:
            self.end(reason)
        self._counted += counted
        piece = ParsedText(text) if self._parser is None else self._parser.push(text, final=reason is not None)
        self._called = self._called or bool(piece.calls)
        if piece.calls and reason is None and not self._several_calls:
            reason = FinishReason.STOP
            self.end(reason)
        if reason is None and (piece.is_empty if text else not counted):
            self._hold(output, num_read)
            # Clients with continuous usage also get the count of tokens whose text is held back.
            return OutputDelta(self._index, "") if self._shows_each_token and num_read else None
        delta = OutputDelta(self._index, piece.text, reasoning=piece.reasoning, calls=piece.calls, stop=stop)
        delta.embedding = output.embedding or b""
        delta.finish_reason = None if reason is None else self._finish_reason(reason)
        if self._keeps_tokens:
            self._hold(output, num_read)
            self._give(delta, self._counted, output.stop_token_id if stop_token else None)
        self._counted = 0
        return delta

    @property
    def is_plain(self) -> bool:
        """Whether each output is shown by its text alone: without stop strings, parser, and details of tokens."""
        return self._parser is None and not (self._has_stops or self._keeps_tokens or self._shows_each_token)

    def advance_plain(self, output: RequestOutput) -> str | None:
        """Process an output other than the last of a plain choice; return its text, or None if nothing is shown yet."""
        text = self._text.push_plain(output.token_ids)
        self._observe(output)
        self.account.num_tokens += len(output.token_ids)
        return text

    @property
    def used(self) -> Used:
        """Token counts so far. Cached prompt tokens count for the first choice of a prompt only."""
        cached = self.account.num_cached_tokens if self._is_first else 0
        return Used(self.account.num_tokens, cached, 0 if self._thoughts is None else self._thoughts.num_thoughts)

    def _finish_reason(self, reason: FinishReason) -> str:
        return "tool_calls" if self._called and reason is FinishReason.STOP else FINISH_REASONS[reason]

    def _read(self, ids: Sequence[int], final: bool) -> tuple[str, int, str | None, int]:
        """Detokenize; return the new text, its number of tokens, the stop string found, and the number of tokens read.

        With stop strings, tokens are pushed one by one to find the token that completed the stop string."""
        if not self._has_stops or len(ids) < 2:
            delta = self._text.push(ids, final)
            return delta.text, delta.num_tokens, delta.stop, len(ids)
        text, counted = "", 0
        for number, token_id in enumerate(ids, 1):
            delta = self._text.push((token_id,), final and number == len(ids))
            text, counted = text + delta.text, counted + delta.num_tokens
            if delta.stop is not None:
                return text, counted, delta.stop, number
        return text, counted, None, len(ids)

    def _hold(self, output: RequestOutput, num_read: int) -> None:
        if self._keeps_tokens:
            ids = output.token_ids[:num_read]
            logprobs: Sequence[TokenLogprobs | None] = output.logprobs or [None] * len(ids)
            self._held.extend(zip(ids, logprobs, strict=False))

    def _give(self, delta: OutputDelta, counted: int, stop_token_id: int | None) -> None:
        """Move the held tokens of the delta's text into the delta; the last delta gets all remaining token ids."""
        shown = self._held[:counted]
        delta.logprobs = [(token_id, logprobs) for token_id, logprobs in shown if logprobs is not None]
        if delta.finish_reason is None:
            delta.token_ids = [token_id for token_id, _ in shown]
            del self._held[:counted]
            return
        ids = [token_id for token_id, _ in self._held]
        delta.token_ids = ids if stop_token_id is None else [*ids, stop_token_id]
        self._held.clear()

    def _observe(self, output: RequestOutput) -> None:
        account = self.account
        gap = account.observe(output)
        if gap is not None:
            self._metrics.tbt.observe(gap)
        elif account.ttft is not None and output.token_ids:
            self._metrics.ttft.observe(account.ttft)

    def end(self, reason: FinishReason, status: int = 200) -> None:
        """Record the end of the choice. Further calls are ignored."""
        if not self.finished:
            self.finished = True
            self.account.end(reason, status)
            self._metrics.observe_end(self.account)


class Generation:
    """All choices of one HTTP request. Iterate `deltas` once, and always call `abort` at the end, which calls `on_end`,
    possibly several times."""

    def __init__(
        self, plan: GenerationPlan, client: EngineClient, choices: list[ChoiceState], streams: Sequence[OutputStream]
    ) -> None:
        self.plan = plan
        self.choices = choices
        self.on_end: Callable[[], None] = lambda: None
        self._client = client
        num_scored = len(plan.scoring)
        self._scoring, self._streams = list(streams[:num_scored]), list(streams[num_scored:])
        self._num_scored = 0
        self._fault: Exception | None = None  # raised while a text was written directly
        self._used = Used()
        self._thinks = plan.parsing is not None and plan.parsing.marks is not None
        self._num_prompt_tokens = sum(choice.account.num_prompt_tokens for choice in choices[:: plan.n])

    @classmethod
    async def begin(
        cls, plan: GenerationPlan, client: EngineClient, tokenizer: Tokenizer, metrics: GatewayMetrics
    ) -> "Generation":
        """Submit the first MAX_QUEUED choices, all or none. Raises the exceptions of `EngineClient.submit`."""
        bound = metrics.by_class[plan.request_class]
        choices = [ChoiceState(i, plan, tokenizer, bound) for i in range(len(plan.requests))]
        with told_in(plan.names):
            streams = await client.submit([*plan.scoring, *plan.requests[:MAX_QUEUED]])
            return cls(plan, client, choices, streams)

    def write_directly(self, chunk: Callable[[OutputDelta, None], bytes], writer: EventWriter) -> None:
        """Write the events of a single plain choice as its outputs arrive, while the iterator of `deltas` waits."""
        (choice, *others), (stream, *_) = self.choices, self._streams
        if others or self._scoring or not choice.is_plain:
            return

        def send(output: RequestOutput) -> bool:
            if not writer.is_free or self._fault is not None:
                return False
            try:
                if (text := choice.advance_plain(output)) is not None:
                    writer.write(chunk(OutputDelta(0, text), None))
            except BaseException as raised:  # in a callback of the engine's link, which serves all requests
                self._fault = as_error(raised)
                return False
            return True

        stream.send_directly(send)

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas of all choices until all have finished, after the scores of their prompts. Raises the error
        of a failed choice."""
        async for scores in self._scores():
            yield scores
        if len(self._streams) == 1 or all(request.final_only for request in self.plan.requests):
            for index in range(len(self.choices)):
                if index == len(self._streams):
                    self._streams += await self._client.submit(self.plan.requests[index : index + MAX_QUEUED])
                async for output in self._streams[index]:
                    if self._fault is not None:
                        raise self._fault
                    delta = self._advance(index, output)
                    if delta is not None:
                        yield delta
                    if self.choices[index].finished:
                        break
        else:
            merged = self._merged()
            try:
                async for delta in merged:
                    yield delta
            finally:
                await merged.aclose()
        if self._num_scored < len(self._scoring) or not all(choice.finished for choice in self.choices):
            raise EngineUnavailableError("The engine stopped while this request was running.", retry_after=5.0)

    async def _scores(self) -> AsyncGenerator[OutputDelta, None]:
        for stream in self._scoring:
            async for output in stream:
                if output.finish_reason is not None and output.embedding is None:
                    raise _failure(output)
                if output.finish_reason is not None:
                    first = self._num_scored * self.plan.n
                    self._num_scored += 1
                    for index in range(first, first + self.plan.n):
                        yield OutputDelta(index, "", embedding=output.embedding or b"")

    async def _merged(self) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas of all streams as they arrive, in constant time per output."""
        done: asyncio.Queue[tuple[int, asyncio.Task[RequestOutput | None]]] = asyncio.Queue()
        waiting: dict[int, asyncio.Task[RequestOutput | None]] = {}

        def wait_for(index: int) -> None:
            waiting[index] = task = asyncio.ensure_future(anext(self._streams[index], None))
            task.add_done_callback(lambda ended: done.put_nowait((index, ended)))

        for index in range(len(self._streams)):
            wait_for(index)
        try:
            while waiting:
                ended = [await done.get()]
                ended += [done.get_nowait() for _ in range(done.qsize())]
                for index, task in sorted(ended, key=lambda pair: pair[0]):
                    del waiting[index]
                    output = task.result()
                    if output is None:
                        continue
                    delta = self._advance(index, output)
                    if not self.choices[index].finished:
                        wait_for(index)
                    if delta is not None:
                        yield delta
        finally:
            for task in waiting.values():
                task.cancel()
            await asyncio.gather(*waiting.values(), return_exceptions=True)

    def _advance(self, index: int, output: RequestOutput) -> OutputDelta | None:
        choice = self.choices[index]
        before = choice.used
        try:
            delta = choice.advance(output)
        finally:
            total, now = self._used, choice.used
            self._used = Used(
                total.tokens + now.tokens - before.tokens,
                total.cached + now.cached - before.cached,
                total.thoughts + now.thoughts - before.thoughts,
            )
        if choice.finished and output.finish_reason is None:  # ended by a stop string or a call, not by the engine
            self._client.abort(choice.request_id, FinishReason.STOP)
        return delta

    def abort(self) -> None:
        """Abort all unfinished choices. Idempotent."""
        for choice in self.choices:
            if not choice.finished:
                choice.end(FinishReason.ABORT, CLIENT_LEFT)
                self._client.abort(choice.request_id)
        for request in self.plan.scoring[self._num_scored :]:
            self._client.abort(request.request_id)
        self.on_end()

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage`. Constant time, because a stream may include it in every chunk. Each prompt counts
        once for all its choices."""
        used = self.choices[0].used if len(self.choices) == 1 else self._used
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": used.tokens,
            "total_tokens": self._num_prompt_tokens + used.tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached},
        }
        if self._thinks:
            usage["completion_tokens_details"] = {"reasoning_tokens": used.thoughts}
        return usage


def _failure(output: RequestOutput) -> TidemillError:
    if output.error is not None:
        return output.error.to_error()
    if output.finish_reason is FinishReason.ERROR:
        return EngineStepError("The model step failed for this request.")
    return EngineUnavailableError("The server ended this request before it was complete.", retry_after=5.0)
