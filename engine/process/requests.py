"""The open requests of an engine, suspicions against them, and the judgement of a death of its process.

`Requests` is the state that the next process needs to resume them. `DeathJudge` decides when the next process starts
and which request ends.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from engine import flight
from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput, RequestTimes, Resumption
from engine.errors import EngineStepError, EngineUnavailableError, ErrorInfo, TidemillError
from engine.process.suspects import DeathVerdict, Origin, Outage, Reputation, Suspects, Suspicion, origin_of
from engine.stream import RequestStream

log = logging.getLogger("tidemill.engine")


@dataclass(slots=True)
class OpenRequest:
    """An open request and its output so far.

    Attributes:
        arrival: Seconds on the monotonic clock, which all processes share.
        accepted: Whether an engine has accepted the request, so that the next engine must accept it.
        moved: Whether the request comes from an engine that was given up.
        suspicion: The suspicion against the request while it moves to another engine.
        last: The last output.
    """

    request: EngineRequest
    stream: RequestStream
    arrival: float
    accepted: bool = False
    moved: bool = False
    suspicion: Suspicion | None = None
    token_ids: list[int] = field(default_factory=list)
    last: RequestOutput | None = None

    def take(self, output: RequestOutput) -> bool:
        """Pass an output to the stream. Return False if its reader is too far behind."""
        self.token_ids.extend(output.token_ids)
        self.last = output
        return self.stream.push(output)

    @property
    def is_online(self) -> bool:
        return self.request.request_class is RequestClass.ONLINE

    @property
    def num_computed(self) -> int:
        """Number of tokens that have certainly been computed: all known tokens but the last."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) - 1

    @property
    def _latest(self) -> RequestOutput:
        """The last output, or one without tokens."""
        request = self.request
        return self.last or RequestOutput(
            request.request_id, (), None, RequestTimes(self.arrival), len(request.prompt_token_ids), 0, 0,
            request_class=request.request_class,
        )  # fmt: skip

    def resumed(self, apart_until: int = 0) -> EngineRequest:
        """Return the request in the form that the next engine resumes."""
        last = self._latest
        cached, preemptions = last.num_cached_tokens, last.num_preemptions
        resumption = Resumption(tuple(self.token_ids), last.times, cached, preemptions, apart_until)
        return replace(self.request, resumed=resumption)

    def end(self, reason: FinishReason, now: float, error: TidemillError | None = None) -> None:
        """Push a terminal output to the stream, without the engine."""
        last = self._latest
        self.stream.push(
            last._replace(
                token_ids=(),
                logprobs=None,
                times=last.times._replace(finished=now),
                num_output_tokens=len(self.token_ids),
                finish_reason=reason,
                error=None if error is None else ErrorInfo.of(error),
            )
        )


