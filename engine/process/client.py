"""The gateway's client of an engine that runs in its own process. If the process dies, the next one continues.

`Requests` holds the prompt and the output tokens of every open request. `ProcessLife` starts one process after another.
`ProcessLink` sends messages. The next process computes the tokens again and continues at the same position, so an HTTP
client observes a pause. See docs/develop/process.md.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput
from engine.client import EngineInfo, EngineState, EngineStats, Figures, LoadReport
from engine.config import EngineConfig
from engine.errors import EngineUnavailableError, InvalidRequestError
from engine.flight import FAILED_STEP
from engine.limits import QueueTime
from engine.process import frames
from engine.process.launcher import Launcher, ProcessOptions
from engine.process.life import RETRY_AFTER, GoneError, ProcessLife, ProcessLink, Regrouping
from engine.process.requests import DeathJudge, OpenRequest, Requests, RestartPolicy
from engine.stream import RequestStream
from predictor.slo import SLO

log = logging.getLogger("tidemill.engine")

PATIENCE = 10.0
"""Maximum wait in seconds for an engine if there is no TTFT objective."""
ANSWER_SECONDS = 1.0
"""Timeout in seconds of `stats`, after which the last statistics are returned."""


class EngineProcess:
    """An engine in its own process. Implements `engine.client.EngineClient`."""

    def __init__(self, config: EngineConfig, options: ProcessOptions) -> None:
        clock = self._clock = options.clock
        self._patience = patience(config) if options.waits else None
        self._tell_change = options.changed
        self._idle = asyncio.Event()
        self._requests = Requests(clock)
        self._link = ProcessLink(self._receive, self._requests.resumed)
        self._figures = Figures()
        judge = DeathJudge(self._requests, options.policy or RestartPolicy(), clock, waits=options.waits)
        self._life = ProcessLife(
            Launcher(config, options), self._link, self._requests, self._figures, judge, options,
            down=lambda: self.regroup.lost(), changed=self._on_change,
        )  # fmt: skip
        self.regroup = Regrouping(self._link.calls, self._requests, self.abort)

    @property
    def info(self) -> EngineInfo:
        assert self._life.info is not None, "the model is not loaded yet"
        return self._life.info

    @property
    def state(self) -> EngineState:
        return self._life.state

    @property
    def trouble(self) -> str | None:
        """See EngineClient.trouble."""
        return self._life.trouble

    @property
    def is_up(self) -> bool:
        """Whether a process accepts requests."""
        return self._life.ready.is_set() and self._life.death is None

    @property
    def report(self) -> LoadReport | None:
        """The load that the process reported last; None before its first report."""
        return self._link.given.report

    @property
    def unreported(self) -> Iterable[EngineRequest]:
        """Requests sent to the process since that report."""
        return self._link.given.unreported

    def holds(self, request_id: str) -> bool:
        """Return whether the request is open here."""
        return request_id in self._requests

    @property
    def num_offline(self) -> int:
        """Number of open offline requests."""
        return self._requests.num_offline

    @property
    def num_online(self) -> int:
        """Number of open online requests."""
        return len(self._requests) - self._requests.num_offline

    # The process: see ProcessLife and EngineClient

    def load(self, planned: Callable[[frames.Planned], None]) -> None:
        """Start the first process and load its model. See ProcessLife.load."""
        self._life.load(planned)

    def discard(self) -> None:
        """End the loaded processes, which will not be used."""
        self._life.discard()

    async def start(self) -> None:
        """See ProcessLife.start."""
        await self._life.start()

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """See EngineClient.stop. A process that does not exit in time is killed."""
        life, requests = self._life, self._requests
        life.draining = True
        life.turned.set()
        if not life.is_supervised:
            return
        if drain_seconds > 0 and len(requests) and life.death is None:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
            except TimeoutError:
                log.info("%d requests did not end within %.0f s", len(requests), drain_seconds)
        for entry in requests:
            self.abort(entry.request.request_id)
        await life.stop()

    async def wait_dead(self) -> str:
        """See EngineClient.wait_dead."""
        await self._life.dead.wait()
        assert self._life.death is not None
        return self._life.death

    async def renew(self, *, anyway: bool = False) -> str:
        """See EngineClient.renew."""
        return await self._life.renew(anyway=anyway)

    def kill(self) -> None:
        """See EngineClient.kill."""
        self._life.kill()

    async def stats(self) -> EngineStats:
        """See EngineClient.stats. If the process does not answer in time, return its last statistics."""
        figures = self._figures
        if self._life.ready.is_set():
            with suppress(GoneError, TimeoutError):
                figures.last = await asyncio.wait_for(self._link.calls.ask(frames.AskStats), ANSWER_SECONDS)
        return figures.total(self._link.num_resumed)

    # Requests

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        """See EngineClient.submit. Without a process an online request waits up to `patience`, a batch line forever."""
        self._life.check_accepting()
        now = self._clock()
        for request in requests:
            if self.holds(request.request_id):
                raise InvalidRequestError(f"A request '{request.request_id}' is already running.", param="request_id")
        entries = []
        for request in requests:
            stream = RequestStream.of(request, partial(self.abort, request.request_id))
            entries.append(OpenRequest(request, stream, now))
            self._requests.add(entries[-1])
        try:
            until = now if self._patience is None else now + longest_wait(requests, self._patience)
            if self._requests.recognise(entries):
                self._resume_recognised(entries)
            else:
                await self._queue(entries, until)
        except BaseException:
            for request in requests:
                self._forget(request.request_id)
            raise
        return [entry.stream for entry in entries]

    def _resume_recognised(self, entries: Sequence[OpenRequest]) -> None:
        """Send requests with a suspect among them to the process. Suspects wait for their trial."""
        innocent = self._requests.innocent(entries)
        if innocent and self._life.ready.is_set():
            self._link.resume(innocent)
        self._try_suspect()

    async def _queue(self, entries: Sequence[OpenRequest], until: float) -> None:
        """Submit the requests until a process has accepted them.

        Requests that took part in a death count as accepted and are resumed like others.
        """
        arrived = self._clock()
        requests = [entry.request for entry in entries]
        while True:
            if not self._life.ready.is_set():
                await self._wait_for_engine(until, entries)
                waiting = [entry.request for entry in entries if not entry.accepted]
                if not waiting:
                    return
                requests = [replace(request, arrived=arrived) for request in waiting]
            self._link.given.unreported.extend(requests)
            try:
                await self._link.calls.ask(partial(frames.Submit, requests=tuple(requests)), requests)
            except GoneError:
                continue
            except frames.FrameError as error:
                raise InvalidRequestError(f"The request is too large for the engine: {error}.") from None
            return

    async def _wait_for_engine(self, until: float, entries: Sequence[OpenRequest]) -> None:
        """Wait until a process is ready, or until all `entries` count as accepted because they took part in a death.

        Raise EngineUnavailableError at the time `until`, or when no further process will start.
        """
        life = self._life
        while not life.ready.is_set():
            life.check_accepting()
            if all(entry.accepted for entry in entries):
                return
            left = until - self._clock()
            if left <= 0.0:
                raise EngineUnavailableError("The engine is being started again.", retry_after=RETRY_AFTER)
            life.turned.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(life.turned.wait(), None if math.isinf(left) else left)
        life.check_accepting()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See EngineClient.abort."""
        entry = self._requests.get(request_id)
        if entry is not None:
            self._forget(request_id, reason)
            entry.end(reason, self._clock())

    def _forget(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if self._requests.release(request_id) is not None:
            self._link.send(frames.Abort(request_id, reason))
            self._on_change()

    def set_lane(self, job: str, lane: Lane) -> None:
        """See EngineClient.set_lane."""
        self._requests.set_lane(job, lane)
        self._link.send(frames.SetLane(job, lane))

    def take_movable(self) -> list[OpenRequest]:
        """Remove and return the requests that another engine continues, if no process runs here."""
        is_gone, given_up = self._life.judged and not self._life.ready.is_set(), self._life.death is not None
        return self._requests.hand_over(given_up=given_up) if is_gone or given_up else []

    def adopt(self, entries: Sequence[OpenRequest]) -> None:
        """Continue requests that another engine had accepted, at the same token."""
        if beside_others := self._requests.take_over(entries, self.abort):
            self._link.resume(beside_others)
        self._try_suspect()

    def _try_suspect(self) -> None:
        """Resume the next suspect in a trial, if one is due."""
        if (entry := self._requests.next_trial()) is not None:
            self._link.resume([entry])

    # Messages

    def _receive(self, message: frames.ToGateway) -> None:
        """Handle one message of the process."""
        life, link = self._life, self._link
        match message:
            case frames.Outputs(outputs, load):
                link.given.hear(load)
                for output in outputs:
                    self._deliver(output)
                self._try_suspect()
            case frames.Answer(call, value):
                self._requests.accept(request.request_id for request in link.calls.settle(call, value))
            case frames.Refused(call, error):
                link.calls.settle(call, error.to_error())
            case frames.Parted():
                self.regroup.parted = True
                self._tell_change()
            case frames.Pulse():
                link.given.hear(message.load)
                life.on_pulse(message)
                self._try_suspect()
            case frames.Built(info):
                life.info = info
            case frames.Started():
                self._up()
            case frames.NotStarted():
                life.on_not_started(message)
            case frames.Dying():
                life.on_dying(message)
            case frames.StepFailed():
                life.keep_flight(FAILED_STEP, life.child)
            case frames.Planned():
                pass

    def _up(self) -> None:
        """Resume the requests of the last process in the new one, and accept requests again."""
        self._life.judge.outage.end()
        if resumed := self._requests.resume_after():
            self._link.resume(resumed)
            log.warning("%d requests go on in the new engine process", len(resumed))
        self._try_suspect()
        self._life.on_started()

    def _deliver(self, output: RequestOutput) -> None:
        entry = self._requests.get(output.request_id)
        if entry is None:
            return  # the request was aborted in the meantime
        keeps_up = entry.take(output)
        self._life.has_worked = self._life.has_worked or bool(output.token_ids)
        if forgiven := self._requests.got_on(entry, output):
            self._life.judge.policy.forgive(forgiven)
        if output.finish_reason is not None:
            self._requests.end(output.request_id)
            self._on_change()
        elif not keeps_up:
            self.abort(output.request_id)

    def _on_change(self) -> None:
        """Report that a request has ended or that the process has started or ended."""
        if not len(self._requests):
            self._idle.set()
        self._tell_change()


def patience(config: EngineConfig) -> float:
    """Return the maximum wait in seconds of an online request for a process.

    It is the TTFT limit or the maximum queue time, whichever is longer.
    """
    limit = SLO.parse(config.slo).limit_of("ttft") or PATIENCE
    return max(limit, QueueTime.parse(config.max_queue_time).longest(limit))


def longest_wait(requests: Sequence[EngineRequest], patience: float) -> float:
    """Return the maximum wait in seconds for a process; infinite if all requests are batch lines."""
    lines = all(r.request_class is RequestClass.OFFLINE and r.lane is not Lane.FLEX for r in requests)
    return math.inf if lines else patience
