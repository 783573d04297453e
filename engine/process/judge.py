"""What follows from the death of an engine process: when the next one starts, and which request ends for it."""

from collections.abc import Callable, Sequence

from engine.flight import recorder as flight
from engine.process.causes import Origin, Outage, origin_of
from engine.process.policy import RestartPolicy
from engine.process.requests import Requests


class DeathJudge:
    """`waits`: requests wait here for the next process, so those in flight count as accepted. `refusal`: the words in
    which the system refused the last start."""

    def __init__(self, requests: Requests, policy: RestartPolicy, clock: Callable[[], float], *, waits: bool) -> None:
        self.policy = policy
        self.outage = Outage()
        self.refusal = ""
        self._requests = requests
        self._clock = clock
        self._waits = waits

    def judge(self, cause: str, recorded: Sequence[flight.AnyEntry], *, worked: bool) -> float | None:
        """Return the seconds until the next start; None: never.

        `recorded`: the entries of the process's flight recorder; `worked`: it gave tokens. A death in a trial does not
        count. A request that is proven to be the cause ends, and its earlier deaths count no more. If nothing else got
        on since the last such proof, the engine may be at fault, and the proof counts as one death.
        """
        origin, requests, now = origin_of(cause), self._requests, self._clock()
        if origin is Origin.SYSTEM:
            requests.suspects.died(cause, {}, now)
            return self.outage.refused(self.refusal, self.policy.max_delay)
        if origin is Origin.ASKED:
            requests.suspects.died(cause, {}, now)
            requests.acquit_all()
            return 0.0
        in_flight = requests.in_flight(flight.in_flight(recorded))
        if self._waits:  # otherwise the fleet has submitted them to another engine
            requests.open.accept(in_flight)
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