class Requests:
    """The open requests by id, in order of submission, the suspects among them, and the suspicions against others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_offline = 0
        self.suspects = Suspects()
        self.reputation = Reputation()
        self._by_id: dict[str, OpenRequest] = {}
        self._unjudged: set[float] = set()
        self._clock = clock

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._by_id.values()))

    def add(self, entry: OpenRequest) -> None:
        self._by_id[entry.request.request_id] = entry
        self.num_offline += not entry.is_online

    def get(self, request_id: str) -> OpenRequest | None:
        return self._by_id.get(request_id)

    def pop(self, request_id: str) -> OpenRequest | None:
        entry = self._by_id.pop(request_id, None)
        self.num_offline -= entry is not None and not entry.is_online
        return entry

    def set_lane(self, job: str, lane: Lane) -> None:
        """Set the lane of a job's offline requests, so that the next process gets it too."""
        for entry in self._by_id.values():
            if entry.request.job == job and not entry.is_online:
                entry.request = replace(entry.request, lane=lane)

    def accepted(self) -> list[OpenRequest]:
        """Return the accepted requests, which the next process must resume."""
        return [entry for entry in self._by_id.values() if entry.accepted]

    def accept(self, request_ids: Iterable[str]) -> None:
        """Mark requests as accepted. Unknown ids are ignored."""
        for request_id in request_ids:
            if (entry := self._by_id.get(request_id)) is not None:
                entry.accepted = True

    def leave(self, may_go: Callable[[OpenRequest], bool]) -> list[OpenRequest]:
        """Remove and return the accepted requests for which `may_go` is true, with the suspicions against them."""
        taken = [entry for entry in self.accepted() if may_go(entry)]
        for entry in taken:
            self.pop(entry.request.request_id)
            entry.suspicion = self.suspects.release(entry.request.request_id)
        return taken

    def hand_over(self, *, given_up: bool) -> list[OpenRequest]:
        """Remove and return the accepted requests that another engine continues.

        Suspects stay for their trial. An engine that is `given_up` hands over all requests except those that already
        came from such an engine, so that a request cannot end more than two engines.
        """
        taken = self.leave(lambda e: not e.moved if given_up else e.request.request_id not in self.suspects)
        for entry in taken:
            entry.moved = entry.moved or given_up
        return taken

    def take_over(self, entries: Sequence[OpenRequest], abort: Callable[[str], None]) -> list[OpenRequest]:
        """Add requests of another engine with their suspicions. Return those that are not suspects.

        `abort` ends a request by its id.
        """
        for entry in entries:
            entry.stream.rebind(partial(abort, entry.request.request_id))
            self.add(entry)
            if entry.suspicion is not None:
                self.suspects.admit(entry.request.request_id, entry.suspicion)
                entry.suspicion = None
        return self.innocent(entries)

    def end_all(self, why: str) -> None:
        """End all requests with EngineUnavailableError."""
        for entry in self:
            self.pop(entry.request.request_id)
            entry.end(FinishReason.ERROR, self._clock(), EngineUnavailableError(why, retry_after=5.0))

    def innocent(self, entries: Iterable[OpenRequest]) -> list[OpenRequest]:
        """Return the requests that are not suspects."""
        return [entry for entry in entries if entry.request.request_id not in self.suspects]

    def resumed(self, entry: OpenRequest) -> EngineRequest | None:
        """Return a request in the form that the next process resumes; None if it has ended in the meantime."""
        name = entry.request.request_id
        return entry.resumed(self.suspects.apart_until(name)) if self.get(name) is entry else None

    def next_trial(self) -> OpenRequest | None:
        """Return the next suspect to run alone; None if none is due."""
        name = self.suspects.next_trial(self._clock())
        return None if name is None else self.get(name)

    def recognise(self, entries: Sequence[OpenRequest]) -> bool:
        """Return whether one of the requests is a suspect by its content. If so, mark all requests as accepted.

        Raise EngineStepError for content that is proven to end processes.
        """
        for entry in entries:
            known = self.reputation.find(entry.request, self._clock())
            if known is not None:
                suspicion, guilty = known
                if guilty:
                    raise EngineStepError(f"The engine process ended {suspicion.deaths} times while it computed this.")
                self.suspects.admit(entry.request.request_id, suspicion)
        if len(self.innocent(entries)) == len(entries):
            return False
        self.accept(entry.request.request_id for entry in entries)
        return True

    def release(self, request_id: str) -> OpenRequest | None:
        """Remove and return a request that leaves before its end. Remember its suspicion by content."""
        entry = self.pop(request_id)
        if entry is not None and (suspicion := self.suspects.release(request_id)) is not None:
            self.reputation.remember(entry.request, suspicion, self._clock())
            self._unjudged.update(suspicion.died_at)
        return entry

    def got_on(self, entry: OpenRequest, output: RequestOutput) -> set[float]:
        """Record an output. Return the times of deaths that no longer count.

        These are the deaths of suspects that have left: the engine works without them.
        """
        if self.suspects.got_on(output.request_id, entry.num_computed):
            self.reputation.forget(entry.request)
        elif self._unjudged and output.token_ids and output.request_id not in self.suspects:
            forgiven, self._unjudged = self._unjudged, set()
            return forgiven
        return set()

    def end(self, request_id: str) -> None:
        """Forget a request after its last output."""
        self.pop(request_id)
        self.suspects.forget(request_id)

    def resume_after(self) -> list[OpenRequest]:
        """Return the requests that a new process resumes at once.

        Trials of suspects begin when one of the resumed online streams gets a token.
        """
        resumed = self.innocent(self.accepted())
        streams = [entry.request.request_id for entry in resumed if entry.is_online and entry.last is not None]
        self.suspects.after(streams, self._clock())
        return resumed

    def end_guilty(self, verdict: DeathVerdict) -> None:
        """End a guilty request and all suspects of the same content with EngineStepError."""
        now, guilty = self._clock(), self.get(verdict.request_id)
        assert guilty is not None, "only open requests are suspected"
        self.reputation.remember(guilty.request, verdict.suspicion, now, guilty=True)
        for entry in self:
            name = entry.request.request_id
            known = self.reputation.find(entry.request, now) if entry is guilty or name in self.suspects else None
            if known is None or not known[1]:
                continue
            log.error("request %s ended the engine process %d times; it ends now", name, verdict.deaths)
            self.end(name)
            message = f"The engine process ended {verdict.deaths} times while it computed this request."
            entry.end(FinishReason.ERROR, now, EngineStepError(message))


