"""Orderings that the papers claim, on loads that take seconds: `python -m benchmarks experiments NAME --quick`.

Each experiment has a small configuration and the comparisons that must come out as in its paper. The virtual clock
makes them repeatable: an ordering that fails is a change of the scheduler or of the simulator.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.experiments import apt, hybridserve, hygen, kunserve, larry, parts, sal
from benchmarks.experiments.apt_point import Load
from benchmarks.experiments.machine import MachineSpec
from benchmarks.experiments.surface import Target
from benchmarks.experiments.table import Result, mean


class Ordering(NamedTuple):
    """A claim: `high` is at least `factor` times `low`."""

    claim: str
    low: float
    high: float
    factor: float = 1.0

    @property
    def holds(self) -> bool:
        """Whether the claim is true; two zeros show nothing."""
        return self.high >= self.factor * self.low and self.high > 0.0


class Quick(NamedTuple):
    """The small configuration of an experiment, the orderings of its results, and the seeds that they take."""

    config: Any
    orderings: Callable[[Sequence[Result]], list[Ordering]]
    seeds: int = 1
    traced: float | None = None
    """Seconds of the window with public traces, whose requests differ more than made ones; None: that of `config`."""


def of(results: Sequence[Result], key: str, policy: str, **setting: Any) -> float:
    """Return the mean of a metric over the results of a policy with these settings. Raise ValueError without any."""
    found = [r for r in results if r.policy == policy and all(r.setting.get(k) == v for k, v in setting.items())]
    if not found:
        raise ValueError(f"no result of {policy} with {setting}")
    return mean(found, key)


def _hygen(results: Sequence[Result]) -> list[Ordering]:
    def rate(policy: str, metric: str) -> float:
        return of(results, "offline_throughput", policy, metric=metric)

    limited = of(results, "interference_tbt_mean", "tidemill", metric="tbt_mean")
    free = of(results, "interference_tbt_mean", "sarathi++")
    return [
        Ordering(
            "tokens/s, P99 TBT: fixed rate < flat budget", rate("hygen-star", "tbt_p99"), rate("hygen", "tbt_p99"), 2
        ),
        Ordering("tokens/s, mean TBT: flat < weighted budget", rate("hygen", "tbt_mean"), rate("tidemill", "tbt_mean")),
        Ordering("interference with mean TBT: budget < no control", limited, free, 3.0),
    ]


def _parts(results: Sequence[Result]) -> list[Ordering]:
    def error(profile: str) -> float:
        return of(
            [r for r in results if r.setting["part"] == "predictor"], "predictor_mape", "tidemill", profile=profile
        )

    def rate(policy: str, **setting: Any) -> float:
        return of(results, "offline_throughput", policy, **setting)

    rates = [rate("hygen", part="rates", profile="full", metric="tbt_p99", rate=at) for at in (2.0, 0.5)]
    broken = [of(results, "interference_tbt_mean", policy, part="profiler") for policy in ("hygen", parts.NAIVE)]
    orders = [rate("tidemill", part="psm", offline_policy=order) for order in ("fcfs", "psm")]
    return [
        Ordering("error: default < the paper's features", error("full"), error("hygen"), 1.2),
        Ordering("error: own < another device's latency model", error("full"), error("a40"), 10.0),
        Ordering("offline tokens/s: fewer at a higher online rate", rates[0], rates[1], 1.2),
        Ordering("interference: budget found for the SLO < the SLO as budget", broken[0], broken[1], 1.2),
        Ordering("offline tokens/s: arrival order < prefix order", orders[0], orders[1], 1.5),
    ]


def _kunserve(results: Sequence[Result]) -> list[Ordering]:
    def p99(arm: str) -> float:
        return of(results, "ttft_p99", arm)

    found = [Ordering(f"P99 TTFT: drop < {arm}", p99(kunserve.OURS), p99(arm), 1.5) for arm in ("recompute", "swap")]
    bubbles, preempted = (
        [of(results, key, arm) for arm in (kunserve.OURS, other)]
        for key, other in (("bubbles", "no lookahead"), ("preemptions", "recompute"))
    )
    found.append(Ordering("bubbles: with < without lookahead", bubbles[0], bubbles[1], 1.2))
    return [*found, Ordering("preemptions: drop < recompute", preempted[0], preempted[1], 2.0)]


def _bursts(results: Sequence[Result]) -> list[Ordering]:
    def value(key: str, arm: str) -> float:
        return of(results, key, arm)

    ours, rival, kept = kunserve.OURS, "recompute", "no restore"
    return [
        Ordering("drops: one for each burst", 2.0, value("drops", ours)),
        Ordering("P50 TTFT: restored < pipelines for good", value("ttft_p50", ours), value("ttft_p50", kept)),
        Ordering("P99 TTFT: drop < recompute", value("ttft_p99", ours), value("ttft_p99", rival), 1.5),
        Ordering("SLO violations: drop < recompute", value("violations_5", ours), value("violations_5", rival), 2.0),
    ]


def _larry(results: Sequence[Result]) -> list[Ordering]:
    found = []
    for key, claim in (("ttft_p50", "P50 TTFT"), ("ttft_p95", "P95 TTFT"), ("normalized_ttft_p95", "P95 TTFT a token")):
        best = min(of(results, key, policy) for policy in ("fcfs", "random", "trail+"))
        mine = of(results, key, "larry", alpha=1.0, served_ttft=None)
        found.append(Ordering(f"{claim}: LARRY < the best rival", mine, best, 1.1))
    served = of(results, "ttft_p50", "larry", served_ttft=larry.SERVED_TTFT)
    return [*found, Ordering("P50 TTFT: LARRY as served < 0.4 x fcfs", served, 0.4 * of(results, "ttft_p50", "fcfs"))]


def _sal(results: Sequence[Result]) -> list[Ordering]:
    def p99(router: str) -> float:
        return of(results, "ttft_p99", router)

    return [
        Ordering(f"P99 TTFT on unequal engines: SAL < {name}", p99("sal"), p99(name), 1.1)
        for name in ("round-robin", "random")
    ]


def _apt(results: Sequence[Result]) -> list[Ordering]:
    def kept(policy: str, **setting: Any) -> float:
        return of(results, "slo_attainment", policy, **setting)

    return [
        Ordering("attainment under overload: fcfs < apt", kept("fcfs"), kept("apt-kv"), 1.2),
        Ordering("attainment under overload: fcfs < goodput", kept("fcfs"), kept("goodput-kv"), 1.2),
    ]


def _llamas(results: Sequence[Result]) -> list[Ordering]:
    def kept(policy: str) -> float:
        return of(results, "slo_attainment", policy)

    return [
        Ordering("attainment: fcfs < goodput", kept("fcfs-kv"), kept("goodput-kv"), 1.2),
        Ordering("attainment: 16-bit < 8-bit cache", kept("fcfs-kv"), kept("fcfs-int8")),
    ]


def _hybrid(results: Sequence[Result]) -> list[Ordering]:
    found = []
    for load in HYBRID.loads:
        rate = {
            arm: of(results, "output_tokens_per_s", arm, model=load.model)
            for arm in ("flexgen-kv", "act-only", "hybrid")
        }
        better = max(rate["flexgen-kv"], rate["act-only"])
        found.append(Ordering(f"tokens/s of {load.model}: the better part < hybrid", better, rate["hybrid"]))
    return found


KUNSERVE_ARMS = ("recompute", "swap", kunserve.OURS, "no lookahead")
SLOW = MachineSpec("llama-2-13b", "a100-80gb")
"""A machine with long steps, so that a window holds few steps."""
HYBRID = replace(
    hybridserve.CONFIG,
    loads=(hybridserve.Load("opt-13b", 128, 512), hybridserve.Load("opt-30b", 128, 1920)),
    output=18,
)
QUICK = {
    "hygen": Quick(
        replace(
            hygen.CONFIG,
            machine=SLOW,
            rate=0.7,
            window=60.0,
            warm_up=5.0,
            cool_down=2.0,
            tolerances=(0.2,),
            several=(),
            offline_lines=400,
            searched=("rate", "flat", "tbt_mean"),
        ),
        _hygen,
        traced=300.0,
    ),
    "hygen-parts": Quick(
        replace(
            parts.CONFIG,
            base=replace(hygen.CONFIG, machine=SLOW, warm_up=5.0, cool_down=2.0, offline_lines=400),
            window=30.0,
            rates=(0.5, 2.0),
            targets=(Target("tbt_p99", 0.05),),
            profiles=(),
            promises=(0.2,),
            lines=600,
            mooncake=None,
        ),
        _parts,
    ),
    "kunserve": Quick(
        replace(kunserve.SHORT, arms=tuple(arm for arm in kunserve.ARMS if arm.name in KUNSERVE_ARMS)), _kunserve
    ),
    "kunserve-bursts": Quick(
        replace(kunserve.BURSTS_SHORT, arms=tuple(arm for arm in kunserve.BURSTS.arms if arm.name != "swap")), _bursts
    ),
    "larry": Quick(replace(larry.CONFIG, window=90.0, factors=(1.0,), rates=(("code", 2.0),)), _larry, seeds=3),
    "sal": Quick(
        replace(sal.CONFIG, fleets=(sal.Fleet("1+1", ("a100-40gb", "a40"), ("larry",), ("code",)),), window=40.0), _sal
    ),
    "apt-serve": Quick(
        apt.Config(
            parts=(
                apt.Part(
                    apt.OPT,
                    (Load("apt-chat", 1.0, 1.0, (0.8,)),),
                    tuple(arm for arm in apt.ARMS if arm.name in {"fcfs", "apt-kv", "goodput-kv"}),
                ),
            ),
            requests=120,
            cvs=(),
        ),
        _apt,
    ),
    "apt-serve-chat": Quick(
        replace(
            apt.CHATS,
            parts=(replace(apt.CHATS.parts[0], loads=(replace(apt.CHATS.parts[0].loads[0], rates=(5.0,)),)),),
            requests=200,
        ),
        _apt,
    ),
    "apt-serve-llama": Quick(
        replace(
            apt.LLAMAS_SHORT,
            parts=tuple(
                replace(part, loads=(replace(part.loads[0], rates=(1.0,)),)) for part in apt.LLAMAS_SHORT.parts
            ),
            requests=100,
        ),
        _llamas,
    ),
    "hybridserve": Quick(HYBRID, _hybrid),
}
"""Small configurations by experiment."""
