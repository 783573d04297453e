"""A stepped online load on one server, alone and beside a batch job, under several forms of the SLO, step by step.

`python -m benchmarks colocation --steps 0.3,1,2,0.3`: the arrivals are those of a seed, the same in every arm. Each
arm has a server of its own, which knows the latency profile and nothing of the load. What the server does without
offline work depends on the SLO's absolute limits alone: forms that share them share the run alone.

A request is good when it keeps every limit: TTFT from the scheduled arrival, a percentile or the mean of its own gaps.
A tolerance in percent has no limit of its own: its percentiles are taken over those of the same step alone, and its
means are compared as means.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import live, loads
from benchmarks.loads import JOB, Run
from engine.colocation.waits import objective_of
from engine.scheduling.objective import UNLIMITED
from loadgen.arrivals import RateCurve
from loadgen.records import RequestRecord
from predictor.judge import aggregate
from predictor.slo import SLO, nearest_rank

FORMS = ("tbt_p99", "tbt_mean", "5%")
"""Forms of the SLO."""
FEW = 100
"""Requests below which their P99 is the largest value."""

Serve = Callable[[str, Path], AbstractContextManager[str]]
"""(SLO, folder of profiles) -> a running server's address."""


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds [begin, end) of the run at `rate` online requests a second."""

    rate: float
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One step of one arm; times in seconds, None without a request that has one. `offline`: tokens/s."""

    online: int
    good: int
    ttft_mean: float | None
    ttft_p99: float | None
    tbt_mean: float | None
    tbt_p99: float | None
    offline: float

    @property
    def attainment(self) -> float | None:
        return self.good / self.online if self.online else None


@dataclass(frozen=True, slots=True)
class Row:
    """A step alone and beside the batch job."""

    step: Step
    alone: Figures
    beside: Figures

    @property
    def points(self) -> float | None:
        """Attainment beside - alone, in points; the requests are the same."""
        a, b = self.alone.attainment, self.beside.attainment
        return None if a is None or b is None else 100.0 * (b - a)


def steps_of(rates: Sequence[float], seconds: float) -> list[Step]:
    """One step after the other."""
    return [Step(rate, index * seconds, (index + 1) * seconds) for index, rate in enumerate(rates)]


def curve_of(rates: Sequence[float], seconds: float) -> RateCurve:
    return RateCurve(np.full(len(rates), seconds), np.array(rates))


def slo_of(form: str, ttft: float, tbt: float) -> SLO:
    """The SLO of a form; `tbt_mean` promises half of `tbt` seconds on average."""
    texts = {
        "tbt_p99": f"ttft_p99={ttft * 1e3:g}ms,tbt_p99={tbt * 1e3:g}ms",
        "tbt_mean": f"ttft_p99={ttft * 1e3:g}ms,tbt_mean={tbt * 500:g}ms",
    }
    return SLO.parse(texts.get(form, form))


def online_behaviour(slo: SLO) -> tuple[float, float, bool]:
    """What the SLO changes on a server without offline work."""
    objective = objective_of(slo, UNLIMITED)
    return objective.ttft, objective.tbt, objective.gap_limited


def bounds_of(slo: SLO, alone: Sequence[RequestRecord]) -> dict[str, float]:
    """Limits of single requests by key, seconds; those of tolerated percentiles come from the step `alone`."""
    base = aggregate([(r.ttft or 0.0, r.gaps().tolist()) for r in alone if r.ttft is not None])
    found = {o.key: o.limit for o in slo.objectives if o.limit is not None}
    for o in slo.objectives:
        if o.tolerance is not None and o.percentile is not None:
            found[o.key] = (1.0 + o.tolerance) * base[o.key]
    return found


def is_good(record: RequestRecord, bounds: dict[str, float]) -> bool:
    """Answered whole, and within every bound."""
    ttft, gaps = record.ttft, record.gaps().tolist()
    if not record.ok or ttft is None:
        return False
    for key, bound in bounds.items():
        metric, _, statistic = key.partition("_")
        if metric == "ttft":
            value = ttft
        elif not gaps:
            continue
        else:
            value = fmean(gaps) if statistic == "mean" else nearest_rank(gaps, int(statistic[1:]))
        if value > bound:
            return False
    return True


def within(run: Run, step: Step) -> list[RequestRecord]:
    """The online requests of a step, by their scheduled arrival."""
    return [record for record in run.online if step.begin <= record.scheduled_at < step.end]


def figures(run: Run, step: Step, bounds: dict[str, float]) -> Figures:
    """One step of an arm."""
    online = within(run, step)
    ttfts = [ttft for record in online if (ttft := record.ttft) is not None]
    gaps = [gap for record in online for gap in record.gaps().tolist()]
    tokens = sum(count for at, count in run.offline if step.begin <= at < step.end)
    return Figures(
        len(online),
        sum(is_good(record, bounds) for record in online),
        fmean(ttfts) if ttfts else None,
        nearest_rank(ttfts, 99) if ttfts else None,
        fmean(gaps) if gaps else None,
        nearest_rank(gaps, 99) if gaps else None,
        tokens / (step.end - step.begin),
    )


