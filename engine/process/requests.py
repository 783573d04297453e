"""The requests that are open in an engine process: what it takes to go on with them in the next one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput, RequestTimes, Resumption
from engine.errors import EngineUnavailableError, ErrorInfo, TidemillError
from engine.process.suspects import Suspicion
from engine.stream import RequestStream


@dataclass(slots=True)
class OpenRequest:
    """A request and what it has been given. `arrival`: seconds on the monotonic clock, which all processes share;
    `accepted`: an engine has taken it, and whoever comes next must; `moved`: its first engine has been given up;
    `suspicion`: what goes with it from one engine to another."""

    request: EngineRequest
    stream: RequestStream
    arrival: float
    accepted: bool = False
    moved: bool = False
    suspicion: Suspicion | None = None
    token_ids: list[int] = field(default_factory=list)
    last: RequestOutput | None = None

    def take(self, output: RequestOutput) -> bool:
        """Pass an output on; False: its reader is too far behind."""
        self.token_ids.extend(output.token_ids)
        self.last = output
        return self.stream.push(output)

    @property
    def is_online(self) -> bool:
        return self.request.request_class is RequestClass.ONLINE

    @property
    def num_computed(self) -> int:
        """Its tokens that have surely been computed: all that are known but the last."""
        return len(self.request.prompt_token_ids) + len(self.token_ids) - 1

    def resumed(self, apart_until: int = 0) -> EngineRequest:
        """The request as the next engine must be given it."""
        last = self.last
        if last is None:
            resumption = Resumption((), RequestTimes(self.arrival), apart_until=apart_until)
        else:
            cached, preemptions = last.num_cached_tokens, last.num_preemptions
            resumption = Resumption(tuple(self.token_ids), last.times, cached, preemptions, apart_until)
        return replace(self.request, resumed=resumption)

    def end(self, reason: FinishReason, now: float, error: TidemillError | None = None) -> None:
        """Its terminal output, made here."""
        last = self.last
        times = RequestTimes(self.arrival) if last is None else last.times
        self.stream.push(
            RequestOutput(
                request_id=self.request.request_id,
                token_ids=(),
                logprobs=None,
                times=times._replace(finished=now),
                num_prompt_tokens=len(self.request.prompt_token_ids),
                num_cached_tokens=0 if last is None else last.num_cached_tokens,
                num_output_tokens=len(self.token_ids),
                finish_reason=reason,
                error=None if error is None else ErrorInfo.of(error),
                num_preemptions=0 if last is None else last.num_preemptions,
                request_class=self.request.request_class,
                beside_offline=last is not None and last.beside_offline,
            )
        )


class OpenRequests:
    """All of them, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenRequest] = {}
        self.num_offline = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._by_id.values()))

    def add(self, entry: OpenRequest) -> None:
        self._by_id[entry.request.request_id] = entry
        self.num_offline += entry.request.request_class is RequestClass.OFFLINE

    def get(self, request_id: str) -> OpenRequest | None:
        return self._by_id.get(request_id)

    def pop(self, request_id: str) -> OpenRequest | None:
        entry = self._by_id.pop(request_id, None)
        if entry is not None:
            self.num_offline -= entry.request.request_class is RequestClass.OFFLINE
        return entry

    def set_lane(self, job: str, lane: Lane) -> None:
        """The next engine is to know it, too."""
        for entry in self._by_id.values():
            if entry.request.job == job and entry.request.request_class is RequestClass.OFFLINE:
                entry.request = replace(entry.request, lane=lane)

    def accepted(self) -> list[OpenRequest]:
        """What the next engine must be given."""
        return [entry for entry in self._by_id.values() if entry.accepted]

    def accept(self, request_ids: Iterable[str]) -> None:
        """An engine has taken these, or had begun to. Unknown ids are ignored."""
        for request_id in request_ids:
            if (entry := self._by_id.get(request_id)) is not None:
                entry.accepted = True

    def take(self, may_go: Callable[[OpenRequest], bool]) -> list[OpenRequest]:
        """Take accepted requests out, for another engine."""
        taken = [entry for entry in self._by_id.values() if entry.accepted and may_go(entry)]
        for entry in taken:
            self.pop(entry.request.request_id)
        return taken

    def end_all(self, now: float, why: str) -> None:
        """Nobody goes on with them."""
        for request_id, entry in list(self._by_id.items()):
            self.pop(request_id)
            entry.end(FinishReason.ERROR, now, EngineUnavailableError(why, retry_after=5.0))
