"""The baseline of a tolerance: the most recent online requests, replayed on a server without offline work.

The live server cannot observe that run, so a replay with the same latency model provides it (HyGen measures a separate
run). This module selects the requests to replay and compares measurements with the replay. Torch-free.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.colocation.replay import ReplayedServer, ReplayWindow, run_workload
from predictor.budget import BudgetParams
from predictor.judge import MAX_AGE, WINDOW, Served, aggregate, excess_over
from predictor.load import OnlineArrival
from predictor.promise import DEFAULT_CLASS, DEFAULT_OUTPUT, service_of
from predictor.slo import SLO

LEAD_IN = 32
"""Requests replayed before the window, so that it does not start on an empty server. They are not compared."""


@dataclass(slots=True)
class _Recent:
    """A request that ended.

    Attributes:
        served: Its latencies; None if it was refused or aborted and only counts as load.
        compared: It was already compared with a baseline.
    """

    arrival: OnlineArrival
    served: Served | None
    beside_offline: bool
    compared: bool = False


class RecentRequests:
    """The most recent online requests, in order of their ends. Times on the engine's clock."""

    def __init__(self) -> None:
        self._ended: deque[_Recent] = deque(maxlen=WINDOW + LEAD_IN)
        self._window: list[_Recent] = []

    def add(self, arrival: OnlineArrival, served: Served | None, beside_offline: bool) -> None:
        self._ended.append(_Recent(arrival, served, beside_offline))

    @property
    def num_new(self) -> int:
        """Return the number of requests that ran beside offline work and were not compared with a baseline yet."""
        return sum(r.beside_offline and not r.compared and _is_compared(r.served) for r in self._ended)

    def window(self, running: Iterable[OnlineArrival], now: float) -> tuple[list[OnlineArrival], list[bool]]:
        """Return the requests to replay, by arrival, and whether each one is compared. `compare` uses the same window.

        `running`: unfinished requests with their current lengths, which are part of the load.
        """
        ended = [recent for recent in self._ended if recent.arrival.at > now - MAX_AGE]
        window = [*ended, *(_Recent(arrival, None, False) for arrival in running)]
        self._window = sorted(window, key=lambda recent: recent.arrival.at)
        lead_in = LEAD_IN if len(ended) > 2 * LEAD_IN else 0
        counted = [index >= lead_in and _is_compared(r.served) for index, r in enumerate(self._window)]
        return [recent.arrival for recent in self._window], counted

    def compare(
        self, slo: SLO, aggregates: dict[str, float], own: Sequence[tuple[float, float] | None]
    ) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield (arrival, excess by key) of every request beside offline work that was not compared before."""
        for recent, alone in zip(self._window, own, strict=True):
            served = recent.served
            if alone is None or served is None or recent.compared or not recent.beside_offline:
                continue
            recent.compared = True
            excesses = {o.key: excess_over(o, served, aggregates, alone) for o in slo.objectives}
            yield recent.arrival.at, {key: value for key, value in excesses.items() if value is not None}


def _is_compared(served: Served | None) -> bool:
    """Return whether a tolerance applies to a request: it was served, and is not of a named class."""
    return served is not None and service_of(served.promise) == DEFAULT_CLASS


def workload_of(arrivals: Sequence[OnlineArrival]) -> ReplayWindow:
    """Return the workload of `arrivals` at their own times.

    The unknown output of a refused request is estimated.
    """
    begin = arrivals[0].at
    rows = [
        a._replace(at=a.at - begin, lengths=a.lengths._replace(output=a.lengths.output or DEFAULT_OUTPUT))
        for a in arrivals
    ]
    return ReplayWindow(tuple(rows), rows[-1].at)


def replay_alone(
    workload: ReplayWindow, server: ReplayedServer, counted: Sequence[bool]
) -> tuple[dict[str, float], list[tuple[float, float] | None]]:
    """Replay without offline work. Return the SLO's aggregates by key, and each request's TTFT and mean gap in seconds.

    Only `counted` requests are aggregated. The others, and requests without a token, get None.
    """
    run = run_workload(workload, server, BudgetParams("tidemill", 0.0))
    own: list[tuple[float, float] | None] = []
    spans: list[tuple[float, list[float]]] = []
    for record, counts in zip(run.online, counted, strict=True):
        ttft, gaps = record.ttft, record.gaps
        if not counts or ttft is None:
            own.append(None)
            continue
        own.append((ttft, sum(gaps) / len(gaps) if gaps else 0.0))
        spans.append((ttft, gaps))
    return aggregate(spans, [objective.key for objective in server.slo.objectives]), own