def compare(slo: SLO, steps: Sequence[Step], alone: Run, beside: Run) -> list[Row]:
    """Step by step, and the whole run as the last row."""
    rates = sum(step.rate * (step.end - step.begin) for step in steps) / steps[-1].end
    rows = []
    for step in (*steps, Step(rates, 0.0, steps[-1].end)):
        bounds = bounds_of(slo, within(alone, step))
        rows.append(Row(step, figures(alone, step, bounds), figures(beside, step, bounds)))
    return rows


def markdown(form: str, slo: SLO, rows: Sequence[Row]) -> str:
    """The table of one form."""
    mean = form != "tbt_p99"
    name = "mean" if mean else "P99"
    lines = [
        f"SLO `{slo}`",
        "",
        f"| online requests/s | requests | attainment alone | beside | points | TTFT {name} ms alone | beside "
        f"| TBT {name} ms alone | beside | offline tokens/s |",
        "|" + "---:|" * 10,
    ]
    for row in rows:
        alone, beside = row.alone, row.beside
        few = "" if mean or alone.online >= FEW else " (max)"
        ttfts = [arm.ttft_mean if mean else arm.ttft_p99 for arm in (alone, beside)]
        tbts = [arm.tbt_mean if mean else arm.tbt_p99 for arm in (alone, beside)]
        cells = [
            f"{row.step.rate:.3g}" if row is not rows[-1] else f"all ({row.step.rate:.3g})",
            str(alone.online),
            *(_cell(arm.attainment, 100.0, " %") for arm in (alone, beside)),
            "-" if row.points is None else f"{row.points:+.1f}",
            *(_cell(ttft, 1e3, few, 0) for ttft in ttfts),
            *(_cell(tbt, 1e3) for tbt in tbts),
            f"{beside.offline:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: float | None, factor: float, suffix: str = "", digits: int = 1) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}{suffix}"


def document(form: str, slo: SLO, rows: Sequence[Row]) -> dict[str, Any]:
    """The table of one form for programs; its last row is the whole run."""
    found = []
    for row in rows:
        arms = {"alone": row.alone, "beside": row.beside}
        plain = {name: {**asdict(arm), "attainment": arm.attainment} for name, arm in arms.items()}
        found.append({"step": asdict(row.step), "points": row.points, **plain})
    return {"form": form, "slo": str(slo), "rows": found}


class Arms:
    """Runs arms, each on a server of its own whose folder holds the latency profile and nothing learned."""

    def __init__(
        self,
        serve: Serve,
        folder: Path,
        curve: RateCurve,
        arrivals: list[float],
        seconds: float,
        job_rate: float | None = None,
    ) -> None:
        self._serve = serve
        self._folder = folder
        self._rate = curve.mean_rate
        self._arrivals = arrivals
        self._seconds = seconds
        self._job_rate = job_rate
        self._alone: dict[tuple[float, float, bool], Run] = {}
        self._count = 0

    def alone(self, slo: SLO, seed: int) -> Run:
        """The same run for every SLO under which the server does the same."""
        key = online_behaviour(slo)
        if key not in self._alone:
            self._alone[key] = self.run(slo, None, seed)
        return self._alone[key]

    def run(self, slo: SLO, tier: str | None, seed: int) -> Run:
        @contextmanager
        def serve() -> Iterator[str]:
            with self._profiles() as profiles, self._serve(str(slo), profiles) as url:
                yield url

        settings = {"job_rate": self._job_rate}
        return loads.run_alone(serve, self._rate, self._arrivals, self._seconds, tier, seed, **settings)

    @contextmanager
    def _profiles(self) -> Iterator[Path]:
        kept, inside = self._folder / "cache", Path("tidemill") / "profiles"
        (kept / inside).mkdir(parents=True, exist_ok=True)
        self._count += 1
        mine = shutil.copytree(kept, self._folder / f"arm-{self._count}")
        try:
            yield mine
        finally:
            for path in (mine / inside).glob("*.json"):
                if not path.name.endswith(".load.json"):
                    shutil.copy(path, kept / inside)


def run_steps(
    rates: Sequence[float],
    seconds: float,
    forms: Sequence[str],
    limits: tuple[float, float],
    *,
    seed: int = 1,
    job_rate: float | None = None,
    output: Path | None = None,
    about: str = "",
) -> None:
    """All arms, a table after each form. `job_rate`: tokens/s for which a job has lines. With `output` (a folder) also
    steps.json and steps.md."""
    curve, steps = curve_of(rates, seconds), steps_of(rates, seconds)
    total = steps[-1].end
    arrivals = loads.poisson(curve, total, seed)
    tables, documents = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        live.make_model_folder(folder)

        def serve(slo: str, profiles: Path) -> AbstractContextManager[str]:
            return live.server(folder, 0, "--slo", slo, "--state-dir", str(profiles / "state"), cache=profiles)

        arms = Arms(serve, folder, curve, arrivals, total, job_rate)
        for form in forms:
            slo = slo_of(form, *limits)
            rows = compare(slo, steps, arms.alone(slo, seed), arms.run(slo, JOB, seed))
            tables.append(markdown(form, slo, rows))
            documents.append(document(form, slo, rows))
            print(f"\n{tables[-1]}", flush=True)
            if output is not None:
                output.mkdir(parents=True, exist_ok=True)
                (output / "steps.md").write_text("\n\n".join([about, *tables]) + "\n")
                written = {"about": about, "seed": seed, "step_seconds": seconds, "forms": documents}
                (output / "steps.json").write_text(json.dumps(written, indent=1) + "\n")
