"""Find why engine processes die: the causes of an end, the reaction to each, and the request that is at fault.

| origin  | example                               | restart                     | server gives up | suspects requests |
|---------|---------------------------------------|-----------------------------|-----------------|-------------------|
| SYSTEM  | no descriptor, thread, disk or memory | retries at least every 30 s | never           | no                |
| OUTSIDE | SIGKILL by a step, kernel or operator | `RestartPolicy`             | six deaths      | by statistics     |
| REQUEST | a step hung or crashed the process    | `RestartPolicy`             | six deaths      | yes               |
| ENGINE  | failed start, every step fails        | `RestartPolicy`             | six deaths      | no                |
| ASKED   | SIGHUP found other weights            | at once                     | never           | no                |

A death of origin REQUEST or OUTSIDE no longer counts once a request is proven to be its cause (`Suspects`).

`Suspects` is a pure state machine over request ids.

The flight recorder names the requests in the steps that ran when a process died. A request in the steps of two deaths,
without passing the token of the first in between, is a suspect. Suspects resume one by one, each in steps of its own
(`Resumption.apart_until`): this is a trial. A suspect that passes the token at which the process died is acquitted.
Only deaths after a successful first step count, so the engine itself works.

A request is guilty if it was alone in at least `LONE_DEATHS` deaths that are not due to chance. A SIGKILL from a step
looks like one from outside. The test therefore compares the deaths in the request's trials with the deaths of processes
without it, since the first death in which it took part. After each lone death the pause before the next trial doubles;
this gives the test more time without the request. See docs/develop/process.md.

`Reputation` remembers the suspicions against requests that have left. A request that ended an engine process may be
aborted before that is proven, and be submitted again under another id. It is recognized by a digest of its prompt and
sampling parameters, or of its grammar if the process died while the grammar was compiled. The digests include the
tenant's cache salt.
"""

import enum
import errno
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from engine.api import EngineRequest
from engine.errors import EngineUnavailableError, TidemillError

log = logging.getLogger("tidemill.engine")


class Origin(enum.Enum):
    """The origin of a cause; see the table in the module docstring."""

    SYSTEM = enum.auto()
    OUTSIDE = enum.auto()
    REQUEST = enum.auto()
    ENGINE = enum.auto()
    ASKED = enum.auto()


SYSTEM, START, RENEWED = "system", "start", "renewed"

CAUSES = {
    SYSTEM: Origin.SYSTEM,
    "killed": Origin.OUTSIDE,
    "crash": Origin.REQUEST,
    "device": Origin.REQUEST,
    "hung": Origin.REQUEST,
    "loop": Origin.REQUEST,
    "protocol": Origin.REQUEST,
    "silent": Origin.REQUEST,
    "sick": Origin.ENGINE,
    START: Origin.ENGINE,
    RENEWED: Origin.ASKED,
}

_PEER_IS_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESRCH, errno.ECHILD})
"""The errno values with which calls on the socket or the process id report that the process has ended."""
_SYSTEM_MESSAGES = ("can't start new thread", "Cannot allocate memory", "Resource temporarily unavailable")
"""Messages with which Python and torch report ENOMEM or EAGAIN as a RuntimeError."""


LEAST_DELAY = 0.02
"""Minimum pause in seconds between two attempts."""


def origin_of(cause: str) -> Origin:
    """Return the origin of a named cause; REQUEST for an unknown name."""
    return CAUSES.get(cause, Origin.REQUEST)


def is_of_system(error: BaseException | None) -> bool:
    """Return whether the operating system refused a resource, so that the process is not at fault.

    Every errno counts except those that report the end of the peer. A TidemillError counts if its cause or context
    counts.
    """
    match error:
        case None:
            return False
        case OSError():
            return error.errno is not None and error.errno not in _PEER_IS_GONE
        case MemoryError():
            return True
        case RuntimeError() if any(said in str(error) for said in _SYSTEM_MESSAGES):
            return True
        case TidemillError():
            return is_of_system(error.__cause__ or error.__context__)
        case _:
            return False


def start_error(error: BaseException) -> TidemillError:
    """Convert the error of a failed start to a TidemillError with a message for the user."""
    if isinstance(error, TidemillError):
        return error
    return EngineUnavailableError(f"the engine process: {str(error) or type(error).__name__}")