WINDOW, HEALTHY = 600.0, 60.0
"""Seconds in which deaths count, and for which a ready process must run to clear them."""


@dataclass(slots=True)
class RestartPolicy:
    """The delay of the next start: none after the first death, then 1, 2, 4 ... `max_delay` seconds.

    A process that gave tokens until it was killed from outside is restarted at once. The policy gives up at the
    `max_deaths`-th death within `WINDOW` seconds. A process that was ready for `HEALTHY` seconds clears all earlier
    deaths.
    """

    max_deaths: int = 6
    max_delay: float = 30.0
    _deaths: deque[float] = field(default_factory=deque)
    _in_a_row: int = 0
    _ready_since: float | None = None

    def ready(self, now: float) -> None:
        """Record that a process accepts requests."""
        self._ready_since = now

    def forgive(self, times: Collection[float]) -> None:
        """Remove the deaths at these times: a request caused them, or is about to be tried for them."""
        self._deaths = deque(at for at in self._deaths if at not in times)

    def died(self, now: float, *, worked: bool = False, counts: bool = True) -> float | None:
        """Record a death. Return the seconds until the next start; None: never.

        Args:
            now: The time of the death.
            worked: Whether the process gave tokens and was probably killed from outside, so that a pause is useless.
            counts: Whether the death counts towards `max_deaths`.
        """
        if self._ready_since is not None and now - self._ready_since >= HEALTHY:
            self._deaths.clear()
            self._in_a_row = 0
        self._ready_since = None
        if counts:
            self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > WINDOW:
            self._deaths.popleft()
        self._in_a_row = 0 if worked else min(self._in_a_row + 1, len(self._deaths))
        if len(self._deaths) >= self.max_deaths:
            return None
        return 0.0 if self._in_a_row <= 1 else min(self.max_delay, 2.0 ** min(self._in_a_row - 2, 30))


class DeathJudge:
    """Judges each death of a process and the requests in its steps.

    Attributes:
        policy: The restart policy.
        outage: The period in which the system refuses starts.
        refusal: The message with which the system refused the last start.

    `waits`: whether requests wait here for the next process; those in flight then count as accepted.
    """

    def __init__(self, requests: Requests, policy: RestartPolicy, clock: Callable[[], float], *, waits: bool) -> None:
        self.policy = policy
        self.outage = Outage()
        self.refusal = ""
        self._requests = requests
        self._clock = clock
        self._waits = waits

    def judge(self, cause: str, recorded: Sequence[flight.AnyEntry], *, worked: bool) -> float | None:
        """Judge a death. Return the seconds until the next start; None: never.

        A death in a trial does not count. A guilty request ends, and its earlier deaths no longer count. If no other
        request got tokens since the last proof of guilt, the engine may be at fault, and the proof counts as a death.

        Args:
            cause: A name in `engine.process.suspects`.
            recorded: The entries of the process's flight recorder.
            worked: Whether the process gave tokens.
        """
        origin, requests, now = origin_of(cause), self._requests, self._clock()
        if origin is Origin.SYSTEM:
            requests.suspects.died(cause, {}, now)
            return self.outage.refused(self.refusal, self.policy.max_delay)
        if origin is Origin.ASKED:
            requests.suspects.died(cause, {}, now)
            requests.reputation.clear()  # other weights or another engine version run from now on
            return 0.0
        in_flight = {name: tokens for name, tokens in flight.in_flight(recorded).items() if name in requests}
        if self._waits:  # otherwise the fleet has submitted them to another engine
            requests.accept(in_flight)
        verdict = requests.suspects.died(cause, in_flight, now)
        if verdict is None:
            in_question = requests.suspects.deaths_to_try(in_flight)
            self.policy.forgive(in_question)
            outside = origin is Origin.OUTSIDE
            return self.policy.died(now, worked=worked and outside, counts=now not in in_question)
        if not verdict.guilty:
            return 0.0
        self.policy.forgive(verdict.suspicion.died_at)
        requests.end_guilty(verdict)
        return 0.0 if verdict.others_well else self.policy.died(now)
