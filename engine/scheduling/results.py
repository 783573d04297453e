"""Applies a step's result to its requests: progress, new tokens, the end of a request; handles failed steps.

A request that ended or was rewound while the step ran gets nothing. The requests of a failed step are rewound, and
those at fault, which `engine.scheduling.recovery` finds, end.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from engine.api import FinishReason, RequestClass, RequestOutput, RequestTimes, TokenLogprobs
from engine.errors import ErrorInfo, InvalidRequestError, TidemillError
from engine.request import Request, RequestStatus
from engine.scheduling.admission import note_end
from engine.scheduling.output import INVALID_TOKEN, LATE_TOKEN, UNMASKED_TOKEN, Chunk, ModelRunnerOutput
from engine.scheduling.recovery import CANARY_ID, Ending, FaultRecovery
from engine.scheduling.state import InFlight, SchedulerState

EMITTED_TOGETHER = 16
"""Output tokens per group for an offline request whose client reads only the complete answer.

Groups bound the tokens that must be computed again if this engine is lost.
"""
NO_TOKEN = -4
"""Placeholder token of a chunk that samples none."""


class Results:
    """Apply step results and end requests.

    Attributes:
        undone_through: Steps up to this id were built on a failed step; their results and errors are ignored.
    """

    def __init__(self, state: SchedulerState, recovery: FaultRecovery) -> None:
        self.undone_through = -1
        self._state = state
        self._counters = state.counters
        self._recovery = recovery

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        *,
        stop_token_id: int | None = None,
        error: TidemillError | None = None,
    ) -> RequestOutput:
        """End a request and return its last output."""
        self._state.end(request)
        request.move_to(RequestStatus.FINISHED)
        if self._state.speculation is not None:
            self._state.speculation.end(request, completed=reason in (FinishReason.STOP, FinishReason.LENGTH))
        if request.quarantined:
            self._recovery.forget(request)
        else:
            note_end(self._state, request)
        del self._state.requests[request.request_id]
        request.times = request.times._replace(finished=now)
        if request.final_only:
            token_ids = request.emit()
        info = None if error is None else ErrorInfo.of(error)
        return _output_of(request, token_ids, logprobs, reason, stop_token_id, info)

    def take_in(self, flight: InFlight, result: ModelRunnerOutput, now: float) -> list[RequestOutput]:
        """Apply the result of a step. Return the outputs of its requests."""
        self._counters.steps += 1
        self._counters.step_seconds += result.latency
        self._counters.predicted_seconds += flight.output.predicted_latency or 0.0
        chunks, tokens = flight.output.chunks, result.token_ids
        if len(tokens) < len(chunks):
            given = iter(tokens)
            tokens = [next(given) if chunk[3] else NO_TOKEN for chunk in chunks]
        if flight.known:
            pairs = zip(flight.requests, tokens, strict=True)
            tokens = [NO_TOKEN if request in flight.known else token for request, token in pairs]
        if result.logprobs or result.forced or result.pooled or flight.guesses:
            return self._confirm_others(flight, tokens, result, now)
        running, block_size, publish = RequestStatus.RUNNING, self._state.config.block_size, self._state.cache.publish
        outputs: list[RequestOutput] = []
        new = tuple.__new__  # skips the metaclass, for outputs and times of each decode
        decodes, offline, offline_class = 0, 0, RequestClass.OFFLINE
        for chunk, request, epoch, token in zip(chunks, flight.requests, flight.epochs, tokens, strict=True):
            if token < 0 or request.status is not running or request.epoch != epoch:
                if (output := self._confirm_chunk(request, epoch, chunk, token, now)) is not None:
                    outputs.append(output)
                continue
            # fast path: the row gave one token, as nearly every row does
            _, start, length, _ = chunk
            end = request.num_confirmed_tokens = start + length
            if end // block_size > request.cache_map.num_published:
                publish(request)
            request.num_placeholders -= 1
            spec, known = request.spec, request.token_ids
            if length == 1 and not spec.probe:
                decodes += 1
                offline += spec.request_class is offline_class
            else:
                self._counters.count(chunk, spec)
            stops, size = spec.sampling.stop_token_ids, len(known)
            if size < request.emit_after and token not in stops:
                known.append(token)
            elif request.final_only or size + 1 >= request.max_total_tokens or token in stops:
                outputs.append(self._append_token(request, token, None, now))
            else:
                known.append(token)
                arrival, scheduled, first, _, _ = request.times
                times = new(RequestTimes, (arrival, scheduled, now if first is None else first, now, None))
                request.times = times
                plain = (
                    spec.request_id, (token,), None, times, request.num_prompt_tokens, request.num_cached_tokens,
                    len(known) - request.num_prompt_tokens, None, None, None, request.num_preemptions,
                    spec.request_class, request.beside_offline, None, spec.probe,
                )  # fmt: skip
                outputs.append(new(RequestOutput, plain))
        self._counters.decode_tokens += decodes
        self._counters.offline_decode_tokens += offline
        return outputs

    def _confirm_others(
        self, flight: InFlight, tokens: list[int], result: ModelRunnerOutput, now: float
    ) -> list[RequestOutput]:
        """Apply a result with logprobs, forced tokens, vectors or drafts. `tokens`: one per chunk."""
        sampled, guesses = iter(range(len(tokens))), flight.guesses
        outputs: list[RequestOutput] = []
        accepted: list[Request] = []
        extended: set[Request] = set()  # by forced tokens, which a later step computes from the first one on
        chunks = zip(flight.output.chunks, flight.requests, flight.epochs, tokens, strict=True)
        for number, (chunk, request, epoch, token) in enumerate(chunks):
            index = next(sampled) if chunk.sample else -1
            logprobs = result.logprobs[index] if chunk.sample and result.logprobs else None
            if number in guesses:
                if request in extended or not self._takes(request, epoch, chunk, guesses[number]):
                    continue
                accepted.append(request)
            elif request.num_guessed and request.epoch == epoch:
                self._state.drop_guesses(request)
            output = self._confirm_chunk(request, epoch, chunk, token, now, logprobs)
            if output is not None:
                if run := result.forced.get(index, ()):
                    extended.add(request)
                outputs.append(self._append_forced(request, output, run, now))
            elif number in result.pooled and request.epoch == epoch and request.status is not RequestStatus.FINISHED:
                outputs.append(self._finish_pooled(request, result.pooled[number], now))
        return self._judge(flight, outputs, accepted) if guesses else outputs

    def _takes(self, request: Request, epoch: int, chunk: Chunk, guess: int) -> bool:
        """Return whether a drafted token is right: the chunk before it gave this token, and the answer goes on."""
        known = request.token_ids
        if request.status is RequestStatus.FINISHED or request.epoch != epoch:
            return False
        if len(known) != chunk.start + 1 or known[-1] != guess:
            return False
        request.num_placeholders += 1
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens += 1
        return True

    def _judge(
        self, flight: InFlight, outputs: list[RequestOutput], accepted: Sequence[Request]
    ) -> list[RequestOutput]:
        """Record the drafted tokens that were right, one element of `accepted` for each. Join outputs by request."""
        drafted, right = Counter(flight.requests[number] for number in flight.guesses), Counter(accepted)
        self._counters.drafted_tokens += len(flight.guesses)
        self._counters.accepted_tokens += len(accepted)
        for request in drafted:
            if self._state.speculation is not None:
                self._state.speculation.judge(request, right[request])
        found: dict[str, RequestOutput] = {}
        for output in outputs:
            before = found.get(output.request_id)
            found[output.request_id] = output if before is None else _joined(before, output)
        return list(found.values())

    def _confirm_chunk(
        self, request: Request, epoch: int, chunk: Chunk, token: int, now: float, logprobs: TokenLogprobs | None = None
    ) -> RequestOutput | None:
        """Confirm a computed chunk. Return the output if the chunk gave a token and its request is live."""
        if request.status is RequestStatus.FINISHED or request.epoch != epoch:
            return None
        if token == LATE_TOKEN:
            self._sit_out(request, chunk)
            return None
        self._confirm_progress(request, chunk)
        if token == NO_TOKEN:
            return None
        request.num_placeholders -= 1
        return self._append_token(request, token, logprobs, now)

    def _finish_pooled(self, request: Request, embedding: bytes, now: float) -> RequestOutput:
        """End a pooling request with its vector; the vector counts as its first token."""
        request.times = request.times._replace(first_token=now, last_token=now)
        return self.finish(request, FinishReason.STOP, now)._replace(embedding=embedding)

    def _sit_out(self, request: Request, chunk: Chunk) -> None:
        """Schedule the last position of a chunk again, because its grammar mask was late.

        Results for the missing token from steps in flight are ignored.
        """
        last = chunk.start + chunk.length - 1
        if chunk.length > 1:
            self._confirm_progress(request, Chunk(chunk.row, chunk.start, chunk.length - 1, False))
        request.epoch += 1
        request.num_placeholders = 0
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = request.num_confirmed_tokens = last

    def _confirm_progress(self, request: Request, chunk: Chunk) -> None:
        self._counters.count(chunk, request.spec)
        if request.status is not RequestStatus.RUNNING:
            return  # preempted meanwhile: the token counts, but the cache is gone
        request.num_confirmed_tokens = chunk.start + chunk.length
        self._state.cache.publish(request)

    def _append_forced(
        self, request: Request, output: RequestOutput, run: tuple[int, ...], now: float
    ) -> RequestOutput:
        """Return `output` extended by the forced tokens `run`.

        A step in flight already computes the sampled token and samples the first of the run; that sample is ignored. A
        later step computes the rest of the run as one chunk.
        """
        if not run or output.finish_reason is not None:
            return output
        if request.num_placeholders:
            behind = self._state.in_flight[0]
            assert request.num_placeholders == 1 and behind.output.step_id == request.last_step
            behind.known.add(request)
            request.num_placeholders = 0
        given = list(output.token_ids)
        for token in run:
            output = self._append_token(request, token, None, now)
            self._counters.forced_tokens += 1
            given.append(token)
            if output.finish_reason is not None:
                break
        return output._replace(token_ids=tuple(given))

    def _append_token(
        self, request: Request, token: int, token_logprobs: TokenLogprobs | None, now: float
    ) -> RequestOutput:
        if token == UNMASKED_TOKEN:
            return self._fail_grammar(request, now)
        times, sampling = request.times, request.spec.sampling
        first = now if times.first_token is None else times.first_token
        request.times = RequestTimes(times.arrival, times.first_scheduled, first, now)
        request.token_ids.append(token)
        logprobs = None if token_logprobs is None else (token_logprobs,)
        num_output = len(request.token_ids) - request.num_prompt_tokens
        # the masks of a grammar enforce min_tokens
        if token in sampling.stop_token_ids and (num_output >= sampling.min_tokens or sampling.grammar is not None):
            return self.finish(request, FinishReason.STOP, now, (token,), logprobs, stop_token_id=token)
        if num_output >= sampling.max_tokens:
            return self.finish(request, FinishReason.LENGTH, now, (token,), logprobs)
        return _output_of(request, request.emit(EMITTED_TOGETHER) if request.final_only else (token,), logprobs)

    def distrusts(self, flight: InFlight, result: ModelRunnerOutput) -> bool:
        """Return whether logits of the step were not finite.

        Blocks of the requests concerned leave the prefix cache (E7).
        """
        if INVALID_TOKEN not in result.token_ids and all(result.pooled.values()):
            return False
        live = flight.live()
        pooled = (flight.requests[number] for number, vector in result.pooled.items() if not vector)
        sampled = (r for c, r in zip(flight.output.chunks, flight.requests, strict=True) if c.sample)
        bad = [r for r, token in zip(sampled, result.token_ids, strict=True) if token == INVALID_TOKEN and r in live]
        bad += [request for request in pooled if request in live]
        for request in bad:
            self._state.cache.withdraw(request)
        return bool(bad)

    def passed(self, flight: InFlight, outputs: list[RequestOutput], now: float) -> Iterator[RequestOutput]:
        """Handle a completed step while suspects or the canary exist. Outputs of the canary are not passed on."""
        self._recovery.passed(flight.reached())
        for output in outputs:
            if output.request_id != CANARY_ID:
                yield output
            elif output.finish_reason is not None:
                yield from self._end(self._recovery.canary_passed(now), now)

    def failed(self, flight: InFlight, now: float) -> Iterator[RequestOutput]:
        """Rewind a failed step and the steps behind it. Yield the outputs of requests that end because of it."""
        self._counters.failed_steps += 1
        step = flight.reached()
        self._rewind(flight)
        yield from self._end(self._recovery.failed(step, now), now)

    def _end(self, endings: list[Ending], now: float) -> Iterator[RequestOutput]:
        for request, error in endings:
            yield self.finish(request, FinishReason.ERROR, now, error=error)

    def _rewind(self, flight: InFlight) -> None:
        """Undo a failed step and the steps in flight behind it, which were built on its tokens.

        The runner may have applied only part of the deltas, so every affected row is released and written whole again.
        """
        undone = (flight, *self._state.in_flight)
        self.undone_through = undone[-1].output.step_id
        for each in undone:
            for request in each.live():
                self._restart(request)
        failed = {each.output.step_id for each in undone}
        self._state.cache.rewind(self._state.requests.values(), failed)
        for each in undone:
            self._state.released_rows.extend(each.output.released_rows)

    def _restart(self, request: Request) -> None:
        request.epoch += 1
        request.num_placeholders = 0
        if request.status is RequestStatus.RUNNING:
            self._state.rewind(request)
        else:
            self._state.cache.parked.forget(request)

    def _fail_grammar(self, request: Request, now: float) -> RequestOutput:
        """End only this request, because nothing continues its answer within the limits of its grammar."""
        grammar = request.spec.sampling.grammar
        message = "The grammar cannot continue this answer: it grew too complex, or no text completes it."
        error = InvalidRequestError(message, param=grammar.param if grammar else None)
        return self.finish(request, FinishReason.ERROR, now, error=error)


def _output_of(
    request: Request,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    reason: FinishReason | None = None,
    stop_token_id: int | None = None,
    error: ErrorInfo | None = None,
) -> RequestOutput:
    """Return an output with the request's counts and times."""
    return RequestOutput(
        request.request_id, token_ids, logprobs, request.times, request.num_prompt_tokens, request.num_cached_tokens,
        request.num_output_tokens, reason, stop_token_id, error, request.num_preemptions, request.request_class,
        request.beside_offline, probe=request.spec.probe,
    )  # fmt: skip


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Return one output for two outputs of a request in a step."""
    logprobs = None if second.logprobs is None else (*(first.logprobs or ()), *second.logprobs)
    return second._replace(token_ids=(*first.token_ids, *second.token_ids), logprobs=logprobs)
