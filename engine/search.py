"""From a workload and a latency model to the offline budget, by replay on the virtual clock (HyGen §4.2, and ours).

`python -m engine.search` reads one JSON job from standard input and prints the chosen parameters: the server runs it in
a process of its own, so that the search never takes time from a step. Torch-free, deterministic per job.
"""

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.request import EngineRequest, RequestClass, SamplingParams
from engine.scheduling.objective import StepObjective
from engine.virtual import Arrival, PredictedRunner, VirtualDriver, VirtualRun
from predictor.budget import BudgetParams, SearchResult, search_budget
from predictor.features import BatchFeatures
from predictor.model import LatencyModel
from predictor.online import OnlineModel, OnlineSettings
from predictor.slo import SLO, aggregate

WARM_UP_SHARE = 0.1
OFFLINE_PROMPT = 512
OFFLINE_OUTPUT = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """Online arrivals as (at seconds, prompt tokens, output tokens), and the mean lengths of offline requests."""

    arrivals: tuple[tuple[float, int, int], ...]
    seconds: float
    offline_prompt: int = OFFLINE_PROMPT
    offline_output: int = OFFLINE_OUTPUT

    @classmethod
    def poisson(cls, rate: float, prompt: int, output: int, seconds: float, seed: int) -> "Workload":
        """Poisson arrivals at `rate` requests a second with geometric-like lengths of the given means."""
        generator = random.Random(seed)
        at = 0.0
        arrivals: list[tuple[float, int, int]] = []
        while (at := at + generator.expovariate(rate)) < seconds:
            lengths = [max(1, round(generator.expovariate(1 / mean))) for mean in (prompt, output)]
            arrivals.append((at, lengths[0], lengths[1]))
        return cls(tuple(arrivals), seconds)

    def online(self, max_model_len: int) -> Iterator[Arrival]:
        """Requests with prompts of their own (no accidental prefix hits), cut to the context."""
        for index, (at, prompt, output) in enumerate(self.arrivals):
            prompt = min(prompt, max_model_len - 2)
            output = max(1, min(output, max_model_len - prompt))
            yield Arrival(at, _request(f"online-{index}", index, prompt, output, RequestClass.ONLINE))

    def offline(self, max_model_len: int, seed: int) -> Iterator[EngineRequest]:
        """Offline requests without end, lengths spread by half around their means."""
        generator = random.Random(seed)
        index = 0
        while True:
            prompt = min(max(1, round(self.offline_prompt * generator.uniform(0.5, 1.5))), max_model_len - 2)
            output = max(1, min(round(self.offline_output * generator.uniform(0.5, 1.5)), max_model_len - prompt))
            yield _request(f"offline-{index}", -1 - index, prompt, output, RequestClass.OFFLINE)
            index += 1


def _request(name: str, salt: int, prompt: int, output: int, request_class: RequestClass) -> EngineRequest:
    return EngineRequest(name, (salt,) + (0,) * (prompt - 1), SamplingParams(max_tokens=output), request_class)


def normal_noise(mape: float, count: int = 99) -> list[float]:
    """measured ÷ predicted of a model with that mean relative error, as if errors were log-normal: its quantiles."""
    errors = NormalDist(0.0, max(mape, 1e-9) * math.sqrt(math.pi / 2))
    return [math.exp(errors.inv_cdf((i + 0.5) / count)) for i in range(count)]


def replay(
    workload: Workload,
    model: LatencyModel,
    slo: SLO,
    config: SchedulerConfig,
    budget: BudgetParams,
    noise: Sequence[float] = (),
) -> dict[str, float]:
    """One run of the workload under a budget; metrics by the names of the reports. L = 0: online only.

    With `noise` (measured ÷ predicted of real steps) steps vary, and the core keeps the margins that it keeps live.
    """
    online = OnlineModel(model, OnlineSettings.with_error(_mean_error(noise)))
    core = EngineCore(config, model=online if noise else model, objective=StepObjective.from_slo(slo, budget))
    runner = PredictedRunner(model, noise, online.observe if noise else None)
    offline = workload.offline(config.max_model_len, seed=1) if budget.latency_budget > 0 else None
    arrivals = workload.online(config.max_model_len)
    driver = VirtualDriver(core, runner, arrivals, offline, backlog=2 * config.max_num_seqs)
    return metrics_of(driver.run(workload.seconds), slo)


