"""Orderings that the papers claim, on loads that take seconds: `python -m benchmarks experiments NAME --quick`.

Each experiment has a small configuration and the comparisons that must come out as in its paper. The virtual clock
makes them repeatable: an ordering that fails is a change of the scheduler or of the simulator.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
    claims: Callable[["Of"], list[Ordering]]
    seeds: int = 1
    traced: float | None = None
    """Seconds of the window with public traces, whose requests differ more than made ones; None: that of `config`."""

    def orderings(self, results: Sequence[Result]) -> list[Ordering]:
        return self.claims(partial(of, results))


def of(results: Sequence[Result], key: str, policy: str, **setting: Any) -> float:
    """Return the mean of a metric over the results of a policy with these settings. Raise ValueError without any."""
    found = [r for r in results if r.policy == policy and all(r.setting.get(k) == v for k, v in setting.items())]
    if not found:
        raise ValueError(f"no result of {policy} with {setting}")
    return mean(found, key)


Of = Callable[..., float]
"""`of` for the results of a run."""


def _hygen(of: Of) -> list[Ordering]:
    rate = partial(of, "offline_throughput")
    flat, limited = rate("hygen", metric="tbt_mean"), of("interference_tbt_mean", "tidemill", metric="tbt_mean")
    fixed, loose = (rate(policy, metric="tbt_p99") for policy in ("hygen-star", "hygen"))
    return [
        Ordering("tokens/s, P99 TBT: fixed rate < flat budget", fixed, loose, 2),
        Ordering("tokens/s, mean TBT: flat < weighted budget", flat, rate("tidemill", metric="tbt_mean")),
        Ordering(
            "interference with mean TBT: budget < no control", limited, of("interference_tbt_mean", "sarathi++"), 3.0
        ),
    ]


def _parts(of: Of) -> list[Ordering]:
    error, rate = partial(of, "predictor_mape", "tidemill", part="predictor"), partial(of, "offline_throughput")
    rates = [rate("hygen", part="rates", profile="full", metric="tbt_p99", rate=at) for at in (2.0, 0.5)]
    broken = [of("interference_tbt_mean", policy, part="profiler") for policy in ("hygen", parts.NAIVE)]
    orders = [rate("tidemill", part="psm", offline_policy=order) for order in ("fcfs", "psm")]
    return [
        Ordering("error: default < the paper's features", error(profile="full"), error(profile="hygen"), 1.2),
        Ordering("error: own < another device's latency model", error(profile="full"), error(profile="a40"), 10.0),
        Ordering("offline tokens/s: fewer at a higher online rate", rates[0], rates[1], 1.2),
        Ordering("interference: budget found for the SLO < the SLO as budget", broken[0], broken[1], 1.2),
        Ordering("offline tokens/s: arrival order < prefix order", orders[0], orders[1], 1.5),
    ]


def _kunserve(of: Of) -> list[Ordering]:
    return [
        Ordering(f"{claim} < {other}", of(key, kunserve.OURS), of(key, rival), factor)
        for claim, other, key, rival, factor in (
            ("P99 TTFT: drop", "recompute", "ttft_p99", "recompute", 1.5),
            ("P99 TTFT: drop", "swap", "ttft_p99", "swap", 1.5),
            ("bubbles: with", "without lookahead", "bubbles", "no lookahead", 1.2),
            ("preemptions: drop", "recompute", "preemptions", "recompute", 2.0),
        )
    ]


def _bursts(of: Of) -> list[Ordering]:
    def pair(key: str, rival: str) -> tuple[float, float]:
        return of(key, kunserve.OURS), of(key, rival)

    return [
        Ordering("drops: one for each burst", 2.0, of("drops", kunserve.OURS)),
        Ordering("P50 TTFT: restored < pipelines for good", *pair("ttft_p50", "no restore")),
        Ordering("P99 TTFT: drop < recompute", *pair("ttft_p99", "recompute"), 1.5),
        Ordering("SLO violations: drop < recompute", *pair("violations_5", "recompute"), 2.0),
    ]


def _larry(of: Of) -> list[Ordering]:
    found = []
    for key, claim in (("ttft_p50", "P50 TTFT"), ("ttft_p95", "P95 TTFT"), ("normalized_ttft_p95", "P95 TTFT a token")):
        best = min(of(key, policy) for policy in ("fcfs", "random", "trail+"))
        mine = of(key, "larry", alpha=1.0, served_ttft=None)
        found.append(Ordering(f"{claim}: LARRY < the best rival", mine, best, 1.1))
    served = of("ttft_p50", "larry", served_ttft=larry.SERVED_TTFT)
    return [*found, Ordering("P50 TTFT: LARRY as served < 0.4 x fcfs", served, 0.4 * of("ttft_p50", "fcfs"))]


def _sal(of: Of) -> list[Ordering]:
    return [
        Ordering(f"P99 TTFT on unequal engines: SAL < {name}", of("ttft_p99", "sal"), of("ttft_p99", name), 1.1)
        for name in ("round-robin", "random")
    ]


def _apt(of: Of) -> list[Ordering]:
    fcfs, apt, goodput = (of("slo_attainment", policy) for policy in ("fcfs", "apt-kv", "goodput-kv"))
    return [
        Ordering("attainment under overload: fcfs < apt", fcfs, apt, 1.2),
        Ordering("attainment under overload: fcfs < goodput", fcfs, goodput, 1.2),
    ]


def _llamas(of: Of) -> list[Ordering]:
    fcfs, goodput, int8 = (of("slo_attainment", policy) for policy in ("fcfs-kv", "goodput-kv", "fcfs-int8"))
    return [
        Ordering("attainment: fcfs < goodput", fcfs, goodput, 1.2),
        Ordering("attainment: 16-bit < 8-bit cache", fcfs, int8),
    ]


def _hybrid(of: Of) -> list[Ordering]:
    found = []
    for load in HYBRID.loads:
        kv, act, hybrid = (
            of("output_tokens_per_s", arm, model=load.model) for arm in ("flexgen-kv", "act-only", "hybrid")
        )
        found.append(Ordering(f"tokens/s of {load.model}: the better part < hybrid", max(kv, act), hybrid))
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
