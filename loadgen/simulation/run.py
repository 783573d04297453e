"""Run of a load generator workload on a simulated machine: the real engine core on a virtual clock.

Deterministic for equal arguments.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.client import EngineStats
from engine.core import EngineCore
from engine.scheduling.objective import StepObjective
from engine.scheduling.report import report_stats
from engine.scheduling.speculation import Speculation
from engine.speculation.trace import TracedDrafts
from engine.virtual import Arrival, VirtualDriver, VirtualRecord, VirtualRun
from loadgen.plan import FIRST_OFFLINE, PromptMaker, TokenIds, Windows
from loadgen.simulation.device import Simulated
from loadgen.simulation.gpu import SIMULATED_TOKEN
from loadgen.simulation.policies import find_policy
from loadgen.stats import spread
from loadgen.traces import Content, Trace
from loadgen.workloads import Workload
from predictor.budget import Promise
from predictor.online import OnlineModel

Metrics = dict[str, float]
"""Metrics by the names of the load generator's reports."""
OUTPUT_CAP = 1024
"""`max_tokens` of requests with a shorter true length, as set by a client that does not know the length."""
SIMULATED_JOB = "job"
"""Job of all offline requests, so that they share their drafts."""

Row = tuple[float, int, int]
"""(arrival in seconds, prompt tokens, output tokens)."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Scheduling policy of each class. `backlog`: open offline requests (default: twice the capacity of a step)."""

    online: str = "fcfs"
    offline: str = "psm"
    backlog: int | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """A run, its measure window in seconds, and the engine's statistics at its end."""

    run: VirtualRun
    window: tuple[float, float]
    stats: EngineStats

    @property
    def prefix_hits(self) -> float:
        """Return the share of prompt tokens found in the cache."""
        return self.stats.prefix_hit_tokens / max(self.stats.prefix_queried_tokens, 1)

    @property
    def tokens_per_decode(self) -> float:
        """Return the tokens per decode, with accepted drafts."""
        decodes = self.stats.decode_tokens - self.stats.accepted_tokens
        return self.stats.decode_tokens / decodes if decodes else 1.0


def simulate(
    device: Simulated,
    made: Workload,
    windows: Windows,
    objective: StepObjective,
    seed: int,
    policies: Policies = Policies(),
) -> Metrics:
    """Run and measure. Metrics have the names of the reports; in addition `prefix_hits` (share of tokens) and
    `tokens_per_decode`, with accepted drafts."""
    ran = run_workload(device, made, windows, objective, seed, policies)
    more = {"prefix_hits": ran.prefix_hits, "tokens_per_decode": ran.tokens_per_decode}
    return {**measure(ran.run, *ran.window), **more}


def run_workload(
    device: Simulated,
    made: Workload,
    windows: Windows,
    objective: StepObjective,
    seed: int,
    policies: Policies,
    *,
    drain: bool = False,
    promises: Sequence[Promise | None] = (None,),
) -> Ran:
    """Run a workload until the horizon, or with `drain` until every online request has ended or its time is up.

    The online requests have the `promises` in turn.

    Where the machine caches prefixes, prompts are the token ids that the load generator would send, else all tokens are
    alike. Jobs whose lines share prefixes end with their last line; others start over until the horizon.
    """
    config, shared = device.config, shares_prefixes(made)
    maker = PromptMaker(TokenIds(), "completions", seed, 0) if config.enable_prefix_caching else None
    model, runner = device.start(seed)
    core = _make_core(device, model, objective, seed, policies)
    limit, end = config.max_model_len, math.inf if windows.horizon is None else windows.horizon
    found = [] if made.online is None else requests(made.online, "n", maker, limit, RequestClass.ONLINE)
    arrivals = [
        each if promise is None else Arrival(each.at, replace(each.request, promise=promise))
        for each, promise in zip(found, itertools.cycle(promises), strict=False)
    ]
    jobs = [job.lines for job in made.jobs if len(job.lines)]
    endless = not shared and math.isfinite(end)
    offline = (arrival.request for arrival in _lines(jobs, maker, limit, endless=endless)) if jobs else None
    measured = (windows.warmup, end - windows.cooldown)
    backlog = policies.backlog or 2 * config.max_num_seqs
    driver = VirtualDriver(core, runner, arrivals, offline, backlog=backlog, window=measured)
    run = driver.run(end, drain=windows.drain if drain else 0.0)
    return Ran(run, measured, report_stats(core.state))


def _make_core(
    device: Simulated, model: OnlineModel, objective: StepObjective, seed: int, policies: Policies
) -> EngineCore:
    # Without a cache the prefix tree has nothing to order by.
    is_idle = policies.offline == "psm" and not device.config.enable_prefix_caching
    return EngineCore(
        device.config,
        online_policy=find_policy(policies.online),
        offline_policy="fcfs" if is_idle else policies.offline,
        model=model,
        objective=objective,
        speculation=None if device.drafts is None else Speculation(drafts=TracedDrafts(device.drafts, seed)),
    )