class Outage:
    """A period in which the operating system refuses to start a process. `why`: the last reason; None: no outage.

    One line is logged for each new reason, not for each attempt.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self._attempts = 0

    def refused(self, why: str, max_delay: float) -> float:
        """Record a refused start. Return the seconds until the next attempt: 1, 2, 4 ... `max_delay`."""
        delay = max(LEAST_DELAY, min(max_delay, 2.0 ** min(self._attempts, 30)))
        self._attempts += 1
        if why != self.why:
            log.error("the system does not let an engine process start: %s; retrying every %g s", why, max_delay)
        self.why = why
        return delay

    def end(self) -> None:
        """End the outage: a process has started."""
        if self.why is not None:
            log.warning("an engine process has started after %d refused attempts (%s)", self._attempts, self.why)
        self.why, self._attempts = None, 0


SUSPECT_AFTER = 2
LONE_DEATHS = 3
HEAD_START = 5.0
"""Maximum time in seconds for which trials wait for a token of the other requests."""
CHANCE = 1e-6
"""Maximum probability that random deaths look like those of a guilty request."""
FIRST_REST, LONGEST_REST = 0.5, 60.0
"""Pause in seconds of process time before a trial, after the first lone death and at most."""
SUSPECTING = frozenset({Origin.OUTSIDE, Origin.REQUEST})
"""Origins of deaths that a request may have caused."""


@dataclass(slots=True)
class Suspicion:
    """The deaths in which a request took part. "Clock" is the clock of `Suspects`: seconds in which a process ran."""

    passes_at: int = 0  # computed tokens at which the request is acquitted: one more than at its deaths
    deaths: int = 0
    lone_deaths: int = 0  # deaths in trials of this request
    lone_seconds: float = 0.0  # length of the trials whose death may have come from outside
    seconds_before: float = 0.0  # clock at the first death
    deaths_before: int = 0  # deaths of all processes before the first one; that one counts as a death without it
    rests_until: float = 0.0  # clock at which the next trial may begin
    died_at: tuple[float, ...] = ()  # times of the deaths


class DeathVerdict(NamedTuple):
    """The verdict on a request that was alone in the steps of a process that died."""

    request_id: str
    deaths: int  # deaths in which the request took part
    guilty: bool  # whether the request is proven to end processes
    others_well: bool  # whether another request got tokens since the last proof
    suspicion: Suspicion


class Suspects:
    """The suspicions against open requests, and the suspect in `trial`.

    Times are seconds on the caller's clock. The internal clock only counts time in which a process is ready, without
    the trials that ended in a death.
    """

    def __init__(self) -> None:
        self._records: dict[str, Suspicion] = {}
        self._others_got_on = False
        self._awaited: set[str] = set()
        self._ready_at: float | None = None
        self._trial_at = 0.0
        self._seconds = 0.0
        self._num_deaths = 0
        self.trial: str | None = None

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request is a suspect, which must not share steps with other requests."""
        record = self._records.get(request_id)
        return record is not None and record.deaths >= SUSPECT_AFTER

    def died(self, cause: str, in_flight: Mapping[str, int], now: float) -> DeathVerdict | None:
        """Record the death of a process. Return a verdict if the request on trial was alone in its steps.

        Args:
            cause: A name in `engine.process.suspects`.
            in_flight: The open requests in its steps, with the tokens of each that the steps would have completed.
            now: The time of the death.

        A guilty request is forgotten.
        """
        trial, self.trial = self.trial, None
        lived = 0.0 if self._ready_at is None else now - self._ready_at
        tried = 0.0 if trial is None else now - self._trial_at
        was_ready, self._ready_at = self._ready_at is not None, None
        self._seconds += lived - tried
        if origin_of(cause) not in SUSPECTING or not was_ready:
            return None
        for request_id, tokens in in_flight.items():
            record = self._records.get(request_id)
            if record is None:
                record = Suspicion(seconds_before=self._seconds, deaths_before=self._num_deaths)
                self._records[request_id] = record
            record.passes_at = max(record.passes_at, tokens + 1)
            record.deaths += 1
            record.died_at += (now,)
        self._num_deaths += 1
        if trial is None or list(in_flight) != [trial]:
            return None
        record = self._records[trial]
        record.lone_deaths += 1
        record.lone_seconds += tried if origin_of(cause) is Origin.OUTSIDE else 0.0
        record.rests_until = self._seconds + rest(record.lone_deaths)
        guilty = record.lone_deaths >= LONE_DEATHS and self._chance(record) <= CHANCE
        verdict = DeathVerdict(trial, record.deaths, guilty, self._others_got_on, record)
        if guilty:
            self._num_deaths -= record.lone_deaths  # explained deaths do not count in the test of other requests
            self.forget(trial)
            self._others_got_on = False
        return verdict

    def _chance(self, record: Suspicion) -> float:
        """Return the probability that random deaths fall into the request's trials as often as they did."""
        lone = record.lone_deaths
        total = lone + max(1, self._num_deaths - record.deaths_before - lone)
        seconds = max(0.0, self._seconds - record.seconds_before) + record.lone_seconds
        return at_least(lone, total, record.lone_seconds / seconds if record.lone_seconds else 0.0)

    def deaths_to_try(self, request_ids: Iterable[str]) -> set[float]:
        """Return the times of the deaths in which suspects among these requests took part."""
        return {at for name in request_ids if name in self for at in self._records[name].died_at}

    def after(self, request_ids: Iterable[str], now: float) -> None:
        """Record that a process has started and resumes these requests; trials wait for the first token of any."""
        self._awaited = set(request_ids)
        self._ready_at = now

    def got_on(self, request_id: str, tokens: int) -> bool:
        """Record the computed tokens of a request. Return whether they acquit it."""
        self._awaited.discard(request_id)
        record = self._records.get(request_id)
        if record is None:
            self._others_got_on = True
        elif tokens >= record.passes_at:
            self.forget(request_id)
            return True
        return False

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended or is acquitted."""
        self._awaited.discard(request_id)
        self._records.pop(request_id, None)
        if self.trial == request_id:
            self.trial = None

    def release(self, request_id: str) -> Suspicion | None:
        """Forget a request that leaves. Return its suspicion, for another engine or for its next submission."""
        suspicion = self._records.get(request_id)
        self.forget(request_id)
        return suspicion

    def admit(self, request_id: str, suspicion: Suspicion) -> None:
        """Add the suspicion of a request that comes from another engine or is submitted again.

        Deaths without the request since then are unknown here, so its comparison starts again.
        """
        suspicion.deaths_before = self._num_deaths - suspicion.lone_deaths - 1
        suspicion.seconds_before = suspicion.rests_until = self._seconds
        self._records[request_id] = suspicion

    def apart_until(self, request_id: str) -> int:
        """Return `Resumption.apart_until` of a request; 0 if it may share steps with other requests."""
        return self._records[request_id].passes_at if request_id in self else 0

    def next_trial(self, now: float) -> str | None:
        """Start the next trial and return its suspect. Return None while a trial runs or no suspect is due."""
        if self.trial is not None or not self._records or self._ready_at is None:
            return None
        up = now - self._ready_at
        if self._awaited and up < HEAD_START:
            return None
        clock = self._seconds + up
        waiting = [name for name, record in self._records.items() if name in self and clock >= record.rests_until]
        self.trial = min(waiting, key=self._place, default=None)
        self._trial_at = now
        return self.trial

    def _place(self, request_id: str) -> tuple[bool, int]:
        """Return the sort key of a trial: suspects without a lone death first, then those with the most."""
        lone_deaths = self._records[request_id].lone_deaths
        return lone_deaths > 0, -lone_deaths


def rest(lone_deaths: int) -> float:
    """Return the pause in seconds of process time before the next trial of a request with `lone_deaths`."""
    return min(LONGEST_REST, FIRST_REST * 2.0 ** (lone_deaths - 1)) if lone_deaths else 0.0


def at_least(count: int, total: int, share: float) -> float:
    """Return the probability of `count` or more successes in `total` trials of probability `share` (binomial)."""
    if share <= 0.0 or share >= 1.0:
        return float(share >= 1.0)
    inside, outside, ways = math.log(share), math.log1p(-share), math.lgamma(total + 1)
    return math.fsum(
        math.exp(ways - math.lgamma(k + 1) - math.lgamma(total - k + 1) + k * inside + (total - k) * outside)
        for k in range(count, total + 1)
    )


REMEMBERED_SECONDS = 600.0
MAX_REMEMBERED = 1024


@dataclass(slots=True)
class _Entry:
    until: float
    suspicion: Suspicion
    guilty: bool


class Reputation:
    """Suspicions by content, each kept for `REMEMBERED_SECONDS`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def remember(self, request: EngineRequest, suspicion: Suspicion, now: float, *, guilty: bool = False) -> None:
        """Store the suspicion against a request that has left or is proven `guilty`."""
        died_preparing = suspicion.passes_at <= 1 and request.sampling.grammar is not None
        digest = _of_grammar(request) if died_preparing else _of_prompt(request)
        known = self._entries.get(digest)
        if known is not None and known.guilty and known.until >= now and not guilty:
            return
        self._entries[digest] = _Entry(now + REMEMBERED_SECONDS, suspicion, guilty)
        self._entries.move_to_end(digest)
        if len(self._entries) > MAX_REMEMBERED:
            self._entries.popitem(last=False)

    def find(self, request: EngineRequest, now: float) -> tuple[Suspicion, bool] | None:
        """Return the suspicion against a request's content and whether it is guilty; None if there is none."""
        for digest in self._digests(request):
            entry = self._entries.get(digest)
            if entry is not None and entry.until < now:
                del self._entries[digest]
            elif entry is not None:
                return replace(entry.suspicion), entry.guilty
        return None

    def forget(self, request: EngineRequest) -> None:
        """Forget the content of an acquitted request."""
        for digest in self._digests(request):
            self._entries.pop(digest, None)

    def clear(self) -> None:
        """Forget all content."""
        self._entries.clear()

    def _digests(self, request: EngineRequest) -> Iterator[bytes]:
        if self._entries:
            yield _of_prompt(request)
            if request.sampling.grammar is not None:
                yield _of_grammar(request)


def _of_prompt(request: EngineRequest) -> bytes:
    sampling = replace(request.sampling, seed=0)  # the gateway draws a seed per request
    facts = (request.cache_salt, request.adapter, request.pooling, sampling)
    digest = blake2b(repr(facts).encode(), digest_size=16)
    for start in range(0, len(request.prompt_token_ids), 1 << 16):
        digest.update(repr(request.prompt_token_ids[start : start + (1 << 16)]).encode())
    return digest.digest()


def _of_grammar(request: EngineRequest) -> bytes:
    return blake2b(repr((request.cache_salt, request.sampling.grammar)).encode(), digest_size=16).digest()