def _mean_error(noise: Sequence[float]) -> float:
    return sum(abs(1.0 / ratio - 1.0) for ratio in noise) / len(noise) if noise else 0.0


def metrics_of(run: VirtualRun, slo: SLO) -> dict[str, float]:
    """Aggregates of the requests that arrived after the warm-up and had the time to start."""
    begin = WARM_UP_SHARE * run.end
    records = [r for r in run.online if r.arrival.at >= begin]
    started = [(r.ttft, r.gaps) for r in records if r.ttft is not None]
    keys = [objective.key for objective in slo.objectives]
    found = aggregate([(ttft, gaps) for ttft, gaps in started if ttft is not None], keys)
    good = sum(slo.good(r.ttft, r.gaps) for r in records if not r.rejected)
    found["slo_attainment"] = good / len(records) if records else 1.0
    found["offline_throughput"] = run.offline_tokens / run.end if run.end > 0 else 0.0
    return found


def step_range(model: LatencyModel, config: SchedulerConfig) -> tuple[float, float]:
    """Seconds of the smallest and of a full step: the range in which L is sought."""
    smallest, largest = BatchFeatures(), BatchFeatures()
    smallest.add_decodes(1, 1)
    largest.add_chunk(0, max(2, config.max_num_batched_tokens))
    low = model.predict(smallest)
    return low, max(2.0 * model.predict(largest), 2.0 * low)


def find_budget(
    first: Workload,
    second: Workload | None,
    model: LatencyModel,
    slo: SLO,
    config: SchedulerConfig,
    policy: str,
    noise: Sequence[float] = (),
    max_evaluations: int = 24,
) -> SearchResult:
    """Search on the first window, confirm on the second."""

    def evaluate_on(workload: Workload) -> Any:
        return lambda budget: replay(workload, model, slo, config, budget, noise)

    return search_budget(
        evaluate_on(first),
        slo,
        step_range(model, config),
        policy,
        confirm=evaluate_on(second) if second is not None else None,
        max_evaluations=max_evaluations,
    )


def make_job(
    first: Workload,
    second: Workload | None,
    model: LatencyModel,
    slo: SLO,
    config: SchedulerConfig,
    policy: str,
    noise: Sequence[float] = (),
) -> dict[str, Any]:
    """Everything that `main` needs, as JSON."""
    coefficients = {name: value for name, value in asdict(model).items() if not name.startswith("_")}
    return {
        "first": asdict(first),
        "second": asdict(second) if second is not None else None,
        "model": coefficients,
        "slo": str(slo),
        "config": asdict(config),
        "policy": policy,
        "noise": list(noise),
    }


def _workload(document: dict[str, Any]) -> Workload:
    arrivals = tuple((float(at), int(prompt), int(output)) for at, prompt, output in document.pop("arrivals"))
    return Workload(arrivals, **document)


def main() -> None:
    job = json.load(sys.stdin)
    lists = {name: tuple(job["model"][name]) for name in ("knots", "hinges", "buckets")}
    result = find_budget(
        _workload(job["first"]),
        _workload(job["second"]) if job["second"] is not None else None,
        LatencyModel(**{**job["model"], **lists}),
        SLO.parse(job["slo"]),
        SchedulerConfig(**job["config"]),
        job["policy"],
        job["noise"],
    )
    summary = {"params": asdict(result.params), "metrics": result.best.metrics, "in_reach": result.slo_in_reach}
    print(json.dumps({**summary, "confirmed": result.confirmed, "evaluations": result.num_evaluations}))


if __name__ == "__main__":
    main()
