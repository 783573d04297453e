"""The gateway's client of an engine that runs in its own process. If the process dies, the next one continues.

`Requests` holds the prompt and the output tokens of every open request. `ProcessLife` starts one process after another.
`ProcessLink` sends messages. The next process computes the tokens again and continues at the same position, so an HTTP
client observes a pause. See docs/develop/process.md.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput
from engine.client import EngineStats, LoadReport
from engine.config import EngineConfig
from engine.errors import EngineUnavailableError, InvalidRequestError
from engine.flight import FAILED_STEP
from engine.limits import QueueTime
from engine.process import frames
from engine.process.launcher import ProcessOptions
from engine.process.life import RETRY_AFTER, GoneError, ProcessLife, Regrouping
from engine.process.requests import OpenRequest
from engine.stream import RequestStream
from predictor.slo import SLO

log = logging.getLogger("tidemill.engine")

PATIENCE = 10.0
"""Maximum wait in seconds for an engine if there is no TTFT objective."""
ANSWER_SECONDS = 1.0
"""Timeout in seconds of `stats`, after which the last statistics are returned."""


class EngineProcess(ProcessLife):
    """An engine in its own process. Implements `engine.client.EngineClient`."""

    def __init__(self, config: EngineConfig, options: ProcessOptions) -> None:
        super().__init__(config, options)
        self._patience = patience(config) if options.waits else None
        self._idle = asyncio.Event()
        self.regroup = Regrouping(self._link.calls, self._requests, self.abort)

    @property
    def is_up(self) -> bool:
        """Whether a process accepts requests."""
        return self.ready.is_set() and self.death is None

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

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """See EngineClient.stop. A process that does not exit in time is killed."""
        requests = self._requests
        self.draining = True
        self.turned.set()
        if self._task is None:
            return
        if drain_seconds > 0 and len(requests) and self.death is None:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
            except TimeoutError:
                log.info("%d requests did not end within %.0f s", len(requests), drain_seconds)
        for entry in requests:
            self.abort(entry.request.request_id)
        await self._shut_down()

    async def wait_dead(self) -> str:
        """See EngineClient.wait_dead."""
        await self.dead.wait()
        assert self.death is not None
        return self.death

    async def stats(self) -> EngineStats:
        """See EngineClient.stats. If the process does not answer in time, return its last statistics."""
        figures = self._figures
        if self.ready.is_set():
            with suppress(GoneError, TimeoutError):
                figures.last = await asyncio.wait_for(self._link.calls.ask(frames.AskStats), ANSWER_SECONDS)
        return figures.total(self._link.num_resumed)

    # Requests

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        """See EngineClient.submit. Without a process an online request waits up to `patience`, a batch line forever."""
        self.check_accepting()
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
        if innocent and self.ready.is_set():
            self._link.resume(innocent)
        self._try_suspect()

    async def _queue(self, entries: Sequence[OpenRequest], until: float) -> None:
        """Submit the requests until a process has accepted them.

        Requests that took part in a death count as accepted and are resumed like others.
        """
        arrived = self._clock()
        requests = [entry.request for entry in entries]
        while True:
            if not self.ready.is_set():
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
        while not self.ready.is_set():
            self.check_accepting()
            if all(entry.accepted for entry in entries):
                return
            left = until - self._clock()
            if left <= 0.0:
                raise EngineUnavailableError("The engine is being started again.", retry_after=RETRY_AFTER)
            self.turned.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.turned.wait(), None if math.isinf(left) else left)
        self.check_accepting()

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
        is_gone, given_up = self.judged and not self.ready.is_set(), self.death is not None
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
        link = self._link
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
                self._options.changed()
            case frames.Pulse():
                link.given.hear(message.load)
                self.on_pulse(message)
                self._try_suspect()
            case frames.Built(info):
                self._info = info
            case frames.Started():
                self._up()
            case frames.NotStarted():
                self.on_not_started(message)
            case frames.Dying():
                self.on_dying(message)
            case frames.StepFailed():
                self.keep_flight(FAILED_STEP, self.child)
            case frames.Planned():
                pass

    def _up(self) -> None:
        """Resume the requests of the last process in the new one, and accept requests again."""
        self.judge.outage.end()
        if resumed := self._requests.resume_after():
            self._link.resume(resumed)
            log.warning("%d requests go on in the new engine process", len(resumed))
        self._try_suspect()
        self.on_started()

    def _deliver(self, output: RequestOutput) -> None:
        entry = self._requests.get(output.request_id)
        if entry is None:
            return  # the request was aborted in the meantime
        keeps_up = entry.take(output)
        self.has_worked = self.has_worked or bool(output.token_ids)
        if forgiven := self._requests.got_on(entry, output):
            self.judge.policy.forgive(forgiven)
        if output.finish_reason is not None:
            self._requests.end(output.request_id)
            self._on_change()
        elif not keeps_up:
            self.abort(output.request_id)

    def down(self) -> None:
        self.regroup.lost()
        super().down()

    def _on_change(self) -> None:
        """Report that a request has ended or that the process has started or ended."""
        if not len(self._requests):
            self._idle.set()
        self._options.changed()


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
