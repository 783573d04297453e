"""From a workload and a latency model to the offline budget, by replay on the virtual clock (HyGen §4.2, and ours).

`python -m engine.search` reads one JSON job from standard input and prints the chosen parameters: the server runs it in
a process of its own, so that the search never takes time from a step. Torch-free, deterministic per job.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from engine.config import SchedulerConfig
from engine.replay import ReplayedServer, Workload, replay
from predictor.budget import BudgetParams, SearchResult, search_budget
from predictor.features import BatchFeatures
from predictor.load import Lengths, OnlineArrival
from predictor.model import LatencyModel
from predictor.slo import SLO


def step_range(model: LatencyModel, config: SchedulerConfig) -> tuple[float, float]:
    """Seconds of the smallest and of a full step: the range in which L is sought."""
    smallest, largest = BatchFeatures(), BatchFeatures()
    smallest.add_decodes(1, 1)
    largest.add_chunk(0, max(2, config.max_num_batched_tokens))
    low = model.predict(smallest)
    return low, max(2.0 * model.predict(largest), 2.0 * low)


def find_budget(
    first: Workload, second: Workload | None, server: ReplayedServer, max_evaluations: int = 24
) -> SearchResult:
    """Search on the first window, confirm on the second."""

    def evaluate_on(workload: Workload) -> Callable[[BudgetParams], dict[str, float]]:
        return lambda budget: replay(workload, server, budget)

    return search_budget(
        evaluate_on(first),
        server.slo,
        step_range(server.model, server.config),
        server.fill_policy,
        confirm=evaluate_on(second) if second is not None else None,
        max_evaluations=max_evaluations,
    )


def make_job(first: Workload, second: Workload | None, server: ReplayedServer) -> dict[str, Any]:
    """Everything that `main` needs, as JSON."""
    described = {field.name: getattr(server, field.name) for field in fields(server)}
    described["model"] = {name: value for name, value in asdict(server.model).items() if not name.startswith("_")}
    described["config"] = asdict(server.config)
    described["slo"] = str(server.slo)
    return {
        "first": asdict(first),
        "second": asdict(second) if second is not None else None,
        "server": described,
    }


def _workload(document: dict[str, Any]) -> Workload:
    arrivals = tuple(OnlineArrival(float(at), Lengths(*lengths)) for at, lengths in document["arrivals"])
    return Workload(arrivals, document["seconds"], tuple(Lengths(*lengths) for lengths in document["offline_lengths"]))


def _server(document: dict[str, Any]) -> ReplayedServer:
    model = document["model"]
    lists = {name: tuple(model[name]) for name in ("knots", "hinges", "buckets")}
    return ReplayedServer(
        **{
            **document,
            "model": LatencyModel(**{**model, **lists}),
            "slo": SLO.parse(document["slo"]),
            "config": SchedulerConfig(**document["config"]),
            "noise": tuple(document["noise"]),
        }
    )


def main() -> None:
    job = json.load(sys.stdin)
    second = _workload(job["second"]) if job["second"] is not None else None
    result = find_budget(_workload(job["first"]), second, _server(job["server"]))
    summary = {"params": asdict(result.params), "metrics": result.best.metrics, "in_reach": result.slo_in_reach}
    print(json.dumps({**summary, "confirmed": result.confirmed, "evaluations": result.num_evaluations}))


if __name__ == "__main__":
    main()