def shares_prefixes(made: Workload) -> bool:
    """Return whether any prompt of the workload has a part that others may share."""
    traces = [job.lines for job in made.jobs] + ([made.online] if made.online is not None else [])
    return any(content.segments for trace in traces for content in trace.content)


def _lines(jobs: Sequence[Trace], maker: PromptMaker | None, limit: int, *, endless: bool) -> Iterator[Arrival]:
    for turn in itertools.count():
        first = FIRST_OFFLINE
        for number, job in enumerate(jobs):
            yield from requests(job, f"f{turn}.{number}.", maker, limit, RequestClass.OFFLINE, first)
            first += len(job)
        if not endless:
            return


def requests(
    trace: Trace, name: str, maker: PromptMaker | None, limit: int, request_class: RequestClass, first: int = 0
) -> Iterator[Arrival]:
    """Return the requests of a trace, with prompts numbered from `first` as by the load generator."""
    for index, row in enumerate(rows_of(trace, limit)):
        tokens: tuple[int, ...] = ()
        if maker is not None:
            shown = Content(segments=trace.content_of(index).segments)
            tokens = tuple(maker.fields(first + index, row[1], shown)["prompt"])
        yield Arrival(row[0], request_of(f"{name}{index}", row, request_class, limit, tokens))


def rows_of(trace: Trace, limit: int) -> tuple[Row, ...]:
    """Return a trace as rows, with prompts and answers cut to fit a context of `limit` tokens."""
    rows = []
    for at, prompt, output in zip(trace.arrived_at, trace.input_tokens, trace.output_tokens, strict=True):
        output = max(1, min(int(output), limit // 2))
        rows.append((float(at), max(1, min(int(prompt), limit - output)), output))
    return tuple(rows)


def request_of(
    name: str, row: Row, request_class: RequestClass, limit: int, head: tuple[int, ...] = ()
) -> EngineRequest:
    """Return a request that ends at a stop token, which is masked until the true length. `head`: first tokens of the
    prompt; the rest is padding that all prompts share."""
    _, prompt, output = row
    cap = max(output, min(OUTPUT_CAP, limit - prompt))
    sampling = SamplingParams(max_tokens=cap, min_tokens=output, stop_token_ids=frozenset({SIMULATED_TOKEN}))
    tokens = (*head[:prompt], *((1,) * (prompt - len(head))))
    job = SIMULATED_JOB if request_class is RequestClass.OFFLINE else ""
    return EngineRequest(name, tokens, sampling, request_class, job=job)


def measure(run: VirtualRun, begin: float, measure_end: float) -> Metrics:
    """Latency of the requests scheduled in the measure window (seconds), throughput of the tokens stamped in it.

    A request without a first token counts with the time it has waited so far, so that starving one never pays.
    """
    end = min(measure_end, run.end)
    online = [r for r in run.online if r.arrival.request.request_id.startswith("n")]
    chosen = [r for r in online if begin <= r.arrival.at <= end]
    ttft = np.array([r.token_times[0] - r.arrival.at if r.token_times else run.end - r.arrival.at for r in chosen])
    prompts = np.array([len(r.arrival.request.prompt_token_ids) for r in chosen])
    gaps = np.concatenate([*(np.diff(r.token_times) for r in chosen), np.empty(0)])
    ended = np.array([r.ended - r.arrival.at for r in chosen if r.ended is not None])
    sets = {"ttft": ttft, "tbt": gaps, "e2e": ended, "normalized_ttft": ttft / prompts if len(prompts) else ttft}
    found: Metrics = {}
    for name, values in sets.items():
        found |= spread(name, values, (50, 95, 99), empty=0.0)
    seconds = max(end - begin, 1e-9)
    mixed = [r for r in run.online if r.arrival.request.request_id.startswith("f")]
    offline = run.offline_tokens + _tokens(mixed, begin, end)
    found["requests"] = float(len(chosen))
    found["unfinished"] = float(sum(r.ended is None for r in chosen))
    found["offline_throughput"] = offline / seconds
    found["total_throughput"] = (offline + _tokens(online, begin, end)) / seconds
    found["steps"] = float(run.steps)
    found["end"] = run.end
    return found


def _tokens(records: Sequence[VirtualRecord], begin: float, end: float) -> int:
    """Output tokens stamped in the window, and the prompts whose first token is."""
    total = 0
    for record in records:
        times = record.token_times
        total += sum(begin <= at <= end for at in times)
        if times and begin <= times[0] <= end:
            total += len(record.arrival.request.prompt_token_ids)
    return total
