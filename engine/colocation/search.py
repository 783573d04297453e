"""Finds the offline budget for a workload and a latency model by replay on a virtual clock (HyGen §4.2, and ours).

`python -m engine.colocation.search PRIORITY PARENT` reads one JSON job from standard input and prints its answer. The
server runs it in a low-priority process (`search_child`), so that it takes no time from steps. It exits with its parent
process PARENT. Torch-free and deterministic per job.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from engine.colocation.baseline import replay_alone
from engine.colocation.replay import ReplayedServer, Workload, replay
from engine.config import SchedulerConfig
from engine.machine.processes import end_with
from predictor.budget import MAX_CONFIRMATIONS, BudgetParams, SearchResult, search_budget, to_plain
from predictor.features import BatchFeatures
from predictor.load import Lengths, OnlineArrival
from predictor.model import LatencyModel
from predictor.reach import Reach
from predictor.refit import refit
from predictor.samples import Sample, SampleLog
from predictor.slo import SLO

NICENESS = 19
Job = dict[str, Any]
"""Plain JSON values."""


def step_range(model: LatencyModel, config: SchedulerConfig) -> tuple[float, float]:
    """Return the seconds of the smallest step and twice those of a full one: the search range of L."""
    smallest, largest = BatchFeatures(model.reach), BatchFeatures(model.reach)
    smallest.add_decodes(1, 1)
    largest.add_chunk(0, max(2, config.max_num_batched_tokens))
    low = model.predict(smallest)
    return low, max(2.0 * model.predict(largest), 2.0 * low)


def find_budget(
    first: Workload, others: Sequence[Workload], server: ReplayedServer, max_evaluations: int = 24
) -> SearchResult:
    """Search on the first window and confirm on the others. `max_evaluations`: for a single other window."""

    def evaluate_on(workload: Workload) -> Callable[[BudgetParams], dict[str, float]]:
        return lambda budget: replay(workload, server, budget)

    return search_budget(
        evaluate_on(first),
        server.slo,
        step_range(server.model, server.config),
        server.fill_policy,
        confirm=[evaluate_on(other) for other in others],
        max_evaluations=max_evaluations + (MAX_CONFIRMATIONS + 1) * max(0, len(others) - 1),
    )


def budget_job(first: Workload, others: Sequence[Workload], server: ReplayedServer) -> Job:
    """Return the job of a budget search on the first window, confirmed on the others."""
    return {
        "kind": "budget",
        "first": _plain(first),
        "others": [_plain(other) for other in others],
        "server": _describe(server),
    }


def baseline_job(workload: Workload, counted: list[bool], server: ReplayedServer) -> Job:
    """Return the job of a replay without offline work. `counted`: whether each request counts in the aggregates."""
    return {"kind": "baseline", "workload": _plain(workload), "counted": counted, "server": _describe(server)}


def refit_job(model: LatencyModel, sweep: Iterable[Sample], recent: SampleLog) -> Job:
    """Return the job of a refit of `model`; see `predictor.refit`."""
    logs = {"sweep": SampleLog(sweep).encode(), "recent": recent.encode()}
    return {"kind": "refit", "model": _describe_model(model), **logs}


def _plain(workload: Workload) -> Job:
    arrivals = [[at, list(lengths)] for at, lengths in workload.arrivals]
    offline = [list(lengths) for lengths in workload.offline_lengths]
    return {"arrivals": arrivals, "seconds": workload.seconds, "offline_lengths": offline}


def _describe(server: ReplayedServer) -> Job:
    described = {field.name: getattr(server, field.name) for field in fields(server)}
    described["model"] = _describe_model(server.model)
    described["config"] = asdict(server.config)
    described["slo"] = str(server.slo)
    return described


def _describe_model(model: LatencyModel) -> Job:
    plain = {name: value for name, value in asdict(model).items() if not name.startswith("_")}
    return plain | {"reach": str(model.reach)}


def model_of(document: Job) -> LatencyModel:
    """Decode a model from an answer. Raises ValueError, KeyError or TypeError if it is invalid."""
    lists = {name: tuple(document[name]) for name in ("knots", "hinges", "buckets", "decode_buckets")}
    return LatencyModel(**{**document, **lists, "reach": Reach.parse(document["reach"])})


def _workload(document: Job) -> Workload:
    arrivals = tuple(OnlineArrival(float(at), Lengths(*lengths)) for at, lengths in document["arrivals"])
    return Workload(arrivals, document["seconds"], tuple(Lengths(*lengths) for lengths in document["offline_lengths"]))


def _server(document: Job) -> ReplayedServer:
    return ReplayedServer(
        **{
            **document,
            "model": model_of(document["model"]),
            "slo": SLO.parse(document["slo"]),
            "config": SchedulerConfig(**document["config"]),
            "noise": tuple(document["noise"]),
        }
    )


def answer(job: Job) -> Job:
    """Run a job and return its answer.

    `params`: the budget found. `aggregates`, `own`: see `engine.colocation.baseline`. `model` and its errors: see
    `predictor.refit`.
    """
    if job["kind"] == "refit":
        return _refit(job)
    server = _server(job["server"])
    if job["kind"] == "baseline":
        aggregates, own = replay_alone(_workload(job["workload"]), server, job["counted"])
        return {"aggregates": aggregates, "own": own}
    result = find_budget(_workload(job["first"]), [_workload(other) for other in job["others"]], server)
    found = {"params": to_plain(result.params), "metrics": result.best.metrics, "in_reach": result.slo_in_reach}
    return {**found, "confirmed": result.confirmed, "evaluations": result.num_evaluations}


def _refit(job: Job) -> Job:
    found = refit(model_of(job["model"]), list(SampleLog.decode(job["sweep"])), list(SampleLog.decode(job["recent"])))
    if found is None:
        return {"model": None}
    errors = {"error": found.error, "error_before": found.error_before, "better": found.better}
    return {"model": _describe_model(found.model), "slow": found.is_of_slow_device, **errors}


def step_aside(priority: str) -> None:
    """Lower the priority of this process.

    `idle`: run only on idle cores. `nice`: the smallest regular share; a niceness alone still takes CPU time, and a
    step waits for each of its threads. Any other value: keep the priority.
    """
    if priority in ("idle", "nice"):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    if priority == "idle" and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    priority, parent = sys.argv[1:]
    end_with(int(parent))
    step_aside(priority)
    print(json.dumps(answer(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
